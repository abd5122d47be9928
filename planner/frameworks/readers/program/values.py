"""What a name in a program may stand for, and what that is where a program asks it: true or not, its elements, as text;
what operators make of it (results stay small). Every value knows where it was written."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
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
    outer: "dict[str, Scope]" = field(default_factory=dict)
    """Names that `global` or `nonlocal` says are another scope's."""

    def declare(self, node: ast.Global | ast.Nonlocal) -> None:
        for name in node.names:
            scope = self.parent or self
            while scope.parent is not None and (isinstance(node, ast.Global) or name not in scope.names):
                scope = scope.parent
            self.outer[name] = scope

    def put(self, name: str, value: Value, *, unsure: bool) -> None:
        """Sets a name where it stands; one of another scope under an unknown condition is open then."""
        if (scope := self.outer.get(name)) is not None and unsure:
            value = Unknown(f"{self.file}: {name} is set under a condition that is not known")
        (scope or self).names[name] = value

    def find(self, name: str) -> Value | None:
        """The value of a name, None where no scope has it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None

    def imports(self, package: str) -> bool:
        """Whether the program has certainly imported from a package before."""
        names = [value.path for value in self.names.values() if isinstance(value, ImportedName)]
        above = self.parent is not None and self.parent.imports(package)
        return above or any(path.partition(".")[0] == package for path in names)


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
    """A class of the program; `base` is the foreign class it extends, "" where there is none; `parents` its own;
    `kinds`: field -> the class of the program that it is annotated with."""

    name: str
    attributes: dict[str, Value]
    base: str = ""
    fields: tuple[str, ...] = ()
    where: str = ""
    parents: tuple["Class", ...] = ()
    kinds: dict[str, "Class"] = field(default_factory=dict)


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
    """Takes elements, names or characters from the budget, where there is one."""
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
    if all(isinstance(value, (Constant, ListValue, DictValue, ImportedName)) for value in (first, other)):
        left, right = plain(first), plain(other)
        return not isinstance(left, Unknown) and type(left) is type(right) and bool(left == right)
    return False


def joined(first: dict[str, Value], other: dict[str, Value], place: str) -> dict[str, Value]:
    """The names that two ways leave, those that they leave different as unknown."""
    merged: dict[str, Value] = {}
    spend(len(first) + len(other))
    for name in {**first, **other}:
        if name in first and name in other and not same(first[name], other[name]):
            kept = (end[name] for end in (first, other) if isinstance(end[name], (CallResult, Function, Class)))
            keep = next(kept, None)
            different = join_values(first[name], other[name], f"{place} ({name})")
            # one object or another of the same kind: which of them is used is not known
            made = [value.name for value in (first[name], other[name]) if isinstance(value, CallResult)]
            merged[name] = different if keep is None or (len(made) == 2 and made[0] == made[1]) else keep
        else:
            merged[name] = first[name] if name in first else other[name]
    return merged


def fits(pattern: ast.pattern, subject: Any) -> bool | None:
    """Whether a known value has a pattern, None where that is not followed."""
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
        return True
    if isinstance(subject, Unknown):
        return None
    match pattern:
        case ast.MatchValue(value=ast.Constant(value=value)) | ast.MatchSingleton(value=value):
            return bool(subject == value)
        case ast.MatchOr():
            answers = [fits(alternative, subject) for alternative in pattern.patterns]
            return True if True in answers else None if None in answers else False
    return None


ARGUMENT_CLASSES = ("TrainingArguments", "Config", "Arguments")
TOKENIZER_TRAINERS = ("BpeTrainer", "WordPieceTrainer", "UnigramTrainer", "WordLevelTrainer")
STARTERS = ("TorchTrainer", "DataParallelTrainer", "HorovodTrainer", "ModelTrainer")
"""Ray's classes that start a function on workers, and SageMaker's that submits a program."""
ARGUMENT_DEFAULTS = {
    "fp16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 8, "deepspeed": None,
    "gradient_accumulation_steps": 1, "max_steps": -1, "do_train": False, "do_eval": False, "fsdp": None,
    "torch_compile": False, "use_liger_kernel": False, "resume_from_checkpoint": None,
}  # fmt: skip
"""Fields of transformers' arguments that programs ask, and what they are where nobody sets them."""


