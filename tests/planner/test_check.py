"""`plan check`: verdict with its error band, changes by gain, exit codes, and `--fix` that changes nothing else."""

import io
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gathered import rows as gathered_rows
from finetune_planner.cli.app import run
from finetune_planner.improvement import improve
from planner.core.units import GIB, gib
from planner.frameworks.exporters import EXPORTERS
from planner.frameworks.readers import canonical, read_text
from planner.frameworks.readers.rewrite import rewrite
from planner.frameworks.readers.types import EXPANDABLE, UpperBound
from planner.frameworks.tools import changed_fields, tool_of
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.check import (
    GATHERED_STAY,
    LENGTHS_LEAVE,
    LENGTHS_ON_FIXED_SEGMENTS,
    PACKED_LEAVE,
    Verdict,
    band_of,
    certain_bytes,
    check,
    judge,
    left_by_lengths_bytes,
    summary,
    table_bytes,
    with_extras,
)
from planner.planning.predict import predict
from planner.planning.single_changes import single_changes, speedup
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_request
from planner.setup.outcome import Fidelity, Prediction, sides_of
from reports.check import NAMES
from tests.planner.launch_sweep import request, setups
from tests.whole import some

MODEL = catalogue.load("Qwen/Qwen2.5-1.5B")
assert MODEL is not None
GPU = find_gpu("rtx-4090")
RECORDED = Path(__file__).parents[2] / "benchmarks" / "data" / "measured_single_gpu.jsonl"

TRL = """\
# our run   (keep this)
model_name_or_path: "Qwen/Qwen2.5-1.5B"   # the model
use_peft: yes
lora_target_modules:
  - q_proj   # with
  - v_proj
lora_r: 16
dtype: bfloat16
per_device_train_batch_size: 16      # too much
gradient_accumulation_steps: 2
max_length: 4096
attn_implementation: eager
learning_rate: 2e-4

gradient_checkpointing: false
dataset_name: some/data
"""
AXOLOTL = """\
base_model: Qwen/Qwen2.5-1.5B
adapter: lora
lora_r: 16
lora_target_linear: true
datasets: [{path: a/b, type: alpaca}]   # one line
sequence_len: 8192
micro_batch_size: 8
gradient_accumulation_steps:
bf16: auto
# last words
"""
LLAMAFACTORY = """\
### model
model_name_or_path: Qwen/Qwen2.5-1.5B
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
template: qwen
dataset: x
cutoff_len: 8192
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
bf16: true
"""
UNSLOTH = """\
model: Qwen/Qwen2.5-1.5B
training:
  max_seq_length: 16384   # long
  batch_size: 16
lora:
  lora_r: 32
"""
SCRIPT = '''\
"""Our script."""
from transformers import AutoModelForCausalLM, TrainingArguments
import torch

NAME = "Qwen/Qwen2.5-1.5B"
MAX_LENGTH = 4096
model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16)
args = TrainingArguments(
    "out",
    per_device_train_batch_size=8,  # naïve
    gradient_accumulation_steps=4, learning_rate=1e-5,
)
'''
FILES = {
    "trl.yaml": TRL,
    "axolotl.yml": AXOLOTL,
    "llamafactory.yaml": LLAMAFACTORY,
    "unsloth.yaml": UNSLOTH,
    "train.py": SCRIPT,
}


Checked = Callable[..., tuple[int, str, str]]


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Checked:
    """(exit code, what is printed, what is said beside it) of the command for a file of this text."""

    def answer(text: str, *options: str, name: str = "trl.yaml", gpu: str = "rtx-4090") -> tuple[int, str, str]:
        (tmp_path / name).write_text(text)
        code = run(["check", str(tmp_path / name), "--gpu", gpu, "--no-dry-run", *options])
        return code, *capsys.readouterr()

    return answer


def prediction_of(setup: TrainSetup) -> Prediction:
    return predict(MODEL, GPU, setup)


def of(peak_bytes: int) -> Prediction:
    return Prediction(
        level=Fidelity.FORMULA,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=peak_bytes,
        peak_device_bytes=peak_bytes,
        peak_phase="loss",
        phase_peaks_bytes={},
        terms=(),
        memory_band_fraction=0.08,
    )


def test_judge_is_uncertain_exactly_where_the_band_straddles_the_budget() -> None:
    assert judge(of(1000), 1100, 0.1) is Verdict.FITS
    assert judge(of(1000), 1099, 0.1) is Verdict.UNCERTAIN
    assert judge(of(1000), 900, 0.1) is Verdict.UNCERTAIN
    assert judge(of(1000), 899, 0.1) is Verdict.DOES_NOT_FIT
    cached = replace(of(1000), peak_allocated_bytes=800)  # PyTorch gives 200 back before it runs out
    verdicts = [judge(cached, budget, 0.1) for budget in (1100, 899, 719)]
    assert verdicts == [Verdict.FITS, Verdict.UNCERTAIN, Verdict.DOES_NOT_FIT]


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_read_and_answered(name: str) -> None:
    config = read_text(FILES[name], name, model=MODEL)
    result = check(config, MODEL, GPU, 20 * GIB, prediction_of)
    assert result.prediction.peak_device_bytes > 0
    assert config.model_id == "Qwen/Qwen2.5-1.5B"
    assert result.exit_code in (0, 1, 3)


