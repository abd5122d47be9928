"""Which settings each tool knows: snapshots of the tools' own parsers, with versions (tools/validators/snapshot.py)."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def snapshot() -> dict[str, Any]:
    """tool -> {"version": ..., "fields": [...]} as committed."""
    data: dict[str, Any] = json.loads(files("planner").joinpath("data/launch_fields.json").read_text("utf-8"))
    return data


def known_settings(tool: str) -> frozenset[str]:
    """Top-level settings a tool's parser knows, legacy names included."""
    entry = snapshot()[tool]
    return frozenset((*entry["fields"], *entry.get("legacy", ())))


def accepted(tool: str) -> frozenset[str]:
    """What its files may hold beside that: the launch's settings, who rewards, other versions', whole blocks'; of tools
    that take transformers' arguments, names that published configs still carry and its parser has dropped (none changes
    memory or speed unless a reader looks at it)."""
    of_transformers = snapshot()["transformers"]["legacy"] if tool in ("trl", "llamafactory") else ()
    return known_settings(tool).union(snapshot()[tool].get("beside", ()), of_transformers)


def blocks(tool: str) -> dict[str, list[str]]:
    """Block of a tool's file ("": the file itself) -> its settings."""
    by_block: dict[str, list[str]] = snapshot()[tool]["blocks"]
    return by_block
