"""Native Windows has no `fcntl` and no process groups: planning works there, probes say what they need."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_worker import measured

from planner.core import locks
from planner.core.children import ROOT, child_environment
from planner.setup import TrainSetup
from planner.setup.interchange import setup_to_dict
from probes.gpu.request import ProbeRequest
from probes.store import Record

HIDDEN = """
import os, signal, sys
sys.modules["fcntl"] = None
for name in ("getuid", "O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "pread", "pwrite", "killpg", "pidfd_open", "setsid"):
    delattr(os, name)
del signal.SIGKILL
"""
PROGRAM = (
    HIDDEN
    + """
from finetune_planner.cli.app import run
assert run(["Qwen/Qwen2.5-0.5B", "--gpu", "rtx-4090", "--no-dry-run"]) == 0
open(sys.argv[1], "w").close()
assert run(["store", "show", "--store", sys.argv[1]]) == 0
import probes.gpu.device, search.storage, search.corrections
sys.exit(run(["probe", "Qwen/Qwen2.5-0.5B", "--gpu", "rtx-4090", "--device", "cpu", "--store", sys.argv[1]]))
"""
)


def test_planning_works_without_fcntl_and_a_probe_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store.jsonl")],
        capture_output=True, text=True, cwd=ROOT, env=child_environment(), check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr[-2000:]
    assert "Fits. " in done.stdout
    assert "native Windows has none" in done.stderr
    assert "WSL 2" in done.stderr


def record(key: str) -> Record:
    request = ProbeRequest(model_id="tiny", config={"model_type": "llama"}, setup=TrainSetup(), device="cpu")
    return Record(
        key=key, model_id="tiny", config_digest="d", setup=setup_to_dict(request.setup), request={},
        outcome=measured(request), recorded_at="2026-11-22T00:00:00+00:00",
    )  # fmt: skip


class Msvcrt:
    """`msvcrt.locking` of one byte at the file's place, held by the open file."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], int] = {}

    def locking(self, descriptor: int, mode: int, size: int) -> None:
        assert size == 1
        key = (os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR))
        if mode == self.LK_UNLCK:
            assert self.held.pop(key) == descriptor
        elif self.held.setdefault(key, descriptor) != descriptor:  # in one step: several threads ask at once
            raise OSError(errno.EACCES, "Permission denied")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Msvcrt:
    fake = Msvcrt()
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", fake)  # type: ignore[arg-type]
    return fake


def test_the_second_waits_for_the_first_and_the_file_stands_where_it_stood(
    windows: Msvcrt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    first, second = (os.open(path, os.O_RDWR) for _ in range(2))
    os.lseek(first, 3, os.SEEK_SET)
    locks.lock(first)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        locks.unlock(first)

    monkeypatch.setattr(locks, "time", SimpleNamespace(sleep=sleep))
    locks.lock(second, shared=True)
    assert waited == [locks.POLL_S]
    assert list(windows.held.values()) == [second]
    assert os.read(first, 2) == b"45"
    os.close(first)
    os.close(second)


def test_the_store_keeps_what_several_write(windows: Msvcrt, tmp_path: Path) -> None:
    from probes.store import Store

    path = tmp_path / "store.jsonl"
    errors: list[Any] = []

    def write(number: int) -> None:
        try:
            for index in range(5):
                Store(path).append(record(f"{number}-{index}"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({entry.key for entry in Store(path).records()}) == 20
    assert windows.held == {}
