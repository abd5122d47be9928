"""Training programs are read by following their values; what only running them would tell is asked for."""

import json
from pathlib import Path

import pytest

from planner.core.errors import ConfigError, Undetermined, UsageError
from planner.frameworks.readers import FileContext, loading, read_config, read_text
from planner.frameworks.readers.types import ReadConfig, determined, overrides, parse_sets, parse_versions
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.predict import predict
from tests.planner.helpers import open_fields, says

HEAD = """
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
"""
TRAIN = """
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16)
trainer = SFTTrainer(model, args=SFTConfig(per_device_train_batch_size={batch}, max_length=512))
trainer.train()
"""


def read(body: str, *, name: str = "train.py", arguments: tuple[str, ...] | None = None, gpu: str = "") -> ReadConfig:
    context = FileContext(arguments=arguments, gpu=find_gpu(gpu) if gpu else None)
    return read_text(HEAD + body, name, around=context)


BATCHES = {
    "a condition of type checkers": ("from typing import TYPE_CHECKING\nX = 4\nif TYPE_CHECKING:\n    X = 64\n", "X"),
    "a literal": ("", "4"),
    "a constant": ("BATCH = 4\n", "BATCH"),
    "arithmetic": ("TOTAL, STEPS = 32, 8\n", "TOTAL // STEPS"),
    "a dictionary": ("config = {'train': {'batch': 4}}\n", "config['train']['batch']"),
    "a default of get": ("config = {}\n", "config.get('batch', 4)"),
    "a function's default": ("def batch(n=4):\n    return n\n", "batch()"),
    "a class of settings": ("class Config:\n    batch = 4\nconfig = Config()\n", "config.batch"),
    "a dataclass": (
        "from dataclasses import dataclass, field\n@dataclass\nclass C:\n    batch: int = field(default=4)\nc = C()\n",
        "c.batch",
    ),
    "a table that classes of pydantic describe": (
        "from pydantic import BaseModel\nclass Run(BaseModel):\n    batch: int = 8\n    steps: int = 2\n"
        "class All(BaseModel):\n    run: Run = Run()\nc = All.model_validate({'run': {'batch': 4}})\n",
        "c.run.batch",
    ),
    "an environment default": ("import os\n", "int(os.environ.get('BATCH', '4'))"),
    "a known condition": ("import torch\n", "4 if torch.cuda.is_available() else 1"),
    "another maker's card": ("import torch\n", "1 if torch.xpu.is_available() else 4"),
    "a type's truth": ("import torch\nt = getattr(torch, 'bfloat16')\n", "4 if t and t.is_floating_point else 1"),
    "a branch never taken": ("BATCH = 4\nif False:\n    BATCH = 64\n", "BATCH"),
    "argparse": (
        "import argparse\np = argparse.ArgumentParser()\n"
        "p.add_argument('--batch-size', type=int, default=4)\na = p.parse_args()\n",
        "a.batch_size",
    ),
    "argparse in main": (
        "import argparse\ndef args():\n    p = argparse.ArgumentParser()\n    g = p.add_argument_group('x')\n"
        "    g.add_argument('--batch', default=4)\n    return p.parse_args()\na = args()\n",
        "a.batch",
    ),
    "a loop over known names": ("for one in (1, 2, 4):\n    BATCH = one\n", "BATCH"),
    "a comprehension": ("sizes = [n for n in (2, 4, 8) if n > 2]\n", "sizes[0]"),
    "text as a number": ("BATCH = '4'\n", "int(BATCH)"),
    "a line that begins with a percent sign": ("print(\n    'batch: %s'\n    % 4\n)\n", "4"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_followed_to_where_it_is_written(name: str) -> None:
    before, expression = BATCHES[name]
    says(read(before + TRAIN.format(batch=expression)), "micro_batch_seqs", 4)


UNKNOWN = {
    "no default": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--b', required=True)\n"
    "X = p.parse_args().b\n",
    "the environment": "import os\nX = int(os.environ['BATCH'])\n",
    "a condition": "import os\nX = 1\nif os.path.exists('big'):\n    X = 8\n",
    "another module": "from settings import X\n",
    "a computation": "X = max(len(open('data').read()), 1)\n",
    "a while loop": "X = 1\nwhile fits(X):\n    X = X * 2\n",
    "foreign code": "X = find_batch_size()\n",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_running_would_tell_is_asked_for(name: str) -> None:
    config = read(UNKNOWN[name] + TRAIN.format(batch="X"))
    assert open_fields(config) == {"micro_batch_seqs"}
    with pytest.raises(Undetermined, match="micro_batch_seqs") as caught:
        determined(config)
    assert caught.value.exit_code == 3
    assert "--set micro_batch=N" in caught.value.hint
    answered = determined(overrides(config, parse_sets(["micro_batch=2"])))
    assert answered.setup.micro_batch_seqs == 2
    assert answered.origins["micro_batch_seqs"] == "--set"


def test_words_of_the_command_line_replace_defaults() -> None:
    script = (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--batch', type=int, default=4)\n"
        "p.add_argument('--lora', action='store_true')\na = p.parse_args()\n"
        "peft = LoraConfig(r=32) if a.lora else None\n"
        'model = AutoModelForCausalLM.from_pretrained("gpt2", dtype="float32")\n'
        "SFTTrainer(model, args=SFTConfig(per_device_train_batch_size=a.batch, bf16=False), peft_config=peft).train()\n"
    )
    plain, given = read(script), read(script, arguments=("--batch=2", "--lora"))
    assert (plain.setup.method, plain.setup.micro_batch_seqs) == ("full", 4)
    assert (given.setup.method, given.setup.micro_batch_seqs, given.setup.lora_rank) == ("lora", 2, 32)


def test_a_word_of_the_programs_own_class_is_none_of_a_librarys() -> None:
    """`max_seq_length`, which SFTConfig itself took until TRL 0.19."""
    script = (
        "from dataclasses import dataclass\nfrom transformers import HfArgumentParser\n"
        "@dataclass\nclass Words:\n    max_seq_length: int = 512\n"
        "mine, args = HfArgumentParser((Words, SFTConfig)).parse_args_into_dataclasses()\n"
        'model = AutoModelForCausalLM.from_pretrained("gpt2", dtype="bfloat16")\n'
        "args.max_length = mine.max_seq_length\nSFTTrainer(model, args=args).train()\n"
    )
    config = read(script, arguments=("--max_seq_length", "2048"))
    assert (config.setup.seq_len_tokens, config.setup.checkpointing) == (2048, 1)
    assert not any("0.19" in assumption for assumption in config.assumptions)


def test_settings_of_a_parser_of_dataclasses_come_from_the_command_line() -> None:
    script = (
        "from transformers import HfArgumentParser\n"
        "parser = HfArgumentParser((TrainingArguments,))\n(args,) = parser.parse_args_into_dataclasses()\n"
        'model = AutoModelForCausalLM.from_pretrained("gpt2", dtype="bfloat16")\ntok = AutoTokenizer()\n'
        "tok(['x'], truncation=True, max_length=256)\nTrainer(model, args).train()\n"
    )
    assert {"micro_batch_seqs", "accumulation_steps", "checkpointing", "precision"} <= open_fields(read(script))
    given = read(
        script, arguments=("--per_device_train_batch_size", "3", "--bf16", "--gradient_checkpointing", "False")
    )
    assert not given.missing
    setup = given.setup
    assert (setup.micro_batch_seqs, setup.precision, setup.checkpointing) == (3, "bf16-autocast", 0)
    assert setup.seq_len_tokens == 256  # the longest that the tokenizer is told to cut to


TRL_SCRIPT = """
from trl import ModelConfig, ScriptArguments, TrlParser, get_kbit_device_map, get_peft_config, get_quantization_config
def main(script_args, training_args, model_args):
    kwargs = dict(attn_implementation=model_args.attn_implementation, dtype=model_args.dtype)
    quantization_config = get_quantization_config(model_args)
    if quantization_config is not None:
        kwargs["device_map"] = get_kbit_device_map()
        kwargs["quantization_config"] = quantization_config
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, **kwargs)
    SFTTrainer(model=model, args=training_args, peft_config=get_peft_config(model_args)).train()
main(*TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config())
"""


def test_scripts_in_the_form_of_trls_own_are_read_with_their_recipe(tmp_path: Path) -> None:
    (tmp_path / "sft.py").write_text(HEAD + TRL_SCRIPT)
    (tmp_path / "recipe.yaml").write_text(
        "model_name_or_path: gpt2\ndtype: bfloat16\nload_in_4bit: true\nuse_peft: true\nlora_r: 4\nmax_length: 64\n"
    )
    (tmp_path / "run.sh").write_text("accelerate launch sft.py --config recipe.yaml --max_length 128\n")
    config = read_config(tmp_path / "run.sh")
    setup = config.setup
    assert (config.model_id, setup.method, setup.quantization, setup.lora_rank) == ("gpt2", "qlora", "nf4", 4)
    assert (setup.seq_len_tokens, config.origins["lora_rank"], open_fields(config)) == (128, "recipe.yaml:5", set())
    says(
        read_config(tmp_path / "sft.py", arguments=("--model_name_or_path", "gpt2")),
        "method precision",
        ("full", "bf16-mixed"),
    )
    assert {"model", "method", "quantization", "attention"} <= open_fields(read_config(tmp_path / "sft.py"))


REFUSED = {
    "DPO": "from trl import OnlineDPOTrainer\nOnlineDPOTrainer(model='gpt2', args=None).train()\n",
    "PPO": "from trl import PPOTrainer\nSFTTrainer('gpt2').train()\nPPOTrainer(model='gpt2').train()\n",
    "token classification": "from transformers import AutoModelForTokenClassification as A\n"
    "Trainer(A.from_pretrained('gpt2'), TrainingArguments()).train()\n",
    "audio": "from datasets import Audio\nfrom unsloth import FastModel\nm, t = FastModel.from_pretrained('x')\n"
    "rows = load().cast_column('audio', Audio(16000))\nSFTTrainer(m, args=SFTConfig(), train_dataset=rows).train()\n",
    "LoHaConfig": "from peft import LoHaConfig as L\nSFTTrainer('gpt2', args=SFTConfig(), peft_config=L()).train()\n",
    "SimPO": "from mine import SimPOTrainer\nSimPOTrainer('gpt2', args=TrainingArguments()).train()\n",
    "grpo": "from trl import GRPOConfig\nfrom mine import MyTrainerOfGroups as T\n"
    "T('gpt2', args=GRPOConfig()).train()\n",
    "evaluates": "t = Trainer('gpt2', TrainingArguments())\nprint(t.evaluate())\n",
    "loop of its own": "m = AutoModelForCausalLM.from_pretrained('gpt2')\nfor b in data():\n    m(b).loss.backward()\n",
}


@pytest.mark.parametrize("word", REFUSED)
def test_other_objectives_and_adapters_are_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read(REFUSED[word])


def test_a_card_answers_what_a_program_asks_it() -> None:
    body = (
        "half = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16\n"
        'model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=half)\n'
        "bf16 = torch.cuda.is_bf16_supported(including_emulation=False)\n"
        "SFTTrainer(model, args=SFTConfig(bf16=bf16, fp16=not bf16), peft_config=LoraConfig(r=8)).train()\n"
    )
    assert read(body, gpu="a100-80gb").setup.precision == "bf16-autocast"
    assert read(body, gpu="t4").setup.precision == "fp16-autocast"


@pytest.mark.parametrize(
    ("question", "on_t4"),
    [
        ("torch.cuda.is_bf16_supported()", "bf16"),
        ("is_torch_bf16_gpu_available()", "bf16"),
        ("torch.cuda.is_bf16_supported(including_emulation=False)", "fp16"),
        ("torch.cuda.is_bf16_supported(False)", "fp16"),
        ("is_bfloat16_supported()", "fp16"),
    ],
)
def test_a_card_that_emulates_bf16_says_yes_to_torch_alone(question: str, on_t4: str) -> None:
    """torch 2.9 on a T4, as `plan trace` answers too (probes/phantom/cuda.py); Unsloth asks the capability."""
    body = (
        "from transformers.utils import is_torch_bf16_gpu_available\n"
        "from unsloth_zoo.utils import is_bfloat16_supported\n"
        'model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float32)\n'
        f"bf16 = {question}\n"
        "SFTTrainer(model, args=SFTConfig(bf16=bf16, fp16=not bf16, max_length=64)).train()\n"
    )
    if "is_bfloat16" not in question:
        body = body.replace("from unsloth_zoo.utils import is_bfloat16_supported\n", "")
    assert read(body, gpu="t4").setup.precision == f"{on_t4}-mixed"
    assert read(body, gpu="a100-80gb").setup.precision == "bf16-mixed"


def test_unsloths_own_file_takes_the_cards_16_bit_type() -> None:
    text = "model: gpt2\ntraining:\n  training_type: lora\n  max_seq_length: 64\nlora: {}\n"
    for key, precision in (("t4", "fp16-autocast"), ("a100-80gb", "bf16-autocast")):
        assert read_text(text, "unsloth.yaml", around=FileContext(gpu=find_gpu(key))).setup.precision == precision


@pytest.mark.parametrize(
    ("loading", "arguments", "on_t4"),
    [
        ("dtype=None", "", "fp16"),  # the notebooks' "auto detection"
        ("", "", "fp16"),
        ("dtype=torch.float16", "", "fp16"),
        ("", "fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported()", "fp16"),
        ("", "fp16=not torch.cuda.is_bf16_supported(), bf16=torch.cuda.is_bf16_supported()", "fp16"),
    ],
)
def test_unsloth_takes_the_16_bit_type_that_the_card_computes(loading: str, arguments: str, on_t4: str) -> None:
    body = (
        "from unsloth import FastLanguageModel, is_bfloat16_supported\n"
        f"model, tok = FastLanguageModel.from_pretrained('unsloth/Llama-3.2-1B', load_in_4bit=True, {loading})\n"
        "model = FastLanguageModel.get_peft_model(model, r=16)\n"
        f"SFTTrainer(model=model, args=SFTConfig(max_length=64, {arguments})).train()\n"
    )
    assert read(body, gpu="t4").setup.precision == f"{on_t4}-autocast"
    halves = "float16" in loading
    assert read(body, gpu="a100-80gb").setup.precision == ("fp16-autocast" if halves else "bf16-autocast")


def test_modules_and_settings_beside_a_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("BATCH = 3\nraise SystemExit\n")
    (tmp_path / "run.yaml").write_text("rank: 12\n")
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + "import yaml\nfrom settings import BATCH\nwith open('run.yaml') as f:\n    cfg = yaml.safe_load(f)\n"
        "SFTTrainer('gpt2', args=SFTConfig(per_device_train_batch_size=BATCH), "
        "peft_config=LoraConfig(r=cfg['rank'])).train()\n"
    )
    config = read_config(script)
    assert (config.setup.micro_batch_seqs, config.setup.lora_rank) == (3, 12)
    assert config.origins["lora_rank"] == "run.yaml:1"


def test_packages_and_paths_from_the_programs_own_folder_are_read(tmp_path: Path) -> None:
    package = tmp_path / "mine" / "parts"
    package.mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("from .parts import load\n")
    (package / "__init__.py").write_text("from ..sizes import BATCH\nfrom . import loading\nload = loading.load\n")
    (package / "loading.py").write_text("from transformers import AutoModelForCausalLM as A\ndef load(name):\n"
                                        "    return A.from_pretrained(name, dtype='bfloat16')\n")  # fmt: skip
    (tmp_path / "mine" / "sizes.py").write_text("BATCH = 3\n")
    (tmp_path / "run.yaml").write_text("length: 96\n")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.write_text(
        HEAD + "import os, yaml\nfrom pathlib import Path\nfrom mine import load\nfrom mine.parts import BATCH\n"
        "ROOT = Path(__file__).resolve().parents[1]\ncfg = yaml.safe_load((ROOT / 'run.yaml').read_text())\n"
        "HERE = os.path.dirname(os.path.abspath(__file__))\nmodel = load(os.path.join(HERE, 'models', 'gpt2'))\n"
        "SFTTrainer(model, args=SFTConfig(per_device_train_batch_size=BATCH, max_length=cfg['length'])).train()\n"
    )
    config = read_config(script)
    assert (config.model_id, config.setup.micro_batch_seqs, config.setup.seq_len_tokens) == ("./models/gpt2", 3, 96)


def test_notebooks_are_read_cell_by_cell_with_their_pins(tmp_path: Path) -> None:
    cells = [
        "!pip install -q trl==0.15.2 transformers",
        "%%bash\nrm -rf /tmp/nothing",
        HEAD + "if True:\n    !nvidia-smi\nBATCH = 2",
        'trainer = SFTTrainer("gpt2", args=SFTConfig(per_device_train_batch_size=BATCH, bf16=True))\ntrainer.train()',
    ]
    notebook = {"cells": [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]}
    file = tmp_path / "train.ipynb"
    file.write_text(json.dumps(notebook))
    config = read_config(file)
    assert config.setup.micro_batch_seqs == 2
    assert config.origins["micro_batch_seqs"] == "train.ipynb:cell 3, line 8"
    # TRL 0.15: no checkpointing and full logits by default, unlike the newest
    assert (config.setup.checkpointing, config.setup.loss) == (0, "full")


def test_a_version_that_is_said_decides_the_defaults() -> None:
    body = "SFTTrainer('gpt2', args=SFTConfig(per_device_train_batch_size=1)).train()\n"
    old = read_text(HEAD + body, "train.py", around=FileContext(versions=parse_versions(["trl==0.18.2"])))
    new = read_text(HEAD + body, "train.py")
    assert (old.setup.checkpointing, old.setup.loss) == (0, "full")
    assert (new.setup.checkpointing, new.setup.loss) == (1, "chunked")
    assert any("no TRL version named" in assumption for assumption in new.assumptions)
    assert not any("no TRL version named" in assumption for assumption in old.assumptions)


SHELL = {
    "torchrun": ("torchrun --nproc_per_node 4 train.py --batch 2\n", 4),
    "accelerate": ("export N=2\naccelerate launch --num_processes $N \\\n  train.py \\\n --batch 2\n", 2),
    "python": ("#!/bin/sh\nset -e\nCUDA_VISIBLE_DEVICES=0 python3 -u train.py --batch $((1 + 1))\n", 1),
}


@pytest.mark.parametrize("name", SHELL)
def test_launches_in_shell_scripts_are_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        HEAD
        + "import argparse\np = argparse.ArgumentParser()\np.add_argument('--batch', type=int)\na = p.parse_args()\n"
        + TRAIN.format(batch="a.batch")
    )
    text, num_gpus = SHELL[name]
    script = tmp_path / "run.sh"
    script.write_text(text)
    config = read_config(script)
    assert (config.setup.micro_batch_seqs, config.setup.num_gpus) == (2, num_gpus)


def test_settings_of_another_program_are_not_taken_for_a_tools() -> None:
    strange = "refresh: false\ndata_tag: base\ntag: x\nwarmup: 0.1\nclip_grad_norm: 1.0\n"
    config = read_text(
        "model_name_or_path: gpt2\nper_device_train_batch_size: 4\ndata_max_length: 64\n" + strange, "a.yaml"
    )
    assert (config.format, config.setup.seq_len_tokens) == ("own settings", 64)
    assert {"method", "precision", "checkpointing"} <= open_fields(config)
    words = read_text(
        '{"pretrained_model_path": "gpt2", "peft_type": "qlora", "quantization": "4bit", "lora_rank": 8, '
        '"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "seq_length": 64, "use_flash_attn": true}',
        "a.json",
    )
    assert (words.setup.method, words.setup.quantization, words.setup.attention) == (
        "qlora",
        "nf4",
        "flash-attention-2",
    )
    json_of_a_program = '{"model_name_or_path": "gpt2", "per_device_train_batch_size": 4, "max_seq_length": 64}'
    assert {"method", "precision"} <= open_fields(read_text(json_of_a_program, "a.json"))
    with pytest.raises(ConfigError, match="simpo"):
        read_text("model_name_or_path: a\nper_device_train_batch_size: 1\nbeta: 2.0\ngamma_beta_ratio: 0.8\n", "a.yaml")
    with pytest.raises(ConfigError, match="embedding"):
        read_text("model_name_or_path: a\nper_device_train_batch_size: 1\npooling_mode: mean\n" + strange, "a.yaml")
    dpo = "loss_type: sigmoid\nbeta: 0.1\nmax_length: 640\nmax_completion_length: 128\n"
    assert (
        read_text("model_name_or_path: gpt2\nper_device_train_batch_size: 1\n" + dpo, "a.yaml").setup.objective == "dpo"
    )


def test_other_tools_files_are_read() -> None:
    flags = read_text(
        "llamafactory-cli train --deepspeed ds.json --stage sft --do_train True --model_name_or_path gpt2 "
        "--finetuning_type full --cutoff_len 64 --use_liger_kernel",
        "a.sh",
    )
    assert (flags.format, flags.setup.seq_len_tokens, flags.setup.loss) == ("llamafactory", 64, "liger")
    swift = read_text("swift sft --model Qwen/Qwen2.5-7B --tuner_type lora --max_length 2048 --lora_rank 8", "a.sh")
    assert (swift.format, swift.setup.accumulation_steps, swift.setup.loss) == ("ms-swift", 16, "full")
    litgpt = read_text("checkpoint_dir: checkpoints/a/b\nlora_r: 4\ntrain: {max_seq_length: 512}\n", "a.yaml")
    assert (litgpt.model_id, litgpt.setup.lora_targets) == ("a/b", ("q_proj", "v_proj"))
    says(
        read_text(
            "model: {_component_: torchtune.models.llama3.qlora_llama3_8b, lora_rank: 8, lora_attn_modules: [q_proj]}\n"
            "tokenizer: {max_seq_len: null}\nbatch_size: 2\n",
            "a.yaml",
        ),
        "method missing",
        ("qlora", {"seq_len_tokens"}),
    )


def test_files_that_only_spread_a_job_ask_for_the_job() -> None:
    config = read_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n", "a.yaml")
    assert {"model", "method", "micro_batch_seqs", "seq_len_tokens"} <= open_fields(config)
    sets = ["method=qlora", "rank=16", "micro_batch=1", "accumulation=4", "seq_len=512", "checkpointing=true"]
    answered = overrides(config, parse_sets([*sets, "precision=bf16-autocast"]))
    assert open_fields(answered) == {"model"}
    assert (answered.setup.parallel, answered.setup.quantization) == ("fsdp2", "nf4-double")


def test_forms_of_fsdp_are_what_they_are() -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{{0}}}\n"
    setup = read_text(text.format("fsdp_sharding_strategy: SHARD_GRAD_OP"), "a.yaml").setup
    assert (setup.parallel, setup.reshard_after_forward) == ("fsdp2", False)
    assert read_text(text.format("fsdp_sharding_strategy: 3"), "a.yaml").setup.parallel == "ddp"
    with pytest.raises(ConfigError, match="NO_WRAP"):
        read_text(text.format("fsdp_auto_wrap_policy: NO_WRAP"), "a.yaml")


