"""Files from strangers into plain values: bounded in size, depth and expansion; no tags, no links, no execution.

OmegaConf's: `${...}` filled in; what stays open stays so."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from planner.core import inputs
from planner.core.errors import ConfigError, NotATraining
from planner.core.inputs import check_values, read_text, reason

MAX_FILE_BYTES = 128 << 10
"""Published launch configs are below 10 KiB; PyYAML reads about 100 KiB/s, so a hostile file costs a second at most."""
LARGER = {".ipynb": 8 << 20, ".py": 512 << 10}
"""Notebooks hold their outputs, and a program is parsed fast: how many bytes they may have."""

MAX_NODES = 20_000
MAX_DEPTH = 40
MAX_DOCUMENTS = 50
MAX_BLOCKS = 3
"""Blocks inside blocks in which a setting's line is noted."""
MAX_BRACKETS = 200
"""Open brackets at a time, those inside comments and quotes counted too."""
FLAT = "a launch config is a flat list of settings with a few blocks"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader that remembers duplicate keys (PyYAML alone keeps the last without a word)."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    self.duplicates.append(key_node.value)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def read_bounded(path: Path) -> str:
    """The text of a regular file, UTF-8, as long as its kind may be.

    Raises:
        ConfigError: missing, a link, a directory or device, too large, or not text.
    """
    max_bytes = LARGER.get(path.suffix, MAX_FILE_BYTES)
    return read_text(path, max_bytes=max_bytes, follow=False, hint="give the path of a config file, saved as UTF-8")


class Parsed(NamedTuple):
    """A file's settings: plain values, the keys that it writes twice, and the line of each (dotted) key."""

    values: dict[str, Any]
    duplicates: tuple[str, ...]
    lines: dict[str, int]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is taken of a key that is written twice."""
        return tuple(f"{key} is written twice: the last one counts" for key in self.duplicates)


def parse_yaml(text: str, name: str) -> Parsed:
    """A YAML mapping as plain values.

    Raises:
        ConfigError: not YAML, a tag that would build an object, a bomb, not a mapping, or several documents.
    """
    documents = parse_documents(text, name)
    if len(documents) > 1:
        raise ConfigError(f"{name} holds {len(documents)} documents", hint="give one of them as a file of its own")
    return documents[0]


def parse_documents(text: str, name: str) -> tuple[Parsed, ...]:
    """The mappings of a YAML file, one of each document that is not empty.

    Raises:
        ConfigError: as `parse_yaml`, or more than MAX_DOCUMENTS.
    """
    _count_brackets(text, name)
    documents: list[tuple[Any, dict[str, int], tuple[str, ...]]] = []
    try:
        loader = _Loader(text)
        try:
            while loader.check_node() and len(documents) <= MAX_DOCUMENTS:
                node = loader.get_node()
                assert node is not None
                _count_nodes(node, name)  # before anything is built: merge keys copy what they merge
                before = len(loader.duplicates)
                value = loader.construct_document(node)
                documents.append((value, dict(_lines(node)), tuple(dict.fromkeys(loader.duplicates[before:]))))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or reason(error)
        raise ConfigError(f"{name}{where} is not valid YAML: {problem}", hint="correct that line") from error
    except (RecursionError, ValueError, TypeError, OverflowError, AttributeError, LookupError) as error:
        raise ConfigError(f"{name} is not a YAML file that can be read: {reason(error)}", hint=FLAT) from error
    if len(documents) > MAX_DOCUMENTS:
        raise ConfigError(f"{name} holds more than {MAX_DOCUMENTS} documents", hint=FLAT)
    mappings = (
        [document for document in documents if isinstance(document[0], dict)] or documents[:1] or [(None, {}, ())]
    )
    return tuple(Parsed(_mapping(value, name), duplicates, lines) for value, lines, duplicates in mappings)


def _lines(node: yaml.Node, above: str = "") -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode) or above.count(".") > MAX_BLOCKS:
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            yield f"{above}{key.value}", key.start_mark.line + 1
            yield from _lines(value, f"{above}{key.value}.")


def parse_json(text: str, name: str) -> dict[str, Any]:
    """A JSON object as plain values.

    Raises:
        ConfigError: not JSON, too deep, or not an object; NotATraining: an array, or an object a line.
    """
    first, _, rest = text.strip().partition("\n")
    if first.endswith("}") and rest.startswith("{"):
        raise NotATraining(f"{name} holds an object a line, as data do", hint="give the config; --dataset takes data")
    return _mapping(inputs.parse_json(text, name, hint="correct it at that place"), name)


def json_duplicates(text: str) -> tuple[str, ...]:
    """The keys that some object of a JSON text holds twice, of which Python keeps the last without a word."""
    twice: dict[str, None] = {}

    def note(pairs: list[tuple[str, Any]]) -> None:
        twice.update((name, None) for name, num in Counter(name for name, _ in pairs).items() if num > 1)

    json.loads(text, object_pairs_hook=note)
    return tuple(twice)


MAX_LINED = 16 << 10
"""Characters of JSON in which settings' lines are noted: the parser that knows them reads 100 KiB/s."""


