"""`Record`: one stored outcome, and its line of JSON with a checksum."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.core.errors import ConfigError
from planner.core.inputs import number, parse_json
from planner.setup.codec import BadOutcome, Outcome, evidence_to_dict, outcome_from_dict

RECORD_SCHEMA = 1
_TEXTS = ("key", "model_id", "config_digest", "recorded_at")
_OBJECTS = ("setup", "request")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One stored outcome.

    Attributes:
        key: fingerprint of model shape, setup and environment.
        request: the request's JSON without the model's configuration (its digest stands for it).
        recorded_at: ISO time of the writer's clock, informational.
    """

    key: str
    model_id: str
    config_digest: str
    setup: Mapping[str, Any]
    request: Mapping[str, Any] = field(repr=False)
    outcome: Outcome
    recorded_at: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        texts = {name: getattr(self, name) for name in _TEXTS}
        objects = {name: dict(getattr(self, name)) for name in _OBJECTS}
        return {"schema": RECORD_SCHEMA, **texts, **objects, "outcome": evidence_to_dict(self.outcome)}


def record_from_dict(values: Mapping[str, Any]) -> Record:
    """The record that `Record.to_dict` wrote.

    Raises:
        BadOutcome: another schema, or a field that is missing or of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise BadOutcome(f"a record must be an object, got {type(values).__name__}")
    if values.get("schema") != RECORD_SCHEMA:
        raise BadOutcome(f"record schema must be {RECORD_SCHEMA}, got {values.get('schema')!r}")
    try:
        limits = values["request"].get("limits", {})
        number(limits.get("time_s", 0.0), "request.limits.time_s")
        texts: dict[str, Any] = {name: str(values[name]) for name in _TEXTS}
        objects: dict[str, Any] = {name: dict(values[name]) for name in _OBJECTS}
        return Record(**texts, **objects, outcome=outcome_from_dict(values["outcome"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadOutcome(f"record cannot be read: {type(error).__name__}: {error}") from error


def encode_line(record: Record) -> bytes:
    """The record as one line with its checksum."""
    body = json.dumps(record.to_dict(), sort_keys=True, separators=(",", ":"))
    return f'{{"sha256":"{_checksum(body)}","record":{body}}}\n'.encode()


def decode_line(line: bytes) -> Record:
    """The record of one line.

    Raises:
        BadOutcome: not JSON, a wrong checksum, another schema.
    """
    try:
        values = parse_json(line, "line")
        body = json.dumps(values["record"], sort_keys=True, separators=(",", ":"))
        expected = values["sha256"]
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise BadOutcome(f"line is not a stored record: {error}") from error
    if _checksum(body) != expected:
        raise BadOutcome("checksum does not match")
    return record_from_dict(values["record"])


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