def test_keys_of_wrappers_are_noted_and_slips_of_the_pen_are_errors() -> None:
    config = read_text("model_name_or_path: gpt2\nchat_template: x\ndo_train: true\nuse_peft: false\n", "a.yaml")
    assert config.unknown_keys == ("chat_template",)
    with pytest.raises(ConfigError) as caught:
        read_text("model_name_or_path: gpt2\nuse_peft: true\nper_device_train_batchsize: 4\n", "a.yaml")
    assert "per_device_train_batch_size" in caught.value.hint


def test_an_unknown_setting_given_with_set_is_an_error() -> None:
    for pair in ("nonsense=1", "micro_batch", "micro_batch=many", "packing=perhaps"):
        with pytest.raises(UsageError):
            parse_sets([pair])
    with pytest.raises(UsageError):
        parse_versions(["trl=0.22"])


HOSTILE = (
    "__import__('os').system('touch hacked')\n",
    "open('hacked', 'w').write('x')\n",
    "exec('import os; os.mkdir(\"hacked\")')\n",
    "class A:\n    def __init__(self):\n        open('hacked', 'w')\nA()\n",
    "def f(n):\n    return f(n + 1) + f(n + 2)\nf(0)\n",
    "while True:\n    pass\n",
    "x = 'a'\nfor i in range(64):\n    x = x + x\n",
    "x = 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2\n",
    "x = [0] * 10**12\n",
    "import train\n",
)


