"""Programs that load their settings through helpers of their own, and settings in their own words."""

import json
from pathlib import Path

import pytest

from planner.core.errors import NotPlanned
from planner.frameworks.readers import FileContext, ReadConfig, read_config, read_text
from tests.planner.helpers import open_fields, says

SETTINGS = """
model: {name: Qwen/Qwen3-0.6B, max_len: 512}
lora: {r: 8, lora_alpha: 16, target_modules: [q_proj, v_proj]}
training: {per_device_train_batch_size: 2, gradient_accumulation_steps: 4, gradient_checkpointing: true, bf16: true}
"""
TRAINS = """
import json, os, sys, yaml, torch, argparse
from pathlib import Path
from collections.abc import Mapping
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
{load}
model = AutoModelForCausalLM.from_pretrained(cfg["model"]["name"], dtype=torch.bfloat16)
args = SFTConfig("out", max_length=cfg["model"]["max_len"], **cfg["training"])
SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=LoraConfig(**cfg["lora"])).train()
"""


def project(folder: Path, load: str, settings: str) -> Path:
    (folder / ".git").mkdir()
    (folder / "conf").mkdir()
    (folder / "code").mkdir()
    (folder / "code" / "tune.py").write_text(TRAINS.replace("{load}", load), "utf-8")
    (folder / "conf" / "small.yaml").write_text(settings, "utf-8")
    return folder / "conf" / "small.yaml"


LOADS = {
    "extended": "def load(path):\n    one = yaml.safe_load(Path(path).open())\n    if 'parent' in one:\n"
    "        one = merged(load(Path(path).parent / one.pop('parent')), one)\n    return one\n"
    "def merged(a, b):\n    out = dict(a)\n    for k, v in b.items():\n"
    "        out[k] = merged(out[k], v) if k in out and isinstance(out[k], dict) and isinstance(v, dict) else v\n"
    "    return out\ncfg = load('conf/small.yaml')",
    "filled in": "def filled(o):\n    if isinstance(o, str):\n        return os.path.expandvars(o)\n"
    "    if isinstance(o, list):\n        return [filled(x) for x in o]\n    if isinstance(o, Mapping):\n"
    "        return {k: filled(v) for k, v in o.items()}\n    return o\n"
    "cfg = filled(yaml.safe_load(open('conf/small.yaml')) or {})\ncfg.pop('parent', None)",
    "upon defaults": "cfg = json.loads(json.dumps({'training': {}, 'model': {'name': 'x'}}))\n"
    "if os.path.exists('conf/small.yaml'):\n    cfg.update(yaml.safe_load(open('conf/small.yaml')))\n",
}


@pytest.mark.parametrize("case", LOADS)
def test_settings_are_followed_through_helpers_that_call_themselves(case: str, tmp_path: Path) -> None:
    settings = SETTINGS.replace("gradient_accumulation_steps: 4, ", "") if case == "extended" else SETTINGS
    file = project(tmp_path, LOADS[case], f"parent: base.yaml\n{settings}" if case == "extended" else settings)
    (file.parent / "base.yaml").write_text("training: {gradient_accumulation_steps: 4}", "utf-8")
    config = read_config(tmp_path / "code" / "tune.py")
    assert not config.missing
    assert (config.setup.accumulation_steps, config.setup.seq_len_tokens) == (4, 512)


def own(text: str) -> ReadConfig:
    return read_text(f"model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 512\nbatch_size: 2\n{text}", "x.yaml")


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("tuning_method: full-finetune", "full"),
        ("finetune_type: QLoRA\nrank: 16\nalpha: 32", "qlora"),
        ("training: {mode: lora_dpo_free, gradient_accumulation_steps: 2}\nadapter: {rank: 16, alpha: 32}", "lora"),
    ],
)
def test_a_method_in_a_programs_own_words_is_not_asked_for(text: str, method: str) -> None:
    config = own(f"{text}\nlora_alpha: 1\ngradient_accumulation_steps: 2")
    assert "method" not in {gap.field for gap in config.missing}
    assert (config.setup.method, config.setup.lora_rank) == (method, 0 if method == "full" else 16)


