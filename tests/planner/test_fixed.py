"""`plan check --fix`: values are changed where they stand in the file that is given."""

import json
from pathlib import Path

import pytest

from finetune_planner.cli.check import fixed_path, fixed_text
from finetune_planner.cli.checking import CheckRequest
from finetune_planner.improvement import Improved
from planner.core.errors import ConfigError
from planner.frameworks.readers import read_config
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.check import Verdict
from planner.planning.predict import predict
from planner.setup import TrainSetup

MODEL, GPU = catalogue.load("Qwen/Qwen2.5-1.5B"), find_gpu("rtx-4090")
HEAD = "import json, os, sys, yaml\nfrom transformers import AutoModelForCausalLM\n"
HEAD += "from trl import SFTConfig, SFTTrainer\n"
TAIL = """model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", dtype="bfloat16")
args = SFTConfig(
    "out",  # where it goes
    {more}bf16=True, max_length=1024,
)
SFTTrainer(model, args=args, train_dataset=data).train()
"""
GIVEN = "per_device_train_batch_size={}, gradient_accumulation_steps={}, "


def program(before: str, batch: str, steps: str) -> str:
    return HEAD + before + TAIL.format(more=GIVEN.format(batch, steps))


def fixed(folder: Path, files: dict[str, str], *, sets: tuple[str, ...] = (), **changed: object) -> str:
    """What `--fix` writes for the first of the files where its micro-batch of 8 x 2 shall be 4 x 4."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    file = folder / next(iter(files))
    arguments = sets or None
    config = read_config(file, model=MODEL, arguments=arguments)
    before = config.setup
    assert (before.micro_batch_seqs, before.accumulation_steps, config.missing) == (8, 2, ())
    after = before.replace(**{"micro_batch_seqs": 4, "accumulation_steps": 4, **changed})
    improvement = Improved(
        setup=after, labels=("x",), after=predict(MODEL, GPU, TrainSetup(), None), verdict=Verdict.FITS
    )
    text = fixed_text(file, config, improvement, MODEL, request=CheckRequest(arguments=arguments))
    fixed_path(file).write_text(text)  # what a person finds on disk, read as it stands
    fixed_setup = read_config(fixed_path(file), model=MODEL, arguments=arguments).setup
    assert (fixed_setup.micro_batch_seqs, fixed_setup.accumulation_steps) == (4, 4)
    return text


def test_generations_of_smaller_micro_batches_are_of_more(tmp_path: Path) -> None:
    """A file with them was refused, and by hand a quarter of its completions would have been made at once."""
    text = (
        "model_name_or_path: Qwen/Qwen2.5-1.5B\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n"
        "steps_per_generation: 4\nnum_generations: 8\nuse_vllm: true\nvllm_max_model_length: 700\n"
    )
    written = fixed(tmp_path, {"grpo.yaml": text})
    assert "steps_per_generation: 8\n" in written


def test_the_weights_type_of_a_model_that_the_trainer_loads_is_handed_on(tmp_path: Path) -> None:
    """TRL loads what it is named in float32; what hands it another type is a setting of its arguments."""
    named = program("", "8", "2").replace("SFTTrainer(model,", 'SFTTrainer("Qwen/Qwen2.5-1.5B",')
    named = "\n".join(line for line in named.splitlines() if not line.startswith("model =")) + "\n"
    text = fixed(tmp_path, {"train.py": named}, precision="bf16-autocast")
    assert 'model_init_kwargs={"dtype": "bfloat16"}' in text
    assert "bf16=True" in text
    handed = named.replace("bf16=True", 'bf16=True, model_init_kwargs={"dtype": "float32"}')
    for other in (handed, program("", "8", "2")):
        (tmp_path / "other.py").write_text(other)
        config = read_config(tmp_path / "other.py", model=MODEL)
        assert not config.allows(config.setup.replace(precision="bf16-pure"), in_place=True)


def notebook(*cells: str) -> str:
    listed = [{"cell_type": "code", "outputs": [], "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "BATCH = 8"}, *listed], "nbformat": 4}, indent=1)


CELLS = {
    "constants above": (
        "!pip install trl\nBATCH = 8  # ä\nSTEPS = 2",
        "BATCH",
        "STEPS",
        ["BATCH = 4  # ä\n", "STEPS = 4"],
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass H:\n    b: int = 8\n    s: int = 2\nh = H()",
        "h.b",
        "h.s",
        ["    b: int = 4\n", "    s: int = 4\n"],
    ),
    "a form's fields": (
        "B = 8 #@param {type:'integer'}\nS = 2 #@param\nprint('8')",
        "B",
        "S",
        ["B = 4 #@param {type:'integer'}\n", "S = 4 #@param\n"],
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_the_literal_in_another_cell_is_changed(name: str, tmp_path: Path) -> None:
    cell, batch, steps, lines = CELLS[name]
    text = notebook(HEAD, cell, "%matplotlib inline", TAIL.format(more=GIVEN.format(batch, steps)))
    written = fixed(tmp_path, {"n.ipynb": text})
    before, after = (json.loads(source)["cells"] for source in (text, written))
    assert [new_cell for new_cell, two in zip(after, before, strict=True) if new_cell != two] == [after[2]]
    assert [line for line in after[2]["source"] if line not in before[2]["source"]] == lines


def test_a_cell_that_sets_it_twice_is_left(tmp_path: Path) -> None:
    text = notebook(HEAD, "A = [8, 2]\nB, S = A", TAIL.format(more=GIVEN.format("B", "S")))
    with pytest.raises(ConfigError):
        fixed(tmp_path, {"n.ipynb": text})


@pytest.mark.parametrize(
    "files",
    [
        {"go.sh": "trl sft --config y.yaml\n", "y.yaml": "model_name_or_path: Qwen/Qwen2.5-1.5B\nmax_length: 1024\n"
         "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n"},
        {"go.sh": "torchrun --nproc_per_node=1 t.py\n", "t.py": program("", "8", "2")},
        {"t.py": program("c = yaml.safe_load(open('c.yaml'))\n", "c['b']", "c['s']"), "c.yaml": "b: 8\ns: 2\n"},
        {"t.py": program("from settings import B, S\n", "B", "S"), "settings.py": "B = 8\nS = 2\n"},
    ],
    ids=["a tool's YAML", "a program", "a program's YAML", "a module"],
)  # fmt: skip
def test_settings_of_another_file_are_left_and_it_is_named(files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"takes settings from {[*files][1]}"):
        fixed(tmp_path, files)
    assert not list(tmp_path.glob("*.fixed.*"))


def test_an_aliased_value_is_replaced_and_an_anchored_one_left(tmp_path: Path) -> None:
    head = "model_name_or_path: Qwen/Qwen2.5-1.5B\nmax_length: 1024\n"
    text = f"{head}dataloader_num_workers: &w 8\nper_device_train_batch_size: *w  # as many\n"
    written = fixed(tmp_path, {"y.yaml": f"{text}gradient_accumulation_steps: 2\n"})
    assert "num_workers: &w 8\nper_device_train_batch_size: 4  # as many\n" in written
    text = f"{head}per_device_train_batch_size: &w 8\ndataloader_num_workers: *w\n"
    with pytest.raises(ConfigError, match="line 3"):
        fixed(tmp_path, {"z.yaml": f"{text}gradient_accumulation_steps: 2\n"})
