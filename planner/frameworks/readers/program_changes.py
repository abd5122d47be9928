"""What a program does to its model beside the call that loads it: casts, frozen parts, other sizes, other models."""

import ast
import re
from collections.abc import Iterator

from planner.core.notes import risk
from planner.frameworks.readers import common
from planner.frameworks.readers.program import loops
from planner.frameworks.readers.program.reading import Program
from planner.frameworks.readers.program.source import tree_of
from planner.frameworks.readers.program.values import (
    CallResult,
    Constant,
    Instance,
    ListValue,
    Unknown,
    Value,
    plain,
    trainer_of,
)
from planner.frameworks.readers.training import Training, loads_model, named_model, trained_times
from planner.frameworks.readers.values import Settings
from planner.options.objectives import OBJECTIVES
from planner.options.optimizers import OPTIMIZERS

CASTS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32"}
VISION = ("visual", "vision", "tower")
BESIDE = ("ref", "teacher", "reward", "judge", "critic", "rm", *VISION, "audio")
"""Parts of the names of what is frozen beside the language model that trains."""
BEHIND = ("dpo", "kto")
"""Objectives whose trainers take a reference model."""
NOT_COUNTED = {
    "rank_pattern": "ranks of single matrices (rank_pattern) are counted as the common one",
    "trainable_token_indices": "single trained rows of the embeddings (trainable_token_indices) are not counted",
    "lora_bias": "biases of adapters (lora_bias) are not counted",
    "target_parameters": "adapters on stacked expert parameters are not counted",
    "qat_scheme": common.FAKE_QUANTIZED,
    "unsloth_tiled_mlp": common.TILED_MLP,
}
"""Settings of adapters and loaders that the memory model leaves out -> what is said of it."""
LAYERS = ("layers", "h", "blocks")
"""Attributes of a model that hold its layers."""


def cast(training: Training) -> str:
    """The data type to which the model is cast after loading ("bf16"), "" where it is not."""
    for model in training.model_calls:
        moved = model.called.get("to")
        given = [] if moved is None else [*moved.positional, moved.argument("dtype")]
        words = [word for word in map(plain, given) if isinstance(word, str)]
        dtypes = [common.DTYPES[word] for word in words if word in common.DTYPES]
        if dtypes or (called := next((CASTS[word] for word in CASTS if word in model.called), "")):
            return dtypes[0] if dtypes else called
    return ""


def liger(training: Training, program: Program) -> bool:
    """Whether the program itself puts Liger's kernels into the model."""
    patched = any(call.name.startswith(("apply_liger_kernel_to", "_apply_liger_kernel_to")) for call in program.calls)
    return patched or (training.loader is not None and training.loader.owner.startswith("AutoLigerKernel"))


def optimizer(trainer: CallResult | None) -> Value | None:
    """transformers' name of the optimizer that is handed to a trainer as an object or class, or that it makes itself;
    None: transformers' own."""
    if trainer is None:
        return None
    keys = ("optimizers", "optimizer_cls_and_kwargs")
    pair = next((given for key in keys if (given := trainer.argument(key))), None)
    first = pair.items[0] if isinstance(pair, ListValue) and pair.items else pair
    if first is None or (isinstance(first, Constant) and first.data is None):
        first = loops.own_optimizer(trainer)
    if first is None or isinstance(first, Unknown):
        return first
    where = getattr(first, "where", "") or trainer.where
    if name := loops.optimizer_of(first):
        return Constant(OPTIMIZERS[name].transformers or name, where)
    return Unknown(f"{where}: an optimizer of its own is handed to the trainer")


def attention(training: Training, text: str, program: Program) -> str:
    """The attention that the program sets on a loaded model or its configuration, "" where it sets none."""
    for made in program.calls:
        word = plain(made.argument("attn_implementation", 0)) if made.name == "set_attn_implementation" else None
        if isinstance(word, str):
            return word
    for node in ast.walk(tree_of(text)) if "_attn_implementation" in text else ():
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(isinstance(target, ast.Attribute) and target.attr.endswith("attn_implementation") for target in targets):
            word = node.value if isinstance(node, ast.Assign) else None
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                return word.value
    # transformers takes a handed configuration's attention where the model's own loading names none
    loader, key = training.loader, "attn_implementation"
    given = loader.argument("config") if loader is not None and loader.argument(key) is None else None
    word = plain(given.argument(key)) if isinstance(given, CallResult) else None
    return word if isinstance(word, str) else ""


def resized(training: Training, text: str, name: str) -> str:
    """Where and how the program makes another model of the one that it loads, "" where it does not."""
    given = training.loader.argument("config") if training.loader is not None else None
    for call in (given, training.loader):
        if isinstance(call, CallResult) and (keys := sorted(common.SIZES & {*call.keywords, *call.attributes})):
            return f"{call.where}: {', '.join(keys)} of its configuration is changed"
    for node in ast.walk(tree_of(text)) if any(f".{word} =" in text for word in LAYERS) else ():
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Attribute):
                continue
            if target.attr in LAYERS and "self" not in ast.unparse(target):
                return f"{name}:{target.lineno}: the model's layers are replaced"
    return ""


