"""The runner's clock in the hands of a test: limits are tested without waiting, and no slow machine reaches one."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from probes.gpu import watch

PATIENCE_S = 600.0
"""What takes this long hangs; alone a job of stand-in workers takes a second."""


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one whose new parent has not collected it yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def becomes(is_so: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Waits for something to become so; whether it did."""
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Clock:
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def over_once(self, seen: Callable[[str], bool]) -> watch.OnProgress:
        """For `on_progress`: a limit of PATIENCE_S is over as soon as `seen` says so of what the child does."""

        def look(text: str, elapsed_s: float) -> None:
            if elapsed_s < PATIENCE_S and seen(text):
                self.now_s += 2 * PATIENCE_S

        return look


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The runner reads this clock; what waits for a process still sleeps."""
    fake_clock = Clock()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: fake_clock.now_s, sleep=time.sleep))
    return fake_clock
