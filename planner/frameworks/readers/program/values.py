"""What a name in a program may stand for. Every value knows where it was written."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import Any, Union

from planner.core.records import dataclass

NAMING = (
    "inspect", "torch", "transformers", "trl", "peft", "TaskType", "IntervalStrategy", "SchedulerType",
    "OptimizerNames",
)  # fmt: skip
"""Libraries whose constants are named by their last word ("torch.bfloat16")."""

MAX_SIZE = 2_000_000
"""Elements, names and characters that one reading may make, copy or compare, all together. Of 203 modules of TRL, PEFT
and transformers, read as if they were programs, the largest takes 456,122."""

Value = Union[
    "Constant",
    "Unknown",
    "ListValue",
    "DictValue",
    "ImportedName",
    "CallResult",
    "Function",
    "Class",
    "Instance",
    "Parent",
]


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, text, truth value or None; `where` is "file:line" or the words for a default."""

    data: Any
    where: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """What only running the program would tell; `reason` says why, with the place."""

    reason: str


@dataclass(frozen=True, slots=True)
class Undecided(Unknown):
    """What a condition that is not known decides."""


@dataclass(frozen=True, slots=True)
class Argument(Unknown):
    """What a function of the program is handed by somebody who is not there, under this name."""

    name: str = ""


SLICE = Unknown("a slice")
"""What stands for a slice as a key."""


@dataclass(slots=True)
class ListValue:
    """A list, tuple or set."""

    items: list[Value]
    where: str = ""


@dataclass(slots=True)
class DictValue:
    """A dictionary with text as keys; `more` says why there may be entries that are not known."""

    entries: dict[str, Value]
    where: str = ""
    more: str = ""

    def take(self, other: "DictValue | None", why: str, *, over: bool = True) -> None:
        """Puts another's entries on top; `why` says why some are not known where that is not.

        Args:
            over: it may hold those that are here too, as ** in a call may not.
        """
        more = why if other is None else other.more
        if more and over:
            self.entries = dict.fromkeys(self.entries, Unknown(more))
        self.entries |= other.entries if other is not None else {}
        self.more = self.more or more


@dataclass(frozen=True, slots=True)
class ImportedName:
    """Something imported or built in, by its full name ("torch.bfloat16")."""

    path: str

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.path.rpartition(".")[2]


@dataclass(eq=False, slots=True)
class CallResult:
    """What a call of foreign code returned: the call itself.

    Attributes:
        name: the function's last name ("from_pretrained"); owner: what it was called on ("AutoModelForCausalLM");
            package: where that was imported from ("transformers"), "" where it is not known.
        receiver: the value it was called on, where that was made by the program.
        more: why there may be keywords that are not known; "" where all are.
        attributes: what the program set on it afterwards.
        called: methods called on it without their result being a new object (name -> the call).
        made_by: the program's class that it is an object of, where that extends foreign code.
        of: the object that was called, where that came from foreign code: a model's forward.
    """

    name: str
    owner: str = ""
    receiver: Value | None = None
    positional: list[Value] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)
    where: str = ""
    more: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)
    called: dict[str, "CallResult"] = field(default_factory=dict)
    made_by: "Class | None" = None
    package: str = ""
    of: "CallResult | None" = None

    def argument(self, keyword: str, position: int = -1) -> Value | None:
        """An argument by name or position."""
        if keyword in self.attributes:
            return self.attributes[keyword]
        if keyword in self.keywords:
            return self.keywords[keyword]
        return self.positional[position] if 0 <= position < len(self.positional) else None


@dataclass(eq=False, slots=True)
class Scope:
    """Names of a module or a function, and where names that are not in it are looked up."""

    names: dict[str, Value] = field(default_factory=dict)
    parent: "Scope | None" = None
    file: str = ""

    def find(self, name: str) -> Value | None:
        """The value of a name, None where no scope has it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


@dataclass(eq=False, slots=True)
class Function:
    """A function of the program, with the object it is bound to and the options its decorators declare; `of`: what it
    is bound to where a class holds it ("classmethod", "staticmethod", "" for its objects)."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    bound: Value | None = None
    options: dict[str, Value] = field(default_factory=dict)
    of: str = ""

    def bound_to(self, owner: "Class | Instance | None", kind: "Class | None") -> "Function":
        """As an attribute of an object, or of its class (`kind`; `owner` is None, or the class, there)."""
        bound = {"classmethod": kind, "staticmethod": None}.get(self.of, owner)
        return Function(self.node, self.scope, bound, self.options)


