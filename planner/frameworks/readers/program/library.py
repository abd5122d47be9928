"""Foreign code that settings pass through on their way: what calls and attributes of it are known to give.

Everything else becomes a `Made`: the call itself, to be looked at by whoever knows the library.
"""

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

from planner.frameworks.readers import loading, versions
from planner.frameworks.readers.program.embedding import fitted
from planner.frameworks.readers.program.options import (
    PARSERS,
    environment,
    loaded,
    of_parser,
    on_command_line,
    parents_of,
    to_value,
)
from planner.frameworks.readers.program.reading import MAX_LOOP, Reading
from planner.frameworks.readers.program.values import (
    CallResult,
    Class,
    Constant,
    DictValue,
    Function,
    ImportedName,
    Instance,
    ListValue,
    Parent,
    Scope,
    Undecided,
    Unknown,
    Value,
    argument_defaults,
    as_table,
    is_followed,
    is_trainer,
    items_of,
    plain,
    same,
    trainer_of,
    truth,
    where_of,
)

NUMBERS: dict[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "abs": abs, "round": round, "max": max, "min": min,
    "sum": sum, "len": len,
}  # fmt: skip


MAX_DIGITS = 400
"""To which `round` rounds; a float has 308 before the point."""


SETTERS: Mapping[str, Mapping[str, tuple[int, str, Any]]] = {
    "set_training": {
        "batch_size": (1, "per_device_train_batch_size", 8),
        "gradient_accumulation_steps": (5, "gradient_accumulation_steps", 1),
        "activation_checkpointing": (7, "activation_checkpointing", False),
        "gradient_checkpointing": (7, "gradient_checkpointing", False),
    },
    "set_dataloader": {
        "train_batch_size": (0, "per_device_train_batch_size", 8),
        "eval_batch_size": (1, "per_device_eval_batch_size", 8),
    },
    "set_evaluate": {
        "strategy": (0, "eval_strategy", "no"),
        "batch_size": (2, "per_device_eval_batch_size", 8),
        "accumulation_steps": (3, "eval_accumulation_steps", None),
    },
    "set_testing": {"batch_size": (0, "per_device_eval_batch_size", 8)},
    "set_optimizer": {"name": (0, "optim", "adamw_torch")},
}
"""Method of TrainingArguments -> its parameter -> place, setting, default, which it sets too.

Source: transformers 5.23 `training_args.py`.
"""


def _of_settings(reader: Reading, callee: ImportedName, first: Value | None, made: CallResult) -> Value | None:
    match callee.path:
        case "omegaconf.OmegaConf.load" | "OmegaConf.load" if first is not None:
            opened = CallResult("open", positional=[first])
            return loaded(reader, CallResult("load", positional=[opened], where=made.where))
        case "omegaconf.OmegaConf.structured" if isinstance(first, Class):
            return reader.instance(first, CallResult("", where=made.where))
        case "omegaconf.OmegaConf.to_container" | "omegaconf.OmegaConf.create" | "omegaconf.OmegaConf.structured":
            return first
        case "typing.cast" if len(made.positional) == 2:
            return made.positional[1]
        case "omegaconf.OmegaConf.merge":
            return _merged(made)
        case "omegaconf.OmegaConf.from_cli":
            return to_value(loading.with_words({}, reader.outside.arguments or ()), "the command line")
        case "inspect.signature" | "signature":
            return CallResult(
                "signature", keywords={"parameters": parameters(reader, first, made.where)}, where=made.where
            )
        case "dataclasses.fields" | "fields" if isinstance(first, ImportedName):
            taken = parameters(reader, first, made.where)
            return ListValue(list(taken.entries.values()), made.where) if isinstance(taken, DictValue) else taken
        case "dataclasses.is_dataclass" | "is_dataclass" if isinstance(first, ImportedName):
            return Constant(first.path.endswith(("Config", "Arguments")), made.where)
        case _ if callee.name in ("get_peft_config", "get_quantization_config") and isinstance(first, CallResult):
            return _of_model_config(first, made) if first.name == "ModelConfig" and not first.more else None
        case _ if callee.name == "snapshot_download":  # of the hub or of ModelScope: the folder holds that model
            named = [made.keywords.get(key) for key in ("repo_id", "model_id")]
            return next((value for value in (first, *named) if value is not None), None)
    if callee.name in ("safe_load", "load", "loads", "full_load") and callee.path.partition(".")[0] in ("yaml", "json"):
        return loaded(reader, made)
    return None