def test_no_change_touches_the_effective_batch() -> None:
    for setup in setups()[:100]:
        for label, after, _ in single_changes(setup, GPU, MODEL):
            assert after.global_batch_seqs == setup.global_batch_seqs, label
            assert after != setup


def test_no_setting_takes_away_the_whole_logits_of_preferences() -> None:
    """Axolotl's DPO was told chunked_cross_entropy, which its supervised loss alone follows."""
    pairs = TrainSetup(objective="dpo", loss="full", stack="axolotl")
    for setup, offered in ((pairs, set()), (pairs.replace(objective="sft"), {"chunked", "liger"})):
        losses = {after.loss for _, after, _ in single_changes(setup, GPU, MODEL)}
        assert losses == offered | {"full"}


def test_what_padding_takes_back_is_no_gain() -> None:
    """The plan takes micro-batch 1 for it; check of its file called 2 faster, 1.06 times."""
    model, card = catalogue.load("mistralai/Mistral-7B-v0.3"), find_gpu("a100-80gb")
    one = TrainSetup(seq_len_tokens=4096, accumulation_steps=32, loss="chunked", kernels="liger")
    two, predicted = one.replace(micro_batch_seqs=2, accumulation_steps=16), partial(predict, model, card)
    full = [predicted(setup).tokens_per_s or 0.0 for setup in (one, two)]
    assert full[1] > full[0]
    assert speedup(model, one, two, predicted) < 0.9


def test_changes_come_in_order_of_gain() -> None:
    config = read_text(TRL, "trl.yaml", model=MODEL)
    misfit = check(config, MODEL, GPU, 20 * GIB, prediction_of)
    assert misfit.verdict is Verdict.DOES_NOT_FIT
    fitting = [change for change in misfit.changes if change.verdict is Verdict.FITS]
    assert fitting == list(misfit.changes[: len(fitting)])
    neutral = [change.speedup for change in fitting if not change.changes_training]
    assert neutral == sorted(neutral, reverse=True)
    rest = [change.saves_bytes for change in misfit.changes[len(fitting) :]]
    assert rest == sorted(rest, reverse=True)
    assert all(saved > 0 for saved in rest)
    roomy = check(config, MODEL, GPU, 2000 * GIB, prediction_of)
    assert roomy.verdict is Verdict.FITS
    assert [change.speedup for change in roomy.changes if not change.changes_training] == sorted(
        (change.speedup for change in roomy.changes if not change.changes_training), reverse=True
    )


@pytest.mark.parametrize("name", FILES)
def test_fix_writes_what_reads_back_and_changes_nothing_else(name: str) -> None:
    text = FILES[name]
    config = read_text(text, name, model=MODEL)
    improvement = improve(check(config, MODEL, GPU, 20 * GIB, prediction_of), MODEL, prediction_of)
    setup = improvement.setup
    assert improvement.labels
    assert setup.global_batch_seqs == config.setup.global_batch_seqs
    fixed = rewrite(text, name, tool_of(config.format).edits(config.keys, config.setup, setup, name))
    assert canonical(read_text(fixed, name, model=MODEL).setup) == canonical(setup)
    before, after = text.splitlines(), fixed.splitlines()
    edited = {key.rpartition(".")[2] for key in tool_of(config.format).edits(config.keys, config.setup, setup, name)}
    for line in before:
        key = line.strip().split(":")[0].split("=")[0].strip()
        if key not in edited and not any(f"{setting}=" in line for setting in edited):
            assert line in after, line
    for word in ("# too much", "# our run   (keep this)", "# last words", "### model", "# long", "# naïve"):
        assert (word in text) == (word in fixed)


@pytest.mark.parametrize("target", ["trl", "axolotl", "llamafactory", "hf"])
def test_any_change_of_the_sweep_can_be_written_or_is_said_not_to(target: str) -> None:
    """Every in-place change of many emitted files, written and read back, gives exactly the changed setup."""
    written = 0
    for planned in some([setup for setup in setups() if setup.num_gpus == 1], 12):
        launch = EXPORTERS[target](request(planned, model=MODEL))
        if launch.refused:
            continue
        name = Path(launch.files[0].path).name
        config = read_text(launch.files[0].text, name, model=MODEL)
        for change in check(config, MODEL, GPU, 20 * GIB, prediction_of).changes:
            if change.in_place:
                fixed = rewrite(
                    launch.files[0].text,
                    name,
                    tool_of(config.format).edits(config.keys, config.setup, change.setup, name),
                )
                back = read_text(fixed, name, model=MODEL).setup
                wrong = changed_fields(canonical(back), canonical(change.setup))
                assert not wrong, (planned, change.label, wrong)
                written += 1
    assert written > 20


