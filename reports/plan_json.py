"""plan.json: a plan as data, and back. Every report is built from it alone.

Each candidate has the interchange form with the same keys on every level; `fits` and the figures are base units.
"""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from planner.core.errors import ConfigError
from planner.core.inputs import parse_object, read_bytes
from planner.core.notes import placed, places
from planner.core.redaction import without_secrets
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.memory.workload import Data, Workload
from planner.models.spec import ModelSpec
from planner.options.images import Images
from planner.options.rollouts import Rollout
from planner.planning.plan import Alternative, Answer, NoPlan, Plan, SpaceCount, Suggestion
from planner.setup.codec import decode
from planner.setup.interchange import SCHEMA_VERSION, request_form, setup_from_dict, to_jsonable
from planner.setup.memory_terms import PHASES
from planner.setup.outcome import Candidate, Measurement, Prediction, ProbeFailure

if TYPE_CHECKING:
    from planner.samples.lengths import OverLengths

MAX_PLAN_JSON_BYTES = 256 * 1024**2
"""A larger file is not one that this program wrote."""

LEVEL_KEYS = (
    "level",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_device_bytes",
    "step_time_s",
    "tokens_per_s",
    "terms",
    "peak_phase",
    "phase_peaks_bytes",
    "memory_band_fraction",
    "time_band_fraction",
    "mfu_fraction",
    "time_parts_s",
    "notes",
    "note_places",
    "failure",
    "measured",
)
"""What every level says, null where it does not know. `terms` are bytes per category at the peak."""


DATA_KEYS = {
    "dataset_tokens": "epoch_tokens",
    "epoch_seqs": "epoch_seqs",
    "samples_per_seq": "samples_per_seq",
    "real_fractions": "real_fractions",
    "dataset": "file",
    "num_samples": "num_samples",
    "dataset_columns": "names",
    "dataset_kind": "kind",
    "loss_on": "loss_on",
    "answers_fraction": "answers_fraction",
    "held_out_samples": "held_out",
}
"""What stands beside the workload's other keys -> field of `Data`."""


def level_to_dict(evidence: Prediction | Measurement | ProbeFailure, *, detail: bool = False) -> dict[str, Any]:
    """One level's answer with LEVEL_KEYS; with `detail` also the single terms, as [category, name, bytes, phases]."""
    values: dict[str, Any] = dict.fromkeys(LEVEL_KEYS) | {"terms": {}, "notes": [], "note_places": []}
    named = [key for key in LEVEL_KEYS if key != "terms" and hasattr(evidence, key)]
    values |= {key: to_jsonable(getattr(evidence, key)) for key in named}
    if isinstance(evidence, ProbeFailure):
        failure = {"kind": evidence.kind.value, "message": evidence.message, "log_path": evidence.log_path}
        return values | {"failure": failure}
    values["note_places"] = places(evidence.notes)
    if isinstance(evidence, Measurement):
        measured = {name: value for name, value in to_jsonable(evidence).items() if name not in LEVEL_KEYS}
        return values | {"measured": measured}
    for term in evidence.terms:
        values["terms"][term.category] = values["terms"].get(term.category, 0) + term.size_bytes
    values |= {name: to_jsonable(value) for name in ("bands", "rank_peaks") if (value := getattr(evidence, name))}
    if detail:
        values["term_list"] = [
            [term.category, term.name, term.size_bytes, list(term.phases)] for term in evidence.terms
        ]
    return values


def candidate_to_dict(candidate: Candidate, model_id: str, gpu_key: str, *, detail: bool = False) -> dict[str, Any]:
    """One candidate in the interchange form: setup, fits, budget and the levels."""
    levels = {name: getattr(candidate, name) for name in ("formula", "dry_run", "trace", "probe", "run")}
    return {
        "setup": {"model": model_id, "gpu": gpu_key, **request_form(candidate.setup)},
        "fits": candidate.fits,
        "budget_bytes": candidate.budget_bytes,
        **{
            name: None if evidence is None else level_to_dict(evidence, detail=detail)
            for name, evidence in levels.items()
        },
    }


