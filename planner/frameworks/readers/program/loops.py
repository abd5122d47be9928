"""Plain training loops of PyTorch and Accelerate, read as the trainer whose step they make: one forward of one model a
step, the loss that transformers' model itself computes, one optimizer; its batch is a `DataLoader`'s, or open. Any
other loop is none of these.
And what a trainer class of the program's own does in place of its base's step, by the code of its methods.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import partial

from planner.core.records import dataclass
from planner.frameworks.readers.program.values import (
    CallResult,
    Constant,
    Function,
    ImportedName,
    ListValue,
    Scope,
    Unknown,
    Value,
    plain,
)

BY_STATES = {
    **dict.fromkeys(("Lion", "RMSprop", "Adagrad", "SGD", "LARS"), "lion"),
    **dict.fromkeys(("Adam", "AdamW", "LAMB"), "adamw"),
    "AdEMAMix": "ademamix",
}
"""Kinds of bitsandbytes' classes -> the optimizer with as many states (0.50 `Optimizer1State`, `Optimizer2State`)."""
OF_TORCH = {
    "AdamW": "adamw", "Adam": "adamw", "DeepSpeedCPUAdam": "adamw", "SGD": "sgd", "Adafactor": "adafactor",
    "RMSprop": "rmsprop", "Adagrad": "adagrad",
}  # fmt: skip
"""Classes of PyTorch, transformers and DeepSpeed -> the optimizer."""
MAKE_OPTIMIZER = ("create_optimizer", "create_optimizer_and_scheduler")
"""Methods of transformers' Trainer."""
SPREADS = ("FSDP", "FullyShardedDataParallel", "fully_shard", "DataParallel", "initialize", "parallelize_module")
"""Calls that spread a model in a way that is not followed here."""
HALVES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
STACKS = (("plain-loop-drops-outputs", "plain-loop"), ("accelerate-loop-drops-outputs", "accelerate-loop"))
"""By whether Accelerate casts the outputs to fp32, and whether the loop keeps them."""
MAX_WRAPPERS = 6


@dataclass(frozen=True)
class LoopContext:
    """What goes on where a call stands: the innermost loop over a `DataLoader`, how many functions deep it is, the
    divisors of the conditions that are open in it (None: another condition), the type under autocast."""

    loader: CallResult | None = None
    depth: int = 0
    divisors: tuple[Value | None, ...] = ()
    autocast: Value | None = None


@dataclass(slots=True)
class Steps:
    """Forwards, backwards (by their places; how many) and optimizer steps of a program, in order, each with where it
    stands."""

    forwards: list[tuple[CallResult, LoopContext]] = field(default_factory=list)
    backwards: dict[str, tuple[Value, LoopContext]] = field(default_factory=dict)
    updates: list[tuple[CallResult, LoopContext]] = field(default_factory=list)
    num_backwards: int = 0

    def goes_forward(self, made: CallResult, context: LoopContext) -> None:
        """Notes a forward, once for each place and model."""
        if not any(forward.where == made.where and forward.of is made.of for forward, _ in self.forwards):
            self.forwards.append((made, context))

    def goes_backward(self, loss: Value, place: str, context: LoopContext) -> None:
        """Notes a backward, by the first loss of its place."""
        self.backwards.setdefault(place, (loss, context))
        self.num_backwards += 1


@dataclass(frozen=True)
class Loop:
    """A plain loop: the trainer that makes the same step, the stack whose outputs live as long, sequences that it
    evaluates at once beside training (0: no more than it trains; None: not known), whether its optimizer is stepped by
    a loss scaler."""

    trainer: CallResult
    stack: str
    eval_seqs: int | None
    scales: bool


def loader_of(value: Value) -> CallResult | None:
    """The `DataLoader` that a loop goes over, through what counts or shows its turns; None of anything else."""
    for _ in range(MAX_WRAPPERS):
        if not isinstance(value, CallResult):
            return None
        if value.name == "DataLoader":
            return value
        value = value.positional[0] if value.positional else Constant(None)
    return None


def divisors(test: ast.expr) -> Iterator[ast.expr]:
    """What a condition counts to: `(step + 1) % every == 0`, `counter == every`."""
    parts = list(ast.walk(test))
    divided = [part.right for part in parts if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)]
    compared = [(part.ops[0], part.comparators[0]) for part in parts if isinstance(part, ast.Compare)]
    yield from divided or [
        to for op, to in compared if isinstance(op, (ast.Eq, ast.GtE)) and isinstance(to, (ast.Name, ast.Attribute))
    ]


def autocast_of(context: Value) -> Value | None:
    """The type that a context computes in ("bf16"; None: its own), `Unknown` where only running tells it; None of
    another context."""
    if not isinstance(context, CallResult) or context.name != "autocast" or context.owner == "accelerator":
        return None
    enabled = plain(context.argument("enabled"))
    if isinstance(enabled, Unknown):
        return enabled
    if context.argument("enabled") is not None and not enabled:
        return None
    place = 0 if context.owner == "amp" and not context.keywords and len(context.positional) == 1 else 1
    dtype = context.argument("dtype", place)
    word = plain(dtype) if dtype is not None else "float16"
    return word if isinstance(word, Unknown) else Constant(HALVES.get(str(word), "fp16"), context.where)