def test_fix_keeps_windows_line_ends_and_empty_values() -> None:
    text = "a: 1\r\nb:\r\nc: [1,\r\n  2]   # list\r\nd:\r\n  - x\r\n  - y\r\ne: 'q'\r\n"
    fixed = rewrite(text, "x.yaml", {"b": 5, "c": [3], "d": ["z"], "e": "w", "f": True})
    assert (
        fixed == "a: 1\r\nb: 5\r\nc: [3]   # list\r\nd: [z]\r\ne: w\r\n\r\n# added by plan check --fix\r\nf: true\r\n"
    )
    assert yaml.safe_load(fixed) == {"a": 1, "b": 5, "c": [3], "d": ["z"], "e": "w", "f": True}


def test_fix_edits_json_in_place() -> None:
    text = '{\n  "train_micro_batch_size_per_gpu": 8,\n  "zero_optimization": {"stage": 2}\n}\n'
    fixed = rewrite(text, "ds.json", {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4})
    assert json.loads(fixed) == {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 4,
    }
    assert fixed.startswith('{\n  "train_micro_batch_size_per_gpu": 2,\n  "zero')


@pytest.mark.parametrize(("memory_gib", "code"), [("2000", 0), ("4", 1)], ids=["fits", "does not fit"])
def test_the_command_answers_with_exit_codes_and_json(
    tmp_path: Path, checked: Checked, memory_gib: str, code: int
) -> None:
    exit_code, out, _ = checked(TRL, "--memory-gib", memory_gib, "--fix", "--json=full")
    answer = json.loads(out)
    assert exit_code == answer["exit_code"] == code
    assert answer["setup"]["micro_batch_seqs"] == 16
    assert (tmp_path / "trl.yaml").read_text() == TRL
    if answer["fix"]["path"]:
        assert Path(answer["fix"]["path"]) == tmp_path / "trl.fixed.yaml"
        assert "# too much" in (tmp_path / "trl.fixed.yaml").read_text()


def test_the_command_is_uncertain_inside_the_band(checked: Checked) -> None:
    peak = prediction_of(read_text(TRL, "trl.yaml", model=MODEL).setup).peak_device_bytes
    code, out, _ = checked(TRL, "--headroom", "0", "--memory-gib", str(1.02 * peak / GIB))
    assert (code, "may or may not fit" in out) == (3, True)


@pytest.mark.parametrize("width", [60, 80])
def test_the_command_says_each_fact_in_a_line_of_its_own_and_the_file_once(
    checked: Checked, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    origins = json.loads(checked(TRL, "--json=full")[1])["origins"]
    shown = checked(TRL)[1]
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    assert shown.count("trl.yaml") == 1
    read = [line for line in lines[lines.index("Read") + 1 :] if line.startswith("  ")][: len(origins)]
    micro = next(line for line in read if line.split()[0] == "micro-batch")
    assert micro.split()[1:] == ["16", "line", origins["micro_batch_seqs"].removeprefix("trl.yaml:")]
    labels = {line.strip().split("  ")[0] for line in lines}
    for name in set(origins) - {"model"}:
        assert NAMES.get(name, name.replace("_", " ")) in labels


@pytest.mark.parametrize("text", ["{}", "a: [", "!!python/object/apply:os.system ['true']", "- 1"])
def test_the_command_says_2_for_what_it_cannot_read(checked: Checked, text: str) -> None:
    code, _, err = checked(text)
    assert (code, "error:" in err) == (2, True)


def test_fix_works_under_an_accelerate_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = TrainSetup(num_gpus=4, parallel="ddp", loss="chunked", micro_batch_seqs=8, accumulation_steps=2)
    launch = EXPORTERS["trl"](request(setup, model=MODEL))
    for file in launch.files:
        (tmp_path / Path(file.path).name).write_text(file.text)
    words = ["check", str(tmp_path / "trl-sft.yaml"), "--accelerate", str(tmp_path / "accelerate.yaml")]
    options = ["--gpu", "rtx-4090", "--no-dry-run", "--fix", "--json=full", "--memory-gib", "12"]
    run([*words, *options])
    answer = json.loads(capsys.readouterr().out)
    assert answer["setup"]["num_gpus"] == 4
    assert answer["fix"]["path"]
    assert (tmp_path / "trl-sft.fixed.yaml").exists()


def test_fix_says_by_hand_what_it_cannot_write(tmp_path: Path, checked: Checked) -> None:
    """A launch whose flag is a variable is not rewritten: the answer stands, with the settings to change and where."""
    script = (
        "SIZE=64\nllamafactory-cli train --stage sft --do_train True --model_name_or_path Qwen/Qwen2.5-0.5B "
        "--cutoff_len 2048 --finetuning_type lora --per_device_train_batch_size $SIZE --bf16 true\n"
    )
    code, out, _ = checked(script, "--fix", "--memory-gib", "8", "--json=full", name="run.sh")
    fix = json.loads(out)["fix"]
    assert code == 1
    assert (fix["path"], fix["diff"]) == (None, [])
    assert "stands in no one place" in fix["refused"]
    assert any(line.startswith("per_device_train_batch_size: ") for line in fix["by_hand"])
    assert "nothing written: run.sh" in checked(script, "--fix", "--memory-gib", "8", name="run.sh")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_fix_says_what_the_written_file_needs_that_the_old_one_did_not(checked: Checked) -> None:
    text = (
        "model_name_or_path: Qwen/Qwen2.5-1.5B\nmax_length: 1024\nper_device_train_batch_size: 1\nbf16: true\n"
        "gradient_checkpointing: true\nloss_type: chunked_nll\n"
    )
    fix = json.loads(checked(text, "--fix", "--memory-gib", "9", "--json=full")[1])["fix"]
    assert (fix["changes"][-1], fix["needs"]) == ("paged-adamw-8bit optimizer", ["bitsandbytes"])
    assert "needs, where it runs: pip install bitsandbytes" in checked(text, "--fix", "--memory-gib", "9")[1]


@pytest.mark.parametrize(
    ("name", "command"),
    [("my loop.py", "python '{}'"), ("loop.py", "python {}"), ("job.sbatch", "bash {}"), ("job.py", "python FILE")],
)
def test_what_cannot_be_read_is_sent_to_a_command_that_runs_as_printed(
    tmp_path: Path, checked: Checked, name: str, command: str
) -> None:
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-0.5B')\n"
        "optimizer = torch.optim.AdamW(model.parameters())\nfor batch in batches:\n"
        "    model(**batch).logits.mean().backward()\n    optimizer.step()\n"
    )
    if name.startswith("job"):  # what starts the loop
        (tmp_path / "steps.py").write_text(text)
        submits = "from sagemaker.pytorch import PyTorch\nPyTorch(entry_point='steps.py').fit()\n"
        text = submits if name.endswith(".py") else "srun python steps.py\n"
    code, _, err = checked(text, name=name, gpu="RTX 4090")
    assert code == 2
    assert f"plan trace --gpu rtx-4090 -- {command.format(tmp_path / name)} runs it" in err


