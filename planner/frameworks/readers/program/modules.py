"""Functions of modules and built-in ones, whose results settings pass through: what each is known to give."""

import posixpath
from itertools import islice
from typing import Any

from planner.frameworks.readers import hydra, schema
from planner.frameworks.readers.program.files import environment, loaded, to_value
from planner.frameworks.readers.program.objects import argument_defaults, as_table, items_of, truth
from planner.frameworks.readers.program.options import on_command_line, parents_of
from planner.frameworks.readers.program.reading import MAX_LOOP, Reading
from planner.frameworks.readers.program.values import (
    Class,
    Dotted,
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
    where_of,
)

NUMBERS: dict[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "abs": abs, "round": round, "max": max, "min": min,
    "sum": sum, "len": len,
}  # fmt: skip


MAX_DIGITS = 400
"""To which `round` rounds; a float has 308 before the point."""


def of_module(reader: Reading, callee: Dotted, made: Made) -> Value | None:
    """What a function of a module, or a built-in one, gives; None where that is not known."""
    first = made.positional[0] if made.positional else None
    for part in (_of_settings, _of_system, _of_collections, _of_start):
        if (found := part(reader, callee, first, made)) is not None:
            return found
    if callee.name in NUMBERS and callee.path == callee.name and made.positional:
        return _number(callee.name, made)
    return None


def _of_settings(reader: Reading, callee: Dotted, first: Value | None, made: Made) -> Value | None:
    """Libraries that read settings, and what tells which settings a class takes."""
    match callee.path:
        case "omegaconf.OmegaConf.load" | "OmegaConf.load" if first is not None:
            return loaded(reader, Made("load", positional=[Made("open", positional=[first])], where=made.where))
        case "omegaconf.OmegaConf.structured" if isinstance(first, Class):
            return reader.instance(first, Made("", where=made.where))
        case "omegaconf.OmegaConf.to_container" | "omegaconf.OmegaConf.create" | "omegaconf.OmegaConf.structured":
            return first
        case "typing.cast" if len(made.positional) == 2:
            return made.positional[1]
        case "omegaconf.OmegaConf.merge":
            return _merged(made)
        case "omegaconf.OmegaConf.from_cli":
            data, _ = hydra.composed({}, reader.outside.exactly, words=reader.outside.arguments or ())
            return to_value(data, "the command line")
        case "inspect.signature" | "signature":
            return Made("signature", keywords={"parameters": parameters(reader, first, made.where)}, where=made.where)
        case "dataclasses.fields" | "fields" if isinstance(first, Dotted):
            taken = parameters(reader, first, made.where)
            return Items(list(taken.entries.values()), made.where) if isinstance(taken, Table) else taken
        case _ if callee.name in ("get_peft_config", "get_quantization_config") and isinstance(first, Made):
            return _of_model_config(first, made) if first.name == "ModelConfig" and not first.more else None
        case _ if callee.name == "snapshot_download":  # of the hub or of ModelScope: the folder holds that model
            named = [made.keywords.get(key) for key in ("repo_id", "model_id")]
            return next((one for one in (first, *named) if one is not None), None)
    if callee.name in ("safe_load", "load", "loads", "full_load") and callee.path.partition(".")[0] in ("yaml", "json"):
        return loaded(reader, made)
    return None


def _of_system(reader: Reading, callee: Dotted, first: Value | None, made: Made) -> Value | None:
    """The environment, the card, paths."""
    match callee.path:
        case "os.environ.get" | "os.getenv" | "getenv" | "environ.get":
            return environment(reader, made)
        case "torch.cuda.is_available":
            return Known(True, "the card")
        case _ if callee.name == "is_peft_available" and callee.path.partition(".")[0] in ("transformers", "trl"):
            return Known(True, "peft is taken to be installed")
        case "torch.cuda.get_device_capability":
            return Items([Known(part, "the card") for part in reader.outside.capability])
        case "torch.cuda.device_count":
            return Known(int(reader.outside.environment.get("WORLD_SIZE", "1")), "the launch")
        case "open" | "io.open":
            return Made("open", positional=made.positional, where=made.where)
        case "os.path.dirname":
            return (
                Known(above(first.data), made.where) if isinstance(first, Known) and type(first.data) is str else None
            )
        case "os.path.exists" | "os.path.isfile" if (
            isinstance(plain(first), str) and reader.outside.exactly(plain(first)) is not None
        ):
            return Known(True, made.where)
        case "os.path.expandvars" if isinstance(first, Known) and "$" not in str(first.data):
            return first
        case "os.path.abspath" | "os.path.realpath" | "os.path.normpath":
            return first
        case "os.getcwd" | "pathlib.Path.cwd" | "Path.cwd":
            return Known(".", made.where)
        case "os.path.join" | "pathlib.Path" | "Path" | "os.path.expanduser" | "str" if made.positional:
            parts = [plain(one) for one in made.positional]
            if unknown := next((part for part in parts if isinstance(part, Unknown)), None):
                return unknown
            known = all(isinstance(part, (str, int, float)) for part in parts)
            return Known("/".join(str(part) for part in parts), made.where) if known else None
    return None


