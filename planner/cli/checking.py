"""One file for `plan check`: read, its model and GPU resolved, predicted; its answer as JSON, its fixed text."""

import shlex
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import UsageError
from planner.hardware.gpus import find_gpu
from planner.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.check import CheckResult, Improved
    from planner.hardware.cluster import Cluster
    from planner.hardware.gpu import GpuSpec
    from planner.models.spec import ModelSpec
    from planner.readers import ReadConfig
    from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says about a file.

    Attributes:
        sets: fields of the setup; arguments: words of the program's command line; versions: package -> version.
        strict: whether unknown settings are errors.
    """

    sets: "Mapping[str, Any]" = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    versions: "Mapping[str, str]" = field(default_factory=dict)
    strict: bool = False

    @classmethod
    def of(cls, sets: list[str] | None, arguments: str | None, assume: list[str] | None, *, strict: bool) -> "Asked":
        """From the options.

        Raises:
            UsageError: one that makes no sense.
        """
        from planner.readers.supply import parse_sets, parse_versions

        try:
            words = tuple(shlex.split(arguments)) if arguments is not None else None
        except ValueError as error:
            raise UsageError(f"--args cannot be taken apart: {error}", hint="close every quote") from error
        return cls(sets=parse_sets(sets or ()), arguments=words, versions=parse_versions(assume or ()), strict=strict)


def load(
    file: Path,
    gpu: str,
    *,
    model: str | None = None,
    num_gpus: int = 1,
    accelerate: Path | None = None,
    asked: Asked | None = None,
) -> "tuple[ReadConfig, ModelSpec, GpuSpec]":
    """A config with its model and GPU resolved.

    The file is read twice: once for the model's name, then with the model's modules and data types at hand.

    Raises:
        ConfigError, UnknownModelError, UnknownGpuError: each with a hint.
    """
    from dataclasses import replace

    from planner.models.earlier import of_transformers_4
    from planner.readers.supply import determined

    asked = asked or Asked()
    card = find_gpu(gpu)

    def read(spec: "ModelSpec | None") -> "ReadConfig":
        return _read(file, spec, card, model, num_gpus, accelerate, asked)

    first = determined(_named(read(None), model, file.name))
    _refuse_strangers(first, asked, file.name)
    name = model or first.model_id
    assert name is not None
    built, copy_of = _resolved(name)
    spec = of_transformers_4(built) if first.older else built
    modules = ""
    if spec is not built:
        modules = f"{first.older}: experts are modules of their own there, which are quantized; no dry run builds them"
    config = determined(read(spec))
    other_gpus = other_model = ""
    if num_gpus not in (1, config.setup.num_gpus):
        other_gpus = f"the launch config starts {config.setup.num_gpus} processes: --gpus {num_gpus} is not followed"
    if model is not None and first.model_id not in (None, model):
        other_model = f"planned for {model} (--model); the file names {first.model_id}"
    said = tuple(sentence for sentence in (copy_of, other_model, other_gpus, modules) if sentence)
    model_id = config.model_id if model is None else spec.model_id
    return replace(config, model_id=model_id, assumptions=(*said, *config.assumptions)), spec, card


def _read(
    file: Path,
    spec: "ModelSpec | None",
    card: "GpuSpec",
    model: str | None,
    num_gpus: int,
    accelerate: Path | None,
    asked: Asked,
) -> "ReadConfig":
    """The file with what the command line says of it; a model is not asked for where one is named."""
    from dataclasses import replace

    from planner.readers import read_config
    from planner.readers.supply import supply

    found = read_config(
        file,
        model=spec,
        num_gpus=num_gpus,
        launcher=accelerate,
        gpu=card,
        arguments=asked.arguments,
        versions=asked.versions,
    )
    found = supply(found, asked.sets)
    named = model or found.model_id
    return replace(found, missing=tuple(one for one in found.missing if one.field != "model" or not named))


def _named(found: "ReadConfig", model: str | None, file: str) -> "ReadConfig":
    """The reading, with the model among what is missing where nobody names one."""
    from dataclasses import replace

    from planner.readers.types import Missing

    if model or found.model_id or any(one.field == "model" for one in found.missing):
        return found
    return replace(found, missing=(Missing(field="model", reason=f"{file} names none"), *found.missing))


def _refuse_strangers(found: "ReadConfig", asked: Asked, file: str) -> None:
    """Refuses settings that the tool does not know, where that was asked for.

    Raises:
        ConfigError: with their names.
    """
    from planner.errors import ConfigError

    if asked.strict and found.unknown_keys:
        raise ConfigError(
            f"{file}: {found.format} has no setting {', '.join(found.unknown_keys)}",
            hint="remove them, or leave --strict out",
        )


def _resolved(name: str) -> "tuple[ModelSpec, str]":
    """(the model, what was taken for it): a name that is nowhere at hand may be a copy of the catalogue's.

    Raises:
        UnknownModelError: it is none.
    """
    from planner.errors import UnknownModelError
    from planner.models import catalogue
    from planner.models.resolve import resolve_model

    try:
        return resolve_model(name), ""
    except UnknownModelError:
        found = catalogue.load(name.rpartition("/")[2]) if "/" in name else None
        if found is None:
            raise
        return found, f"{name} is not at hand: taken to be a copy of {found.model_id}"


def fixed_text(
    file: Path,
    config: "ReadConfig",
    found: "Improved",
    spec: "ModelSpec",
    accelerate: Path | None = None,
    *,
    card: "GpuSpec | None" = None,
    asked: Asked | None = None,
) -> str:
    """The file's text with the setup's changes written in, proven by reading it back.

    Raises:
        ConfigError: the file's form does not allow it.
    """
    from planner.errors import ConfigError
    from planner.readers import Sharding, canonical, read_text
    from planner.readers.loading import read_bounded
    from planner.readers.read import pinned, roots_of
    from planner.readers.rewrite import rewrite
    from planner.readers.supply import supply

    setup, edits = found.setup, edits_of(config, found)
    text = rewrite(read_bounded(file), file.name, edits, call_line=config.call_line)
    asked = asked or Asked()
    sharding = Sharding(
        num_gpus=setup.num_gpus,
        roots=roots_of(file),
        gpu=card,
        arguments=asked.arguments,
        versions={**pinned(file), **asked.versions},
    )
    launcher = read_bounded(accelerate) if accelerate is not None else None
    back = supply(read_text(text, file.name, model=spec, base=setup, sharding=sharding, launcher=launcher), asked.sets)
    if canonical(back.setup) != canonical(setup) or (found.eval_seqs and back.eval_seqs != found.eval_seqs):
        raise ConfigError(
            f"{file.name} is written in a form that --fix cannot change safely",
            hint="make the changes that plan check lists by hand",
        )
    return text


def edits_of(config: "ReadConfig", found: "Improved") -> dict[str, Any]:
    """The settings (nested ones dotted) that make a file say what was found for it.

    Raises:
        ConfigError: a field that cannot be changed in place.
    """
    from planner.readers.evaluating import HOW_MANY
    from planner.tools import tool_of

    edits = tool_of(config.format).edits(config.keys, config.setup, found.setup, config.path)
    return edits | ({HOW_MANY[config.format][0]: found.eval_seqs} if found.eval_seqs else {})


def by_hand(config: "ReadConfig", found: "Improved") -> list[str]:
    """The settings that would make a file say a changed setup, with where each stands today: for a person to write."""
    from planner.tools import tool_of
    from planner.tools.field import changed_fields

    tool = tool_of(config.format)
    places = {
        config.keys.get(of, field.key): config.origins[of]
        for of in changed_fields(config.setup, found.setup)
        if (field := tool.field(of)) is not None and of in config.origins
    }
    edits = edits_of(config, found)
    return [f"{key}: {value}" + (f" (now {places[key]})" if key in places else "") for key, value in edits.items()]


def predictor(spec: "ModelSpec", card: "GpuSpec", cluster: "Cluster | None" = None) -> Any:
    """The formula for setups of one model on one card."""
    from planner.predict import predict

    return lambda setup: predict(spec, card, setup, cluster)


def corrected(predict: Any, setup: "TrainSetup", spec: "ModelSpec", card: "GpuSpec", memory_bytes: int) -> Any:
    """The formula corrected by a dry run of the config: its own figures for the config itself, and for changed setups
    the formula's peak times what the dry run found over it. The formula alone where no dry run is possible."""
    from dataclasses import replace

    from planner.app.climb import dry_run_possible, with_dry_run
    from planner.models.earlier import built_by_transformers_4
    from planner.outcome import Candidate, Prediction

    formula = predict(setup)
    if dry_run_possible() or built_by_transformers_4(spec):
        return predict
    candidate = Candidate(setup=setup, budget_bytes=0, formula=formula)
    dry = with_dry_run(candidate, spec, card, memory_bytes=memory_bytes).dry_run
    if not isinstance(dry, Prediction):
        return predict
    own = replace(
        dry,
        step_time_s=dry.step_time_s or formula.step_time_s,
        tokens_per_s=dry.tokens_per_s or formula.tokens_per_s,
    )
    ratio = dry.peak_device_bytes / formula.peak_device_bytes

    def corrected(changed: "TrainSetup") -> Prediction:
        if changed == setup:
            return own
        plain: Prediction = predict(changed)
        return replace(plain, peak_device_bytes=round(plain.peak_device_bytes * ratio))

    return corrected


