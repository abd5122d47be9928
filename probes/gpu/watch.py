"""Following one child: what it tells through its pipe, its limits, and how it ends."""

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from planner.core.units import MIB
from planner.setup.outcome import FailureKind
from probes.gpu.ranks import RankReport

RANK_GRACE_S = 10.0
"""After the first rank failed (or the result was delivered) the others and torchrun may still say what they know."""
MAX_LOG_BYTES = 256 * MIB
LOG_TAIL_BYTES = 16 * 1024
POLL_S = 0.5
START_LIMIT_S = 300.0
"""A child has this long until it holds its device, and its own limit begins then: a cold disk reads torch slowly."""


OnProgress = Callable[[str, float], None]
"""Called with what the child is doing and the seconds since it started."""


@dataclass(kw_only=True)
class Watch:
    """Follows one child until it ends, its time is over, or its log runs wild. All times are monotonic."""

    child: "subprocess.Popen[bytes]"
    pipe: int
    log: Path
    limit_s: float
    on_progress: OnProgress | None
    stop: threading.Event
    size: int = 1
    last_progress: str = ""
    is_starting: bool = False
    sent_result: object = None
    ranks: RankReport = field(default_factory=RankReport)
    _last_words_from: float | None = None
    _buffer: bytes = b""
    _pipe_open: bool = True
    _waiting_since: float | None = None
    _waited_s: float = 0.0
    _launched: float = 0.0
    _begun_s: float = 0.0

    def until_end(self) -> str:
        """ "exit", "timeout", "log", "stop", or "ranks" when a job is over although torchrun still runs."""
        os.set_blocking(self.pipe, False)
        self._launched = time.monotonic()
        while True:
            if self.child.poll() is not None:
                self._drain()
                return "exit"
            if self.stop.is_set():
                return "stop"
            left_s = self._left_s()
            if left_s <= 0:
                self._drain()
                if self._left_s() <= 0:
                    return "timeout"
            if self._log_bytes() > MAX_LOG_BYTES:
                return "log"
            if self._last_words_from is not None and time.monotonic() - self._last_words_from > RANK_GRACE_S:
                return "ranks"
            # the pipe is the child's: it closes as that ends
            wait_s = min(POLL_S if self._pipe_open else 0.02, max(left_s, 0.0))
            if select.select([self.pipe] * self._pipe_open, [], [], wait_s)[0]:
                self._drain()
            if self.on_progress is not None:
                self.on_progress(self.last_progress, time.monotonic() - self._launched)

    def failure(self, ending: str, *, killed: bool) -> tuple[FailureKind, str] | None:
        """The failure where the child was stopped, None where it ended by itself."""
        if ending == "log":
            return FailureKind.CRASHED, f"printed more than {MAX_LOG_BYTES // MIB} MiB and was stopped"
        if ending != "timeout":
            return None
        seen = self.ranks.last_seen() if self.ranks.progress else self.last_progress or "starting"
        message = f"no result within {START_LIMIT_S if self.is_starting else self.limit_s:g} s; last seen {seen}"
        if not killed:
            message += f"; process {self.child.pid} does not die (stuck in the driver)"
        is_machine = self.is_starting or not self.last_progress
        return FailureKind.MACHINE if is_machine else FailureKind.TIMEOUT, message

    def _left_s(self) -> float:
        """Of the limit that holds now: waiting for others counts nowhere, starting against a limit of its own."""
        spent_s = time.monotonic() - self._launched - self._waited()
        return START_LIMIT_S - spent_s if self.is_starting else self.limit_s - (spent_s - self._begun_s)

    def _drain(self) -> None:
        while self._pipe_open:
            try:
                data = os.read(self.pipe, 65536)
            except BlockingIOError:
                break
            if not data:
                self._pipe_open = False
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError):
                event = json.loads(line)
                self.sent_result = event.get("result", self.sent_result)
                if "starting" in event:
                    self._start(bool(event["starting"]))
                if "waiting" in event:
                    self._wait(bool(event["waiting"]))
                self.ranks.hear(event)
                if "progress" in event:
                    self.last_progress = self.ranks.doing(self.size) or str(event["progress"])
                if self._last_words_from is None and (self.ranks.failed or "delivered" in event):
                    self._last_words_from = time.monotonic()

    def _start(self, begins: bool) -> None:
        """Of several ranks the first that is ready ends it: the others have the job's own time-out."""
        if begins and not self._begun_s:
            self.is_starting = True
        elif not begins and self.is_starting:
            self.is_starting, self._begun_s = False, time.monotonic() - self._launched - self._waited()

    def _wait(self, begins: bool) -> None:
        if begins:
            self._waiting_since = time.monotonic()
        else:
            self._waited_s, self._waiting_since = self._waited(), None

    def _waited(self) -> float:
        since = self._waiting_since
        return self._waited_s + (time.monotonic() - since if since is not None else 0.0)

    def _log_bytes(self) -> int:
        try:
            return self.log.stat().st_size
        except OSError:
            return 0


def read_tail(path: Path) -> str:
    try:
        with open(path, "rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - LOG_TAIL_BYTES))
            return handle.read().decode(errors="replace")
    except OSError:
        return ""
