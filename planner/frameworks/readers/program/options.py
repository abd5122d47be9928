"""Settings that come from outside a program: files beside it, Hydra, its environment, its command line as argparse,
click, typer, fire and parsers of dataclasses take it."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any

from planner.core.errors import ConfigError
from planner.core.records import dataclass
from planner.frameworks.readers import loading
from planner.frameworks.readers.loading import json_lines, parse_json, parse_yaml
from planner.frameworks.readers.program.reading import Reading
from planner.frameworks.readers.program.values import (
    CallResult,
    Class,
    Constant,
    DictValue,
    Function,
    ImportedName,
    Instance,
    ListValue,
    Unknown,
    Value,
    as_table,
    items_of,
    plain,
    same,
    where_of,
)
from planner.frameworks.readers.shell import flags, is_open
from planner.frameworks.readers.values import FileContext


def to_value(data: Any, where: str, lines: Mapping[str, int] | None = None, above: str = "") -> Value:
    """Plain data (of a YAML or JSON file) as values; `lines` tells where each dotted key stands."""
    line = (lines or {}).get(above.removesuffix("."))
    place = f"{where}:{line}" if line else where
    if loading.is_open(data):
        return Unknown(f"{place}: {above.removesuffix('.')} is {data}")
    if isinstance(data, dict):
        return DictValue(
            {str(key): to_value(value, where, lines, f"{above}{key}.") for key, value in data.items()}, place
        )
    if isinstance(data, list):
        return ListValue([to_value(value, place) for value in data], place)
    return Constant(data, place)


def environment(reader: Reading, made: CallResult) -> Value:
    name = plain(made.positional[0]) if made.positional else ""
    if isinstance(name, str) and name in reader.outside.environment:
        given = reader.outside.environment[name]
        return Unknown(f"the launch: {name}={given}") if is_open(given) else Constant(given, "the launch")
    default = made.positional[1] if len(made.positional) > 1 else made.keywords.get("default")
    if default is None and made.name in ("get", "getenv"):
        return Constant(None, f"{made.where}, the environment variable {name} taken not to be set")
    if isinstance(default, Constant):
        return Constant(default.data, f"{made.where}, default of the environment variable {name}")
    return Unknown(f"{made.where}: the environment variable {name}")


def hydra_settings(reader: Reading, made: CallResult) -> Value:
    """The settings that `@hydra.main` hands to its function: those of the named file; what its `defaults` put in beside
    them is open.

    Source: Hydra 1.3, "The Defaults List" (the file itself comes last, or where `_self_` stands), "Packages".
    """
    folder, name = (plain(made.keywords.get(key)) for key in ("config_path", "config_name"))
    words = reader.outside.arguments or ()
    spelled = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    for flag, value in pairwise(spelled):
        name = value if flag in ("--config-name", "-cn") else name
        folder = value if flag in ("--config-path", "-cp") else folder
    path = "/".join(str(part).removeprefix("./").rstrip("/") for part in (folder, name) if isinstance(part, str))
    path = path.removesuffix(".yaml") + ".yaml"
    text = reader.outside.read_exact(path)
    if text is None or not isinstance(name, str):
        return Unknown(f"{made.where}: settings of another file ({path})")
    try:
        parsed = parse_yaml(text, path)
    except ConfigError as error:
        return Unknown(f"{made.where}: {error.message}")
    reader.program.sources.append(path)
    values = dict(parsed.values)
    listed = [(entry == "_self_", _place_of(entry)) for entry in values.pop("defaults", None) or ()]
    places = [place for is_self, place in listed if not is_self]
    over = listed[listed.index((True, "")) + 1 :] if (True, "") in listed else []
    more = f"{path}: Hydra puts it together of several files" if places else ""
    if any(place in ("", "_global_") for _, place in over):
        return Unknown(more)
    chosen = [word for word in words if word.lstrip("+~").partition("=")[0] in places]
    values = loading.with_words(values, [word for word in words if word not in chosen])
    for _, place in over:
        values.pop(place, None)
    return _opened(to_value(values, path, parsed.lines), more)


def _place_of(entry: Any) -> str:
    """The setting under which a file of Hydra's `defaults` list is put in, "" for none."""
    group = str(next(iter(entry), "")) if isinstance(entry, Mapping) else ""
    group, _, package = group.removeprefix("override ").removeprefix("optional ").partition("@")
    return (package or group).strip("/").replace("/", ".").partition(".")[0]