def estimate_to_dict(
    candidate: Candidate,
    model_id: str,
    gpu_key: str,
    *,
    cluster: Cluster | None = None,
    over: "OverLengths | None" = None,
) -> dict[str, Any]:
    """The answer of `plan estimate`: a candidate with its single terms, the links between its GPUs, and memory over
    varying lengths."""
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "estimate"}
    document |= candidate_to_dict(candidate, model_id, gpu_key, detail=True)
    if cluster is not None:
        between = None if cluster.between is None else cluster.between.key
        document["cluster"] = {"num_nodes": cluster.num_nodes, "within": cluster.within.key, "between": between}
    if over is not None:
        document["over_lengths"] = to_jsonable(over) | {"fragmentation_fraction": over.fragmentation_fraction}
    return document


def workload_to_dict(workload: Workload) -> dict[str, Any]:
    """The request, with the model's inventory and the GPU's facts, so that a report needs nothing else."""
    values: dict[str, Any] = to_jsonable(workload)
    data = values.pop("data")
    values |= {key: data[name] for key, name in DATA_KEYS.items()} | {"dataset": without_secrets(data["file"])}
    values["budget_bytes"] = workload.budget_bytes
    values["model"]["num_params"] = workload.model.num_params
    return values


def plan_to_dict(plan: Plan | NoPlan, *, extras: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The whole answer as JSON values: `plan --json` and plan.json are the same.

    `extras`: what the caller adds for the reports, by the keys of `reports.extras.EXTRA_KEYS`.
    """
    model_id, gpu_key = plan.workload.model.model_id, plan.workload.gpu.key

    to_dict = partial(candidate_to_dict, model_id=model_id, gpu_key=gpu_key)
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": plan.kind,
        "workload": workload_to_dict(plan.workload),
    }
    if isinstance(plan, Plan):
        values["chosen"] = to_dict(plan.chosen, detail=True)
        values["alternatives"] = [
            {"label": each.label, "trade": each.trade, "candidate": to_dict(each.candidate, detail=True)}
            for each in plan.alternatives
        ]
        values["ranked"] = [to_dict(candidate) for candidate in plan.ranked]
        values["search"] = to_jsonable(plan.search)
    else:
        values["nearest"] = to_dict(plan.nearest, detail=True)
        values["missing_bytes"] = plan.missing_bytes
        values["suggestions"] = to_jsonable(plan.suggestions)
    values["walk"], values["space"] = to_jsonable(plan.tree), to_jsonable(plan.space)  # "walk": as in schema 1
    values["notes"], values["note_places"] = list(plan.notes), places(plan.notes)
    values.update(extras or {})
    return values


def plan_from_dict(document: Mapping[str, Any]) -> Plan | NoPlan:
    """The plan back from plan.json. Equal to what was written, but for the single terms of ranked candidates.

    Raises:
        ConfigError: not a plan, or one of another schema.
    """
    if not isinstance(document, Mapping) or document.get("kind") not in ("plan", "no_plan"):
        raise ConfigError("this is not a plan.json", hint="give a directory that `plan ... --out DIR` wrote")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"plan.json has schema version {document.get('schema_version')!r}, expected {SCHEMA_VERSION}",
            hint="write the plan anew with this version",
        )
    try:
        return _plan(document)
    except KeyError as error:
        raise ConfigError(
            f"plan.json lacks {error.args[0]!r}", hint="the file was changed by hand, or damaged"
        ) from error
    except (TypeError, AttributeError, IndexError, ValueError) as error:
        raise ConfigError(f"plan.json is damaged: {error}", hint="write the plan anew") from error


def read_plan_json(path: Path) -> dict[str, Any]:
    """The document in `path` (a plan.json, or a directory that holds one).

    Raises:
        ConfigError: missing, too large, or not JSON.
    """
    path = path / "plan.json" if path.is_dir() else path
    if not os.path.lexists(path):
        raise ConfigError(f"no plan.json at {path}", hint="write one with: plan MODEL --gpu GPU --out DIR")
    hint = "give a directory that `plan ... --out DIR` wrote, or write the plan anew"
    return parse_object(read_bytes(path, max_bytes=MAX_PLAN_JSON_BYTES, hint=hint), str(path), hint=hint)


def _plan(document: Mapping[str, Any]) -> Plan | NoPlan:
    shared: dict[str, Any] = {
        "workload": _workload(document["workload"]),
        "tree": decode(tuple[Answer, ...], document["walk"], "walk"),
        "space": decode(SpaceCount, document["space"], "space"),
        "notes": _notes(document),
    }
    if document["kind"] == "no_plan":
        return NoPlan(
            nearest=candidate_from_dict(document["nearest"]),
            missing_bytes=decode(int, document["missing_bytes"], "missing_bytes"),
            suggestions=decode(tuple[Suggestion, ...], document["suggestions"], "suggestions"),
            **shared,
        )
    return Plan(
        chosen=candidate_from_dict(document["chosen"]),
        alternatives=tuple(
            Alternative(
                label=decode(str, alternative["label"], "label"),
                trade=decode(str, alternative["trade"], "trade"),
                candidate=candidate_from_dict(alternative["candidate"]),
            )
            for alternative in document["alternatives"]
        ),
        ranked=tuple(candidate_from_dict(candidate) for candidate in document["ranked"]),
        search=decode(dict[str, Any], document.get("search", {}), "search"),
        **shared,
    )


def _notes(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The notes of an answer or of a level, with their places."""
    notes = decode(tuple[str, ...], values["notes"], "notes")
    return placed(notes, decode(tuple[int, ...], values["note_places"], "note_places"))


def _choice(name: str, choice: Any) -> Any:
    """A value of a setup's field as it is there: names as tuples, records whole."""
    if isinstance(choice, dict):
        return decode({"images": Images, "rollout": Rollout}[name], choice, f"workload.fixed.{name}")
    return tuple(choice) if isinstance(choice, list) else choice


def _workload(values: Mapping[str, Any]) -> Workload:
    clean = {key: value for key, value in values.items() if key != "budget_bytes"}
    model = {key: value for key, value in clean.pop("model").items() if key != "num_params"}
    fixed = {key: tuple(_choice(key, choice) for choice in items) for key, items in clean.pop("fixed").items()}
    gpu = clean.pop("gpu")
    data = {name: clean.pop(key) for key, name in DATA_KEYS.items() if key in clean}
    plain = {
        name: decode(kind, clean[name], f"workload.{name}") for name, kind in _WORKLOAD_FIELDS.items() if name in clean
    }
    return Workload(
        model=decode(ModelSpec, model, "workload.model"),
        gpu=decode(GpuSpec, gpu, "workload.gpu"),
        data=decode(Data, data, "workload"),
        fixed=fixed,
        **plain,
    )


_WORKLOAD_FIELDS: dict[str, Any] = {
    name: hint
    for name, hint in get_type_hints(Workload, localns={"Cluster": Cluster}).items()
    if name not in ("model", "gpu", "fixed", "data")
}


def candidate_from_dict(values: Mapping[str, Any]) -> Candidate:
    setup = {key: value for key, value in values["setup"].items() if key not in ("model", "gpu")}
    formula = level_from_dict(values["formula"])
    if not isinstance(formula, Prediction):
        raise ConfigError("the formula level of a candidate must hold a prediction")
    dry_run, trace, probe, run = (
        None if (level := values[name]) is None else level_from_dict(level)
        for name in ("dry_run", "trace", "probe", "run")
    )
    if isinstance(dry_run, Measurement) or isinstance(trace, Measurement):
        raise ConfigError("dry run and trace predict; this candidate says otherwise")
    if isinstance(probe, Prediction) or isinstance(run, Prediction):
        raise ConfigError("a probe and a run measure; this candidate says otherwise")
    return Candidate(
        setup=setup_from_dict(setup),
        budget_bytes=decode(int, values["budget_bytes"], "budget_bytes"),
        formula=formula,
        dry_run=dry_run,
        trace=trace,
        probe=probe,
        run=run,
    )


def level_from_dict(values: Mapping[str, Any]) -> Prediction | Measurement | ProbeFailure:
    if values["failure"] is not None:
        return decode(ProbeFailure, {"level": values["level"], **values["failure"]}, "failure")
    kind: type[Prediction | Measurement] = Prediction if values["measured"] is None else Measurement
    figures = {field.name: values[field.name] for field in fields(kind) if field.name in LEVEL_KEYS}
    if kind is Measurement:
        return decode(Measurement, {**figures, **values["measured"]}, "probe")
    figures["terms"] = [
        {"category": category, "name": name, "size_bytes": size, "phases": phases}
        for category, name, size, phases in values.get("term_list")
        or ([name, name, size, list(PHASES)] for name, size in values["terms"].items())
    ]
    figures |= {name: values[name] for name in ("bands", "rank_peaks") if name in values}
    return replace(decode(Prediction, figures, str(values["level"])), notes=_notes(values))