@pytest.mark.parametrize("body", HOSTILE)
def test_a_program_is_never_run(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(HEAD + body + TRAIN.format(batch=4))
    config = read_config(file)
    assert config.setup.micro_batch_seqs == 4
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


PARSED = (
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--batch', type=int)\n"
    "p.add_argument('--bf16', type=bool, default=False)\na = p.parse_args()\n" + TRAIN.format(batch="a.batch")
)
LAUNCHES = {
    "words in a variable of several lines": 'ARGS="\n  --nproc_per_node 2\n"\ntorchrun $ARGS train.py --batch 2\n',
    "an array": "args=(\n  --batch 2  # per GPU\n)\ntorchrun --nproc_per_node=2 train.py ${args[@]}\n",
    "an array that grows": 'args=(--bf16 1)\nargs+=(--batch 2)\ntorchrun --nproc-per-node 2 train.py "${args[@]}"\n',
    "a command in a variable": 'cmd="torchrun --nproc_per_node 2 train.py"\n$cmd --batch 2 > log.txt 2>&1\n',
    "a shell that is handed it": 'CMD="torchrun \\\n  --nproc_per_node 2 train.py --batch 2\n"\nsrun bash -c "$CMD"\n',
    "words behind a program's own -c": 'A="x --batch 2"\ntorchrun --nproc_per_node 2 train.py -c $A\n',
    "sums of variables": "G=2\nB=64\ntorchrun --nproc_per_node $G train.py --batch $(($B / $G / 16))\n",
    "a default of a parameter": "B=${1}\nB=${B:-2}\ntorchrun --nproc_per_node 2 train.py --batch $B\n",
    "GPUs that are counted": 'N=$(python -c "import torch; print(torch.cuda.device_count())")\n'
    "torchrun --nproc_per_node $N train.py --batch $((4 / N))\n",
    "a comment that ends in a backslash": "# torchrun old.py \\\ntorchrun --nproc_per_node 2 train.py --batch 2\n",
    "a container": "docker run --rm -v $PWD:/app image torchrun --nproc_per_node 2 train.py --batch 2\n",
    "a cluster's submit": 'submit --gpu 2 -- /bin/bash -lc "set -e && cd /x && torchrun --nproc_per_node 2 train.py '
    '--batch 2"\n',
    "a program that submits": "python submit.py --gpus 2 -- torchrun --nproc_per_node 2 train.py --batch 2\n",
    "a loop over an array": "sizes=(2 4)\nfor i in 0 1; do\n"
    "  torchrun --nproc_per_node 2 train.py --batch ${sizes[$i]}\ndone\n",
    "a folder that it goes to": 'cd "$(dirname "${BASH_SOURCE[0]}")/below"\ntorchrun --nproc_per_node 2 train.py\n',
    "another script": "bash below/other.sh --batch 2\n",
    "a job whose task is one of its words": "sbatch --gpus 2 below/job.slurm --task train --size 2\n",
    "a function of the branch that is taken": "case ${1:-two} in\n  two)\n    run() {\n"
    "      torchrun --nproc_per_node 2 train.py --batch 2\n    }\n    ;;\n  four)\n    run() {\n"
    "      torchrun --nproc_per_node 4 train.py --batch 4\n    }\n    ;;\nesac\nrun\n",
    "set-up before it": "python -m venv .venv\npip install trl\ndeepspeed --include localhost:0,1 train.py --batch 2\n",
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_shell_scripts_put_together_is_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + PARSED)
    below = tmp_path / "below"
    below.mkdir()
    (below / "train.py").write_text(HEAD + TRAIN.format(batch=2))
    (below / "other.sh").write_text('torchrun --nproc_per_node 2 train.py "$@"\n')
    (below / "job.slurm").write_text(
        'TASK=""\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --task)\n      TASK="$2"\n      shift 2\n      ;;\n'
        '    --size) B="$2"; shift 2 ;;\n  esac\ndone\nexport CMD=" \\\n  $TASK.py --batch $B\n"\n'
        'clear; srun --wait=60 bash -c "torchrun --nproc_per_node 2 $CMD" 2>&1\n'
    )
    script = tmp_path / "run.sh"
    script.write_text(LAUNCHES[name])
    config = read_config(script, num_gpus=2)
    assert (config.setup.micro_batch_seqs, config.setup.num_gpus) == (2, 2)


def test_words_that_only_the_shell_knows_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + PARSED)
    script = tmp_path / "run.sh"
    script.write_text("B=$1\npython train.py --batch $B --bf16 true\n")
    assert open_fields(read_config(script)) == {"micro_batch_seqs"}
    script.write_text(
        "swift sft --model $MODEL --tuner_type lora --max_length 512 --per_device_train_batch_size ${1}\n"
    )
    assert open_fields(read_config(script)) == {"model", "micro_batch_seqs"}
    script.write_text('TASK=""\ncase $1 in\n  --task)\n    TASK="$2"\n    ;;\nesac\npython $TASK.py --batch 2\n')
    with pytest.raises(Undetermined, match=r"\$TASK\.py") as caught:
        read_config(script)
    assert "--args" in caught.value.hint
    assert read_config(script, arguments=("--task", "train")).setup.micro_batch_seqs == 2


