"""`plan check --fix` of values that stand beside the file: in YAML or JSON, another cell, what a launch starts."""

import json
from pathlib import Path

import pytest
import yaml

from finetune_planner.cli.app import run
from finetune_planner.cli.check import Fixed, Fixing, fixed_path
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


def fixed(folder: Path, files: dict[str, str], *, sets: tuple[str, ...] = (), **changed: object) -> Fixed:
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
    answer = Fixing(file, config, improvement, MODEL, request=CheckRequest(arguments=arguments)).fixed()
    for of, text in answer.texts.items():  # what a person finds on disk, read as it stands
        fixed_path(of).write_text(text)
    assert all((folder / name).read_text() == text for name, text in files.items())
    if file in answer.texts:
        fixed_setup = read_config(fixed_path(file), model=MODEL, arguments=arguments).setup
        assert (fixed_setup.micro_batch_seqs, fixed_setup.accumulation_steps) == (4, 4)
    return answer


def differing(before: str, after: str) -> list[str]:
    return [line for line in after.splitlines() if line not in before.splitlines()]


def test_generations_of_smaller_micro_batches_are_of_more(tmp_path: Path) -> None:
    """A file with them was refused, and by hand a quarter of its completions would have been made at once."""
    text = (
        "model_name_or_path: Qwen/Qwen2.5-1.5B\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n"
        "steps_per_generation: 4\nnum_generations: 8\nuse_vllm: true\nvllm_max_model_length: 700\n"
    )
    written = fixed(tmp_path, {"grpo.yaml": text}).texts[tmp_path / "grpo.yaml"]
    assert "steps_per_generation: 8\n" in written


