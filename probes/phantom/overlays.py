"""The tree of file systems that a traced program sees: read-only, with overlays over what its user may write to.

Built by the first process of its namespaces (`isolation`), with the standard library alone. Of every place the
program sees what was there and what it wrote; what it wrote lies in an upper folder of the private one, on its disk, or
in memory where that lies in the place itself (the kernel refuses an upper folder in what it is over).

Source: the kernel's Documentation/filesystems/overlayfs.rst; man 2 mount, mount_setattr; man 7 mount_namespaces.
"""

import contextlib
import ctypes
import errno
import glob
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.phantom.copies import files_in, report

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x4_0000
_MNT_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _RDONLY = 442, -100, 0x8000, 1
_KERNELS = ("/proc", "/sys", "/dev")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_SHM = "/dev/shm"
libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class HostView:
    """What is looked up before the namespaces are entered.

    Attributes:
        mounts: every mount point but the kernel's.
        places: where an overlay is needed.
        sockets: files at which somebody listens.
        added: file -> what is added to it (`isolation.GUARD`).
        own_users: whether there is a user namespace among them.
    """

    mounts: Sequence[str]
    places: Sequence[str]
    sockets: Sequence[str]
    added: Mapping[str, str]
    own_users: bool


class Tree:
    """The file systems as the program sees them."""

    def __init__(self, folder: Path, host: HostView) -> None:
        self._folder = folder
        self._host = host
        self._overlays: dict[str, tuple[str, int]] = {}  # place -> its upper folder; the place itself, by number
        self._old = self._disk = self._memory = ""

    def build(self, cwd: str) -> None:
        """Mounts everything.

        Raises:
            OSError: something that the protection needs is not allowed here.
        """
        old, memory, disk = (self._folder / name for name in ("old", "memory", "disk"))
        for folder in (old, memory, disk):
            folder.mkdir(exist_ok=True)
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", str(memory), "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0700")
        _mount("/", str(old), None, _MS_BIND | _MS_REC)
        # their paths are about to be covered: from here on by number
        self._old, self._memory, self._disk = (
            f"/proc/self/fd/{os.open(folder, os.O_PATH)}" for folder in (old, memory, disk)
        )
        self._devices()
        places = self._host.places
        for target in sorted({*places, *self._host.mounts}, key=lambda path: path.count("/")):
            if target in places:
                self._overlay(target)
            elif self._covered(target):
                with _missing_is_fine():
                    _mount(self._old + target, target, None, _MS_BIND | _MS_REC)
        if not self._covered(cwd) and any(_is_below(cwd, place) for place in places):
            raise OSError(errno.EOPNOTSUPP, "no overlay", cwd)
        self._processes()
        self._cover_sockets()
        self._add()
        self._hide_folder()
        _set_read_only("/", recursive=True)
        for writable in (*self._overlays, str(self._folder / "results")):
            _set_read_only(writable, on=False)
        call("umount2", os.fsencode(self._old), _MNT_DETACH)

    def redirected(self, cwd: str) -> dict[str, Any]:
        """What the program wrote, as far as it is still there, and what it deleted."""
        files: list[tuple[bool, int, str]] = []
        num_replaced = num_deleted = 0
        for place, (upper, lower) in self._overlays.items():
            for folder, _, names in os.walk(upper):
                inside = os.path.relpath(folder, upper)
                before = f"/proc/self/fd/{lower}/{inside}"
                if _is_opaque(folder):
                    num_deleted += sum(not os.path.lexists(f"{folder}/{file}") for file in files_in(before))
                for name in names:
                    status = os.lstat(f"{folder}/{name}")
                    if stat.S_ISCHR(status.st_mode) and not status.st_rdev:  # a whiteout
                        num_deleted += len(files_in(f"{before}/{name}"))
                        continue
                    num_replaced += os.path.lexists(f"{before}/{name}")
                    path = os.path.normpath(os.path.join(place, inside, name))
                    files.append((not _is_below(path, cwd), -status.st_size, path))
        return report(files, num_replaced, num_deleted)

    def _covered(self, path: str) -> bool:
        return any(_is_below(path, place) for place in self._overlays)

    def _overlay(self, place: str) -> None:
        """Over a place; where a mount lies in it, which a user namespace may not cover, over its folders. Where none
        can be made it stays read-only."""
        lower = os.open(self._old + place, os.O_PATH | os.O_DIRECTORY)
        status = os.fstat(lower)
        # an upper folder cannot lie in what it is over
        for base in (self._memory,) if _is_below(str(self._folder), place) else (self._disk, self._memory):
            layer = f"{base}/{len(self._overlays)}"
            upper = f"{layer}/upper"
            os.makedirs(upper)
            os.mkdir(f"{layer}/work")
            os.chmod(upper, stat.S_IMODE(status.st_mode))
            if not os.geteuid():
                os.chown(upper, status.st_uid, status.st_gid)
            options = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={layer}/work,userxattr,volatile"
            try:
                _mount("overlay", place, "overlay", _MS_NOSUID | _MS_NODEV, options)
            except OSError:
                shutil.rmtree(layer)
                continue
            self._overlays[place] = (upper, lower)
            return
        os.close(lower)
        if any(mount != place and _is_below(mount, place) for mount in self._host.mounts):
            for entry in os.scandir(self._old + place):
                if entry.is_dir(follow_symlinks=False) and f"{place}/{entry.name}" not in self._host.mounts:
                    self._overlay(f"{place}/{entry.name}")

    def _devices(self) -> None:
        _mount("tmpfs", "/dev", "tmpfs", _MS_NOSUID, "mode=0755")
        for name in _DEVICES:
            with _missing_is_fine():
                Path("/dev", name).touch()
                _mount(f"{self._old}/dev/{name}", f"/dev/{name}", None, _MS_BIND)
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            os.symlink(f"/proc/self/{target}", f"/dev/{name}")
        for name in ("shm", "pts"):
            os.mkdir(f"/dev/{name}", 0o755)
        with contextlib.suppress(OSError):  # no terminal of its own, then
            _mount("devpts", "/dev/pts", "devpts", _MS_NOSUID, "newinstance,ptmxmode=0666,mode=0620")
            os.symlink("pts/ptmx", "/dev/ptmx")

    def _processes(self) -> None:
        """/proc shows the program's processes alone. Where a container hides parts of its own the kernel allows no new
        one: the old one then lets a user namespace touch no process outside."""
        try:
            _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
        except PermissionError:
            if not self._host.own_users:
                raise

    def _cover_sockets(self) -> None:
        for path in self._host.sockets:
            with _missing_is_fine():
                if stat.S_ISSOCK(os.stat(path).st_mode):
                    _mount("/dev/null", path, None, _MS_BIND)

    def _add(self) -> None:
        for number, (path, text) in enumerate(self._host.added.items()):
            with _missing_is_fine():
                copy = f"{self._memory}/added-{number}"
                Path(copy).write_bytes(Path(path).read_bytes() + text.encode())
                _mount(copy, path, None, _MS_BIND)
                folder, name = os.path.split(path)
                for compiled in glob.glob(f"{glob.escape(folder)}/__pycache__/{name.removesuffix('.py')}.*.pyc"):
                    _mount("/dev/null", compiled, None, _MS_BIND)

    def _hide_folder(self) -> None:
        """Of the private folder the program sees its results and our `sitecustomize`."""
        here = str(self._folder)
        _mount("tmpfs", here, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0700")
        for name in ("site", "results"):
            os.mkdir(f"{here}/{name}")
            _mount(f"{self._old}{here}/{name}", f"{here}/{name}", None, _MS_BIND)


def places(order: dict[str, Any], mounts: Sequence[str]) -> list[str]:
    """Folders over which an overlay is needed so that the program can write where its user can.

    Of every path that it is told, of the mount points and of the root's folders: the topmost folder that the user may
    write to, and below it each of another owner or group, which an ordinary user's overlay may not copy.
    """
    texts = [*order["command"], *os.environ.values()]
    mentioned = [part for text in texts for part in re.split(r"[:=,]", text) if part.startswith("/")]
    usual = ["/tmp", "/var/tmp", _SHM, tempfile.gettempdir(), os.path.expanduser("~"), order["cwd"]]
    with os.scandir("/") as top:
        usual += [entry.path for entry in top]
    places = set()
    for path in {os.path.realpath(candidate) for candidate in (*mentioned, *usual, *mounts)}:
        above = None
        for folder in _folders(path):
            if folder != _SHM and any(_is_below(folder, root) for root in _KERNELS):
                continue
            if not os.path.isdir(folder):
                break
            needed = above is None or folder in mounts or is_foreign(folder)
            if needed and os.access(folder, os.W_OK | os.X_OK):
                places.add(folder)
                above = folder
    return sorted(places)


def _folders(path: str) -> Iterator[str]:
    parts = path.split("/")
    for end in range(2, len(parts) + 1):
        yield "/".join(parts[:end])


def is_foreign(folder: str) -> bool:
    """Whether a folder is of another owner or group than an ordinary user's."""
    status = os.stat(folder)
    return bool(os.geteuid()) and (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid())


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _is_opaque(folder: str) -> bool:
    try:
        return os.getxattr(folder, "user.overlay.opaque") == b"y"
    except OSError:
        return False


def mount_points() -> list[str]:
    """Without the kernel's own."""
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    points = {re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[4]) for line in lines}
    return sorted(
        point for point in points if point != "/" and (point == _SHM or not any(_is_below(point, k) for k in _KERNELS))
    )


def sockets_in_files() -> list[str]:
    """Where somebody may listen: every socket of this network namespace that has a path, and what lies in /run."""
    paths = {line.split(maxsplit=7)[-1] for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]}
    for folder, folders, names in os.walk("/run"):
        if folder.count("/") > 4:
            folders.clear()
        paths.update(os.path.join(folder, name) for name in names)
    return sorted(path for path in paths if path.startswith("/"))


@contextlib.contextmanager
def _missing_is_fine() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            raise


def call(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or 'bind'}: {os.strerror(number)}", target)


def _set_read_only(path: str, *, on: bool = True, recursive: bool = False) -> None:
    change = struct.pack("=QQQQ", _RDONLY if on else 0, 0 if on else _RDONLY, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    arguments = (_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, change, ctypes.c_size_t(len(change)))
    if libc.syscall(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"mount_setattr: {os.strerror(number)}", path)