def test_a_launch_is_read_by_its_config_or_its_words_where_the_program_is_a_wrapper(tmp_path: Path) -> None:
    words = "stage: sft\ndo_train: true\nmodel_name_or_path: gpt2\nfinetuning_type: full\ncutoff_len: 64\n"
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "full.yaml").write_text(words)
    script = tmp_path / "examples" / "run.sh"
    script.write_text("torchrun src/train.py examples/full.yaml\n")
    assert (read_config(script).format, read_config(script).setup.seq_len_tokens) == ("llamafactory", 64)
    script.write_text(
        f"python src/train_bash.py {' '.join('--' + line.replace(':', '') for line in words.splitlines())}\n"
    )
    assert (read_config(script).format, read_config(script).setup.seq_len_tokens) == ("llamafactory", 64)
    script.write_text("python src/train.py --epochs 3\n")
    with pytest.raises(Undetermined, match=r"src/train\.py, which is not beside it") as caught:
        read_config(script)
    assert caught.value.hint.endswith(": plan check train.py --args '--epochs 3'")


LENGTHS = {
    "a slice in a function": "def cut(row):\n    LIMIT = 384\n    ids = t(row)\n    return ids[:LIMIT]\nds.map(cut)\n",
    "a slice of a row": "def cut(row):\n    return row['input_ids'][:384]\nds.map(cut)\n",
    "two parts": "import argparse\nC = Collator(source_max_len=128, target_max_len=256)\n",
    "a data set: its own": "class Data:\n    def __init__(self, seq_length):\n        pass\nData(seq_length=384)\n",
    "a local name": "def data():\n    cutoff_len = 384\n    return cutoff_len\ndata()\n",
}
PLAIN = """
model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)
Trainer(model, args=TrainingArguments(per_device_train_batch_size=4)).train()
"""


