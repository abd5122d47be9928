"""The libraries of a dry run, loaded beside the formula: a child process imports them while this one still plans.

Importing torch, transformers and peft takes two thirds of a cold plan, and needs nothing of what the formula chooses.
Where a second core is free, `loading_ahead` starts a child (`beside.py`) that imports them at once and then makes the
reports. Whatever goes wrong with it, the report is made in this process as without it.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from planner.children import child_environment, python_argv
from planner.outcome import ProbeFailure
from probes.dryrun.report import DryRunReport

Outcome = DryRunReport | ProbeFailure


class _Helper:
    """The child, until it fails once."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no process can be started: this one does it
            self._child = subprocess.Popen(
                python_argv("-m", "probes.dryrun.beside"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # where it fails, this process tries again and says why
                env=child_environment(),
            )

    def report(self, args: tuple[Any, ...], options: dict[str, Any]) -> Outcome | None:
        """The child's answer, None where it has none."""
        if self._child is None:
            return None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            pickle.dump((args, options), self._child.stdin)
            self._child.stdin.flush()
            found = pickle.load(self._child.stdout)
        except (OSError, EOFError, pickle.PickleError, AttributeError, TypeError):  # it died, or does not know a class
            self.close()
            return None
        assert isinstance(found, Outcome)
        return found

    def close(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(OSError), child:  # a request that never went out
                pass


_HELPER: _Helper | None = None


@contextmanager
def loading_ahead() -> Iterator[None]:
    """Within it reports come from a child that has begun to load the libraries, where that is quicker."""
    global _HELPER
    if _HELPER is not None or "torch" in sys.modules or _num_cores() < 2:
        yield
        return
    _HELPER = _Helper()
    try:
        yield
    finally:
        helper, _HELPER = _HELPER, None
        helper.close()


def reported(make: Callable[..., Outcome], *args: Any, **options: Any) -> Outcome:
    """What `make` (`report_for_config`) gives, from the child where there is one."""
    found = None if _HELPER is None else _HELPER.report(args, options)
    return make(*args, **options) if found is None else found


def _num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
