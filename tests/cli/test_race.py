"""`plan race`: training files and published defaults against the plan for the same work, predicted or really run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.app import levels, machine
from finetune_planner.app.running import training_file
from finetune_planner.cli import race
from finetune_planner.cli.app import run
from finetune_planner.cli.checking import checked, load
from finetune_planner.cli.race import PUBLISHED
from planner.core.errors import UsageError
from planner.core.units import GIB
from planner.frameworks.readers import ReadConfig, read_config
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.plan_request import PlanRequest
from planner.setup.outcome import Candidate, FailureKind, Fidelity, Measurement, Prediction, ProbeFailure
from probes.gpu.request import ProbeRequest
from probes.launched.run import FileExecutor
from probes.store import Store
from reports.race import Heat, RaceSheet
from tests.reports.factories import make_environment

MODEL = "HuggingFaceTB/SmolLM2-135M"
TRL = f"model_name_or_path: {MODEL}\nuse_peft: true\ndtype: bfloat16\nmax_length: 512\ndataset_name: somebody/rows\n"
AXOLOTL = (
    f"base_model: {MODEL}\nadapter: lora\nlora_r: 16\nlora_target_linear: true\nsequence_len: 512\n"
    "micro_batch_size: 2\ngradient_accumulation_steps: 2\nbf16: auto\n"
    "datasets:\n  - path: rows.jsonl\n    type: chat_template\n"
)
GPU = ["--gpu", "rtx-4090", "--no-dry-run"]
HERE = make_environment()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("trl.yaml").write_text(TRL)
    Path("axolotl.yaml").write_text(AXOLOTL)
    return ["trl.yaml", "axolotl.yaml"]


def raced(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert run(["race", *words, "--json=full"]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_file_races_against_the_plan_for_its_own_work(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """8 and 4 sequences per step are two heats; each plan trains by the file's method, length and batch."""
    answer = raced([*files, *GPU], capsys)
    assert (answer["kind"], answer["level"].partition(".")[0]) == ("race", "Nothing was run: level formula")
    assert [heat["tokens_per_step"] for heat in answer["heats"]] == [8 * 512, 4 * 512]
    for heat, file in zip(answer["heats"], files, strict=True):
        (theirs, plan) = heat["lanes"]
        assert (theirs["label"], theirs["kind"], plan["kind"]) == (file, "file", "plan")
        setup = plan["candidate"]["setup"]
        assert setup["method"] == theirs["candidate"]["setup"]["method"] == "lora"
        assert setup["seq_len_tokens"] == 512
        assert 512 * setup["micro_batch_seqs"] * setup["accumulation_steps"] == heat["tokens_per_step"]
        assert theirs["plan_over_this"] == pytest.approx(plan["tokens_per_s"] / theirs["tokens_per_s"])
        assert (theirs["speed_level"], theirs["candidate"]["run"], plan["plan_over_this"]) == ("formula", None, None)


