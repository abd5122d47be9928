"""A traced program changes nothing: whatever it and its children write, rename, truncate or delete, every byte, time
and mode of what was there before is as it was, and nothing is there beside it. As root and as an ordinary user."""

import ast
import contextlib
import errno
import hashlib
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.whole import WHOLE, some

ROOT = Path(__file__).parents[3]
USERS = [None, "nobody"] if os.geteuid() == 0 else [None]
FOREIGN_GROUP = 54_321
"""One that an ordinary user here is in, besides their own."""
RUN = """
import json, sys
from dataclasses import asdict
from planner.core.errors import PlannerError
from planner.hardware.gpus import find_gpu
from probes.phantom.card import TraceOptions, card_of
from probes.phantom import isolation
from probes.phantom.runner import TraceOrder, run_traced
settings = json.loads(sys.argv[1])
isolation.KEEP_FREE_BYTES = settings.pop("keep_free_bytes", isolation.KEEP_FREE_BYTES)
order = TraceOrder(command=tuple(sys.argv[2:]), card=card_of(find_gpu("t4")), options=TraceOptions(), **settings)
try:
    ended = run_traced(order)
    print(json.dumps({"code": ended.exit_code, **asdict(ended.protection)}))
except PlannerError as error:
    print(json.dumps({"refused": str(error)}))
"""
FORBIDDEN = """
import ctypes, os, platform, struct, sys
numbers = {"unshare": {"x86_64": 272, "aarch64": 97}[platform.machine()], "landlock_create_ruleset": 444}
steps = [(0x20, 0, 0, 0)]
if sys.argv[1] == "user namespaces":
    steps += [(0x15, 0, 4, numbers[sys.argv.pop(1) and "unshare"]), (0x20, 0, 0, 16), (0x54, 0, 0, 0x10000000)]
    steps += [(0x15, 1, 0, 0), (0x06, 0, 0, 0x50001)]
while sys.argv[1] in numbers:
    steps += [(0x15, 0, 1, numbers[sys.argv.pop(1)]), (0x06, 0, 0, 0x50001)]
code = b"".join(struct.pack("=HBBI", *one) for one in (*steps, (0x06, 0, 0, 0x7FFF0000)))
buffer = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0) and not libc.prctl(22, 2, program, 0, 0), ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs its words where some system calls are not permitted, as in a container."""
WITHOUT = {
    "namespaces": (),
    "namespaces of root's": (sys.executable, "-c", FORBIDDEN, "user namespaces"),
    "landlock": (sys.executable, "-c", FORBIDDEN, "unshare"),
    "none": (sys.executable, "-c", FORBIDDEN, "unshare", "landlock_create_ruleset"),
}
"""Kind of protection -> what stands before a command where no better one is to be had."""


NAMES = {
    "project/best.pt": 1_100_000, "project/out/checkpoint-1/model.safetensors": 300_000,
    "project/out/checkpoint-1/optimizer.pt": 100_000, "project/out/checkpoint-1/trainer_state.json": 20,
    "project/out/checkpoint-2/model.safetensors": 300_000, "project/out/tokenizer.json": 1000,
    "project/runs/log.txt": 100, "project/readonly.bin": 1000, "elsewhere/data.bin": 1000,
    "elsewhere/shared/model.bin": 1000, "home/.cache/huggingface/token": 40, "home/.bashrc": 100,
}  # fmt: skip