@pytest.mark.parametrize("name", ["README.md", "Dockerfile.train"])
def test_commands_among_other_text_are_no_file_to_rename(name: str, checked: Checked) -> None:
    code, _, err = checked("accelerate launch train.py", name=name)
    assert (code, "put the command that trains into a .sh file" in err) == (2, True)


def test_the_model_that_was_planned_for_is_shown(checked: Checked) -> None:
    document = json.loads(checked(TRL, "--model", "Qwen/Qwen2.5-0.5B", "--json=full")[1])
    assert document["model"] == "Qwen/Qwen2.5-0.5B"
    assert any("the file names Qwen/Qwen2.5-1.5B" in sentence for sentence in document["assumptions"])
    assert "Qwen/Qwen2.5-0.5B on GeForce RTX 4090" in checked(TRL, "--model", "Qwen/Qwen2.5-0.5B")[1]


def test_the_processes_of_a_launch_config_count(tmp_path: Path, checked: Checked) -> None:
    """The links are those of its GPUs and machines; the command line goes over it, as `accelerate launch`'s does."""
    launch, speeds = tmp_path / "launch.yaml", {}
    launch.write_text("distributed_type: MULTI_GPU\nnum_processes: 16\nnum_machines: 4\nmixed_precision: bf16\n")
    for more in (["--gpus", "4"], ["--nodes", "4"], [], ["--nodes", "2"], ["--interconnect", "ethernet-10"]):
        code, out, _ = checked(TRL, "--json=full", "--accelerate", str(launch), *more, gpu="a100-80gb")
        assert code in (0, 1, 3)
        document = json.loads(out)
        assert document["setup"]["num_gpus"] == (4 if "--gpus" in more else 16)
        speeds[" ".join(more)] = document["prediction"]["tokens_per_s"]
    assert speeds["--interconnect ethernet-10"] < speeds[""] == speeds["--nodes 4"] < speeds["--nodes 2"]


