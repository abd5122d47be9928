"""A tree of copies in which a program writes where it may write nowhere else (`landlock`): below its top lies, under
its own path, every folder in which something was changed.

A folder is planted when first something in it is changed: its entries are links of ours (their target begins with two
slashes) to what they stand for, and a file is copied when it is opened for writing. From then on the tree is the truth
about that folder. The program is started in the tree's copy of its folder, planted as far down as `plant_all` goes,
small files copied: relative paths are right for every program. Absolute ones are mapped on the command line, and inside
every Python (`redirect`).

Standard library alone: the keeper plants and counts, every Python of the program redirects.
"""

import builtins
import contextlib
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import wraps
from threading import get_ident, local
from typing import Any

OURS = "//"
SMALL_BYTES = 1 << 20
"""Files of the program's own folder up to this size are copied before it begins."""
_NUM_PLANTED, _PLANTED_BYTES = 20_000, 256 << 20
NUM_SHOWN = 5
_NUM_LINKS = 40
_KERNELS = ("/proc/", "/sys/", "/dev/")
_inside = local()


class Tree:
    """The copies below `top`."""

    def __init__(self, top: str) -> None:
        self.top = os.path.realpath(top)
        self._private = f"{os.path.dirname(self.top)}/"

    def where(self, path: str, *, change: bool = False) -> str:
        """Where `path` is: in the tree where its folder is planted, or will be for a `change`, else where it says."""
        full = os.path.abspath(path)
        if not full.startswith(f"{self.top}/"):
            if full == "/" or f"{full}/".startswith((self._private, *_KERNELS)):
                return path
            full = self.top + full
        folder = self._folder(os.path.dirname(full), change)
        return path if folder is None else os.path.join(folder, os.path.basename(full))

    def ready(self, path: str, *, empty: bool = False) -> str:
        """Where a file can be opened for writing (`empty`: what it holds does not matter), their links followed."""
        location = self.where(path, change=True)
        for _ in range(_NUM_LINKS):
            if not location.startswith(self.top) or not os.path.islink(location):
                break
            target = os.readlink(location)
            if target.startswith(OURS):
                if os.path.isfile(location):
                    os.unlink(location) if empty else _take(location, target)
                break
            location = self.where(self._link_target(os.path.dirname(location), target), change=True)
        return location

    def _link_target(self, folder: str, target: str) -> str:
        return self.top + os.path.normpath(os.path.join(folder.removeprefix(self.top) or "/", target))

    def _folder(self, folder: str, change: bool, num_links: int = 0) -> str | None:
        """A folder of the tree, its links followed; None where it is not planted, and no `change` makes it so."""
        if not os.path.isdir(self.top):
            self._plant(self.top, "/")
        location = self.top
        parts = folder.removeprefix(self.top).split("/")[1:]
        for index, part in enumerate(parts):
            child = f"{location}/{part}"
            try:
                target = os.readlink(child)
            except OSError:  # a folder of the tree's, or nothing
                location = child
                continue
            if not target.startswith(OURS):
                led = self._link_target(location, target)
                further = os.path.join(led, *parts[index + 1 :])
                return self._folder(further, change, num_links + 1) if num_links < _NUM_LINKS else None
            if not change:
                return None
            if os.path.isdir(child):
                os.unlink(child)
                self._plant(child, target[1:])
            location = child
        return location

    def _plant(self, copy: str, source: str) -> None:
        os.mkdir(copy)
        with contextlib.suppress(OSError), os.scandir(source) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # names that no link can have
                    target = os.readlink(entry.path) if entry.is_symlink() else f"/{os.path.abspath(entry.path)}"
                    os.symlink(target, f"{copy}/{entry.name}")

    def plant_all(self, folder: str) -> str:
        """Plants a folder and those below, the nearest first, up to some number of entries, and copies small files.

        Environments of Python's, which nobody changes, are left out.
        """
        first = self._folder(self.top + folder, True) or folder
        waiting, num_left, left_bytes = [first], _NUM_PLANTED, _PLANTED_BYTES
        while waiting and num_left > 0:
            with os.scandir(waiting.pop(0)) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
            num_left -= len(children)
            for entry in children:
                if not (entry.is_symlink() and os.readlink(entry.path).startswith(OURS)):
                    continue
                if entry.is_dir() and not os.path.exists(f"{entry.path}/pyvenv.cfg"):
                    waiting.append(self._folder(entry.path, True) or entry.path)
                elif entry.is_file() and entry.stat().st_size <= min(SMALL_BYTES, left_bytes):
                    left_bytes -= entry.stat().st_size
                    with contextlib.suppress(PermissionError):
                        _take(entry.path, os.readlink(entry.path))
        return first

    def word(self, word: str) -> str:
        """A word of a command line; the path that it is, or that follows its `=`, in the tree if it can be written."""
        name, equals, path = word.partition("=") if word.startswith("-") else ("", "", word)
        above = next((folder for folder in _above(path) if os.path.isdir(folder)), "/") if path.startswith("/") else "/"
        if above == "/" or f"{above}/".startswith(_KERNELS) or not os.access(above, os.W_OK):
            return word
        there = self.where(path, change=True)
        if os.path.isdir(there):
            there = self._folder(there, True) or there
        return f"{name}{equals}{there}"

    def changed(self, cwd: str, began_s: float) -> dict[str, Any]:
        """What the program wrote, as far as it is still there, and what it deleted.

        Args:
            began_s: since the epoch: what others made later stands in no folder of the tree.
        """
        files: list[tuple[bool, int, str]] = []
        num_replaced = num_deleted = 0
        for folder, folders, names in os.walk(self.top):
            source = folder.removeprefix(self.top) or "/"
            here = {*folders, *names}
            with contextlib.suppress(OSError), os.scandir(source) as entries:
                gone = (entry for entry in entries if entry.name not in here and f"{entry.path}/" != self._private)
                before = (entry.path for entry in gone if entry.stat(follow_symlinks=False).st_ctime < began_s)
                num_deleted += sum(len(files_in(path)) for path in before)
            for name in names:
                copy, original = f"{folder}/{name}", f"{source}/{name}"
                was, is_now = _file_state(original), _file_state(copy)
                if is_now is None or is_now == was or (stat.S_ISLNK(is_now[0]) and os.readlink(copy).startswith(OURS)):
                    continue
                num_replaced += was is not None
                files.append((not original.startswith(f"{cwd}/"), -is_now[1], original))
        return report(files, num_replaced, num_deleted)


