"""Real jobs of two ranks over gloo on the CPU: DDP and FSDP2 train a tiny model, one measurement comes back."""

import contextlib
import importlib.util
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_worker import measured

from finetune_planner.cli.app import run
from planner.setup import TrainSetup
from planner.setup.codec import evidence_to_dict, outcome_from_dict
from planner.setup.outcome import FailureKind, Measurement, ProbeFailure
from probes.gpu import runner, watch
from probes.gpu.failures import UnsupportedProbe
from probes.gpu.measure import measure
from probes.gpu.process_group import collective_timeout_s, merge
from probes.gpu.request import Limits, ProbeRequest, StatusPipe
from probes.stack.zero import num_trained, zero_config
from tests.whole import WHOLE

pytestmark = pytest.mark.processes

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
LIMITS = Limits(time_s=600, measure_s=0.5, window_steps=1, max_steps=2)
"""A limit far above what the job takes: nothing here is decided by time."""
TOLERANCE = 0.01


def setup(**changes: Any) -> TrainSetup:
    values: dict[str, Any] = {
        "method": "full",
        "lora_rank": 0,
        "precision": "fp32",
        "optimizer": "adamw",
        "seq_len_tokens": 64,
        "micro_batch_seqs": 2,
        "num_gpus": 2,
    }
    return TrainSetup(**{**values, **changes})


def asked(setup: TrainSetup, **changes: Any) -> ProbeRequest:
    return ProbeRequest(model_id="tiny", config=LLAMA, setup=setup, device="cpu", **{"limits": LIMITS, **changes})


@pytest.fixture(scope="module")
def alone() -> Measurement:
    """The same model and step on one device, full depth."""
    return measure(asked(setup(num_gpus=1), depths=(0,)), StatusPipe(None))


def job(setup: TrainSetup, tmp_path: Path, **changes: Any) -> Measurement:
    outcome = runner.run_probe(asked(setup, **changes), work_dir=tmp_path)
    if isinstance(outcome, ProbeFailure):
        log = Path(outcome.log_path).read_text()[-3000:] if outcome.log_path else ""
        raise AssertionError(f"{outcome.kind}: {outcome.message}\n{log}")
    assert list(tmp_path.iterdir()) == []
    assert [name for name, _, _ in sorted(outcome.rank_peaks)] == ["rank 0", "rank 1"]
    assert outcome.rank_peaks[0][2] == outcome.peak_device_bytes  # the worst comes first
    assert outcome.tokens_per_step == setup.tokens_per_step == 2 * setup.accumulation_steps * 2 * 64
    return outcome


def weight_bytes(alone: Measurement) -> int:
    return alone.phase_peaks_bytes["load"]


@pytest.mark.usefixtures("warm_children")
@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="3 CPU seconds; FSDP2 is measured below (TESTS_WHOLE=1)")
def test_ddp_is_measured_at_truncated_depth_and_holds_its_buckets(alone: Measurement, tmp_path: Path) -> None:
    """DDP's buckets are as large as the gradients and there from the start: twice the weights after loading. Extended
    from 2 and 4 layers to 8, and held to one device's full depth."""
    measurement = job(setup(parallel="ddp", accumulation_steps=2), tmp_path)
    assert measurement.layers_measured == (2, 4, 6)
    assert measurement.extrapolation_error_fraction == pytest.approx(0.0, abs=TOLERANCE)
    assert measurement.phase_peaks_bytes["load"] == pytest.approx(2 * weight_bytes(alone), rel=2 * TOLERANCE)
    assert measurement.phase_peaks_bytes["step"] == pytest.approx(
        alone.phase_peaks_bytes["step"] + weight_bytes(alone), rel=2 * TOLERANCE
    )


