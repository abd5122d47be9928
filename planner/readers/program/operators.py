"""Python's operators on values that may be unknown; results stay small."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from planner.readers.program.values import (
    Class,
    Function,
    Instance,
    Items,
    Known,
    Made,
    Table,
    Undecided,
    Unknown,
    Value,
    plain,
)

MAX_TEXT = 10_000
MAX_NUMBER = 1 << 80

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}


def binary(op: ast.operator, left: Value, right: Value, place: str) -> Value:
    """left op right."""
    if isinstance(left, Items) and isinstance(right, Items) and isinstance(op, ast.Add):
        return Items([*left.items, *right.items], place)
    one, other = plain(left), plain(right)
    for part in (one, other):
        if isinstance(part, Unknown):
            return part
    if isinstance(op, ast.Pow):
        small = all(isinstance(part, (int, float)) and abs(part) <= 64 for part in (one, other))
        return _checked(lambda: one**other, place) if small else Unknown(f"{place}: computed while the program runs")
    if isinstance(op, ast.Div) and isinstance(one, str):
        return Known(f"{one.rstrip('/')}/{other}", place)  # pathlib
    if isinstance(op, ast.Mult) and any(isinstance(part, (str, list)) for part in (one, other)):
        return Unknown(f"{place}: computed while the program runs")
    if isinstance(op, ast.Mod) and isinstance(one, str):
        return Unknown(f"{place}: text put together while the program runs")
    function = _BINARY.get(type(op))
    if function is None or not all(isinstance(part, (int, float, str, bool)) for part in (one, other)):
        return Unknown(f"{place}: computed while the program runs")
    return _checked(lambda: function(one, other), place)


def _is_object(value: Value) -> bool:
    """Whether a value is certainly not None: a list, an object of a class."""
    if isinstance(value, Made):
        return value.name[:1].isupper() or value.name == "from_pretrained"
    return isinstance(value, (Items, Table, Instance, Function, Class))


def unary(op: ast.unaryop, operand: Value, place: str) -> Value:
    """op operand."""
    value = plain(operand)
    if isinstance(value, Unknown):
        return value
    if isinstance(op, ast.Not):
        return Known(not value, place)
    if isinstance(value, (int, float)) and isinstance(op, (ast.USub, ast.UAdd)):
        return Known(-value if isinstance(op, ast.USub) else value, place)
    return Unknown(f"{place}: computed while the program runs")


def compare(op: ast.cmpop, left: Value, right: Value, place: str) -> Value:
    """left op right, for one comparison."""
    if isinstance(op, (ast.Is, ast.IsNot)) and isinstance(right, Known) and right.data is None and _is_object(left):
        return Known(isinstance(op, ast.IsNot), place)
    one, other = plain(left), plain(right)
    if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, Table) and not right.more:
        other = list(right.entries)
    for part in (one, other):
        if isinstance(part, Unknown):
            return Undecided(f"{place}: depends on a condition ({part.reason})" if part.reason else place)
    function = _COMPARE.get(type(op))
    if function is None:
        return Unknown(f"{place}: computed while the program runs")
    if isinstance(op, (ast.Is, ast.IsNot)) and other not in (None, True, False):
        return Undecided(f"{place}: depends on a condition")
    return _checked(lambda: bool(function(one, other)), place)


def _checked(compute: Callable[[], Any], place: str) -> Value:
    try:
        result = compute()
    except (TypeError, ValueError, ArithmeticError):
        return Unknown(f"{place}: computed while the program runs")
    long = isinstance(result, str) and len(result) > MAX_TEXT
    if long or (isinstance(result, int) and abs(result) > MAX_NUMBER):
        return Unknown(f"{place}: too large")
    return Known(result, place)
