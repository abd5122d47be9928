"""Frozen dataclasses back from JSON values, by their type hints. The reverse of `planner.interchange.to_jsonable`.

One decoder is built per type, once: a plan.json holds hundreds of thousands of values.
"""

import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from planner.errors import ConfigError

T = TypeVar("T")
Decoder = Callable[[Any], Any]

DAMAGED = "the file was changed by hand, or damaged"


class _Misfit(Exception):
    """A value that does not fit its type; the path to it grows while the error rises."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []


def decode(kind: type[T], value: Any, where: str = "") -> T:
    """`value` (JSON) as a `kind`; absent fields take their defaults, unknown fields are an error.

    Raises:
        ConfigError: a wrong type or a missing field, with the path to it.
    """
    try:
        decoded: T = _decoder(cast(Hashable, kind))(value)
    except _Misfit as misfit:
        path = "".join(reversed(misfit.path))
        raise ConfigError(f"{where or kind.__name__}{path}: {misfit.problem}", hint=DAMAGED) from misfit
    return decoded


@cache
def _decoder(kind: Any) -> Decoder:
    if kind is Any or kind is object:
        return lambda value: value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _one_of(frozenset(arguments), " or ".join(map(repr, arguments)))
    if origin is tuple:
        return _tuple(arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_decoder(arguments[1]))
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    return _plain(kind)


def _plain(kind: Any) -> Decoder:
    # bool is an int to Python, never to JSON; a float may be written without a point.
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)

    def plain(value: Any) -> Any:
        if type(value) not in accepted:
            raise _misfit(value, f"a {kind.__name__}")
        return float(value) if kind is float else value

    return plain


def _union(arguments: tuple[Any, ...]) -> Decoder:
    options = [_decoder(argument) for argument in arguments if argument is not type(None)]
    optional = len(options) < len(arguments)

    def union(value: Any) -> Any:
        if value is None and optional:
            return None
        for option in options[:-1]:
            try:
                return option(value)
            except _Misfit:
                continue
        return options[-1](value)

    return union


def _one_of(allowed: frozenset[Any], words: str) -> Decoder:
    def one_of(value: Any) -> Any:
        if not isinstance(value, (str, int)) or value not in allowed:
            raise _misfit(value, words)
        return value

    return one_of


def _enum(kind: type[Enum]) -> Decoder:
    members = {member.value: member for member in kind}

    def enum(value: Any) -> Any:
        if not isinstance(value, str) or value not in members:
            raise _misfit(value, f"a {kind.__name__}")
        return members[value]

    return enum


def _tuple(arguments: tuple[Any, ...]) -> Decoder:
    endless = len(arguments) == 2 and arguments[1] is Ellipsis
    items = [_decoder(argument) for argument in (arguments[:1] if endless else arguments)]

    def several(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _misfit(value, "a list")
        if not endless and len(value) != len(items):
            raise _misfit(value, f"{len(items)} items")
        decoded: list[Any] = []
        try:
            for number, item in enumerate(value):
                decoded.append(items[0 if endless else number](item))
        except _Misfit as misfit:
            misfit.path.append(f"[{len(decoded)}]")
            raise
        return tuple(decoded)

    return several


def _mapping(item: Decoder) -> Decoder:
    def mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _misfit(value, "an object")
        decoded = {}
        for key, one in value.items():
            try:
                decoded[key] = item(one)
            except _Misfit as misfit:
                misfit.path.append(f".{key}")
                raise
        return decoded

    return mapping


def _dataclass(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields(kind)}

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _misfit(value, "an object")
        decoded, name = {}, ""
        try:
            for name, one in value.items():
                decoded[name] = decoders[name](one)
        except _Misfit as misfit:
            misfit.path.append(f".{name}")
            raise
        except KeyError:
            raise _misfit(name, f"only fields of {kind.__name__}") from None
        try:
            return kind(**decoded)
        except (TypeError, ValueError) as error:
            raise _Misfit(str(error)) from error

    return build


def _misfit(value: Any, expected: str) -> _Misfit:
    shown = repr(value)
    return _Misfit(f"expected {expected}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")