BESIDE = {
    "a block, by OmegaConf": (
        "conf/base.yaml",
        "# ours\nhparams:\n  bsz: 8     # per card\n\n  acc: 2\n",
        "from omegaconf import OmegaConf\nc = OmegaConf.load('conf/base.yaml')\n",
        ("c.hparams.bsz", "c.hparams.acc"),
        ["  bsz: 4     # per card", "  acc: 4"],
    ),
    "one line of braces, with pathlib": (
        "cfg.yml",
        "train: {n: 8, k: 2, lr: 1.0e-4}  # all of it\nseed: 8\n",
        "from pathlib import Path\nt = yaml.safe_load(Path('cfg.yml').read_text())['train']\n",
        ("t['n']", "t['k']"),
        None,
    ),
    "JSON, an option's default": (
        "hp.json",
        '{\n\t"name": "8",\n\t"batch": 8,\n\t"steps": 2\n}\n',
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--c', default='hp.json')\n"
        "h = json.load(open(p.parse_args().c))\n",
        ("h['batch']", "h['steps']"),
        ['\t"batch": 4,', '\t"steps": 4'],
    ),
    "a path of parts": (
        "conf/run/c.yaml",
        "s: 2\nb: !!int 8\n",
        "c = yaml.safe_load(open(os.path.join(os.path.dirname(__file__), 'conf', 'run', 'c.yaml')))\n",
        ("c['b']", "c['s']"),
        ["s: 4", "b: 4"],
    ),
    "an anchor that nobody uses": (
        "a.yaml",
        "b: &unused 8\ns: 2\n",
        "c = yaml.safe_load(open('a.yaml'))\n",
        ("c['b']", "c.get('s', 1)"),
        ["b: &unused 4", "s: 4"],
    ),
    "an alias": (
        "a.yaml",
        "workers: &w 8\nb: *w  # as many\ns: 2\n",
        "c = yaml.safe_load(open('a.yaml'))\n",
        ("c['b']", "c['s']"),
        ["b: 4  # as many", "s: 4"],
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_the_literal_beside_is_changed_and_its_file_named(name: str, tmp_path: Path) -> None:
    path, text, load, (batch, steps), lines = BESIDE[name]
    script = program(load, batch, steps)
    answer = fixed(tmp_path, {"train.py": script, path: text})
    assert {file.relative_to(tmp_path).as_posix() for file in answer.texts} == {"train.py", path}
    written = answer.texts[tmp_path / path]
    if lines is None:
        assert written == text.replace("n: 8, k: 2", "n: 4, k: 4")
        lines = differing(text, written)
    assert differing(text, written) == lines
    (renamed,) = differing(script, answer.texts[tmp_path / "train.py"])
    assert fixed_path(Path(path)).as_posix() in renamed or f"'{fixed_path(Path(path)).name}'" in renamed
    assert answer.notes == ()


SHARED = {
    "an anchor others use": ("b: &w 8\nworkers: *w\ns: 2\n", "c['b']", "c['s']", "other settings"),
    "a block that is merged": (
        "base: &base\n  b: 8\n  s: 2\nevaluation:\n  <<: *base\n",
        "c['base']['b']",
        "c['base']['s']",
        "other settings",
    ),
    "one value for both": ("b: 8\ns: 2\n", "c['b']", "c['b'] // 4", ""),
    "computed from it": ("b: 4\ns: 2\n", "c['b'] * 2", "c['s']", ""),
    "computed by a function": ("b: '8'\ns: 2\n", "int(c['b'])", "c['s']", ""),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_others_have_too_or_is_computed_is_left(name: str, tmp_path: Path) -> None:
    text, batch, steps, why = SHARED[name]
    script = program("c = yaml.safe_load(open('c.yaml'))\n", batch, steps)
    if name == "one value for both":  # what follows from the changed value follows it
        with pytest.raises(ConfigError):
            fixed(tmp_path, {"t.py": script, "c.yaml": text})
        return
    with pytest.raises(ConfigError) as caught:
        fixed(tmp_path, {"t.py": script, "c.yaml": text})
    assert why in caught.value.message
    assert not list(tmp_path.glob("*.fixed.*"))


def test_the_weights_type_of_a_model_that_the_trainer_loads_is_handed_on(tmp_path: Path) -> None:
    """TRL loads what it is named in float32; what hands it another type is a setting of its arguments."""
    named = program("", "8", "2").replace("SFTTrainer(model,", 'SFTTrainer("Qwen/Qwen2.5-1.5B",')
    named = "\n".join(line for line in named.splitlines() if not line.startswith("model =")) + "\n"
    answer = fixed(tmp_path, {"train.py": named}, precision="bf16-autocast")
    (text,) = answer.texts.values()
    assert 'model_init_kwargs={"dtype": "bfloat16"}' in text
    assert "bf16=True" in text
    handed = named.replace("bf16=True", 'bf16=True, model_init_kwargs={"dtype": "float32"}')
    for other in (handed, program("", "8", "2")):
        (tmp_path / "other.py").write_text(other)
        config = read_config(tmp_path / "other.py", model=MODEL)
        assert not config.allows(config.setup.replace(precision="bf16-pure"), in_place=True)


def test_a_path_that_is_no_literal_is_said(tmp_path: Path) -> None:
    script = program("c = yaml.safe_load(open(sys.argv[1]))\n", "c['b']", "c['s']")
    answer = fixed(tmp_path, {"t.py": script, "mine.yaml": "b: 8\ns: 2\n"}, sets=("mine.yaml",))
    assert answer.texts == {tmp_path / "mine.yaml": "b: 4\ns: 4\n"}
    assert answer.notes == ("t.py names mine.yaml by no literal: hand it mine.fixed.yaml",)


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
    answer = fixed(tmp_path, {"n.ipynb": text})
    before, after = (json.loads(source)["cells"] for source in (text, answer.texts[tmp_path / "n.ipynb"]))
    assert [new_cell for new_cell, two in zip(after, before, strict=True) if new_cell != two] == [after[2]]
    assert [line for line in after[2]["source"] if line not in before[2]["source"]] == lines


def test_a_cell_that_sets_it_twice_is_left(tmp_path: Path) -> None:
    text = notebook(HEAD, "A = [8, 2]\nB, S = A", TAIL.format(more=GIVEN.format("B", "S")))
    with pytest.raises(ConfigError):
        fixed(tmp_path, {"n.ipynb": text})


AXOLOTL = """# the run
base_model: Qwen/Qwen2.5-1.5B
sequence_len: 1024
micro_batch_size: 8  # too much
gradient_accumulation_steps: 2
bf16: true
learning_rate: 1.0e-5
datasets: [{path: rows, type: alpaca}]
"""
TRL = "model_name_or_path: Qwen/Qwen2.5-1.5B\n"
TRL += "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nmax_length: 1024\n"
LAUNCHED = {
    "a tool's YAML": ({"go.sh": "# x.yaml\naxolotl train x.yaml\n", "x.yaml": AXOLOTL}, "axolotl train x.fixed.yaml"),
    "from a folder": (
        {"go.sh": "cd sub\naccelerate launch -m axolotl.cli.train conf/x.yaml\n", "sub/conf/x.yaml": AXOLOTL},
        "accelerate launch -m axolotl.cli.train conf/x.fixed.yaml",
    ),
    "an equals sign": ({"go.sh": "trl sft --config=./y.yml\n", "y.yml": TRL}, "trl sft --config=./y.fixed.yml"),
    "a variable's folder": (
        {"go.sh": "trl sft \\\n  --config $HERE/y.yaml\n", "y.yaml": TRL},
        "  --config $HERE/y.fixed.yaml",
    ),
    "a program's call": (
        {"go.sh": "torchrun --nproc_per_node=1 t.py\n", "t.py": program("", "8", "2")},
        "torchrun --nproc_per_node=1 t.fixed.py",
    ),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launch_takes_the_fixed_file(name: str, tmp_path: Path) -> None:
    """A setting that nobody says yet goes where the others stand."""
    files, line = LAUNCHED[name]
    answer = fixed(tmp_path, files, checkpointing=1 - read_setup(files, tmp_path).checkpointing)
    assert differing(files["go.sh"], answer.texts[tmp_path / "go.sh"]) == [line]
    (other,) = {*answer.texts} - {tmp_path / "go.sh"}
    if other.suffix != ".py":
        was, now = (yaml.safe_load(text) for text in (files[[*files][1]], answer.texts[other]))
        assert {key: now[key] for key in was} != was
        assert {key for key in now if key not in was} <= {
            "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        }  # fmt: skip


def read_setup(files: dict[str, str], folder: Path) -> TrainSetup:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_config(folder / next(iter(files)), model=MODEL).setup


def test_three_files_in_a_row(tmp_path: Path) -> None:
    files = {
        "go.sh": "python scripts/t.py\n",
        "scripts/t.py": program("c = yaml.safe_load(open('conf/c.yaml'))\n", "c['b']", "c['s']"),
        "conf/c.yaml": "b: 8\ns: 2\n",
    }
    answer = fixed(tmp_path, files)
    assert {file.relative_to(tmp_path).as_posix() for file in answer.texts} == {*files}
    assert answer.texts[tmp_path / "conf/c.yaml"] == "b: 4\ns: 4\n"


PARSED = (
    HEAD
    + """from transformers import HfArgumentParser
(args,) = HfArgumentParser((SFTConfig,)).parse_yaml_file(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", dtype="bfloat16")
SFTTrainer(model, args=args, train_dataset=data).train()
"""
)


def test_a_parsers_yaml_takes_new_settings(tmp_path: Path) -> None:
    given = (
        "output_dir: o\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nbf16: true\nmax_length: 512\n"
    )
    files = {"go.sh": "python t.py mine.yaml\n", "t.py": PARSED, "mine.yaml": given}
    answer = fixed(tmp_path, files, optimizer="sgd")
    assert {path.name for path in answer.texts} == {"go.sh", "mine.yaml"}
    written = yaml.safe_load(answer.texts[tmp_path / "mine.yaml"])
    assert written == yaml.safe_load(given) | {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "optim": "sgd",
    }  # fmt: skip


def test_a_notebook_that_starts_a_script_takes_the_fixed_one(tmp_path: Path) -> None:
    """Its outputs, which say the old name too, stay as they are."""
    files = {"n.ipynb": notebook("!python t.py --x", "# t.py is ours"), "t.py": program("", "8", "2")}
    files["n.ipynb"] = files["n.ipynb"].replace('"outputs": []', '"outputs": [{"text": "ran t.py"}]')
    answer = fixed(tmp_path, files)
    text = answer.texts[tmp_path / "n.ipynb"]
    assert (text.count("t.fixed.py"), text.count("ran t.py"), text.count("# t.py is ours")) == (1, 2, 1)


@pytest.mark.parametrize("cells", [True, False])
def test_a_file_that_the_checked_one_writes_is_changed_in_it(cells: bool, tmp_path: Path) -> None:
    if cells:
        files = {"n.ipynb": notebook("%%writefile x.yaml\n" + AXOLOTL, "!axolotl train x.yaml")}
    else:
        files = {"go.sh": f"cat > x.yaml <<'EOF'\n{AXOLOTL}EOF\naxolotl train x.yaml\n"}
    answer = fixed(tmp_path, files)
    (text,) = answer.texts.values()
    assert "micro_batch_size: 4  # too much" in text
    assert text.count("axolotl train x.yaml") == 1


def test_an_imported_module_is_left(tmp_path: Path) -> None:
    """No name of it could say another file."""
    script = program("from settings import B, S\n", "B", "S")
    with pytest.raises(ConfigError, match="imported"):
        fixed(tmp_path, {"t.py": script, "settings.py": "B = 8\nS = 2\n"})


@pytest.mark.parametrize(
    ("more", "out"), [("", "c.yaml"), ("", "c.fixed.yaml"), ("json.load(open('c.fixed.yaml'))\n", "")]
)
def test_nothing_is_written_over_a_file_that_was_read(
    more: str, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = program(f"{more}c = yaml.safe_load(open('c.yaml'))\n", "c['b']", "c['s']")
    files = {"t.py": script, "c.yaml": "b: 8\ns: 2\n", "c.fixed.yaml": "{}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = ["check", str(tmp_path / "t.py"), "--gpu", "rtx-4090", "--no-dry-run", "--fix", "--memory-gib", "17"]
    assert run([*words, *(["--out", str(tmp_path / out)] if out else [])]) == 2
    assert "over a file" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