def freezes_parameters(text: str, program: Program) -> int:
    """The line on which a program switches parameters of the model off, 0 where it does not."""
    out = {node for branch, runs in program.branches.items() if not runs for node in ast.walk(branch)}
    for node, subject in _switches(text):
        if node in out:
            continue
        value = node.value if isinstance(node, ast.Assign) else node.args[0]
        on = isinstance(value, ast.Constant) and value.value is True
        if not on and not any(part in subject.lower() for part in BESIDE):
            return node.lineno
    return 0


def _switches(text: str) -> Iterator[tuple[ast.Assign | ast.Call, str]]:
    """Every line that sets `requires_grad`, with what it is set on (of a loop: what that goes over)."""
    over: dict[ast.AST, str] = {}
    for node in ast.walk(tree_of(text)) if "requires_grad" in text else ():
        if isinstance(node, ast.For):
            over |= dict.fromkeys(ast.walk(node), f"{ast.unparse(node.iter)} ")
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
                    yield node, over.get(node, "") + ast.unparse(target.value)
        elif isinstance(node, ast.Call) and node.args and getattr(node.func, "attr", "") == "requires_grad_":
            yield node, over.get(node, "") + ast.unparse(node.func)


def unfreezes_parameters(text: str) -> int:
    """The line on which a program switches parameters to training by their names, 0 where it does not."""
    for node in ast.walk(tree_of(text)) if "requires_grad_" in text and "named_parameters" in text else ():
        if isinstance(node, (ast.ListComp, ast.For)) and "named_parameters" in ast.dump(node):
            called = (
                child for child in ast.walk(node) if isinstance(child, ast.Attribute) and child.attr == "requires_grad_"
            )
            if next(called, None) is not None:
                return node.lineno
    return 0


def second_model(program: Program, training: Training) -> str:
    """Another model that lies on the GPU while this one trains, with its place; "" where none is known to.

    Those that the trainer is handed (but a reference, which preference training counts), and those of the main module
    that are loaded before the training and not deleted; copies of what is loaded.
    """
    trainer = training.trainer
    if trainer is None or trainer not in program.calls:
        return ""
    of_preferences = trainer.argument("ref_model", 1) if training.objective in BEHIND else None
    reference = _loader(of_preferences) if isinstance(of_preferences, CallResult) else None
    rewards = trainer.argument("reward_funcs", 1) if OBJECTIVES[training.objective].rolls_out else None
    for reward in rewards.items if isinstance(rewards, ListValue) else [rewards]:
        if isinstance(reward, Constant) and isinstance(reward.data, str) and "/" in reward.data:
            return f"{reward.where}: the reward model {reward.data}"
    before = program.calls[: program.calls.index(trainer)]
    handed = [call for value in trainer.keywords.values() for call in _objects(value)]
    for value in (*handed, *(call for variable in program.module.names.values() for call in _objects(variable))):
        loader = _loader(value)
        if loader is None or loader in (training.loader, reference, *training.model_calls) or "del" in value.called:
            continue
        if loader in before and (value in handed or _on_gpu(value, loader)):
            name = plain(named_model(loader))
            return f"{loader.where}: {name if isinstance(name, str) else 'a model'} is loaded beside it"
    for copy in (call for call in before if call.name == "deepcopy" and call is not of_preferences):
        loader = _loader(copy) if not any("peft_model_state" in call.name for call in _call_chain(copy)) else None
        if loader is not None and "del" not in copy.called and any(_on_gpu(call, loader) for call in _call_chain(copy)):
            return f"{copy.where}: a copy of the model lies beside it"
    return ""


def loaded_again(program: Program, training: Training, text: str) -> tuple[str, str]:
    """Where and in which type the trained model's base goes to the GPU once more after the training, while the trainer
    holds the first ("" twice: it does not): to merge into it, mostly."""
    trainer = training.trainer
    if trainer is None or not program.trained or "del" in trainer.called or trainer not in program.calls:
        return "", ""
    named = named_model(training.loader) if training.loader is not None else training.model or Constant("")
    trained_name = plain(named)
    at_hand = trainer in program.module.names.values()
    for call in program.calls[program.calls.index(trainer) :]:
        if call.name != "from_pretrained" or not (loads_model(call.owner) or call.owner.startswith("AutoPeft")):
            continue
        names = (str(name).rpartition("/")[2].lower() for name in (plain(named_model(call)), trained_name))
        base = call.owner.startswith("AutoPeft") or len(set(names)) == 1
        if not at_hand and _function(text, call.where) != _function(text, trainer.where):
            continue
        quantized = any(call.argument(key) for key in ("quantization_config", "load_in_4bit", "load_in_8bit"))
        if base and not quantized and _on_gpu(call, call):
            dtype = str(plain(call.argument("dtype") or call.argument("torch_dtype")))
            return call.where, common.DTYPES.get(dtype, "bf16")
    return "", ""


