"""The libraries of a dry run, in a child process: it can import them while this one still plans.

Importing torch, transformers and peft takes two thirds of a cold plan, and needs nothing of what the formula chooses.
A process that has not loaded torch has a child (`helper_child.py`) that makes its reports; `load_ahead` starts it
before the first is asked for. Whatever goes wrong with it, the report is made in this process as without it.
"""

import atexit
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from planner.core.children import child_environment, python_argv

TREE = "probes.module_tree:answer"


class _Helper:
    """The child, until it fails once; `one_gpu`: all that it is asked about runs on one."""

    def __init__(self, one_gpu: bool) -> None:
        self.one_gpu = one_gpu
        self._turn = threading.Lock()  # a question and its answer belong together
        self._child: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no process can be started: this one does it
            self._child = subprocess.Popen(
                python_argv("-m", "probes.dryrun.helper_child", *["one-gpu"] * one_gpu),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # where it fails, this process tries again and says why
                env=child_environment(),
            )
        atexit.register(self.close)

    def report(self, make: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        say: Callable[[str], None] | None = options.get("say")
        with self._turn:
            if self._child is None:
                return None
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            try:
                pickle.dump((make, args, options if say is None else {**options, "say": None}), self._child.stdin)
                self._child.stdin.flush()
                while isinstance(answer := pickle.load(self._child.stdout), str):
                    assert say is not None
                    say(answer)
            except (
                OSError,
                EOFError,
                pickle.PickleError,
                AttributeError,
                TypeError,
            ):  # it died, or knows no such class
                self.close()
                return None
            except BaseException:  # interrupted: what it answers later would be taken for the next answer
                self.close()
                raise
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the child and forgets it: for the thread that reads its answers."""
        self.kill()
        child, self._child = self._child, None
        if child is not None:
            with suppress(OSError), child:  # a request that never went out
                pass

    def kill(self) -> None:
        """Ends the child from any thread. Its pipes stay open: one closed under a reader gives it no end of file."""
        if (child := self._child) is not None:
            child.kill()


_HELPER: _Helper | None = None


def load_ahead(*, one_gpu: bool = True) -> _Helper | None:
    """The child, which loads the libraries for runs on one GPU or on any number; None where torch is loaded here."""
    global _HELPER
    if _HELPER is not None and (one_gpu or not _HELPER.one_gpu):
        return _HELPER
    if "torch" in sys.modules:
        return None
    if _HELPER is not None:
        _HELPER.close()
    _HELPER = _Helper(one_gpu)
    return _HELPER


def tree_answer(config: Mapping[str, Any], limit_s: float) -> Mapping[str, Any] | None:
    """`probes.module_tree.answer` from the child where there is one, from here where torch is loaded; None where
    neither is so, or the child ends before it answers, which it does after `limit_s`."""
    helper = load_ahead() if _HELPER is None else _HELPER
    if helper is None:
        answer: Mapping[str, Any] = resolve_name(TREE)(config)
        return answer
    end = threading.Timer(limit_s, helper.kill)
    end.daemon = True
    end.start()
    try:
        reply: Mapping[str, Any] | None = helper.report(TREE, (dict(config),), {})
        return reply
    finally:
        end.cancel()


def reported(make: str, *args: Any, num_gpus: int = 1, **options: Any) -> Any:
    """What the function `make` ("module:name") gives, from the child where there is one; what is to be said on the way
    goes to the option `say`.

    Raises:
        ValueError: as `make` does.
    """
    helper = load_ahead(one_gpu=num_gpus == 1)
    answer = None if helper is None else helper.report(make, args, options)
    return resolve_name(make)(*args, **options) if answer is None else answer