MODEL_DEFAULTS = {
    "model_name_or_path": None, "model_revision": "main", "dtype": "float32", "torch_dtype": "float32",
    "trust_remote_code": False, "attn_implementation": None, "use_peft": False, "lora_r": 16, "lora_alpha": 32,
    "lora_dropout": 0.05, "lora_target_modules": None, "lora_modules_to_save": None, "lora_target_parameters": None,
    "use_rslora": False, "use_dora": False, "load_in_8bit": False, "load_in_4bit": False, "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
}  # fmt: skip
"""Fields of TRL's `ModelConfig`. Source: TRL 1.16 `trainer/model_config.py`; before 0.24 `torch_dtype` was None, which
transformers 4 loads in float32."""


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
    ast.In: lambda member, many: member in many,
    ast.NotIn: lambda member, many: member not in many,
}


def is_trainer(made: CallResult) -> bool:
    """Whether a call makes a trainer."""
    return made.name.endswith("Trainer") and made.name not in (*TOKENIZER_TRAINERS, *STARTERS)


def holds_arguments(made: CallResult) -> bool:
    """Whether a call makes a trainer's arguments."""
    return made.name.endswith(("TrainingArguments", "SFTConfig"))


def is_followed(path: str) -> bool:
    """Whether objects of this foreign class are looked at by their settings."""
    return path.rpartition(".")[2].endswith((*ARGUMENT_CLASSES, "Trainer"))


def ends_well(raised: Value | None) -> bool:
    """Whether what a program raises is its end, `SystemExit(main())`, and no error, `SystemExit("no GPU")`."""
    if not isinstance(raised, CallResult) or raised.name != "SystemExit":
        return False
    return plain(raised.argument("code", 0)) in (None, 0) or isinstance(plain(raised.argument("code", 0)), Unknown)


DTYPES = re.compile(r"torch\.(?:u?int|b?float)\d+\w*")


DATA_SETS = (
    "load_dataset", "load_from_disk", "from_list", "from_dict", "from_pandas", "from_generator", "train_test_split",
    "map", "filter", "select", "shuffle",
)  # fmt: skip
"""Calls of `datasets` that give data, which is taken to hold some."""


def truth(value: Value) -> bool | None:
    """Whether a value is true; None where that is not known."""
    if isinstance(value, Instance):  # true, where its class does not say when
        attributes = value.made_by.attributes if value.made_by is not None else {}
        return None if {"__bool__", "__len__"} & set(attributes) else True
    if isinstance(value, (CallResult, Function, Class)):
        return True if not isinstance(value, CallResult) or value.name in DATA_SETS else None
    if isinstance(value, ListValue):
        return bool(value.items)
    if isinstance(value, DictValue):
        return True if value.entries else None if value.more else False
    if isinstance(value, Constant):
        return bool(value.data)
    if isinstance(value, ImportedName) and value.name == "TYPE_CHECKING":
        return False  # while a program runs
    return True if isinstance(value, ImportedName) and DTYPES.fullmatch(value.path) else None


def items_of(value: Value) -> list[Value] | None:
    """The elements of something a program may loop over, None where they are not known."""
    match value:
        case ListValue():
            spend(len(value.items))
            return list(value.items)
        case DictValue() if not value.more:
            spend(len(value.entries))
            return [Constant(key, value.where) for key in value.entries]
        case Constant(data=str()) if value.data != "all-linear":  # which stands for names that are not known
            return [Constant(part, value.where) for part in value.data]
    return None


