"""Measurements and failures as JSON and back: the form a probe's child writes, the store keeps and Slurm carries."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from planner.interchange import to_jsonable
from planner.outcome import Environment, FailureKind, Measurement, ProbeFailure, Rung

Outcome = Measurement | ProbeFailure
OUTCOME_SCHEMA = 1

_MEASUREMENT = "measurement"
_FAILURE = "failure"
_MEASUREMENT_FIELDS = tuple(field.name for field in fields(Measurement))


class BadOutcome(ValueError):
    """A JSON value that is no outcome of this schema."""


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """One outcome as JSON values, tagged with its kind and schema."""
    tag = _MEASUREMENT if isinstance(outcome, Measurement) else _FAILURE
    return {"schema": OUTCOME_SCHEMA, "outcome": tag, **to_jsonable(outcome)}


def outcome_from_dict(values: Mapping[str, Any]) -> Outcome:
    """The outcome that `outcome_to_dict` wrote.

    Raises:
        BadOutcome: another schema, an unknown tag, or a field that is missing or of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise BadOutcome(f"an outcome must be an object, got {type(values).__name__}")
    if values.get("schema") != OUTCOME_SCHEMA:
        raise BadOutcome(f"outcome schema must be {OUTCOME_SCHEMA}, got {values.get('schema')!r}")
    try:
        if values["outcome"] == _FAILURE:
            return ProbeFailure(
                rung=Rung(values["rung"]),
                kind=FailureKind(values["kind"]),
                message=str(values["message"]),
                log_path=values.get("log_path"),
            )
        if values["outcome"] == _MEASUREMENT:
            return _measurement(values)
    except (KeyError, TypeError, ValueError) as error:
        raise BadOutcome(f"outcome cannot be read: {type(error).__name__}: {error}") from error
    raise BadOutcome(f"outcome must be {_MEASUREMENT!r} or {_FAILURE!r}, got {values['outcome']!r}")


def _measurement(values: Mapping[str, Any]) -> Measurement:
    known = {name: values[name] for name in _MEASUREMENT_FIELDS if name in values}
    times = tuple(float(time_s) for time_s in values["step_times_s"])
    if not times:
        raise BadOutcome("step_times_s must hold at least one step, got none")
    known["rung"] = Rung(values["rung"])
    known["step_times_s"] = times
    known["environment"] = environment_from_dict(values["environment"])
    known["phase_peaks_bytes"] = {str(k): int(v) for k, v in values["phase_peaks_bytes"].items()}
    known["layers_measured"] = tuple(int(depth) for depth in values["layers_measured"])
    known["rank_peaks"] = tuple((str(name), int(num), int(size)) for name, num, size in values.get("rank_peaks", ()))
    for name in ("flags", "notes"):
        known[name] = tuple(str(item) for item in values.get(name, ()))
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "tokens_per_step"):
        known[name] = int(values[name])
    return Measurement(**known)


def environment_from_dict(values: Mapping[str, Any]) -> Environment:
    """An `Environment` from its JSON form; unknown keys are ignored (a newer writer)."""
    known = {field.name for field in fields(Environment)}
    return Environment(**{name: value for name, value in values.items() if name in known})