@pytest.mark.parametrize("name", LENGTHS)
def test_a_length_is_found_where_the_data_is_cut(name: str) -> None:
    says(read(LENGTHS[name] + PLAIN), "seq_len_tokens", 384)


KBIT = (
    'model = AutoModelForCausalLM.from_pretrained("gpt2", quantization_config=BitsAndBytesConfig('
    "load_in_4bit=True))\nmodel = prepare_model_for_kbit_training(model{})\n"
    "model = get_peft_model(model, LoraConfig(r=8))\n"
    "tok = AutoTokenizer()\ntok(1, truncation=True, max_length=64)\n"
    "Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=1, bf16=True)).train()\n"
)


@pytest.mark.parametrize(
    ("told", "arguments", "older_form"),
    [
        ("", "", True),
        (", gradient_checkpointing_kwargs={'use_reentrant': True}", "", True),
        (", gradient_checkpointing_kwargs={'use_reentrant': False}", "", False),
        ("", "gradient_checkpointing=True, ", False),  # the trainer switches it on again, in its own form
    ],
)
def test_peft_checkpoints_in_the_older_form_unless_told(told: str, arguments: str, older_form: bool) -> None:
    """peft 0.21 `prepare_model_for_kbit_training` hands transformers 5.23 no form, which is torch's default."""
    setup = read(KBIT.format(told).replace("bf16=True", f"{arguments}bf16=True")).setup
    assert (setup.checkpointing, setup.reentrant_checkpointing) == (1, older_form)


