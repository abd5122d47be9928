"""Keeps a traced program from the machine: what it writes, renames or deletes is a private copy, and goes with it.

A program of its own, of the standard library alone, with the order as one line of its standard input. That pipe is also
the life line: when its other end is closed, by whatever ended `plan trace`, everything that was started here is killed
and the private folder removed.

    plan trace -> keeper -> unsharer -> first process of the namespaces (PID 1) -> the program

Where they are not to be had, it can write in a private folder alone (`landlock`), in which it finds copies (`copies`).
Else it gets namespaces of its own, made without any right that an ordinary user lacks:

    user      no capability outside; files belong to whom they belonged before
    mount     the whole tree is read-only; over each place that the user may write to lies an overlay whose upper folder
              is ours: reads see the machine's files and what the program wrote, and nothing below is ever touched
    devices   /dev has null, zero, full, random, urandom, tty, shm and pts: no GPU and no disk
    PID, IPC  it sees no process but its own; when the first of them ends the kernel kills the others
    network   loopback alone, unless it is asked for
    sockets   files at which a daemon of the machine listens (Docker's, D-Bus') are covered
    Pythons   none imports PyTorch without the phantom GPU (`GUARD`)

Source: man 7 user_namespaces, mount_namespaces, pid_namespaces; the kernel's Documentation/filesystems/overlayfs.rst.
"""

import contextlib
import errno
import glob
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from probes.phantom import copies, landlock
from probes.phantom.overlays import HostView, Tree, call, is_foreign, libc, mount_points, places, sockets_in_files

NAMESPACES, LANDLOCK, NONE = "namespaces", "landlock", "none"
"""Kinds of protection."""
KEEP_FREE_BYTES = 1 << 30
"""On the disk of the private folder: a program that leaves less is stopped."""
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x0002_0000, 0x0800_0000, 0x1000_0000
_CLONE_NEWPID, _CLONE_NEWNET = 0x2000_0000, 0x4000_0000
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_KEPT_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7}
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid: what root needs to handle files as root does."""
_TREE = "tree"
_WRITABLE_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_EXEC, _UNSHARED = "exec: ", b"\0"


class _Unavailable(Exception):
    """This machine, or this user, cannot be given that protection."""


class _NoProgram(Exception):
    """The program cannot be executed."""


def main() -> NoReturn:
    """The keeper, which makes and removes the private folder. Its argument: where it says how the program ended."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    order = json.loads(line)
    folder = Path(order["folder"])
    folder.mkdir(mode=0o700)
    try:
        for name, text in order["site"].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "results").mkdir()
        outcome = _outcome(order)
        if outcome is not None:
            with open(int(sys.argv[1]), "w") as file:
                json.dump(outcome, file)
            sys.stdin.buffer.read()  # until it has been looked at
    finally:
        remove(folder)
    os._exit(0)


def _outcome(order: dict[str, Any]) -> dict[str, Any] | None:
    """Runs the program: how it ended, or why it did not run; None where nobody waits for it any more."""
    reasons = []
    if sys.platform == "linux":
        call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for kind, flags in _attempts(order):
        try:
            child, report = _started(order, kind, flags)
        except _Unavailable as error:
            reasons.append(f"{kind}: {error}")
            continue
        except _NoProgram as error:
            return {"no_program": str(error)}
        return _wait(child, report, kind, order)
    return {"unavailable": "; ".join(reasons) or f"not on {sys.platform}"}


