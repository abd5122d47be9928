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
    names = isinstance(listed, list) and all(isinstance(entry, (str, Mapping)) for entry in listed)
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
    overrides = dict(word.lstrip("+~").split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    files: list[str] = []
    merged = _composed(values, read, folder, overrides, files)
    for key, text in overrides.items():
        try:
            put(merged, key.split("."), yaml.safe_load(text))
        except yaml.YAMLError:
            continue
    return filled(merged), files


def _composed(
    values: Mapping[str, Any], read: Read, folder: str, overrides: dict[str, str], files: list[str]
) -> dict[str, Any]:
    listed = values.get("defaults")
    settings = {key: value for key, value in values.items() if key != "defaults" or not isinstance(listed, list)}
    if not isinstance(listed, list):
        return settings
    merged: dict[str, Any] = {}
    for item in [*listed, *(["_self_"] if "_self_" not in listed else [])]:
        if item == "_self_":
            _merge(merged, settings)
            continue
        for key, option in item.items() if isinstance(item, Mapping) else [("", item)]:
            group, _, package = str(key).removeprefix("override ").removeprefix("optional ").strip().partition("@")
            option = overrides.pop(group, option)
            for choice in option if isinstance(option, list) else [option]:
                if isinstance(choice, str) and choice != "???" and group.partition("/")[0] != "hydra":
                    path = "/".join(part for part in (folder, group.lstrip("/"), choice) if part)
                    _put(merged, path, group, package, read, overrides, files)
    return merged


def _put(
    merged: dict[str, Any], path: str, group: str, package: str, read: Read, overrides: dict[str, str], files: list[str]
) -> None:
    """Puts one file of a group into the settings, at its package."""
    path = path if path.endswith((".yaml", ".yml")) else f"{path}.yaml"
    text = read(path) if len(files) < MAX_FILES and path not in files else None
    if text is None:
        return
    files.append(path)
    try:
        inner = _composed(parse_yaml(text, path).values, read, path.rpartition("/")[0], overrides, files)
    except ConfigError:
        return
    header = _PACKAGE.match(text)
    place = package or (header[1] if header else "") or group.strip("/").replace("/", ".")
    parts = [] if place in ("_global_", "") else place.removeprefix("_global_.").split(".")
    outer: dict[str, Any] = inner
    for part in reversed(parts):
        outer = {part: outer}
    _merge(merged, outer)


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

    def value(node: Any, depth: int) -> Any:
        budget[0] -= 1
        if depth > 8 or budget[0] < 0:
            return node
        if isinstance(node, Mapping):
            return {key: value(inner, depth) for key, inner in node.items()}
        if isinstance(node, list):
            return [value(inner, depth) for inner in node]
        if not isinstance(node, str) or "${" not in node:
            return node
        whole = _INNER.fullmatch(node)
        if whole:
            target = _target(values, whole[1])
            return node if target is None else value(target, depth + 1)
        parts = _INNER.sub(lambda match: _text(value(_target(values, match[1]), depth + 1), match[0]), node)
        return node if len(parts) > MAX_FILLED else parts if parts == node else value(parts, depth + 1)

    return {key: value(inner, 0) for key, inner in values.items()}


def _text(value: Any, otherwise: str) -> str:
    return str(value) if isinstance(value, (str, int, float)) and not is_open(value) else otherwise


def _target(values: Mapping[str, Any], name: str) -> Any:
    """What a name in `${...}` stands for, None where the settings do not say."""
    resolver, colon, rest = name.partition(":")
    if colon:
        _, comma, default = rest.partition(",")
        return yaml.safe_load(default) if resolver == "oc.env" and comma and "${" not in default else None
    node: Any = values
    for part in name.strip().lstrip(".").split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def without_open(values: Mapping[str, Any], above: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that are known, and (dotted) name -> text of those that are not."""
    resolved: dict[str, Any] = {}
    opened: dict[str, str] = {}
    for key, value in values.items():
        if is_open(value):
            opened[f"{above}{key}"] = value
        elif isinstance(value, Mapping):
            resolved[key], inner = without_open(value, f"{above}{key}.")
            opened |= inner
        else:
            resolved[key] = value
    return resolved, opened