def test_names_and_outputs_of_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that stdout cannot hold, and one that moves the cursor."""
    file = tmp_path / "caf\u00e9\x1b[2J.yaml"
    file.write_text(TRL)
    for arguments in (["check", str(file)], ["check", str(file), "--json=full"]):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace"))
        assert run([*arguments, "--gpu", "rtx-4090", "--no-dry-run"]) in (0, 1, 3)
        sys.stdout.flush()
        shown = raw.getvalue().decode("ascii")
        assert "\x1b" not in shown
        if "--json=full" in arguments:
            assert json.loads(shown)["file"].endswith("caf\u00e9\x1b[2J.yaml")


TABLES = """
base_model: meta-llama/Llama-3.1-8B
adapter: lora
lora_r: 16
lora_target_linear: true
micro_batch_size: 1
gradient_accumulation_steps: 4
sequence_len: 1024
bf16: true
gradient_checkpointing: true
optimizer: adamw_torch_fused
{}
"""


def test_adapters_on_a_table_are_counted_beside_those_on_matrices() -> None:
    model = catalogue.load("meta-llama/Llama-3.1-8B")
    setup = TrainSetup(method="lora", precision="bf16-autocast", lora_rank=16)
    assert table_bytes(model, setup, ("embed_tokens",)) == 16 * (128_256 + 4096) * 4 * 4
    text = TABLES.replace("lora_target_linear: true", "lora_target_modules: [q_proj, embed_tokens]")
    config = read_text(text.format(""), "axolotl.yaml", model=model)
    assert (config.setup.lora_targets, config.adapted_tables) == (("q_proj",), ("embed_tokens",))
    plain = predict(model, GPU, config.setup, None).peak_device_bytes
    whole = with_extras(lambda setup: predict(model, GPU, setup, None), config, model, GPU)(
        config.setup
    ).peak_device_bytes
    assert whole - plain == table_bytes(model, config.setup, config.adapted_tables) > 0


def test_fixes_reach_notebooks_and_files_that_are_indented_as_a_whole() -> None:
    cells = [
        {"cell_type": "code", "source": ["!pip install trl\n", "x = TrainingArguments()"]},
        {"cell_type": "code", "source": ["args = TrainingArguments(\n", "    per_device_train_batch_size=8,\n", ")"]},
        {"cell_type": "markdown", "source": ["TrainingArguments(a=1)"]},
    ]
    notebook = json.dumps({"cells": cells, "nbformat": 4}, indent=1) + "\n"
    edits = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    fixed = rewrite(notebook, "a.ipynb", edits)
    assert json.loads(fixed)["cells"][1]["source"] == [
        "args = TrainingArguments(\n",
        "    gradient_accumulation_steps=4,\n",
        "    per_device_train_batch_size=2,\n",
        ")",
    ]
    assert [line for line in fixed.splitlines() if line not in notebook.splitlines()] == [
        '    "    gradient_accumulation_steps=4,\\n",',
        '    "    per_device_train_batch_size=2,\\n",',
    ]
    indented = rewrite("    a: 1\n    b: 2\n\n", "a.yaml", {"b": 3, "c": True})
    assert yaml.safe_load(indented) == {"a": 1, "b": 3, "c": True}


def test_a_band_is_used_on_each_side_as_far_as_it_goes() -> None:
    prediction = replace(of(1000), memory_band_fraction=0.4, bands={"needed": (0.05, 0.4)})
    assert band_of(prediction) == (0.05, 0.4)
    verdicts = [judge(prediction, budget, band_of(prediction)) for budget in (949, 951, 1399, 1400)]
    assert verdicts == [Verdict.DOES_NOT_FIT, Verdict.UNCERTAIN, Verdict.UNCERTAIN, Verdict.FITS]
    assert band_of(replace(prediction, bands={})) == (0.4, 0.4)
    assert band_of(replace(prediction, memory_band_fraction=0.5)) == (0.5, 0.5)  # its own is wider than the runs'


BIG = """
base_model: meta-llama/Llama-3.1-70B
adapter: {adapter}
lora_r: 16
lora_target_linear: true
{load}
micro_batch_size: 1
gradient_accumulation_steps: 4
sequence_len: 512
bf16: true
gradient_checkpointing: true
optimizer: adamw_torch_fused
"""


@pytest.mark.parametrize(
    ("adapter", "load", "gpu"),
    [("lora", "", "h100-sxm"), ("lora", "load_in_8bit: true", "l40s"), ("qlora", "load_in_4bit: true", "rtx-4090")],
)
def test_weights_that_have_no_room_are_no_question_of_a_band(adapter: str, load: str, gpu: str) -> None:
    """131, 66 and 37 GiB of weights on 80, 48 and 24 GB, whatever else a wide band leaves open."""
    card, model = find_gpu(gpu), catalogue.load("meta-llama/Llama-3.1-70B")
    config = read_text(BIG.format(adapter=adapter, load=load), "a.yml", model=model)
    wide = replace(config, approximations=("one", "two", "three", "four", "five", "six", "seven"))
    budget = round(card.memory_bytes * 0.96)
    result = check(wide, model, card, budget, lambda setup: predict(model, card, setup, None))
    assert certain_bytes(result.prediction, wide) > budget
    assert result.prediction.peak_device_bytes * (1 - result.band.below) < budget
    assert result.verdict is Verdict.DOES_NOT_FIT
    away = replace(config, approximations=(UpperBound("lora_on_cpu: counted on the GPU", "weights"),))
    assert certain_bytes(result.prediction, away) == 0
    layers = read_text(BIG.format(adapter=adapter, load=load) + "layer_offloading: true\n", "a.yml", model=model)
    assert certain_bytes(result.prediction, layers) > budget  # they leave the card once all have been on it


@pytest.mark.parametrize(
    ("adapter", "more", "bounds"),
    [
        ("lora", "gradient_checkpointing: true", True),
        ("lora", "gradient_checkpointing: false", False),
        ("qlora", "load_in_4bit: true\ngradient_checkpointing: true", True),
        (
            "qlora",
            "load_in_4bit: true\ngradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}",
            False,
        ),
    ],
)
def test_layers_that_leave_the_gpu_bound_where_no_backward_keeps_them(adapter: str, more: str, bounds: bool) -> None:
    """LoRA of Llama-3.1-8B without checkpointing takes 0.44 GiB more with `layer_offloading` than without."""
    text = BIG.format(adapter=adapter, load="").replace("gradient_checkpointing: true\n", "")
    config = read_text(
        text + f"layer_offloading: true\n{more}\n", "a.yml", model=catalogue.load("meta-llama/Llama-3.1-8B")
    )
    (said,) = [sentence for sentence in config.approximations if "layer_offloading" in sentence]
    assert isinstance(said, UpperBound) == bounds


LEAN = """\
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
do_train: true
finetuning_type: full
pure_bf16: true
cutoff_len: 2048
per_device_train_batch_size: 1
"""


def test_what_an_optimizer_keeps_less_of_is_an_upper_bound() -> None:
    """GaLore's 8B needs more than its weights and less than AdamW's 60 GiB: a card of 48 GB is not refused."""
    card, model = find_gpu("a6000"), catalogue.load("meta-llama/Llama-3.1-8B")
    verdicts = []
    for more in ("optim: adamw_torch\n", "use_galore: true\n", "optim: lomo\n"):
        config = read_text(LEAN + more, "a.yaml", model=model)
        result = check(config, model, card, card.memory_bytes, lambda setup: predict(model, card, setup, None))
        verdicts.append(result.verdict)
        least = result.prediction.peak_device_bytes * (1 - result.band.below)
        assert result.verdict is Verdict.DOES_NOT_FIT or least < 16 * GIB
    assert verdicts == [Verdict.DOES_NOT_FIT, Verdict.UNCERTAIN, Verdict.UNCERTAIN]


@pytest.mark.parametrize(
    "more", [{"expandable_segments": True}, {"packing": True, "stack": "torchtune"}, {"packing": True}, {}]
)
def test_different_lengths_on_fixed_segments_reserve_more_and_it_is_said(more: dict[str, Any]) -> None:
    config = read_text(TRL, "trl.yaml", model=MODEL)
    config = replace(config, setup=config.setup.replace(**{"expandable_segments": False, "packing": False, **more}))
    result = check(config, MODEL, GPU, 2000 * GIB, prediction_of)
    least, most = left_by_lengths_bytes(result.prediction, config.setup)
    note = LENGTHS_ON_FIXED_SEGMENTS.format(f", usually {gib(least)} to {gib(most)}")
    assert (note in result.notes) == (least > 0) == (more in ({}, {"packing": True}))


def test_zero_3_on_older_deepspeeds_is_said_to_keep_its_weights_where_they_decide() -> None:
    """Checkpoints that are not reentrant alone, and where the weights fit beside the peak nothing is said."""
    config = read_text(TRL, "trl.yaml", model=MODEL)
    setup = config.setup.replace(num_gpus=2, parallel="zero3", checkpointing=1, micro_batch_seqs=1)
    for reentrant, spare_bytes, said in ((False, GIB // 4, True), (False, 2 * GIB, False), (True, GIB // 4, False)):
        sharded = replace(config, setup=setup.replace(reentrant_checkpointing=reentrant))
        budget = prediction_of(sharded.setup).peak_device_bytes + spare_bytes
        notes = check(sharded, MODEL, GPU, budget, prediction_of).notes
        assert any(note.startswith(GATHERED_STAY.split("{}")[0]) for note in notes) == said


def test_a_file_that_says_nothing_of_the_allocator_fits_only_where_it_does_on_fixed_segments() -> None:
    """PyTorch's default: expandable ones are taken where nobody says, and a verdict that hangs on them is none."""
    config = read_text(TRL, "trl.yaml", model=MODEL)
    assert EXPANDABLE in config.assumptions
    result = check(config, MODEL, GPU, 2000 * GIB, prediction_of)
    least = round(result.prediction.peak_device_bytes * (1 + result.band.above)) + 1
    close = check(config, MODEL, GPU, least, prediction_of)
    assert (result.verdict, close.verdict) == (Verdict.FITS, Verdict.UNCERTAIN)
    assert [any(note.startswith("fits only where") for note in each.notes) for each in (result, close)] == [False, True]
    launched = replace(config, assumptions=())
    assert check(launched, MODEL, GPU, least, prediction_of).verdict is Verdict.FITS
    for budget in (least, round(0.9 * least), round(0.8 * least)):
        close = check(config, MODEL, GPU, budget, prediction_of)
        improved = improve(close, MODEL, prediction_of)
        for change in (*some(close.changes, 3), improved):  # nor does a change of it, nor what --fix writes
            changed = check(replace(config, setup=change.setup), MODEL, GPU, budget, prediction_of)
            assert change.verdict is not Verdict.FITS or changed.verdict is Verdict.FITS, change


