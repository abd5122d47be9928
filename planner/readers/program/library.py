"""Foreign code that settings pass through on their way: what calls and attributes of it are known to give.

Everything else becomes a `Made`: the call itself, to be looked at by whoever knows the library.
"""

import posixpath
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from planner.readers import hydra, schema
from planner.readers.program.embedding import fitted
from planner.readers.program.files import environment, loaded, to_value
from planner.readers.program.objects import (
    argument_defaults,
    as_table,
    is_followed,
    is_trainer,
    items_of,
    trainer_of,
    truth,
)
from planner.readers.program.options import PARSERS, of_parser, on_command_line, parents_of
from planner.readers.program.values import (
    Class,
    Dotted,
    Function,
    Instance,
    Items,
    Known,
    Made,
    Table,
    Unknown,
    Value,
    plain,
    where_of,
)

if TYPE_CHECKING:
    from planner.readers.program.reading import Reading

MAX_PARENTS = 8


def _above(path: str) -> str:
    """The folder that holds a path, which may be relative to the program's own folder."""
    beyond = path in (".", "") or path.endswith("..")
    return posixpath.normpath(posixpath.join(path, "..")) if beyond else posixpath.dirname(path) or "."


PATH_PARTS: dict[str, Callable[[str], str]] = {
    "parent": _above,
    "name": posixpath.basename,
    "stem": lambda path: posixpath.splitext(posixpath.basename(path))[0],
    "suffix": lambda path: posixpath.splitext(path)[1],
}
"""Attributes of a `Path`, which is read as its text."""
SAME_PATH = ("resolve", "absolute", "expanduser", "as_posix")
BF16_QUESTIONS = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")
SAME_OBJECT = (
    "to", "cuda", "train", "eval", "half", "bfloat16", "float", "requires_grad_", "for_training", "for_inference",
    "gradient_checkpointing_enable", "gradient_checkpointing_disable", "enable_input_require_grads", "add_callback",
)  # fmt: skip
"""Methods that change a model or trainer and give it back, or nothing."""
PREPARED = ("prepare", "prepare_model", "compile")
TEXT_METHODS = (
    "lower", "upper", "strip", "rstrip", "lstrip", "replace", "startswith", "endswith", "split", "rsplit", "title",
    "removeprefix", "removesuffix",
)  # fmt: skip
NUMBERS: dict[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "abs": abs, "round": round, "max": max, "min": min,
    "sum": sum, "len": len,
}  # fmt: skip


def _command_line(reader: "Reading") -> Items:
    """`sys.argv`: the program's name, and what is said of its words."""
    words = reader.outside.arguments or ()
    return Items([Known(reader.name), *(Known(word, "the command line") for word in words)], "the command line")


def attribute(reader: "Reading", value: Value, name: str, place: str) -> Value:
    """value.name"""
    if name == "do_train" and reader.outside.arguments is not None:
        reader.program.do_train_decides = True
    match value:
        case Dotted():
            return _of_dotted(reader, value, name, place)
        case Instance() | Class():
            if name in value.attributes:
                found = value.attributes[name]
                if isinstance(found, Function) and isinstance(value, Instance) and value.made_by is not None:
                    return Function(found.node, found.scope, value, found.options)
                return found
            if isinstance(value, Instance) and value.more:
                return Unknown(value.more)
            if name == "__dict__" and isinstance(value, Instance):
                return Table(dict(value.attributes), place)
            return Unknown(f"{place}: {name} is not set in the program")
        case Table() if name in value.entries:  # of OmegaConf: settings are its attributes
            return value.entries[name]
        case Known(data=str()) if name in PATH_PARTS:
            return Known(PATH_PARTS[name](value.data), place)
        case Known(data=str()) if name == "parents":
            above = list(accumulate(range(MAX_PARENTS), lambda path, _: _above(path), initial=value.data))
            return Items([Known(path, place) for path in above[1:]], place)
        case Made():
            if name in value.attributes:
                return value.attributes[name]
            if name in value.keywords:
                return value.keywords[name]
            if value.more and is_followed(value.name):
                return Unknown(value.more)
            own = argument_defaults(value)
            return own[name] if name in own else Made(name, owner=value.name, receiver=value, where=place)
        case Unknown():
            return value
    return Made(name, receiver=value, where=place)


