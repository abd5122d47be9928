"""When the code that touches a GPU last ran on one: card, commit and hashes of those files, kept beside the recordings.

The tests replay what was recorded; `words` says in their summary whether the code is still the one that ran.
"""

import hashlib
import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.core.children import ROOT

LAST_RUN = ROOT / "benchmarks" / "data" / "contact" / "last_gpu_run.json"
COMMIT_FILE = ROOT / ".whl" / "commit"
"""Written by tools/carry.sh: the machine gets files, not the repository."""
TOUCHES = ("torch.cuda", "nvml", "amdsmi", "cuda:", '"cuda"')
ALWAYS = ("probes/gpu/device.py", "probes/gpu/failures.py", "probes/doctor_kernel.py", "probes/gpu/worker.py")
"""Theirs it is too, although they name nothing of it."""
_LEFT_OUT = ("probes/dryrun/", "probes/phantom/")
"""These never see a GPU."""


def cuda_files(root: Path = ROOT) -> tuple[str, ...]:
    """Every file of ours that talks to a GPU or to its driver, relative to the repository."""
    folders = (root / "probes", root / "planner" / "hardware", root / "benchmarks" / "contact")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    names = [(path.relative_to(root).as_posix(), path) for path in paths]
    return tuple(
        name
        for name, path in names
        if name in ALWAYS
        or (not name.startswith(_LEFT_OUT) and any(word in path.read_text(encoding="utf-8") for word in TOUCHES))
    )


def hashes(root: Path = ROOT) -> dict[str, str]:
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in cuda_files(root)}


def describe_run(source: str, root: Path = ROOT) -> dict[str, Any]:
    """`last_gpu_run.json` for a run that begins now."""
    return {"source": source, "date": datetime.now(UTC).date().isoformat(), "commit": _commit(), "files": hashes(root)}


def _commit() -> str:
    if COMMIT_FILE.exists():
        return COMMIT_FILE.read_text(encoding="utf-8").strip()
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def words(path: Path = LAST_RUN, root: Path = ROOT) -> str:
    if not path.exists():
        return "no CUDA line of this project has ever run on a GPU (docs/probes.md, First contact)"
    last: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    now = hashes(root)
    changed = sorted(name for name in {*now, *last["files"]} if now.get(name) != last["files"].get(name))
    ran = f"{last['source']}, {last['date']}, commit {last['commit'][:10] or 'unknown'}"
    if not changed:
        return f"the GPU code is the one that ran on {ran}"
    shown = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
    return f"replayed, not run since {ran}: {shown} changed"