@dataclass(eq=False, slots=True)
class Class:
    """A class of the program; `base` is the foreign class it extends, "" where there is none; `parents` its own."""

    name: str
    attributes: dict[str, Value]
    base: str = ""
    fields: tuple[str, ...] = ()
    where: str = ""
    parents: tuple["Class", ...] = ()


@dataclass(eq=False, slots=True)
class Parent:
    """An object as its class's parent sees it: `super()`."""

    of: "Class | Instance"
    kind: Class


@dataclass(eq=False, slots=True)
class Instance:
    """An object of a class of the program, or a namespace of parsed options."""

    attributes: dict[str, Value]
    made_by: Class | None = None
    more: str = ""


class TooLong(Exception):
    """The budget of steps or of sizes is spent."""


_SIZE_LEFT: ContextVar[list[int] | None] = ContextVar("_SIZE_LEFT", default=None)


@contextmanager
def size_budget() -> Iterator[None]:
    """Within it, all that is made, copied or compared counts against MAX_SIZE."""
    outer = _SIZE_LEFT.set([MAX_SIZE])
    try:
        yield
    finally:
        _SIZE_LEFT.reset(outer)


def spend(size: int) -> None:
    """Takes elements, names or characters from the budget, where there is one.

    Raises:
        TooLong: it is spent.
    """
    left = _SIZE_LEFT.get()
    if left is not None:
        left[0] -= size
        if left[0] < 0:
            raise TooLong


MAX_PLAIN_VALUES, MAX_PLAIN_DEPTH = 100_000, 64
"""A list may hold itself, or twice what holds twice: a program's line doubles it, no setting needs it."""


def plain(value: Value | None) -> Any:
    """A value as plain data; an `Unknown` stays one, inside lists and dictionaries too (then the whole is unknown)."""
    num = [0]
    data = _plain(value, num, 0)
    spend(num[0])
    return data


def _plain(value: Value | None, num: list[int], depth: int) -> Any:
    num[0] += 1
    if num[0] > MAX_PLAIN_VALUES or depth > MAX_PLAIN_DEPTH:
        return Unknown("a value that is too large, or holds itself")
    match value:
        case None:
            return None
        case Constant():
            return value.data
        case ListValue():
            return _all([_plain(item, num, depth + 1) for item in value.items])
        case DictValue():
            entries = value.entries.items()
            return (
                Unknown(value.more) if value.more else _all({k: _plain(inner, num, depth + 1) for k, inner in entries})
            )
        case ImportedName():
            if value.path.partition(".")[0] in NAMING:
                return value.name
            return Unknown(f"{value.path} is defined elsewhere")
        case Unknown():
            return value
        case CallResult():
            return Unknown(f"{value.where}: what {value.name}() returns")
    return Unknown("a function or an object of the program")


def _all(data: Any) -> Any:
    parts = data.values() if isinstance(data, dict) else data
    return next((part for part in parts if isinstance(part, Unknown)), data)


def where_of(value: Value | None) -> str:
    """Where a value was written, "" where that is not known."""
    return getattr(value, "where", "")


def join_values(first: Value, other: Value, reason: str) -> Value:
    """One of two values, where it is not known which: what they have in common is."""
    spend(1)
    if same(first, other):
        return first
    if isinstance(first, DictValue) and isinstance(other, DictValue):
        absent = Undecided(reason)
        names = {**first.entries, **other.entries}
        entries = {
            key: join_values(first.entries.get(key, absent), other.entries.get(key, absent), reason) for key in names
        }
        return DictValue(entries, first.where, first.more or other.more)
    return Undecided(reason)


def same(first: Value | None, other: Value | None) -> bool:
    """Whether two values are certainly the same."""
    if first is other:
        return True
    if isinstance(first, (Constant, ListValue, DictValue, ImportedName)) and isinstance(
        other, (Constant, ListValue, DictValue, ImportedName)
    ):
        left, right = plain(first), plain(other)
        return not isinstance(left, Unknown) and type(left) is type(right) and bool(left == right)
    return False