def _opened(settings: Value, more: str) -> Value:
    """The settings, of which every mapping may have more entries for a reason."""
    if not isinstance(settings, DictValue) or not more:
        return settings
    return DictValue({name: _opened(value, more) for name, value in settings.entries.items()}, settings.where, more)


def loaded(reader: Reading, made: CallResult) -> Value:
    """A YAML or JSON file beside the program."""
    source = made.positional[0] if made.positional else None
    if made.name in ("loads", "safe_load") and isinstance(source, Constant) and isinstance(source.data, str):
        try:  # text that stands in the program
            return to_value(parse_yaml(source.data, made.where).values, source.where or made.where)
        except ConfigError as error:
            return Unknown(f"{made.where}: {error.message}")
    if isinstance(source, CallResult) and source.name == "dumps" and source.positional:
        return source.positional[0]  # a deep copy of settings
    while isinstance(source, CallResult) and source.name != "open" and source.receiver is not None:
        source = source.receiver
    path = plain(source.positional[0]) if isinstance(source, CallResult) and source.positional else None
    text = reader.outside.read_relative(path) if isinstance(path, str) else None
    if text is None or not isinstance(path, str):
        if isinstance(path, Unknown):
            return path
        return Unknown(f"{made.where}: settings of another file ({path if isinstance(path, str) else 'not known'})")
    reader.program.sources.append(path)
    try:
        data = parse_json(text, path) if path.endswith(".json") else (parsed := parse_yaml(text, path)).values
    except ConfigError as error:
        return Unknown(f"{made.where}: {error.message}")
    return to_value(data, path, json_lines(text) if path.endswith(".json") else parsed.lines)


TRAINS = re.compile(r"train|tune|sft|fit", re.IGNORECASE)
"""Names of subcommands that train."""
OF_DATACLASSES = (
    "parse_args_into_dataclasses", "parse_args_and_config", "parse", "parse_dict", "parse_json_file", "parse_yaml_file",
    "parse_yaml_and_args",
)  # fmt: skip
"""Methods that make objects of dataclasses of the words."""
PARSERS = ("HfArgumentParser", "TrlParser", "DPOTrainerParser", "H4ArgumentParser")


NONEMPTY = "a text that is not empty"
"""What argparse makes of a word by `type=bool`: True of "False" too."""
_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command line, as argparse or click declare it; `many`: whether it takes all words behind it."""

    name: str
    flags: tuple[str, ...]
    default: Value
    kind: str
    switch: bool | None
    required: bool
    where: str
    many: bool = False

    @classmethod
    def of(cls, made: CallResult) -> "Option":
        """From the call of `add_argument`, `option` or `argument`."""
        flags = tuple(text for text in (plain(argument) for argument in made.positional) if isinstance(text, str))
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        name = plain(made.keywords.get("dest")) or long.lstrip("-").replace("-", "_")
        action = plain(made.keywords.get("action"))
        switch = {"store_true": True, "store_false": False}.get(action) if isinstance(action, str) else None
        if plain(made.keywords.get("is_flag")) is True:
            switch = True
        kind = made.keywords.get("type")
        default = made.keywords.get("default")
        if default is None:
            default = Constant(not switch, made.where) if switch is not None else Constant(None, made.where)
        words = kind.name if isinstance(kind, ImportedName) else ""
        if isinstance(kind, Function) and not isinstance(kind.node, ast.Lambda):
            words = kind.node.name
        words = NONEMPTY if (words, made.name) == ("bool", "add_argument") else words
        many = plain(made.keywords.get("nargs")) in ("+", "*")
        required = plain(made.keywords.get("required")) is True or not long.startswith("-")
        return cls(str(name), flags, default, words, switch, required, made.where, many)

    def value(self, context: FileContext) -> Value:
        """What the option is: the command line's last word on it, else its default."""
        words = list(context.arguments or ())
        given: list[Value] = []
        for index, word in enumerate(words):
            flag, equals, rest = word.partition("=")
            if flag.replace("_", "-") not in [spelling.replace("_", "-") for spelling in self.flags]:
                continue
            if self.switch is not None and not equals:
                given = [Constant(self.switch, "the command line")]
                continue
            behind = words[index + 1 :]
            texts = [rest] if equals else list(takewhile(_is_value, behind)) if self.many else behind[:1] or [""]
            given = [_open(flag, text) or Constant(_converted(text, self.kind), "the command line") for text in texts]
            given = [ListValue(given, "the command line")] if self.many else given
        if given:
            return given[0]
        if self.required or (self.switch is not None and context.open_switches):
            return Unknown(f"{self.where}: {self.flags[0] if self.flags else self.name} comes from the command line")
        if isinstance(self.default, Constant):
            return Constant(_converted(self.default.data, self.kind), f"{self.where}, default of {self.flags[0]}")
        return self.default