SAY: dict[str, dict[str, object]] = {
    "method quantization": {
        # a dictionary of quantization settings is 4 bit
        "BNB = dict(load_in_4bit=True, bnb_4bit_use_double_quant=True)\n"
        'model = AutoModelForCausalLM.from_pretrained("gpt2", quantization_config=BitsAndBytesConfig(**BNB))\n'
        "SFTTrainer(model, args=SFTConfig(), peft_config=LoraConfig(r=8)).train()\n": ("qlora", "nf4-double"),
    },
    "model_id method lora_rank seq_len_tokens": {
        # the inference cell that is switched off does not override the training
        "from unsloth import FastLanguageModel\n"
        'model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Llama-3.2-1B", max_seq_length=4096,'
        " load_in_4bit=False)\nmodel = FastLanguageModel.get_peft_model(model, r=64)\n"
        "trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2))\ntrainer.train()\n"
        "if False:\n    model, tokenizer = FastLanguageModel.from_pretrained(model_name='lora', load_in_4bit=True)\n": (
            "unsloth/Llama-3.2-1B",
            "lora",
            64,
            4096,
        ),
    },
    "adapter lora_rank": {
        # other adapters of peft leave nothing open
        "from peft import PromptTuningConfig\n"
        "SFTTrainer('gpt2', args=SFTConfig(), peft_config=PromptTuningConfig(num_virtual_tokens=8)).train()\n": (
            "prompt",
            8,
        ),
    },
    "model_id missing": {
        # adapters of peft loaded for training ask for their rank
        "from peft import PeftModel\nbase = AutoModelForCausalLM.from_pretrained('gpt2', dtype='bfloat16')\n"
        "model = PeftModel.from_pretrained(base, 'there', is_trainable=True)\n"
        "SFTTrainer(model, args=SFTConfig()).train()\n": ("gpt2", {"lora_rank"}),
        # parts of names that stand for all are none
        "def linear_modules(model):\n    return [name for name, one in model.named_modules() if one.weight]\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype='bfloat16')\nnames = set()\n"
        "for name in linear_modules(model):\n    names.add(name)\n"
        "lora = LoraConfig(r=8, target_modules=sorted(names))\n"
        "SFTTrainer(model, args=SFTConfig(max_length=64), peft_config=lora).train()\n": ("gpt2", {"lora_targets"}),
    },
    "lora_targets": {
        # names of modules that a program collects are every linear layer
        "def find_all_linear_names(model):\n    names = set()\n    for name, one in model.named_modules():\n"
        "        if isinstance(one, torch.nn.Linear):\n            names.add(name.split('.')[-1])\n"
        "    if 'lm_head' in names:\n        names.remove('lm_head')\n    return list(names)\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype='bfloat16')\n"
        "lora = LoraConfig(r=8, target_modules=find_all_linear_names(model))\n"
        "SFTTrainer(model, args=SFTConfig(max_length=64), peft_config=lora).train()\n": "all-linear",
        "def all_modules(model):\n    names = set()\n    for name, one in model.named_modules():\n"
        "        names.add(name)\n    return sorted(names)\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype='bfloat16')\n"
        "lora = LoraConfig(r=8, target_modules=list(all_modules(model)))\n"
        "SFTTrainer(model, args=SFTConfig(max_length=64), peft_config=lora).train()\n": "all-linear",
        # a set is what was put into it and not taken out
        "names = set()\nnames.add('q_proj')\nnames |= {'k_proj', 'lm_head'}\nnames.remove('lm_head')\n"
        "names.update([])\n"
        "lora = LoraConfig(r=8, target_modules=list(names))\n"
        "SFTTrainer('gpt2', args=SFTConfig(max_length=64), peft_config=lora).train()\n": ("q_proj", "k_proj"),
    },
    "eval_seqs": {
        # data that a program has loaded is there
        "from datasets import load_dataset\nval = None\nif open('x').read():\n    val = load_dataset('v').map(len)\n"
        "args = SFTConfig(max_length=64, per_device_eval_batch_size=5, eval_strategy='steps' if val else 'no')\n"
        "SFTTrainer('gpt2', args=args, eval_dataset=val).train()\n": 5,
    },
    "micro_batch_seqs": {
        # what is imported for certain is installed, with the names of its version
        "try:\n    from trl import SFTConfig\n    args = SFTConfig(per_device_train_batch_size=4)\n"
        "except ImportError:\n    args = TrainingArguments(per_device_train_batch_size=64)\n"
        "SFTTrainer('gpt2', args=args).train()\n": 4,
        "try:\n    from trl import setup_chat_format\n    batch = 64\nexcept ImportError:\n    batch = 4\n"
        "SFTTrainer('gpt2', args=SFTConfig(per_device_train_batch_size=batch)).train()\n": 4,
        # nested quotes in f strings are read by any python
        "cfg = {'a': 'b'}\nname = f\"run-{cfg[\"a\"]}\"\n" + TRAIN.format(batch=4): 4,
        # environment variables without a default are taken as not set
        "import os\ndef of(name, otherwise):\n    value = os.getenv(name)\n"
        "    return otherwise if value is None else int(value)\n"
        "SFTTrainer('gpt2', args=SFTConfig(per_device_train_batch_size=of('B', 3))).train()\n": 3,
        # a way that ends in an error is not the programs
        "import importlib, json, os\nwrong = []\nfor name in ('trl', 'peft'):\n"
        "    if importlib.metadata.version(name) != '1':\n        wrong.append(name)\n"
        "if wrong:\n    raise RuntimeError(wrong)\ntoken = os.getenv('HF_TOKEN')\n"
        "if token is None:\n    raise ValueError('no token')\n"
        "SETTINGS = json.loads('{\"batch\": 5}')\n"
        "def train(settings):\n    if not settings:\n        raise ValueError\n"
        "    SFTTrainer('gpt2', args=SFTConfig(per_device_train_batch_size=settings['batch'])).train()\n"
        "train(SETTINGS)\n": 5,
        # programs that train on request are read as if asked
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--train', action='store_true')\n"
        "a = p.parse_args()\ndef main(n):\n"
        + TRAIN.format(batch="n").replace("\n", "\n    ")
        + "\nif a.train:\n    main(4)\n": 4,
        # what leaves a loop that is followed
        "for size in sorted([7, 3, 5]):\n    if size > 4:\n        batch = size\n        break\n"
        + TRAIN.format(batch="batch"): 5,
        # choices between settings keep what both have
        "from pathlib import Path\nclass Settings:\n    batch = 6\n"
        "more = {} if Path('/data').exists() else {'revision': 'abc'}\n"
        "def train(settings=None):\n    settings = settings or Settings()\n"
        "    model = AutoModelForCausalLM.from_pretrained('gpt2', dtype=torch.bfloat16, **more)\n"
        "    SFTTrainer(model, args=SFTConfig(per_device_train_batch_size=settings.batch, max_length=64)).train()\n"
        "train(Settings())\n": 6,
    },
    "seq_len_tokens": {
        # prompt and answer cut one by one are as long as their named sum
        "from transformers import Trainer\na, b = 2048, 1024\nmax_seq_length = a + b\n"
        "def rows(row):\n    tokenizer(row, max_length=a, truncation=True)\n"
        "    tokenizer(row, max_length=b, truncation=True)\n"
        "data = data.map(rows)\n"
        "Trainer(AutoModelForCausalLM.from_pretrained('gpt2'), TrainingArguments('o')).train()\n": 3072,
    },
    "missing": {
        # lengths that contradict each other are asked for; those of a generation are none
        "def data(cutoff_len=64):\n    return 1\ndef more(cutoff_len=128):\n    return 1\ndata()\nmore()\n" + PLAIN: {
            "seq_len_tokens"
        },
        "def generate(max_length=64):\n    return max_length\ngenerate()\n" + PLAIN: {"seq_len_tokens"},
    },
    "checkpointing": {
        # training arguments given to TRL switch checkpointing off
        'SFTTrainer("gpt2", args=TrainingArguments(per_device_train_batch_size=1, bf16=True)).train()\n': 0,
        'SFTTrainer("gpt2", args=SFTConfig(per_device_train_batch_size=1, bf16=True)).train()\n': 1,
        # preparing for k-bit training switches checkpointing on
        KBIT.format(""): 1,
        KBIT.format(", use_gradient_checkpointing=False"): 0,
    },
}


@pytest.mark.parametrize(
    ("names", "body", "value"), [(names, *row) for names, rows in SAY.items() for row in rows.items()]
)
def test_what_a_program_says_is_read(names: str, body: str, value: object) -> None:
    says(read(body), names, value)


