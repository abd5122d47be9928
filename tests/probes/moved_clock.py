"""The runner's clock in the hands of a test: limits are tested without waiting, and no slow machine reaches one."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from probes.gpu import watch

PATIENCE_S = 600.0
"""What takes this long hangs; alone a job of stand-in workers takes a second."""


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
