"""Foreign code that settings pass through on their way: what calls, attributes and elements of it are known to give.

Everything else becomes a `Made`: the call itself, to be looked at by whoever knows the library.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from planner.errors import ConfigError
from planner.readers import hydra
from planner.readers.loading import parse_json, parse_yaml
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
from planner.readers.shell import flags, is_open

if TYPE_CHECKING:
    from planner.readers.program.interpret import Outside, Reader

ARGUMENT_CLASSES = ("TrainingArguments", "Config", "Arguments")
PARSERS = ("HfArgumentParser", "TrlParser", "DPOTrainerParser", "H4ArgumentParser")
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


TOKENIZER_TRAINERS = ("BpeTrainer", "WordPieceTrainer", "UnigramTrainer", "WordLevelTrainer")
ARGUMENT_DEFAULTS = {
    "fp16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 8, "deepspeed": None,
    "gradient_accumulation_steps": 1, "max_steps": -1, "do_train": False, "do_eval": False, "fsdp": None,
    "torch_compile": False, "use_liger_kernel": False, "resume_from_checkpoint": None,
}  # fmt: skip
"""Fields of transformers' arguments that programs ask, and what they are where nobody sets them."""


def is_trainer(made: Made) -> bool:
    """Whether a call makes a trainer."""
    return made.name.endswith("Trainer") and made.name not in TOKENIZER_TRAINERS


def holds_arguments(made: Made) -> bool:
    """Whether a call makes a trainer's arguments."""
    return made.name.endswith(("TrainingArguments", "SFTConfig"))


def is_followed(path: str) -> bool:
    """Whether objects of this foreign class are looked at by their settings."""
    return path.rpartition(".")[2].endswith((*ARGUMENT_CLASSES, "Trainer"))


def truth(value: Value) -> bool | None:
    """Whether a value is true; None where that is not known."""
    if isinstance(value, (Made, Instance, Function, Class)):
        return True if isinstance(value, (Function, Class)) else None
    if isinstance(value, Items):
        return bool(value.items)
    if isinstance(value, Table):
        return True if value.entries else None if value.more else False
    if isinstance(value, Known):
        return bool(value.data)
    return None


def items_of(value: Value) -> list[Value] | None:
    """The elements of something a program may loop over, None where they are not known."""
    match value:
        case Items():
            return list(value.items)
        case Table() if not value.more:
            return [Known(key, value.where) for key in value.entries]
        case Known(data=str()):
            return [Known(part, value.where) for part in value.data]
    return None


def unpacked(value: Value, count: int) -> list[Value]:
    """The parts of a value that is assigned to `count` names."""
    if isinstance(value, Items):
        if len(value.items) == count:
            return value.items
        return [*value.items[:count], *[Unknown(f"{value.where}: too few parts")] * (count - len(value.items))]
    if isinstance(value, Made):
        # what loads a model gives (model, tokenizer) where two names take it
        rest = [Made("item", receiver=value, where=value.where) for _ in range(count - 1)]
        return [value, *rest]
    reason = value.reason if isinstance(value, Unknown) else f"{where_of(value)}: taken apart while the program runs"
    return [Unknown(reason)] * count


def as_table(value: Value) -> Table | None:
    """What ** of a value gives."""
    if isinstance(value, Table):
        return value
    if isinstance(value, Instance):
        return Table(dict(value.attributes), more=value.more)
    if isinstance(value, Made) and is_followed(value.name):
        more = value.more or f"{value.where}: what {value.name} itself takes for it"
        own = {} if value.more else _argument_defaults(value)
        return Table({**own, **value.keywords, **value.attributes}, value.where, more)
    return None


def _argument_defaults(made: Made) -> dict[str, Value]:
    """What transformers' arguments are where nobody sets them."""
    if not holds_arguments(made):
        return {}
    bf16 = {"bf16": False} if made.name.endswith("TrainingArguments") else {}
    return {name: Known(data, f"{made.name}'s default") for name, data in (ARGUMENT_DEFAULTS | bf16).items()}


def _command_line(reader: "Reader") -> Items:
    """`sys.argv`: the program's name, and what is said of its words."""
    words = reader.outside.arguments or ()
    return Items([Known(reader.name), *(Known(word, "the command line") for word in words)], "the command line")