def _is_value(word: str) -> bool:
    return _FLAG.match(word) is None


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
    if kind == NONEMPTY:
        return bool(text)
    if kind in ("bool", "str2bool", "strtobool") and text.lower() in ("true", "1", "yes", "false", "0", "no"):
        return text.lower() in ("true", "1", "yes")
    return _word(text) if not kind else text


def _word(text: str) -> Any:
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
    values: dict[str, Value] = {}
    for name, given in flags(tuple(arguments or ())).items():
        if given is True:
            values[name] = Constant(True, "the command line")
            if name.startswith("no_"):
                values[name[3:]] = Constant(False, "the command line")
        else:
            texts = [given] if isinstance(given, str) else given
            data = [_open(f"--{name}", text) or Constant(_word(text), "the command line") for text in texts]
            values[name] = data[0] if len(data) == 1 else ListValue(list(data))
    return values


def field_default(reader: Reading, value: Value) -> Value:
    """The default of a dataclass field."""
    if isinstance(value, CallResult) and value.name in ("field", "Field"):
        if "default" in value.keywords:
            return value.keywords["default"]
        factory = value.keywords.get("default_factory")
        if isinstance(factory, Function):
            return reader.called(factory, CallResult("", where=value.where))
        if isinstance(factory, Class):
            return reader.instance(factory, CallResult("", where=value.where))
        if isinstance(factory, ImportedName) and factory.name in ("list", "dict"):
            return ListValue([]) if factory.name == "list" else DictValue({})
        if value.positional and value.name == "Field":
            return value.positional[0]
        return Unknown(f"{value.where}: no default")
    return value


def option_default(reader: Reading, name: str, value: Value) -> Value:
    """A function's default where typer or the command line may say another."""
    if isinstance(value, CallResult) and value.name in ("Option", "Argument"):
        default = value.keywords.get("default", value.positional[0] if value.positional else None)
        if default is None or (isinstance(default, (Constant, ImportedName)) and plain(default) in (..., "Ellipsis")):
            default = Unknown(f"{value.where}: {name} comes from the command line")
        return on_command_line(reader.outside.arguments).get(name, default)
    return value


def parents_of(made: CallResult) -> list[Value]:
    """The options of a parser's `parents`."""
    parents = items_of(made.keywords.get("parents", ListValue([]))) or []
    return [option for parent in parents if isinstance(parent, CallResult) for option in parent.positional]


def _in_place(options: list[Option], words: list[str]) -> dict[str, Value]:
    """The options that a command line gives by their place; none where it has flags that are not declared."""
    flags = {flag: option for option in options for flag in option.flags if flag.startswith("-")}
    placed: list[str] = []
    while words:
        flag, equals, _ = (word := words.pop(0)).partition("=")
        if not word.startswith("-"):
            placed.append(word)
        elif (option := flags.get(flag)) is None:
            return {}
        elif option.switch is None and not equals:
            del words[: len(list(takewhile(_is_value, words))) if option.many else 1]
    names = [option for option in options if option.flags and not option.flags[0].startswith("-")]
    return {
        option.name: _open(option.name, word) or Constant(_converted(word, option.kind), "the command line")
        for option, word in zip(names, placed, strict=False)
    }


def _spelled_out(words: Sequence[str], options: Sequence[Option]) -> tuple[str, ...]:
    """The words with an option's beginning, which to argparse means the one option that begins so, as that option."""
    flags = [flag for option in options for flag in option.flags if flag.startswith("--")]
    spelled: list[str] = []
    for word in words:
        name, equals, rest = word.partition("=")
        meant = [flag for flag in flags if flag.startswith(name)] if name.startswith("--") and len(name) > 2 else []
        spelled.append(meant[0] + equals + rest if len(meant) == 1 else word)
    return tuple(spelled)