def _of_system(reader: Reading, callee: ImportedName, first: Value | None, made: CallResult) -> Value | None:
    match callee.path:
        case "platform.system":
            return Constant("Linux", f"{made.where}, Linux taken")
        case "os.environ.get" | "os.getenv" | "getenv" | "environ.get":
            return environment(reader, made)
        case "torch.cuda.is_available":
            return Constant(True, "the card")
        case "torch.xpu.is_available" | "torch.npu.is_available" | "torch.hpu.is_available":  # no card of the table
            return Constant(False, "the card")
        case _ if callee.name == "is_peft_available" and callee.path.partition(".")[0] in ("transformers", "trl"):
            return Constant(True, "peft is taken to be installed")
        case "torch.cuda.get_device_capability":
            gpu = reader.outside.gpu
            capability = (gpu.compute_capability if gpu is not None else None) or (8, 0)
            return ListValue([Constant(part, "the card") for part in capability])
        case "torch.cuda.device_count":
            return Constant(int(reader.outside.environment.get("WORLD_SIZE", "1")), "the launch")
        case "open" | "io.open":
            return CallResult("open", positional=made.positional, where=made.where)
        case "os.path.dirname":
            path = first.data if isinstance(first, Constant) else None
            return Constant(above(path), made.where) if type(path) is str else None
        case "os.path.exists" | "os.path.isfile" if (
            isinstance(plain(first), str) and reader.outside.read_exact(plain(first)) is not None
        ):
            return Constant(True, made.where)
        case "os.path.expandvars" if isinstance(first, Constant) and "$" not in str(first.data):
            return first
        case "os.path.abspath" | "os.path.realpath" | "os.path.normpath":
            return first
        case "os.getcwd" | "pathlib.Path.cwd" | "Path.cwd":
            return Constant(".", made.where)
        case "os.path.join" | "pathlib.Path" | "Path" | "os.path.expanduser" | "str" if made.positional:
            parts = [plain(argument) for argument in made.positional]
            if unknown := next((part for part in parts if isinstance(part, Unknown)), None):
                return unknown
            joinable = all(isinstance(part, (str, int, float)) for part in parts)
            return Constant("/".join(str(part) for part in parts), made.where) if joinable else None
    return None


def _of_collections(reader: Reading, callee: ImportedName, first: Value | None, made: CallResult) -> Value | None:
    match callee.path:
        case "dict" | "easydict.EasyDict" | "types.SimpleNamespace" | "argparse.Namespace" | "SimpleNamespace":
            inner = as_table(first) if first is not None else DictValue({}, made.where)
            if inner is None:
                return None
            if callee.name == "dict":
                return DictValue({**inner.entries, **made.keywords}, made.where, inner.more or made.more)
            return Instance({**inner.entries, **made.keywords}, more=inner.more or made.more)
        case "sorted" | "reversed" | "list" | "tuple" | "set" if plain(first) == "all-linear":
            return first  # what stands for the names of every linear layer
        case "sorted" | "reversed" if first is not None:
            return _in_order(first, made, backwards=callee.path == "reversed")
        case "list" | "tuple" | "set" | "frozenset":
            items = items_of(first) if first is not None else []
            return ListValue(items, made.where) if items is not None else Unknown(f"{made.where}: a list not known")
        case "vars" | "dataclasses.asdict" | "asdict" if first is not None:
            return as_table(first)
        case "any" | "all" if (parts := items_of(first) if first is not None else None) is not None:
            decides = callee.path == "any"
            truths = [truth(part) for part in parts]
            if decides in truths or None not in truths:
                return Constant(decides in truths if decides else False not in truths, made.where)
            return Undecided(f"{made.where}: depends on a condition")
        case "hasattr" if len(made.positional) == 2 and (has := _has(first, plain(made.positional[1]))) is not None:
            return Constant(has, made.where)
        case "isinstance" | "hasattr":
            classes = made.positional[1:] if callee.path == "isinstance" else []
            kinds = classes[0].items if classes and isinstance(classes[0], ListValue) else classes
            answers = {_is_a(first, kind) for kind in kinds} or {None}
            if True in answers or None not in answers:
                return Constant(True in answers, made.where)
            return Undecided(f"{made.where}: depends on a condition")
        case "range" if first is not None:
            bounds = [plain(argument) for argument in made.positional]
            if not all(isinstance(bound, int) for bound in bounds) or not 0 < len(bounds) <= 3 or 0 in bounds[2:]:
                return None
            # not len(): a range may be longer than C counts
            few = [Constant(number, made.where) for number in islice(range(*bounds), MAX_LOOP + 1)]
            return ListValue([*few]) if len(few) <= MAX_LOOP else None
    return None


