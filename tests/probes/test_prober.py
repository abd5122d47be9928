"""Executors, `evaluate` and confirmation: what is known, several devices, cluster jobs, promises."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moved_clock import PATIENCE_S, becomes

from planner.core.errors import EnvironmentProblem
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, Measurement, ProbeFailure
from probes.confirm import Promise, compare, confirm
from probes.gpu.evaluate import Prober, mfu_fraction
from probes.gpu.executors import LocalExecutor, SubmititExecutor
from probes.gpu.request import Limits
from probes.gpu.runner import ProbeStopped
from probes.store import Store

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
ARGV = (sys.executable, str(Path(__file__).with_name("fault_worker.py")))


def model(name: str = "tiny", **config: Any) -> ModelSpec:
    return ModelSpec(
        model_id=name,
        model_type="llama",
        built_class="LlamaForCausalLM",
        hidden_size=8,
        vocab_size=16,
        max_position_embeddings=None,
        layer_kinds=(),
        layer_order=(),
        embeddings=(),
        head=None,
        tied=False,
        config={"model_type": name, **config},
    )


def prober(tmp_path: Path, executor: LocalExecutor, spec: ModelSpec | None = None, **changes: Any) -> Prober:
    values: dict[str, Any] = {"limits": Limits(time_s=PATIENCE_S), "device": "cpu", **changes}
    return Prober(model=spec or model(), gpu=None, executor=executor, store=Store(tmp_path / "s.jsonl"), **values)


def local(tmp_path: Path, **changes: Any) -> LocalExecutor:
    return LocalExecutor(("cpu",), work_dir=tmp_path / "work", argv=ARGV, **changes)


# evaluate


def test_prober_measures_once_and_then_remembers(tmp_path: Path) -> None:
    with local(tmp_path) as executor:
        evaluate = prober(tmp_path, executor)
        first, second = evaluate(TrainSetup()), evaluate(TrainSetup())
    assert isinstance(first, Measurement)
    assert second == first
    with local(tmp_path, ahead=0) as executor:  # another process later
        assert prober(tmp_path, executor)(TrainSetup()) == first
    assert len(Store(tmp_path / "s.jsonl").records()) == 1


def side_by_side(evaluate: Prober, setups: list[TrainSetup]) -> dict[TrainSetup, Measurement | ProbeFailure]:
    """Outcomes of several setups, all asked at once."""
    futures = {setup: evaluate.submit(setup) for setup in setups}
    return {setup: evaluate.finish(setup, future) for setup, future in futures.items()}


def test_probes_asked_at_once_are_all_answered_and_failures_stored(tmp_path: Path) -> None:
    setups = [TrainSetup(micro_batch_seqs=size) for size in (1, 2, 4)]
    with local(tmp_path, ahead=1) as executor:
        outcomes = side_by_side(prober(tmp_path, executor, model(fault="unsupported")), setups)
    assert set(outcomes) == set(setups)
    assert all(
        isinstance(outcome, ProbeFailure) and outcome.kind is FailureKind.UNSUPPORTED for outcome in outcomes.values()
    )
    assert len(Store(tmp_path / "s.jsonl").records()) == 3


def test_mfu_counts_needed_operations_over_the_data_sheet() -> None:
    """Llama-3.2-1B, full fine-tuning, 2048 tokens: 6 x 1.236 B matmul weights x tokens (the tied head counts, the
    lookup does not) plus attention, over time and 989 TFLOP/s."""
    from planner.hardware.gpus import find_gpu
    from planner.models.resolve import resolve_model

    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", seq_len_tokens=2048)
    gpu = find_gpu("h200")
    mfu = mfu_fraction(resolve_model("meta-llama/Llama-3.2-1B"), gpu, setup, step_time_s=0.05)
    assert gpu.bf16_flops_per_s is not None
    weights_only = 6 * 1_235_814_400 * 2048 / 0.05 / gpu.bf16_flops_per_s
    assert mfu == pytest.approx(weights_only, rel=0.12)
    assert mfu is not None
    assert mfu > weights_only * 0.99


# executors


def test_local_executor_runs_one_probe_per_device_at_a_time(tmp_path: Path) -> None:
    """On three devices three probes meet; on one device each waits for the others in vain."""
    setups = [TrainSetup(micro_batch_seqs=size) for size in (1, 2, 3)]
    met = {}
    for devices, patience_s in ((("cpu",), 0.2), (("cpu", "cpu", "cpu"), PATIENCE_S / 2)):
        folder = tmp_path / str(len(devices))
        spec = model(fault="meet", folder=str(folder / "met"), num=3, seconds=patience_s)
        with LocalExecutor(devices, work_dir=folder, argv=ARGV) as executor:
            outcomes = side_by_side(prober(folder, executor, spec), setups)
        met[len(devices)] = [isinstance(outcome, Measurement) for outcome in outcomes.values()]
    assert met == {1: [False] * 3, 3: [True] * 3}


def test_closing_an_executor_kills_what_runs(tmp_path: Path) -> None:
    executor = local(tmp_path)
    pid = tmp_path / "pid"
    future = prober(tmp_path, executor, model(fault="hang", pid_file=str(pid))).submit(TrainSetup())
    assert becomes(pid.exists)  # it hangs for ten minutes from here
    executor.close()
    with pytest.raises(ProbeStopped):
        future.result()
    assert list((tmp_path / "work").iterdir()) == []


def test_submitit_runs_the_same_request_as_a_job(tmp_path: Path) -> None:
    """submitit's own local executor stands where Slurm would: a job process, the runner in it, the child below."""
    with SubmititExecutor(tmp_path / "jobs", cluster="local", argv=ARGV) as executor:
        evaluate = Prober(model=model(), gpu=None, executor=executor, store=Store(tmp_path / "s.jsonl"), device="cpu")
        assert evaluate.environment.device == "cpu"
        assert isinstance(evaluate(TrainSetup()), Measurement)
        crashed = replace(evaluate, model=model("other", fault="segv"))(TrainSetup())
    assert isinstance(crashed, ProbeFailure)
    assert crashed.kind is FailureKind.CRASHED
    assert "SIGSEGV" in crashed.message
    assert len(Store(tmp_path / "s.jsonl").records()) == 2


