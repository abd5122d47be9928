"""`plan check --fix`: the least harm first, what the versions of a file know, values where they are written."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.check import edits_of, fixed_text
from finetune_planner.improvement import HARM, LENGTH_HARM, Improved, harm, improve, lasting
from planner.core.errors import ConfigError
from planner.core.units import GIB, gib
from planner.frameworks.readers import read_config, read_text
from planner.frameworks.readers.objectives import CONFIGS
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.tools import changed_fields
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.check import CheckResult, Verdict, check, judge
from planner.planning.predict import predict
from planner.planning.single_changes import single_changes
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction
from tests.whole import some

GPU = find_gpu("rtx-4090")
MODEL = catalogue.load("Qwen/Qwen2.5-1.5B")
LORA = """
model_name_or_path: Qwen/Qwen2.5-1.5B
use_peft: true
lora_r: 32
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
max_length: 4096
gradient_checkpointing: false
bf16: true
dtype: bfloat16
"""


def predicted(setup: TrainSetup) -> Prediction:
    return predict(MODEL, GPU, setup, None)


def judged(text: str, budget_gib: float, name: str = "trl.yaml") -> CheckResult:
    config = read_text(text, name, model=MODEL)
    return check(config, MODEL, GPU, round(budget_gib * GIB), predicted)


def improved(result: CheckResult) -> Improved:
    return improve(result, MODEL, predicted)


def to(setup: TrainSetup) -> Improved:
    """The change to a setup that is known to fit."""
    return Improved(setup=setup, labels=("x",), after=predicted(setup), verdict=Verdict.FITS)


def written_to(file: Path, config: ReadConfig, **fields: Any) -> str:
    """The text of a config with these fields of its setup."""
    return fixed_text(file, config, to(config.setup.replace(**fields)), MODEL)


BUDGETS_GIB = (70, 24, 12, 9, 5.5, 4.5, 3.2, 2.6, 2.2)


@pytest.fixture(scope="module")
def ends() -> list[tuple[CheckResult, Improved]]:
    results = [judged(LORA, budget) for budget in BUDGETS_GIB]
    return [(result, improved(result)) for result in results]


def test_less_memory_never_makes_less_harm(ends: list[tuple[CheckResult, Improved]]) -> None:
    harms = [
        harm(result.config.setup, improvement.setup)
        for result, improvement in ends
        if improvement.verdict is Verdict.FITS
    ]
    assert harms == sorted(harms)
    assert (harms[0], harms[-1]) == (0, LENGTH_HARM)
    assert len(set(harms)) >= 4


def test_what_is_called_fitting_fits_and_keeps_the_batch(ends: list[tuple[CheckResult, Improved]]) -> None:
    for result, improvement in ends:
        before, after = result.config.setup, improvement.setup
        assert after.global_batch_seqs == before.global_batch_seqs
        assert after.seq_len_tokens in (4096, 2048, 1024)
        if improvement.verdict is Verdict.FITS:
            band = max(result.band_fraction, improvement.after.memory_band_fraction)
            assert judge(predicted(after), result.budget_bytes, band) is Verdict.FITS


def test_no_sequence_is_cut_where_two_other_changes_fit(ends: list[tuple[CheckResult, Improved]]) -> None:
    """Every pair of changes to the file that leaves its sequences whole, tried."""
    cut = [result for result, improvement in ends if improvement.setup.seq_len_tokens < 4096]
    assert cut
    for result in cut:
        start = result.config.setup
        for _, first, _ in single_changes(start, GPU, MODEL):
            for _, second, _ in [("", first, False), *single_changes(first, GPU, MODEL)]:
                if second.seq_len_tokens == 4096 and result.config.allows(second, in_place=True):
                    assert judge(predicted(second), result.budget_bytes, result.band_fraction) is not Verdict.FITS


def test_one_change_is_made_where_one_is_enough() -> None:
    for budget in (40.0, 24.0):
        result = judged(LORA, budget)
        enough = [change for change in result.changes if change.verdict is Verdict.FITS and change.in_place]
        assert enough
        assert len(improved(result).labels) == 1


PACKED = LORA + "packing: true\n"


@pytest.mark.parametrize("text", [PACKED, LORA, f"{LORA}attn_implementation: eager\n"])
def test_a_package_built_for_one_pytorch_is_asked_for_last(text: str) -> None:
    """Checkpointing costs time, flash attention an installation that may not exist; SDPA comes with PyTorch."""
    peak = predicted(judged(text, 24.0).config.setup).peak_device_bytes / GIB
    improvement = improved(judged(text, peak * 0.8))
    assert improvement.verdict is Verdict.FITS
    assert improvement.setup.attention in ("sdpa", "eager")
    eager = TrainSetup(attention="eager")
    others = [eager.replace(attention=name) for name in ("sdpa", "flash-attention-2")]
    assert [harm(eager, setup) for setup in others] == [0, HARM["attention"]]


def test_what_a_better_prediction_refuses_is_not_taken() -> None:
    """The formula's first choice needs a third more by the better prediction: something else is found, which that
    prediction knows to fit."""
    result = judged(LORA, 12.0)
    first, seen = improved(result), dict[TrainSetup, Prediction]()

    def verify(setup: TrainSetup) -> Prediction:
        plain = predicted(setup)
        factor = 4 / 3 if setup == first.setup else 1.0
        return seen.setdefault(setup, replace(plain, peak_device_bytes=round(plain.peak_device_bytes * factor)))

    improvement = improve(result, MODEL, predicted, verify)
    assert first.verdict is improvement.verdict is Verdict.FITS
    assert improvement.setup != first.setup
    assert next(iter(seen)) == first.setup
    assert seen[improvement.setup] == improvement.after


def test_every_change_has_its_place_in_the_order() -> None:
    """A field that single changes touch and that has none counts as one that spreads a job."""
    setups = [TrainSetup(), TrainSetup(method="lora", precision="bf16-mixed"), TrainSetup(checkpointing=0, loss="full")]
    touched = {
        name
        for setup in setups
        for _, after, _ in single_changes(setup, GPU, MODEL)
        for name in changed_fields(setup, after)
    }
    assert touched <= set(HARM)


HEAD = """
import argparse
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
"""
LOAD = 'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", torch_dtype="bfloat16")\n'
CALL = (
    "args = SFTConfig('o', per_device_train_batch_size={batch}, gradient_accumulation_steps={steps}, max_length=2048, "
    "gradient_checkpointing=True, optim='adamw_torch', {more})\nSFTTrainer(model, args=args).train()\n"
)


@pytest.mark.parametrize(
    "more",
    ["evaluation_strategy='no'", "evaluation_strategy='steps', eval_steps=5", "use_liger=False, max_seq_length=2048"],
)
def test_a_change_carries_only_what_the_versions_of_the_file_know(more: str) -> None:
    config = read_text(HEAD + LOAD + CALL.format(batch=4, steps=1, more=more), "t.py", model=MODEL)
    old = "evaluation_strategy" in more
    assert ("liger_kernel_config" in config.lacks) == old
    written = set()
    for _, after, _ in single_changes(config.setup, GPU, MODEL):
        if config.allows(after, in_place=True):
            written |= set(edits_of(config, to(after)))
    assert written
    assert not written & set(config.lacks)
    assert not old or not {"activation_checkpointing", "liger_kernel_config"} & written


MODEL_WORDS = "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --max_length 512"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.sh", f"{MODEL_WORDS} --output_dir out"),
        ("run.slurm", f"#!/bin/bash\n#SBATCH -N 1\nsrun {MODEL_WORDS} --output_dir out"),
        ("run.sh", "python -m trl.scripts.sft --model_name_or_path Qwen/Qwen2.5-0.5B --output_dir out"),
    ],
)
def test_no_word_is_written_for_a_dictionary_that_the_parser_does_not_take(file: str, text: str) -> None:
    """transformers 5.23: `--liger_kernel_config '{}'` is no valid dictionary."""
    config = read_text(text, file)
    assert not config.allows(config.setup.replace(kernels="liger"), in_place=True)


def test_what_liger_does_by_itself_needs_no_dictionary(tmp_path: Path) -> None:
    takes = "words = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]\n"
    program = (
        f"from transformers import HfArgumentParser\n{HEAD}{LOAD}{takes}Trainer(model=model, args=words).train()\n"
    )
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "run.sh").write_text("python train.py --output_dir out --bf16 true\n")
    config = read_config(tmp_path / "run.sh", model=MODEL)
    assert config.allows(config.setup.replace(kernels="liger", loss="liger"), in_place=True)
    written = written_to(tmp_path / "run.sh", config, kernels="liger", loss="liger")
    assert "out --use_liger_kernel True --bf16" in written


def test_a_file_takes_the_dictionary() -> None:
    config = read_text("model_name_or_path: Qwen/Qwen2.5-0.5B\nmax_length: 512\nuse_peft: true\n", "trl.yaml")
    assert config.allows(config.setup.replace(kernels="liger"), in_place=True)


def test_a_word_that_the_program_does_not_take_is_not_written(tmp_path: Path) -> None:
    program, file = tmp_path / "train.py", tmp_path / "run.sh"
    program.write_text(OWN_WORDS)
    file.write_text("python train.py --per_device_train_batch_size 4\n")
    config = read_config(file)
    with pytest.raises(ConfigError):
        written_to(file, config, checkpointing=1)


OWN_WORDS = """import argparse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int)
words = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype="bfloat16")
args = TrainingArguments("out", per_device_train_batch_size=words.per_device_train_batch_size, bf16=True)
Trainer(model=model, args=args).train()
"""


def test_todays_versions_take_every_setting() -> None:
    config = read_text(HEAD + LOAD + CALL.format(batch=4, steps=1, more="bf16=True"), "t.py", model=MODEL)
    assert config.lacks == ()


WRITTEN = {
    "in the call": ("", "8", "2"),
    "options": (
        "p = argparse.ArgumentParser()\np.add_argument('--batch', type=int, default=8)\n"
        "p.add_argument('--steps', type=int, default=2)\na = p.parse_args()\n",
        "a.batch",
        "a.steps",
    ),
    "constants": ("BATCH = 8\nSTEPS = 2\n", "BATCH", "STEPS"),
    "a class": ("class C:\n    batch = 8\n    steps: int = 2\nc = C()\n", "c.batch", "c.steps"),
    "a dictionary": ("c = {\n    'batch': 8,\n    'steps': 2,\n}\n", "c['batch']", "c['steps']"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_value_is_changed_where_it_is_written(name: str, tmp_path: Path) -> None:
    before, batch, steps = WRITTEN[name]
    file = tmp_path / "t.py"
    file.write_text(HEAD + before + LOAD + CALL.format(batch=batch, steps=steps, more="bf16=True"))
    config = read_config(file, model=MODEL)
    text = written_to(file, config, micro_batch_seqs=4, accumulation_steps=4)
    ast.parse(text)
    changed = [line for line in text.splitlines() if line not in file.read_text().splitlines()]
    assert len(changed) == (1 if name == "in the call" else 2)
    assert name == "in the call" or f"per_device_train_batch_size={batch}" in text  # the option is still alive


@pytest.mark.parametrize("before", ["B = 4 * 2\n", "import json\nB = json.load(open('b.json'))['b'] * 2\n"])
def test_no_literal_makes_an_option_dead(before: str, tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    (tmp_path / "b.json").write_text('{"b": 4}')
    file.write_text(HEAD + before + LOAD + CALL.format(batch="B", steps=2, more="bf16=True"))
    config = read_config(file, model=MODEL)
    with pytest.raises(ConfigError, match="no literal in the call") as caught:
        written_to(file, config, micro_batch_seqs=4, accumulation_steps=4)
    assert "where it is set" in caught.value.hint


@pytest.mark.parametrize("steps", ["16 // B", "(16 // B) // int(os.environ.get('WORLD_SIZE', 1))", "16 * 1 // B"])
def test_what_follows_from_another_value_is_left_as_it_is(steps: str, tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    file.write_text("import os\n" + HEAD + "B = 8\n" + LOAD + CALL.format(batch="B", steps=steps, more="bf16=True"))
    config = read_config(file, model=MODEL)
    text = written_to(file, config, micro_batch_seqs=4, accumulation_steps=4)
    assert text == file.read_text().replace("B = 8", "B = 4")
    with pytest.raises(ConfigError, match="computed in the call"):
        written_to(file, config, accumulation_steps=3)


@pytest.mark.parametrize(
    ("memory_gib", "written", "method"), some([("24", True, ""), ("1", False, ""), ("7", False, "lora")], 2)
)
def test_a_file_that_does_not_fit_is_never_written(
    memory_gib: str, written: bool, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full fine-tuning of 1.5B: weights, gradients and 8-bit states take more than 7; adapters fit, by a command."""
    (tmp_path / "t.py").write_text(HEAD + LOAD + CALL.format(batch=8, steps=2, more="bf16=True"))
    command = ["check", str(tmp_path / "t.py"), "--gpu", "rtx-4090", "--no-dry-run"]
    command += ["--fix", "--memory-gib", memory_gib]
    run([*command, "--json=full"])
    fix = json.loads(capsys.readouterr().out)["fix"]
    assert (fix["path"] is not None) == (tmp_path / "t.fixed.py").exists() == written
    assert (f"--method {method} " in fix["command"]) if method else not fix["command"]
    assert not method or f"--memory-gib {memory_gib} " in fix["command"]
    if written:
        assert fix["verdict"] == "fits"
        run(command)
        shown = f"(fits: {gib(fix['peak_device_bytes'])}, about {fix['tokens_per_s']:,.0f} tokens/s)"
        assert shown in " ".join(capsys.readouterr().out.split())