def _function(text: str, where: str) -> str | None:
    """The function of the main file that a line lies in, None where that is not told."""
    line = int(where.rpartition(":")[2]) if where.rpartition(":")[2].isdigit() else 0
    inside = (function for function in ast.walk(tree_of(text)) if isinstance(function, ast.FunctionDef))
    return next((function.name for function in inside if function.lineno <= line <= (function.end_lineno or 0)), None)


def reference(training: Training, method: str, arguments: Settings) -> str:
    """Which reference model that a preference trainer is handed lies beside what is counted; "" where none does: the
    policy's own copy stands for it."""
    given = training.trainer.argument("ref_model", 1) if training.trainer is not None else None
    loader = _loader(given) if isinstance(given, CallResult) else None
    if loader is None or training.loader is None or loader is training.loader:
        return ""
    if method != "full":
        return f"{loader.where}: a reference model is loaded beside the adapters' base"
    names = {plain(named_model(call)) for call in (loader, training.loader)}
    if len(names) > 1 and all(isinstance(name, str) for name in names):
        return f"{loader.where}: the reference is another model"
    if any(plain(loader.argument(key)) != plain(training.loader.argument(key)) for key in OF_LOADING):
        arguments.approximate(f"the reference model ({loader.where}) is counted in the policy's own type")
    return ""


OF_LOADING = ("dtype", "torch_dtype", "load_in_4bit", "load_in_8bit")
"""What decides how much a loaded model takes, beside its name."""


def _objects(value: Value) -> list[CallResult]:
    if isinstance(value, ListValue):
        return [call for call in value.items if isinstance(call, CallResult)]
    inner = list(value.attributes.values()) if isinstance(value, Instance) and value.made_by is not None else [value]
    return [call for call in inner if isinstance(call, CallResult)]


def _loader(value: Value | None) -> CallResult | None:
    last = ([None, *_call_chain(value)])[-1]
    return last if last is not None and last.name == "from_pretrained" and loads_model(last.owner) else None


def _call_chain(value: Value | None) -> Iterator[CallResult]:
    for _ in range(8):
        if not isinstance(value, CallResult) or trainer_of(value).name.endswith("Trainer"):
            return
        yield value
        if value.name == "item" or (value.name == "from_pretrained" and loads_model(value.owner)):
            return
        value = value.argument("model", 0) or value.receiver


def _on_gpu(value: CallResult, loader: CallResult) -> bool:
    """Whether a model is certainly put on the GPU: `from_pretrained` alone leaves it on the host, but Unsloth's."""
    if loader.owner.startswith("Fast"):
        return True
    moved = value.called.get("to")
    words = [loader.argument("device_map"), moved.argument("device", 0) if moved is not None else None]
    places = [plain(word) for word in words if word is not None]
    return "cuda" in value.called or any(place != "cpu" and place not in common.DTYPES for place in map(str, places))


TRAINED_QUANTIZERS = re.compile(
    r"^[^\S\n]*+(?:from|import) (pytorch_quantization|brevitas|neural_compressor|torchao\.quantization\.qat)\b",
    re.MULTILINE,
)
"""Packages that put quantizers between a model's layers which hold more than the layers alone."""


def note(
    training: Training, program: Program, text: str, *, loader: Settings, lora: Settings, arguments: Settings
) -> None:
    """What the memory model does not follow, and what a person should know."""
    for settings in (loader, lora):
        settings.leave_out(NOT_COUNTED)
    trainer, supervised = training.trainer, OBJECTIVES[training.objective].supervised
    if trainer is not None and supervised and loops.forwards(trainer) == 1:
        arguments.approximate(f"the loss of {trainer.owner} is its own: counted as the stack's")
    if TRAINED_QUANTIZERS.search(text):
        arguments.approximate(common.FAKE_QUANTIZED)
    if lora.values and (line := unfreezes_parameters(text)):
        arguments.approximate(f"parameters that line {line} switches to training by their names are not counted")
    switched = " ".join(subject.lower() for _, subject in _switches(text)) if training.pictures else ""
    if training.adapter is None and any(part in switched for part in VISION):
        arguments.approximate("a frozen encoder is counted as trained")
    if trained_times(program) > 1:
        arguments.assume("the program trains more than once: the first training is read")
    for sentence in dict.fromkeys(program.not_taken):
        arguments.assume(risk(sentence))
    for source in dict.fromkeys(program.sources):
        arguments.assume(f"{source} beside it was read as well")