def test_what_a_program_hands_over_says_which_versions_it_cannot_run_with() -> None:
    model = "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
    old = read(model + "SFTTrainer(model, args=TrainingArguments(bf16=True), max_seq_length=64, tokenizer=1).train()\n")
    assert (old.setup.loss, old.setup.precision, old.setup.checkpointing) == ("full", "bf16-mixed", 0)
    assert old.setup.transformers_version == "4.46"  # which keeps copies of the logits
    assert any("TRL 0.12 (the newest that takes max_seq_length there)" in assumption for assumption in old.assumptions)
    four = read(
        model + "m = 64\nTrainer(model, args=TrainingArguments(evaluation_strategy='no', max_steps=1)).train()\n"
    )
    assert four.setup.precision == "fp32"
    assert any("evaluation_strategy is not in transformers 4.46" in assumption for assumption in four.assumptions)
    first = read_text(
        HEAD
        + "four = BitsAndBytesConfig(load_in_4bit=True)\n"
        + "model = AutoModelForCausalLM.from_pretrained('gpt2', quantization_config=four)\n"
        + "SFTTrainer(model, args=TrainingArguments(), peft_config=LoraConfig(r=8), max_seq_length=64).train()\n",
        "train.py",
        around=FileContext(versions={"trl": "0.4.7"}),
    )
    assert (first.setup.checkpointing, first.setup.kbit_fp32_cast) == (1, True)
    halved = read_text(
        HEAD
        + "four = BitsAndBytesConfig(load_in_4bit=True)\n"
        + "model = AutoModelForCausalLM.from_pretrained('gpt2', quantization_config=four)\n"
        + "SFTTrainer(model, args=TrainingArguments(bf16=True), peft_config=LoraConfig(r=8), packing=True).train()\n",
        "train.py",
        around=FileContext(versions={"trl": "0.7.1"}),
    )
    assert halved.setup.checkpointing == 1  # whatever the base is cast to afterwards


def test_a_condition_that_decides_a_version_asks_for_no_version() -> None:
    """--set transformers_version=VALUE was asked for: --assume says one."""
    body = "model = AutoModelForCausalLM.from_pretrained('gpt2')\nif input():\n"
    body += "    SFTTrainer(model, args=TrainingArguments(bf16=True), max_seq_length=64, tokenizer=1).train()\nelse:\n"
    body += "    SFTTrainer(model, args=SFTConfig(max_length=64)).train()\n"
    asked_for = open_fields(read(body))
    assert "loss" in asked_for
    assert not {field for field in asked_for if field.endswith("_version")}


def test_trainers_of_programs_are_what_their_names_say() -> None:
    for body, word in (
        ("class MyDPOTrainer(Trainer):\n    pass\nMyDPOTrainer(model=1, args=TrainingArguments()).train()\n", "DPO"),
        ("import pytorch_lightning as pl\npl.Trainer(max_epochs=3)\n", "Lightning"),
        ("from own import StageTrainer\nStageTrainer(1).train()\n", "trainer of its own"),
    ):
        with pytest.raises(ConfigError, match=word):
            read(body)
    with pytest.raises(ConfigError, match="has no call of TrainingArguments"):
        read("from tokenizers.trainers import BpeTrainer\nBpeTrainer(vocab_size=10)\n")


REGISTRY = """
from torchtitan.trainer import Trainer
from torchtitan.config import TrainingConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC

def small() -> Trainer.Config:
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(), hf_assets_path="./assets/hf/Llama-3.1-8B",
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree=2), activation_checkpoint=FullAC.Config(),
    )

def tuned() -> Trainer.Config:
    config = small()
    config.training.max_context_length = 1024
    config.activation_checkpoint = None
    return config
"""


def test_configs_of_torchtitan_in_python_are_read_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    registry = folder / "config_registry.py"
    registry.write_text(REGISTRY)
    with pytest.raises(Undetermined, match="2 configs: small, tuned"):
        read_config(registry)
    with pytest.raises(ConfigError, match="has no config large"):
        read_config(registry, arguments=("--config", "large"))
    small = read_config(registry, arguments=("--config", "small"), num_gpus=8).setup
    assert (small.micro_batch_seqs, small.seq_len_tokens, small.checkpointing, small.loss) == (2, 4096, 1, "chunked")
    assert (small.tensor_degree, small.parallel, small.precision) == (2, "fsdp2", "bf16-mixed")
    tuned = read_config(registry, arguments=("--config", "tuned", "--training.dtype", "bfloat16"), num_gpus=8).setup
    assert (tuned.micro_batch_seqs, tuned.seq_len_tokens, tuned.checkpointing) == (8, 1024, 0)
    assert tuned.precision == "bf16-pure"
    script = tmp_path / "run.sh"
    script.write_text('torchrun --nproc_per_node=4 -m torchtitan.train --module llama3 --config small "$@"\n')
    config = read_config(script)
    assert (config.format, config.setup.num_gpus, config.model_id) == ("torchtitan", 4, "Llama-3.1-8B")


OWN = """
model: {name: gpt2, torch_dtype: bfloat16}
lora: {r: 16, target_modules: [c_attn]}
data: {batch_size: 512}
training: {per_device_train_batch_size: 2, gradient_accumulation_steps: 8, max_seq_length: 512, bf16: true}
"""


def test_settings_of_an_unknown_program_count_and_what_they_leave_open_is_asked_for() -> None:
    config = read_text(OWN, "config.yaml")
    assert (config.format, config.model_id) == ("own settings", "gpt2")
    assert open_fields(config) == {"quantization", "checkpointing"}
    whole = OWN + "quantization: {load_in_4bit: true}\ngradient_checkpointing: true\n"
    setup = read_text(whole, "config.yaml").setup
    assert (setup.method, setup.lora_rank, setup.checkpointing, setup.seq_len_tokens) == ("qlora", 16, 1, 512)
    assert (setup.micro_batch_seqs, setup.accumulation_steps, setup.precision) == (2, 8, "bf16-autocast")
    assert open_fields(read_text(OWN + "other: {max_seq_length: 1024}\n", "c.yaml")) >= {"seq_len_tokens"}
    off = read_text(whole + "is_peft: false\nis_quantized: false\nuse_liger_kernel: true\n", "config.yaml").setup
    assert (off.method, off.quantization, off.kernels) == ("full", "none", "liger")
    strange = read_text(whole.replace("batch_size: 2", "batch_size: auto"), "config.yaml")
    assert "micro_batch_seqs" in open_fields(strange)
    unnamed = whole.replace("[c_attn]", "''")
    assert open_fields(read_text(unnamed, "config.yaml")) == {"lora_targets"}
    assert "loss" in open_fields(read_text(OWN, "config_dpo.yaml"))
    with pytest.raises(ConfigError, match="rloo"):
        read_text(OWN, "config_rloo.yaml")
    with pytest.raises(ConfigError, match="no config of a known tool"):
        read_text("name: x\nbatch_size: 4\n", "a.yaml")


def test_adapters_that_trl_would_not_use_leave_the_method_open() -> None:
    text = "model_name_or_path: gpt2\nlora_r: 8\nper_device_train_batch_size: 1\nmax_length: 64\n"
    assert open_fields(read_text(text, "sft.yaml")) == {"method"}
    assert open_fields(read_text(text + "use_peft: true\n", "sft.yaml")) == set()


def test_files_that_only_look_like_a_tools_are_not_read_as_its(tmp_path: Path) -> None:
    nested = "base_model: gpt2\nsft: {per_device_train_batch_size: 2, max_length: 64}\n"
    assert read_text(nested, "training.yaml").format == "own settings"
    with pytest.raises(ConfigError, match="no config of a known tool"):
        read_text("max_length: 64\npadding: true\n", "tokenizer.yaml")
    with pytest.raises(ConfigError, match="verl"):
        read_text("actor_rollout_ref: {model: {path: gpt2}}\ntrainer: {n_gpus: 1}\n", "ppo.yaml")
    script = tmp_path / "run.sh"
    script.write_text("torchrun -m verl.trainer.fsdp_sft_trainer data.micro_batch_size=4\n")
    with pytest.raises(ConfigError, match="trains with verl"):
        read_config(script)