@pytest.mark.parametrize("text", ["mode: train", "method: sft", "distributed: {rank: 1, world: 4}"])
def test_other_words_of_those_names_leave_the_method_open(text: str) -> None:
    config = own(f"{text}\ngradient_accumulation_steps: 2")
    assert "method" in {gap.field for gap in config.missing}


RECIPE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: MAX}
dataset: {_component_: torchtune.datasets.DATASET, max_seq_len: 1024}
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 8}
checkpointer: {checkpoint_dir: /x/Meta-Llama-3.1-8B-Instruct}
optimizer: {_component_: torch.optim.AdamW}
batch_size: 2
gradient_accumulation_steps: 1
loss: {_component_: LOSS}
"""


@pytest.mark.parametrize(
    "loss", ["torchtune.modules.loss.ORPOLoss", "mine.losses.FocalLoss", "torchtune.rlhf.loss.SimPOLoss"]
)
def test_a_torchtune_recipe_of_another_loss_is_refused_by_its_name(loss: str) -> None:
    with pytest.raises(NotPlanned, match=loss.rpartition(".")[2]):
        read_text(RECIPE.replace("LOSS", loss).replace("MAX", "512"), "x.yaml")


@pytest.mark.parametrize(("limit", "length"), [("512", 512), ("null", 1024)])
def test_a_torchtune_recipe_is_cut_by_its_tokenizer_or_its_data(limit: str, length: int) -> None:
    text = RECIPE.replace("LOSS", "torchtune.modules.loss.LinearCrossEntropyLoss").replace("MAX", limit)
    says(read_text(text, "x.yaml"), "seq_len_tokens", length)


@pytest.mark.parametrize("module", ["compileall src", "unittest discover", "zipfile -l x.zip", "build --wheel"])
def test_pythons_own_modules_in_a_script_are_no_training(module: str, tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text(TRAINS.replace("{load}", f"cfg = yaml.safe_load('''{SETTINGS}''')"), "utf-8")
    around = FileContext(roots=(tmp_path,))
    config = read_text(f"python -m {module}\npython tune.py\n", "run.sh", around=around)
    assert config.setup.micro_batch_seqs == 2
    assert not any("launches 2" in assumption for assumption in config.assumptions)


def test_a_module_of_ones_own_under_a_name_of_pythons_is_started(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    text = TRAINS.replace("{load}", f"cfg = yaml.safe_load('''{SETTINGS}''')")
    (tmp_path / "code" / "profile.py").write_text(text, "utf-8")
    config = read_text("python -m code.profile\n", "run.sh", around=FileContext(roots=(tmp_path,)))
    assert config.setup.micro_batch_seqs == 2


PROGRAM = """
from types import SimpleNamespace
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
{before}
q = BitsAndBytesConfig(load_in_4bit=True) if {test} else None
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", quantization_config=q)
SFTTrainer(model=model, args=SFTConfig(max_length=512), train_dataset=ds, peft_config=LoraConfig(r=8)).train()
"""


@pytest.mark.parametrize(
    ("before", "test", "quantization"),
    [
        ("c = OmegaConf.create({'four': True})", "hasattr(c, 'four') and c.four", "nf4"),
        ("c = SimpleNamespace(bits=8)", "hasattr(c, 'four')", "none"),
        ("class C:\n    four = True\nc = C()", "hasattr(c, 'four')", "nf4"),
    ],
)
def test_what_settings_have_is_known_where_they_are(before: str, test: str, quantization: str) -> None:
    says(read_text(PROGRAM.format(before=before, test=test), "t.py"), "quantization", quantization)


def test_what_unknown_settings_have_is_asked_for() -> None:
    config = read_text(PROGRAM.format(before="import sys\nc = sys.modules", test="hasattr(c, 'four')"), "t.py")
    assert {gap.field for gap in config.missing} & {"method", "quantization"}


@pytest.mark.parametrize(
    "install",
    [
        '!uv pip install --system torch \\\n    "trl==0.24.0" peft \\\n    bitsandbytes\n',
        "%pip install -q \\\n  transformers==4.57.1 \\\n  trl==0.24.0\n",
        "!pip install -qU accelerate \\\n   trl==0.24.0 datasets\n",
    ],
)
def test_versions_are_read_where_an_install_goes_over_lines(install: str) -> None:
    config = read_text(f"{install}{PROGRAM.format(before='', test='False')}", "t.py")
    assert not any("no TRL version named" in assumption for assumption in config.assumptions)
    assert config.setup.loss == "full"  # the head is cut since 1.7


CELLS = (
    "import trl\ndef prep(b):\n    return tok(b['t'], truncation=True, max_length={length})\n",
    "from transformers import AutoModelForCausalLM, AutoTokenizer\nfrom trl import SFTConfig, SFTTrainer\n"
    "tok = AutoTokenizer.from_pretrained('Qwen/Qwen3-0.6B')\ntok.model_max_length = 300\nds = ds.map(prep)\n"
    "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B')\n"
    "SFTTrainer(model=model, args=SFTConfig('o'), train_dataset=ds).train()\n",
)


@pytest.mark.parametrize(("length", "tokens"), [("300", 300), ("tok.model_max_length", 300), ("2048", 1024)])
def test_rows_that_a_notebook_cuts_itself_are_as_long_as_it_cuts_them(length: str, tokens: int) -> None:
    cells = [{"cell_type": "code", "source": [text.format(length=length)]} for text in CELLS]
    assert read_text(json.dumps({"cells": cells}), "n.ipynb").setup.seq_len_tokens == tokens


PLACED = """
import argparse
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("size", type=int)
p.add_argument("-n", "--name")
p.add_argument("--fast", action="store_true")
a = p.parse_args()
model = AutoModelForCausalLM.from_pretrained(a.model)
SFTTrainer(model, args=SFTConfig(max_length=512, per_device_train_batch_size=a.size), train_dataset=ds).train()
"""


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("Qwen/Qwen3-0.6B 3", True), ("--fast Qwen/Qwen3-0.6B --name x 3", True), ("-n=y Qwen/Qwen3-0.6B 3", True),
        ("", False), ("Qwen/Qwen3-0.6B", False), ("--other 4 Qwen/Qwen3-0.6B 3", False),
    ],
)  # fmt: skip
def test_options_by_their_place_are_those_of_the_command_line(words: str, given: bool) -> None:
    config = read_text(PLACED, "t.py", around=FileContext(arguments=tuple(words.split())))
    if given:
        says(config, "model_id micro_batch_seqs", ("Qwen/Qwen3-0.6B", 3))
    else:
        assert "micro_batch_seqs" in open_fields(config)


MERGED = """
import sys, yaml
from dataclasses import dataclass, field
from typing import cast
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
@dataclass
class Inner:
    batch: int = 3