def plain_loop(steps: Steps, made: list[CallResult]) -> Loop | None:
    """The plain loop that a program trains in, None where it trains in none, in another, or in several."""
    if len(steps.backwards) != 1 or any(call.name in SPREADS for call in made):
        return None
    loss, context = next(iter(steps.backwards.values()))
    forward = _forward(loss)
    prepares = re.compile("Tokenizer|Processor|Extractor")
    inside = [
        call
        for call, where in steps.forwards
        if where.loader is context.loader and not (isinstance(call.of, CallResult) and prepares.search(call.of.owner))
    ]
    updates = [(update, where) for update, where in steps.updates if _optimizer(update) is not None]
    if forward is None or inside != [forward] or len({id(_optimizer(update)) for update, _ in updates}) != 1:
        return None
    at = next(where for call, where in steps.forwards if call is forward)
    accelerators = [call for call in made if call.name == "Accelerator"]
    if len(accelerators) > 1:
        return None
    accelerator = accelerators[0] if accelerators else None
    batch: Value = Unknown(f"{forward.where}: its batches come from no DataLoader")
    if context.loader is not None:
        batch = context.loader.argument("batch_size", 1) or Constant(1, context.loader.where)
    keywords: dict[str, Value] = {"per_device_train_batch_size": batch, **_precision(at, accelerator)}
    accumulated = _accumulation([where for _, where in updates], accelerator, forward.where)
    if steps.num_backwards != len(updates):  # of turns that are known one by one: some step, some do not
        accumulated = Unknown(f"{forward.where}: the turns in which the optimizer steps")
    keywords["gradient_accumulation_steps"] = accumulated
    optimizers = ListValue([_optimizer(updates[0][0]) or Constant(None)])
    trainer = CallResult(
        "Trainer",
        keywords={
            "model": forward.of or Constant(None),
            "args": CallResult("TrainingArguments", keywords=keywords),
            "optimizers": optimizers,
        },
        where=forward.where,
    )
    keeps = "kept" in forward.attributes and "del" not in forward.called
    mixed = accelerator is not None and plain(keywords["bf16"]) is not plain(keywords["fp16"])
    stack = STACKS[mixed][keeps]
    scales = accelerator is not None or bool(updates[0][0].positional)
    return Loop(trainer, stack, _evaluated(steps, context.loader, batch), scales)


def _forward(loss: Value) -> CallResult | None:
    for _ in range(MAX_WRAPPERS):
        if not isinstance(loss, CallResult):
            return None
        if loss.of is not None:
            return None  # the outputs themselves
        if loss.name == "loss" and isinstance(loss.receiver, CallResult) and loss.receiver.of is not None:
            return loss.receiver
        loss = loss.positional[0] if loss.name == "scale" and loss.positional else loss.receiver or Constant(None)
    return None


def optimizer_of(value: Value) -> str:
    """The optimizer whose object or class a value is, "" where it is none that is known.

    One whose momentum is known to the run alone is taken with it."""
    if isinstance(value, ImportedName):
        value = CallResult(value.name, package=value.path.partition(".")[0])
    if not isinstance(value, CallResult):
        return ""
    made = value
    bits = re.fullmatch(rf"(Paged)?({'|'.join(BY_STATES)})(8|32)?(?:bit)?", made.name)

    def on(keyword: str) -> bool:
        return made.argument(keyword) is not None and plain(made.argument(keyword)) not in (False, 0, None)

    if bits is not None and (made.package == "bitsandbytes" or bits[1] or bits[3]):
        size = bits[3] or ("8" if plain(made.argument("optim_bits")) == 8 else "32")
        return f"{'paged-' if bits[1] or on('is_paged') else ''}{BY_STATES[bits[2]]}-{size}bit"
    if made.name == "Lion":
        return "sgd-momentum"  # lion_pytorch's one state
    name = OF_TORCH.get(made.name, "")
    if name == "adamw":
        return "adamw-amsgrad" if on("amsgrad") else "adamw-fused" if on("fused") else "adamw"
    if name == "rmsprop" and (on("momentum") or on("centered")):
        return "adamw-amsgrad"
    return "sgd-momentum" if name == "sgd" and on("momentum") else name


def own_optimizer(trainer: CallResult) -> Value | None:
    """The optimizer that a trainer is given after it was made, or that its class's own method makes, as a call; None
    where its base makes it, `Unknown` where that is not followed."""
    if (given := trainer.attributes.get("optimizer")) is not None:
        return given
    method = next((of for of in _methods(trainer) if getattr(of.node, "name", "") in MAKE_OPTIMIZER), None)
    if method is None:
        return None
    calls = [node for node in ast.walk(method.node) if isinstance(node, ast.Call)]
    made = {name: call for call in map(partial(_called, method.scope), calls) if (name := optimizer_of(call))}
    by_base = {"get_optimizer_cls_and_kwargs", *MAKE_OPTIMIZER} & {getattr(call.func, "attr", "") for call in calls}
    if len(made) == 1 and not by_base:
        return next(iter(made.values()))
    place = f"{method.scope.file}:{method.node.lineno}" if method.scope.file else trainer.where
    return None if by_base and not made else Unknown(f"{place}: the trainer's own {' or '.join(made) or 'optimizer'}")


