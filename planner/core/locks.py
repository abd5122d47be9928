"""Locks on open files: `flock` where the system has it, on native Windows one byte far beyond any file's end.

A lock belongs to the open file and goes when that is closed, however the process ends. Windows knows no shared lock:
there readers take turns too.
"""

import errno
import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # native Windows
    fcntl = None

FAR = 1 << 40
"""The byte that is locked on Windows; locks bind there, and what is written must stay readable."""
POLL_S = 0.02
OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""For `os.open` of a file to be locked: a pipe of that name is not waited for, children do not inherit it."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """One process at a time writes into a folder, made where it is missing; others wait. No file is left in it.

    Where a folder cannot be locked (native Windows, some network file systems) nobody waits.
    """
    descriptor = None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | OPEN_FLAGS)
        lock(descriptor)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Waits until the lock of this open file is ours.

    Raises:
        OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        return
    while not try_lock(descriptor):
        time.sleep(POLL_S)


def try_lock(descriptor: int) -> bool:
    """Whether the lock of this open file is ours now; nobody is waited for.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _at_far(descriptor, importlib.import_module("msvcrt").LK_NBLCK)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EDEADLK, errno.EAGAIN):
            raise
        return False
    return True


def unlock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    else:
        _at_far(descriptor, importlib.import_module("msvcrt").LK_UNLCK)


def _at_far(descriptor: int, mode: int) -> None:
    """`msvcrt.locking` begins where the file stands: it stands there again afterwards."""
    msvcrt: Any = importlib.import_module("msvcrt")
    place = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, FAR, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, mode, 1)
    finally:
        os.lseek(descriptor, place, os.SEEK_SET)
