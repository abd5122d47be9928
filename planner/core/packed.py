"""Tables of runs in a compressed file (step profiles, step programs): sealed by a digest where a cache or a team passes
them on; those that ship are in the package's own list of hashes."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 512 << 20
"""Of what a file unpacks to; the largest that ships takes a hundredth."""


def write_packed(path: Path, tables: Mapping[str, Any]) -> None:
    """Writes them, whole or not at all; the same ones give the same bytes, so that two builds at once lose nothing."""
    from planner.core.outputs import write_whole  # late: a plan writes none

    content = json.dumps(tables, separators=(",", ":")).encode()
    write_whole(path, gzip.compress(_seal(content) + b"\n" + content, mtime=0))


def read_packed(path: Path, schema: int, *, shipped: bool) -> dict[str, Any] | None:
    """What a file holds; None where there is none, or it is of another schema, damaged, or not as it was written.

    Args:
        shipped: whether it may have no seal.
    """
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_BYTES + 1)
        if not (shipped and content[:1] == b"{"):
            seal, _, content = content.partition(b"\n")
            if not shipped and seal != _seal(content):
                return None
        document: dict[str, Any] = json.loads(content)
        return document if document["schema"] == schema else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error):
        return None


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
