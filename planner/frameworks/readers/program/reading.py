"""What one reading of a program knows and keeps: the outside, what was found, where it stands."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from itertools import chain
from typing import Any

from planner.core.records import dataclass
from planner.frameworks.readers.program.loops import LoopContext, Steps
from planner.frameworks.readers.program.values import (
    CallResult,
    Class,
    Constant,
    Function,
    Scope,
    TooLong,
    Value,
    spend,
)
from planner.frameworks.readers.values import FileContext

MAX_STEPS = 200_000
MAX_DEPTH = 24
MAX_NESTED = 5
MAX_LOOP = 64
MAX_LISTED = 512
MAX_MODULES = 40
MAX_SOURCE_BYTES = 600_000
"""Of modules beside the program: what lies behind is taken for foreign code."""
LIBRARIES = frozenset({
    "accelerate", "bitsandbytes", "datasets", "deepspeed", "evaluate", "numpy", "pandas", "peft", "torch",
    "transformers", "trl", "unsloth", "vllm", "wandb", "ray", "lightning", "omegaconf", "hydra",
    "azure", "google", "langchain", "llama_index", "matplotlib", "mlflow", "sagemaker", "scipy", "sklearn",
})  # fmt: skip
"""Packages that stay foreign code where their own source lies beside the program."""
LENGTH_NAMES = frozenset({
    "max_length", "max_seq_length", "max_seq_len", "max_len", "seq_len", "seq_length", "sequence_length", "cutoff_len",
    "block_size", "context_length", "model_max_length", "max_token_length", "max_tokens_length",
})  # fmt: skip
"""Names (in lower case) under which programs keep the length to which they cut sequences."""
PARTS_OF_LENGTH = (
    ("source_max_len", "target_max_len"),
    ("max_input_length", "max_output_length"),
    ("max_source_length", "max_target_length"),
)
"""Two lengths that one sequence is put together from."""
CUT_NAMES = ("input_ids", "ids", "labels", "attention_mask", "tokens")
NOT_DATA = ("generat", "predict", "infer", "eval", "chat", "test", "sample", "plot", "print")
"""Parts of the names of functions whose lengths are not the training data's."""


@dataclass(slots=True)
class Program:
    """What was found while reading.

    Attributes:
        trained: objects whose `train` was called, in order, and whether only under an unknown condition.
        made: every call of foreign code, in order.
        module: the names of the main module at the end.
        sources: files read beside the program.
        do_train_decides: whether it trains only where its command line, which was said, asks for it.
        cuts: lengths to which lists of tokens are cut by slices; lengths: values of names that say a length.
        starts: whether it trains by what it calls itself; else functions that nothing calls were read too.
        workers: processes that the program itself starts, as it says.
        open_conditions: conditions that were met and that nothing decides -> where the first of each stands.
        steps: what it computes in loops of its own.
        differentiates: its files in which a backward stands, also where nothing is known to call it.
        not_taken: of the command line, options that its argparse does not have, with what comes of each.
        branches: statements behind a condition that is known -> whether they ever run.
    """

    trained: list[tuple[CallResult, bool]] = field(default_factory=list)
    calls: list[CallResult] = field(default_factory=list)
    module: Scope = field(default_factory=Scope)
    sources: list[str] = field(default_factory=list)
    do_train_decides: bool = False
    cuts: list[Constant] = field(default_factory=list)
    lengths: list[Constant] = field(default_factory=list)
    starts: bool = True
    workers: Value | None = None
    open_conditions: dict[str, str] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)
    differentiates: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)
    branches: dict[ast.stmt, bool] = field(default_factory=dict)


class ControlFlow(Exception):
    """A return, break or continue on the way that is certainly taken."""

    def __init__(self, value: Value | None = None) -> None:
        self.value = value


class Return(ControlFlow):
    """Leaves the function."""


class Raise(Return):
    """Ends in an error: a way that a program which runs does not take."""


class Loop(ControlFlow):
    """Leaves this turn of the loop."""


class Break(Loop):
    """Leaves the loop."""