def unpacked(value: Value, count: int) -> list[Value]:
    """The parts of a value that is assigned to `count` names."""
    if isinstance(value, ListValue):
        if len(value.items) == count:
            return value.items
        return [*value.items[:count], *[Unknown(f"{value.where}: too few parts")] * (count - len(value.items))]
    if isinstance(value, CallResult):
        # what loads a model gives (model, tokenizer) where two names take it
        rest = [CallResult("item", receiver=value, where=value.where) for _ in range(count - 1)]
        return [value, *rest]
    apart = Unknown(f"{where_of(value)}: taken apart while the program runs")
    return [value if isinstance(value, Unknown) else apart] * count


def as_table(value: Value) -> DictValue | None:
    """What ** of a value gives."""
    if isinstance(value, DictValue):
        return value
    if isinstance(value, Instance):
        spend(len(value.attributes))
        return DictValue(dict(value.attributes), more=value.more)
    if isinstance(value, CallResult) and is_followed(value.name):
        more = value.more or f"{value.where}: what {value.name} itself takes for it"
        defaults = {} if value.more else argument_defaults(value)
        return DictValue({**defaults, **value.keywords, **value.attributes}, value.where, more)
    return None


def argument_defaults(made: CallResult) -> dict[str, Value]:
    """What transformers' arguments are where nobody sets them."""
    if made.name == "ModelConfig":
        return {name: Constant(data, "ModelConfig's default") for name, data in MODEL_DEFAULTS.items()}
    if not holds_arguments(made):
        return {}
    bf16 = {"bf16": False} if made.name.endswith("TrainingArguments") else {}
    return {name: Constant(data, f"{made.name}'s default") for name, data in (ARGUMENT_DEFAULTS | bf16).items()}


def element(value: Value, key: Value, place: str) -> Value:
    """value[key]"""
    name = plain(key)
    if isinstance(name, Unknown) and isinstance(value, (DictValue, ListValue, Instance)) and name is not SLICE:
        return name
    if isinstance(value, Instance):
        value = DictValue(value.attributes, place, value.more)
    if isinstance(value, DictValue):
        if isinstance(name, str) and name in value.entries:
            return value.entries[name]
        return Unknown(value.more or f"{place}: {name!r} is not set in the program")
    if isinstance(value, ListValue) and isinstance(name, int) and -len(value.items) <= name < len(value.items):
        return value.items[name]
    return value if isinstance(value, Unknown) else Unknown(f"{place}: computed while the program runs")


def formatted(parts: list[Value], place: str) -> Value:
    """An f-string."""
    texts = [plain(part) for part in parts]
    missing = next((text for text in texts if isinstance(text, Unknown)), None)
    return missing if missing is not None else Constant("".join(str(text) for text in texts)[:MAX_TEXT], place)


def in_format(value: Value, spec: Value, place: str) -> Value:
    """One value of an f-string."""
    data, form = plain(value), plain(spec)
    if isinstance(data, Unknown) or isinstance(form, Unknown):
        return data if isinstance(data, Unknown) else Unknown(f"{place}: text put together while the program runs")
    if form and not (isinstance(data, (int, float)) and len(form) < 8):
        return Unknown(f"{place}: text put together while the program runs")
    try:
        return Constant(format(data, form), place)
    except (ValueError, TypeError):
        return Unknown(f"{place}: text put together while the program runs")


def trainer_of(made: CallResult) -> CallResult:
    """The trainer itself behind functions that hand one back (`train_on_responses_only(trainer)`)."""
    for _ in range(8):
        first = made.positional[0] if made.positional else made.keywords.get("trainer")
        if is_trainer(made) or not isinstance(first, CallResult):
            return made
        made = first
    return made


