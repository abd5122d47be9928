"""`plan check DIRECTORY`, and the answers of `plan check` as annotations for CI (GitHub's lines, SARIF)."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from finetune_planner.cli.checking import CheckRequest, as_document, checked
from finetune_planner.cli.options import Memory
from planner.core.errors import NotATraining, NotPlanned, PlannerError, Undetermined
from planner.core.records import dataclass
from planner.frameworks.readers.read import MAKEFILES, SUFFIXES
from planner.planning.check import summary

SKIPPED_FOLDERS = ("node_modules", "__pycache__", "site-packages", "venv", "build", "dist")
MAX_FILES = 5_000
LEVELS = {"fits": "note", "does_not_fit": "error", "uncertain": "warning"}
EXIT_OF = {"fits": 0, "not_planned": 0, "does_not_fit": 1, "unreadable": 2, "uncertain": 3, "undetermined": 3}
"""As `plan check` of that file alone; what is not planned fails no CI."""
WORST_FIRST = ("does_not_fit", "unreadable", "undetermined", "uncertain", "fits", "not_planned")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One file's answer.

    Attributes:
        outcome: a verdict, or "undetermined", "not_planned", "unreadable".
        level: "error", "warning" or "note", for CI.
        document: the JSON form of the whole answer, None where there is no verdict.
    """

    path: Path
    outcome: str
    level: str
    message: str
    line: int = 1
    document: dict[str, Any] | None = None


def candidates(folder: Path) -> Iterator[Path]:
    """Files of a folder that may hold a training, sorted; hidden folders and installed packages are left out."""
    seen = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(SUFFIXES) or name in MAKEFILES:
                seen += 1
                if seen > MAX_FILES:
                    return
                yield Path(place) / name


def finding(path: Path, gpu: str, asked: CheckRequest, limits: Memory) -> Finding | None:
    """The answer for one file on the formula rung; None where nothing in it trains."""
    try:
        result, _, _ = checked(path, gpu, asked, **vars(limits))
    except NotATraining:
        return None
    except NotPlanned as error:
        return Finding(path=path, outcome="not_planned", level="note", message=error.message)
    except Undetermined as error:
        return Finding(path=path, outcome="undetermined", level="warning", message=f"{error.message}; {error.hint}")
    except PlannerError as error:
        return Finding(path=path, outcome="unreadable", level="error", message=f"{error.message}; {error.hint}")
    verdict, config = result.verdict.value, result.config
    return Finding(
        path=path,
        outcome=verdict,
        level=LEVELS[verdict],
        message=f"{config.model_id} on {result.gpu.name}: {summary(result)} [formula]",
        line=config.call_line or _line(path.name, config.origins.get("micro_batch_seqs", "")),
        document=as_document(result, None),
    )


def _line(name: str, place: str) -> int:
    """The line of a place "file:line" in the file itself, else its first."""
    file, _, line = place.rpartition(":")
    return int(line) if file == name and line.isdigit() else 1


def findings(place: Path, gpu: str, asked: CheckRequest, limits: Memory) -> list[Finding]:
    """The answers for every training in a folder, or in one file, worst first."""
    paths = candidates(place) if place.is_dir() else [place]
    found = [one for path in paths if (one := finding(path, gpu, asked, limits)) is not None]
    return sorted(found, key=lambda one: (WORST_FIRST.index(one.outcome), str(one.path)))


def exit_code(found: Sequence[Finding]) -> int:
    """1 where anything does not fit, then 2 (unreadable), 3 (open or uncertain), 0."""
    codes = {EXIT_OF[one.outcome] for one in found}
    return next((code for code in (1, 2, 3) if code in codes), 0)


def text_lines(found: Sequence[Finding], folder: Path) -> list[str]:
    """One line a file, for people."""
    if not found:
        return [f"{folder}: no training found in its files"]
    width = max(len(one.outcome) for one in found)
    lines = [f"{one.outcome.replace('_', ' '):<{width}}  {one.path}: {one.message}" for one in found]
    counts = {outcome: sum(one.outcome == outcome for one in found) for outcome in WORST_FIRST}
    return [*lines, "", ", ".join(f"{num} {name.replace('_', ' ')}" for name, num in counts.items() if num)]


def github_lines(found: Sequence[Finding]) -> list[str]:
    """Workflow commands that GitHub shows beside the files.

    Source: GitHub Docs, Workflow commands for GitHub Actions (2026): `%`, CR and LF are escaped, in properties `:` and
    `,` as well.
    """
    kinds = {"error": "error", "warning": "warning", "note": "notice"}

    def data(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(text: str) -> str:
        return data(text).replace(":", "%3A").replace(",", "%2C")

    return [
        f"::{kinds[one.level]} file={value(str(one.path))},line={one.line},title=plan check::{data(one.message)}"
        for one in found
    ]


def sarif(found: Sequence[Finding]) -> dict[str, Any]:
    """A SARIF 2.1.0 log.

    Source: OASIS, Static Analysis Results Interchange Format 2.1.0, section 3.
    """
    outcomes = list(dict.fromkeys(one.outcome for one in found))
    return {
        "version": "2.1.0",
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "runs": [
            {
                "tool": {"driver": {"name": "plan check", "rules": [{"id": outcome} for outcome in outcomes]}},
                "results": [
                    {
                        "ruleId": one.outcome,
                        "level": one.level,
                        "message": {"text": one.message},
                        "locations": [
                            {
                                "physicalLocation": {
                                    "artifactLocation": {"uri": quote(os.fsencode(one.path.as_posix()))},
                                    "region": {"startLine": one.line},
                                }
                            }
                        ],
                    }
                    for one in found
                ],
            }
        ],
    }
