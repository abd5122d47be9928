"""Children that import their libraries ahead and wait for their turn: importing takes ten seconds.

Each is a process of its own that was never forked from one that had touched CUDA (importing bitsandbytes initialises
it, and a fork of such a process can use no GPU). `Stage` keeps some of them waiting, runs them one after another, and
ends what outlasts its limit.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from planner.core.children import ROOT, child_environment, python_argv
from probes.gpu.environment import child_settings

READY = "ready\n"


def wait_for_turn() -> None:
    """In the child, once its imports are done: says so, and waits until the parent says go."""
    sys.stdout.write(READY)
    sys.stdout.flush()
    sys.stdin.readline()


@dataclass(frozen=True)
class Ended:
    """How one child ended: its status (124: it outlasted its limit) and the seconds that its turn took."""

    name: str
    status: int
    seconds: float


class Stage:
    """Runs children one after another, with the next few already importing.

    Args:
        ahead: how many wait at a time; each holds about a gigabyte of host memory.
    """

    def __init__(self, log: Path, ahead: int = 3) -> None:
        self.log, self.ahead = log, ahead

    def run(
        self, children: Sequence[tuple[str, Sequence[str], Mapping[str, str], float]], deadline: float
    ) -> list[Ended]:
        """The children (name, words after the interpreter, variables, limit in seconds) until `deadline`
        (`time.monotonic`); those that it leaves no time for are not begun."""
        left = deque(children)
        waiting: deque[tuple[str, subprocess.Popen[bytes], float]] = deque()
        ended: list[Ended] = []
        with open(self.log, "ab") as log:
            try:
                while left or waiting:
                    while left and len(waiting) < self.ahead:
                        name, words, variables, limit_s = left.popleft()
                        waiting.append((name, self._start(words, variables, log), limit_s))
                    name, child, limit_s = waiting.popleft()
                    began = time.monotonic()
                    if deadline - began < 8.0:
                        _kill(child)
                        continue
                    log.write(f"\n== {name}\n".encode())
                    log.flush()
                    ended.append(Ended(name, _turn(child, min(limit_s, deadline - began)), time.monotonic() - began))
                    print(f"{name}: status {ended[-1].status}, {ended[-1].seconds:.1f} s", flush=True)
            finally:
                for _, child, _ in waiting:
                    _kill(child)
        return ended

    def _start(self, words: Sequence[str], variables: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = {**child_environment(), **child_settings(), **variables, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            python_argv(*words), cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, start_new_session=True,
        )  # fmt: skip


def _turn(child: subprocess.Popen[bytes], limit_s: float) -> int:
    """Lets one child run once it has imported; its status."""
    assert child.stdin is not None
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    end = time.monotonic() + limit_s
    output = b""
    while READY.encode() not in output and time.monotonic() < end and child.poll() is None:
        output += child.stdout.read() or b""
        time.sleep(0.02)
    try:
        child.stdin.write(b"go\n")
        child.stdin.flush()
        while child.poll() is None and time.monotonic() < end:
            if child.stdout.read() is None:
                time.sleep(0.02)
        return 124 if child.poll() is None else child.returncode
    except BrokenPipeError:
        return child.wait()
    finally:
        _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
