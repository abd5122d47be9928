"""`plan confirm DIR --run TARGET`: the launch file's own run in the store, in plan.json and in the reports."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.app import machine, running
from finetune_planner.cli import probe
from finetune_planner.cli.app import run
from planner.core.units import MIB
from planner.hardware.gpus import find_gpu
from planner.setup.outcome import FailureKind, Fidelity, Measurement, ProbeFailure
from probes.gpu.request import ProbeRequest
from probes.launched.run import FileExecutor
from probes.store import Store
from reports.plan_json import plan_from_dict, read_plan_json
from tests.reports.factories import make_environment

MODEL = "HuggingFaceTB/SmolLM2-135M"
HERE = make_environment()


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    words = ["--gpu", "rtx-4090", "--no-dry-run", "--method", "lora", "--target", "trl", "--seq-len", "512"]
    assert run([MODEL, *words, "--out", str(tmp_path / "plan")]) == 0
    capsys.readouterr()
    return tmp_path / "plan"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A GPU whose run of the file took what the plan promised, times a factor."""
    seen: list[Any] = []

    def install(speed: float = 1.0, failure: ProbeFailure | None = None) -> list[Any]:
        def ran(self: FileExecutor, request: ProbeRequest) -> Any:
            seen.append((self._file, request))
            if failure is not None:
                return failure
            promised = plan_of(Path(str(seen_folder[0]))).chosen.formula
            return Measurement(
                level=Fidelity.RUN,
                peak_allocated_bytes=promised.peak_allocated_bytes,
                peak_reserved_bytes=promised.peak_reserved_bytes,
                peak_device_bytes=promised.peak_device_bytes + MIB,
                phase_peaks_bytes={},
                step_times_s=(promised.step_time_s / speed,) * 4,
                tokens_per_step=request.setup.tokens_per_step,
                layers_measured=(),
                environment=HERE,
                between_steps_s=0.0,
                program="trl",
            )

        monkeypatch.setattr(FileExecutor, "_run", ran)
        monkeypatch.setattr(FileExecutor, "environment", lambda self, device, gpu_key: HERE)
        monkeypatch.setattr(machine, "job_devices", lambda device, num: ("cuda:0",))
        monkeypatch.setattr(machine, "gpu_of", lambda name, device: find_gpu("rtx-4090"))
        return seen

    seen_folder: list[Path] = []
    before = running.run_target

    def remembered(folder: Path, *args: Any) -> Any:
        seen_folder[:] = [folder]
        return before(folder, *args)

    monkeypatch.setattr(probe, "run_target", remembered)
    return install


def test_a_run_ends_with_its_limit_whatever_it_waits_for(
    folder: Path, on_a_gpu: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights that are written for ever, a device that is never free: nothing that the limit of a command would end."""
    on_a_gpu()
    monkeypatch.setattr(FileExecutor, "_run", lambda self, request: time.sleep(600))
    monkeypatch.setattr(running, "GRACE_S", 0.1)
    begun, how = time.monotonic(), running.HowToRun(num_steps=5, limit_s=0.2, store=tmp_path / "s.jsonl")
    confirmation, _ = running.run_target(folder, read_plan_json(folder), "trl", how)
    assert time.monotonic() - begun < 10
    assert isinstance(confirmation.outcome, ProbeFailure)
    assert confirmation.outcome.kind is FailureKind.TIMEOUT
    assert not (tmp_path / "s.jsonl").exists()


def test_a_run_that_a_scheduler_ends_leaves_no_program_behind(
    folder: Path, on_a_gpu: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGTERM unwinds as Ctrl-C does, past what ends the program, which has a session of its own."""
    on_a_gpu()
    killed: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: killed.append(number))
    monkeypatch.setattr(FileExecutor, "_run", lambda self, request: os.kill(os.getpid(), signal.SIGTERM))
    how = running.HowToRun(num_steps=5, limit_s=60.0, store=tmp_path / "s.jsonl")
    try:
        with pytest.raises(SystemExit):
            running.run_target(folder, read_plan_json(folder), "trl", how)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not killed


def plan_of(folder: Path) -> Any:
    return plan_from_dict(read_plan_json(folder))


