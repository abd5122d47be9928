"""Who gets which devices when setups on one GPU and on several wait for them; what no engine runs is never started."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from finetune_planner.app import machine
from planner.core.errors import EnvironmentProblem
from planner.hardware.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, ProbeFailure
from probes.fingerprint import fingerprint
from probes.gpu.evaluate import Prober, mfu_fraction, one_copy
from probes.gpu.executors import DevicePool, LocalExecutor
from probes.gpu.failures import UnsupportedProbe
from probes.gpu.request import ProbeRequest
from probes.store import Store

PATIENCE_S = 600.0
"""What takes this long hangs."""
FOUR = tuple(f"cuda:{index}" for index in range(4))


def test_a_job_gets_neighbours_and_nobody_elses() -> None:
    pool = DevicePool(FOUR)
    assert pool.name(pool.take(1)) == "cuda:0"
    pair = pool.take(2)
    assert pair == (1, 2)
    assert pool.take(1) == (3,)
    pool.give_back(pair)
    assert pool.name(pool.take(2)) == "cuda:1"


def test_a_job_waits_until_enough_neighbours_are_free() -> None:
    pool = DevicePool(FOUR)
    single, pair = pool.take(1), pool.take(2)
    requested = threading.Event()

    def whole() -> tuple[int, ...]:
        requested.set()
        return pool.take(4)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(whole)
        assert requested.wait(PATIENCE_S)
        pool.give_back(single)
        assert not waiting.done()  # two are still taken: it cannot be
        pool.give_back(pair)
        assert waiting.result(PATIENCE_S) == (0, 1, 2, 3)


def test_devices_that_are_no_neighbours_are_no_job() -> None:
    pool = DevicePool(("cuda:0", "cuda:2"))
    assert pool.take(1) == (0,)
    with pytest.raises(UnsupportedProbe, match="2 neighbouring GPUs"):
        pool.take(2)
    assert DevicePool(("cpu",)).take(8) == (0,)


def test_each_device_can_be_waited_for_ahead() -> None:
    pool = DevicePool(("cuda:0",), times=2)
    assert (pool.take(1), pool.take(1)) == ((0,), (0,))


def test_setup_with_more_gpus_than_there_are_is_an_outcome(tmp_path: Path) -> None:
    request = ProbeRequest(model_id="m", config={}, setup=TrainSetup(num_gpus=4, parallel="ddp"), device="cuda:0")
    with LocalExecutor(("cuda:0", "cuda:1"), work_dir=tmp_path) as executor:
        outcome = executor.submit(request).result(PATIENCE_S)
    assert isinstance(outcome, ProbeFailure)
    assert outcome.kind is FailureKind.UNSUPPORTED
    assert "4 neighbouring GPUs" in outcome.message


def test_setup_that_no_engine_runs_is_answered_without_a_process(tmp_path: Path) -> None:
    int8 = TrainSetup(method="qlora", quantization="int8", num_gpus=2, parallel="fsdp2")
    model = resolve_model("Qwen/Qwen2.5-0.5B")
    with LocalExecutor(("cpu",), work_dir=tmp_path / "work") as executor:
        store = Store(tmp_path / "store.jsonl")
        prober = Prober(model=model, gpu=None, executor=executor, store=store, device="cpu")
        outcome = prober(int8)
        device_map = prober(TrainSetup(num_gpus=2, parallel="device-map"))
    assert isinstance(outcome, ProbeFailure)
    assert outcome.kind is FailureKind.UNSUPPORTED
    assert "int8" in outcome.message
    assert isinstance(device_map, ProbeFailure)
    assert list(tmp_path.iterdir()) == []  # no process, and nothing to remember


def test_utilisation_of_a_job_is_that_of_one_copy() -> None:
    model, gpu = resolve_model("Qwen/Qwen2.5-0.5B"), find_gpu("h200")
    alone = TrainSetup(micro_batch_seqs=4)
    eight = alone.replace(num_gpus=8, parallel="fsdp2", reshard_after_forward=False)
    assert one_copy(eight) == alone
    assert mfu_fraction(model, gpu, eight, 1.0) == mfu_fraction(model, gpu, alone, 1.0)
    staged = alone.replace(num_gpus=8, parallel="none", pipeline_degree=8)
    assert mfu_fraction(model, gpu, staged, 1.0) is None


def test_key_of_a_job_knows_the_library_that_wraps_it() -> None:
    from dataclasses import replace

    from probes.gpu.environment import read_environment

    here = read_environment("cpu", None)
    other = replace(here, libraries={**here.libraries, "accelerate": "0.0"})
    alone = ProbeRequest(model_id="m", config={}, setup=TrainSetup(), device="cpu")
    job = replace(alone, setup=TrainSetup(num_gpus=2, parallel="ddp"))
    assert fingerprint(alone, here) != fingerprint(alone, other)  # transformers asks accelerate on one GPU too
    assert fingerprint(job, here) != fingerprint(job, other)
    assert fingerprint(job, here) != fingerprint(alone, here)


def test_devices_of_a_job_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.gpu.executors.local_devices", lambda: FOUR)
    assert machine.job_devices("cpu", 2) == ("cpu",)
    assert machine.job_devices(None, 1) == ("cuda:0",)
    assert machine.job_devices(None, 4) == FOUR
    assert machine.job_devices("cuda:2", 2) == ("cuda:2", "cuda:3")
    with pytest.raises(EnvironmentProblem, match=r"--gpus 2: this machine has 4 GPUs, counted from cuda:3"):
        machine.job_devices("cuda:3", 2)
