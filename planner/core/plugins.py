"""What other packages bring along: GPU tables, price sources and launch targets, as entry points.

A plug-in is an installed distribution whose name begins with `finetune-planner-`: so it is found by a look at the
directories' names, where asking every distribution for its entry points costs each plan tens of milliseconds.

| group | the entry point names |
|---|---|
| `finetune_planner.gpus` | a function without arguments: rows by the columns of `planner/data/gpus.csv` |
| `finetune_planner.prices` | the same for `planner/data/prices.csv` |
| `finetune_planner.targets` | a mapping of `planner.options.stacks.TargetRow`'s fields, under the target's name |

`examples/finetune-planner-acme` is one with all three.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from planner.core.errors import EnvironmentProblem

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PREFIX = "finetune_planner_"
GROUP = "finetune_planner."


@cache
def _entry_points() -> "tuple[EntryPoint, ...]":
    """Those of all plug-ins, by their names."""
    places = [place for place in sys.path if any(map(_is_plugin, _listed(place or os.curdir)))]
    if not places:
        return ()
    from importlib.metadata import distributions  # late: it costs several milliseconds

    points = {
        (point.group, point.name): point
        for distribution in distributions(path=places)
        if _is_plugin(f"{distribution.name.replace('-', '_').replace('.', '_')}-")
        for point in distribution.entry_points
        if point.group.startswith(GROUP)
    }
    return tuple(points[key] for key in sorted(points))


def _listed(place: str) -> list[str]:
    try:
        return os.listdir(place)
    except OSError:  # a zip file, a directory that is gone
        return []


def _is_plugin(name: str) -> bool:
    """Whether a name in a directory is a plug-in's metadata (`finetune_planner_acme-1.0.dist-info`)."""
    return name.lower().startswith(PREFIX) and "-" in name


def loaded(group: str) -> Iterator[tuple[str, Any]]:
    """(name, object) of each entry point of a group: "gpus", "prices" or "targets".

    Raises:
        EnvironmentProblem: one cannot be imported.
    """
    for point in _entry_points():
        if point.group == GROUP + group:
            with _blamed(point):
                value = point.load()
            yield point.name, value


@contextmanager
def _blamed(point: "EntryPoint") -> Iterator[None]:
    """Names the plug-in whose code or data failed."""
    try:
        yield
    except Exception as error:
        who = point.dist.name if point.dist is not None else point.value
        raise EnvironmentProblem(
            f"the plug-in {who} ({point.group} {point.name}) fails: {type(error).__name__}: {error}",
            hint=f"pip uninstall {who}, or mend it",
        ) from error


def rows(group: str, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """The rows that plug-ins add to a table, as its CSV file would hold them: a column that is left out is empty.

    Raises:
        EnvironmentProblem: a plug-in cannot be imported, fails, or has a column that the table lacks.
    """
    for point in _entry_points():
        if point.group == GROUP + group:
            with _blamed(point):
                given = _checked(point.load()(), columns)
            yield from given


def _checked(given: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> list[dict[str, str]]:
    """Rows of text.

    Raises:
        ValueError: a column that the table lacks, or an empty first one.
    """
    checked = []
    for row in given:
        if unknown := sorted(set(row) - set(columns)):
            raise ValueError(f"no column {unknown[0]!r}; there are {', '.join(columns)}")
        if not row.get(columns[0]):
            raise ValueError(f"a row without {columns[0]!r}")
        checked.append({name: str(row.get(name, "")) for name in columns})
    return checked
