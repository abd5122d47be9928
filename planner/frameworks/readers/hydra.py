"""Hydra's and OmegaConf's files: those that `defaults:` names put in, `${...}` filled in; what stays open stays so."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from planner.core.errors import ConfigError
from planner.frameworks.readers.loading import parse_yaml

MAX_FILES = 60
MAX_FILLED = 10_000
"""Characters of one value, and values that are filled in, at most."""
_PACKAGE = re.compile(r"\A\s*#\s*@package\s+(\S+)")
_INNER = re.compile(r"\$\{([^${}]*)\}")
_SHELL = re.compile(r"\$\w+")
"""A variable that only the shell, which says it on the command line, knows."""
Read = Callable[[str], str | None]


def is_composed(values: Mapping[str, Any]) -> bool:
    """Whether a file names others to be put in, or values to be filled in."""
    listed = values.get("defaults")
    names = isinstance(listed, list) and all(isinstance(one, (str, Mapping)) for one in listed)
    return names or bool(without_open(values)[1])


def is_open(value: Any) -> bool:
    """Whether a value is one that only composing the whole configuration would tell."""
    return isinstance(value, str) and ("${" in value or value == "???" or _SHELL.fullmatch(value) is not None)


def composed(
    values: Mapping[str, Any], read: Read, folder: str = "", words: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The settings with those of the files that its `defaults` list names, and what is said on the command line on top;
    the names of the files read.

    Args:
        read: the text of a file by its path, None where it is not there.
        folder: of this file. words: of the command line ("model=llama", "training.lr=1e-4").

    Source: Hydra 1.3, "The Defaults List", "Packages".
    """
    said = dict(word.lstrip("+~").split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    files: list[str] = []
    found = _composed(values, read, folder, said, files)
    for key, text in said.items():
        try:
            put(found, key.split("."), yaml.safe_load(text))
        except yaml.YAMLError:
            continue
    return filled(found), files


def _composed(
    values: Mapping[str, Any], read: Read, folder: str, said: dict[str, str], files: list[str]
) -> dict[str, Any]:
    listed = values.get("defaults")
    own = {key: value for key, value in values.items() if key != "defaults" or not isinstance(listed, list)}
    if not isinstance(listed, list):
        return own
    found: dict[str, Any] = {}
    for item in [*listed, *(["_self_"] if "_self_" not in listed else [])]:
        if item == "_self_":
            _merge(found, own)
            continue
        for key, option in item.items() if isinstance(item, Mapping) else [("", item)]:
            group, _, package = str(key).removeprefix("override ").removeprefix("optional ").strip().partition("@")
            option = said.pop(group, option)
            for one in option if isinstance(option, list) else [option]:
                if isinstance(one, str) and one != "???" and group.partition("/")[0] != "hydra":
                    path = "/".join(part for part in (folder, group.lstrip("/"), one) if part)
                    _put(found, path, group, package, read, said, files)
    return found


def _put(
    found: dict[str, Any], path: str, group: str, package: str, read: Read, said: dict[str, str], files: list[str]
) -> None:
    """Puts one file of a group into the settings, at its package."""
    path = path if path.endswith((".yaml", ".yml")) else f"{path}.yaml"
    text = read(path) if len(files) < MAX_FILES and path not in files else None
    if text is None:
        return
    files.append(path)
    try:
        inner = _composed(parse_yaml(text, path).values, read, path.rpartition("/")[0], said, files)
    except ConfigError:
        return
    header = _PACKAGE.match(text)
    place = package or (header[1] if header else "") or group.strip("/").replace("/", ".")
    parts = [] if place in ("_global_", "") else place.removeprefix("_global_.").split(".")
    outer: dict[str, Any] = inner
    for part in reversed(parts):
        outer = {part: outer}
    _merge(found, outer)


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def put(into: dict[str, Any], parts: list[str], value: Any) -> None:
    """Sets a setting in a block of a block, which are made where they are not there."""
    for part in parts[:-1]:
        inner = into.get(part)
        if not isinstance(inner, dict):
            inner = into[part] = {}
        into = inner
    into[parts[-1]] = value


def filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with every `${name}` that stands in them filled in, and `${oc.env:NAME,default}` by its default."""
    budget = [MAX_FILLED]

    def value(one: Any, depth: int) -> Any:
        budget[0] -= 1
        if depth > 8 or budget[0] < 0:
            return one
        if isinstance(one, Mapping):
            return {key: value(inner, depth) for key, inner in one.items()}
        if isinstance(one, list):
            return [value(inner, depth) for inner in one]
        if not isinstance(one, str) or "${" not in one:
            return one
        whole = _INNER.fullmatch(one)
        if whole:
            target = _target(values, whole[1])
            return one if target is None else value(target, depth + 1)
        parts = _INNER.sub(lambda match: _text(value(_target(values, match[1]), depth + 1), match[0]), one)
        return one if len(parts) > MAX_FILLED else parts if parts == one else value(parts, depth + 1)

    return {key: value(one, 0) for key, one in values.items()}


def _text(value: Any, otherwise: str) -> str:
    return str(value) if isinstance(value, (str, int, float)) and not is_open(value) else otherwise


def _target(values: Mapping[str, Any], name: str) -> Any:
    """What a name in `${...}` stands for, None where the settings do not say."""
    resolver, colon, rest = name.partition(":")
    if colon:
        _, comma, default = rest.partition(",")
        return yaml.safe_load(default) if resolver == "oc.env" and comma and "${" not in default else None
    found: Any = values
    for part in name.strip().lstrip(".").split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def without_open(values: Mapping[str, Any], above: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that are known, and (dotted) name -> text of those that are not."""
    known: dict[str, Any] = {}
    opened: dict[str, str] = {}
    for key, value in values.items():
        if is_open(value):
            opened[f"{above}{key}"] = value
        elif isinstance(value, Mapping):
            known[key], inner = without_open(value, f"{above}{key}.")
            opened |= inner
        else:
            known[key] = value
    return known, opened