def _of_collections(reader: Reading, callee: Dotted, first: Value | None, made: Made) -> Value | None:
    """Built-in functions that make or ask collections."""
    match callee.path:
        case "dict" | "easydict.EasyDict" | "types.SimpleNamespace" | "argparse.Namespace" | "SimpleNamespace":
            inner = as_table(first) if first is not None else Table({}, made.where)
            if inner is None:
                return None
            if callee.name in ("dict",):
                return Table({**inner.entries, **made.keywords}, made.where, inner.more or made.more)
            return Instance({**inner.entries, **made.keywords}, more=inner.more or made.more)
        case "sorted" | "reversed" if first is not None:
            return _in_order(first, made, backwards=callee.path == "reversed")
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
            return Undecided(f"{made.where}: depends on a condition")
        case "hasattr" if len(made.positional) == 2 and (has := _has(first, plain(made.positional[1]))) is not None:
            return Known(has, made.where)
        case "isinstance" | "hasattr":
            asked = made.positional[1:] if callee.path == "isinstance" else []
            kinds = asked[0].items if asked and isinstance(asked[0], Items) else asked
            answers = {_is_a(first, kind) for kind in kinds} or {None}
            if True in answers or None not in answers:
                return Known(True in answers, made.where)
            return Undecided(f"{made.where}: depends on a condition")
        case "range" if first is not None:
            bounds = [plain(one) for one in made.positional]
            if not all(isinstance(one, int) for one in bounds) or not 0 < len(bounds) <= 3 or 0 in bounds[2:]:
                return None
            # not len(): a range may be longer than C counts
            few = [Known(number, made.where) for number in islice(range(*bounds), MAX_LOOP + 1)]
            return Items([*few]) if len(few) <= MAX_LOOP else None
    return None


def _has(value: Value | None, name: Any) -> bool | None:
    """Whether an object of settings has an attribute, None where that is not known."""
    if not isinstance(value, (Table, Instance)) or not isinstance(name, str):
        return None
    entries = value.entries if isinstance(value, Table) else value.attributes
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
    path = kind.path if isinstance(kind, Dotted) else ""
    named = path.rpartition(".")[2]
    if isinstance(value, (Table, Items)):
        own = MAPPINGS if isinstance(value, Table) else LISTS
        return True if named in own else False if named in {*TYPES, *MAPPINGS, *LISTS} - {"tuple"} else None
    if isinstance(value, Known) and named in (*MAPPINGS, "ListConfig"):
        return False
    if isinstance(value, Known) and path in TYPES:
        return isinstance(value.data, TYPES[path])
    for _ in range(MAX_WRAPPERS):  # that hand back what they are given
        if not isinstance(value, Made) or value.name != "prepare_model_for_kbit_training":
            break
        value = value.argument("model", 0)
    if not isinstance(value, Made) or value.made_by is not None:
        return None
    loads = value.name in ("from_pretrained", "from_config") and "Model" in value.owner
    wraps = value.name == "get_peft_model" and value.package in ("peft", "unsloth")
    by = "peft" if wraps else value.package if loads and value.package in ("peft", "transformers") else ""
    if path in TYPES:
        return False if by else None
    package, _, rest = path.partition(".")
    asked = path if package == "torch" else f"{package}.{rest.rpartition('.')[2]}"
    return CLASSES.get(asked, {}).get(by)