def _of_dotted(reader: "Reading", value: Dotted, name: str, place: str) -> Value:
    """An attribute of something imported or built in."""
    if name == "is_floating_point" and value.path.startswith("torch."):
        return Known("float" in value.name, place)
    if name in ("__dataclass_fields__", "__annotations__"):
        return _parameters(reader, value, place)
    return _command_line(reader) if (value.path, name) == ("sys", "argv") else Dotted(f"{value.path}.{name}")


def call(reader: "Reading", callee: Value, made: Made) -> Value:
    """What a call of foreign code gives."""
    outside = reader.outside
    if isinstance(callee, Dotted):
        made.name, made.owner = callee.name, callee.path.rpartition(".")[0].rpartition(".")[2]
        made.package = callee.path.partition(".")[0]
        known = _of_module(reader, callee, made)
        if known is not None:
            return known
    elif isinstance(callee, Made):
        made.receiver, made.owner = callee.receiver, callee.owner
        if callee.receiver is not None:
            known = _of_object(reader, callee.receiver, made)
            if known is not None:
                return known
        else:
            made.name = made.name or callee.name
    elif isinstance(callee, Unknown):
        made.more = made.more or callee.reason
    _run_handed_functions(reader, made)
    reader.program.made.append(made)
    if made.name in BF16_QUESTIONS:
        return Known(outside.bf16, "the card")
    return made