def _has(value: Value | None, name: Any) -> bool | None:
    """Whether an object of settings has an attribute, None where that is not known."""
    if not isinstance(value, (DictValue, Instance)) or not isinstance(name, str):
        return None
    entries = value.entries if isinstance(value, DictValue) else value.attributes
    foreign = isinstance(value, Instance) and value.made_by is not None and value.made_by.base
    return True if name in entries else None if value.more or foreign else False


TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict}
MAPPINGS = ("dict", "Mapping", "MutableMapping", "DictConfig")
LISTS = ("list", "Sequence", "Iterable", "ListConfig")
"""Types of settings: of a table, of a list (a tuple may stand for one)."""
CLASSES = {
    "peft.PeftModel": {"peft": True, "transformers": False},
    "transformers.PreTrainedModel": {"peft": False, "transformers": True},
    "torch.nn.Module": {"peft": True, "transformers": True},
}
"""Class -> whether a model that peft, or a class of transformers, hands back is one. Source: peft 0.21
`PeftModel(PushToHubMixin, torch.nn.Module)`."""
MAX_WRAPPERS = 8


def _is_a(value: Value | None, kind: Value) -> bool | None:
    """Whether a model is of a library's class, or data of a built-in one; None where that is not known."""
    path = kind.path if isinstance(kind, ImportedName) else ""
    named = path.rpartition(".")[2]
    if isinstance(value, (DictValue, ListValue)):
        type_names = MAPPINGS if isinstance(value, DictValue) else LISTS
        return True if named in type_names else False if named in {*TYPES, *MAPPINGS, *LISTS} - {"tuple"} else None
    if isinstance(value, Constant) and named in (*MAPPINGS, "ListConfig"):
        return False
    if isinstance(value, Constant) and path in TYPES:
        return isinstance(value.data, TYPES[path])
    for _ in range(MAX_WRAPPERS):  # that hand back what they are given
        if not isinstance(value, CallResult) or value.name != "prepare_model_for_kbit_training":
            break
        value = value.argument("model", 0)
    if not isinstance(value, CallResult) or value.made_by is not None:
        return None
    loads = value.name in ("from_pretrained", "from_config") and "Model" in value.owner
    wraps = value.name == "get_peft_model" and value.package in ("peft", "unsloth")
    by = "peft" if wraps else value.package if loads and value.package in ("peft", "transformers") else ""
    if path in TYPES:
        return False if by else None
    package, _, rest = path.partition(".")
    class_path = path if package == "torch" else f"{package}.{rest.rpartition('.')[2]}"
    return CLASSES.get(class_path, {}).get(by)


def _in_order(first: Value, made: CallResult, *, backwards: bool) -> Value:
    items = items_of(first)
    values = [plain(item) for item in items or ()]
    kinds = {type(value) for value in values}
    alike = len(kinds) <= 1 and all(issubclass(kind, (int, float, str)) for kind in kinds)
    if items is None or not alike or "key" in made.keywords or backwards:
        return Unknown(f"{made.where}: the order of a list")
    return ListValue(sorted(items, key=plain, reverse=plain(made.keywords.get("reverse")) is True), made.where)


