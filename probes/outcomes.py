"""Measurements and failures as JSON and back: the form a probe's child writes, the store keeps and Slurm carries."""

from collections.abc import Mapping
from typing import Any

from planner.interchange import to_jsonable
from planner.measurement_json import measurement_from_dict
from planner.outcome import FailureKind, Measurement, ProbeFailure, Rung

Outcome = Measurement | ProbeFailure
OUTCOME_SCHEMA = 1

_MEASUREMENT = "measurement"
_FAILURE = "failure"


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
                log_path=None if values.get("log_path") is None else str(values["log_path"]),
            )
        if values["outcome"] == _MEASUREMENT:
            return measurement_from_dict(values)
    except (KeyError, TypeError, ValueError) as error:
        raise BadOutcome(f"outcome cannot be read: {type(error).__name__}: {error}") from error
    raise BadOutcome(f"outcome must be {_MEASUREMENT!r} or {_FAILURE!r}, got {values['outcome']!r}")