@pytest.mark.usefixtures("warm_children")
@pytest.mark.slow
def test_fsdp2_is_probed_from_the_command_line_and_holds_half_of_the_states(
    alone: Measurement, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, store = tmp_path / "tiny", str(tmp_path / "store.jsonl")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    job_flags = ["--device", "cpu", "--gpus", "2", "--parallel", "fsdp2"]
    flags = ["--method", "full", "--precision", "fp32", "--optimizer", "adamw", "--seq-len", "64", "--micro-batch", "2"]
    caps = ["--full-depth", "--measure-seconds", "0.5", "--limit", "600", "--store", store, "--json=full"]
    assert run(["probe", str(model), *job_flags, *flags, *caps]) == 0
    outcome = json.loads(capsys.readouterr().out)["outcome"]
    assert outcome["layers_measured"] == [8]
    assert outcome["tokens_per_step"] == 2 * 2 * 64
    phases = outcome["phase_peaks_bytes"]
    assert phases["load"] == pytest.approx(weight_bytes(alone) / 2, rel=2 * TOLERANCE)
    assert phases["step"] < 0.75 * alone.phase_peaks_bytes["step"]
    assert phases["backward"] < alone.phase_peaks_bytes["backward"]
    assert run(["probe", str(model), *job_flags, *flags, *[flag for flag in caps if flag != "--json=full"]]) == 0
    text = capsys.readouterr().out  # at once, from the store
    assert "device peak of each rank: rank" in text
    assert "(from the store)" in text


@pytest.mark.usefixtures("warm_children")
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_zero_is_measured_under_deepspeeds_own_engine(stage: str, alone: Measurement, tmp_path: Path) -> None:
    measurement = job(setup(parallel=stage, accumulation_steps=2), tmp_path, depths=(0,))
    assert measurement.phase_peaks_bytes["step"] < alone.phase_peaks_bytes["step"] + 2 * weight_bytes(alone)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_deepspeeds_configuration_counts_the_whole_model_and_the_whole_batch(stage: str) -> None:
    train_setup = setup(parallel=stage, accumulation_steps=3, precision="bf16-mixed")
    trained = num_trained(LLAMA, train_setup, "sdpa")
    assert trained == 4 * 8 * 64 * 64 * 3 // 4 + 3 * 8 * 64 * 160 + (2 * 8 + 1) * 64 + 2 * 512 * 64
    config = zero_config(train_setup, trained)
    assert config["train_batch_size"] == 2 * 3 * 2  # sequences, accumulation, ranks
    assert config["bf16"] == {"enabled": True}
    assert config["zero_optimization"]["stage"] == int(stage[-1])
    assert config["zero_optimization"]["reduce_bucket_size"] == trained
    assert "offload_optimizer" not in config["zero_optimization"]
    host = zero_config(setup(parallel="zero3", offload="parameters"), trained)["zero_optimization"]
    assert host["offload_param"]["device"] == host["offload_optimizer"]["device"] == "cpu"


@pytest.mark.usefixtures("warm_children")
@pytest.mark.slow
def test_rank_killed_in_the_middle_of_a_step_ends_the_job_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL to rank 1 while both train, step after step without end: its peer fails in a collective, the outcome
    names the one that was killed."""
    killed: list[int] = []

    def kill(text: str, elapsed_s: float) -> None:
        if killed or not text.startswith(("warming up", "timing")):
            return
        for folder in tmp_path.glob("probe-*"):
            for pid in runner.job_processes(str(folder)):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it was there a moment ago
                    if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)

    endless = Limits(time_s=600, measure_s=10_000, window_steps=100_000, max_steps=1_000_000)
    monkeypatch.setattr(watch, "RANK_GRACE_S", 600.0)  # however late torchrun is scheduled to tell who was killed
    request = asked(setup(parallel="ddp"), depths=(0,), limits=endless)
    outcome = runner.run_probe(request, work_dir=tmp_path, on_progress=kill)
    assert killed
    assert isinstance(outcome, ProbeFailure), outcome
    assert outcome.kind is FailureKind.CRASHED, outcome
    assert "rank 1 of 2: killed by SIGKILL" in outcome.message
    assert outcome.log_path is not None
    assert runner.job_processes(str(Path(outcome.log_path).parent)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": "dp"}, "never recommended"),
        ({"parallel": "device-map"}, "take turns"),
        ({"tensor_degree": 2}, "training engine"),
        ({"pipeline_degree": 2, "accumulation_steps": 2}, "training engine"),
    ],
    ids=["dp", "device-map", "tensor", "pipeline"],
)
def test_spread_that_no_probe_runs_is_refused_before_anything_starts(
    changes: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    outcome = runner.run_probe(asked(setup(**changes)), work_dir=tmp_path)
    assert isinstance(outcome, ProbeFailure)
    assert outcome.kind is FailureKind.UNSUPPORTED
    assert words in outcome.message


# One measurement out of many, without processes


def of_rank(peak_bytes: int, **changes: Any) -> Measurement:
    values = {"extrapolation_error_fraction": None, "phase_peaks_bytes": {"load": peak_bytes}, **changes}
    return replace(measured(asked(setup(num_gpus=1))), peak_device_bytes=peak_bytes, **values)


def test_merge_keeps_the_worst_rank_and_every_flag() -> None:
    first = of_rank(100, flags=("unstable",), extrapolation_error_fraction=0.001, copy_bandwidth_bytes_per_s=9.0)
    two = of_rank(300, notes=("seen",), extrapolation_error_fraction=-0.004, copy_bandwidth_bytes_per_s=7.0)
    three = of_rank(200, flags=("power-capped",), device_peak_is_nvml=False)
    merged = merge([first, two, three])
    assert merged.peak_device_bytes == merged.phase_peaks_bytes["load"] == 300
    assert merged.rank_peaks == (("rank 1", 1, 300), ("rank 2", 1, 200), ("rank 0", 1, 100))
    assert merged.flags == ("power-capped", "unstable")
    assert "seen" in merged.notes
    assert merged.extrapolation_error_fraction == -0.004
    assert merged.copy_bandwidth_bytes_per_s == 7.0
    assert not merged.device_peak_is_nvml
    assert merged.step_times_s == two.step_times_s
    assert outcome_from_dict(evidence_to_dict(merged)) == merged
    old = {name: value for name, value in evidence_to_dict(merged).items() if name != "rank_peaks"}
    assert outcome_from_dict(old) == replace(merged, rank_peaks=())  # a record of before there were ranks


def test_offloading_is_refused_on_the_cpu() -> None:
    request = asked(setup(parallel="fsdp2", offload="parameters"))
    with pytest.raises(UnsupportedProbe, match="needs a GPU"):
        measure(request, StatusPipe(None))


def test_job_started_with_another_number_of_processes_is_refused() -> None:
    with pytest.raises(UnsupportedProbe, match="needs as many ranks, got 1"):
        measure(asked(setup(parallel="ddp")), StatusPipe(None))


def test_collectives_end_before_the_probe_does() -> None:
    assert collective_timeout_s(180.0) == 90.0
    assert collective_timeout_s(1.0) == 5.0
    assert collective_timeout_s(100_000.0) == 600.0