def report(files: list[tuple[bool, int, str]], num_replaced: int, num_deleted: int) -> dict[str, Any]:
    """What is told of `files` that a program wrote: (not in its own folder, minus its bytes, path)."""
    return {
        "num_written": len(files),
        "num_replaced": num_replaced,
        "num_deleted": num_deleted,
        "written_bytes": -sum(size for _, size, _ in files),
        "paths": [path for _, _, path in sorted(files)[:NUM_SHOWN]],
    }


def _file_state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mode, status.st_size, status.st_mtime_ns


def _take(link: str, target: str) -> None:
    copy = f"{link}.{os.getpid()}.{get_ident()}"
    shutil.copy2(target[1:], copy)
    os.replace(copy, link)


def files_in(path: str) -> list[str]:
    """Names of all files below a folder, seen from it; of a file one, its own."""
    if os.path.islink(path) or not os.path.isdir(path):
        return [""]
    return [os.path.relpath(f"{folder}/{name}", path) for folder, _, names in os.walk(path) for name in names]


def _above(path: str) -> Iterator[str]:
    while path != "/":
        path = os.path.dirname(path.rstrip("/"))
        yield path


_tree: Tree | None = None


def ready(path: Any) -> Any:
    """Where a library that is not Python may write a new file, for what is called `path`."""
    if _tree is None or not isinstance(path, str | os.PathLike):
        return path
    with _within():
        return _tree.ready(os.fsdecode(path), empty=True)


