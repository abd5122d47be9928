"""Locks on open files: `flock` where the system has it, on native Windows one byte far beyond any file's end.

A lock belongs to the open file and goes when that is closed, however the process ends. Windows knows no shared lock:
there readers take turns too.
"""

import errno
import importlib
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

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


def open_lock(path: Path) -> BinaryIO:
    """A file to be locked, made where it is missing; what is in it stays, and a link of that name is not followed.

    Raises:
        OSError: a link, no permission.
    """
    return open(os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK | OPEN_FLAGS, 0o666), "rb+")


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Waits until the lock of this open file is ours.

    Raises:
        OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        return
    msvcrt: Any = importlib.import_module("msvcrt")
    while True:
        try:
            _at_far(descriptor, msvcrt.LK_NBLCK)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EDEADLK, errno.EAGAIN):
                raise
            time.sleep(POLL_S)
        else:
            return


def unlock(descriptor: int) -> None:
    """Gives it to the next."""
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
