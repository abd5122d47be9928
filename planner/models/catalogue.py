"""The built-in catalogue: 204 configurations with sourced counts, found by hub id or alias, offline and at once.

`planner/data/models.jsonl` holds one model per line with its lower-case names first; a lookup scans the text for the
name and parses only the line it stands in.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from typing import Any

from planner.core.records import dataclass
from planner.core.shipped import DATA
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.models.stored import PLAIN_COPIES, plain_copy

_PATH = DATA / "models.jsonl"
_NAMES = b'{"names":['
_SEPARATORS = re.compile(r"[\s_:-]")


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """One model of the catalogue.

    Attributes:
        model_id: hub id.
        names: every lower-case name that finds it, the id first.
        aliases: other hub ids with the same configuration.
        num_params: unique parameters of the module tree that transformers 5.23 builds.
        published_num_params: what its makers or the hub say, from `published_source`.
        config_source: where the configuration was read.
        guessed_fields: fields of the configuration from memory, unsourced.
    """

    model_id: str
    names: tuple[str, ...]
    aliases: tuple[str, ...]
    model_type: str
    built_class: str
    num_params: int
    tied: bool
    published_num_params: int | None
    published_source: str
    config_source: str
    guessed_fields: tuple[str, ...] = ()
    note: str = ""
    config: Mapping[str, Any] = field(repr=False)


@cache
def _text() -> bytes:
    return _PATH.read_bytes()


def _entry(line: bytes) -> CatalogueEntry:
    raw = json.loads(line)
    return CatalogueEntry(
        model_id=raw["id"],
        names=tuple(raw["names"]),
        aliases=tuple(raw["aliases"]),
        model_type=raw["config"]["model_type"],
        built_class=raw["built_class"],
        num_params=raw["num_params"],
        tied=raw["tied"],
        published_num_params=raw.get("published_num_params"),
        published_source=raw.get("published_source", ""),
        config_source=raw["config_source"],
        guessed_fields=tuple(raw.get("guessed_fields", ())),
        note=raw.get("note", ""),
        config=raw["config"],
    )


def find(name: str) -> CatalogueEntry | None:
    """The entry that this hub id, alias or bare name stands for (any case), None where there is none."""
    wanted = name.strip().lower()
    if not wanted or '"' in wanted or "\\" in wanted or not wanted.isascii():
        return None
    lines = _lines_naming(b'"' + wanted.encode() + b'"')
    if not lines and "/" not in wanted:  # several owners publish a model of this name: fine where it is the same one
        lines = _lines_naming(b"/" + wanted.encode() + b'"')
    return _entry(lines.pop()) if len(lines) == 1 else None


def _lines_naming(needle: bytes) -> set[bytes]:
    text = _text()
    lines: set[bytes] = set()
    at = text.find(needle)
    while at >= 0:
        start, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
        # A name counts only inside the list at the head of its line.
        if at < text.index(b"]", start):
            lines.add(text[start : end if end >= 0 else len(text)])
        at = text.find(needle, at + 1)
    return lines


def load(name: str) -> ModelSpec | None:
    """The spec of a catalogue model by hub id, alias or bare name in any case, None where there is none."""
    entry = find(name)
    if entry is None:
        return _plain_copy(name.strip().lower())
    # An alias has its own weights, so a launch file must name it, not its catalogue sibling.
    wanted = name.strip().lower()
    spelled = (entry.model_id, *entry.aliases)
    model_id = next(
        spelling for spelling in spelled if wanted in (spelling.lower(), spelling.lower().rpartition("/")[2])
    )
    return _spec(entry.model_id, model_id)


@cache
def _plain_copy(name: str) -> ModelSpec | None:
    """The 16-bit copy of a catalogue model that has this lower-case name."""
    for published, copy in PLAIN_COPIES.items():
        if name in (copy.lower(), copy.lower().rpartition("/")[2]):
            model = load(published)
            return plain_copy(model) if model is not None else None
    return None


@cache
def _spec(own_id: str, model_id: str) -> ModelSpec:
    """One object for each name: specs are keys of caches, where equal ones are compared field by field."""
    entry = find(own_id)
    assert entry is not None
    same = "" if model_id == entry.model_id else f" (same configuration as {entry.model_id})"
    source = f"built-in catalogue{same}: {entry.config_source}"
    if entry.guessed_fields:
        source += f"; unsourced fields: {', '.join(entry.guessed_fields)}"
    return spec_from_config(entry.config, model_id=model_id, source=source)


def entries() -> tuple[CatalogueEntry, ...]:
    """Every model of the catalogue, in order of its name."""
    return tuple(_entry(line) for line in _text().splitlines())


def names(*, model_type: str | None = None) -> tuple[str, ...]:
    lines = _text().splitlines()
    if model_type is not None:
        lines = [line for line in lines if json.loads(line)["config"]["model_type"] == model_type]
    return tuple(json.loads(b"[" + _list_of_names(line) + b"]")[0] for line in lines)


def names_with(text: str) -> tuple[str, ...]:
    """The names of the models that have this in theirs, whatever its case and separators."""
    wanted = _SEPARATORS.sub("", text.lower())
    return tuple(name for name in names() if wanted in _SEPARATORS.sub("", name))


def hub_ids() -> tuple[tuple[tuple[str, ...], int], ...]:
    """(lower-case hub ids, its own first; parameters) of every configuration."""
    models = []
    for line in _text().splitlines():
        names = json.loads(b"[" + _list_of_names(line) + b"]")
        num_params = re.search(rb'"num_params":(\d+)', line)
        assert num_params is not None
        models.append(((names[0], *(name for name in names[1:] if "/" in name)), int(num_params[1])))
    return tuple(models)


def all_names() -> tuple[str, ...]:
    listed = [name for line in _text().splitlines() for name in json.loads(b"[" + _list_of_names(line) + b"]")]
    return (*listed, *map(str.lower, PLAIN_COPIES.values()))


def _list_of_names(line: bytes) -> bytes:
    return line[len(_NAMES) : line.index(b"]")]