def _of_model_config(model: Made, made: Made) -> Value:
    """What TRL's helpers make of its `ModelConfig`. Source: TRL 1.16 `trainer/utils.py`."""
    said = {**argument_defaults(model), **model.keywords, **model.attributes}
    if made.name == "get_peft_config":
        if plain(said["use_peft"]) is not True:
            return Known(None, made.where)
        names = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
        names |= {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
        return Made("LoraConfig", keywords={key: said[name] for key, name in names.items()}, where=made.where)
    bits = next((key for key in ("load_in_4bit", "load_in_8bit") if plain(said[key]) is True), "")
    if not bits:
        return Known(None, made.where)
    double = {"bnb_4bit_use_double_quant": said["use_bnb_nested_quant"]} if bits == "load_in_4bit" else {}
    return Made("BitsAndBytesConfig", keywords={bits: said[bits], **double}, where=made.where)


def _run_handed_functions(reader: "Reading", made: Made) -> None:
    """Functions handed to foreign code (`dataset.map(tokenize)`) will be called with what is not known, and with what
    `fn_kwargs` or `partial` say."""
    named = made.keywords.get("fn_kwargs")
    said = dict(named.entries) if isinstance(named, Table) else made.keywords if made.name == "partial" else {}
    first = made.positional[1:] if made.name == "partial" else []
    for value in (*made.positional, *made.keywords.values()):
        if isinstance(value, Function) and id(value.node) not in reader.entered:
            reader.uncertain += 1
            try:
                reader.called(value, Made("", positional=list(first), keywords=dict(said), where=made.where))
            finally:
                reader.uncertain -= 1


TRAINER_PARAMETERS = (
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_loss_func",
    "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
    "peft_config", "formatting_func", "quantization_config",
)  # fmt: skip
"""What `SFTTrainer` takes. Source: TRL 1.16 `trainer/sft_trainer.py`."""


def _parameters(reader: "Reading", asked: Value | None, place: str) -> Value:
    """The names that a class of TRL or transformers takes, for programs that hand on those alone."""
    name = asked.path.removesuffix(".__init__").rpartition(".")[2] if isinstance(asked, Dotted) else ""
    if not reader.outside.newest or not name.endswith(("SFTConfig", "TrainingArguments", "SFTTrainer")):
        return Unknown(f"{place}: what {name or 'a function'} of the installed version takes")
    names = TRAINER_PARAMETERS if name == "SFTTrainer" else schema.snapshot()["trl"]["fields"]
    kind = Known("KEYWORD_ONLY", place)
    return Table({one: Instance({"name": Known(one, f"{name}'s parameters"), "kind": kind}) for one in names}, place)


def _of_module(reader: "Reading", callee: Dotted, made: Made) -> Value | None:
    """Functions of modules and built-in ones."""
    first = made.positional[0] if made.positional else None
    match callee.path:
        case "omegaconf.OmegaConf.load" | "OmegaConf.load" if first is not None:
            return loaded(reader, Made("load", positional=[Made("open", positional=[first])], where=made.where))
        case "omegaconf.OmegaConf.to_container" | "omegaconf.OmegaConf.create" | "omegaconf.OmegaConf.structured":
            return first
        case "omegaconf.OmegaConf.merge":
            return _merged(made)
        case "omegaconf.OmegaConf.from_cli":
            data, _ = hydra.composed({}, reader.outside.exactly, words=reader.outside.arguments or ())
            return to_value(data, "the command line")
        case "hydra.utils.instantiate" | "hydra.utils.call" if first is not None:
            return _instantiated(reader, first, made)
        case "inspect.signature" | "signature":
            return Made("signature", keywords={"parameters": _parameters(reader, first, made.where)}, where=made.where)
        case "dataclasses.fields" | "fields" if isinstance(first, Dotted):
            taken = _parameters(reader, first, made.where)
            return Items(list(taken.entries.values()), made.where) if isinstance(taken, Table) else taken
        case "os.environ.get" | "os.getenv" | "getenv" | "environ.get":
            return environment(reader, made)
        case "torch.cuda.is_available":
            return Known(True, "the card")
        case "torch.cuda.get_device_capability":
            return Items([Known(part, "the card") for part in reader.outside.capability])
        case "torch.cuda.device_count":
            return Known(int(reader.outside.environment.get("WORLD_SIZE", "1")), "the launch")
        case "dict" | "easydict.EasyDict" | "types.SimpleNamespace" | "argparse.Namespace" | "SimpleNamespace":
            inner = as_table(first) if first is not None else Table({}, made.where)
            if inner is None:
                return None
            if callee.name in ("dict",):
                return Table({**inner.entries, **made.keywords}, made.where, inner.more or made.more)
            return Instance({**inner.entries, **made.keywords}, more=inner.more or made.more)
        case "sorted" | "reversed" if first is not None:
            found = items_of(first)
            values = [plain(one) for one in found or ()]
            alike = len({type(one) for one in values}) <= 1 and all(
                isinstance(one, (int, float, str)) for one in values
            )
            if found is None or not alike or "key" in made.keywords or callee.path == "reversed":
                return Unknown(f"{made.where}: the order of a list")
            down = plain(made.keywords.get("reverse")) is True
            return Items(sorted(found, key=plain, reverse=down), made.where)
        case "list" | "tuple" | "set" if first is not None:
            found = items_of(first)
            return Items(found, made.where) if found is not None else Unknown(f"{made.where}: a list not known")
        case "vars" | "dataclasses.asdict" | "asdict" if first is not None:
            return as_table(first)
        case "any" | "all" if (parts := items_of(first) if first is not None else None) is not None:
            decides = callee.path == "any"
            truths = [truth(one) for one in parts]
            if decides in truths or None not in truths:
                return Known(decides in truths if decides else False not in truths, made.where)
            return Unknown(f"{made.where}: depends on a condition")
        case "isinstance" | "hasattr":
            return Unknown(f"{made.where}: depends on a condition")
        case "getattr" if len(made.positional) >= 2:
            return _getattr(reader, made)
        case "open" | "io.open":
            return Made("open", positional=made.positional, where=made.where)
        case "range" if first is not None:
            bounds = [plain(one) for one in made.positional]
            if all(isinstance(one, int) for one in bounds) and len(range(*bounds)) <= 64:
                return Items([Known(number, made.where) for number in range(*bounds)])
            return None
        case _ if callee.name in ("get_peft_config", "get_quantization_config") and isinstance(first, Made):
            return _of_model_config(first, made) if first.name == "ModelConfig" and not first.more else None
        case _ if callee.name == "snapshot_download":  # of the hub or of ModelScope: the folder holds that model
            named = [made.keywords.get(key) for key in ("repo_id", "model_id")]
            return next((one for one in (first, *named) if one is not None), None)
        case "os.path.dirname":
            return (
                Known(_above(first.data), made.where) if isinstance(first, Known) and type(first.data) is str else None
            )
        case "os.path.abspath" | "os.path.realpath" | "os.path.normpath":
            return first
        case "os.getcwd" | "pathlib.Path.cwd" | "Path.cwd":
            return Known(".", made.where)
        case "os.path.join" | "pathlib.Path" | "Path" | "os.path.expanduser" | "str" if made.positional:
            parts = [plain(one) for one in made.positional]
            if isinstance(parts[0], Unknown) and callee.path == "str":
                return parts[0]
            known = all(isinstance(part, (str, int, float)) for part in parts)
            return Known("/".join(str(part) for part in parts), made.where) if known else None
        case "fire.Fire" | "Fire" | "typer.run" if isinstance(first, Function):
            words = on_command_line(reader.outside.arguments)
            return reader.called(first, Made("", keywords=words, where=made.where))
        case "argparse.ArgumentParser" | "ArgumentParser":
            return Made("ArgumentParser", positional=parents_of(made), keywords=dict(made.keywords), where=made.where)
    if callee.name in NUMBERS and callee.path == callee.name and made.positional:
        return _number(callee.name, made)
    if callee.name in ("safe_load", "load", "loads", "full_load") and callee.path.partition(".")[0] in ("yaml", "json"):
        return loaded(reader, made)
    return None


def _of_object(reader: "Reading", owner: Value, made: Made) -> Value | None:
    """Methods of objects."""
    name = made.name
    first = made.positional[0] if made.positional else None
    if isinstance(owner, Known) and isinstance(owner.data, str):
        return _of_text(owner, made)
    if isinstance(owner, Table):
        return _of_table(owner, made)
    if isinstance(owner, Items):
        if name == "append" and first is not None:
            owner.items.append(first)
        elif name == "extend" and first is not None:
            owner.items += items_of(first) or [Unknown(f"{made.where}: a list not known")]
        elif name in ("keys", "copy"):
            return owner
        elif name == "index" and first is not None:
            data = [plain(one) for one in owner.items]
            return Known(data.index(plain(first)), made.where) if plain(first) in data else None
        return None
    if not isinstance(owner, Made):
        return None
    if owner.name == "ArgumentParser" or owner.name in PARSERS:
        return of_parser(reader, owner, made)
    if name == "train" and is_trainer(trainer_of(owner)):
        reader.program.trained.append((trainer_of(owner), reader.uncertain > 0))
        return made
    if name == "fit" and owner.name == "SentenceTransformer":
        trainer = fitted(owner, made)
        reader.program.made.append(trainer)
        reader.program.trained.append((trainer, reader.uncertain > 0))
        return made
    if owner.name == "open" and name in ("read", "readline"):
        return owner
    if name in PREPARED and made.positional:
        return made.positional[0] if len(made.positional) == 1 else Items(made.positional, made.where)
    if name in SAME_OBJECT:
        owner.called[name] = made
        return owner
    return None


def _of_text(owner: Known, made: Made) -> Value | None:
    if made.name in SAME_PATH:
        return owner
    if made.name == "is_absolute":
        return Known(owner.data.startswith("/"), made.where)
    if made.name in ("open", "read_text"):
        return Made("open", positional=[owner], where=made.where)
    arguments = [plain(one) for one in made.positional]
    if any(isinstance(one, Unknown) for one in arguments):
        return Unknown(f"{made.where}: text put together while the program runs")
    if made.name == "joinpath" and all(isinstance(one, str) for one in arguments):
        return Known("/".join([owner.data, *arguments]), made.where)
    if made.name == "join" and arguments and isinstance(arguments[0], list):
        return Known(owner.data.join(str(one) for one in arguments[0])[:10_000], made.where)
    if made.name not in TEXT_METHODS or len(owner.data) > 10_000:
        return Unknown(f"{made.where}: text put together while the program runs")
    try:
        result = getattr(owner.data, made.name)(*arguments)
    except (TypeError, ValueError):
        return Unknown(f"{made.where}: text put together while the program runs")
    return to_value(result, made.where)


def _of_table(owner: Table, made: Made) -> Value | None:
    first = made.positional[0] if made.positional else None
    match made.name:
        case "get" | "pop" | "setdefault" if first is not None:
            key = plain(first)
            if isinstance(key, str) and key in owner.entries:
                return owner.entries[key]
            if owner.more:
                return Unknown(owner.more)
            return made.positional[1] if len(made.positional) > 1 else Known(None, made.where)
        case "update":
            other = as_table(first) if first is not None else Table({})
            if other is None:
                owner.more = f"{made.where}: updated with what is not known"
            else:
                owner.entries |= other.entries
                owner.more = owner.more or other.more
            owner.entries |= made.keywords
            return Known(None)
        case "items":
            if owner.more:
                return Unknown(owner.more)
            return Items([Items([Known(key), value]) for key, value in owner.entries.items()])
        case "keys":
            return Unknown(owner.more) if owner.more else Items([Known(key) for key in owner.entries])
        case "values":
            return Unknown(owner.more) if owner.more else Items(list(owner.entries.values()))
        case "copy":
            return Table(dict(owner.entries), owner.where, owner.more)
    return None


def _getattr(reader: "Reading", made: Made) -> Value:
    owner, name = made.positional[0], plain(made.positional[1])
    if isinstance(name, str):
        if isinstance(owner, Instance) and name not in owner.attributes and not owner.more and len(made.positional) > 2:
            return made.positional[2]
        if isinstance(owner, (Instance, Dotted, Class)):
            return attribute(reader, owner, name, made.where)
    return Unknown(f"{made.where}: computed while the program runs")


def _number(name: str, made: Made) -> Value:
    # the tokenizer's own limit is at least as far as the other bound that a program gives with it
    limited = name == "min" and len(made.positional) > 1
    kept = [one for one in made.positional if not (limited and getattr(one, "name", "") == "model_max_length")]
    arguments = [plain(one) for one in kept]
    missing = next((one for one in arguments if isinstance(one, Unknown)), None)
    if missing is not None or not arguments:
        return missing or Unknown(f"{made.where}: the tokenizer's own limit")
    if limited and len(arguments) == 1:
        return Known(arguments[0], where_of(kept[0]) or made.where)
    if name == "len" and isinstance(made.positional[0], (Table, Items)):
        return Known(len(arguments[0]), made.where)
    try:
        return Known(NUMBERS[name](*arguments), where_of(made.positional[0]) or made.where)
    except (TypeError, ValueError, OverflowError):
        return Unknown(f"{made.where}: computed while the program runs")


def _merged(made: Made) -> Value:
    """What `OmegaConf.merge` gives: of each setting the last."""
    found = Table({}, made.where)
    for one in made.positional:
        inner = as_table(one)
        if inner is None:
            found.more = f"{made.where}: merged with what is not known"
            continue
        for key, value in inner.entries.items():
            before = found.entries.get(key)
            both = isinstance(before, Table) and isinstance(value, Table)
            inside = Made("", positional=[one for one in (before, value) if one is not None], where=made.where)
            found.entries[key] = _merged(inside) if both else value
        found.more = found.more or inner.more
    return found


def _instantiated(reader: "Reading", settings: Value, made: Made) -> Value:
    """What Hydra makes of settings with a `_target_`: the call of that."""
    table = as_table(settings)
    target = plain(table.entries.get("_target_")) if table is not None else None
    if table is None or not isinstance(target, str):
        return Unknown(f"{made.where}: made from settings that are not known")
    keywords = {key: value for key, value in table.entries.items() if not key.startswith("_")}
    call_ = Made(target.rpartition(".")[2], keywords={**keywords, **made.keywords}, where=made.where, more=table.more)
    return call(reader, Dotted(target), call_)
