"""The contact with a lent GPU: children in turn, readings in forks, profiles condensed, all on a CPU."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contact import operators
from benchmarks.contact.staged import Stage
from benchmarks.contact.steps import CASES
from planner.core.units import GIB, MIB
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind
from probes.gpu.failures import classify_exception
from probes.gpu.request import Limits

pytestmark = pytest.mark.processes

STAGED = """
import sys, time
from benchmarks.contact.staged import wait_for_turn
began = time.time()
wait_for_turn()
print(began, time.time(), file=open(sys.argv[1], "w"))
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


def test_children_wait_for_their_turn_and_end_at_their_limit(tmp_path: Path) -> None:
    def child(name: str, seconds: str, status: str, limit_s: float) -> Any:
        return name, ("-c", STAGED, str(tmp_path / name), seconds, status), {}, limit_s

    children = [child("good", "0.1", "0", 60.0), child("broken", "0", "3", 60.0), child("hangs", "600", "0", 3.0)]
    ended = Stage(tmp_path / "log.txt").run(children, time.monotonic() + 300)
    assert [(process.name, process.status) for process in ended] == [("good", 0), ("broken", 3), ("hangs", 124)]
    began = {name: [float(word) for word in (tmp_path / name).read_text().split()] for name in ("good", "broken")}
    assert began["broken"][1] >= began["good"][1] + 0.1  # begun ahead, run after
    assert Stage(tmp_path / "log.txt").run(children, time.monotonic()) == []


def test_every_case_is_a_setup_that_can_exist() -> None:
    for case in CASES.values():
        fields = {key: value for key, value in case["setup"].items() if key != "objective"}
        assert TrainSetup(**fields).seq_len_tokens > 0


def test_a_profile_is_condensed_to_who_took_how_long() -> None:
    """Two operators, one within the other, two kernels of the inner one and one that no operator launched."""
    operator = {"ph": "X", "cat": "cpu_op", "tid": 1}
    kernel = {"ph": "X", "cat": "kernel", "tid": 7, "name": "gemm"}
    shapes = {"External id": 2, "Input Dims": [[2, 3]], "Input type": ["bf16"]}
    events = [
        {**operator, "name": "linear", "ts": 0, "dur": 10, "args": {"External id": 1}},
        {**operator, "name": "mm", "ts": 2, "dur": 6, "args": shapes},
        {"ph": "X", "cat": "cuda_runtime", "tid": 1, "name": "cudaLaunchKernel", "ts": 3, "dur": 1, "args": {}},
        {**kernel, "ts": 20, "dur": 5, "args": {"External id": 2}},
        {**kernel, "ts": 30, "dur": 7, "args": {"External id": 2}},
        {**kernel, "name": "triton", "ts": 35, "dur": 4, "args": {"grid": [8, 1, 1]}},
    ]  # fmt: skip
    profile = operators.condensed(events)
    assert profile["kernels"] == [
        ["mm", "[[2, 3]]", '["bf16"]', "gemm", 2, 12],
        ["", "[8, 1, 1]", "[]", "triton", 1, 4],
    ]
    assert profile["host"] == {"cudaLaunchKernel": [1, 1], "linear": [1, 4], "mm": [1, 5]}
    assert profile["spans"]["wall_us"] == 39
    assert profile["spans"]["device_busy_us"] == 14  # the last two overlap


def test_what_cudnn_says_on_a_full_device_is_out_of_memory() -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert classify_exception(error, lambda: True)[0] is FailureKind.OUT_OF_MEMORY
    assert classify_exception(error, lambda: False)[0] is FailureKind.CRASHED


def test_a_stand_in_card_holds_its_own_context() -> None:
    """Before: 0.17 of an H200 were the allocator's, and a 4090's 23.51 GiB include the context."""
    limits = Limits(memory_bytes=int(23.51 * GIB))
    assert limits.allocator_bytes == int(23.51 * GIB) - 512 * MIB
    assert Limits().allocator_bytes is None