def attribute(reader: "Reader", value: Value, name: str, place: str) -> Value:
    """value.name"""
    if name == "do_train" and reader.outside.arguments is not None:
        reader.program.do_train_decides = True
    match value:
        case Dotted() if name == "is_floating_point" and value.path.startswith("torch."):
            return Known("float" in value.name, place)
        case Dotted() if value.path == "sys" and name == "argv":
            return _command_line(reader)
        case Dotted():
            return Dotted(f"{value.path}.{name}")
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
        case Made():
            if name in value.attributes:
                return value.attributes[name]
            if name in value.keywords:
                return value.keywords[name]
            if value.more and is_followed(value.name):
                return Unknown(value.more)
            own = _argument_defaults(value)
            return own[name] if name in own else Made(name, owner=value.name, receiver=value, where=place)
        case Unknown():
            return value
    return Made(name, receiver=value, where=place)


def element(value: Value, key: Value, place: str) -> Value:
    """value[key]"""
    name = plain(key)
    if isinstance(value, Instance):
        value = Table(value.attributes, place, value.more)
    if isinstance(value, Table):
        if isinstance(name, str) and name in value.entries:
            return value.entries[name]
        return Unknown(value.more or f"{place}: {name!r} is not set in the program")
    if isinstance(value, Items) and isinstance(name, int) and -len(value.items) <= name < len(value.items):
        return value.items[name]
    if isinstance(value, Dotted) and value.path == "os.environ":
        return Unknown(f"{place}: the environment variable {name}")
    return value if isinstance(value, Unknown) else Unknown(f"{place}: computed while the program runs")


def formatted(parts: list[Value], place: str) -> Value:
    """An f-string."""
    texts = [plain(part) for part in parts]
    missing = next((text for text in texts if isinstance(text, Unknown)), None)
    return missing if missing is not None else Known("".join(str(text) for text in texts)[:10_000], place)


def in_format(value: Value, spec: Value, place: str) -> Value:
    """One value of an f-string."""
    data, form = plain(value), plain(spec)
    if isinstance(data, Unknown) or isinstance(form, Unknown):
        return data if isinstance(data, Unknown) else Unknown(f"{place}: text put together while the program runs")
    if form and not (isinstance(data, (int, float)) and len(form) < 8):
        return Unknown(f"{place}: text put together while the program runs")
    try:
        return Known(format(data, form), place)
    except (ValueError, TypeError):
        return Unknown(f"{place}: text put together while the program runs")


def to_value(data: Any, where: str, lines: Mapping[str, int] | None = None, above: str = "") -> Value:
    """Plain data (of a YAML or JSON file) as values; `lines` tells where each dotted key stands."""
    line = (lines or {}).get(above.removesuffix("."))
    place = f"{where}:{line}" if line else where
    if hydra.is_open(data):
        return Unknown(f"{place}: {above.removesuffix('.')} is {data}")
    if isinstance(data, dict):
        return Table({str(key): to_value(one, where, lines, f"{above}{key}.") for key, one in data.items()}, place)
    if isinstance(data, list):
        return Items([to_value(one, place) for one in data], place)
    return Known(data, place)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command line, as argparse or click declare it."""

    name: str
    flags: tuple[str, ...]
    default: Value
    kind: str
    switch: bool | None
    required: bool
    where: str

    @classmethod
    def of(cls, made: Made) -> "Option":
        """From the call of `add_argument`, `option` or `argument`."""
        flags = tuple(text for text in (plain(one) for one in made.positional) if isinstance(text, str))
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        name = plain(made.keywords.get("dest")) or long.lstrip("-").replace("-", "_")
        action = plain(made.keywords.get("action"))
        switch = {"store_true": True, "store_false": False}.get(action) if isinstance(action, str) else None
        if plain(made.keywords.get("is_flag")) is True:
            switch = True
        kind = made.keywords.get("type")
        default = made.keywords.get("default")
        if default is None:
            default = Known(not switch, made.where) if switch is not None else Known(None, made.where)
        words = kind.name if isinstance(kind, Dotted) else ""
        if isinstance(kind, Function) and not isinstance(kind.node, ast.Lambda):
            words = kind.node.name
        required = plain(made.keywords.get("required")) is True or not long.startswith("-")
        return cls(str(name), flags, default, words, switch, required, made.where)

    def value(self, outside: "Outside") -> Value:
        """What the option is: the command line's word, else its default."""
        words = list(outside.arguments or ())
        for index, word in enumerate(words):
            flag, equals, rest = word.partition("=")
            if flag.replace("_", "-") not in [one.replace("_", "-") for one in self.flags]:
                continue
            if self.switch is not None and not equals:
                return Known(self.switch, "the command line")
            text = rest if equals else words[index + 1] if index + 1 < len(words) else ""
            return _open(flag, text) or Known(_converted(text, self.kind), "the command line")
        if self.required or (self.switch is not None and outside.open_switches):
            return Unknown(f"{self.where}: {self.flags[0] if self.flags else self.name} comes from the command line")
        if isinstance(self.default, Known):
            return Known(_converted(self.default.data, self.kind), f"{self.where}, default of {self.flags[0]}")
        return self.default