def test_what_different_lengths_leave_cached_is_measured() -> None:
    """Published runs of ms-swift 1, lengths from 91 tokens to the maximum, each setup once."""
    shares = {}
    for line in RECORDED.read_text().splitlines():
        row = json.loads(line)
        if row["group"] != "ms_swift_benchmark" or not row.get("reserved_bytes") or not row.get("setup"):
            continue
        card, setup = find_gpu(row["gpu"]), setup_from_request(row["setup"])
        if setup.method == "full" or not setup.checkpointing or row["reserved_bytes"] > 0.85 * card.memory_bytes:
            continue
        prediction = predict(catalogue.load(row["model"]), card, setup)
        more = row["reserved_bytes"] - prediction.peak_reserved_bytes
        shares[row["model"], setup] = more / left_by_lengths_bytes(prediction, setup)[1] * LENGTHS_LEAVE[1]
    inside = [LENGTHS_LEAVE[0] <= share <= LENGTHS_LEAVE[1] for share in shares.values()]
    assert (sum(inside), len(inside)) == (36, 40)
    assert round(statistics.median(shares.values()), 1) == 1.7
    packed = [row for row in gathered_rows() if row.group == "qwen3_ultrachat"]
    left = []
    for row in packed:
        model, card = row.model_and_gpu()
        assert row.setup is not None
        assert row.device_bytes is not None
        prediction = predict(model, card, row.setup)
        more = row.device_bytes - prediction.peak_device_bytes
        left.append(more / left_by_lengths_bytes(prediction, row.setup)[1] * PACKED_LEAVE[1])
    assert [round(share, 2) for share in sorted(left)] == [0.07, 0.44, 0.45, 0.45, 0.45]


