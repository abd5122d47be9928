"""Frozen dataclasses back from JSON values, by their type hints; and the one form in which evidence is kept.

`decode` is the reverse of `planner.setup.interchange.to_jsonable`; one decoder is built per type, once: a plan.json
holds hundreds of thousands of values. Evidence (a measurement, a prediction, a failure) has the same JSON in a probe's
result, in the store, in a study's trials and in what Slurm carries: a tag, a version, and its fields.
"""

import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from planner.core.errors import ConfigError, SetupError
from planner.core.inputs import number, parse_json, whole
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, to_jsonable
from planner.setup.outcome import Evidence, Measurement, Prediction, ProbeFailure

T = TypeVar("T")
Decoder = Callable[[Any], Any]


class _TypeMismatch(Exception):
    """A value that does not fit its type; the path to it grows while the error rises."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []


def decode(kind: type[T], value: Any, where: str = "", *, newer: bool = False) -> T:
    """`value` (JSON) as a `kind`; absent fields take their defaults, unknown fields are an error.

    Args:
        newer: whether a later version may have written it, whose unknown fields are left out.

    Raises:
        ConfigError: a wrong type or a missing field, with the path to it.
    """
    try:
        decoded: T = _decoder(cast(Hashable, kind), newer)(value)
    except _TypeMismatch as misfit:
        path = "".join(reversed(misfit.path))
        hint = "the file was changed by hand, or damaged"
        raise ConfigError(f"{where or kind.__name__}{path}: {misfit.problem}", hint=hint) from misfit
    return decoded


@cache
def _decoder(kind: Any, newer: bool) -> Decoder:
    if kind is Any or kind is object:
        return lambda value: value
    if kind is TrainSetup:
        return _setup
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(
            [_decoder(argument, newer) for argument in arguments if argument is not type(None)], type(None) in arguments
        )
    if origin is Literal:
        return _one_of({literal: literal for literal in arguments}, " or ".join(map(repr, arguments)))
    if origin is tuple:
        endless = len(arguments) == 2 and arguments[1] is Ellipsis
        return _tuple([_decoder(argument, newer) for argument in arguments if argument is not Ellipsis], endless)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_decoder(arguments[1], newer))
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, newer)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _one_of({member.value: member for member in kind}, f"a {kind.__name__}")
    return _plain(kind)


def _plain(kind: Any) -> Decoder:
    # bool is an int to Python, never to JSON; a float may be written without a point.
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)

    def plain(value: Any) -> Any:
        if type(value) not in accepted:
            raise _mismatch(value, f"a {kind.__name__}")
        return float(value) if kind is float else value

    return plain


def _setup(value: Any) -> TrainSetup:
    if not isinstance(value, dict):
        raise _mismatch(value, "an object")
    try:
        return setup_from_dict(value)
    except SetupError as error:
        raise _TypeMismatch(error.message) from error


def _union(options: list[Decoder], optional: bool) -> Decoder:
    def union(value: Any) -> Any:
        if value is None and optional:
            return None
        for option in options[:-1]:
            try:
                return option(value)
            except _TypeMismatch:
                continue
        return options[-1](value)

    return union


def _one_of(allowed: Mapping[Any, Any], words: str) -> Decoder:

    def one_of(value: Any) -> Any:
        if not isinstance(value, (str, int)) or value not in allowed:
            raise _mismatch(value, words)
        return allowed[value]

    return one_of


def _tuple(items: list[Decoder], endless: bool) -> Decoder:
    def several(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _mismatch(value, "a list")
        if not endless and len(value) != len(items):
            raise _mismatch(value, f"{len(items)} items")
        decoded: list[Any] = []
        try:
            for number, item in enumerate(value):
                decoded.append(items[0 if endless else number](item))
        except _TypeMismatch as misfit:
            misfit.path.append(f"[{len(decoded)}]")
            raise
        return tuple(decoded)

    return several


def _mapping(item: Decoder) -> Decoder:
    def mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _mismatch(value, "an object")
        decoded = {}
        for key, entry in value.items():
            try:
                decoded[key] = item(entry)
            except _TypeMismatch as misfit:
                misfit.path.append(f".{key}")
                raise
        return decoded

    return mapping


def _dataclass(kind: Any, newer: bool) -> Decoder:
    hints = get_type_hints(kind)
    decoders = {field.name: _decoder(hints[field.name], newer) for field in fields(kind)}

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(value, "an object")
        decoded, name = {}, ""
        try:
            for name, entry in value.items():
                if not newer or name in decoders:
                    decoded[name] = decoders[name](entry)
        except _TypeMismatch as misfit:
            misfit.path.append(f".{name}")
            raise
        except KeyError:
            raise _mismatch(name, f"only fields of {kind.__name__}") from None
        try:
            return kind(**decoded)
        except (TypeError, ValueError) as error:
            raise _TypeMismatch(str(error)) from error

    return build


def _mismatch(value: Any, expected: str) -> _TypeMismatch:
    shown = repr(value)
    return _TypeMismatch(f"expected {expected}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")


Outcome = Measurement | ProbeFailure
"""What a probe brings back."""
EVIDENCE_SCHEMA = 1
_KINDS: dict[str, type[Evidence]] = {"measurement": Measurement, "prediction": Prediction, "failure": ProbeFailure}


class BadOutcome(ValueError):
    """A JSON value that is no evidence of this schema."""


def evidence_to_dict(evidence: Evidence) -> dict[str, Any]:
    """One piece of evidence as JSON values, tagged with its kind and schema."""
    tag = next(name for name, kind in _KINDS.items() if isinstance(evidence, kind))
    return {"schema": EVIDENCE_SCHEMA, "outcome": tag, **to_jsonable(evidence)}


def evidence_from_text(text: str) -> Evidence:
    """`evidence_from_dict` of a JSON text.

    Raises:
        BadOutcome: as there; or it is no JSON that can be meant.
    """
    try:
        values = parse_json(text, "evidence")
    except ConfigError as error:
        raise BadOutcome(error.message) from error
    return evidence_from_dict(values)


def evidence_from_dict(values: Any) -> Evidence:
    """The evidence that `evidence_to_dict` wrote. Fields of later versions are left out.

    Raises:
        BadOutcome: another schema, an unknown tag, or a field that is missing or of the wrong type.
    """
    if not isinstance(values, dict):
        raise BadOutcome(f"an outcome must be an object, got {type(values).__name__}")
    tag = values.get("outcome")
    if (schema := values.get("schema")) != EVIDENCE_SCHEMA:
        raise BadOutcome(f"outcome schema must be {EVIDENCE_SCHEMA}, got {schema!r}")
    if not isinstance(tag, str) or tag not in _KINDS:
        raise BadOutcome(f"outcome must be one of {', '.join(_KINDS)}, got {tag!r}")
    try:
        evidence = decode(_KINDS[tag], values, "outcome", newer=True)
    except ConfigError as error:
        raise BadOutcome(error.message) from error
    _check_possible(evidence)
    return evidence


def _check_possible(evidence: Evidence) -> None:
    """What has its type and still cannot be: a negative peak, a step without time.

    Raises:
        BadOutcome: with the field.
    """
    if isinstance(evidence, ProbeFailure):
        return
    sizes = [evidence.peak_allocated_bytes, evidence.peak_reserved_bytes, evidence.peak_device_bytes]
    sizes += [*evidence.phase_peaks_bytes.values(), *(size for _, _, size in evidence.rank_peaks)]
    try:
        for size in sizes:
            whole(size, "peaks in bytes")
        if isinstance(evidence, Measurement):
            whole(evidence.tokens_per_step, "tokens_per_step", least=1)
            whole(len(evidence.step_times_s), "the number of step_times_s", least=1)
            for time_s in evidence.step_times_s:
                number(time_s, "step_times_s", above=0.0)
    except ValueError as error:
        raise BadOutcome(str(error)) from error


def outcome_from_dict(values: Any) -> Outcome:
    """`evidence_from_dict` of what a probe brought back.

    Raises:
        BadOutcome: as there, or a prediction.
    """
    outcome = evidence_from_dict(values)
    if isinstance(outcome, Prediction):
        raise BadOutcome("outcome must be a measurement or a failure, got a prediction")
    return outcome