def _of_start(reader: Reading, callee: ImportedName, first: Value | None, made: CallResult) -> Value | None:
    match callee.path:
        case "fire.Fire" | "Fire" | "typer.run" if isinstance(first, Function):
            words = on_command_line(reader.outside.arguments)
            if callee.path != "typer.run":
                words = {name: _of_fire(value) for name, value in words.items()}
            return reader.called(first, CallResult("", keywords=words, where=made.where))
        case "argparse.ArgumentParser" | "ArgumentParser":
            return CallResult(
                "ArgumentParser", positional=parents_of(made), keywords=dict(made.keywords), where=made.where
            )
    return None


def _of_fire(value: Value) -> Value:
    """A word of a command line as Fire takes it: `[q_proj,v_proj]` is a list."""
    text = value.data if isinstance(value, Constant) else None
    if not isinstance(text, str) or not text.startswith("[") or not text.endswith("]"):
        return value
    where = where_of(value)
    return ListValue([Constant(part.strip(" '\""), where) for part in text[1:-1].split(",") if part.strip()], where)


def parameters(reader: Reading, callee: Value | None, place: str) -> Value:
    """The names that a class of a library takes, for programs that hand on those alone."""
    name = callee.path.removesuffix(".__init__").rpartition(".")[2] if isinstance(callee, ImportedName) else ""
    names = versions.taken_by(name, reader.outside.versions)
    if not names:
        return Unknown(f"{place}: what {name or 'a function'} of the installed version takes")
    kind = Constant("KEYWORD_ONLY", place)
    return DictValue(
        {
            parameter: Instance({"name": Constant(parameter, f"{name}'s parameters"), "kind": kind})
            for parameter in sorted(names)
        },
        place,
    )


