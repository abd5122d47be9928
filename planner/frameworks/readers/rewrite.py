"""A config's text with some values changed and nothing else: comments, order, quoting and line ends stay.

Values are replaced at the places that PyYAML's (or Python's) parser names; new keys go to the end of their block.
"""

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import yaml

from planner.core.errors import ConfigError
from planner.core.inputs import reason
from planner.frameworks.exporters.text import literal, scalar
from planner.frameworks.readers.program.source import Source, of_notebook, of_script, tree_of
from planner.frameworks.readers.script import ARGUMENTS
from planner.frameworks.readers.shell import SUFFIXES

ADDED = "added by plan check --fix"


def rewrite(
    text: str,
    name: str,
    edits: dict[str, Any],
    *,
    call_line: int = 0,
    places: Mapping[str, str] = MappingProxyType({}),
    now: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The text with `edits` (dotted key -> value) written in; of a program, into the call on `call_line` (0: the last),
    or where `places` (key -> "file:line") say that the value stands which the call gets.

    Args:
        now: key -> value that the call gets today: what stands at a place must be just that, or it is computed from it.

    Raises:
        ConfigError: a key stands where it cannot be changed in place.
    """
    if name.endswith(".py"):
        lines = text.splitlines(keepends=True)
        return "".join(_rewrite_python(lines, of_script(text), name, edits, call_line, places, now))
    if name.endswith(".ipynb"):
        return _rewrite_notebook(text, name, edits, call_line, places, now)
    if name.endswith(SUFFIXES):
        return _rewrite_launch(text, name, edits)
    if not name.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(f"{name}: this kind of file cannot be changed in place", hint="make the changes by hand")
    return _rewrite_mapping(text, name, edits)


def _rewrite_launch(text: str, name: str, edits: dict[str, Any]) -> str:
    """The flags of a launch that stand in the script as they are; new ones go behind the last of these, or behind one
    that its trainer takes as well."""
    places: dict[str, tuple[int, int]] = {}
    for key in edits:
        spans = _flags(text, key)
        if len(spans) > 1 or any("$" in text[start:end] for start, end in spans):
            raise ConfigError(f"{name}: --{key} stands in no one place", hint="make the changes by hand")
        places |= dict.fromkeys((key,), spans[0]) if spans else {}
    anchors = []
    for start, end in (spans[0] for key in TRAINERS_WORDS if len(spans := _flags(text, key)) == 1):
        # a word goes on behind a quoted part, and in a command put in
        if end - start > 1 and not text[end : end + 1].strip() and not re.search(r"\$\(|`", text[start:end]):
            anchors.append((start, end))
    if not places and not anchors:
        raise ConfigError(f"{name} says none of {', '.join(edits)} itself", hint="make the changes by hand")
    last = max(places.values()) if places else anchors[0]
    more = "".join(f" --{key} {_word(value)}" for key, value in edits.items() if key not in places)
    text = f"{text[: last[1]]}{more}{text[last[1] :]}"
    for key, (start, end) in sorted(places.items(), key=lambda entry: entry[1], reverse=True):
        between = "=" if text[start:end].startswith("=") else " "
        text = f"{text[:start]}{between}{_word(edits[key])}{text[end:]}"
    return text


TRAINERS_WORDS = ("per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "learning_rate")
"""Words that transformers' Trainer takes, beside which a launch may say another one."""


def _flags(text: str, key: str) -> list[tuple[int, int]]:
    matches = re.finditer(_FLAG.format(re.escape(key).replace("_", "[-_]")), text)
    return [
        match.span(1) for match in matches if "#" not in text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
    ]


_FLAG = r"""(?<=\s)--{}((?:[ \t]+|=)(?:'[^'\n]*'|"[^"\n]*"|(?!-)[^\s\\;&|#'"]+)|(?=\s|$))"""
"""A flag; the group is its value with what stands before it, or empty."""


def _word(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return shlex.quote(text)


def _rewrite_mapping(text: str, name: str, edits: dict[str, Any]) -> str:
    as_json = name.endswith(".json")
    try:
        # a tab between JSON's values is a space to YAML; in its texts it cannot stand
        root = yaml.compose(text.replace("\t", " ") if as_json else text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} cannot be changed in place: {reason(error)}", hint="one document a file") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name} must hold a mapping of settings", hint="one `key: value` per line")
    splices: list[tuple[int, int, str]] = []
    missing: dict[str, Any] = {}
    for key, value in edits.items():
        setting = _find(root, key.split("."))
        shown = json.dumps(value) if as_json else scalar(value)
        if setting is None:
            missing[key] = value
            continue
        key_node, node = setting
        start, end = node.start_mark.index, node.end_mark.index
        named = re.compile(r"[\"']?\s*:\s+([*&])([^\s,\[\]{}]+)\s*").match(text, key_node.end_mark.index)
        if named is not None and named[1] == "*":  # one use of a value that others have too
            start, end = named.start(1), named.end(2)
        elif named is not None:
            raise ConfigError(
                f"{name}: other settings may have {key} from line {key_node.start_mark.line + 1} too",
                hint="make the change by hand",
            )
        elif node.start_mark.index == node.end_mark.index:  # `key:` with nothing behind it
            start = end = text.index(":", key_node.end_mark.index) + 1
            shown = " " + shown
        elif isinstance(node, (yaml.MappingNode, yaml.SequenceNode)) and not node.flow_style:
            # a block ends where the next key starts: keep the line break before that
            start = text.index(":", key_node.end_mark.index) + 1
            block = text[start:end]
            end = start + len(block.rstrip())
            shown = " " + shown
        splices.append((start, end, shown))
    for start, end, shown in sorted(splices, reverse=True):
        text = text[:start] + shown + text[end:]
    return _append(text, name, missing, as_json=as_json) if missing else text


def _find(root: yaml.MappingNode, parts: list[str]) -> tuple[yaml.Node, yaml.Node] | None:
    """(key node, value node) of a dotted key; the last of duplicates, which is the one that counts."""
    pair: tuple[yaml.Node, yaml.Node] | None = None
    for key, value in root.value:
        if isinstance(key, yaml.ScalarNode) and key.value == parts[0]:
            pair = (key, value)
    if pair is None or len(parts) == 1:
        return pair
    return _find(pair[1], parts[1:]) if isinstance(pair[1], yaml.MappingNode) else None


def _append(text: str, name: str, missing: dict[str, Any], *, as_json: bool) -> str:
    break_ = "\r\n" if "\r\n" in text else "\n"
    if as_json:
        closing = text.rstrip().rfind("}")
        body = text[:closing].rstrip()
        comma = "" if body.endswith("{") else ","
        new = ",".join(f'{break_}  "{key}": {json.dumps(value)}' for key, value in missing.items())
        return f"{body}{comma}{new}{break_}{text[closing:]}"
    top = {key: value for key, value in missing.items() if "." not in key}
    for key, value in missing.items():
        if "." in key:
            text = _insert_nested(text, name, key, value, break_)
    if top:
        text = text.rstrip("\r\n \t")
        if text.endswith(("...", "---")) or text.startswith("{"):
            raise ConfigError(f"{name}: its form cannot be extended in place", hint="add the settings by hand")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        indent = " " * (root.start_mark.column if root is not None else 0)
        lines = [f"{indent}{key}: {scalar(value)}" for key, value in top.items()]
        text = break_.join([text, "", f"{indent}# {ADDED}", *lines]) + break_
    return text


def _insert_nested(text: str, name: str, key: str, value: Any, break_: str) -> str:
    outer, inner, *deeper = key.split(".")
    for part in reversed(deeper):
        value = {part: value}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pair = _find(root, [outer]) if isinstance(root, yaml.MappingNode) else None
    if pair is None:
        block_ = f"{break_}{break_}# {ADDED}{break_}{outer}:{break_}  {inner}: {scalar(value)}{break_}"
        return text.rstrip("\r\n \t") + block_
    block = pair[1]
    if not isinstance(block, yaml.MappingNode) or block.flow_style or not block.value:
        raise ConfigError(f"{name}: {outer} cannot be extended in place", hint="write it one setting per line")
    first = block.value[0][0].start_mark
    indent = " " * first.column
    return text[: first.index] + f"{inner}: {scalar(value)}  # {ADDED}{break_}{indent}" + text[first.index :]


def in_cells(text: str, change: Callable[[list[str]], list[str]]) -> str:
    """A notebook with the sources of its code cells changed; the rest as Jupyter writes it."""
    document = json.loads(text)
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    for cell, source, changed in zip(cells, sources, change(sources), strict=True):
        if changed != source:
            cell["source"] = changed.splitlines(keepends=True) if isinstance(cell["source"], list) else changed
    indent = re.match(r"\{\r?\n( +)", text)
    return json.dumps(document, indent=len(indent[1]) if indent else None, ensure_ascii=False) + "\n"


def _rewrite_notebook(
    text: str, name: str, edits: dict[str, Any], call_line: int, places: Mapping[str, str], now: Mapping[str, Any]
) -> str:
    source = of_notebook(text, name)

    def changed(sources: list[str]) -> list[str]:
        cells = [code.splitlines(keepends=True) for code in sources]
        lines = [cells[cell - 1][line - 1] for cell, line in source.origin]
        lines = _rewrite_python(lines, source, name, edits, call_line, places, now)
        for (cell, line), rewritten in zip(source.origin, lines, strict=True):
            cells[cell - 1][line - 1] = rewritten
        return ["".join(cell) for cell in cells]

    return in_cells(text, changed)


def _names_in(node: ast.AST) -> bool:
    return any(isinstance(child, (ast.Name, ast.Call)) for child in ast.walk(node))


def _source(tree: ast.Module, source: Source, name: str, key: str, place: str, now: Mapping[str, Any]) -> ast.expr:
    """The literal that a setting's value comes from: the only one on the line that `place` names which says it, and no
    part of a sum.
    """
    line = source.line(place) if place.startswith(f"{name}:") else 0
    sums = (node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and node.lineno == line)
    computed = {id(child) for node in sums for child in ast.walk(node)}
    literals = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.lineno == line]
    matches = [node for node in literals if id(node) not in computed and not isinstance(node.value, str)]
    if isinstance(wanted := now.get(key), str):
        matches = [node for node in literals if node.value == wanted]
    if len(matches) != 1 or (key in now and matches[0].value != wanted):
        where = f" ({place})" if place else ""
        raise ConfigError(f"{name}: {key} is no literal in the call{where}", hint="make the change where it is set")
    return matches[0]