@pytest.mark.parametrize("num_gpus", [1, 8])
@pytest.mark.parametrize("given", ["'ds_config.json'", "os.path.join('conf', 'ds.json')", "'/opt/engine.json'"])
def test_a_deepspeed_file_that_is_not_there_is_asked_for(given: str, num_gpus: int) -> None:
    body = "import os\nmodel = AutoModelForCausalLM.from_pretrained('gpt2', dtype='bfloat16')\n" + (
        f"SFTTrainer(model, args=SFTConfig(deepspeed={given}, max_length=64)).train()\n"
    )
    config = read_text(HEAD + body, "train.py", around=FileContext(num_gpus=num_gpus))
    assert {"parallel", "offload"} <= {gap.field for gap in config.missing}
    for answers in (["parallel=none" if num_gpus == 1 else "parallel=ddp"], ["parallel=zero3", "offload=parameters"]):
        assert not {"parallel", "offload"} & {gap.field for gap in overrides(config, parse_sets(answers)).missing}
    named = body.replace(given, "{'zero_optimization': {'stage': 2}}")
    config = read_text(HEAD + named, "train.py", around=FileContext(num_gpus=num_gpus))
    assert (config.setup.parallel, "parallel" in {gap.field for gap in config.missing}) == ("zero2", False)


def test_the_settings_of_one_file_of_hydras_are_filled_in(tmp_path: Path) -> None:
    """What its `defaults` put in beside them is open."""
    (tmp_path / "conf").mkdir()
    settings = tmp_path / "conf" / "config.yaml"
    text = "name: org/gpt2\nlength: 256\ntraining:\n  micro: 3\n  steps: ${oc.env:STEPS,4}\n  max_length: ${length}\n"
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + "import hydra\n@hydra.main(config_path='conf', config_name='config', version_base=None)\n"
        "def main(cfg):\n    SFTTrainer(cfg.name, args=SFTConfig(per_device_train_batch_size=cfg.training.micro, "
        "gradient_accumulation_steps=cfg.training.steps, max_length=cfg.training.max_length)).train()\nmain()\n"
    )
    settings.write_text(text)
    ran = read_config(script, arguments=("name=org/gpt2-xl", "length=512"))
    assert (ran.model_id, ran.setup.micro_batch_seqs, ran.setup.accumulation_steps, ran.setup.seq_len_tokens) == (
        "org/gpt2-xl", 3, 4, 512,
    )  # fmt: skip
    (tmp_path / "conf" / "other.yaml").write_text(text.replace("micro: 3", "micro: 7"))
    for words in (["--config-name=other"], ["--config-name", "other"], ["-cn", "other", "length=512"]):
        assert read_config(script, arguments=tuple(words)).setup.micro_batch_seqs == 7
    for defaults, words, is_open in (
        ("[more]", (), False),
        ("[_self_, more]", (), True),
        ("[training: base]", (), False),
        ("[training: base]", ("training=base",), False),
        ("[_self_, training: base]", (), True),
        ("[_self_, other@_global_: base]", (), True),
    ):
        settings.write_text(f"defaults: {defaults}\n{text}")
        assert ("micro_batch_seqs" in open_fields(read_config(script, arguments=words))) is is_open, defaults
    script.write_text(script.read_text().replace("cfg.training.micro", "cfg.training.get('micro_batch', 1)"))
    assert "micro_batch_seqs" in open_fields(read_config(script))


def test_hydras_bombs_and_circles_end() -> None:
    values = {"a": "${b}", "b": "${a}", "c0": "x" * 100} | {f"c{n}": f"${{c{n - 1}}}" * 9 for n in range(1, 30)}
    done = loading.filled(values)
    assert loading.is_open(done["a"])
    assert all(len(str(value)) <= loading.MAX_FILLED for value in done.values())


def test_what_a_loop_may_have_skipped_is_open(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + "PROFILES = [{'gib': 80, 'batch': 8}, {'gib': 16, 'batch': 1}]\nchosen = None\n"
        "for one in sorted(PROFILES, key=lambda one: one['gib'], reverse=True):\n"
        "    if torch.cuda.get_device_properties(0).total_memory < one['gib']:\n        continue\n"
        "    chosen = one\n    break\n"
        "for one in PROFILES:\n"
        "    if torch.cuda.get_device_properties(0).total_memory < one['gib']:\n        continue\n    other = one\n"
        "SFTTrainer('gpt2', args=SFTConfig(per_device_train_batch_size=chosen['batch'], "
        "gradient_accumulation_steps=other['batch'])).train()\n"
    )
    assert {"micro_batch_seqs", "accumulation_steps"} <= open_fields(read_config(script))


@pytest.mark.parametrize("name", ["train.py", "conditional.py"])
def test_a_program_whose_name_holds_condition_is_read_as_any_other(name: str) -> None:
    """A length that only running tells is open by its own words, not by those of the file's name."""
    body = (
        "import sys\n"
        "max_seq_len = 512\n"
        "def tokenize(row):\n"
        "    return tokenizer(row['text'], truncation=True, max_length=int(sys.argv[1]))\n"
        "model = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.1-8B', dtype=torch.bfloat16)\n"
        "tokenizer = AutoTokenizer.from_pretrained('meta-llama/Llama-3.1-8B')\n"
        "rows = rows.map(tokenize)\n"
        "arguments = TrainingArguments(per_device_train_batch_size=2)\n"
        "Trainer(model=model, args=arguments, train_dataset=rows).train()\n"
    )
    config = read(body, name=name)
    assert config.setup.seq_len_tokens == 512
    assert "seq_len_tokens" not in open_fields(config)


@pytest.mark.parametrize(
    ("adapt", "precision"),
    [("", "bf16-pure"), ("model = get_peft_model(model, LoraConfig(r=8, task_type='CAUSAL_LM'))\n", "fp16-pure")],
)
def test_fp16_weights_without_autocast_are_a_precision_beside_adapters(adapt: str, precision: str) -> None:
    """Trained themselves they are counted as bf16's, the same bytes; a plan has neither."""
    text = (
        "import torch\nfrom peft import LoraConfig, get_peft_model\n"
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", torch_dtype=torch.float16)\n'
        f'{adapt}Trainer(model=model, args=TrainingArguments("out"), train_dataset=None).train()\n'
    )
    config = read_text(text, "train.py")
    assert config.setup.precision == precision
    card, model = find_gpu("t4"), catalogue.load("Qwen/Qwen2.5-0.5B")
    assert model is not None
    if adapt:  # a T4 multiplies bf16 by emulation
        slow = config.setup.replace(precision="bf16-pure")
        assert predict(model, card, config.setup).tokens_per_s > 3 * predict(model, card, slow).tokens_per_s