class Reading:
    """One reading of one program; statements, assignments, expressions and calls are read by the classes below it."""

    block: Callable[[Sequence[ast.stmt], Scope], None]
    statement: Callable[[ast.stmt, Scope], None]
    assign: Callable[[ast.expr, Value, Scope], None]
    value: Callable[[ast.expr, Scope], Value]
    called: Callable[[Function, CallResult], Value]
    store: Callable[[dict[str, Value], str, Value, str], None]
    instance: Callable[[Class, CallResult], Value]

    def __init__(self, name: str, context: FileContext, label: Callable[[int], str] | None = None) -> None:
        self.outside = context
        self.name, self.label = name, label
        self.program = Program()
        self.modules: dict[str, Scope | None] = {}
        self.steps = 0
        self.source_bytes = 0
        self.depth = 0
        self.uncertain = 0
        self.running: list[Any] = []
        self.entered_at: list[int] = []
        self.entered: set[int] = set()
        self.maybe_returned: list[list[Value]] = []
        self.maybe_left: list[list[dict[str, Value]]] = []
        self.turn = LoopContext()

    def step(self) -> None:
        """One more statement or expression."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooLong

    def decided(self, test: ast.expr, place: str = "") -> bool | None:
        """How a condition that is not known is taken this time, None for both ways; `place`: where it decides."""
        text, turned = _condition(test)
        taken = self.outside.decided.get(text)
        if place and text not in self.outside.decided:
            self.program.open_conditions.setdefault(text, place)
        return taken if taken is None else taken != turned

    def copied(self, names: dict[str, Value]) -> dict[str, Value]:
        """A scope's names, once more."""
        spend(len(names))
        return dict(names)

    def place(self, node: ast.AST, scope: Scope) -> str:
        """ "file:line" of a node."""
        file, line = file_of(scope), getattr(node, "lineno", 0)
        return f"{file}:{line}" if self.label is None or file != self.name else f"{file}:{self.label(line)}"

    def note_length(self, name: str, value: Value, called: str = "") -> None:
        """Remembers what a name for a length stands for; `called` is the function that it is handed to."""
        if name.lower() not in LENGTH_NAMES or not isinstance(value, Constant) or type(value.data) is not int:
            return
        running = [node.name for node in self.running if isinstance(node, ast.FunctionDef)]
        inside = [name.lower() for name in (*running, called)]
        if value.data >= 16 and not any(part in name for name in inside for part in NOT_DATA):
            self.program.lengths.append(value)


SAYS_ONLY = frozenset({
    "print", "pprint", "log", "info", "warning", "warn", "debug", "error", "exception", "set_verbosity_info",
    "set_verbosity_error", "makedirs", "mkdir", "rmtree", "remove", "login", "init", "save_model", "save_pretrained",
    "push_to_hub", "save_state", "log_metrics", "save_metrics", "dump", "write", "barrier", "empty_cache", "set_seed",
    "manual_seed", "manual_seed_all", "seed", "flush", "close", "add_argument", "filterwarnings", "set_device",
    "init_process_group", "create_model_card", "sleep", "collect", "update_dataset", "wait_for_everyone",
})  # fmt: skip
"""Functions that change nothing of a training, by their last names."""


def changes(body: Sequence[ast.stmt]) -> bool:
    """Whether statements may set or call anything that a training hangs on."""
    for node in (child for statement in body for child in ast.walk(statement)):
        if isinstance(
            node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Continue, ast.Break, ast.Delete)
        ):
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name not in SAYS_ONLY:
                return True
    return False


def counters(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that a body makes of themselves: `step += 1`, `step = step + 1`."""
    for node in chain.from_iterable(map(ast.walk, body)):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.targets[0], ast.Name)
        ):
            name = node.targets[0].id
            if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.value)):
                yield name


def _condition(test: ast.expr) -> tuple[str, bool]:
    """A condition's text without what only turns it (`not a`, `a is None`), and whether that turned it."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            text, turned = _condition(test.operand)
            return text, not turned
        case ast.Compare(ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
            return ast.unparse(test.left), isinstance(op, ast.Is)
    return ast.unparse(test), False


def file_of(scope: Scope | None) -> str:
    while scope is not None:
        if scope.file:
            return scope.file
        scope = scope.parent
    return ""