def _rewrite_python(
    lines: list[str],
    source: Source,
    name: str,
    edits: dict[str, Any],
    call_line: int,
    places: Mapping[str, str],
    now: Mapping[str, Any],
) -> list[str]:
    call, tree = None, tree_of(source.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ARGUMENTS and call_line in (0, node.lineno):
                call = node
    if call is None or not call.keywords:
        raise ConfigError(
            f"{name} has no training arguments that can be changed in place", hint="make the changes by hand"
        )
    splices: list[tuple[int, int, int, int, str]] = []
    by_name = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    first = call.keywords[0]
    left: list[ConfigError] = []
    for key, value in edits.items():
        shown = literal(value)
        if key not in by_name and not places.get(key, "").startswith(f"{name}:"):
            before = lines[first.lineno - 1].encode()[: first.col_offset].decode()
            tail = f"\n{before}" if not before.strip() else " "
            splices.append((first.lineno, first.col_offset, first.lineno, first.col_offset, f"{key}={shown},{tail}"))
            continue
        node_ = by_name.get(key)
        if isinstance(node_, ast.BinOp) and _names_in(node_):  # it may follow from what another edit changes
            left.append(ConfigError(f"{name}: {key} is computed in the call", hint="make the change where it is set"))
            continue
        literal_ = isinstance(node_, ast.Constant) or (isinstance(node_, (ast.Dict, ast.List)) and not _names_in(node_))
        if node_ is None or not literal_:
            node_ = _source(tree, source, name, key, places.get(key, ""), now)
        assert node_.end_lineno is not None
        assert node_.end_col_offset is not None
        splices.append((node_.lineno, node_.col_offset, node_.end_lineno, node_.end_col_offset, shown))
    if left and not splices:
        raise left[0]
    replaced = {splice for splice in splices if splice[:2] != splice[2:4]}
    if len({splice[:4] for splice in replaced}) < len(replaced):
        raise ConfigError(f"{name}: one value says several of {', '.join(edits)}", hint="change it by hand")
    read = source.text.splitlines()
    changed = {line for start, _, end, _, _ in splices for line in range(start, end + 1)}
    if any(lines[line - 1].rstrip("\r\n") != read[line - 1] for line in changed):
        raise ConfigError(f"{name}: a line for the notebook or the shell is not changed", hint="change it by hand")
    lines = list(lines)
    for start, column, end, end_column, shown in sorted(set(splices), reverse=True):
        tail = lines[end - 1].encode()[end_column:].decode()
        lines[start - 1] = lines[start - 1].encode()[:column].decode() + shown + tail
        lines[start:end] = [""] * (end - start)
    return lines
