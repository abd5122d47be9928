"""The contact with a lent GPU: children in turn, readings in forks, profiles condensed, all on a CPU."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.contact import forks as contact_forks
from benchmarks.contact import operators
from benchmarks.contact import readings as contact_readings
from benchmarks.contact import traces as contact_traces
from benchmarks.contact.staged import Stage
from benchmarks.contact.steps import CASES
from planner.core.children import ROOT
from planner.core.units import GIB, MIB
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind
from probes.gpu.failures import classify_exception
from probes.gpu.request import Limits
from tests.fake_nvml import Card, nvml_module

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


def test_an_import_that_initialises_cuda_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on an H200: each fork failed after it, and the readings said that all was well."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="importing torch initialised CUDA"):
        contact_forks.warm_up()


def test_what_cudnn_says_on_a_full_device_is_out_of_memory() -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert classify_exception(error, lambda: True)[0] is FailureKind.OUT_OF_MEMORY
    assert classify_exception(error, lambda: False)[0] is FailureKind.CRASHED


FORKS = """
import sys, time
from benchmarks.contact.forks import run_each

def good():
    yield {"step": "here"}

def broken():
    yield {"step": "before"}
    raise RuntimeError("no such library")

def hangs():
    yield {"step": "begun"}
    time.sleep(600)

found = run_each({"good": (good, 60), "broken": (broken, 60), "hangs": (hangs, float(sys.argv[1]))})
sys.exit(10 + found)
"""


def test_readings_are_forks_that_end_alone() -> None:
    """One that breaks or hangs loses its own later lines and nothing else."""
    run = subprocess.run(
        [sys.executable, "-c", FORKS, "3"], capture_output=True, text=True, timeout=600, cwd=ROOT, check=False
    )
    assert run.returncode == 11, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    ended = {line["reading"]: line["ended"] for line in lines if "ended" in line}
    assert ended == {"good": 0, "broken": 1, "hangs": 124}
    steps = {line["reading"]: line["step"] for line in lines if "step" in line}
    assert steps == {"good": "here", "broken": "before", "hangs": "begun"}
    assert "no such library" in run.stderr


def test_a_stand_in_card_holds_its_own_context() -> None:
    """Before: 0.17 of an H200 were the allocator's, and a 4090's 23.51 GiB include the context."""
    limits = Limits(memory_bytes=int(23.51 * GIB))
    assert limits.allocator_bytes == int(23.51 * GIB) - 512 * MIB
    assert Limits().allocator_bytes is None


# Readings


def test_known_allocations_stand_beside_the_drivers_view(monkeypatch: pytest.MonkeyPatch) -> None:
    used_bytes = [0]

    def empty(size: int, **options: Any) -> Any:
        used_bytes[0] += size
        return SimpleNamespace()

    card = Card("NVIDIA H200", "GPU-1", 143771, used=lambda: used_bytes[0])
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml_module([card]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    matrix = SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: 0.0))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    ones = type("M", (), {"__matmul__": lambda self, other: matrix})()
    monkeypatch.setattr(torch, "ones", lambda *_, **__: ones)
    for name in ("init", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: used_bytes[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (GIB, 2 * GIB))
    readings = list(contact_readings.known())
    grown = [reading for reading in readings if reading["step"] == "allocated"]
    assert [reading["asked_bytes"] for reading in grown] == [64 * MIB, GIB, 5 * GIB]
    assert grown[-1]["v2_used_bytes"] == 64 * MIB + GIB + 5 * GIB
    assert grown[-1]["used_bytes"] - grown[-1]["v2_used_bytes"] == 600 * MIB
    assert json.loads(json.dumps(readings)) == readings


def test_products_go_on_as_long_as_asked_and_say_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(contact_readings, "DEVICE", "cpu")
    monkeypatch.setattr(contact_readings, "SUSTAINED_SHAPE", (8, 4, 16))
    monkeypatch.setattr(contact_readings, "nvml", lambda: contextlib.nullcontext(None))
    monkeypatch.setattr("benchmarks.contact.readings.time.monotonic", lambda: 0.2 * next(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    readings = list(contact_readings.sustained())
    assert len(readings) == 50
    assert readings[-1]["s"] >= contact_readings.SUSTAINED_S
    assert {round(reading["flops_per_s"]) for reading in readings} == {round(2 * 8 * 4 * 16 * 60 / 0.6)}


def test_a_refusal_is_recorded_with_what_the_classifier_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setitem(contact_readings.REFUSALS, "triton", refuse)
    (reading,) = contact_readings.refusal("triton")
    assert reading["kind"] == FailureKind.OUT_OF_MEMORY.value
    assert reading["type"] == "builtins.RuntimeError"
    monkeypatch.setitem(contact_readings.REFUSALS, "triton", lambda: None)
    (reading,) = contact_readings.refusal("triton")
    assert reading["text"] == "it had enough"


def test_a_reading_whose_child_failed_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 every child crashed, and refusals, traces and teardown said that they had ended well."""
    monkeypatch.setattr(contact_readings, "begin", lambda name, lines: len(name))
    monkeypatch.setattr(contact_readings, "end", lambda child, limit_s: int(child == len("refusal:cublas")))
    refusals = contact_readings.refusals()
    assert next(refusals) == {"step": "cublas", "problem": "status 1"}
    with pytest.raises(RuntimeError, match="no reading of cublas, triton"):
        list(refusals)
    lines = [{"step": "lora", "events": ""}, {"step": "full", "problem": "RuntimeError: no"}]
    monkeypatch.setattr(contact_traces, "traces", lambda config, device, base: lines)
    traced = contact_readings.traces()
    assert [next(traced), next(traced)] == lines
    with pytest.raises(RuntimeError, match="no trace of full"):
        next(traced)


def test_a_process_that_died_before_it_held_memory_is_no_teardown(monkeypatch: pytest.MonkeyPatch) -> None:
    def died(name: str, lines: Any) -> int:
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        return child.pid

    monkeypatch.setattr(contact_readings, "begin", died)
    monkeypatch.setattr(contact_readings, "driver_view", dict)
    with pytest.raises(RuntimeError, match="died before it held any"):
        list(contact_readings.teardown())


def test_samples_keep_only_what_changed() -> None:
    samples = [[0.0, 5], [0.1, 5], [0.2, 3], [0.3, 3], [0.4, 3]]
    assert contact_readings.changes(samples) == [[0.0, 5], [0.2, 3], [0.4, 3]]