def _parsed(owner: CallResult, context: FileContext) -> Instance:
    """What a parser makes of the words: its own options, and those of the subcommand that they name.

    Without words the one subcommand that trains by its name stands for them; where none or several do, an option that
    two of them have is not known.
    """
    options = [Option.of(call) for call in owner.positional if isinstance(call, CallResult)]
    # a subcommand's options are its own, though the beginning of one of these
    words = _spelled_out(context.arguments, options) if context.arguments else context.arguments
    namespace = Instance({option.name: option.value(replace(context, arguments=words)) for option in options})
    subparsers = owner.keywords.get("subparsers")
    if not isinstance(subparsers, CallResult):
        namespace.attributes |= _in_place(options, list(words or ()))
    if isinstance(subparsers, CallResult):
        named = {name: parser for name, parser in subparsers.attributes.items() if isinstance(parser, CallResult)}
        given = [word for word in context.arguments or () if word in named]
        trains = [name for name in named if TRAINS.search(name)]
        chosen = given[0] if given else trains[0] if len(trains) == 1 and context.arguments is None else ""
        where = "the command line" if given else f"{subparsers.where}, the subcommand that trains"
        subcommands = {chosen: named[chosen]} if chosen else named
        for inner in (_parsed(parser, context) for parser in subcommands.values()):
            for name, value in inner.attributes.items():
                differs = name in namespace.attributes and not same(namespace.attributes[name], value) and not chosen
                came = Unknown(f"{subparsers.where}: {name} comes from the command line")
                namespace.attributes[name] = came if differs else value
        dest = plain(subparsers.keywords.get("dest"))
        if isinstance(dest, str):
            open_ = Unknown(f"{subparsers.where}: {dest} comes from the command line")
            namespace.attributes[dest] = Constant(chosen, where) if chosen else open_
    namespace.attributes |= owner.attributes
    return namespace


def _with_handed_words(reader: Reading, made: CallResult) -> FileContext:
    """What is known from outside, with the words that a parser is handed by the program in place of the command
    line's."""
    handed = items_of(made.argument("args", 0) or Constant(None))
    words = [plain(word) for word in handed or ()]
    if (
        not all(isinstance(word, str) for word in words)
        or handed is None
        or (not words and not reader.outside.arguments)
    ):
        return reader.outside
    return replace(reader.outside, arguments=tuple(words))


def _not_taken(reader: Reading, owner: CallResult, where: str) -> list[str]:
    """Sentences on long options of the command line that a parser does not have, at which argparse ends the program;
    none where not all its options are known: one is computed, takes the rest, or others' code may add some."""
    taken = _long_options(owner)
    handed = (value for call in reader.program.calls for value in (*call.positional, *call.keywords.values()))
    words = [word.partition("=")[0] for word in reader.outside.arguments or ()]
    words = [word for word in words[: words.index("--") if "--" in words else None] if word.startswith("--")]
    if taken is None or any(value is owner for value in handed):
        return []
    lacks = [word for word in dict.fromkeys(words) if not any(option.startswith(word) for option in taken)]
    return [
        f"{where}: the program takes no {word}, which the command line gives: argparse ends it there" for word in lacks
    ]


def _long_options(owner: CallResult) -> set[str] | None:
    """The long options of a parser and its subcommands; None where some are not known."""
    parents = items_of(owner.keywords.get("parents", ListValue([])))
    if parents is None or not all(isinstance(parent, CallResult) for parent in parents):
        return None
    taken = {"--help"}
    for call in owner.positional:
        flags = [plain(each) for each in call.positional] if isinstance(call, CallResult) else [None]
        if not isinstance(call, CallResult) or not flags or not all(isinstance(flag, str) for flag in flags):
            return None
        action, nargs = call.keywords.get("action"), call.keywords.get("nargs")
        if getattr(nargs, "name", "") == "REMAINDER" or plain(nargs) in ("...", "A..."):
            return None
        taken |= {str(flag) for flag in flags}
        if getattr(action, "name", "") == "BooleanOptionalAction":
            taken |= {f"--no-{str(flag)[2:]}" for flag in flags}
    subparsers = owner.keywords.get("subparsers")
    for inner in subparsers.attributes.values() if isinstance(subparsers, CallResult) else ():
        below = _long_options(inner) if isinstance(inner, CallResult) else None
        if below is None:
            return None
        taken |= below
    return taken