@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
{merge}
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
SFTTrainer(model, args=SFTConfig(max_length=512, per_device_train_batch_size={value}), train_dataset=ds).train()
"""
SAID = "yaml.safe_load(open(sys.argv[1]))"


@pytest.mark.parametrize(
    ("merge", "value", "is_open"),
    [
        (f"c = {{**{{'batch': 3}}, **{SAID}}}", "c['batch']", True),
        (f"c = dict(batch=3)\nc.update({SAID})", "c['batch']", True),
        ("c = OmegaConf.merge(OmegaConf.structured(Outer), OmegaConf.load(sys.argv[1]))", "c.inner.batch", True),
        (f"c = {{'a': 1, 'batch': 3}} | {{'b': 2, **{SAID}}}", "c['batch']", True),
        (f"c = {{**{SAID}, 'batch': 3}}", "c['batch']", False),
        (f"c = {{'b': {SAID}}}\nc.update(batch=3)", "c['batch']", False),
        ("c = OmegaConf.merge(OmegaConf.structured(Outer), OmegaConf.create({'x': 1}))", "c.inner.batch", False),
        ("c = cast('Outer', Outer())", "c.inner.batch", False),
        (f"def f(batch, **more):\n    return batch\nb = f(batch=3, **{SAID})", "b", False),
    ],
)
def test_defaults_under_settings_that_are_not_at_hand_are_not_known(merge: str, value: str, is_open: bool) -> None:
    config = read_text(MERGED.format(merge=merge, value=value), "t.py")
    if is_open:
        assert "micro_batch_seqs" in open_fields(config)
    else:
        says(config, "micro_batch_seqs", 3)


@pytest.mark.parametrize(
    "count",
    [
        "echo $DEVICES | tr ',' '\\n' | wc -l",
        'echo "$DEVICES" | tr "," "\\n" | wc -l',
        "echo $DEVICES | awk -F',' '{print NF}'",
    ],
)
def test_gpus_that_a_script_counts_in_a_list_are_counted(count: str, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(MERGED.format(merge="", value="3"), "utf-8")
    text = f"DEVICES=0,2,3\nN=$({count})\ntorchrun --nproc_per_node $N t.py\n"
    says(read_text(text, "run.sh", around=FileContext(roots=(tmp_path,))), "num_gpus", 3)


FIRED = """
import fire
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
def train(base, targets=("q_proj",), r=8):
    model = AutoModelForCausalLM.from_pretrained(base)
    SFTTrainer(model, args=SFTConfig(max_length=512), train_dataset=ds,
               peft_config=LoraConfig(r=r, target_modules=targets)).train()