def binary(op: ast.operator, left: Value, right: Value, place: str) -> Value:
    """left op right."""
    if isinstance(left, ListValue) and isinstance(right, ListValue):
        if isinstance(op, (ast.Add, ast.BitOr)):
            return ListValue([*left.items, *right.items], place)
        if isinstance(op, ast.Sub):  # of sets
            return ListValue(
                [item for item in left.items if not any(same(item, other) for other in right.items)], place
            )
    if isinstance(left, DictValue) and isinstance(right, DictValue) and isinstance(op, ast.BitOr):
        merged = DictValue(dict(left.entries), place, left.more)
        merged.take(right, "")
        return merged
    if isinstance(op, (ast.Div, ast.Mult)) and isinstance(left, CallResult):
        return left  # a loss stays one
    first, other = plain(left), plain(right)
    for part in (first, other):
        if isinstance(part, Unknown):
            return part
    if isinstance(op, (ast.Pow, ast.LShift)):
        small = all(isinstance(part, (int, float)) and abs(part) <= 64 for part in (first, other))
        power = operator.pow if isinstance(op, ast.Pow) else operator.lshift
        return (
            _checked(lambda: power(first, other), place)
            if small
            else Unknown(f"{place}: computed while the program runs")
        )
    if isinstance(op, ast.Div) and isinstance(first, str):
        return Constant(f"{first.rstrip('/')}/{other}", place)  # pathlib
    if isinstance(op, ast.Mult) and any(isinstance(part, (str, list)) for part in (first, other)):
        return Unknown(f"{place}: computed while the program runs")
    if isinstance(op, ast.Mod) and isinstance(first, str):
        return Unknown(f"{place}: text put together while the program runs")
    function = _BINARY.get(type(op))
    if function is None or not all(isinstance(part, (int, float, str, bool)) for part in (first, other)):
        return Unknown(f"{place}: computed while the program runs")
    return _checked(lambda: function(first, other), place)


def _is_object(value: Value) -> bool:
    if isinstance(value, CallResult):
        return value.name[:1].isupper() or value.name == "from_pretrained"
    return isinstance(value, (ListValue, DictValue, Instance, Function, Class))


def unary(op: ast.unaryop, operand: Value, place: str) -> Value:
    """op operand."""
    value = plain(operand)
    if isinstance(value, Unknown):
        return value
    if isinstance(op, ast.Not):
        return Constant(not value, place)
    if isinstance(value, (int, float)) and isinstance(op, (ast.USub, ast.UAdd)):
        return Constant(-value if isinstance(op, ast.USub) else value, place)
    return Unknown(f"{place}: computed while the program runs")


def compare(op: ast.cmpop, left: Value, right: Value, place: str) -> Value:
    """left op right, for one comparison."""
    if isinstance(op, (ast.Is, ast.IsNot)) and isinstance(right, Constant) and right.data is None and _is_object(left):
        return Constant(isinstance(op, ast.IsNot), place)
    first, other = plain(left), plain(right)
    if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, DictValue) and not right.more:
        other = list(right.entries)
    if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, Instance) and not (right.more or right.made_by):
        other = list(right.attributes)  # a namespace
    for part in (first, other):
        if isinstance(part, Unknown):
            return Undecided(f"{place}: depends on a condition ({part.reason})" if part.reason else place)
    function = _COMPARE.get(type(op))
    if function is None:
        return Unknown(f"{place}: computed while the program runs")
    if isinstance(op, (ast.Is, ast.IsNot)) and other not in (None, True, False):
        return Undecided(f"{place}: depends on a condition")
    return _checked(lambda: bool(function(first, other)), place)


def _checked(compute: Callable[[], Any], place: str) -> Value:
    try:
        result = compute()
    except (TypeError, ValueError, ArithmeticError):
        return Unknown(f"{place}: computed while the program runs")
    long = isinstance(result, str) and len(result) > MAX_TEXT
    if long or (isinstance(result, int) and abs(result) > MAX_NUMBER):
        return Unknown(f"{place}: too large")
    return Constant(result, place)