def as_document(result: "CheckResult", fixed: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON form of a check."""
    from planner.interchange import SCHEMA_VERSION, setup_to_dict, to_jsonable

    prediction = result.prediction
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "check",
        "file": result.config.path,
        "format": result.config.format,
        "model": result.config.model_id,
        "gpu": result.gpu.key,
        "setup": setup_to_dict(result.config.setup),
        "verdict": result.verdict.value,
        "exit_code": result.exit_code,
        "rung": prediction.rung.value,
        "budget_bytes": result.budget_bytes,
        "margin_bytes": result.margin_bytes,
        "memory_band_fraction": result.band_fraction,
        "prediction": to_jsonable(prediction),
        "origins": dict(result.config.origins),
        "unknown_keys": list(result.config.unknown_keys),
        "assumptions": list(result.config.assumptions),
        "approximations": list(result.config.approximations),
        "notes": list(result.notes),
        "changes": [
            {
                "label": one.label,
                "fields": {name: to_jsonable(getattr(one.setup, name)) for name in one.fields},
                "verdict": one.verdict.value,
                "saves_bytes": one.saves_bytes,
                "speedup": one.speedup,
                "changes_training": one.changes_training,
                "in_place": one.in_place,
                "peak_device_bytes": one.prediction.peak_device_bytes,
                "tokens_per_s": one.prediction.tokens_per_s,
            }
            for one in result.changes
        ],
        "fix": fixed,
    }
