"""A launch file's own run: what is made for it, how it is watched, what comes of it, and what is said when it fails."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.core.children import ROOT
from planner.core.errors import EnvironmentProblem
from planner.core.units import GIB, MIB
from planner.setup import TrainSetup
from planner.setup.codec import decode
from planner.setup.outcome import FailureKind, Fidelity, Measurement, ProbeFailure
from probes.gpu import worker
from probes.gpu.request import ProbeRequest
from probes.launched import prepare, watch
from probes.launched import run as launched
from probes.launched.run import FileExecutor, LaunchedFile, split_command

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 1024, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
SETUP = TrainSetup(seq_len_tokens=32, micro_batch_seqs=2, accumulation_steps=3, lora_rank=4)
SEEN = {
    "device": "cpu", "step_s": [9.0, 3.0, 2.0, 2.0, 2.2], "between_s": [0.3, 0.2, 0.01, 0.02], "loaded_bytes": 0,
    "peak_resident_bytes": GIB, "python": "3.12", "cuda": "", "libraries": {"trl": "1.16.0"},
}  # fmt: skip
PROGRAM = """import json, os, sys
order = json.loads(os.environ["FINETUNE_PLANNER_WATCH"])
rows = open("YOUR_DATASET/train.jsonl").read().splitlines()
assert len(rows) == 2 * 3 * (order["num_steps"] + 1) + {held_out}, len(rows)
assert os.environ["HF_HUB_OFFLINE"] == os.environ["OWN"] == "1"
assert any(type(one).__name__ == "Watcher" for one in sys.meta_path)
open(os.path.join(order["folder"], "seen-1.json"), "w").write({seen!r})
""".replace("{seen!r}", repr(json.dumps(SEEN))).replace("{held_out}", str(launched.HELD_OUT_ROWS))


def request(device: str = "cpu") -> ProbeRequest:
    return ProbeRequest(model_id="tiny", config=TINY, setup=SETUP, device=device, level=Fidelity.RUN, depths=(0,))


def file(program: str = PROGRAM, **changes: Any) -> LaunchedFile:
    values = {
        "target": "trl",
        "command": f"OWN=1 {sys.executable} launch/train.py",
        "files": {"launch/train.py": program},
        "model_name": "tiny/model",
        "dataset_names": ("YOUR_DATASET",),
        "columns": "messages",
        "model_here": True,
    }
    return LaunchedFile(**{**values, **changes})


def outcome(tmp_path: Path, what: LaunchedFile, *, limit_s: float = 60.0, num_steps: int = 5) -> Any:
    executor = FileExecutor(what, model_bytes=0, num_steps=num_steps, limit_s=limit_s, work_dir=tmp_path)
    return executor.submit(request()).result()


WATCHES = """
import sys
from tests.probes import test_launched as of
found = of.outcome(of.Path(sys.argv[1]), of.file())
assert found.step_times_s, found
print(*sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_who_watches_a_run_holds_nothing_of_the_device(tmp_path: Path) -> None:
    """The first program that watched one kept the model that it had written, 16 GiB of an H200: this has no torch."""
    run = subprocess.run(
        [sys.executable, "-c", WATCHES, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr[-2000:]


def test_a_run_is_a_measurement_of_the_trainers_own_steps(tmp_path: Path) -> None:
    """The first two steps are not counted; what lies between two is; nothing is left of the run's folder."""
    measurement = outcome(tmp_path, file())
    assert isinstance(measurement, Measurement), measurement
    assert (measurement.level, measurement.program, measurement.step_times_s) == (Fidelity.RUN, "trl", (2.0, 2.0, 2.2))
    assert measurement.between_steps_s == 0.02
    assert measurement.step_time_s == pytest.approx(2.02)
    assert measurement.tokens_per_s == pytest.approx(SETUP.tokens_per_step / 2.02)
    assert (measurement.trainer_fraction, measurement.environment.libraries) == (0.0, {"trl": "1.16.0"})
    assert not any("random weights" in note for note in measurement.notes)
    assert any("stood in for the data set" in note for note in measurement.notes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("raise SystemExit(5)", FailureKind.CRASHED, "5"),
        ("import nowhere_to_be_found", FailureKind.MACHINE, "lacks a package: No module named 'nowhere_to_be_found'"),
        ("raise RuntimeError('CUDA out of memory. Tried')", FailureKind.OUT_OF_MEMORY, "out of memory"),
        ("print('done')", FailureKind.UNSUPPORTED, "without a step of transformers' Trainer"),
        ("import time; time.sleep(600)", FailureKind.TIMEOUT, "no 5 steps within the limit"),
    ],
)
def test_a_run_that_fails_or_hangs_is_an_outcome(program: str, kind: FailureKind, words: str, tmp_path: Path) -> None:
    failure = outcome(tmp_path, file(program), limit_s=2.0 if kind is FailureKind.TIMEOUT else 60.0)
    assert isinstance(failure, ProbeFailure)
    assert (failure.kind, words in failure.message) == (kind, True), failure.message


@pytest.mark.parametrize(
    "wrote", ["{", '{"step_s": ["x", 1, 2, 3]}', json.dumps({**SEEN, "step_s": [0.0] * 9}), "\\xff"]
)
def test_what_a_run_wrote_of_itself_and_is_not_that_is_its_crash(wrote: str, tmp_path: Path) -> None:
    failure = outcome(tmp_path, file(f"open('seen/seen-1.json', 'w', encoding='latin-1').write({wrote!r})"))
    assert isinstance(failure, ProbeFailure)
    assert (failure.kind, "cannot be read" in failure.message) == (FailureKind.CRASHED, True), failure.message


def test_the_data_are_made_by_the_folders_own_program_before_the_run(tmp_path: Path) -> None:
    """Its output lies in the run's folder; a failure of it is the run's, and nothing is started after it."""
    made = "open('made', 'w').write('x')"
    extra_files = {"launch/train.py": "open('made')\n" + PROGRAM, "launch/prepare.py": made}
    first = f"{sys.executable} launch/prepare.py"
    assert isinstance(outcome(tmp_path, file(files=extra_files, prepare=first)), Measurement)
    secret = "hf_" + "a1" * 10
    broken = f"print('TOKEN={secret}')\nimport nowhere_at_all"
    failed = outcome(tmp_path, file(files={**extra_files, "launch/prepare.py": broken}, prepare=first))
    assert isinstance(failed, ProbeFailure)
    assert ("TOKEN=" in failed.log_tail, secret in failed.log_tail) == (True, False)
    assert (failed.kind, "nowhere_at_all" in failed.message) == (FailureKind.MACHINE, True)
    (tmp_path / "kept").write_text("")
    linked = file(files={"launch/train.py": "open('data/kept')\n" + PROGRAM}, links={"data": tmp_path})
    assert isinstance(outcome(tmp_path, linked), Measurement)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_cannot_be_started_or_made_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem, match="no-such-program cannot be started"):
        outcome(tmp_path, file(command="no-such-program x"))
    with pytest.raises(EnvironmentProblem, match=r"names '\.\./x', which is not on this machine"):
        outcome(tmp_path, file(model_name="../x", model_here=False))
    monkeypatch.setattr(launched.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    executor = FileExecutor(file(model_here=False), model_bytes=GIB, work_dir=tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"need 1\.00 GiB on disk"):
        executor.submit(request())


def test_the_variables_before_a_command_are_its_environment() -> None:
    assert split_command("A=1 B_2='x y' python -m trl.scripts.sft --lr=2") == (
        ["python", "-m", "trl.scripts.sft", "--lr=2"],
        {"A": "1", "B_2": "x y"},
    )


def test_a_model_with_random_weights_loads_and_its_texts_fill_a_sequence(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "tiny"
    prepare.make_model(TINY, folder)
    prepare.make_tokenizer(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (model.model.norm.weight == 1).all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) <= model.config.vocab_size
    for columns, key in (("text", "text"), ("prompt-completion", "completion"), ("preference", "rejected")):
        ids = tokenizer(prepare.row_of(columns, 9, 40)[key])["input_ids"]
        assert len(ids) >= 40
        assert tokenizer.unk_token_id not in ids
    rows = prepare.make_model({**TINY, "vocab_size": 512}, tmp_path / "tinier")
    prepare.make_tokenizer(tmp_path / "tinier", rows)  # an id without a row stops the run's first step
    assert len(AutoTokenizer.from_pretrained(tmp_path / "tinier")) == 512
    talk = prepare.row_of("messages", 0, 40)["messages"]
    assert len(tokenizer.apply_chat_template(talk, tokenize=True)["input_ids"]) >= 40
    for columns, num_rows, num_words in (("text", 8, 88), ("preference", 9, 48)):
        prepare.make_texts(tmp_path / columns, columns, 9, 40)
        rows = [json.loads(line) for line in (tmp_path / columns / "train.jsonl").read_text().splitlines()]
        long = {row.get("text") or row["chosen"] for row in rows}
        assert (len(long), {len(text.split()) for text in long}) == (num_rows, {num_words})


class Control:
    should_training_stop = False


def test_every_step_is_timed_and_the_last_one_asked_for_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, left = iter(range(100)), []
    monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: float(next(times))))
    monkeypatch.setattr(worker, "leave", lambda code: left.append(True))
    watching = watch.callback_class(object, {"folder": str(tmp_path), "num_steps": 3})()
    control = Control()
    watching.on_train_begin(None, None, control)
    for number in (1, 2, 3):
        assert not control.should_training_stop
        watching.on_step_begin(None, None, control)
        watching.on_step_end(None, None, control)
        assert (tmp_path / watch.PROGRESS).read_text() == str(number)
    assert control.should_training_stop
    watching.on_train_end(None, None, control)
    (seen,) = [json.loads(path.read_text()) for path in tmp_path.glob("seen-*.json")]
    assert (seen["step_s"], seen["between_s"], left) == ([1.0, 1.0, 1.0], [1.0, 1.0], [True])
    assert seen["libraries"]["transformers"]


def test_what_a_gpu_showed_is_written_from_cudas_own_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from tests.fake_nvml import Card, nvml_module

    module = nvml_module([Card("NVIDIA H200", "GPU-1", 143771, used=lambda: 9 * GIB)])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answers: dict[str, Any] = {
        "is_initialized": True,
        "current_device": 0,
        "get_device_name": "NVIDIA H200",
        "max_memory_allocated": 7 * GIB,
        "max_memory_reserved": 8 * GIB,
        "memory_stats": {"num_alloc_retries": 2},
    }
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    seen = watch.memory_seen()
    assert (seen["peak_allocated_bytes"], seen["peak_reserved_bytes"]) == (7 * GIB, 8 * GIB)
    assert seen["used_bytes"] == 9 * GIB + 600 * MIB
    observed = decode(launched.Seen, {**SEEN, **seen})
    measurement = launched.measurement(file(), request("cuda:0"), observed, 600 * MIB)
    assert (measurement.peak_device_bytes, measurement.device_peak_is_nvml, measurement.flags) == (
        9 * GIB,
        True,
        ("allocator-retries",),
    )


def test_a_rehearsal_uses_the_cpu_whatever_the_file_says() -> None:
    class Arguments:
        bf16 = True

        def __post_init__(self) -> None:
            self.seen = self.use_cpu  # type: ignore[has-type]

    watch._use_cpu(SimpleNamespace(TrainingArguments=Arguments))
    made = Arguments()
    made.__post_init__()
    assert made.seen is True
