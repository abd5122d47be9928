"""What several benchmarks share: files of rows, tables within a page, errors as cells."""

import gzip
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.models import catalogue
from planner.models.spec import ModelSpec

DATA = Path(__file__).resolve().parent / "data"
DOCS = DATA.parents[1] / "docs"
ERROR_COLUMNS = "points | median | 90th | 95th | worst | bias |\n|---|--:|--:|--:|--:|--:|--:|"


def rows_of(path: Path) -> list[Any]:
    """The rows of a file of JSON lines (".gz": packed)."""
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()
    return [json.loads(line) for line in lines if line]


def rows_so_far(path: Path) -> list[Any]:
    """The same of a file that is being written: none where it is not there yet."""
    return rows_of(path) if path.exists() else []


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """The same way back."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def loaded(name: str) -> ModelSpec:
    """A model of the catalogue."""
    spec = catalogue.load(name)
    assert spec is not None, name
    return spec


def marked(page: Path, script: str, text: str | None = None) -> str:
    """What stands between the marks of a script in a page of docs/; a text given is written there."""
    marks = [f"<!-- benchmarks/{script}.py: {word} -->\n" for word in ("begin", "end")]
    before, rest = page.read_text("utf-8").split(marks[0])
    now, after = rest.split(marks[1])
    if text is not None:
        page.write_text(before + marks[0] + text + marks[1] + after, "utf-8")
    return now if text is None else text


def percentile(values: Iterable[float], fraction: float) -> float:
    """Nearest rank: the smallest value with at least `fraction` of all at or below it.

    Raises:
        ValueError: no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def error_table(group: str, errors: Mapping[str, Sequence[float]], digits: int = 2) -> list[str]:
    """Errors by name, in `ERROR_COLUMNS`."""
    lines = [f"| {group} | {ERROR_COLUMNS}"]
    for name, values in sorted(errors.items()):
        shares = [100 * percentile(map(abs, values), share) for share in (0.5, 0.9, 0.95, 1.0)]
        cells = " | ".join(f"{share:.{digits}f} %" for share in shares)
        lines.append(f"| {name} | {len(values)} | {cells} | {100 * statistics.fmean(values):+.{digits}f} % |")
    return [*lines, ""]
