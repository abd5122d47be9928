"""The JSON Schema of answers: what `--json` and `--json=full` print for plan, estimate, check, which-gpu and oom, and
plan.json; made of the types that write and read them.

A field that a type has not yet in the written document's form is an error here, not a gap: the tests validate real
answers. `plan --json-schema` prints it.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from planner.hardware.cluster import Cluster
from planner.memory.workload import Data, Workload
from planner.planning.failures.message import Message, Phase
from planner.planning.plan import NoPlan, Plan
from planner.samples.lengths import OverLengths
from planner.setup import TrainSetup
from planner.setup.interchange import SCHEMA_VERSION
from planner.setup.memory_terms import MemoryTerm
from planner.setup.outcome import Candidate, Measurement, Prediction, ProbeFailure
from reports.brief_json import (
    LEFT_OUT,
    OF_FOLDER,
    TYPES,
    BriefCard,
    BriefChange,
    BriefCheck,
    BriefNotChecked,
    BriefOom,
    BriefWhichGpu,
)
from reports.extras import Extras
from reports.plan_json import DATA_KEYS, LEVEL_KEYS

Schema = dict[str, Any]
_PLAIN: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}
_LISTS_OR_NAMES: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_WRITTEN_AS: dict[str, Schema] = {
    "checkpointing": {"type": ["boolean", "integer"]},
    "lora_targets": _LISTS_OR_NAMES,
    "modules_to_save": _LISTS_OR_NAMES,
    "trained_layers": {"type": ["string", "array", "integer", "null"]},
    "rollout": {"type": ["object", "null"]},
    "images": {"type": ["object", "null"]},
}
"""Fields of a setup that the interchange form writes otherwise than their types say (`planner.setup.interchange`)."""


class _Writer:
    """Schemas of types; of each dataclass once, under `$defs`.

    Args:
        cut: the short form, whose lists may end in how many were left out, and which leaves out nulls and empty parts.
    """

    def __init__(self, *, cut: bool = False) -> None:
        self.cut, self.defs = cut, dict[str, Schema]()

    def of(self, kind: Any) -> Schema:
        """What a value of this type is written as.

        Raises:
            TypeError: a type that JSON has no form of.
        """
        origin, arguments = get_origin(kind), get_args(kind)
        if kind is Any or kind is object:
            return {}
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind is TrainSetup:
            plain, hints = _Writer(), get_type_hints(TrainSetup)
            written = [field.name for field in fields(TrainSetup)]  # those at their defaults may be absent
            return self._named(
                "Setup", _object({name: _WRITTEN_AS.get(name) or plain.of(hints[name]) for name in written})
            )
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.of(argument) for argument in arguments]}
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
            return {"type": "array", "prefixItems": [self.of(argument) for argument in arguments], "items": False}
        if origin in (tuple, list, Sequence):
            return self.array(self.of(arguments[0]))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"enum": [member.value for member in kind]}
        if isinstance(kind, type) and is_dataclass(kind):
            return self._named(kind.__name__, self.record(kind))
        raise TypeError(f"no JSON form of {kind!r}")

    def array(self, items: Schema) -> Schema:
        """A list; in the short form it may say how many more there are."""
        more = {"type": "object", "properties": {LEFT_OUT: _PLAIN[int]}, "required": [LEFT_OUT]}
        return {"type": "array", "items": {"anyOf": [items, more]} if self.cut else items}

    def record(self, kind: Any, *, without: Sequence[str] = (), **also: Schema) -> Schema:
        """An object with a dataclass's fields, less some, and others; those with a default may be absent."""
        hints = get_type_hints(kind, localns={"Cluster": Cluster})
        raw = () if self.cut else ("config",)  # a model's, which `to_jsonable` leaves out
        written = [field for field in fields(kind) if field.name not in (*without, *raw)]
        properties = {field.name: self.of(hints[field.name]) for field in written}
        always = [field.name for field in written if field.default is MISSING and field.default_factory is MISSING]
        if self.cut:
            always = [name for name in always if hints[name] in (int, bool) or get_origin(hints[name]) is Literal]
        properties |= {"schema_version": {"const": SCHEMA_VERSION}} if "schema_version" in properties else {}
        return _object({**properties, **also}, required=list(dict.fromkeys([*always, *also])))

    def _named(self, name: str, schema: Schema) -> Schema:
        self.defs[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def _object(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}


def _level(write: _Writer) -> Schema:
    """One level: every key of LEVEL_KEYS, null where the level does not know."""
    hints = {**get_type_hints(Measurement), **get_type_hints(Prediction)}
    special = {
        "terms": {"type": "object", "additionalProperties": _PLAIN[int]},
        "note_places": write.array(_PLAIN[int]),
        "failure": write.record(ProbeFailure, without=("level", "log_tail")),
        "measured": write.record(Measurement, without=LEVEL_KEYS),
    }
    keys = {key: {"anyOf": [special.get(key) or write.of(hints[key]), {"type": "null"}]} for key in LEVEL_KEYS}
    term = get_type_hints(MemoryTerm)
    row = {
        "type": "array",
        "prefixItems": [write.of(term[name]) for name in ("category", "name", "size_bytes", "phases")],
    }
    rare = {
        "bands": write.of(hints["bands"]),
        "rank_peaks": write.of(hints["rank_peaks"]),
        "term_list": write.array(row),
    }
    return _object({**keys, **rare}, required=LEVEL_KEYS)


def _plan(write: _Writer, kind: type[Plan] | type[NoPlan], workload: Schema, candidate: Schema) -> Schema:
    """`reports.plan_json.plan_to_dict`, with what plan.json holds beside it."""
    hints = get_type_hints(kind)
    properties: dict[str, Schema] = {"schema_version": {"const": SCHEMA_VERSION}, "kind": write.of(hints["kind"])}
    properties |= {"workload": workload, "walk": write.of(hints["tree"]), "space": write.of(hints["space"])}
    properties |= {"notes": write.of(hints["notes"]), "note_places": write.array(_PLAIN[int])}
    if kind is Plan:
        labelled = _object({"label": _PLAIN[str], "trade": _PLAIN[str], "candidate": candidate})
        properties |= {"chosen": candidate, "alternatives": write.array(labelled), "ranked": write.array(candidate)}
        properties["search"] = write.of(hints["search"])
    else:
        properties |= {"nearest": candidate, "missing_bytes": _PLAIN[int], "remedies": write.of(hints["remedies"])}
    extras: dict[str, Schema] = {
        field.name: {} for field in fields(Extras)
    }  # of the reports' own, which nobody else reads
    return _object({**extras, **properties}, required=list(properties))


def _others(write: _Writer, candidate: Schema) -> dict[str, Schema]:
    """What the other commands write with `--json=full`: `reports.plan_json.estimate_to_dict`, `as_document` of
    `finetune_planner.cli.checking`, `reports.which.GpusSheet.document`, and `plan oom`."""
    text, number, share = (_PLAIN[kind] for kind in (str, int, float))
    head: dict[str, Schema] = {"schema_version": {"const": SCHEMA_VERSION}, "kind": {"const": "estimate"}}
    estimate: dict[str, Schema] = {**head, **write.defs["Candidate"]["properties"]}
    over = write.record(OverLengths, fragmentation_fraction=share)
    change = {"fields": {"type": "object"}, "saves_bytes": number, "speedup": share, "in_place": _PLAIN[bool]}
    changes = write.array(write.record(BriefChange, without=(), **change))
    check = dict.fromkeys(("level", "speed_level"), text) | {"memory_band_fraction": share}
    check |= dict.fromkeys(("exit_code", "budget_bytes", "margin_bytes"), number)
    check |= {"memory_band": write.of(tuple[float, float]), "prediction": write.of(Prediction)}
    check |= {"origins": write.of(Mapping[str, str])}
    card = {name: write.of(int | None) for name in ("speed_place", "cost_place")}
    card |= {name: write.of(str | None) for name in ("price_source", "price_date")}
    cards = write.array(write.record(BriefCard, without=("peak_device_bytes", "setup"), candidate=candidate, **card))
    otherwise = ("where", "tried_bytes", "allocated_bytes", "total_bytes", "phase", "check")
    oom = {"message": write.of(Message), "phase": write.of(Phase | None), "config": write.of(str | None)}
    oom["check"] = {"anyOf": [{"$ref": "#/$defs/Check"}, _PLAIN[type(None)]]}
    return {
        "Estimate": _object({"cluster": {"type": "object"}, "over_lengths": over, **estimate}, required=list(estimate)),
        "Check": write.record(BriefCheck, without=("memory", "speed", "changes"), changes=changes, **check),
        "NotChecked": write.record(BriefNotChecked),
        "WhichGpu": write.record(BriefWhichGpu, without=("cards",), cards=cards),
        "Oom": write.record(BriefOom, without=otherwise, **oom),
    }


def answer_schema(*, whole: bool = True) -> Schema:
    """The schema of the short answers (`--json`), and with `whole` of the whole ones (`--json=full`, plan.json)."""
    write, short = _Writer(), _Writer(cut=True)
    answers = [*map(short.of, TYPES), short.array({"anyOf": list(map(short.of, OF_FOLDER))})]
    if whole:
        candidate: Schema = {"$ref": "#/$defs/Candidate"}
        # as `reports.plan_json.candidate_to_dict` writes it
        write.of(TrainSetup)
        write.defs["Level"] = _level(write)
        setup = write.defs["Setup"]
        named = _object({"model": _PLAIN[str], "gpu": _PLAIN[str], **setup["properties"]}, required=["model", "gpu"])
        level: Schema = {"$ref": "#/$defs/Level"}
        levels = {name: {"anyOf": [level, {"type": "null"}]} for name in ("dry_run", "trace", "probe", "run")}
        properties = {"setup": named, "fits": _PLAIN[bool], "budget_bytes": _PLAIN[int], "formula": level, **levels}
        assert set(properties) == {"fits", *(field.name for field in fields(Candidate))}
        write.defs["Candidate"] = _object(properties, required=list(properties))
        data = get_type_hints(Data)  # as `reports.plan_json.workload_to_dict` writes it
        flat = {key: write.of(data[name]) for key, name in DATA_KEYS.items()}
        write.defs["Workload"] = write.record(Workload, without=("data",), budget_bytes=_PLAIN[int], **flat)
        write.defs["ModelSpec"]["properties"]["num_params"] = _PLAIN[int]
        workload = {"$ref": "#/$defs/Workload"}
        write.defs["Plan"] = _plan(write, Plan, workload, candidate)
        write.defs["NoPlan"] = _plan(write, NoPlan, workload, candidate)
        others = _others(write, candidate)
        write.defs |= others
        references: dict[str, Schema] = {name: {"$ref": f"#/$defs/{name}"} for name in ("Plan", "NoPlan", *others)}
        of_folder = [references["Check"], references.pop("NotChecked")]
        answers += [*references.values(), write.array({"anyOf": of_folder})]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:finetune-planner:answer:{SCHEMA_VERSION}",
        "title": "Answers of plan, estimate, check, which-gpu, oom: --json, and whole --json=full, plan.json",
        "anyOf": answers,
        "$defs": dict(sorted({**write.defs, **short.defs}.items())),  # the short form of what both hold takes either
    }