def _of_model_config(model: CallResult, made: CallResult) -> Value:
    """What TRL's helpers make of its `ModelConfig`. Source: TRL 1.16 `trainer/utils.py`."""
    arguments = {**argument_defaults(model), **model.keywords, **model.attributes}
    if made.name == "get_peft_config":
        if plain(arguments["use_peft"]) is not True:
            return Constant(None, made.where)
        names = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
        names |= {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
        return CallResult(
            "LoraConfig", keywords={key: arguments[name] for key, name in names.items()}, where=made.where
        )
    bits = next((key for key in ("load_in_4bit", "load_in_8bit") if plain(arguments[key]) is True), "")
    if not bits:
        return Constant(None, made.where)
    double = {"bnb_4bit_use_double_quant": arguments["use_bnb_nested_quant"]} if bits == "load_in_4bit" else {}
    return CallResult("BitsAndBytesConfig", keywords={bits: arguments[bits], **double}, where=made.where)


def above(path: str) -> str:
    """The folder that holds a path, which may be relative to the program's own folder."""
    beyond = path in (".", "") or path.endswith("..")
    return posixpath.normpath(posixpath.join(path, "..")) if beyond else posixpath.dirname(path) or "."


def _number(name: str, made: CallResult) -> Value:
    # the tokenizer's own limit is at least as far as the other bound that a program gives with it
    limited = name == "min" and len(made.positional) > 1
    kept = [
        argument
        for argument in made.positional
        if not (limited and getattr(argument, "name", "") == "model_max_length")
    ]
    arguments = [plain(argument) for argument in kept]
    missing = next((value for value in arguments if isinstance(value, Unknown)), None)
    if missing is not None or not arguments:
        return missing or Unknown(f"{made.where}: the tokenizer's own limit")
    if limited and len(arguments) == 1:
        return Constant(arguments[0], where_of(kept[0]) or made.where)
    if name == "len" and isinstance(made.positional[0], (DictValue, ListValue)):
        return Constant(len(arguments[0]), made.where)
    elements = arguments[0] if isinstance(arguments[0], list) else []
    numbers = all(isinstance(element, (int, float)) for element in elements)
    digits = arguments[1] if name == "round" and len(arguments) > 1 else 0
    if (name == "sum" and not numbers) or (isinstance(digits, int) and abs(digits) > MAX_DIGITS):
        return Unknown(f"{made.where}: computed while the program runs")
    try:
        return Constant(NUMBERS[name](*arguments), where_of(made.positional[0]) or made.where)
    except (TypeError, ValueError, OverflowError):
        return Unknown(f"{made.where}: computed while the program runs")


def _merged(made: CallResult) -> Value:
    merged = DictValue({}, made.where)
    for argument in made.positional:
        inner = as_table(argument)
        if inner is None or inner.more:
            why = f"{made.where}: merged with what is not known"
            merged.take(inner, argument.reason if isinstance(argument, Unknown) else why)
            continue
        for key, value in inner.entries.items():
            before = merged.entries.get(key)
            both = isinstance(before, (DictValue, Instance)) and isinstance(value, (DictValue, Instance))
            inside = CallResult("", positional=[side for side in (before, value) if side is not None], where=made.where)
            merged.entries[key] = _merged(inside) if both else value
        merged.more = merged.more or inner.more
    return merged


MAX_PARENTS = 8


PATH_PARTS: dict[str, Callable[[str], str]] = {
    "parent": above,
    "name": posixpath.basename,
    "stem": lambda path: posixpath.splitext(posixpath.basename(path))[0],
    "suffix": lambda path: posixpath.splitext(path)[1],
}
"""Attributes of a `Path`, which is read as its text."""
SAME_PATH = ("resolve", "absolute", "expanduser", "as_posix")
THERE = ("exists", "is_file")
"""What is asked of a path; of a file that is not at hand nothing is known."""
BF16_QUESTIONS = ("is_bf16_supported", "is_torch_bf16_gpu_available", "is_bfloat16_supported")
"""Of torch, of transformers (which asks torch) and of Unsloth."""
SAME_OBJECT = (
    "to", "cuda", "train", "eval", "half", "bfloat16", "float", "requires_grad_", "for_training", "for_inference",
    "gradient_checkpointing_enable", "gradient_checkpointing_disable", "enable_input_require_grads", "add_callback",
    "freeze_encoder",
)  # fmt: skip
"""Methods that change a model or trainer and give it back, or nothing."""
OF_SETTINGS = ("get", "pop", "setdefault", "items", "keys", "values", "copy", "lower", "strip")
"""Methods that hand on what settings hold."""
PREPARED = ("prepare", "prepare_model", "compile")
TEXT_METHODS = (
    "lower", "upper", "strip", "rstrip", "lstrip", "replace", "startswith", "endswith", "split", "rsplit", "title",
    "removeprefix", "removesuffix",
)  # fmt: skip


def attribute(reader: Reading, value: Value, name: str, place: str) -> Value:
    """value.name"""
    if name == "do_train" and reader.outside.arguments is not None:
        reader.program.do_train_decides = True
    match value:
        case ImportedName():
            # An attribute of something imported or built in.
            if name == "is_floating_point" and value.path.startswith("torch."):
                return Constant("float" in value.name, place)
            if name in ("__dataclass_fields__", "__annotations__"):
                return parameters(reader, value, place)
            if (value.path, name) == ("sys", "argv"):
                words = [Constant(word, "the command line") for word in reader.outside.arguments or ()]
                return ListValue([Constant(reader.name), *words], "the command line")
            if (value.path, name) in (("sys", "platform"), ("os", "name")):
                return Constant("linux" if name == "platform" else "posix", f"{place}, Linux taken")
            return ImportedName(f"{value.path}.{name}")
        case Instance() | Class():
            if name in value.attributes:
                member = value.attributes[name]
                if isinstance(member, Function) and isinstance(value, Instance) and value.made_by is not None:
                    return member.bound_to(value, value.made_by)
                if isinstance(member, Function) and isinstance(value, Class):
                    return member.bound_to(None, value)
                return member
            if isinstance(value, Instance) and value.more:
                return Unknown(value.more)
            if name == "__dict__" and isinstance(value, Instance):
                return DictValue(reader.copied(value.attributes), place)
            kind = value.made_by if isinstance(value, Instance) else value
            if kind is None or not kind.base:  # foreign code may have it
                return Unknown(f"{place}: {name} is not set in the program")
        case Parent():
            found_in = next((parent for parent in value.kind.parents if name in parent.attributes), None)
            inherited = found_in.attributes[name] if found_in is not None else None
            if isinstance(inherited, Function):
                kind = value.of.made_by if isinstance(value.of, Instance) else value.of
                return inherited.bound_to(value.of, kind)
            return inherited or CallResult(name, receiver=value, where=place)
        case DictValue() if name in value.entries:  # of OmegaConf: settings are its attributes
            return value.entries[name]
        case DictValue() if value.more and name not in dir(dict):
            return Unknown(value.more)
        case Constant(data=str()) if name in PATH_PARTS:
            return Constant(PATH_PARTS[name](value.data), place)
        case Constant(data=str()) if name == "parents":
            folders = list(accumulate(range(MAX_PARENTS), lambda path, _: above(path), initial=value.data))
            return ListValue([Constant(path, place) for path in folders[1:]], place)
        case CallResult():
            if name in value.attributes:
                return value.attributes[name]
            if name in value.keywords:
                return value.keywords[name]
            if value.more and is_followed(value.name):
                return Unknown(value.more)
            defaults = argument_defaults(value)
            return defaults.get(name) or CallResult(name, owner=value.name, receiver=value, where=place)
        case Unknown():
            return value
    return CallResult(name, receiver=value, where=place)


def call(reader: Reading, callee: Value, made: CallResult, scope: Scope | None = None) -> Value:
    """What a call of foreign code gives; `scope`: where it stands."""
    if isinstance(callee, ImportedName):
        kind = scope.find("__class__") if scope is not None else None
        holder = next(iter(scope.names.values()), None) if scope is not None else None
        if callee.path == "super" and isinstance(holder, (Instance, Class)) and isinstance(kind, Class):
            return Parent(holder, kind)
        made.name, made.owner = callee.name, callee.path.rpartition(".")[0].rpartition(".")[2]
        made.package = callee.path.partition(".")[0]
        argument = made.positional[0] if made.positional else None
        for part in (_by_others, _of_settings, _of_system, _of_collections, _of_start):
            if (returned := part(reader, callee, argument, made)) is not None:
                return returned
        if callee.name in NUMBERS and callee.path == callee.name and made.positional:
            return _number(callee.name, made)
    elif isinstance(callee, CallResult) and callee.name == "partial" and callee.positional:
        inner, *before = callee.positional
        made.positional, made.keywords = [*before, *made.positional], {**callee.keywords, **made.keywords}
        if isinstance(inner, Function):
            return reader.called(inner, made)
        return reader.instance(inner, made) if isinstance(inner, Class) else call(reader, inner, made, scope)
    elif isinstance(callee, CallResult):
        made.receiver, made.owner = callee.receiver, callee.owner
        if callee.receiver is not None:
            # Remembers what differentiates, and what steps.
            if made.name == "backward":
                given = made.positional[0] if made.positional else made.receiver
                reader.program.steps.goes_backward(given or Constant(None), made.where, reader.turn)
            elif made.name == "step":
                reader.program.steps.updates.append((made, reader.turn))
            returned = _of_object(reader, callee.receiver, made)
            if returned is not None:
                return returned
        else:
            made.name, made.of = made.name or callee.name, callee
            reader.program.steps.goes_forward(made, reader.turn)
    elif isinstance(callee, Unknown):
        if made.name in OF_SETTINGS:  # of settings that are not known: for the same reason
            return Unknown(callee.reason)
        made.more = made.more or callee.reason
    if made.name == "ScalingConfig":
        reader.program.workers = made.argument("num_workers", 1) or Constant(1, made.where)
    # Functions handed to foreign code (`dataset.map(tokenize)`) will be called with what is not known, and with what
    # `fn_kwargs` or `partial` say.
    named = made.keywords.get("fn_kwargs")
    keywords = dict(named.entries) if isinstance(named, DictValue) else made.keywords if made.name == "partial" else {}
    first = made.positional[1:] if made.name == "partial" else []
    if (config := made.argument("train_loop_config")) is not None:  # Ray hands it to each worker
        first = [config]
    for value in (*made.positional, *made.keywords.values()):
        if isinstance(value, Function) and id(value.node) not in reader.entered:
            reader.uncertain += 1
            try:
                reader.called(value, CallResult("", positional=list(first), keywords=dict(keywords), where=made.where))
            finally:
                reader.uncertain -= 1
    reader.program.calls.append(made)
    if made.name in BF16_QUESTIONS:
        return Constant(reader.outside.half == "bf16" or _counts_emulation(reader, made), "the card")
    return made


def _counts_emulation(reader: Reading, made: CallResult) -> bool:
    """Whether the question about bf16 is answered yes by a card that emulates it (Turing, Volta): torch's is, unless
    told; Unsloth's is not, and importing Unsloth changes torch's.

    Source: torch 2.9 `torch.cuda.is_bf16_supported`; unsloth/models/_utils.py.
    """
    emulation = made.argument("including_emulation", 0)
    if isinstance(emulation, Constant):
        return bool(emulation.data)
    names = reader.program.module.names.values()
    unsloth = any(isinstance(value, ImportedName) and value.path.split(".")[0].startswith("unsloth") for value in names)
    return made.name != "is_bfloat16_supported" and not unsloth


def _by_others(reader: Reading, callee: ImportedName, first: Value | None, made: CallResult) -> Value | None:
    if callee.path == "getattr" and len(made.positional) >= 2:
        holder, key = made.positional[0], plain(made.positional[1])
        if not isinstance(key, str) or not isinstance(holder, (Instance, ImportedName, Class)):
            return Unknown(f"{made.where}: computed while the program runs")
        absent = isinstance(holder, Instance) and key not in holder.attributes and not holder.more
        return made.positional[2] if absent and len(made.positional) > 2 else attribute(reader, holder, key, made.where)
    if callee.path == "setattr" and len(made.positional) == 3:
        owner, name, value = made.positional
        if isinstance(owner, (CallResult, Instance)) and isinstance(plain(name), str):
            reader.store(owner.attributes, str(plain(name)), value, made.where)
            return Constant(None, made.where)
    if callee.name in ("replace", "copy", "deepcopy") and callee.path.startswith(("dataclasses.", "copy.")):
        return _copied(reader, made)
    return None


def _of_object(reader: Reading, owner: Value, made: CallResult) -> Value | None:
    name = made.name
    first = made.positional[0] if made.positional else None
    if isinstance(owner, Constant) and isinstance(owner.data, str):
        return _of_text(reader, owner, made)
    if isinstance(owner, DictValue):
        return _of_table(reader, owner, made)
    if isinstance(owner, Class) and name in ("model_validate", "parse_obj") and isinstance(first, DictValue):
        given = CallResult("", keywords=dict(first.entries), more=first.more, where=made.where)
        return reader.instance(owner, given)
    if isinstance(owner, ListValue):
        if name in ("append", "add") and first is not None:
            owner.items.append(first)
        elif name in ("remove", "discard") and first is not None:
            owner.items[:] = [item for item in owner.items if not same(item, first)]
        elif name in ("extend", "update") and first is not None:
            more = items_of(first)
            owner.items += [Unknown(f"{made.where}: a list not known")] if more is None else more
        elif name in ("keys", "copy"):
            return owner
        elif name == "index" and first is not None:
            data = [plain(item) for item in owner.items]
            return Constant(data.index(plain(first)), made.where) if plain(first) in data else None
        return None
    if not isinstance(owner, CallResult):
        return None
    if owner.name == "ArgumentParser" or owner.name in PARSERS:
        return of_parser(reader, owner, made)
    if name in SETTERS and is_followed(owner.name):
        for parameter, (position, setting, default) in SETTERS[name].items():
            value = made.argument(parameter, position) or Constant(default, made.where)
            open_ = Unknown(f"{made.where}: {setting} is set under a condition that is not known")
            owner.attributes[setting] = open_ if reader.uncertain else value
        return owner
    if name == "train" and is_trainer(trainer_of(owner)):
        reader.program.trained.append((trainer_of(owner), reader.uncertain > 0))
        return made
    if name == "fit" and owner.name == "SentenceTransformer":
        trainer = fitted(owner, made)
        reader.program.calls.append(trainer)
        reader.program.trained.append((trainer, reader.uncertain > 0))
        return made
    if owner.name == "open" and name in ("read", "readline"):
        return owner
    if name in PREPARED and made.positional:
        return made.positional[0] if len(made.positional) == 1 else ListValue(made.positional, made.where)
    if name in SAME_OBJECT:
        owner.called[name] = made
        return owner
    return None


def _of_text(reader: Reading, owner: Constant, made: CallResult) -> Value | None:
    if made.name in SAME_PATH:
        return owner
    if made.name in THERE and reader.outside.read_exact(owner.data) is not None:
        return Constant(True, made.where)
    if made.name == "is_absolute":
        return Constant(owner.data.startswith("/"), made.where)
    if made.name in ("open", "read_text"):
        return CallResult("open", positional=[owner], where=made.where)
    arguments = [plain(argument) for argument in made.positional]
    if any(isinstance(argument, Unknown) for argument in arguments):
        return Unknown(f"{made.where}: text put together while the program runs")
    if made.name == "joinpath" and all(isinstance(argument, str) for argument in arguments):
        return Constant("/".join([owner.data, *arguments]), made.where)
    if made.name == "join" and arguments and isinstance(arguments[0], list):
        return Constant(owner.data.join(str(part) for part in arguments[0])[:10_000], made.where)
    if made.name not in TEXT_METHODS or len(owner.data) > 10_000:
        return Unknown(f"{made.where}: text put together while the program runs")
    try:
        result = getattr(owner.data, made.name)(*arguments)
    except (TypeError, ValueError):
        return Unknown(f"{made.where}: text put together while the program runs")
    return to_value(result, made.where)


def _of_table(reader: Reading, owner: DictValue, made: CallResult) -> Value | None:
    first = made.positional[0] if made.positional else None
    match made.name:
        case "get" | "pop" | "setdefault" if first is not None:
            key = plain(first)
            if isinstance(key, str) and key in owner.entries:
                gone = made.name == "pop" and not reader.uncertain
                return owner.entries.pop(key) if gone else owner.entries[key]
            if owner.more:
                return Unknown(owner.more)
            return made.positional[1] if len(made.positional) > 1 else Constant(None, made.where)
        case "update":
            other = as_table(first) if first is not None else DictValue({})
            owner.take(other, f"{made.where}: updated with what is not known")
            owner.entries |= made.keywords
            return Constant(None)
        case "items" | "keys" | "values" if owner.more:
            return Unknown(owner.more)
        case "items":
            return ListValue([ListValue([Constant(key), value]) for key, value in owner.entries.items()])
        case "keys":
            return ListValue([Constant(key) for key in owner.entries])
        case "values":
            return ListValue(list(owner.entries.values()))
        case "copy":
            return DictValue(dict(owner.entries), owner.where, owner.more)
    return None


def _copied(reader: Reading, made: CallResult) -> Value | None:
    """A copy of settings, with what is said anew; None of what holds none, such as a model."""
    match made.argument("obj", 0):
        case CallResult() as original if is_followed(original.name) and not is_trainer(original):
            duplicate = replace(
                original, keywords={**original.keywords, **made.keywords}, attributes=reader.copied(original.attributes)
            )
            duplicate.more = original.more or made.more
            return duplicate
        case Instance() as original:
            return Instance(
                {**reader.copied(original.attributes), **made.keywords}, original.made_by, original.more or made.more
            )
        case DictValue() as table:
            return DictValue(reader.copied(table.entries), table.where, table.more)
        case ListValue() as items:
            return ListValue(list(items.items), items.where)
    return None