def _called(scope: Scope, call: ast.Call) -> CallResult:
    """A call in a method that does not run here, with its literal arguments."""
    first, _, rest = ast.unparse(call.func).partition(".")
    imported = scope.find(first)
    path = ".".join((imported.path if isinstance(imported, ImportedName) else "", *[rest] * bool(rest)))
    literal = {
        word.arg: word.value.value for word in call.keywords if word.arg and isinstance(word.value, ast.Constant)
    }
    keywords: dict[str, Value] = {name: Constant(value) for name, value in literal.items()}
    return CallResult(path.rpartition(".")[2], package=path.partition(".")[0], keywords=keywords)


def _optimizer(step: CallResult) -> CallResult | None:
    """What a call of `step` steps: an optimizer, also one that is handed to a scaler."""
    given = step.positional[0] if step.positional else step.receiver
    return given if isinstance(given, CallResult) and optimizer_of(given) else None


def _precision(context: LoopContext, accelerator: CallResult | None) -> dict[str, Value]:
    word: Value | None = context.autocast
    if accelerator is not None and (precision := accelerator.argument("mixed_precision")) is not None:
        word = precision
    data = plain(word) if word is not None else None
    if isinstance(data, Unknown):
        return {"bf16": data, "fp16": data}
    return {name: Constant(data == name, getattr(word, "where", "")) for name in ("bf16", "fp16")}


def _accumulation(turns: list[LoopContext], accelerator: CallResult | None, place: str) -> Value:
    steps = accelerator.argument("gradient_accumulation_steps") if accelerator is not None else None
    if steps is not None:
        return steps
    counts = [divisor for context in turns for divisor in context.divisors if divisor is not None]
    if counts:
        return counts[0]
    if any(context.divisors for context in turns):
        return Unknown(f"{place}: the condition on which the optimizer steps")
    return Constant(1, place)


def _evaluated(steps: Steps, trained: CallResult | None, batch: Value) -> int | None:
    loaders = [
        context.loader for _, context in steps.forwards if context.loader is not None and context.loader is not trained
    ]
    sizes = [plain(loader.argument("batch_size", 1) or Constant(1)) for loader in loaders]
    if any(isinstance(size, Unknown) for size in sizes):
        return None
    usual = plain(batch)
    return max([int(size) for size in sizes if isinstance(usual, int) and int(size) > usual], default=0)


STEPS = ("compute_loss", "training_step", "_inner_training_loop", "get_batch_loss_metrics")
"""Methods that make the step."""
WORDS = {
    "distillation": ("teacher", "distill", "student"),
    "reinforcement learning": ("reward", "advantage", "critic", "value_head", "ppo", "grpo", "rollout"),
    "preferences": ("ref_model", "reference_model", "rejected", "chosen"),
    "embedding": ("contrastive", "info_nce", "infonce", "triplet"),
}
"""What a step trains -> parts of the names in it."""


def other_objective(trainer: CallResult, trainers: Mapping[str, str]) -> tuple[str, str]:
    """What a trainer's own step trains, and the name that says so ("" twice where nothing does).

    `trainers` holds classes of trainers of other objectives: one that the class holds or makes decides.
    """
    for method in _methods(trainer):
        for name in _names(method.node):
            if name in trainers:
                return trainers[name], name
    for method in _steps(trainer):
        for name in _names(method.node):
            for objective, parts in WORDS.items():
                if any(re.search(rf"(?:^|_){part}", name.lower()) for part in parts):
                    return objective, name
    return "", ""


def forwards(trainer: CallResult) -> int:
    """Calls of what is named as a model (`self.model(...)`) in the largest of its own steps; 0 where it has none."""
    num = [0]
    for method in _steps(trainer):
        called = (call.func for call in ast.walk(method.node) if isinstance(call, ast.Call))
        names = (of.id if isinstance(of, ast.Name) else getattr(of, "attr", "") for of in called)
        num.append(sum(name == "model" or name.endswith("_model") for name in names))
    return max(num)


def _methods(trainer: CallResult) -> Iterator[Function]:
    attributes = trainer.made_by.attributes if trainer.made_by is not None else {}
    yield from (value for value in attributes.values() if isinstance(value, Function))


def _steps(trainer: CallResult) -> Iterator[Function]:
    """Its methods that make the step, with those of its own that they call."""
    methods = {getattr(method.node, "name", ""): method for method in _methods(trainer)}
    waiting = [name for name in methods if name in STEPS]
    while waiting:
        method = methods.pop(waiting.pop(), None)
        if method is not None:
            yield method
            waiting += _names(method.node)


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr
