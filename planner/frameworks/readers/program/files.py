"""Settings that a program takes from files beside it, from Hydra and from its environment."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from planner.core.errors import ConfigError
from planner.frameworks.readers import hydra
from planner.frameworks.readers.loading import json_lines, parse_json, parse_yaml
from planner.frameworks.readers.program.reading import Reading
from planner.frameworks.readers.program.values import CallResult, Constant, DictValue, ListValue, Unknown, Value, plain
from planner.frameworks.readers.shell import is_open


def to_value(data: Any, where: str, lines: Mapping[str, int] | None = None, above: str = "") -> Value:
    """Plain data (of a YAML or JSON file) as values; `lines` tells where each dotted key stands."""
    line = (lines or {}).get(above.removesuffix("."))
    place = f"{where}:{line}" if line else where
    if hydra.is_open(data):
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
    """The settings that `@hydra.main` hands to its function: those of the named file, composed."""
    folder, name = (plain(made.keywords.get(key)) for key in ("config_path", "config_name"))
    words = list(reader.outside.arguments or ())
    for flag, value in pairwise(words):
        name = value if flag in ("--config-name", "-cn") else name
    if not isinstance(name, str):
        return Unknown(f"{made.where}: settings of Hydra that are not known")
    folder = folder.removeprefix("./").rstrip("/") if isinstance(folder, str) else ""
    path = "/".join(part for part in (folder, name) if part).removesuffix(".yaml") + ".yaml"
    text = reader.outside.read_exact(path)
    if text is None:
        return Unknown(f"{made.where}: settings of another file ({path})")
    try:
        parsed = parse_yaml(text, path)
        values, files = hydra.composed(parsed.values, reader.outside.read_exact, folder, words)
    except ConfigError as error:
        return Unknown(f"{made.where}: {error.message}")
    reader.program.sources += [path, *files]
    return to_value(values, path, {} if files else parsed.lines)


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
    text = reader.outside.read(path) if isinstance(path, str) else None
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