def test_four_bits_at_the_full_length_come_before_a_shorter_one() -> None:
    result = judged(LORA.replace("per_device_train_batch_size: 8", "per_device_train_batch_size: 1"), 3.9)
    improvement = improved(result)
    setup = improvement.setup
    assert (setup.method, setup.seq_len_tokens, improvement.needs_new_file) == ("qlora", 4096, False)
    call = CALL.format(batch=1, steps=2, more="bf16=True").replace("2048", "4096")
    call = call.replace("model, args", "model, peft_config=LoraConfig(r=32), args")
    program = f"{HEAD}{LOAD}from peft import LoraConfig\n{call}"
    other = improved(judged(program, 3.9, "t.py"))
    assert (other.setup.method, other.needs_new_file) == ("qlora", True)  # a program's loading is not changed
    assert replace(other, needs_new_file=False).labels


@pytest.mark.parametrize("config", sorted(set(CONFIGS.values()) - {"GRPOConfig"}))
def test_the_arguments_of_every_objective_are_changed_in_place(config: str, tmp_path: Path) -> None:
    """GRPO's call has no micro-batch that could be halved without its generations."""
    text = HEAD.replace("SFTConfig, SFTTrainer", f"{config}, {config.removesuffix('Config')}Trainer") + LOAD
    text += f'args = {config}("out", per_device_train_batch_size=8, gradient_accumulation_steps=1, max_length=512)\n'
    text += f"{config.removesuffix('Config')}Trainer(model=model, args=args, train_dataset=data).train()\n"
    (tmp_path / "t.py").write_text(text)
    config_read = read_config(tmp_path / "t.py")
    halved = replace(to(TrainSetup()), setup=config_read.setup.replace(micro_batch_seqs=4, accumulation_steps=2))
    written = fixed_text(tmp_path / "t.py", config_read, halved, MODEL)
    assert "per_device_train_batch_size=4, gradient_accumulation_steps=2" in written