def _open(flag: str, text: Any) -> Unknown | None:
    """Why a word of a command line is not known, where only the shell would fill it in."""
    opened = isinstance(text, str) and is_open(text)
    return Unknown(f"the command line: {flag} {text} is set when the script runs") if opened else None


def _converted(text: Any, kind: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        if kind in ("int", "float"):
            return int(text) if kind == "int" else float(text)
    except ValueError:
        return text
    if kind in ("bool", "str2bool", "strtobool") and text.lower() in ("true", "1", "yes", "false", "0", "no"):
        return text.lower() in ("true", "1", "yes")
    return _word(text) if not kind else text


def _word(text: str) -> Any:
    """A word of a command line as the value that it means."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def on_command_line(arguments: Any) -> dict[str, Value]:
    """--name value pairs of a command line, for parsers whose options are a library's fields."""
    found: dict[str, Value] = {}
    for name, given in flags(tuple(arguments or ())).items():
        if given is True:
            found[name] = Known(True, "the command line")
            if name.startswith("no_"):
                found[name[3:]] = Known(False, "the command line")
        else:
            texts = [given] if isinstance(given, str) else given
            data = [_open(f"--{name}", text) or Known(_word(text), "the command line") for text in texts]
            found[name] = data[0] if len(data) == 1 else Items(list(data))
    return found


def field_default(reader: "Reader", value: Value) -> Value:
    """The default of a dataclass field."""
    if isinstance(value, Made) and value.name in ("field", "Field"):
        if "default" in value.keywords:
            return value.keywords["default"]
        factory = value.keywords.get("default_factory")
        if isinstance(factory, Function):
            return reader.called(factory, Made("", where=value.where))
        if isinstance(factory, Dotted) and factory.name in ("list", "dict"):
            return Items([]) if factory.name == "list" else Table({})
        if value.positional and value.name == "Field":
            return value.positional[0]
        return Unknown(f"{value.where}: no default")
    return value


def option_default(reader: "Reader", name: str, value: Value) -> Value:
    """A function's default where typer or the command line may say another."""
    if isinstance(value, Made) and value.name in ("Option", "Argument"):
        default = value.keywords.get("default", value.positional[0] if value.positional else None)
        if default is None or (isinstance(default, (Known, Dotted)) and plain(default) in (..., "Ellipsis")):
            default = Unknown(f"{value.where}: {name} comes from the command line")
        return on_command_line(reader.outside.arguments).get(name, default)
    return value


def _namespace(options: list[Option], outside: "Outside") -> Instance:
    return Instance({option.name: option.value(outside) for option in options})


def call(reader: "Reader", callee: Value, made: Made) -> Value:
    """What a call of foreign code gives."""
    outside = reader.outside
    if isinstance(callee, Dotted):
        made.name, made.owner = callee.name, callee.path.rpartition(".")[0].rpartition(".")[2]
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


def _run_handed_functions(reader: "Reader", made: Made) -> None:
    """Functions handed to foreign code (`dataset.map(tokenize)`) will be called with what is not known."""
    for value in (*made.positional, *made.keywords.values()):
        if isinstance(value, Function) and id(value.node) not in reader.entered:
            reader.uncertain += 1
            try:
                reader.called(value, Made("", where=made.where))
            finally:
                reader.uncertain -= 1


def _of_module(reader: "Reader", callee: Dotted, made: Made) -> Value | None:
    """Functions of modules and built-in ones."""
    first = made.positional[0] if made.positional else None
    match callee.path:
        case "omegaconf.OmegaConf.load" | "OmegaConf.load" if first is not None:
            return _loaded(reader, Made("load", positional=[Made("open", positional=[first])], where=made.where))
        case "omegaconf.OmegaConf.to_container" | "omegaconf.OmegaConf.create" | "omegaconf.OmegaConf.structured":
            return first
        case "omegaconf.OmegaConf.merge":
            return _merged(made)
        case "omegaconf.OmegaConf.from_cli":
            data, _ = hydra.composed({}, reader.outside.exactly, words=reader.outside.arguments or ())
            return to_value(data, "the command line")
        case "hydra.utils.instantiate" | "hydra.utils.call" if first is not None:
            return _instantiated(reader, first, made)
        case "os.environ.get" | "os.getenv" | "getenv" | "environ.get":
            return _environment(reader, made)
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
        case "list" | "tuple" | "set" | "sorted" if first is not None:
            found = items_of(first)
            return Items(found, made.where) if found is not None else Unknown(f"{made.where}: a list not known")
        case "vars" | "dataclasses.asdict" | "asdict" if first is not None:
            return as_table(first)
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
        case _ if callee.name == "snapshot_download":  # of the hub or of ModelScope: the folder holds that model
            named = [made.keywords.get(key) for key in ("repo_id", "model_id")]
            return next((one for one in (first, *named) if one is not None), None)
        case "os.path.join" | "pathlib.Path" | "Path" | "os.path.expanduser" | "str" if made.positional:
            parts = [plain(one) for one in made.positional]
            known = all(isinstance(part, (str, int, float)) for part in parts)
            return Known("/".join(str(part) for part in parts), made.where) if known else None
        case "fire.Fire" | "Fire" | "typer.run" if isinstance(first, Function):
            words = on_command_line(reader.outside.arguments)
            return reader.called(first, Made("", keywords=words, where=made.where))
        case "argparse.ArgumentParser" | "ArgumentParser":
            return Made("ArgumentParser", where=made.where)
    if callee.name in NUMBERS and callee.path == callee.name and made.positional:
        return _number(callee.name, made)
    if callee.name in ("safe_load", "load", "loads", "full_load") and callee.path.partition(".")[0] in ("yaml", "json"):
        return _loaded(reader, made)
    return None


def _of_object(reader: "Reader", owner: Value, made: Made) -> Value | None:
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
        return None
    if not isinstance(owner, Made):
        return None
    if owner.name == "ArgumentParser" or owner.name in PARSERS:
        return _of_parser(reader, owner, made)
    if name == "train" and is_trainer(trainer_of(owner)):
        reader.program.trained.append((trainer_of(owner), reader.uncertain > 0))
        return made
    if owner.name == "open" and name in ("read", "readline"):
        return owner
    if name in PREPARED and made.positional:
        return made.positional[0] if len(made.positional) == 1 else Items(made.positional, made.where)
    if name in SAME_OBJECT:
        owner.called[name] = made.where
        return owner
    return None


def trainer_of(made: Made) -> Made:
    """The trainer itself behind functions that hand one back (`train_on_responses_only(trainer)`)."""
    for _ in range(8):
        first = made.positional[0] if made.positional else made.keywords.get("trainer")
        if is_trainer(made) or not isinstance(first, Made):
            return made
        made = first
    return made


def _of_text(owner: Known, made: Made) -> Value | None:
    arguments = [plain(one) for one in made.positional]
    if any(isinstance(one, Unknown) for one in arguments):
        return Unknown(f"{made.where}: text put together while the program runs")
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


def _of_parser(reader: "Reader", owner: Made, made: Made) -> Value | None:
    arguments = reader.outside.arguments
    match made.name:
        case "add_argument":
            owner.positional.append(made)
            return made
        case "add_argument_group" | "add_mutually_exclusive_group":
            return owner
        case "add_subparsers":
            chosen = plain(made.keywords.get("dest"))
            if isinstance(chosen, str):
                word = next((word for word in arguments or () if not word.startswith("-")), None)
                came = Unknown(f"{made.where}: {chosen} comes from the command line")
                owner.attributes[chosen] = Known(word, "the command line") if word is not None else came
            return owner
        case "add_parser":
            return owner
        case "set_defaults":
            owner.attributes |= made.keywords
            return Known(None)
        case "parse_args" | "parse_known_args" if owner.name == "ArgumentParser":
            options = [Option.of(one) for one in owner.positional if isinstance(one, Made)]
            found = _namespace(options, reader.outside)
            found.attributes |= owner.attributes
            return Items([found, Items([])]) if made.name == "parse_known_args" else found
        case (
            "parse_args_into_dataclasses"
            | "parse_args_and_config"
            | "parse"
            | "parse_dict"
            | "parse_json_file"
            | "parse_yaml_file"
            | "parse_yaml_and_args"
        ):
            return _dataclasses(reader, owner, made)
    return None


def _dataclasses(reader: "Reader", owner: Made, made: Made) -> Value:
    """What a parser of dataclasses gives: defaults of the program's own, the command line on top."""
    given = owner.argument("dataclass_types", 0)
    classes = items_of(given) if given is not None else None
    if classes is None and given is not None:
        classes = [given]
    words = on_command_line(reader.outside.arguments)
    more = "" if reader.outside.arguments is not None else f"{made.where}: settings come from the command line"
    found: list[Value] = []
    for one in classes or []:
        if isinstance(one, Class):
            keywords = {key: value for key, value in words.items() if key in one.fields}
            value = reader.instance(one, Made(one.name, keywords=dict(keywords) if not one.base else dict(words)))
            if isinstance(value, Instance):
                for key in one.fields:
                    if key not in words and more and isinstance(value.attributes.get(key), Known):
                        default = value.attributes[key]
                        value.attributes[key] = Known(plain(default), f"{where_of(default)}, default of --{key}")
            elif isinstance(value, Made):
                value.more = more
            found.append(value)
        elif isinstance(one, Dotted):
            library = Made(one.name, keywords=dict(words), where=made.where, more=more)
            reader.program.made.append(library)
            found.append(library)
        else:
            found.append(Unknown(f"{made.where}: a class that is not known"))
    if plain(made.keywords.get("return_remaining_strings")) is True:
        found.append(Items([]))
    return Items(found, made.where)


def _environment(reader: "Reader", made: Made) -> Value:
    name = plain(made.positional[0]) if made.positional else ""
    if isinstance(name, str) and name in reader.outside.environment:
        return Known(reader.outside.environment[name], "the launch")
    default = made.positional[1] if len(made.positional) > 1 else made.keywords.get("default")
    if default is None and made.name in ("get", "getenv"):
        return Known(None, f"{made.where}, the environment variable {name} taken not to be set")
    if isinstance(default, Known):
        return Known(default.data, f"{made.where}, default of the environment variable {name}")
    return Unknown(f"{made.where}: the environment variable {name}")


def _getattr(reader: "Reader", made: Made) -> Value:
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


def _instantiated(reader: "Reader", settings: Value, made: Made) -> Value:
    """What Hydra makes of settings with a `_target_`: the call of that."""
    table = as_table(settings)
    target = plain(table.entries.get("_target_")) if table is not None else None
    if table is None or not isinstance(target, str):
        return Unknown(f"{made.where}: made from settings that are not known")
    keywords = {key: value for key, value in table.entries.items() if not key.startswith("_")}
    call_ = Made(target.rpartition(".")[2], keywords={**keywords, **made.keywords}, where=made.where, more=table.more)
    return call(reader, Dotted(target), call_)


def hydra_settings(reader: "Reader", made: Made) -> Value:
    """The settings that `@hydra.main` hands to its function: those of the named file, composed."""
    folder, name = (plain(made.keywords.get(key)) for key in ("config_path", "config_name"))
    words = list(reader.outside.arguments or ())
    for flag, value in pairwise(words):
        name = value if flag in ("--config-name", "-cn") else name
    if not isinstance(name, str):
        return Unknown(f"{made.where}: settings of Hydra that are not known")
    folder = folder.removeprefix("./").rstrip("/") if isinstance(folder, str) else ""
    path = "/".join(part for part in (folder, name) if part).removesuffix(".yaml") + ".yaml"
    text = reader.outside.exactly(path)
    if text is None:
        return Unknown(f"{made.where}: settings of another file ({path})")
    try:
        values, files = hydra.composed(parse_yaml(text, path).values, reader.outside.exactly, folder, words)
    except ConfigError as error:
        return Unknown(f"{made.where}: {error.message}")
    reader.program.sources += [path, *files]
    return to_value(values, path)


def _loaded(reader: "Reader", made: Made) -> Value:
    """A YAML or JSON file beside the program."""
    source = made.positional[0] if made.positional else None
    while isinstance(source, Made) and source.name != "open" and source.receiver is not None:
        source = source.receiver
    path = plain(source.positional[0]) if isinstance(source, Made) and source.positional else None
    text = reader.outside.read(path) if isinstance(path, str) else None
    if text is None or not isinstance(path, str):
        return Unknown(f"{made.where}: settings of another file ({path if isinstance(path, str) else 'not known'})")
    reader.program.sources.append(path)
    try:
        data = parse_json(text, path) if path.endswith(".json") else (parsed := parse_yaml(text, path)).values
    except ConfigError as error:
        return Unknown(f"{made.where}: {error.message}")
    return to_value(data, path, {} if path.endswith(".json") else parsed.lines)