def redirect(tree: Tree) -> None:
    """From here on this Python finds its files in the tree."""
    global _tree
    _tree = tree

    def entry(path: str) -> str:
        return tree.where(path, change=True)

    def folder(path: str) -> str:
        """One that is to go: itself, not a link of ours."""
        tree.where(os.path.join(path, "x"), change=True)
        return entry(path)

    for name in ("mkdir", "remove", "unlink", "mkfifo"):
        _map(os, name, entry)
    for name in ("rename", "replace", "link"):
        _map(os, name, entry, entry)
    for name in ("access", "listdir", "scandir", "readlink", "chdir", "statvfs", "chmod", "utime"):
        _map(os, name, tree.where)
    _map(os, "symlink", None, entry)
    _map(os, "truncate", tree.ready)
    _map(os, "rmdir", folder)
    _map(shutil, "rmtree", folder)
    _map_status(tree)
    _map_open(tree)


_DESCRIPTORS = ("dir_fd", "src_dir_fd", "dst_dir_fd")


@contextlib.contextmanager
def _within() -> Iterator[None]:
    """What the tree itself does is not redirected."""
    _inside.busy = True
    try:
        yield
    finally:
        _inside.busy = False


def _is_mapped(path: Any, named: dict[str, Any]) -> bool:
    """Whether a call of a function with these arguments is the program's, of a path that may lie in the tree."""
    if getattr(_inside, "busy", False) or isinstance(path, int) or path is None:
        return False
    return all(named.get(keyword) is None for keyword in _DESCRIPTORS)


def _as_was(path: Any, mapped: str) -> Any:
    return os.fsencode(mapped) if isinstance(path, bytes) else mapped


def _map(owner: Any, name: str, *changes: Callable[[str], str] | None) -> None:
    true = getattr(owner, name)

    @wraps(true)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args or not _is_mapped(args[0], kwargs):
            return true(*args, **kwargs)
        with _within():
            pairs = zip(changes, args, strict=False)
            mapped = [path if change is None else _as_was(path, change(os.fsdecode(path))) for change, path in pairs]
        return true(*mapped, *args[len(mapped) :], **kwargs)

    setattr(owner, name, call)


def _map_status(tree: Tree) -> None:
    true = os.stat

    @wraps(true)
    def status(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if not _is_mapped(path, {"dir_fd": dir_fd}):
            return true(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        with _within():
            path = tree.where(os.fsdecode(path))
            if not follow_symlinks and os.path.islink(path) and (target := os.readlink(path)).startswith(OURS):
                path = target[1:]
        return true(path, follow_symlinks=follow_symlinks)

    @wraps(os.lstat)
    def lstat(path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return status(path, dir_fd=dir_fd, follow_symlinks=False)

    os.stat, os.lstat = status, lstat


def _map_open(tree: Tree) -> None:
    """`open` and `os.open`: what is opened for writing is a file of the tree's."""
    true, true_descriptor = io.open, os.open

    def place(path: Any, changes: bool, empty: bool) -> str:
        with _within():
            text = os.fsdecode(path)
            return tree.ready(text, empty=empty) if changes else tree.where(text)

    @wraps(true)
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if _is_mapped(file, {}):
            file = place(file, bool(set(mode) & set("wax+")), "w" in mode)
        return true(file, mode, *args, **kwargs)

    @wraps(true_descriptor)
    def descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if _is_mapped(path, {"dir_fd": dir_fd}):
            changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            path = place(path, bool(changes), bool(flags & os.O_TRUNC))
        return true_descriptor(path, flags, mode, dir_fd=dir_fd)

    io.open = builtins.open = opened
    os.open = descriptor