class Machine:
    """Homes with a project and what lies around it, of one user.

    Attributes:
        folder: with one home for each of `homes`.
    """

    def __init__(self, folder: Path, user: str | None, homes: Iterable[str]) -> None:
        self.folder, self.user = folder, user
        self.temporary = folder.with_name(f"{folder.name}-tmp")
        for home in homes:
            self._plant(folder / home)
        if user is not None:
            owner = pwd.getpwnam(user)
            for path in (folder, self.temporary, *folder.rglob("*")):
                os.chown(path, owner.pw_uid, owner.pw_gid, follow_symlinks=False)
        self.before = self.now()

    def _plant(self, home: Path) -> None:
        for name, size in NAMES.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(size))
        project = home / "project"
        (project / "readonly.bin").chmod(0o444)
        (project / "link.bin").symlink_to("../elsewhere/data.bin")
        (project / "shared").symlink_to(home / "elsewhere" / "shared")
        (project / "dangling").symlink_to("../elsewhere/not-there")
        os.link(project / "best.pt", project / "hard.pt")
        subprocess.run(["git", "init", "-q", "--template="], cwd=project, check=True)

    def now(self) -> dict[str, Any]:
        """Everything that is there; of what was read since, not when."""
        state: dict[str, Any] = {}
        for path in (self.folder, *sorted(self.folder.rglob("*"))):
            status = path.lstat()
            content = ""
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            state[str(path.relative_to(self.folder))] = (*status[:7], status.st_mtime_ns, status.st_ctime_ns, content)
        return state

    def command(self, *words: str, **settings: Any) -> tuple[list[str], dict[str, Any]]:
        """Of a process that traces `words`, and how it is started."""
        variables = {"HOME": str(self.folder), "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        how: dict[str, Any] = {"cwd": self.folder, "env": {**os.environ, **variables}, "text": True}
        if self.user is not None:
            how |= {"user": self.user, "group": pwd.getpwnam(self.user).pw_gid, "extra_groups": [FOREIGN_GROUP]}
        return [sys.executable, "-c", RUN, json.dumps(settings), *words], how

    def trace(self, *words: str, before: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
        """What a trace of `words` answers; "said": what it and they printed."""
        command, how = self.command(*words, **settings)
        done = subprocess.run([*before, *command], **how, capture_output=True, check=False, timeout=300)
        assert done.stdout, done.stderr
        return {**json.loads(done.stdout), "said": done.stderr}

    def check(self) -> None:
        """Nothing is changed, and nothing left behind."""
        now = self.now()
        assert {name: (now.get(name), was) for name, was in self.before.items() if now.get(name) != was} == {}
        assert sorted(now.keys() - self.before.keys()) == []
        assert os.listdir(self.temporary) == []
        assert not os.path.exists(f"{self.folder}-left-behind")


@pytest.fixture
def plant() -> Iterator[Callable[..., Machine]]:
    """Makes a machine for a user, with the homes of these names."""
    with ExitStack() as stack:

        def make(user: str | None, homes: Iterable[str] = ("one",)) -> Machine:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planted-", dir="/var/tmp"))).resolve()
            temporary = folder.with_name(f"{folder.name}-tmp")
            temporary.mkdir()
            stack.callback(shutil.rmtree, temporary)
            return Machine(folder, user, homes)

        yield make


HARM = {
    "overwrite": "open('best.pt', 'wb').write(b'x')",
    "append": "open('runs/log.txt', 'a').write('x')",
    "in place": "f = open('best.pt', 'r+b'); f.write(b'x'); f.flush(); os.fsync(f.fileno())",
    "map": "import mmap; f = open('best.pt', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0:3] = b'xxx'; m.flush()",
    "truncate": "os.truncate('best.pt', 0)",
    "delete": "os.remove('best.pt'); os.remove('dangling')",
    "a whole tree": "shutil.rmtree('out'); os.makedirs('out/checkpoint-3')",
    "its own folder": "shutil.rmtree(os.getcwd(), ignore_errors=True)",
    "rename": "os.rename('best.pt', 'old.pt'); os.replace('runs/log.txt', 'best.pt')",
    "move": "shutil.move('out', 'old')",
    "modes": "os.chmod('readonly.bin', 0o777); open('readonly.bin', 'wb').write(b'x'); os.chmod('out', 0)",
    "times": "os.utime('best.pt', (1, 1)); os.utime('out', (1, 1))",
    "attributes": "os.setxattr('best.pt', 'user.a', b'b')",
    "through links": "open('link.bin', 'wb').write(b'x'); open('shared/new', 'w').write('x'); open('dangling', 'w')",
    "hard link": "open('hard.pt', 'wb').write(b'x')",
    "elsewhere": "open('../elsewhere/data.bin', 'wb').write(b'x'); shutil.rmtree(os.path.realpath('shared'))",
    "home": "open(os.path.expanduser('~/.bashrc'), 'a').write('evil')",
    "temporary": "import tempfile; open(tempfile.mkdtemp() + '/x', 'w').write('x')",
    "links": "os.symlink('/etc', 'new'); os.link('best.pt', 'newer'); os.mkfifo('pipe')",
    "sqlite": "import sqlite3; c = sqlite3.connect('new.db'); c.execute('create table t (a)'); c.commit()",
    "a shell": "subprocess.run('rm -rf out; mkdir out; cp best.pt out/b; echo x > best.pt; mv runs x', shell=True)",
    "git": "subprocess.run('git add -A && git -c user.name=a -c user.email=b commit -qm x && git gc -q', shell=True)",
    "python -I": "subprocess.run([sys.executable, '-I', '-c', 'open(\"best.pt\", \"w\")'])",
    "no environment": "subprocess.run(['env', '-i', sys.executable, '-c', 'open(\"best.pt\", \"w\")'])",
    "its own namespaces": "import ctypes; c = ctypes.CDLL(None); c.unshare(0x10020000); c.umount2(b'/var/tmp', 2); "
    "c.mount(None, b'/', None, 0x1020, None); open('best.pt', 'wb').write(b'x'); open('/var/tmp/' + NAME, 'w')",
    "a daemon": "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(0.3), open('late', 'w').write('x'))",
}


EACH = """
import os, shutil, subprocess, sys, time
NAME = os.path.basename(os.getcwd()) + "-left-behind"
for name, code in HARM.items():
    if not os.fork():
        os.environ["HOME"] = os.path.abspath(name + "/home")
        os.chdir(name + "/project")
        try:
            exec(code)
        except BaseException as error:
            print("FAILED", name, repr(error), file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
"""
"""Does each harm in its own home."""


def test_the_page_says_how_many_kinds_of_harm_there_are() -> None:
    assert f"{len(HARM)} kinds of harm" in (ROOT / "docs" / "trace.md").read_text()


@pytest.mark.parametrize(
    ("kind", "user"),
    [
        *((kind, user) for kind in ("namespaces", "landlock") for user in some(USERS[::-1], 2)),
        pytest.param("namespaces of root's", None, marks=pytest.mark.skipif(os.geteuid() != 0, reason="root's alone")),
    ],
)
def test_whatever_a_program_does_nothing_changes_and_it_does_not_notice(
    plant: Callable[..., Machine], user: str | None, kind: str
) -> None:
    machine = plant(user, HARM)
    done = machine.trace(sys.executable, "-c", f"HARM = {HARM!r}{EACH}", before=WITHOUT[kind])
    kind = kind.removesuffix(" of root's")
    assert (done["code"], done["kind"]) == (0, kind), done
    machine.check()
    failed = {line.split()[1] for line in done["said"].splitlines() if line.startswith("FAILED")}
    # there the mode of a file cannot be changed, which root need not
    assert failed == ({"modes"} if kind == "landlock" and (user or os.geteuid()) else set()), done["said"]
    assert done["num_written"] > len(HARM)


@pytest.mark.skipif(len(USERS) < 2, reason="only root can give a folder to another group")
def test_a_folder_of_another_group_that_an_overlay_cannot_copy_is_protected_otherwise(
    plant: Callable[..., Machine],
) -> None:
    machine = plant("nobody", ["a shell"])
    for path in (machine.folder, *machine.folder.rglob("*")):
        os.chown(path, -1, FOREIGN_GROUP, follow_symlinks=False)
    machine.before = machine.now()
    done = machine.trace(sys.executable, "-c", f"HARM = { {'a shell': HARM['a shell']}!r}{EACH}")
    assert done["kind"] == "landlock"
    machine.check()


def test_without_protection_the_same_program_does_harm(plant: Callable[..., Machine]) -> None:
    """What the test above relies on."""
    machine = plant(None, ["overwrite"])
    done = machine.trace(sys.executable, "-c", f"HARM = {HARM!r}{EACH}", unsafe_writes=True)
    assert (done["code"], done["kind"], done["num_written"]) == (0, "none", 0)
    assert machine.now() != machine.before


@pytest.mark.parametrize("user", some(USERS[::-1], 2))
def test_where_nothing_can_protect_the_program_is_not_run(plant: Callable[..., Machine], user: str | None) -> None:
    machine = plant(user)
    done = machine.trace("touch", "one/project/best.pt", before=WITHOUT["none"])
    assert "nothing here can keep the program from your files" in done["refused"]
    assert "[Errno 1] unshare: Operation not permitted" in done["refused"]
    machine.check()


OUTSIDE = """
import errno, os, socket
def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return 0
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener = socket.create_server(("127.0.0.1", 0))
print({
    "udp": fails(udp.sendto, b"x", ("192.0.2.1", 53)),
    "tcp": fails(socket.create_connection, ("192.0.2.1", 80), 5),
    "loopback": fails(socket.create_connection, listener.getsockname(), 5),
    "daemon": fails(socket.socket(socket.AF_UNIX).connect, DAEMON),
    "kill": fails(os.kill, KEEPER, 0),
    "device": fails(open, "/dev/ptmx", "r+b", 0),
    "devices": sorted(os.listdir("/dev")),
    "processes": sum(name.isdecimal() for name in os.listdir("/proc")),
    "usr": fails(open, "/usr/new", "w"),
    "sysctl": fails(open, "/proc/sys/vm/swappiness", "w"),
    "umount": os.system("umount /var/tmp 2>/dev/null") != 0,
    "own namespace": os.system("unshare -Urm umount /var/tmp 2>/dev/null") != 0,
    "sudo": open("/proc/self/status").read().split("NoNewPrivs:")[1].split()[0],
})
"""


@pytest.mark.parametrize("user", some(USERS[::-1], 2))
def test_a_program_reaches_no_network_no_device_no_process_and_no_daemon(
    plant: Callable[..., Machine], user: str | None
) -> None:
    machine = plant(user)
    with socket.socket(socket.AF_UNIX) as daemon:
        path = f"{machine.temporary}/daemon"
        daemon.bind(path)
        os.chmod(path, 0o777)
        daemon.listen()
        program = OUTSIDE.replace("DAEMON", repr(path)).replace("KEEPER", str(os.getpid()))
        done = machine.trace(sys.executable, "-I", "-c", program)
        os.unlink(path)
    results = ast.literal_eval(done["said"].strip().splitlines()[-1])
    assert results.pop("devices") == sorted(
        ["fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]
    )
    assert results.pop("processes") <= 3
    assert results.pop("device") == 0
    assert results.pop("usr") in ((0,) if os.geteuid() == 0 and user is None else (errno.EACCES, errno.EROFS))
    assert results == {
        "udp": errno.ENETUNREACH,
        "tcp": errno.ENETUNREACH,
        "loopback": 0,
        "daemon": errno.ECONNREFUSED,
        "kill": errno.ESRCH,
        "sysctl": errno.EROFS if user is None and os.geteuid() == 0 else results["sysctl"],
        "umount": True,
        "own namespace": True,
        "sudo": "1",
    }
    assert not Path("/usr/new").exists()
    machine.check()


@pytest.mark.parametrize("user", some(USERS[::-1], 2))
def test_where_one_folder_is_writable_devices_processes_and_the_kernel_are_not(
    plant: Callable[..., Machine], user: str | None
) -> None:
    machine = plant(user)
    program = OUTSIDE.replace("DAEMON", "''").replace("KEEPER", str(os.getpid()))
    done = machine.trace(sys.executable, "-I", "-c", program, before=WITHOUT["landlock"])
    results = ast.literal_eval(done["said"].strip().splitlines()[-1])
    assert {name: results[name] for name in ("usr", "sysctl", "umount", "own namespace", "sudo", "device")} == {
        "usr": errno.EACCES, "sysctl": errno.EACCES, "umount": True, "own namespace": True, "sudo": "1",
        "device": errno.EACCES,
    }  # fmt: skip
    assert results["kill"] in (errno.EPERM, 0)  # 0 before Linux 6.12, and signal 0 alone is sent
    machine.check()


STAYS = """
import os, sys, time
for number in range(3):
    if not os.fork():
        os.setsid()
        break
os.write(1, b"runs\\n")
time.sleep(600)
"""


def running(mark: str) -> int:
    """Processes whose command line has `mark`, as the machine sees them."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += mark.encode() in path.read_bytes()
    return count


@pytest.mark.processes
@pytest.mark.parametrize(
    ("victim", "number", "user", "unsafe"),
    some(
        [
            ("planner", signal.SIGKILL, USERS[-1], False),
            ("planner", signal.SIGKILL, None, True),
            ("planner", signal.SIGHUP, None, False),
            ("planner", signal.SIGTERM, USERS[-1], False),
            ("keeper", signal.SIGKILL, None, False),
        ],
        2,
    ),
)
def test_nothing_outlives_the_trace(
    plant: Callable[..., Machine], victim: str, number: signal.Signals, user: str | None, unsafe: bool
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup, whose children do not hear a SIGHUP")
    machine = plant(user)
    mark = f"mark-{machine.folder.name}"
    command, how = machine.command(sys.executable, "-c", STAYS, mark, unsafe_writes=unsafe)
    planner = subprocess.Popen(command, **how, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert planner.stderr is not None
        for _ in range(4):
            assert planner.stderr.readline() == "runs\n"
        if victim == "planner":
            planner.send_signal(number)
        else:
            (keeper,) = Path(f"/proc/{planner.pid}/task/{planner.pid}/children").read_text().split()
            os.kill(int(keeper), number)
        planner.wait(timeout=60)
        until = time.monotonic() + 60
        while running(mark) or any(machine.temporary.iterdir()):
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        planner.kill()
        planner.communicate()
    machine.check()


def test_what_runs_too_long_or_fills_the_disk_is_stopped(plant: Callable[..., Machine]) -> None:
    machine = plant(None)
    done = machine.trace(sys.executable, "-c", STAYS, time_limit_s=0.5)
    assert "ran longer" in done["refused"]
    done = machine.trace(sys.executable, "-c", STAYS, keep_free_bytes=1 << 62)
    assert "GiB free" in done["refused"]
    machine.check()


@pytest.mark.parametrize("user", some(USERS[::-1], 2))
def test_no_python_imports_torch_without_the_phantom(plant: Callable[..., Machine], user: str | None) -> None:
    """However it is started. This torch is none, on which the phantom GPU cannot be: the process ends at once."""
    machine = plant(user)
    importing = "import sys; sys.path.insert(0, 'one'); import torch; open('one/ran', 'w').write('x')"
    package = machine.folder / "one" / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    machine.before = machine.now()
    real = os.path.realpath(sys.executable)
    starts = [
        f"{sys.executable} -I -c",
        f"env -i {sys.executable} -c",
        f"env -u PYTHONPATH {real} -E -c",
        "PYTHONPATH=. python3 -c",
        f"{sys.executable} -I -S -X frozen_modules=off -c",
        f"env -i {real} -S -c",
    ]
    commands = [f'{start} "{importing}"' for start in starts]
    script = "; ".join(f"{command} 2>/dev/null; echo CODE $? >&2" for command in commands)
    done = machine.trace("sh", "-c", f"{script}; ls one/ran")
    codes = [line for line in done["said"].splitlines() if line.startswith("CODE")]
    assert codes == ["CODE 97"] * len(commands)
    machine.check()


TRAINER = """
import os, sys
import shutil
import torch
from safetensors.torch import load_file, save_file

save_file({"a": torch.arange(4)}, "best.pt")
assert load_file("best.pt")["a"].tolist() == [0, 1, 2, 3]
torch.save({"b": torch.arange(3)}, "link.bin")
assert torch.load("link.bin")["b"].tolist() == [0, 1, 2]
model = torch.nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 99):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    folder = f"out/checkpoint-{step}"
    os.makedirs(folder, exist_ok=True)
    weights = {name: torch.empty(one.shape, dtype=one.dtype, device="cpu") for name, one in model.named_parameters()}
    save_file(weights, f"{folder}/model.safetensors")
    torch.save(weights, f"{folder}/optimizer.pt")
    for other in os.listdir("out"):
        if other.startswith("checkpoint-") and other != f"checkpoint-{step}":
            shutil.rmtree(f"out/{other}")
    print("SEES", sorted(os.listdir("out")), file=sys.stderr, flush=True)
"""


@pytest.mark.skipif(not WHOLE, reason="3 CPU seconds; every write of a program is protected above (TESTS_WHOLE=1)")
@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
def test_a_trainer_saves_and_rotates_over_checkpoints_that_were_there(plant: Callable[..., Machine], kind: str) -> None:
    """PyTorch's and safetensors' own writers, in a loop that overwrites a checkpoint and deletes the older."""
    machine = plant(None)
    words = ["trace", "--gpu", "t4", "--yes", "--json=full", "--steps", "4", "--", sys.executable, "-c", TRAINER]
    code = f"from finetune_planner.cli.app import run; raise SystemExit(run({words!r}))"
    _, how = machine.command()
    how["cwd"] = machine.folder / "one" / "project"
    done = subprocess.run([*WITHOUT[kind], sys.executable, "-c", code], **how, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    machine.check()
    answer = json.loads(done.stdout)
    assert answer["num_steps"] == 4
    protection = answer["protection"]
    assert protection["kind"] == kind
    assert protection["num_replaced"] >= 2  # best.pt and what link.bin leads to
    assert protection["num_deleted"] >= 4  # both old checkpoints
    seen = [ast.literal_eval(line[5:]) for line in done.stderr.splitlines() if line.startswith("SEES ")]
    assert [[name for name in names if name.startswith("checkpoint")] for names in seen] == [
        ["checkpoint-1"], ["checkpoint-2"], ["checkpoint-3"]
    ]  # fmt: skip
