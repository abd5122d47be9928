"""Frozen dataclasses back from JSON values, by their type hints. The reverse of `planner.interchange.to_jsonable`."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from planner.errors import ConfigError

T = TypeVar("T")

DAMAGED = "the file was changed by hand, or damaged"


def decode(kind: type[T], value: Any, where: str = "") -> T:
    """`value` (JSON) as a `kind`; absent fields take their defaults, unknown fields are an error.

    Raises:
        ConfigError: a wrong type or a missing field, with the path to it.
    """
    decoded: T = _decode(kind, value, where or kind.__name__)
    return decoded


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str) -> Any:
    if kind is Any or kind is object:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [argument for argument in arguments if argument is not type(None)]
        return _first(options, value, where)
    if origin is Literal:
        return _expect(value in arguments, value, where, " or ".join(map(repr, arguments)))
    if origin is tuple:
        return _tuple(arguments, value, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(isinstance(value, dict), value, where, "an object")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        _expect(value in {member.value for member in kind}, value, where, f"a {kind.__name__}")
        return kind(value)
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(_expect(number, value, where, "a number"))
    matches = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return _expect(matches, value, where, f"a {kind.__name__}")


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), value, where, "an object")
    hints, known = _hints(kind), {field.name for field in fields(kind)}
    unknown = sorted(set(value) - known)
    _expect(not unknown, unknown, where, f"only fields of {kind.__name__}")
    values = {name: _decode(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}", hint="write the plan anew with this version") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", hint=DAMAGED) from error


def _tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), value, where, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    _expect(len(value) == len(arguments), value, where, f"{len(arguments)} items")
    return tuple(
        _decode(kind, item, f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def _first(options: list[Any], value: Any, where: str) -> Any:
    problem: ConfigError | None = None
    for option in options:
        try:
            return _decode(option, value, where)
        except ConfigError as error:
            problem = error
    assert problem is not None
    raise problem


def _expect(holds: bool, value: Any, where: str, expected: str) -> Any:
    if not holds:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ConfigError(f"{where}: expected {expected}, got {shown}", hint=DAMAGED)
    return value
