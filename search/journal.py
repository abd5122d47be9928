"""A study in a journal file: many workers of one machine, and what a crash or a stranger may have left in it."""

import json
import os
import stat
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._storage import JournalOperation

from planner.core.errors import EnvironmentProblem
from planner.core.locks import lock, open_lock
from search.heartbeat import Heartbeat, LockHeartbeat

JOURNAL_NAME = "study.journal"
MAX_JOURNAL_BYTES = 1 << 28
"""A trial takes some 5 kB, a search some hundred trials."""


class FlockLock(JournalFileOpenLock):
    """A lock that dies with its holder: a worker killed while writing delays nobody. Its holder may take it again.

    (Optuna's own lock files outlive their holder and are broken only after 30 s.)
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._file: Any = None
        self._depth = 0

    def acquire(self) -> bool:
        if self._depth == 0:
            self._file = open_lock(self._path)
            lock(self._file.fileno())
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._file.close()


class StudyWarning(UserWarning):
    """Something about a study's files a person should know."""


class Journal(JournalFileBackend):
    """Optuna's journal file, whole after every append and readable past lines that are none.

    A full disk, a kill or a power cut leaves half a line. Optuna appends behind it, and from then on nobody can read
    the file. Here a torn end is cut off under the lock before anything is added, and a line that is no operation is
    passed over by every reader alike.
    """

    def __init__(self, path: Path, lock: FlockLock) -> None:
        super().__init__(str(path), lock_obj=lock)
        self._told = False

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Adds the operations, or nothing.

        Raises:
            OSError: no space, no permission; the file is as it was.
        """
        path = Path(self._file_path)
        self._lock.acquire()
        try:
            repair_journal(path)
            try:
                super().append_logs(logs)
            except OSError:
                repair_journal(path)
                raise
        finally:
            self._lock.release()

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """The operations from that number on; what a writer is still writing comes next time."""
        number = log_number_from if log_number_from in self._log_number_offset else 0
        with open(self._file_path, "rb") as file:
            offset = self._log_number_offset[number]
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                operation = _operation(line)
                if operation is None:
                    self._log_number_offset[number] = offset
                    self._tell(line)
                    continue
                number += 1
                self._log_number_offset[number] = offset
                if number > log_number_from:
                    yield operation

    def _tell(self, line: bytes) -> None:
        if not self._told and line.strip():
            self._told = True
            warnings.warn(
                f"{self._file_path} holds a damaged line, which is passed over: {line[:60]!r}",
                StudyWarning,
                stacklevel=2,
            )


def _operation(line: bytes) -> dict[str, Any] | None:
    """The operation of a line; of one that begins with the torn half of another, the whole one at its end."""
    for text in (line, line[max(line.rfind(_OPERATION), 0) :]):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value.get("op_code") in _OPERATIONS:
            return value
    return None


_OPERATION = b'{"op_code":'
_OPERATIONS = frozenset(int(code) for code in JournalOperation)


def open_journal(directory: Path) -> tuple[BaseStorage, Heartbeat]:
    """The study in a directory.

    Raises:
        EnvironmentProblem: what lies there is no journal, too long a one, or one that Optuna cannot read.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / JOURNAL_NAME
    for one in (path, directory / f"{JOURNAL_NAME}.lock"):
        # a folder from a stranger may hold a link to a file of one's own, or a pipe that hangs whoever opens it
        if os.path.lexists(one) and not stat.S_ISREG(os.lstat(one).st_mode):
            raise EnvironmentProblem(f"{one} is not a regular file", hint="give another --storage, or move it away")
    if path.exists() and path.stat().st_size > MAX_JOURNAL_BYTES:
        raise EnvironmentProblem(
            f"{path} has more than the {MAX_JOURNAL_BYTES:,} bytes that are read of a study", hint="move the file away"
        )
    held = FlockLock(directory / f"{JOURNAL_NAME}.lock")
    heartbeat = LockHeartbeat(directory / "workers")
    held.acquire()
    try:
        repair_journal(path)
    finally:
        held.release()
    backend = Journal(path, held)
    try:
        return optuna.storages.JournalStorage(backend), heartbeat
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
        heartbeat.close()
        raise EnvironmentProblem(
            f"the study in {path} cannot be read: {type(error).__name__}: {error}",
            hint="move the file away: what was measured is in the store of measurements and is not measured again",
        ) from error


def repair_journal(path: Path) -> int:
    """Cuts off a last line that a crash left unfinished; returns how many bytes. Call with the journal's lock held.

    Optuna reads a journal up to its first broken line only; one torn write would hide everything after it.
    """
    if not path.exists():
        return 0
    with open(path, "rb+") as file:
        size = keep = file.seek(0, os.SEEK_END)
        while keep:
            start = max(keep - _BLOCK_BYTES, 0)
            file.seek(start)
            if (last := file.read(keep - start).rfind(b"\n")) >= 0:
                keep = start + last + 1
                break
            keep = start
        if keep < size:
            file.truncate(keep)
        return size - keep


_BLOCK_BYTES = 1 << 16