def json_lines(text: str) -> dict[str, int]:
    """The line of each (dotted) key of JSON, {} of what is large."""
    try:
        node = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader) if len(text) <= MAX_LINED else None
    except (yaml.YAMLError, RecursionError):
        return {}
    return dict(_lines(node)) if node is not None else {}


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """A TOML document as plain values.

    Raises:
        ConfigError: not TOML, or nested too deep.
    """
    import tomllib

    _count_brackets(text, name)
    if any(key.count(".") > MAX_BRACKETS and "#" not in key for key in _KEY.findall(text)):
        raise ConfigError(f"{name} is nested too deep", hint=FLAT)
    try:
        value = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is not valid TOML: {reason(error)}", hint="correct it at that place") from error
    return _mapping(value, name)


_KEY = re.compile(r"(?:^|[\n{,])([^=\n{,]*)")
"""Where a key of TOML may stand: tomllib takes the square of its parts."""


def _count_brackets(text: str, name: str) -> None:
    """Refuses nesting that the parsers would take seconds to find out."""
    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if depth > MAX_BRACKETS:
            raise ConfigError(f"{name} is nested too deep", hint=FLAT)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NotATraining(
            f"{name} must hold a mapping of settings, got {type(value).__name__}", hint="one `key: value` per line"
        )
    check_values(value, name, max_values=MAX_NODES, max_depth=MAX_DEPTH, hint=FLAT)
    bad = [key for key in value if not isinstance(key, str)]
    if bad:
        raise ConfigError(f"{name}: a setting's name must be text, got {bad[0]!r:.80}", hint="write it in quotes")
    named: dict[str, Any] = _with_names(value)
    return named


def _with_names(value: Any) -> Any:
    """The values with text for every name: YAML reads `2:` as a number and `on:` as true."""
    if isinstance(value, dict):
        return {str(key): _with_names(inner) for key, inner in value.items()}
    return [_with_names(inner) for inner in value] if isinstance(value, list) else value


def _count_nodes(root: yaml.Node, name: str) -> None:
    """Refuses what would be huge when written out (aliases of aliases, merged or not), too deep or its own part."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node, depth: int) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in open_nodes:
            raise ConfigError(f"{name} refers to itself", hint="an alias must not stand inside its own anchor")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{name} is nested more than {MAX_DEPTH} deep", hint=FLAT)
        if id(node) not in sizes:
            open_nodes.add(id(node))
            children = (
                node.value if isinstance(node, yaml.SequenceNode) else [child for pair in node.value for child in pair]
            )
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in children)
            open_nodes.discard(id(node))
        if sizes[id(node)] > MAX_NODES:
            raise ConfigError(f"{name} expands to more than {MAX_NODES:,} values", hint="aliases of aliases?")
        return sizes[id(node)]

    size(root, 0)


MAX_FILLED = 10_000
"""Characters of one value, and values that are filled in, at most."""
_INNER = re.compile(r"\$\{([^${}]*)\}")
_SHELL = re.compile(r"\$\w+")
"""A variable that only the shell, which says it on the command line, knows."""


def is_open(value: Any) -> bool:
    """Whether a value is one that only composing the whole configuration would tell."""
    return isinstance(value, str) and ("${" in value or value == "???" or _SHELL.fullmatch(value) is not None)


def with_words(values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The settings with what the words of a command line say ("training.lr=1e-4") on top, `${name}` filled in."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for key, text in (word.lstrip("+~").split("=", 1) for word in words if "=" in word and not word.startswith("-")):
        try:
            put(merged, key.split("."), yaml.safe_load(text))
        except yaml.YAMLError:
            continue
    return filled(merged)


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
