"""Which version this is."""

import subprocess
from contextlib import suppress

from planner import __version__
from planner.core.children import ROOT
from planner.core.shipped import DATA


def version_words() -> str:
    """The version, and the commit that a wheel was built from or a checkout is at, where that is known."""
    commit_file, commit = DATA / "commit.txt", ""
    if commit_file.is_file():
        commit = commit_file.read_text("utf-8").strip()
    elif (ROOT / ".git").exists():
        with suppress(OSError):
            words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
            commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return f"{__version__} ({commit})" if commit else __version__
