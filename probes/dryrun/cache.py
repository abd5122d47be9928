"""Dry runs kept as JSON files, so that asking again costs nothing.

The key is a hash of everything that can change a figure: setup, configuration, compute capability, options, the
versions of the libraries that run the step, and the dry run's own version. A changed key is another file, so a stale
figure is never served; a damaged or foreign file is ignored and written anew.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError
from planner.core.outputs import write_whole
from planner.memory.profiles import library_versions
from planner.setup import TrainSetup
from planner.setup.codec import decode
from planner.setup.interchange import setup_to_dict, to_jsonable
from planner.speed.operators import program_of
from probes.dryrun.report import DryRunReport


def default_directory() -> Path:
    """Where dry runs are kept: the user's cache directory."""
    try:
        from platformdirs import user_cache_path
    except ImportError:  # a bare GPU machine
        return Path.home() / ".cache" / "finetune-planner" / "dry-run"
    return user_cache_path("finetune-planner") / "dry-run"


PROGRAM = 4
"""Of what is noted of a run's operators: raise it whenever that changes and its memory does not."""


def key_of(
    config: Mapping[str, Any],
    capability: tuple[int, int],
    setup: TrainSetup,
    *,
    own_version: int,
    options: Mapping[str, Any],
) -> str:
    """Hexadecimal hash of all that decides a dry run's figures."""
    parts = {
        "config": {name: value for name, value in config.items() if not name.startswith("_")},
        "capability": list(capability),
        "setup": setup_to_dict(setup),
        "options": dict(options),
        "versions": [*library_versions().items()],
        "dry_run": own_version,
        "program": PROGRAM,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def load(directory: Path, key: str) -> DryRunReport | None:
    """The report kept under `key`, None where there is none that can be read."""
    try:
        raw = json.loads((directory / f"{key}.json").read_text())
        groups = {
            phase: {(category, name): size for category, name, size in rows}
            for phase, rows in raw["phase_groups"].items()
        }
        program = None if raw["program"] is None else program_of(raw["program"])
        report = decode(DryRunReport, {**raw, "phase_groups": {}, "program": None})
        return replace(report, phase_groups=groups, program=program)
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None


def save(directory: Path, key: str, report: DryRunReport) -> None:
    """Keeps `report` under `key`: written beside, then renamed. A cache that cannot be written is no error."""
    values = to_jsonable(replace(report, program=None))
    values["program"] = None if report.program is None else report.program.rows()
    values["phase_groups"] = {
        phase: [[category, name, size] for (category, name), size in groups.items()]
        for phase, groups in report.phase_groups.items()
    }
    with suppress(OSError):
        write_whole(directory / f"{key}.json", json.dumps(values).encode())