def test_the_run_is_the_highest_rung_of_the_plan_and_stays_in_the_store(
    folder: Path, on_a_gpu: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = on_a_gpu(speed=0.9)
    store = tmp_path / "store.jsonl"
    launch = (folder / "launch" / "trl" / "trl-sft.yaml").read_text()
    assert run(["confirm", str(folder), "--run", "trl", "--store", str(store), "--json=full"]) == 0
    answer = json.loads(capsys.readouterr().out)["trl"]
    assert answer["kept"] is True
    assert answer["speed_miss_fraction"] == pytest.approx(1 / 0.9 - 1)
    (file, request) = seen[0]
    assert file.files["launch/trl/trl-sft.yaml"] == launch
    assert file.command.endswith("python -m trl.scripts.sft --config launch/trl/trl-sft.yaml")
    assert (file.model_name, file.dataset_names, file.model_here) == (MODEL, ("YOUR_DATASET",), False)
    assert (request.level, request.gpu_key, request.config["model_type"]) == (Fidelity.RUN, "rtx-4090", "llama")
    plan = plan_of(folder)
    assert plan.chosen.run.level is Fidelity.RUN
    assert plan.chosen.tokens_per_s == pytest.approx(0.9 * plan.chosen.formula.tokens_per_s)
    assert plan.ranked[0].run == plan.chosen.run
    assert (folder / "launch" / "trl" / "trl-sft.yaml").read_text() == launch
    report = (folder / "report.md").read_text()
    assert " run |" in report  # the column of its level
    assert "(run" in report
    (record,) = Store(store).records()
    assert record.outcome.program == "trl"
    capsys.readouterr()
    assert run(["report", str(folder)]) == 0


def test_a_stored_run_corrects_the_next_plan_of_the_card(
    folder: Path, on_a_gpu: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's own store is read by every plan: a run at 0.4 times the promise moves its speed towards that."""
    from finetune_planner.app.levels import answered

    on_a_gpu(speed=0.4)
    assert run(["confirm", str(folder), "--run", "trl"]) == 1
    assert "speed promised" in capsys.readouterr().out
    workload = plan_of(folder).workload
    corrected, fresh = (answered(workload, dry_run=False, history=history) for history in (True, False))
    assert corrected.chosen.formula.tokens_per_s < 0.75 * fresh.chosen.formula.tokens_per_s
    assert any("1 of trl's own runs" in note for note in corrected.notes)


def test_out_of_memory_refutes_the_plan(
    folder: Path, on_a_gpu: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ProbeFailure(
        level=Fidelity.RUN, kind=FailureKind.OUT_OF_MEMORY, message="CUDA out of memory", log_tail="line 1\nline 2"
    )
    on_a_gpu(failure=failed)
    assert run(["confirm", str(folder), "--run", "trl", "--store", str(tmp_path / "s.jsonl")]) == 1
    output = capsys.readouterr().out
    assert "  | line 2" in output
    assert not plan_of(folder).chosen.fits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run", "torchtitan"], "only files that train with transformers' Trainer are watched"),
        (["--run", "hf"], "this plan has no launch file for it"),
        (["--run", "trl", "--steps", "2"], "--steps must be above 2"),
        (["--run", "trl", "--target", "trl"], "give one of them"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["confirm", str(folder), "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_runs_otherwise_is_held_to_its_own_promise(
    on_a_gpu: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Axolotl's kernels were planned: TRL's file is of what TRL runs, LLaMA-Factory's has a dataset_info.json before
    it in the folder."""
    folder = tmp_path / "plan"
    words = ["--gpu", "rtx-4090", "--no-dry-run", "--method", "lora", "--out", str(folder)]
    assert run([MODEL, *words]) == 0
    entry = running.entry_of(read_plan_json(folder))
    workload, chosen = entry.plan.workload, entry.plan.chosen
    planned = running.launched_setup(folder, running.launch_of(entry.extras, "axolotl"), workload.model, chosen.setup)
    assert planned is chosen.setup  # whose dry run is then its promise
    for target in ("trl", "llamafactory"):
        launch = running.launch_of(entry.extras, target)
        setup = running.launched_setup(folder, launch, workload.model, chosen.setup)
        assert running.candidate(workload, setup).formula.peak_device_bytes == launch.peak_device_bytes
    assert launch.peak_device_bytes != chosen.formula.peak_device_bytes
    on_a_gpu()
    capsys.readouterr()
    assert run(["confirm", str(folder), "--run", "trl", "--store", str(tmp_path / "s.jsonl")]) in (0, 1)
    promised = running.launch_of(entry.extras, "trl").peak_device_bytes
    assert f"promised (formula): device {promised / 2**30:.2f} GiB" in capsys.readouterr().out


def test_a_data_set_of_the_users_own_is_left_to_the_file(folder: Path, tmp_path: Path) -> None:
    """Named in `prepare_data.py`, or made before: then nothing is made again."""
    (launch,) = running.entry_of(read_plan_json(folder)).extras.launch
    nobodys = running.launched_file(folder, launch, MODEL, "sft")
    assert (nobodys.data_here, nobodys.dataset_names, nobodys.columns) == (False, ("YOUR_DATASET",), "messages")
    file = folder / "launch" / "prepare_data.py"
    file.write_text(file.read_text().replace("YOUR_DATASET", "../rows"))
    with_rows = running.launched_file(folder, launch, MODEL, "sft")
    assert (with_rows.data_here, with_rows.dataset_names) == (True, ())
    assert with_rows.prepare == "python launch/prepare_data.py tokens"
    made = folder / "launch" / "data" / "tokens"
    made.mkdir(parents=True)
    (made / "train.parquet").write_bytes(b"\xff")
    ready = running.launched_file(folder, launch, MODEL, "sft")
    assert (ready.prepare, ready.data_here, set(ready.links)) == ("", True, {"launch/data"})
    assert ready.files == with_rows.files
    (tmp_path / "tiny").mkdir()
    bare = running.launched_file(folder, replace(launch), str(tmp_path / "tiny"), "sft")
    assert (bare.model_name, bare.model_here) == (running.STAND_IN, False)
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"")
    full = running.launched_file(folder, launch, str(tmp_path / "tiny"), "sft")
    assert (full.model_name, full.model_here) == ("../tiny", True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("warm_children")
def test_trl_really_runs_the_file_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal on the CPU from the command line on: random weights, texts, the watcher, TRL's own trainer."""
    pytest.importorskip("trl")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # else its programs run, which start cold
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", **shape, "num_key_value_heads": 1, "vocab_size": 1024}
    (tiny / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    words = [str(tiny), "--gpu", "rtx-4090", "--no-dry-run", "--kernels", "eager", "--seq-len", "32"]
    assert run([*words, "--global-batch", "2", "--target", "trl", "--out", str(tmp_path / "plan")]) == 0
    capsys.readouterr()
    command = ["confirm", str(tmp_path / "plan"), "--run", "trl", "--device", "cpu", "--steps", "4", "--json=full"]
    assert run([*command, "--store", str(tmp_path / "s.jsonl")]) == 0
    answer = json.loads(capsys.readouterr().out)["trl"]
    assert len(answer["outcome"]["step_times_s"]) == 2
    assert answer["outcome"]["environment"]["libraries"]["trl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan", "s.jsonl", "tiny"]


def test_tune_ends_with_the_run_of_the_first_file_whose_tool_is_here(
    folder: Path, on_a_gpu: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from finetune_planner.cli.probe import confirmed_plan

    on_a_gpu(speed=1.02)
    plan = plan_of(folder)
    after = confirmed_plan(plan, folder, None, tmp_path / "s.jsonl", ends_at=inf)
    assert "the plan held" in capsys.readouterr().err
    assert after.chosen.run.program == "trl"
    over = confirmed_plan(plan, folder, None, tmp_path / "s.jsonl", ends_at=time.monotonic() + 1.0)
    assert (over is plan, "the budget is over" in capsys.readouterr().err) == (True, True)
    assert plan_of(folder).chosen.run == after.chosen.run
    (folder / "launch" / "trl").rename(folder / "elsewhere")
    document = read_plan_json(folder)
    document["launch"] = []
    (folder / "plan.json").write_text(json.dumps(document))
    assert confirmed_plan(plan, folder, None, tmp_path / "s.jsonl", ends_at=inf) is plan
    assert "no launch file was run" in capsys.readouterr().err