OLDER = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model
block_size = 2048
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", torch_dtype="bfloat16")
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
args = TrainingArguments("o", per_device_train_batch_size=1, bf16=True, {})
Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows).train()
"""


def ended(more: str, budget_gib: float) -> tuple[CheckResult, Improved]:
    """What `--fix` finds for a program of the Trainer's, on a card of so much memory."""
    assert MODEL is not None
    config = read_text(OLDER.format(more), "train.py", model=MODEL)
    result = check(config, MODEL, GPU, round(budget_gib * GIB), predicted)
    return result, improve(result, MODEL, predicted)


@pytest.mark.parametrize("old", ["evaluation_strategy='no'", "overwrite_output_dir=True", "logging_dir='l'"])
def test_checkpointing_of_an_older_version_is_one_setting(old: str) -> None:
    result, improvement = ended(f"{old}, optim='adamw_torch', use_liger_kernel=True", 8)
    assert result.verdict is not Verdict.FITS
    assert (improvement.labels, improvement.verdict) == (("checkpoint every layer",), Verdict.FITS)
    assert not improvement.needs_new_file
    assert improvement.setup.reentrant_checkpointing
    assert edits_of(result.config, improvement) == {"gradient_checkpointing": True}


@pytest.mark.parametrize("key", ["eval_strategy='steps'", "eval_strategy='epoch'", "do_eval=True"])
def test_a_smaller_evaluation_alone_is_what_is_changed_where_it_suffices(key: str) -> None:
    more = f"gradient_checkpointing=True, {key}, per_device_eval_batch_size=32"
    result, improvement = ended(more, 20)
    assert result.verdict is not Verdict.FITS
    assert (improvement.labels, improvement.verdict) == (("evaluation of 1 at once",), Verdict.FITS)
    assert improvement.setup == result.config.setup
    assert edits_of(result.config, improvement) == {"per_device_eval_batch_size": 1}
    assert len(ended(more, 7)[1].labels) > 1  # where the step itself is too large more is changed


def test_no_change_is_told_beside_a_later_one_of_its_kind() -> None:
    """Of Unsloth's notebook of Qwen3-14B on a T4."""
    steps = ("adapters of rank 8", "micro-batch 1 x 8 accumulation steps", "adapters of rank 4")
    assert lasting(steps) == ("adapters of rank 4", "micro-batch 1 x 8 accumulation steps")


def test_changes_that_are_enough_together_are_said_where_no_single_one_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(LORA.replace("4096", "8192"))
    words = ["check", str(file), "--gpu", "rtx-4090", "--no-dry-run"]
    enough = {}
    for memory in ("10", "60"):
        run([*words, "--memory-gib", memory, "--json"])
        enough[memory] = json.loads(capsys.readouterr().out).get("together")
    assert enough["60"] is None  # one change is enough
    assert len(enough["10"]["changes"]) > 1
    assert enough["10"]["peak_device_bytes"] < 10 * GIB
    run([*words, "--memory-gib", "10"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"together: {'; '.join(enough['10']['changes'])}" in shown
    run([*words, "--memory-gib", "10", "--fix", "--json"])
    assert json.loads(capsys.readouterr().out)["fix"]["changes"] == enough["10"]["changes"]