fire.Fire(train)
"""


@pytest.mark.parametrize("given", ["[q_proj,v_proj]", "['q_proj', 'v_proj']", '["q_proj","v_proj"]'])
def test_a_list_on_fires_command_line_is_a_list(given: str) -> None:
    around = FileContext(arguments=("--base", "Qwen/Qwen3-0.6B", "--targets", given, "--r", "4"))
    says(read_text(FIRED, "t.py", around=around), "lora_targets lora_rank", (("q_proj", "v_proj"), 4))


@pytest.mark.parametrize("tool", ["$(which swift)", "`which swift`", "$(command -v swift)"])
def test_a_command_by_where_it_is_found_is_that_command(tool: str) -> None:
    text = f"{tool} sft --model Qwen/Qwen3-0.6B --max_length 512 --per_device_train_batch_size 3\n"
    assert read_text(text, "run.sh").setup.micro_batch_seqs == 3


@pytest.mark.parametrize("module", ["tuning", "tuning.fit", "src.tuning"])
def test_a_package_that_is_started_is_read_from_its_main(module: str, tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*module.split("."))
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text(MERGED.format(merge="", value="3"), "utf-8")
    config = read_text(f"python -m {module} --x 1\n", "run.sh", around=FileContext(roots=(tmp_path,)))
    assert config.setup.micro_batch_seqs == 3


@pytest.mark.parametrize("absent", ["'batch' not in c", "not 'batch' in c", "('batch' in c) is False"])
def test_what_a_namespace_has_is_known(absent: str) -> None:
    merge = f"from argparse import Namespace\nc = Namespace(**{{'a': 1}})\nif {absent}:\n    c.batch = 3"
    says(read_text(MERGED.format(merge=merge, value="c.batch"), "t.py"), "micro_batch_seqs", 3)


def test_a_tool_under_a_launcher_is_that_tool() -> None:
    text = "torchrun --nproc_per_node 2 \\\n  $(which swift) sft --model Qwen/Qwen3-0.6B --max_length 512\n"
    config = read_text(text, "run.sh")
    assert (config.format, config.setup.num_gpus) == ("ms-swift", 2)


def test_a_function_that_calls_itself_under_open_conditions_is_read_once() -> None:
    safe = "def safe(x):\n" + "".join(
        f"    if kind{n}(x):\n        return {{k: safe(v) for k, v in dict(a=x, b=1, c=2).items()}}\n" for n in range(6)
    )
    config = read_text(MERGED.format(merge=f"{safe}    return x\nlog(safe(dict(a=1, b=2)))", value="3"), "t.py")
    assert config.setup.micro_batch_seqs == 3  # in time: else more than is followed