def of_parser(reader: Reading, owner: CallResult, made: CallResult) -> Value | None:
    match made.name:
        case "add_argument":
            owner.positional.append(made)
            return made
        case "add_argument_group" | "add_mutually_exclusive_group":
            return owner
        case "add_subparsers":
            owner.keywords["subparsers"] = CallResult("ArgumentParser", keywords=dict(made.keywords), where=made.where)
            return owner.keywords["subparsers"]
        case "add_parser":
            inner = CallResult("ArgumentParser", positional=parents_of(made), where=made.where)
            owner.attributes[str(plain(made.positional[0]) if made.positional else "")] = inner
            return inner
        case "set_defaults":
            owner.attributes |= made.keywords
            return Constant(None)
        case "parse_args" | "parse_known_args" if owner.name == "ArgumentParser":
            if made.name == "parse_args" and made.argument("args", 0) is None:
                reader.program.not_taken += _not_taken(reader, owner, made.where)
            namespace = _parsed(owner, _with_handed_words(reader, made))
            return ListValue([namespace, ListValue([])]) if made.name == "parse_known_args" else namespace
    return _dataclasses(reader, owner, made) if made.name in OF_DATACLASSES else None


OF_FILES = ("parse_yaml_file", "parse_json_file")


def _of_file(reader: Reading, owner: CallResult, made: CallResult) -> dict[str, Value]:
    """Settings of the YAML or JSON file that a parser of dataclasses reads: `--config FILE`, or the first word."""
    words = list(reader.outside.arguments or ())
    path: Any = None
    if made.name in OF_FILES:
        path = plain(made.positional[0] if made.positional else next(iter(made.keywords.values()), None))
    elif owner.name != "HfArgumentParser" and made.name in ("parse_args_and_config", "parse"):
        first = words[0] if words and owner.name != "TrlParser" else None
        path = plain(on_command_line(words).get("config", Constant(first)))
    if not isinstance(path, str) or not path.endswith((".yaml", ".yml", ".json")):
        return {}
    opened = CallResult("open", positional=[Constant(path)])
    table = as_table(loaded(reader, CallResult("load", positional=[opened], where=made.where)))
    return {} if table is None else table.entries


def _dataclasses(reader: Reading, owner: CallResult, made: CallResult) -> Value:
    given = owner.argument("dataclass_types", 0)
    classes = items_of(given) if given is not None else None
    if classes is None and given is not None:
        classes = [given]
    words = dict(_of_file(reader, owner, made))
    handed = as_table(made.positional[0]) if made.name == "parse_dict" and made.positional else None
    if made.name in OF_FILES:  # which take no word of the command line
        more = "" if words else f"{made.where}: settings come from another file"
    elif handed is not None:
        words, more = dict(handed.entries), handed.more
    else:
        arguments = _with_handed_words(reader, made).arguments
        words |= on_command_line(arguments)
        more = "" if arguments is not None else f"{made.where}: settings come from the command line"
    values: list[Value] = []
    # Two classes that share an option do not start: a word of the program's own class is none of a library's.
    owned = {key for kind in classes or [] if isinstance(kind, Class) and not kind.base for key in kind.fields}
    of_libraries = {key: value for key, value in words.items() if key not in owned or made.name in OF_FILES}
    for kind in classes or []:
        if isinstance(kind, Class):
            keywords = {key: value for key, value in words.items() if key in kind.fields}
            value = reader.instance(kind, CallResult(kind.name, keywords=dict(of_libraries if kind.base else keywords)))
            if isinstance(value, Instance):
                for key in kind.fields:
                    if key not in words and more and isinstance(value.attributes.get(key), Constant):
                        default = value.attributes[key]
                        value.attributes[key] = Constant(plain(default), f"{where_of(default)}, default of --{key}")
            elif isinstance(value, CallResult):
                value.more = more
            values.append(value)
        elif isinstance(kind, ImportedName):
            library = CallResult(kind.name, keywords=dict(of_libraries), where=made.where, more=more)
            reader.program.calls.append(library)
            values.append(library)
        else:
            values.append(Unknown(f"{made.where}: a class that is not known"))
    if plain(made.keywords.get("return_remaining_strings")) is True:
        values.append(ListValue([]))
    return ListValue(values, made.where)
