"""The measuring commands from the outside: exit codes, stdout as data, messages with a way out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_planner.cli.app import run
from finetune_planner.cli.probe import outcome_lines
from planner.core.errors import EnvironmentProblem
from planner.setup.outcome import FailureKind, Fidelity, Measurement, ProbeFailure
from probes.gpu.environment import read_environment
from probes.gpu.request import ProbeRequest
from probes.store import Store

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
FLAGS = ["--device", "cpu", "--rank", "2", "--seq-len", "32", "--measure-seconds", "0.3", "--limit", "600"]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.slow
def test_probe_measures_stores_and_then_answers_at_once(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "s.jsonl"
    command = ["probe", tiny, *FLAGS, "--store", str(store), "--json=full"]
    assert run(command) == 0
    first = answer(capsys)
    assert first["from_store"] is False
    assert first["outcome"]["layers_measured"] == [2, 4, 6]
    assert first["outcome"]["peak_allocated_bytes"] > 0
    assert run(command) == 0
    second = answer(capsys)
    assert second["from_store"] is True
    assert second["outcome"] == first["outcome"]
    assert len(Store(store).records()) == 1
    assert run([word for word in command if word != "--json=full"]) == 0
    assert ", step " in capsys.readouterr().out
    assert run(["store", "show", "--store", str(store)]) == 0
    assert answer(capsys)["measurements"] == 1
    exported = tmp_path / "e.jsonl"
    assert run(["store", "export", str(exported), "--store", str(store)]) == 0
    capsys.readouterr()
    assert run(["store", "import", str(exported), "--store", str(tmp_path / "other.jsonl")]) == 0
    assert answer(capsys)["added"] == 1


def test_a_store_that_is_not_there_costs_no_earlier_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, typo = tmp_path / "e.jsonl", str(tmp_path / "typo.jsonl")
    kept.write_text("what was exported before\n")
    assert run(["store", "export", str(kept), "--store", typo]) == 3
    assert kept.read_text() == "what was exported before\n"
    assert run(["store", "show", "--store", typo]) == 3
    assert capsys.readouterr().err.count("typo.jsonl") == 2


def test_an_outcome_for_a_person_says_where_it_is_from_and_how_often_it_was_timed() -> None:
    late = ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.TIMEOUT, message="no result within 15 s")
    assert outcome_lines(late) == ["timeout: no result within 15 s"]
    (line,) = outcome_lines(late, from_store=True)
    assert "from the store; --again or a longer --limit" in line
    once = Measurement(
        level=Fidelity.PROBE,
        peak_allocated_bytes=1,
        peak_reserved_bytes=1,
        peak_device_bytes=1,
        phase_peaks_bytes={"backward": 2, "forward": 1},  # as the store sorts them
        step_times_s=(0.5,),
        tokens_per_step=32,
        layers_measured=(2, 4),
        environment=read_environment("cpu", None),
    )
    text = "\n".join(outcome_lines(once))
    assert "(one step)" in text
    assert text.index("forward") < text.index("backward")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without a GPU answers")
def test_probe_without_a_gpu_says_what_to_do(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", tiny]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no NVIDIA GPU" in captured.err
    assert "plan doctor" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "--device must be"),
        (["--device", "cpu", "--micro-batch", "0"], "micro-batch"),
        (["--device", "cpu", "--memory-gib", "-1"], "--memory-gib"),
        (["--device", "cpu", "--limit", "0"], "time limits"),
        (["--device", "cpu", "--limit", "nan"], "time limits"),
        (["--device", "cpu", "--partition", "gpu"], "--partition is for jobs"),
        (["--device", "cpu", "--method", "full", "--rank", "8"], "rank"),
    ],
)
def test_probe_refuses_nonsense(words: list[str], message: str, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", tiny, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.usefixtures("warm_children")
@pytest.mark.slow
def test_confirm_runs_a_written_plan_at_full_depth(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The setup is read back from the emitted launch file, run whole, and its live memory held to the dry run's."""
    out = str(tmp_path / "plan")
    plan_request = [
        "--gpu", "rtx-4090", "--seq-len", "64", "--global-batch", "4", "--method", "lora", "--rank", "4", "--no-probe",
        "--no-extra-packages",
    ]  # fmt: skip
    assert run([tiny, *plan_request, "--out", out]) == 0
    capsys.readouterr()
    where = ["--device", "cpu", "--measure-seconds", "0.3", "--limit", "600", "--store", str(tmp_path / "s.jsonl")]
    code = run(["confirm", out, "--target", "trl", *where, "--json=full"])
    document = answer(capsys)
    assert document["outcome"]["level"] == "confirm"
    assert document["outcome"]["layers_measured"] == [TINY["num_hidden_layers"]]
    assert document["promise"]["level"] in ("formula", "dry_run")
    assert document["speed_miss_fraction"] is None
    assert code == (0 if document["kept"] else 1)
    assert run(["confirm", out, "--target", "no-such-target", *where]) == 2
    assert "no launch file" in capsys.readouterr().err


def test_a_search_ends_at_the_first_fault_of_the_machine(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: nine probes met the same missing driver, all were stored as facts about setups, with exit code 0."""
    requests: list[ProbeRequest] = []

    def no_driver(request: ProbeRequest, **kwargs: object) -> ProbeFailure:
        requests.append(request)
        return ProbeFailure(level=request.level, kind=FailureKind.MACHINE, message="torch finds no usable driver")

    monkeypatch.setattr("probes.gpu.executors.run_probe", no_driver)
    store = tmp_path / "s.jsonl"
    plan_request = [tiny, "--gpu", "rtx-4090", "--seq-len", "32", "--global-batch", "4", "--method", "lora"]
    assert run(["tune", *plan_request, "--device", "cpu", "--no-dry-run", "--store", str(store)]) == 3
    assert "this machine cannot measure: torch finds no usable driver" in capsys.readouterr().err
    assert len(requests) == 1
    assert Store(store).records() == ()


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_search_probes_as_jobs_of_a_cluster(
    device: str | None, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This machine's GPUs are not asked for: the job gets its node's first one."""
    made: list[tuple[Path, object]] = []

    class Jobs:
        def __init__(self, folder: Path, *, parameters: object) -> None:
            made.append((folder, parameters))

        def environment(self, device: str, gpu_key: str | None) -> None:
            raise EnvironmentProblem(f"no job on {device} of {gpu_key}")

        def close(self) -> None:
            pass

    monkeypatch.setattr("probes.gpu.executors.SubmititExecutor", Jobs)
    words = ["tune", tiny, "--seq-len", "32", "--global-batch", "4", "--method", "lora", "--no-dry-run"]
    words += ["--slurm", str(tmp_path), "--partition", "gpu", "--store", str(tmp_path / "s.jsonl")]
    assert run(words) == 2
    assert "--gpu NAME" in capsys.readouterr().err
    assert run([*words, "--gpu", "rtx-4090", *(["--device", device] if device else [])]) == 3
    message = "no job on cpu of None" if device else "no job on cuda:0 of rtx-4090"
    assert message in capsys.readouterr().err
    assert made == [(tmp_path, {"slurm_partition": "gpu"})]
