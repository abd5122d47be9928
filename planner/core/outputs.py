"""Whatever is written to a person's disk: whole or not at all, never through a link that somebody placed there.

A file is written beside (new, exclusive, with the user's umask) and renamed over its name: a crash or a full disk
leaves the old one, and a link of that name is replaced, not followed. A folder from a stranger may hold
`report.md -> ~/.bashrc`. Devices and pipes that a person names (/dev/stdout, /dev/null) are written to.
"""

import errno
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

_STANDARD = ("/dev", "/dev/fd", "/proc/self/fd")
"""Folders of the kernel's: their links (/dev/stdout) are what a person means."""


def write_whole(
    path: Path,
    content: bytes,
    *,
    inside: Path | None = None,
    sync: bool = False,
    executable: bool = False,
    replaceable: Collection[str] | None = None,
) -> Path | None:
    """Writes a file as a whole; missing folders are made. Returns where a person's file of that name was kept.

    Args:
        replaceable: SHA-256 of what may be written over. A regular file that holds neither one of these nor the new
            content is kept as NAME.orig, NAME.orig.2 and so on; None: any is written over.
        inside: the folder that the person named: below it no folder on the way may be a link.
        executable: it may be run, by whoever may read it.
        sync: it has reached the disk on return.

    Raises:
        OSError: no space, no permission, a folder of that name, or a link below `inside`.
    """
    if inside is not None:
        place = inside
        for part in path.parent.relative_to(inside).parts:
            place = place / part
            if part == ".." or place.is_symlink():
                raise OSError(errno.ELOOP, "a link that leads out of the folder", str(place))
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_stream(path):
        _write_stream(path, content)
        return None
    temporary = path.parent / f".{path.name[:100]}.{secrets.token_hex(6)}"
    mode = 0o777 if executable else 0o666
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        kept = None
        if replaceable is not None and not _holds(path, {*replaceable, sha256(content)}):
            kept = _unused(path)
            os.replace(path, kept)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return kept


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _holds(path: Path, digests: Collection[str]) -> bool:
    """Whether a file is none to keep: it holds one of these contents, or it is no regular file (a link, missing)."""
    if path.is_symlink() or not path.is_file():
        return True
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() in digests
    except PermissionError:
        return False


def _unused(path: Path) -> Path:
    place, number = path.with_name(f"{path.name}.orig"), 1
    while os.path.lexists(place):
        number += 1
        place = path.with_name(f"{path.name}.orig.{number}")
    return place


def user_id() -> int:
    """The user's number; 0 on native Windows, which has none."""
    return os.getuid() if hasattr(os, "getuid") else 0


def private_directory() -> Path:
    """A folder in the temporary directory that is this user's alone: `finetune-planner-UID`, or a new one where
    somebody else has made that.

    Raises:
        OSError: none can be made.
    """
    path = Path(tempfile.gettempdir()) / f"finetune-planner-{user_id()}"
    if not hasattr(os, "getuid"):  # native Windows: every user has a temporary directory of their own
        path.mkdir(exist_ok=True)
        return path
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user_id() or status.st_mode & 0o077:
            return Path(tempfile.mkdtemp(prefix=f"{path.name}-"))
    return path


def _is_stream(path: Path) -> bool:
    """Whether a device or a pipe has that name, or the kernel's link to whatever stdout is: none is to be replaced."""
    if str(path.parent) in _STANDARD:
        return path.exists()
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode) or stat.S_ISDIR(status.st_mode))


def _write_stream(path: Path, content: bytes) -> None:
    # O_NONBLOCK: a pipe that nobody reads is an error, not a wait for ever.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | _CLOEXEC)
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