def test_a_file_has_the_band_that_check_gives_it(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its dry run, or the formula's where that is narrower: two verdicts of one file would contradict each other."""

    def dry_run(candidate: Candidate, *_: object, **__: object) -> Candidate:
        dry = replace(candidate.formula, level=Fidelity.DRY_RUN, memory_band_fraction=0.9, bands={})
        return replace(candidate, dry_run=dry)

    monkeypatch.setattr(levels, "with_dry_run", dry_run)
    monkeypatch.setattr(levels, "dry_run_possible", lambda: "")
    path = Path(files[0])
    (config, model, card), (result, *_) = load(path, "rtx-4090"), checked(path, "rtx-4090", dry_run=True)
    entry = race._Entry(path=path, label=path.name, config=config, model=model)
    lane = race._lane(entry, PlanRequest(seq_len=512).workload(model, card), dry_run=True)
    assert isinstance(lane.candidate.dry_run, Prediction)
    assert lane.candidate.dry_run.memory_band == result.band != (0.9, 0.9)


def test_speeds_of_two_levels_are_compared_by_the_formula_of_both(files: list[str]) -> None:
    """As where the plan takes torch.compile, which no dry run follows."""
    path = Path(files[0])
    config, model, card = load(path, "rtx-4090")
    workload = PlanRequest(seq_len=512).workload(model, card)
    entry = race._Entry(path=path, label=path.name, config=config, model=model)
    lane = race._lane(entry, workload, dry_run=False)
    formula = lane.candidate.formula
    dry = replace(formula, level=Fidelity.DRY_RUN, step_time_s=1.0, tokens_per_s=1.0)
    of_file = replace(lane, candidate=replace(lane.candidate, dry_run=dry))
    faster = replace(formula, tokens_per_s=3 * (formula.tokens_per_s or 0))
    planned = replace(lane, label="the plan", candidate=replace(lane.candidate, formula=faster))
    heat = Heat(workload=workload, plan=plan_workload(workload), planned=planned, lanes=(of_file,))
    assert heat.ratio(of_file) == pytest.approx(3.0)
    assert any("by the formula of both" in sentence for sentence in RaceSheet([heat], "").view()["sentences"])


def test_files_of_the_same_work_share_a_plan_and_a_picture(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--defaults", "trl", "--defaults", "trl-fp32", "--model", MODEL, "--seq-len", "512", *GPU, "--out", "out"]
    assert run(["race", "trl.yaml", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\nthe plan ") == 1
    assert "█" in shown or "#" in shown
    assert "Published: huggingface/trl@" in shown
    page = Path("out/report.html").read_text()
    assert '"comparison-speed-1"' in page
    assert '"race-memory-1"' in page
    assert "TRL, float32&#39;s defaults" in page
    assert "| trl.yaml " in Path("out/report.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing races against the plan"),
        (["--defaults", "trl"], "--defaults are of a model"),
        (["--defaults", "megatron", "--model", MODEL], "no such published defaults"),
        (["trl.yaml", "--seq-len", "64"], "a file says its own"),
        (["trl.yaml", "--device", "cpu"], "--device and --store are of a run"),
        (["trl.yaml", "--run", "--device", "cpu", "--steps", "2"], "--steps must be above 2"),
        (["."], ". is a folder"),
        (["two.yaml", "--run", "--device", "cpu"], "two.yaml is for 2 GPUs: --run is on one"),
    ],
)
def test_what_cannot_race_is_refused(
    words: list[str], message: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("two.yaml").write_text(TRL)
    Path("a.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n")
    assert run(["race", *words, *GPU, *(["--accelerate", "a.yaml"] if "two.yaml" in words else [])]) == 2
    assert message in capsys.readouterr().err


def test_files_for_several_gpus_race_as_they_are_checked(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2}\nmixed_precision: bf16\n"
    )
    words = ["trl.yaml", "--gpu", "2xrtx-4090", "--no-dry-run", "--accelerate", "a.yaml"]
    (heat,) = raced(words, capsys)["heats"]
    theirs, plan = (lane["candidate"]["setup"] for lane in heat["lanes"])
    assert (heat["num_gpus"], theirs["parallel"], theirs["num_gpus"], plan["num_gpus"]) == (2, "zero2", 2, 2)
    assert run(["check", *words, "--json=full"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert heat["lanes"][0]["tokens_per_s"] == pytest.approx(checked["prediction"]["tokens_per_s"])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A GPU on which a file's steps take so long; what has no time runs out of memory."""

    def install(**seconds: float) -> list[Any]:
        seen: list[Any] = []

        def ran(self: FileExecutor, request: ProbeRequest) -> Any:
            seen.append(self._file)
            if "axolotl" not in self._file.target and "prepare" in self._file.prepare:
                name = "plan"
            else:
                name = self._file.target
            if name not in seconds:
                return ProbeFailure(level=Fidelity.RUN, kind=FailureKind.OUT_OF_MEMORY, message="CUDA out of memory")
            return Measurement(
                level=Fidelity.RUN, peak_allocated_bytes=GIB, peak_reserved_bytes=GIB, peak_device_bytes=2 * GIB,
                phase_peaks_bytes={}, step_times_s=(seconds[name],) * 4, tokens_per_step=request.setup.tokens_per_step,
                layers_measured=(), environment=HERE, between_steps_s=0.0, program=self._file.target,
            )  # fmt: skip

        monkeypatch.setattr(FileExecutor, "_run", ran)
        monkeypatch.setattr(FileExecutor, "environment", lambda self, device, gpu_key: HERE)
        monkeypatch.setattr(machine, "pick_devices", lambda device: ("cuda:0",))
        monkeypatch.setattr(machine, "gpu_of", lambda name, device: find_gpu("rtx-4090"))
        return seen

    return install


def test_the_files_and_the_plans_are_run_and_the_runs_decide(
    files: list[str], on_a_gpu: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = on_a_gpu(trl=0.3, plan=0.1)
    answer = raced(["trl.yaml", *GPU, "--run", "--store", "s.jsonl"], capsys)
    (theirs, plan) = answer["heats"][0]["lanes"]
    assert (theirs["speed_level"], theirs["memory_level"], plan["speed_level"]) == ("run", "run", "run")
    assert theirs["plan_over_this"] == pytest.approx(3.0)
    assert answer["level"].startswith("Run by its own tool, 10 steps each")
    assert seen[0].command == "python -m trl.scripts.sft --config trl.yaml"
    assert (seen[0].files["trl.yaml"], seen[0].dataset_names) == (TRL, ("somebody/rows",))
    assert seen[1].command.endswith("--config launch/trl/trl-sft.yaml")
    assert [record.outcome.program for record in Store(Path("s.jsonl")).records()] == ["trl", "trl"]


def test_a_run_that_fails_is_said_and_counts(
    files: list[str], on_a_gpu: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Out of memory is 1; a file that cannot be run is 3; the others go on."""
    on_a_gpu(plan=0.1)
    (theirs, plan) = raced(["trl.yaml", *GPU, "--run", "--store", "s.jsonl"], capsys, code=1)["heats"][0]["lanes"]
    assert (theirs["verdict"], theirs["plan_over_this"]) == ("over", None)
    assert "CUDA out of memory" in theirs["not_run"]
    assert plan["speed_level"] == "run"
    Path("axolotl.yaml").write_text(AXOLOTL.replace("chat_template", "pygmalion"))
    (theirs, _) = raced(["axolotl.yaml", *GPU, "--run", "--store", "s.jsonl"], capsys, code=3)["heats"][0]["lanes"]
    assert "no rows can stand in for data sets of type pygmalion" in theirs["not_run"]


def test_where_nothing_of_the_files_method_fits_another_is_planned(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("large.yaml").write_text(TRL.replace(MODEL, "Qwen/Qwen2.5-14B"))
    (theirs, plan) = raced(["large.yaml", *GPU], capsys)["heats"][0]["lanes"]
    assert (theirs["verdict"], theirs["plan_over_this"]) == ("over", None)
    assert plan["candidate"]["setup"]["method"] == "qlora"


def test_a_plan_on_a_step_profile_is_as_fast_as_the_formula_says(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile has memory alone: the two speeds are the formula's and can be compared."""
    answer = raced(["--defaults", "trl", "--model", "Qwen/Qwen3-8B", "--gpu", "h200", "--no-dry-run"], capsys)
    (theirs, plan) = answer["heats"][0]["lanes"]
    assert (plan["speed_level"], theirs["speed_level"]) == ("formula", "formula")
    assert theirs["plan_over_this"] > 1.2


PROGRAM = """
import argparse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--seqs", type=int)
given = parser.parse_args()
arguments = TrainingArguments(output_dir="o", per_device_train_batch_size=given.seqs, bf16=True)
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
Trainer(model=model, args=arguments, train_dataset=rows()).train()
"""


def test_a_program_is_run_with_its_words_on_its_own_data(
    files: list[str], on_a_gpu: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody says that these fill every sequence: the run is no fact for the store, and the answer says so."""
    Path("mine.py").write_text(PROGRAM)
    assert run(["race", "mine.py", *GPU]) == 3
    assert "--set seq_len=N" in capsys.readouterr().err
    seen = on_a_gpu(hf=0.2, plan=0.1)
    words = ["mine.py", "--args", "--seqs 4", "--set", "seq_len=256", *GPU, "--run", "--store", "s.jsonl"]
    (theirs, _) = raced(words, capsys)["heats"][0]["lanes"]
    assert (seen[0].command, seen[0].data_here) == ("python mine.py --seqs 4", True)
    assert theirs["tokens_per_s"] == 4 * 256 / 0.2
    assert "its own data" in theirs["remark"]
    assert len(list(Store(Path("s.jsonl")).records())) == 1


def read(name: str, text: str) -> tuple[Path, ReadConfig]:
    path = Path(name)
    path.write_text(text)
    return path, read_config(path, model=catalogue.load(MODEL))


def test_what_stands_for_the_data_that_a_file_names(files: list[str]) -> None:
    trl = training_file(*read("t.yaml", TRL + "dataset_train_split: train_sft\neval_strategy: steps\n"))
    assert (trl.dataset_names, trl.columns, trl.splits) == (("somebody/rows",), "messages", ("train_sft", "test"))
    assert set(trl.files) == {"t.yaml", "trl.yaml", "axolotl.yaml"}
    axolotl = training_file(*read("a.yaml", AXOLOTL))
    assert (axolotl.dataset_names, axolotl.columns) == (("rows.jsonl",), "messages")
    assert axolotl.command == "axolotl train a.yaml --launcher python"
    text = PUBLISHED["llamafactory"].text(MODEL, 512).replace("YOUR_DATASET", "identity,alpaca_en_demo")
    factory = training_file(*read("l.yaml", text))
    assert (factory.dataset_names, factory.columns) == (("data/identity", "data/alpaca_en_demo"), "alpaca")
    described = json.loads(factory.files["data/dataset_info.json"])
    assert described == {name: {"file_name": name} for name in ("identity", "alpaca_en_demo")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_defaults_are_files_that_race(name: str, files: list[str]) -> None:
    """Each is read as its tool's, for the model and length asked for; all but Unsloth's can be run."""
    published = PUBLISHED[name]
    path, config = read(published.file, published.text(MODEL, 512))
    assert config.format == name.partition("-")[0]
    assert (config.model_id, config.setup.seq_len_tokens, config.missing) == (MODEL, 512, ())
    assert config.setup.method == ("qlora" if "4bit" in name or name == "unsloth" else "lora")
    if name == "unsloth":
        with pytest.raises(UsageError, match="a unsloth file is not run"):
            training_file(path, config)
    else:
        assert training_file(path, config).dataset_names


def test_a_models_folder_without_weights_is_stood_for(files: list[str]) -> None:
    """And one with weights is named by where it lies, because the run stands in a folder of its own."""
    Path("tiny").mkdir()
    path = Path("t.yaml")
    path.write_text(TRL.replace(MODEL, "tiny"))
    config = read_config(path, model=catalogue.load(MODEL))
    bare = training_file(path, config)
    assert (bare.model_name, bare.model_here) == ("model-with-random-weights", False)
    assert "model_name_or_path: model-with-random-weights" in bare.files["t.yaml"]
    Path("tiny/model.safetensors").write_bytes(b"")
    full = training_file(path, config)
    assert f"model_name_or_path: {Path('tiny').resolve()}" in full.files["t.yaml"]
    assert full.model_here
    path.write_text(TRL)
    with pytest.raises(UsageError, match="does not name tiny"):
        training_file(path, config)