def test_a_node_that_cannot_start_a_probe_is_the_machines_fault(tmp_path: Path) -> None:
    with SubmititExecutor(tmp_path / "jobs", cluster="local", argv=("/does/not/exist",)) as executor:
        ask = Prober(model=model(), gpu=None, executor=executor, store=Store(tmp_path / "s.jsonl"), device="cpu")
        with pytest.raises(EnvironmentProblem, match="on the node: cannot start"):
            ask(TrainSetup())
    assert Store(tmp_path / "s.jsonl").records() == ()


def test_missing_submitit_is_an_environment_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(EnvironmentProblem, match="submitit is not installed"):
        SubmititExecutor(tmp_path)


def test_without_a_cluster_no_job_runs_here_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="no Slurm answers here"):
        SubmititExecutor(tmp_path / "jobs")


# confirmation


def promise(**changes: Any) -> Promise:
    from planner.setup.outcome import Fidelity

    values = {
        "level": Fidelity.DRY_RUN,
        "peak_allocated_bytes": 3_000,
        "peak_device_bytes": 8_192,
        "tokens_per_s": 4_096.0,
        "memory_band_fraction": 0.05,
        "time_band_fraction": 0.1,
    }
    return Promise(**{**values, **changes})


def test_confirm_runs_full_depth_with_every_micro_batch_and_stores_it(tmp_path: Path) -> None:
    with local(tmp_path) as executor:
        made = prober(tmp_path, executor)
        confirmation = confirm(made, TrainSetup(), promise(), budget_bytes=10_000)
    assert confirmation.kept
    assert confirmation.memory_miss_fraction == 0.0
    assert confirmation.speed_miss_fraction is None  # nobody promised a CPU's speed
    (record,) = Store(tmp_path / "s.jsonl").records()
    assert record.request["depths"] == [0]
    assert record.request["level"] == "confirm"
    assert record.request["limits"]["max_accumulation"] > 1000  # type: ignore[index]


def on_gpu(outcome: Measurement) -> Measurement:
    return replace(outcome, environment=replace(outcome.environment, device="cuda"))


def test_compare_holds_a_gpu_to_device_memory_and_speed(tmp_path: Path) -> None:
    with local(tmp_path) as executor:
        cpu = prober(tmp_path, executor)(TrainSetup())
    assert isinstance(cpu, Measurement)
    with_workspaces = promise(peak_allocated_bytes=cpu.peak_allocated_bytes + 500, workspace_bytes=500)
    assert compare(TrainSetup(), with_workspaces, cpu, budget_bytes=10_000).memory_miss_fraction == 0.0
    outcome = on_gpu(cpu)
    good = compare(TrainSetup(), promise(), outcome, budget_bytes=8_192)
    assert (good.kept, good.memory_miss_fraction, good.speed_miss_fraction) == (True, 0.0, 0.0)  # 2048 tokens in 0.5 s
    broken = compare(TrainSetup(), promise(peak_device_bytes=6_000, tokens_per_s=9_000.0), outcome, budget_bytes=8_000)
    assert not broken.kept
    assert len(broken.reasons) == 3
    failure = ProbeFailure(level=outcome.level, kind=FailureKind.OUT_OF_MEMORY, message="no room")
    assert compare(TrainSetup(), promise(), failure, budget_bytes=8_000).reasons == ("out_of_memory: no room",)