def _in_order(first: Value, made: Made, *, backwards: bool) -> Value:
    """A sorted list."""
    found = items_of(first)
    values = [plain(one) for one in found or ()]
    alike = len({type(one) for one in values}) <= 1 and all(isinstance(one, (int, float, str)) for one in values)
    if found is None or not alike or "key" in made.keywords or backwards:
        return Unknown(f"{made.where}: the order of a list")
    return Items(sorted(found, key=plain, reverse=plain(made.keywords.get("reverse")) is True), made.where)


def _of_start(reader: Reading, callee: Dotted, first: Value | None, made: Made) -> Value | None:
    """What starts a program with its words."""
    match callee.path:
        case "fire.Fire" | "Fire" | "typer.run" if isinstance(first, Function):
            words = on_command_line(reader.outside.arguments)
            if callee.path != "typer.run":
                words = {name: _of_fire(value) for name, value in words.items()}
            return reader.called(first, Made("", keywords=words, where=made.where))
        case "argparse.ArgumentParser" | "ArgumentParser":
            return Made("ArgumentParser", positional=parents_of(made), keywords=dict(made.keywords), where=made.where)
    return None


def command_line(reader: Reading) -> Items:
    """`sys.argv`: the program's name, and what is said of its words."""
    words = reader.outside.arguments or ()
    return Items([Known(reader.name), *(Known(word, "the command line") for word in words)], "the command line")


def _of_fire(value: Value) -> Value:
    """A word of a command line as Fire takes it: `[q_proj,v_proj]` is a list."""
    text = value.data if isinstance(value, Known) else None
    if not isinstance(text, str) or not text.startswith("[") or not text.endswith("]"):
        return value
    where = where_of(value)
    return Items([Known(part.strip(" '\""), where) for part in text[1:-1].split(",") if part.strip()], where)


TRAINER_PARAMETERS = (
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_loss_func",
    "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
    "peft_config", "formatting_func", "quantization_config",
)  # fmt: skip
"""What `SFTTrainer` takes. Source: TRL 1.16 `trainer/sft_trainer.py`."""


def parameters(reader: Reading, asked: Value | None, place: str) -> Value:
    """The names that a class of TRL or transformers takes, for programs that hand on those alone."""
    name = asked.path.removesuffix(".__init__").rpartition(".")[2] if isinstance(asked, Dotted) else ""
    if not reader.outside.newest or not name.endswith(("SFTConfig", "TrainingArguments", "SFTTrainer")):
        return Unknown(f"{place}: what {name or 'a function'} of the installed version takes")
    names = TRAINER_PARAMETERS if name == "SFTTrainer" else schema.snapshot()["trl"]["fields"]
    kind = Known("KEYWORD_ONLY", place)
    return Table({one: Instance({"name": Known(one, f"{name}'s parameters"), "kind": kind}) for one in names}, place)


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


def above(path: str) -> str:
    """The folder that holds a path, which may be relative to the program's own folder."""
    beyond = path in (".", "") or path.endswith("..")
    return posixpath.normpath(posixpath.join(path, "..")) if beyond else posixpath.dirname(path) or "."


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
    numbers = all(isinstance(one, (int, float)) for one in arguments[0]) if isinstance(arguments[0], list) else True
    digits = arguments[1] if name == "round" and len(arguments) > 1 else 0
    if (name == "sum" and not numbers) or (isinstance(digits, int) and abs(digits) > MAX_DIGITS):
        return Unknown(f"{made.where}: computed while the program runs")
    try:
        return Known(NUMBERS[name](*arguments), where_of(made.positional[0]) or made.where)
    except (TypeError, ValueError, OverflowError):
        return Unknown(f"{made.where}: computed while the program runs")


def _merged(made: Made) -> Value:
    """What `OmegaConf.merge` gives: of each setting the last."""
    found = Table({}, made.where)
    for one in made.positional:
        inner = as_table(one)
        if inner is None or inner.more:
            reason = one.reason if isinstance(one, Unknown) else f"{made.where}: merged with what is not known"
            found.take(inner, reason)
            continue
        for key, value in inner.entries.items():
            before = found.entries.get(key)
            both = isinstance(before, (Table, Instance)) and isinstance(value, (Table, Instance))
            inside = Made("", positional=[one for one in (before, value) if one is not None], where=made.where)
            found.entries[key] = _merged(inside) if both else value
        found.more = found.more or inner.more
    return found
