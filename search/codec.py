"""Evidence to and from JSON, for the study's trials. Only data: nothing that is read back can run."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from planner.errors import ConfigError
from planner.inputs import parse_json
from planner.interchange import to_jsonable
from planner.measurement_json import measurement_from_dict, number, whole
from planner.memory.types import MemoryTerm
from planner.outcome import Evidence, FailureKind, Measurement, Prediction, ProbeFailure, Rung

_KINDS: dict[str, type[Evidence]] = {
    "measurement": Measurement,
    "prediction": Prediction,
    "failure": ProbeFailure,
}


def evidence_to_json(evidence: Evidence) -> str:
    """One line of JSON."""
    kind = next(name for name, type_ in _KINDS.items() if isinstance(evidence, type_))
    return json.dumps({"evidence": kind, **to_jsonable(evidence)}, sort_keys=True)


def evidence_from_json(text: str) -> Evidence:
    """The evidence that `evidence_to_json` wrote; keys of later versions are ignored.

    Raises:
        ValueError: not such a text.
    """
    try:
        data = parse_json(text, "evidence")
    except ConfigError as error:
        raise ValueError(error.message) from error
    if not isinstance(data, dict) or not isinstance(data.get("evidence"), str) or data["evidence"] not in _KINDS:
        raise ValueError(f"not the JSON of a measurement, prediction or failure: {text[:80]!r}")
    type_ = _KINDS[data["evidence"]]
    if type_ is Measurement:
        return measurement_from_dict(data)
    try:
        values = {field.name: _value(field.name, data[field.name]) for field in fields(type_) if field.name in data}
        return type_(**values)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"incomplete {data['evidence']}: {error}") from error


def _value(name: str, value: Any) -> Any:
    """One field in its own type."""
    if name == "rung":
        return Rung(value)
    if name == "kind":
        return FailureKind(value)
    if name.endswith("_bytes") and name != "phase_peaks_bytes":
        return whole(value, name)
    if name.endswith("_fraction") or name in ("tokens_per_s", "step_time_s"):
        return None if value is None else number(value, name, least=0.0)
    if name == "message":
        return str(value)
    if name == "terms":
        return tuple(_term(item) for item in value)
    return tuple(value) if isinstance(value, list) else value


def _term(value: Mapping[str, Any]) -> MemoryTerm:
    return MemoryTerm(
        category=value["category"], name=value["name"], size_bytes=value["size_bytes"], phases=tuple(value["phases"])
    )