def _attempts(order: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Kind of protection and the namespaces that it needs, the strongest first."""
    if order["unsafe_writes"]:
        yield NONE, 0
    elif sys.platform == "linux":
        flags = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | (0 if order["network"] else _CLONE_NEWNET)
        yield NAMESPACES, flags | _CLONE_NEWUSER
        if os.geteuid() == 0:  # user namespaces may be forbidden to everybody, and root needs none
            yield NAMESPACES, flags
        yield LANDLOCK, 0


def _wait(child: int, report: int, kind: str, order: dict[str, Any]) -> dict[str, Any] | None:
    """Waits until the program ends, whoever ordered it is gone, its time is over or the disk is full."""
    folder, until, began_s = Path(order["folder"]), time.monotonic() + order["time_limit_s"], time.time()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _kill_all()
            with open(report, "rb") as file:
                redirected = json.loads(file.read() or b"{}")
            if kind == LANDLOCK:
                redirected = copies.Tree(f"{folder}/{_TREE}").changed(order["cwd"], began_s)
            return {"code": _code(status), "kind": kind, "redirected": redirected}
        ready, _, _ = select.select([0, woken], [], [], 0.5)
        orphaned = 0 in ready and not os.read(0, 1)
        late = time.monotonic() > until
        if orphaned or late or shutil.disk_usage(folder).free < order["keep_free_bytes"]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            _kill_all()
            return None if orphaned else {"stopped": "time" if late else "disk"}
        if woken in ready:
            os.read(woken, 512)


def _kill_all() -> None:
    """Ends every process that was started from here; whose parent is gone has become this process's child."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if sys.platform == "linux":
                for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            os.wait()


def remove(folder: Path) -> None:
    """The private folder; the kernel's work folders in it let nobody in, and the program may have made such."""
    for path, names, _ in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                if not os.path.islink(f"{path}/{name}"):
                    os.chmod(f"{path}/{name}", 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _started(order: dict[str, Any], kind: str, flags: int) -> tuple[int, int]:
    """The process that waits for the program, which runs by now, and where the report of its writes will come from.

    Raises:
        _Unavailable: the protection cannot be had.
        _NoProgram: the program cannot be executed.
    """
    own_users = bool(flags & _CLONE_NEWUSER)
    try:
        host = _host_view(order, own_users) if flags else None
        started = _in_copies(order) if kind == LANDLOCK else order
    except OSError as error:
        raise _Unavailable(str(error)) from error
    ours, theirs = socket.socketpair()
    report, reported = os.pipe()
    child = os.fork()
    if not child:
        ours.close()
        os.close(int(sys.argv[1]))
        try:
            os.setsid()
            _unshare(started, host, flags, theirs, reported)
        except BaseException as error:
            _fail(theirs, error)
    theirs.close()
    os.close(reported)
    with ours:
        first = ours.recv(1) if own_users else b""
        if first == _UNSHARED:
            with contextlib.suppress(OSError):  # not allowed: it says so itself, for want of rights
                _map_users(child)
            ours.send(first)
            first = b""
        failure = b"".join((first, *iter(lambda: ours.recv(4096), b""))).decode(errors="replace")
    if not failure:
        return child, report
    os.waitpid(child, 0)
    os.close(report)
    raise (_NoProgram if failure.startswith(_EXEC) else _Unavailable)(failure.removeprefix(_EXEC))


def _host_view(order: dict[str, Any], own_users: bool) -> HostView:
    """What the namespaces need to know.

    Raises:
        OSError: no overlay can be made of the program's folder.
    """
    if is_foreign(order["cwd"]) and os.access(order["cwd"], os.W_OK):
        raise OSError(errno.EOVERFLOW, "an ordinary user's overlay copies no folder of another owner or group")
    mounts = mount_points()
    guard = GUARD.format(**order["guard"])
    return HostView(
        mounts=mounts,
        places=places(order, mounts),
        sockets=sockets_in_files(),
        added=dict.fromkeys(encodings_of(order["command"]), guard),
        own_users=own_users,
    )


def _in_copies(order: dict[str, Any]) -> dict[str, Any]:
    """The order for a program that can write in a private folder alone, with copies there.

    Raises:
        OSError: this kernel has no Landlock.
    """
    landlock.version()
    tree = copies.Tree(f"{order['folder']}/{_TREE}")
    cwd = tree.plant_all(order["cwd"])
    home, temporary = os.path.expanduser("~"), tempfile.gettempdir()
    settings = json.loads(os.environ[order["variable"]])
    environment = {
        "HOME": tree.word(home),
        "TMPDIR": tree.word(temporary),
        "PWD": cwd,
        order["variable"]: json.dumps({**settings, "tree": tree.top}),
    }
    program, *words = order["command"]
    writable = [tree.top, f"{order['folder']}/results"]
    with contextlib.suppress(OSError):
        writable += ["/dev/shm"] * (not os.listdir("/dev/shm"))  # where something is, it may not be changed
    return {
        **order,
        "cwd": cwd,
        "command": [program, *map(tree.word, words)],
        "environment": environment,
        "writable": writable,
    }


def _fail(channel: socket.socket, error: BaseException) -> NoReturn:
    with contextlib.suppress(OSError):
        channel.sendall((str(error) or repr(error)).encode())
    os._exit(1)


def _map_users(child: int) -> None:
    """Every user and group that this process may map is, to itself: root keeps all of them, others themselves.

    Raises:
        OSError: the kernel does not allow it.
    """
    process = Path("/proc", str(child))
    if os.geteuid():
        (process / "setgroups").write_text("deny")
    for name, effective_id in (("gid_map", os.getegid()), ("uid_map", os.geteuid())):
        lines = [f"{effective_id} {effective_id} 1"]
        if not os.geteuid():
            ranges = (line.split() for line in Path("/proc/self", name).read_text().splitlines())
            lines = [f"{inside} {inside} {number}" for inside, _, number in ranges]
        (process / name).write_text("\n".join(lines))


def _unshare(
    order: dict[str, Any], host: HostView | None, flags: int, channel: socket.socket, reported: int
) -> NoReturn:
    """Enters the namespaces, starts their first process and ends as it does."""
    keeper = os.getppid()
    if flags:
        call("unshare", flags)
    if flags & _CLONE_NEWUSER:
        channel.send(_UNSHARED)
        channel.recv(1)
    _die_with_parent()
    if os.getppid() != keeper:
        os._exit(1)
    alive, living = os.pipe()
    first = os.fork()
    if not first:
        os.close(living)
        try:
            _die_with_parent()
            if select.select([alive], [], [], 0)[0]:
                os._exit(1)
            _first(order, host, flags, channel, reported)
        except BaseException as error:
            _fail(channel, error)
    channel.close()
    os.close(reported)
    _, status = os.waitpid(first, 0)
    os._exit(_code(status))


def _first(order: dict[str, Any], host: HostView | None, flags: int, channel: socket.socket, reported: int) -> NoReturn:
    """The first process: builds the tree, runs the program, ends what is left of it and says what was redirected."""
    if host is None:
        _become(order, channel)
    tree = Tree(Path(order["folder"]), host)
    tree.build(order["cwd"])
    if flags & _CLONE_NEWNET:
        _loopback()
    program = os.fork()
    if not program:
        try:
            _give_up_rights()
            _become(order, channel)
        except BaseException as error:
            _fail(channel, error)
    channel.close()
    ended, status = os.wait()
    while ended != program:
        ended, status = os.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    with open(reported, "w") as file:
        json.dump(tree.redirected(order["cwd"]), file)
    os._exit(_code(status))


def _become(order: dict[str, Any], channel: socket.socket) -> NoReturn:
    os.environ.update(order.get("environment", {}))
    if "writable" in order:
        landlock.restrict(order["writable"], [device for device in _WRITABLE_DEVICES if os.path.exists(device)])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["cwd"])
    words = order["command"]
    try:
        os.execv(words[0], words)
    except OSError as error:
        channel.sendall(f"{_EXEC}{error.strerror}".encode())
        os._exit(127)


def _give_up_rights() -> None:
    """Nothing that is executed from here on gets back what could undo the tree."""
    for capability in range(64):
        if capability not in _KEPT_CAPABILITIES:
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for those that this kernel does not know
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _loopback() -> None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


# No Python below a trace imports PyTorch without the phantom GPU: `-I`, `-E`, `-S` and an empty environment keep a
# Python from our `sitecustomize`, none from its own `encodings`, which every CPython imports before anything else. In
# the program's tree that file of every interpreter of this machine also watches for `import torch`. Not reached: an
# interpreter in none of the usual places, that none of the command, PATH and the environment names.

GUARD = """

def _watch_for_torch(environment, root):
    import sys

    class Guard:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name != "torch" or "probes.phantom.boot" in sys.modules:
                return None
            import os
            try:
                os.environ.update(environment)
                sys.path.append(root)
                from probes.phantom import boot
                boot.begin()
            except BaseException as error:
                os.write(2, f"plan trace: no phantom GPU: {{error!r}}\\n".encode())
                os._exit(97)
            found = (one.find_spec(name, path, target) for one in sys.meta_path if one is not cls)
            return next((one for one in found if one is not None), None)

    sys.meta_path.insert(0, Guard)


_watch_for_torch({environment!r}, {root!r})
"""
"""What is added to `encodings`."""
_USUAL = (
    "/usr", "/usr/local", "/opt/*", "~", "~/.pyenv", "~/.conda", "~/.asdf", "~/.local/share/mise", "~/.local/share/uv",
    "~/*conda*", "~/*mamba*", "~/*forge*",
)  # fmt: skip
_BELOW = ("", "envs/*", "versions/*", "installs/python/*", "python/*")
"""Where an installation keeps further ones."""


def encodings_of(command: Sequence[str]) -> list[str]:
    paths = set()
    for prefix in {os.path.realpath(folder) for folder in _prefixes(command)}:
        for below in _BELOW:
            paths.update(glob.glob(f"{glob.escape(prefix)}/{below}/lib*/python3*/encodings/__init__.py"))
    return sorted({os.path.realpath(path) for path in paths})


def _prefixes(command: Sequence[str]) -> Iterator[str]:
    for pattern in _USUAL:
        yield from glob.glob(os.path.expanduser(pattern))
    for folder in (*os.environ.get("PATH", "").split(":"), *(os.path.dirname(word) for word in command)):
        if folder:
            yield os.path.dirname(os.path.abspath(folder))
            for program in glob.glob(f"{glob.escape(folder)}/python*"):
                yield os.path.dirname(os.path.dirname(os.path.realpath(program)))
    environments = (os.environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYENV_ROOT"))
    for folder in (*filter(None, environments), *glob.glob("*venv*"), *glob.glob(".*venv*")):
        yield folder
        yield from _base_installation(f"{folder}/pyvenv.cfg")


def _base_installation(path: str) -> Iterator[str]:
    try:
        with open(path) as file:
            match = re.search(r"^home\s*=\s*(.+)$", file.read(65536), re.MULTILINE)
    except (OSError, ValueError):
        return
    if match:
        yield os.path.dirname(match[1].strip())
        yield os.path.dirname(os.path.dirname(os.path.realpath(f"{match[1].strip()}/python3")))