def test_logits_that_pile_up_over_an_evaluation_are_no_fit() -> None:
    config = replace(read_text(TRL, "trl.yaml", model=MODEL), eval_seqs=1, eval_logits=True)
    for more, verdict in (({}, Verdict.UNCERTAIN), ({"eval_accumulation_steps": 1}, Verdict.FITS)):
        variant = replace(config, values={**config.values, **more})
        result = check(variant, MODEL, GPU, 2000 * GIB, prediction_of)
        assert (result.verdict, any("compute_metrics" in note for note in result.notes)) == (verdict, not more)
        for decides_bytes in (0, result.prediction.peak_device_bytes):  # whichever of the two takes more
            words = summary(replace(result, evaluation_bytes=decides_bytes))
            assert words.startswith("fits" if more else "a step fits, the run may not (see Notes)")
    scores = replace(config, setup=config.setup.replace(objective="classification", loss="full", packing=False))
    assert check(scores, MODEL, GPU, 2000 * GIB, prediction_of).verdict is Verdict.FITS


@pytest.mark.parametrize("stack", ["axolotl", "llamafactory", "trl"])
def test_more_evidence_never_widens_a_band(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune_planner.app import levels
    from finetune_planner.cli import checking

    setup = TrainSetup(method="lora", precision="bf16-autocast", lora_rank=16, stack=stack)
    formula = predict(MODEL, GPU, setup, None)
    for width in (0.01, 0.9):
        dry = replace(formula, memory_band_fraction=width, bands={}, terms=(), step_time_s=None)
        monkeypatch.setattr(levels, "dry_run_possible", lambda: "")
        monkeypatch.setattr(levels, "dry_run_setup", lambda *_, dry_run=dry, **__: dry_run)
        prediction = checking.corrected(lambda _: formula, setup, MODEL, GPU, GPU.memory_bytes)(setup)
        assert prediction.memory_band_fraction == min(width, formula.memory_band_fraction)
        assert prediction.terms == formula.terms
        assert sides_of(prediction) == sides_of(formula)  # whose time it is


def test_the_speed_of_a_change_is_corrected_as_the_config_s_own_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that costs no time once was 1.29 times as fast: a formula's speed over a dry run's."""
    from finetune_planner.cli import checking

    setup = TrainSetup(method="lora", precision="bf16-autocast", lora_rank=16)
    formula = predict(MODEL, GPU, setup, None)
    assert formula.tokens_per_s is not None
    assert formula.step_time_s is not None
    dry = replace(formula, tokens_per_s=formula.tokens_per_s / 1.29, step_time_s=formula.step_time_s * 1.29)
    monkeypatch.setattr(checking, "dry_run_of", lambda *_, **__: dry)
    changed = checking.corrected(lambda _: formula, setup, MODEL, GPU, GPU.memory_bytes)(setup.replace(lora_rank=8))
    assert (changed.tokens_per_s, changed.step_time_s) == pytest.approx((dry.tokens_per_s, dry.step_time_s))


@pytest.mark.parametrize(("package", "noted"), [("accelerate==1.2", True), ("peft==0.9", True), ("trl==0.20", False)])
def test_a_version_that_nothing_hangs_on_is_said_to(package: str, noted: bool, checked: Checked) -> None:
    assumptions = json.loads(checked(TRL, "--json=full", "--assume", package)[1])["assumptions"]
    assert any("nothing that is read here" in assumption for assumption in assumptions) == noted


@pytest.mark.parametrize("batch", ["4", "parser.parse_args().batch_size"])
def test_words_that_a_program_does_not_read_are_said_to(batch: str, checked: Checked) -> None:
    program = (
        "import argparse\nfrom trl import SFTConfig, SFTTrainer\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--batch_size', type=int, default=8)\n"
        f"args = SFTConfig(max_length=512, per_device_train_batch_size={batch}, gradient_checkpointing=True)\n"
        "SFTTrainer('Qwen/Qwen3-0.6B', args=args, train_dataset=rows).train()\n"
    )
    document = json.loads(checked(program, "--json=full", "--args", "--batch_size 2", name="train.py")[1])
    read = "parse_args" in batch
    assert document["setup"]["micro_batch_seqs"] == (2 if read else 4)
    assert any(words.startswith("--args: train.py") for words in document["assumptions"]) != read


def test_pictures_of_a_model_without_eyes_are_refused_in_words_of_any_command(checked: Checked) -> None:
    code, _, err = checked(TRL, "--set", "attention=sdpa", "--set", "images=2x1024x768")
    assert code == 2
    assert "takes no images" in err
    assert "--image" not in err


PREFIX = (
    "from peft import PrefixTuningConfig\nfrom trl import SFTConfig, SFTTrainer\n"
    "SFTTrainer('Qwen/Qwen3-0.6B', args=SFTConfig(max_length=512, gradient_checkpointing={}), train_dataset=rows,\n"
    "    peft_config=PrefixTuningConfig(num_virtual_tokens=8, task_type='CAUSAL_LM')).train()\n"
)


@pytest.mark.parametrize(("on", "code"), [(True, 1), (False, 0)])
def test_prefix_tuning_does_not_run_under_gradient_checkpointing(on: bool, code: int, checked: Checked) -> None:
    """peft 0.21 peft_model.py add_adapter; by TRL 1.16, which switches it on later, transformers' mask is of another
    length than its keys (tried on a CPU)."""
    exit_code, out, _ = checked(PREFIX.format(on), name="prefix.py", gpu="h100-sxm")
    assert (exit_code, "cannot run" in out, "virtual tokens  8" in out, "targets" in out) == (code, on, True, False)


def test_nothing_is_written_and_no_change_said_to_fit_where_the_tool_refuses_the_file(
    checked: Checked, tmp_path: Path
) -> None:
    """FSDP's checkpointing beside the Trainer's own: more room does not help."""
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n"
    )
    file = TRL.replace("gradient_checkpointing: false", "gradient_checkpointing: true").replace("eager", "sdpa")
    accelerate = ["--accelerate", str(tmp_path / "fsdp.yaml"), "--fix", "--out", str(tmp_path / "fixed.yaml")]
    code, text, _ = checked(file, *accelerate, gpu="h100-sxm")
    assert (code, "nothing written: " in text, "What would help" in text) == (1, True, False)
    assert not (tmp_path / "fixed.yaml").exists()


@pytest.mark.parametrize(
    ("gpu", "code", "note"), [("h100-sxm", 0, "its gradients are wrong"), ("a100-80gb", 1, "this cannot run")]
)
def test_what_cannot_run_does_not_fit_and_wrong_gradients_are_said_first(
    gpu: str, code: int, note: str, checked: Checked
) -> None:
    """gpt_oss gets vllm-flash-attn3 for any flash attention: on Hopper it runs, and its sinks get no gradient."""
    file = (
        "base_model: openai/gpt-oss-20b\nmodel_quantization_config: Mxfp4Config\nadapter: lora\nlora_r: 8\n"
        "lora_target_modules: [q_proj]\ndatasets: [{path: a/b, type: alpaca}]\nsequence_len: 512\n"
        "micro_batch_size: 1\nbf16: true\nattn_implementation: kernels-community/vllm-flash-attn3\n"
    )
    exit_code, text, _ = checked(file, name="a.yaml", gpu=gpu)
    assert exit_code == code
    assert text.splitlines()[1].startswith("cannot run" if code else "fits")
    assert text.partition("Notes\n")[2].strip().startswith(f"· {note}")


def test_the_trl_of_today_is_a_change_where_an_older_one_needs_more() -> None:
    """TRL 1.10's chunked loss copies the whole head (`TrainSetup.widens_head`)."""
    setup = TrainSetup(loss="chunked", trl_version="1.10", micro_batch_seqs=1)
    (newer,) = (after for label, after, _ in single_changes(setup, GPU, MODEL) if label == "TRL of today")
    saved = predict(MODEL, GPU, setup).peak_allocated_bytes - predict(MODEL, GPU, newer).peak_allocated_bytes
    assert saved > 4 * MODEL.vocab_size * MODEL.hidden_size
    assert not [label for label, _, _ in single_changes(newer, GPU, MODEL) if "today" in label]
