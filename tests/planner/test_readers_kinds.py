"""Kinds of files in which something was taken for known that is not, or left out: found in 83 public files of 53
repositories, each told here in spellings of its own, and its opposite beside it."""

import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks.published_objectives import model_of
from benchmarks.shared import DATA, rows_of
from planner.core.errors import ConfigError, NotATraining, NotPlanned, Undetermined
from planner.frameworks.readers import FileContext, ReadConfig, read_config, read_text
from planner.frameworks.readers.common import FAKE_QUANTIZED, NOT_UNSCALED
from planner.frameworks.readers.program.interpret import run
from planner.frameworks.readers.types import LowerBound, UpperBound, overrides, parse_sets
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.resolve import resolve_model
from planner.models.stored import stored_refusal
from planner.models.targets import lora_linears, num_lora_params
from planner.planning.predict import predict
from tests.planner.helpers import open_fields, says

HEAD = """
import os, sys, torch
from torch import nn
from peft import LoraConfig, get_peft_model
from transformers import *
from trl import SFTConfig, SFTTrainer
NAME = "Qwen/Qwen3-0.6B"
args = SFTConfig(per_device_train_batch_size=1, max_length=512)
"""
LOADED = "model = AutoModelForCausalLM.from_pretrained(NAME, {})\n"
ADAPTED = "model = get_peft_model(model, LoraConfig(r=8, target_modules='all-linear'))\n"
TRAINED = "SFTTrainer(model=model, args=args, train_dataset=ds).train()\n"


def read(body: str, num_gpus: int = 1) -> ReadConfig:
    return read_text(HEAD + body, "train.py", around=FileContext(num_gpus=num_gpus))


FORWARD = "    def forward(self, input_ids, labels=None):\n        return self.inner(input_ids), self.inner(labels)\n"
OWN = (
    "class Net({}):\n    def __init__(self, inner=None):\n        super().__init__()\n        self.inner = {}\n"
    + FORWARD
)


@pytest.mark.parametrize(
    "body",
    [
        OWN.format("nn.Module", "AutoModel.from_pretrained(NAME)") + "model = Net()\n",
        LOADED.format("") + OWN.format("PreTrainedModel", "inner") + "model = Net(model)\n",
        LOADED.format("") + OWN.format("torch.nn.Module", "inner") + "model = Net(model).to('cuda')\n" + ADAPTED,
    ],
)
def test_a_model_of_the_programs_own_is_none_that_is_known(body: str) -> None:
    with pytest.raises(NotPlanned, match=r"a model of its own \(Net\)"):
        read(body + TRAINED)


@pytest.mark.parametrize(
    "body",
    [
        "class Run:\n    def __init__(self):\n        self.model = AutoModelForCausalLM.from_pretrained(NAME)\n"
        "model = Run().model\n",
        "class Net(LlamaForCausalLM):\n" + FORWARD + "model = Net.from_pretrained(NAME)\n",
    ],
)
def test_a_class_that_holds_or_extends_a_known_model_is_read(body: str) -> None:
    assert read(body + TRAINED).model_id == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    "guard",
    [
        "if os.environ.get('CUDA_VISIBLE_DEVICES', '') == '':\n    raise SystemExit(1)\n",
        "def need():\n    if '.venv' not in sys.executable:\n        raise SystemExit('wrong Python')\nneed()\n",
        "if torch.cuda.device_count() < 0 or not os.getenv('TOKEN'):\n    raise SystemExit(f'no {NAME}')\n",
    ],
)
def test_a_program_that_trains_does_not_end_at_its_guards(guard: str) -> None:
    body = "".join(f"    {line}\n" for line in (guard + LOADED.format("") + TRAINED).splitlines())
    config = read(f"def main():\n{body}    return 0\nraise SystemExit(main())\n")
    assert config.setup.method == "full"


UNSLOTH = "from unsloth import FastLanguageModel\nmodel, tok = FastLanguageModel.from_pretrained(NAME)\n" + (
    "model = FastLanguageModel.get_peft_model(model, r=8)\n" + TRAINED
)


@pytest.mark.parametrize(
    ("assignment", "environment", "loss"),
    [
        ("os.environ['UNSLOTH_RETURN_LOGITS'] = '1'\n", {}, "full"),
        ('os.environ.setdefault("UNSLOTH_RETURN_LOGITS", "1")\n', {}, "full"),
        ("os.environ.update({'UNSLOTH_RETURN_LOGITS': '1'})\n", {}, "full"),
        ("", {"UNSLOTH_RETURN_LOGITS": "1"}, "full"),
        ("os.environ['UNSLOTH_RETURN_LOGITS'] = '0'\n", {}, "chunked"),
        ("", {}, "chunked"),
    ],
)
def test_unsloth_gives_its_logits_back_where_it_is_told_to(
    assignment: str, environment: dict[str, str], loss: str
) -> None:
    around = FileContext(environment=environment)
    assert read_text(HEAD + assignment + UNSLOTH, "train.py", around=around).setup.loss == loss


def test_tables_among_unsloths_targets_are_trained_whole() -> None:
    adapted = UNSLOTH.replace("r=8", "r=8, target_modules=['q_proj', 'embed_tokens', 'lm_head']")
    setup = read_text(HEAD + adapted, "train.py", around=FileContext()).setup
    assert (setup.lora_targets, setup.modules_to_save) == (("q_proj",), ("embed_tokens", "lm_head"))


UNSLOTHS_PICTURES = (
    "from unsloth import {0}\nfrom unsloth.trainer import UnslothVisionDataCollator\n"
    "model, tok = {0}.from_pretrained(NAME)\nmodel = {0}.get_peft_model(model, r=RANK, {1})\n"
    "SFTTrainer(model, args=SFTConfig(max_length=2048), data_collator=UnslothVisionDataCollator(model, tok)).train()\n"
)


def test_unsloths_notebooks_of_pictures_are_read() -> None:
    """The trained parameters that they print, and the loss and kernels by which their memory was compared."""
    rows = [row for row in rows_of(DATA / "published_objectives.jsonl") if "trained" in row]
    for row in rows:
        model, rank = model_of(row), str(row["setup"]["lora_rank"])
        program = UNSLOTHS_PICTURES.format("FastVisionModel", "").replace("RANK", rank)
        config = read_text(HEAD + program, "train.py", model=model, around=FileContext())
        setup = overrides(config, parse_sets(["images=1x320x50"])).setup
        assert (setup.stack, setup.loss, setup.kernels, setup.activation_offload) == ("unsloth", "full", "eager", False)
        trained = num_lora_params(model, setup.lora_targets, setup.lora_rank)
        fewer = 0.955 if row["model"].endswith(("E2B-it", "E4B-it")) else 1  # keys and values of shared layers
        assert fewer * row["trained"] <= trained <= row["trained"], row["source"]
    assert len(rows) == 10


@pytest.mark.parametrize(
    ("kind", "more", "encoder", "text"),
    [
        ("FastVisionModel", "finetune_language_layers=False", "qkv proj gate_proj up_proj down_proj", ""),
        ("FastModel", "finetune_vision_layers=False, finetune_mlp_modules=False", "", "q_proj k_proj v_proj o_proj"),
        ("FastModel", "finetune_vision_layers=False, target_modules=['q_proj', 'qkv']", "", "q_proj"),
        ("FastLanguageModel", "finetune_attention_modules=False", "", "gate_proj up_proj down_proj"),
    ],
)
def test_unsloth_adapts_the_parts_that_its_switches_name(kind: str, more: str, encoder: str, text: str) -> None:
    model = catalogue.load("Qwen/Qwen2.5-VL-3B-Instruct")
    assert model is not None
    program = HEAD + UNSLOTHS_PICTURES.format(kind, more).replace("RANK", "16")
    setup = read_text(program, "train.py", model=model, around=FileContext()).setup
    adapted: dict[bool, set[str]] = {True: set(), False: set()}
    for layer, _, linears in lora_linears(model, setup.lora_targets):
        adapted["visual" in layer.path] |= {linear.leaf for linear in linears}
    assert adapted == {True: set(encoder.split()), False: set(text.split())}


@pytest.mark.parametrize("kinds", [("vision_layers", "language_layers"), ("attention_modules", "mlp_modules")])
def test_unsloth_stops_where_its_switches_leave_nothing(kinds: tuple[str, str]) -> None:
    """unsloth_zoo peft_utils.py get_peft_regex: "No layers to finetune", "No modules to finetune"."""
    text = UNSLOTHS_PICTURES.format("FastVisionModel", ", ".join(f"finetune_{kind}=False" for kind in kinds))
    model = catalogue.load("Qwen/Qwen2.5-VL-3B-Instruct")
    config = read_text(HEAD + text.replace("RANK", "16"), "train.py", model=model, around=FileContext())
    assert any("Unsloth stops" in refusal for refusal in config.refusals)


@pytest.mark.parametrize(("bits", "experts"), [("", True), (", load_in_4bit=False", False)])
def test_unsloths_conversion_of_gpt_oss_has_its_experts_in_4_bits(bits: str, experts: bool) -> None:
    """Its notebook prints 3,981,312 trainable parameters of rank 8 on seven names: those of attention alone
    (unsloth_zoo temporary_patches/gpt_oss.py GptOssExpertsBnb4bit)."""
    model = resolve_model("openai/gpt-oss-20b")
    seven = "['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']"
    text = UNSLOTH.replace("(NAME)", f"(NAME{bits})").replace("r=8", f"r=8, target_modules={seven}")
    setup = read_text(HEAD + text, "train.py", model=model).setup
    assert (setup.quantize_experts, setup.attention) == (experts, "flex-attention")
    assert not stored_refusal(setup, model)
    assert num_lora_params(model, setup.lora_targets, setup.lora_rank) == 3_981_312


@pytest.mark.parametrize(
    ("name", "gpu", "loading", "adapted", "expected"),
    [
        ("Qwen/Qwen3-0.6B", "t4", "full_finetuning=True", False, ("fp16-mixed", "sdpa", 0)),
        ("Qwen/Qwen3-0.6B", "t4", "dtype=torch.bfloat16, full_finetuning=True", False, ("fp16-mixed", "sdpa", 0)),
        ("Qwen/Qwen3-0.6B", "l4", "full_finetuning=True", False, ("bf16-pure", "sdpa", 0)),
        (
            "Qwen/Qwen3-0.6B",
            "l4",
            "full_finetuning=True, float32_mixed_precision=True",
            False,
            ("bf16-mixed", "sdpa", 0),
        ),
        ("Qwen/Qwen3-0.6B", "t4", "dtype=None", True, ("fp16-autocast", "sdpa", 0)),
        ("google/gemma-3-270m-it", "t4", "full_finetuning=True", False, ("fp32", "sdpa", 1)),
        ("google/gemma-3-270m-it", "t4", "dtype=None", True, ("fp16-autocast", "sdpa", 1)),
        ("google/gemma-3-270m-it", "l4", "dtype=None", True, ("bf16-autocast", "sdpa", 0)),
        ("openai/gpt-oss-20b", "t4", "dtype=None", True, ("fp16-autocast", "eager", 1)),
        ("openai/gpt-oss-20b", "a100-80gb", "dtype=None", True, ("bf16-autocast", "flex-attention", 0)),
        ("Qwen/Qwen3-0.6B", "l4", "qat_scheme='int4', full_finetuning=True", False, ("bf16-pure", "sdpa", 1)),
    ],
)
def test_what_unsloth_computes_in_is_the_cards_and_the_models(
    name: str, gpu: str, loading: str, adapted: bool, expected: tuple[str, str, int]
) -> None:
    """Unsloth 2026.10.9; of its notebooks' runs on a T4, Qwen3-0.6B in full took 10.6 GiB (5.6 were counted)."""
    lines = UNSLOTH.replace("(NAME)", f"(NAME, {loading})").splitlines()
    text = HEAD + "\n".join(line for line in lines if adapted or "get_peft_model" not in line)
    around = FileContext(gpu=find_gpu(gpu))
    config = read_text(text, "train.py", model=resolve_model(name), around=around)
    bounds = sum(isinstance(text, LowerBound) for text in config.approximations)
    assert (config.setup.precision, config.setup.attention, bounds) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (UNSLOTH, (1, "none", 1, 0)),
        (LOADED.format("") + TRAINED, (1, "none", 1, 1)),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'\n" + LOADED.format("") + TRAINED, (1, "none", 1, 0)),
        ("%pip install trl==1.14.1\n" + LOADED.format("") + TRAINED, (2, "dp", 1, 0)),
        (LOADED.format("device_map='auto'") + TRAINED, (2, "device-map", 1, 0)),
        ("%pip install trl==1.14.1\n" + LOADED.format("load_in_4bit=True") + ADAPTED + TRAINED, (1, "none", 2, 0)),
        (LOADED.format("") + TRAINED + "from accelerate import notebook_launcher\n", (2, "ddp", 1, 0)),
    ],
)
def test_a_notebook_is_one_process_whatever_it_sees(body: str, expected: tuple[int, str, int, int]) -> None:
    """Kaggle's two T4: transformers 5.23 `Trainer._wrap_model`, TRL 1.15 `SFTTrainer`."""
    cells = [{"cell_type": "code", "source": HEAD + body, "metadata": {}, "outputs": [], "execution_count": None}]
    notebook = json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells})
    config = read_text(notebook, "train.ipynb", around=FileContext(num_gpus=2))
    setup = config.setup
    assert (setup.num_gpus, setup.parallel, setup.micro_batch_seqs, len(config.refusals)) == expected


@pytest.mark.parametrize(("more", "seqs"), [("", 1), (", per_device_eval_batch_size=4", 4)])
def test_unsloth_evaluates_as_many_as_train(more: str, seqs: int) -> None:
    head = HEAD.replace("max_length=512", f"max_length=512, eval_strategy='steps'{more}")
    body = UNSLOTH.replace("train_dataset=ds", "train_dataset=ds, eval_dataset=ds")
    assert read_text(head + body, "train.py").eval_seqs == seqs


@pytest.mark.parametrize(
    ("first", "config", "expected"),
    [
        ("import unsloth", "SFTConfig", (4, 2, "adamw-8bit", 4)),
        ("import trl", "SFTConfig", (8, 1, "adamw-fused", 8)),
        ("import unsloth", "TrainingArguments", (8, 1, "adamw-fused", 8)),
    ],
)
def test_unsloths_copy_of_trls_configuration_has_defaults_of_its_own(
    first: str, config: str, expected: tuple[int, int, str, int]
) -> None:
    """A name imported from TRL before Unsloth is TRL's own, and transformers' TrainingArguments stay transformers'."""
    args = f"args = {config}(eval_strategy='steps', output_dir='o')\n"
    head = HEAD.replace("args = SFTConfig(per_device_train_batch_size=1, max_length=512)\n", args)
    body = UNSLOTH.replace("train_dataset=ds", "train_dataset=ds, eval_dataset=ds, max_seq_length=512")
    reading = read_text(f"{first}\n{head}{body}", "train.py")
    setup = reading.setup
    found = (setup.micro_batch_seqs, setup.accumulation_steps, setup.optimizer, reading.eval_seqs)
    assert found == expected


def test_unsloths_full_fine_tuning_takes_no_adapters() -> None:
    body = UNSLOTH.replace("from_pretrained(NAME", "from_pretrained(NAME, full_finetuning=True")
    assert (read_text(HEAD + UNSLOTH, "t.py").setup.method, read_text(HEAD + body, "t.py").setup.method) == (
        "qlora", "full",
    )  # fmt: skip


def test_a_reward_model_may_be_built_from_a_configuration() -> None:
    head, train = (
        "from transformers import *\nfrom trl import *\n",
        "RewardTrainer(m, RewardConfig('o', max_length=64))",
    )
    config = read_text(f"{head}m = AutoModelForSequenceClassification.from_config(c)\n{train}.train()\n", "train.py")
    assert (config.setup.objective, "model" in {entry.field for entry in config.missing}) == ("reward", True)


@pytest.mark.parametrize("package", ["pytorch_quantization.nn", "torchao.quantization.qat", "brevitas"])
def test_quantizers_that_train_along_are_said_not_to_be_counted(package: str) -> None:
    body = LOADED.format("") + TRAINED
    assert FAKE_QUANTIZED in read(f"import {package}\n" + body).approximations
    assert not read("import torchao.quantization\n" + body).approximations


FACTORY = """
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
model_name_or_path: {}
cutoff_len: 512
per_device_train_batch_size: 4
bf16: true
"""
DEEPSPEED = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'
WRITES = {
    "a config": "MODEL=Qwen/Qwen3-0.6B\ncat > conf/lora.yaml <<EOF" + FACTORY.format("$MODEL") + "EOF\n"
    "llamafactory-cli train conf/lora.yaml\n",
    "the redirection behind": "cat <<'END' > $(pwd)/lora.yaml" + FACTORY.format("Qwen/Qwen3-0.6B") + "END\n"
    "llamafactory-cli train ./lora.yaml\n",
    "tee": "sudo tee -a lora.yaml > /dev/null <<-X" + FACTORY.format("Qwen/Qwen3-0.6B") + "\tX\n"
    "llamafactory-cli train lora.yaml\n",
    "a program": "cat >train.py <<PY" + HEAD + LOADED.format("") + ADAPTED + TRAINED + "PY\npython train.py\n",
    "a script": "cat > go.sh << 'S'\nllamafactory-cli train lora.yaml\nS\ncat > lora.yaml << S"
    + FACTORY.format("Qwen/Qwen3-0.6B")
    + "S\nbash go.sh\n",
}


@pytest.mark.parametrize("name", WRITES)
def test_a_file_that_a_script_writes_is_read(name: str) -> None:
    config = read_text(WRITES[name], "run.sh")
    assert (config.model_id, config.setup.lora_rank) == ("Qwen/Qwen3-0.6B", 8)


@pytest.mark.parametrize(
    ("config", "offload"), [("cat > ds.json <<D\n" + DEEPSPEED + "\nD\n", "optimizer"), ("touch ds_z3.json\n", "none")]
)
def test_deepspeeds_file_counts_before_its_name(config: str, offload: str) -> None:
    name = "ds.json" if "<<" in config else "ds_z3.json"
    words = " ".join(f"--{line.replace(': ', ' ')}" for line in FACTORY.format("Qwen/Qwen3-0.6B").split("\n") if line)
    launch = f"FORCE_TORCHRUN=1 CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train {words} --deepspeed {name}\n"
    assert read_text(config + launch, "run.sh").setup.offload == offload


FUNCTIONS = {
    "parameters": 'run() {\n  local name=$1\n  torchrun --nproc_per_node=$2 "$3" --model $name\n}\n'
    "run NAME 4 train.py\n",
    "what is left of them": 'function go\n{\n  local gpus=$1\n  shift 1\n  torchrun --nproc_per_node $gpus "$@"\n}\n'
    "if ! go 4 train.py --model NAME; then exit 1; fi\n",
    "one calls another": 'inner() { torchrun --nproc_per_node=$N "${ARGS[@]}"; }\n'
    'outer() {\n  N=4\n  ARGS=(train.py "$@")\n  inner\n}\nmain () {\n  outer --model NAME\n}\nmain "$@"\n',
    "an array": 'fit() {\n  local words=("${@:1}")\n  torchrun --nproc_per_node=4 train.py --model $1\n}\nfit NAME\n',
    "nothing calls it": "fit() {\n  torchrun --nproc_per_node=4 train.py --model NAME\n}\n",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_script_are_followed_where_it_calls_them(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        HEAD
        + "import argparse\np = argparse.ArgumentParser()\np.add_argument('--model')\nNAME = p.parse_args().model\n"
        "" + LOADED.format("") + TRAINED
    )
    (tmp_path / "run.sh").write_text(FUNCTIONS[name])
    config = read_config(tmp_path / "run.sh")
    assert (config.model_id, config.setup.num_gpus) == ("NAME", 4)


def test_a_launch_that_only_tries_does_not_hide_the_one_that_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        HEAD + "if '--dry-run' in sys.argv:\n    sys.exit(0)\n    raise SystemExit(0)\n" + LOADED.format("") + TRAINED
    )
    (tmp_path / "run.sh").write_text("python train.py --seed 1 --dry-run\npython train.py --seed 1\n")
    assert read_config(tmp_path / "run.sh").setup.method == "full"


OWN_YAML = "model_name: Qwen/Qwen3-0.6B\nuse_lora: true\nlora_r: 8\ntarget_modules: all-linear\nbatch_size: 1\n" + (
    "grad_accum: 2\nmax_seq_length: 512\ngradient_checkpointing: true\nbf16: true\ntorch_dtype: bfloat16\n"
    "load_in_4bit: false\n"
)


def test_an_engine_whose_stage_nothing_says_is_asked_for() -> None:
    config = read_text(OWN_YAML + "engine: deepspeed\n", "conf.yaml", around=FileContext(num_gpus=2))
    assert "parallel" in open_fields(config)
    assert overrides(config, parse_sets(["parallel=zero3"])).setup.parallel == "zero3"


AXOLOTL = "base_model: Qwen/Qwen3-0.6B\nmicro_batch_size: 1\nsequence_len: 4098\nadapter: lora\nlora_r: 8\n" + (
    "lora_target_linear: true\nbf16: true\nflash_attention: true\n"
)
SWIFT = "swift sft --model Qwen/Qwen3-0.6B --train_type lora --max_length 4098 --per_device_train_batch_size 1 "
CUT = {
    "Axolotl": (AXOLOTL + "context_parallel_size: 4\n", "a.yml", "zero1", 4100),
    "Axolotl's older name, ZeRO-3": (
        AXOLOTL + "sequence_parallel_degree: 4\ndeepspeed: deepspeed_configs/zero3.json\n",
        "a.yml",
        "zero3",
        4100,
    ),
    "Axolotl, FSDP2": (
        AXOLOTL + "context_parallel_size: 4\nfsdp_version: 2\nfsdp_config: {offload_params: false}\n",
        "a.yml",
        "fsdp2",
        4104,
    ),
    "swift": (f"NPROC_PER_NODE=8 {SWIFT} --sequence_parallel_size 4\n", "a.sh", "zero1", 4100),
    "swift, ZeRO-2": (
        f"NPROC_PER_NODE=8 {SWIFT} --deepspeed zero2 --sequence_parallel_size 4\n",
        "a.sh",
        "zero2",
        4100,
    ),
    "own settings": (OWN_YAML.replace("512", "4098") + "sp_size: 4\n", "a.yaml", "zero1", 4100),
}


@pytest.mark.parametrize("name", CUT)
def test_gpus_that_share_a_sequence_are_no_copies(name: str) -> None:
    text, file, parallel, tokens = CUT[name]
    setup = read_text(text, file, around=FileContext(num_gpus=8)).setup
    assert (setup.parallel, setup.context_degree, setup.data_degree) == (parallel, 4, 2)
    assert setup.seq_len_tokens == tokens
    if not file.endswith(".sh"):
        with pytest.raises(Undetermined, match="over 4 GPUs, of 1"):
            read_text(text, file)
    whole = read_text(text.replace(" 4\n", " 1\n"), file, around=FileContext(num_gpus=8)).setup
    assert (whole.context_degree, whole.seq_len_tokens, whole.data_degree) == (1, 4098, 8)


def test_sequences_cut_beside_whole_states_are_refused_by_name() -> None:
    with pytest.raises(NotPlanned, match="beside states that nothing shards"):
        read_text(SWIFT.replace("lora", "full") + "--sequence_parallel_size 2", "a.sh", around=FileContext(num_gpus=2))


def test_pictures_on_one_gpu_are_counted_without_zero() -> None:
    config = read_text(AXOLOTL + "deepspeed: {zero_optimization: {stage: 2}}\n", "a.yml")
    setup = overrides(config, parse_sets(["images=1x512x512", "attention=sdpa", "kernels=eager"])).setup
    assert (setup.parallel, setup.images is None) == ("none", False)


@pytest.mark.parametrize("name", ["ds_config_zero3.json", "configs/zero2_mine.json", "stage3.yaml"])
def test_what_the_name_of_anybodys_deepspeed_file_does_not_say_is_asked_for(name: str) -> None:
    config = read_text(AXOLOTL + f"deepspeed: {name}\n", "a.yml", around=FileContext(num_gpus=2))
    assert "offload" in open_fields(config)
    settled = overrides(config, parse_sets(["offload=optimizer"]))
    assert (settled.setup.offload, "offload" in open_fields(settled)) == ("optimizer", False)


@pytest.mark.parametrize(("module", "widens"), [("score", False), ("some_router", True)])
def test_a_head_that_peft_saves_by_itself_widens_no_band(module: str, widens: bool) -> None:
    adapted = ADAPTED.replace("r=8", f"r=8, modules_to_save=['{module}']")
    config = read(LOADED.format("") + adapted + TRAINED)
    assert (bool(config.approximations), config.setup.modules_to_save) == (widens, ())
    assert any(module in said for said in (*config.assumptions, *config.approximations))


PACKED = {
    "Qwen/Qwen2.5-7B-Instruct-AWQ": "nf4-double",
    "TheBloke/Llama-2-7B-GPTQ": "nf4-double",
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": "nf4-double",
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": "int8",
    "Qwen/Qwen2.5-7B-Instruct": "none",
}


@pytest.mark.parametrize("name", PACKED)
def test_a_base_that_is_published_packed_is_no_16_bit_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, bits = resolve_model(name), PACKED[name]
    program = read_text(HEAD + LOADED.format("") + ADAPTED + TRAINED, "train.py", model=model)
    factory = read_text(FACTORY.format(name), "a.yaml", model=model)
    for config in (program, factory):
        assert config.setup.quantization == bits
        assert any("are counted as" in approximation for approximation in config.approximations) == (bits != "none")
    notes = predict(model, find_gpu("a100-80gb"), program.setup, None).notes
    assert not any("planned as if" in note for note in notes)


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        ("p.parse_args().max_len", "--max_len comes from the command line"),
        ("vars(p.parse_args())['max_len']", "--max_len comes from the command line"),
        ("json.load(open('c.json'))['cut']", "settings of another file"),
    ],
)
def test_a_length_that_is_open_says_where_it_comes_from(taken: str, why: str) -> None:
    body = (
        "import argparse, json\np = argparse.ArgumentParser()\np.add_argument('--max_len', type=int, required=True)\n"
    )
    cut = f"ds = ds.map(lambda row: tok(row['text'], truncation=True, max_length={taken}))\n"
    head = HEAD.replace("SFTConfig(", "TrainingArguments('out', ").replace(", max_length=512", "")
    program = head + body + LOADED.format("") + cut + TRAINED.replace("SFTTrainer", "Trainer")
    config = read_text(program, "train.py")
    assert why in next(gap.reason for gap in config.missing if gap.field == "seq_len_tokens")


@pytest.mark.parametrize(
    "deepspeed", ["'ds_z2_config.json'", "{'zero_optimization': {'stage': 2}}", "'conf/zero2.json'"]
)
def test_deepspeed_trains_fp16_weights_whole(deepspeed: str) -> None:
    """It keeps fp32 masters, and scales the loss itself; torch's scaler refuses fp16 gradients and has no bf16 kernel,
    which FSDP never shows it, as it trains fp32 copies."""
    given = "TrainingArguments('o', per_device_train_batch_size=1, fp16=True{})"
    body = "block_size = 512\n" + LOADED.format("torch_dtype=torch.float16") + "Trainer(model=model, args={}).train()\n"
    config = read(body.format(given.format(f", deepspeed={deepspeed}")), num_gpus=2)
    assert (config.setup.precision, config.setup.parallel, config.refusals) == ("fp16-mixed", "zero2", ())
    for half, kind in product(("float16", "bfloat16"), ("FSDP", "DEEPSPEED", "MULTI_GPU", "")):
        launcher = f"distributed_type: {kind}\nnum_processes: 2\nmixed_precision: fp16\n" if kind else None
        program = HEAD + body.replace("float16", half).format(given.format(""))
        for text in (program, program.replace(", fp16=True", "") if kind else program):
            reading = read_text(text, "train.py", model=resolve_model("llama 3.1 8b"), launcher=launcher)
            assert bool(reading.refusals) == (kind in ("", "MULTI_GPU")), (half, kind)
            assert set(reading.refusals) <= {NOT_UNSCALED}


@pytest.mark.parametrize(
    "settings", ["eval_strategy: steps\n", "train: {evaluation_strategy: epoch}\n", "eval_steps: 50\n"]
)
def test_own_settings_that_evaluate_who_knows_how_many_ask(settings: str) -> None:
    config = read_text(OWN_YAML + settings, "conf.yaml")
    assert open_fields(config) == {"eval_seqs"}
    assert overrides(config, parse_sets(["eval_batch=8"])).eval_seqs == 8


BARE = OWN_YAML.replace("bf16: true\ntorch_dtype: bfloat16\n", "")
UNNAMED = OWN_YAML.replace("model_name: Qwen/Qwen3-0.6B\n", "")
ZERO2 = "deepspeed: {zero_optimization: {stage: 2}}\n"
BARE_FACTORY = FACTORY.format("Qwen/Qwen3-0.6B").replace("bf16: true\n", "")
SETTINGS_SAY: dict[tuple[str, int, str], dict[str, object]] = {
    (OWN_YAML, 1, "eval_seqs"): {
        "training: {eval_strategy: steps, per_device_eval_batch_size: 4}\n": 4,
        "trainer:\n  evaluation_strategy: epoch\n  eval_batch_size: 2\n": 2,
        "eval_steps: 100\nper_device_eval_batch_size: 16\n": 16,
        "per_device_eval_batch_size: 3\n": 3,
        "eval_strategy: 'no'\nper_device_eval_batch_size: 8\n": 0,
        "evaluation_strategy: no\neval_batch_size: 8\n": 0,
        "": 0,
    },
    (BARE, 1, "precision"): {
        "mixed_precision: bf16\ntorch_dtype: bfloat16\n": "bf16-autocast",
        "runtime: {mixed_precision: fp16}\ndtype: float16\n": "fp16-autocast",
        "accelerator:\n  mixed_precision: 'no'\nmodel: {torch_dtype: bfloat16}\n": "bf16-pure",
        "mixed_precision: fp16\nmodel_dtype: float32\n": "fp16-mixed",
    },
    (UNNAMED, 1, "model_id"): {
        "base_model_path: org/Qwen3-0.6B\n": "org/Qwen3-0.6B",
        "model: {base_model_path: org/Qwen3-0.6B}\n": "org/Qwen3-0.6B",
        "sft_base_model_path: org/Qwen3-0.6B\n": "org/Qwen3-0.6B",
    },
    (OWN_YAML, 2, "parallel format"): {
        "engine: {name: fsdp, config: {sharding_strategy: FULL_SHARD}}\n": ("fsdp2", "own settings"),
        "trainer: {fsdp: full_shard auto_wrap}\n": ("fsdp2", "own settings"),
        "distributed_backend: fsdp2\n": ("fsdp2", "own settings"),
        ZERO2: ("zero2", "own settings"),
        "launch: {deepspeed_config: configs/ds_z3_config.json}\n": ("zero3", "own settings"),
        "parallel: {strategy: ddp}\n": ("ddp", "own settings"),
        "": ("ddp", "own settings"),
    },
    # tokens that LLaMA-Factory adds train whole tables
    (FACTORY.format("Qwen/Qwen3-0.6B"), 1, "modules_to_save"): {
        "add_tokens: <a>,<b>\n": ("embed_tokens", "lm_head"),
        "add_special_tokens: <|x|>\n": ("embed_tokens", "lm_head"),
        "new_special_tokens: <|x|>\n": ("embed_tokens", "lm_head"),
        "resize_vocab: true\n": ("embed_tokens", "lm_head"),
        "resize_vocab: true\nadditional_target: lm_head\n": ("lm_head",),
        "resize_vocab: false\n": (),
        "": (),
    },
    # LLaMA-Factory's weights without autocast: 16 bytes a parameter were counted as bf16's 8; `infer_dtype` trains none
    (BARE_FACTORY.replace("type: lora", "type: full"), 1, "precision"): {"": "fp32", "pure_bf16: true\n": "bf16-pure"},
    (BARE_FACTORY, 1, "precision"): {
        "flash_attn: fa2\ninfer_dtype: float32\n": "bf16-pure",
        "bf16: true\n": "bf16-autocast",
    },
    # Ray's workers are GPUs; bitsandbytes has two names
    (BARE_FACTORY, 1, "num_gpus parallel"): {"ray_num_workers: 4\n": (4, "ddp")},
    (FACTORY.format("m") + "quantization_bit: 4\n", 1, "quantization approximations"): {
        f"quantization_method: {word}\n": ("nf4-double", ()) for word in ("bnb", "bitsandbytes")
    },
    # a word of rollouts matters to rollouts alone
    (AXOLOTL, 1, "objective"): {"async_prefetch: true\n": "sft"},
    # DeepSpeed on one GPU holds its own states
    (AXOLOTL, 1, "parallel offload num_gpus"): {
        ZERO2: ("zero2", "none", 1),
        ZERO2.replace("2", "3, offload_optimizer: {device: cpu}, offload_param: {device: cpu}"): (
            "zero3",
            "parameters",
            1,
        ),
        ZERO2.replace("2", "1, offload_optimizer: {device: nvme}"): ("zero1", "optimizer", 1),
        ZERO2.replace("2", "0"): ("none", "none", 1),
    },
    # a DeepSpeed file says by its name whether it offloads
    (AXOLOTL, 2, "parallel offload"): {
        "deepspeed: zero3_offload\n": ("zero3", "parameters"),
        "deepspeed: conf/ds_z2_offload_config.json\n": ("zero2", "optimizer"),
        "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n": ("zero3", "parameters"),
        "deepspeed: examples/deepspeed/ds_z3_config.json\n": ("zero3", "none"),
        "deepspeed: default-zero2\n": ("zero2", "none"),
        "deepspeed: zero1.json\n": ("zero1", "none"),
    },
}


@pytest.mark.parametrize(
    ("base", "num_gpus", "names", "text", "value"),
    [(*case, text, value) for case, rows in SETTINGS_SAY.items() for text, value in rows.items()],
)
def test_what_settings_say_is_read(base: str, num_gpus: int, names: str, text: str, value: object) -> None:
    says(read_text(base + text, "conf.yaml", around=FileContext(num_gpus=num_gpus)), names, value)


LOOP = """
import sys
step = 0
model = make()
for batch in load():
    loss = model(**batch).loss
    loss.backward()
    {}
"""


@pytest.mark.parametrize(
    "body",
    [
        "if (step + 1) % 8 == 0:\n        optimizer.step(); optimizer.zero_grad()\n    step += 1",
        "step += 1\n    if step % 64 == 0:\n        optimizer.step()\n        optimizer.zero_grad()",
        "step = step + 1\n    if not step % 4:\n        optimizer.zero_grad()",
    ],
)
def test_a_counter_of_a_loop_is_not_its_first_value(body: str) -> None:
    with pytest.raises(NotPlanned, match="a loop of its own"):
        read_text(LOOP.format(body), "train.py")


def test_a_condition_on_what_no_loop_changes_is_followed() -> None:
    never = "if steps == 1:\n        optimizer.step(); optimizer.zero_grad()\n    step += 1"
    program = run(LOOP.replace("step = 0", "steps = 0").format(never), "train.py", FileContext())
    assert {call.name for call in program.calls} & {"backward", "zero_grad"} == {"backward"}


@pytest.mark.parametrize("trainer", ["AdapterTrainer", "Seq2SeqAdapterTrainer"])
@pytest.mark.parametrize(
    "start", ["from adapters import {}\n{}", "import adapters\nadapters.{1}", "class Own({1}): pass\nOwn"]
)
def test_adapters_of_another_library_are_refused_by_name(trainer: str, start: str) -> None:
    made = start.format(trainer, trainer) + "(model=model, args=TrainingArguments('o'), train_dataset=ds).train()\n"
    with pytest.raises(NotPlanned, match="adapters of another library"):
        read(LOADED.format("") + "from adapters import *\n" + made)


SETTINGS = "args = SFTConfig('o', per_device_train_batch_size=3, max_length=640, bf16=True)\n"
OWN_CLASS = (
    "class C:\n    def __init__(self, **kw):\n        for k, v in kw.items():\n            setattr(self, k, v)\n"
)
TRAINER = "trainer = SFTTrainer(model=model, args=args, train_dataset=ds, eval_dataset=ev)\ntrainer.train()\n"
BEFORE = "args = SFTConfig('o', per_device_train_batch_size=1)\n"
TOKENIZER = "tok = AutoTokenizer.from_pretrained(NAME)\n"
PLAIN = LOADED.format("")
STAYS = {"micro_batch_seqs": 3, "seq_len_tokens": 640}
PROGRAMS_SAY: dict[tuple[str, str], dict[str, object]] = {
    # no configuration leaves the older switches
    ("bits = 4\n" + LOADED.format("@") + ADAPTED + TRAINED, "quantization"): {
        "load_in_8bit=True, quantization_config=None": "int8",
        "load_in_4bit=bits == 4, quantization_config=BitsAndBytesConfig() if bits == 8 else None": "nf4",
        "**{'quantization_config': None, 'load_in_8bit': True}": "int8",
        "quantization_config=None": "none",
    },
    # peft 0.21 saves resized tables (`save_embedding_layers="auto"`), and trains them where they are named
    (TOKENIZER + PLAIN + "@" + ADAPTED + TRAINED, "modules_to_save"): {
        "tok.add_special_tokens({'pad_token': '[PAD]'})\nmodel.resize_token_embeddings(len(tok))\n": (),
        "tok.add_tokens(['<a>'])\nmodel.resize_token_embeddings(len(tok), pad_to_multiple_of=64)\n": (),
        "": (),
    },
    # a newer Python's words for types; a loop that certainly leaves
    ("@" + PLAIN + TRAINED, "micro_batch_seqs"): {
        "type Rows = list[dict[str, int]]\n": 1,
        "type Pair[T] = tuple[T, T]\n": 1,
        "def first[T](rows: list[T]) -> T:\n    return rows[0]\n": 1,
        "size = 0\nfor one in (2, 4, 8):\n    size = one\n    if one == 4:\n        break\n"
        "args.per_device_train_batch_size = size\n": 4,
    },
    # settings that are copied or put together stay what they are; what a copy says anew counts for it alone
    ("import copy, dataclasses, types\n" + PLAIN + SETTINGS + "@" + TRAINED, "micro_batch_seqs seq_len_tokens"): {
        "args = dataclasses.replace(args, learning_rate=1e-4)\n": (3, 640),
        "args = copy.deepcopy(args)\nargs.seed = 3\n": (3, 640),
        "from copy import copy as again\nargs = again(args)\n": (3, 640),
        "setattr(args, 'gradient_accumulation_steps', 1)\n": (3, 640),
        "kw = {'per_device_train_batch_size': 3} | {'max_length': 640, 'bf16': True}\nargs = SFTConfig('o', **kw)\n": (
            3,
            640,
        ),
        "both = {'max_length': 1}\nboth |= {'max_length': 640}\nargs.max_length = both['max_length']\n": (3, 640),
        "other = copy.copy(args)\nother.max_length = 1\n": (3, 640),
        "args = dataclasses.replace(args, max_length=128)\n": (3, 128),
        "setattr(args, 'max_length', 256)\n": (3, 256),
        "kw = vars(types.SimpleNamespace(a=5))\nargs.per_device_train_batch_size = kw['a']\n": (5, 640),
    },
    # attributes of a program's own class are those that it sets
    (PLAIN + f"import json\n{OWN_CLASS}c = @\n" + SETTINGS.replace("=3", "=c.bs") + TRAINED, "missing"): {
        "C(bs=3)": set(),
        "C(**{'bs': 3})": set(),
        "C(**json.load(open(sys.argv[1])))": {"micro_batch_seqs"},
        "C(size=3)": {"micro_batch_seqs"},
    },
    # an evaluation that the program itself calls
    (PLAIN + SETTINGS + TRAINER + "@", "eval_seqs"): {
        "trainer.evaluate()\n": 8,
        "if os.environ.get('TEST'):\n    pass\nelse:\n    print(trainer.predict(ds['test']))\n": 8,
        "def report(t):\n    return t.evaluate(eval_dataset=ds)\nreport(trainer)\n": 8,
        "trainer.save_model('o')\n": 0,
        "other = SFTTrainer(model=model, args=args, train_dataset=ds)\nother.evaluate()\n": 0,
    },
    # rows that are tokenized before TRL's trainer keep their length
    (TOKENIZER + BEFORE + PLAIN + "@" + TRAINED, "seq_len_tokens"): {
        "def cut(row):\n    return tok(row['text'], truncation=True, max_length=256)\nds = ds.map(cut)\n": 256,
        "def cut(row):\n    out = tok(row['t'], truncation=True, padding='max_length', max_length=128)\n"
        "    out['labels'] = out['input_ids']\n    return out\nds = ds.map(cut, batched=True)\n": 128,
        "ds = ds.map(lambda row: tok(row['text'], truncation=True, max_length=512), batched=True)\n": 512,
        "ds = ds.map(lambda row: tok(row['text'], truncation=True, max_length=4096))\n": 1024,
        "shown = tok('hello', truncation=True, max_length=64)\n": 1024,
        "def say(text):\n    ids = tok(text, truncation=True, max_length=64)\n    print(ids)\nsay('a')\n": 1024,
    },
}


@pytest.mark.parametrize(
    ("program", "names", "text", "value"),
    [(*case, text, value) for case, rows in PROGRAMS_SAY.items() for text, value in rows.items()],
)
def test_what_a_program_says_is_read(program: str, names: str, text: str, value: object) -> None:
    says(read(program.replace("@", text)), names, value)


FOUND = "from pathlib import Path\npath = None\n"


@pytest.mark.parametrize(
    "loop",
    [
        "for one in [Path('a'), Path('b')]:\n    if one.exists():\n        path = one\n        break\n",
        "for one in Path('.').glob('*'):\n    if one.is_file():\n        path = one\n        break\n",
        "while True:\n    if os.path.exists('x'):\n        path = 'x'\n        break\n",
        "for one in ('a', 'b'):\n    if not os.path.exists(one):\n        continue\n    path = one\n",
    ],
)
def test_what_a_turn_of_a_loop_sets_before_it_leaves_may_hold_afterwards(loop: str) -> None:
    guard = "if path is None:\n    print('no data')\n    sys.exit(1)\n"
    assert read(FOUND + loop + guard + LOADED.format("") + TRAINED).setup.method == "full"
    sized = "args.per_device_train_batch_size = 1 if path is None else 4\n"
    assert open_fields(read(FOUND + loop + sized + LOADED.format("") + TRAINED)) == {"micro_batch_seqs"}


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("requirements.txt", "torch\ntrl==0.18.1\n"),
        ("src/requirements.txt", "trl==0.18.1  # as run\n"),
        ("pyproject.toml", '[project]\ndependencies = ["trl==0.18.1", "peft"]\n'),
    ],
)
def test_a_version_that_the_repository_pins_holds_below_it(place: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "src" / "train").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / place).write_text(text)
    file = tmp_path / "src" / "train" / "sft.py"
    file.write_text(HEAD + LOADED.format("") + TRAINED)
    assert not read_config(file).setup.checkpointing
    (tmp_path / place).write_text("torch\n")
    assert read_config(file).setup.checkpointing


OF_PAIRS = "model_name_or_path: Qwen/Qwen3-0.6B\nlearning_rate: 1e-5\nbeta: 0.1\nmax_length: 512\n"


@pytest.mark.parametrize(
    "key", ["max_prompt_length: 128", "label_pad_token_id: -100", "max_target_length: 64", "rpo_alpha: 1.0"]
)
def test_a_file_of_preferences_of_an_older_trl_is_not_judged_as_todays(key: str) -> None:
    older = read_text(OF_PAIRS + key, "dpo.yaml")
    says(older, "objective loss trl_version unknown_keys", ("dpo", "full", "0.28", ()))
    today = read_text(OF_PAIRS + key, "dpo.yaml", around=FileContext(versions={"trl": "1.16"}))
    assert today.unknown_keys == (key.partition(":")[0],)
    newer = read_text(OF_PAIRS + "eval_strategy: steps", "dpo.yaml").setup
    assert (newer.loss, newer.trl_version) == ("chunked", "")


def test_a_sum_of_losses_is_dpo() -> None:
    """MPO, as trl 1.16 docs/source/paper_index.md and ms-swift's examples/train/rlhf/mpo.sh have it."""
    text = OF_PAIRS.replace("beta: 0.1\n", "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\n")
    assert read_text(text, "a.yaml").setup == read_text(OF_PAIRS, "dpo.yaml").setup
    assert read_text(text.replace("[sigmoid, bco_pair, sft]", "apo_zero"), "a.yaml").setup.objective == "dpo"
    run = "swift rlhf --rlhf_type dpo --model Qwen/Qwen3-0.6B --loss_type sigmoid bco_pair sft"
    assert read_text(run, "run.sh").setup == read_text(run.partition(" --loss")[0], "run.sh").setup


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_an_objective_that_a_person_names_is_read_as_one_that_the_file_names(name: str) -> None:
    text = OF_PAIRS + "max_prompt_length: 128\nprecompute_ref_log_probs: true\nuse_peft: true\n"
    named = read_text(text, "a.yaml", around=FileContext(objective=name, versions={"trl": "0.28"}))
    assert named.setup == of_trl("0.28", text, f"{name}.yaml").setup
    beside = FileContext(roots=(Path(f"recipes/zephyr/{name}"),), versions={"trl": "0.28"})
    assert read_text(text, "a.yaml", around=beside).setup == named.setup
    says(named, "objective loss lora_dropout precomputed_reference", (name, "full", 0.0, True))
    own = '{"model_name_or_path": "gpt2", "per_device_train_batch_size": 4, "max_length": 64, "beta": 0.1}'
    of_program = read_text(own, "a.json", around=FileContext(objective=name))
    assert (of_program.setup.objective, of_program.setup.loss) == (name, "chunked")
    assert "objective" not in open_fields(of_program)


@pytest.mark.parametrize("name", ["use_liger_loss", "use_liger_kernel"])
def test_a_step_of_preferences_that_is_not_modelled_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotPlanned, match=rf"0\.2[78].* and {name}, whose step is another"):
        read_text(OF_PAIRS + f"{name}: true\nmax_prompt_length: 64\n", "dpo.yaml")
    assert read_text(OF_PAIRS + "evaluation_strategy: steps\n", "dpo.yaml").setup.log_probs == "gathered beside"


def of_trl(version: str, text: str, name: str, **more: str) -> ReadConfig:
    return read_text(text, name, around=FileContext(versions={"trl": version, **more}))


@pytest.mark.parametrize(
    ("name", "version", "log_probs"),
    [
        ("dpo", "0.12.2", "gathered"), ("dpo", "0.15.0", "rows"), ("dpo", "0.28.0", "rows"), ("dpo", "1.0.0", "copied"),
        ("dpo", "1.9.0", "kept rows"), ("dpo", "1.14.0", ""), ("kto", "0.14.0", "gathered"), ("kto", "0.16.0", "rows"),
        ("kto", "1.5.0", "rows apart"),
        ("grpo", "0.15.2", "rows"), ("grpo", "1.14.0", "rows"), ("grpo", "1.15.0", ""), ("dpo", "1.16", ""),
    ],
)  # fmt: skip
def test_the_version_decides_how_log_probabilities_are_taken(name: str, version: str, log_probs: str) -> None:
    setup = of_trl(version, OF_PAIRS.replace("max_length: 512\n", "") + "bf16: true\n", f"{name}.yaml").setup
    assert (setup.objective, setup.log_probs) == (name, log_probs)
    assert setup.loss == ("full" if log_probs or version == "1.14.0" else "chunked")


@pytest.mark.parametrize(
    ("version", "line", "loss", "head"),
    [
        ("1.12.0", "", "chunked", (True, True)), ("1.14.0", "", "chunked", (True, False)),
        ("1.15.0", "", "chunked", (False, False)), ("1.14.0", "loss_type: nll\n", "full", (False, False)),
        ("1.12.0", "use_liger_kernel: true\n", "liger", (False, False)),
        ("1.15.0", "loss_type: nll\n", "chunked", (False, False)),
    ],
)  # fmt: skip
def test_the_version_decides_how_the_loss_is_cut(version: str, line: str, loss: str, head: tuple[bool, bool]) -> None:
    setup = of_trl(
        version, f"model_name_or_path: Qwen/Qwen3-0.6B\nuse_peft: true\nbf16: true\n{line}", "sft.yaml"
    ).setup
    assert (setup.loss, (setup.checkpointed_loss, setup.widens_head)) == (loss, head)


@pytest.mark.parametrize(
    ("name", "version"), [("kto", "1.6.0"), ("kto", "1.13.0"), ("grpo", "0.14.0"), ("dpo", "0.9.4")]
)
def test_versions_whose_step_is_not_known_are_refused(name: str, version: str) -> None:
    with pytest.raises(NotPlanned, match=f"trains {name} with TRL {version}"):
        of_trl(version, OF_PAIRS, f"{name}.yaml")


ROLLS = "model_name_or_path: Qwen/Qwen3-0.6B\nnum_generations: 8\nmax_completion_length: 100\n"


def test_prompts_that_are_cut_are_an_older_grpos() -> None:
    says(read_text(ROLLS + "max_prompt_length: 60\n", "grpo.yaml"), "trl_version seq_len_tokens", ("0.27", 160))
    assert open_fields(of_trl("0.27.0", ROLLS + "max_prompt_length: null\n", "grpo.yaml")) == {"seq_len_tokens"}


def test_another_model_on_the_gpu_is_asked_for() -> None:
    rewarded = ROLLS + "use_vllm: true\nvllm_max_model_length: 700\nreward_model_name_or_path: Skywork/Reward-8B\n"
    assert open_fields(read_text(rewarded, "grpo.yaml")) == {"beside"}
    pairs = "model_name_or_path: Qwen/Qwen3-0.6B\nstage: dpo\ndo_train: true\ndataset: a\nref_model: Qwen/Qwen3-8B\n"
    for kind, asked in (("lora", {"beside"}), ("full", set())):
        assert open_fields(read_text(f"{pairs}finetuning_type: {kind}\n", "lf.yaml")) == asked
    simpo = f"{pairs}finetuning_type: lora\npref_loss: simpo\n"
    assert not open_fields(read_text(simpo, "lf.yaml"))


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("dpo", "sync_ref_model: true\nuse_peft: true\n", "adapters, whose reference is the base"),
        ("dpo", "sync_ref_model: true\nprecompute_ref_log_probs: true\n", "with precomputed ones"),
        ("dpo", "sync_ref_model: true\n", ""),
        ("kto", "per_device_train_batch_size: 1\n", "which has one"),
        ("kto", "per_device_train_batch_size: 1\nloss_type: apo_zero_unpaired\n", ""),
        ("grpo", "sync_ref_model: true\n", "with no reference"),
        ("grpo", "sync_ref_model: true\nbeta: 0.1\n", ""),
        ("grpo", "generation_batch_size: 32\nsteps_per_generation: 4\n", "are given both"),
        ("rloo", "auto_find_batch_size: true\n", "groups of completions"),
    ],
)
def test_what_trls_trainers_stop_at_is_said(name: str, settings: str, reason: str) -> None:
    text = (ROLLS if name in ("grpo", "rloo") else OF_PAIRS.replace("beta: 0.1\n", "")) + settings
    assert reason in " ".join(read_text(text, f"{name}.yaml").refusals)
    assert bool(read_text(text, f"{name}.yaml").refusals) is bool(reason)


@pytest.mark.parametrize(
    ("version", "settings", "generator"),
    [
        ("0.17.0", "", "vllm-server"), ("0.29.0", "", "vllm-server"), ("1.0.0", "", "vllm"), ("1.16", "", "vllm"),
        ("0.20.0", "vllm_mode: colocate\n", "vllm"), ("1.16", "vllm_mode: server\n", "vllm-server"),
    ],
)  # fmt: skip
def test_vllm_is_a_server_by_itself_before_trl_1(version: str, settings: str, generator: str) -> None:
    text = ROLLS + f"use_vllm: true\nvllm_max_model_length: 700\n{settings}"
    assert of_trl(version, text, "grpo.yaml").setup.rollout_settings.generator == generator


def test_what_older_trainers_cut_to_is_their_own() -> None:
    bare = OF_PAIRS.replace("max_length: 512\n", "")
    assert open_fields(of_trl("0.12.0", bare, "dpo.yaml")) == {"seq_len_tokens"}
    assert of_trl("0.13.0", bare, "dpo.yaml").setup.seq_len_tokens == 1024
    assert of_trl("0.11.4", bare, "dpo.yaml").setup.seq_len_tokens == 512
    assert of_trl("0.13.0", bare, "kto.yaml").setup.seq_len_tokens == 512
    rolls = "model_name_or_path: Qwen/Qwen3-0.6B\nnum_generations: 8\nmax_completion_length: 100\n"
    old = of_trl("0.16.0", rolls + "max_prompt_length: 60\n", "grpo.yaml")
    assert (old.setup.seq_len_tokens, old.setup.rollout_settings.reference, open_fields(old)) == (160, True, set())
    assert of_trl("0.20.0", rolls, "grpo.yaml").setup.seq_len_tokens == 612
    assert not of_trl("0.20.0", rolls, "grpo.yaml").setup.rollout_settings.reference
    assert open_fields(of_trl("1.0.0", rolls, "grpo.yaml")) == {"seq_len_tokens"}


@pytest.mark.parametrize("settings", ["bf16: true\n", "trainer: {fp16: true}\n", "mixed_precision: bf16\n"])
def test_the_type_of_own_settings_weights_is_not_that_of_their_autocast(settings: str) -> None:
    bare = OWN_YAML.replace("bf16: true\ntorch_dtype: bfloat16\n", "")
    assert open_fields(read_text(bare + settings, "conf.yaml")) == {"precision"}
    quantized = bare.replace("load_in_4bit: false", "load_in_4bit: true")
    assert open_fields(read_text(quantized + settings, "conf.yaml")) == set()


@pytest.mark.parametrize(
    "key", ["checkpoint_dir: out", "precision: bf16\ncheckpoint_dir: out", "train: {}\ncheckpoint_dir: x"]
)
def test_a_folder_for_checkpoints_makes_no_litgpt_of_axolotl(key: str) -> None:
    text = "base_model: Qwen/Qwen3-0.6B\nadapter: lora\nlora_r: 8\nsequence_len: 512\nmicro_batch_size: 1\n"
    text += "datasets: [{path: a, type: alpaca}]\nlora_target_linear: true\nbf16: true\n"
    assert read_text(text + key + "\n", "lora.yaml").format in ("axolotl", "own settings")
    assert read_text(text + "checkpoint_dir: out\n", "lora.yaml").format == "axolotl"
    litgpt = "checkpoint_dir: checkpoints/a/b\nlora_r: 8\ntrain: {max_seq_length: 512, micro_batch_size: 1}\n"
    assert read_text(litgpt, "lora.yaml").format == "litgpt"


@pytest.mark.parametrize(
    ("named", "loss"), [("CEWithChunkedOutputLoss", "full"), ("LinearCrossEntropyLoss", "chunked")]
)
def test_a_loss_of_torchtune_that_cuts_all_logits_has_them_all(named: str, loss: str) -> None:
    """Its own recipe of Qwen2.5-7B, traced: 22.66 GiB; with all logits in eight pieces 19.09, and 3.50 of rotary tables
    that its 28 layers hold (131,072 positions x 256 x 4 bytes each)."""
    text = (
        "tokenizer: {max_seq_len: 1024}\nbatch_size: 4\noptimizer: {_component_: torch.optim.AdamW}\n"
        "model: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_7b_base, lora_rank: 16}\n"
        f"loss: {{_component_: torchtune.modules.loss.{named}}}\ncheckpointer: {{checkpoint_dir: Qwen2.5-7B}}\n"
        "dataset: {packed: false}\nenable_activation_checkpointing: true\n"
    )
    config = read_text(text, "lora_finetune.yaml")
    assert (config.format, config.setup.stack, config.setup.loss) == ("torchtune", "torchtune", loss)
    assert any("rotary tables in every layer" in approximation for approximation in config.approximations)


def test_fsdps_own_checkpointing_is_where_axolotls_comes_from() -> None:
    text = "base_model: m\nadapter: lora\nfsdp_config:\n  activation_checkpointing: true\n"
    assert read_text(text, "a.yml", around=FileContext(num_gpus=2)).origins["checkpointing"] == "a.yml:4"


def test_what_torchaos_optimizer_keeps_on_the_host_is_an_upper_bound() -> None:
    text = "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\ntokenizer: {max_seq_len: 64}\n"
    text += "loss: {_component_: m.LinearCrossEntropyLoss}\ncheckpointer: {checkpoint_dir: Llama-3.1-8B}\n"
    text += "optimizer: {_component_: torchao.optim.CPUOffloadOptimizer, offload_gradients: true}\n"
    config = read_text(text, "a.yaml")
    (bound,) = [words for words in config.approximations if isinstance(words, UpperBound)]
    assert (config.setup.optimizer, bound.categories) == ("adamw", ("optimizer", "gradients"))


def test_what_a_recipe_of_torchtune_trains_is_not_read_in_its_name() -> None:
    text = "model: {_component_: torchtune.models.llama3_2.llama3_2_3b}\ntokenizer: {max_seq_len: 64}\n"
    text += "loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}\n"
    assert read_text(text, "3B_sft_for_grpo.yaml").setup.objective == "sft"


def test_litgpts_adapters_of_queries_are_on_the_models_own_fused_matrix() -> None:
    text = "checkpoint_dir: checkpoints/tiiuae/falcon-7b\nquantize: bnb.nf4\nlora_r: 8\nlora_mlp: true\n"
    config = read_text(text + "train: {max_seq_length: 512}\n", "qlora.yaml", model=catalogue.load("tiiuae/falcon-7b"))
    assert config.setup.lora_targets == ("query_key_value", "dense_h_to_4h", "dense_4h_to_h")
    assert stored_refusal(config.setup, catalogue.load("tiiuae/falcon-7b")) == ""
    assert any("fused" in text for text in config.approximations)


@pytest.mark.parametrize("program", ["swift/cli/sft.py", "/opt/ms-swift/swift/cli/rlhf.py"])
def test_ms_swifts_own_program_is_read_by_its_words(program: str) -> None:
    """An empty continued line is one in bash, too."""
    text = f"torchrun --nproc_per_node=2 {program} \\\n    --model m \\\n     \\\n    --max_length 64\n"
    setup = read_text(text, "run.sh").setup
    assert (setup.num_gpus, setup.parallel, setup.seq_len_tokens) == (2, "ddp", 64)
    assert setup.objective == ("dpo" if "rlhf" in program else "sft")


@pytest.mark.parametrize(("more", "packing"), [("", False), ("W+=(--packing true)\n", True)])
def test_an_empty_array_of_a_script_has_no_words(more: str, *, packing: bool) -> None:
    setup = read_text(f'W=()\n{more}{SWIFT}--per_device_train_batch_size 2 "${{W[@]}}" --lora_rank 4\n', "run.sh").setup
    assert (setup.micro_batch_seqs, setup.packing, setup.lora_rank) == (2, packing, 4)


@pytest.mark.parametrize("stamp", ["now", "$(date +%s)", "$( date '+%F-%H' )"])
def test_a_config_that_a_script_writes_is_found_by_its_whole_path(stamp: str) -> None:
    script = f"T={stamp}\nC=/data/configs/run-$T.yml\ncat > ${{C}} <<EOF\n{AXOLOTL}EOF\naxolotl train ${{C}}\n"
    config = read_text(script, "run.sh")
    assert (config.model_id, config.setup.lora_rank) == ("Qwen/Qwen3-0.6B", 8)


@pytest.mark.parametrize(
    "command",
    [
        "trl sft --model_name_or_path Qwen/Qwen3-0.6B --max_length 64 --no_gradient_checkpointing",
        "trl sft --config sft.yaml --no_gradient_checkpointing",
        "axolotl train ax.yaml --no-gradient-checkpointing",
    ],
)
def test_a_switch_that_a_command_line_turns_off_is_off(command: str, tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 64\n")
    (tmp_path / "ax.yaml").write_text(AXOLOTL + "gradient_checkpointing: true\n")
    (tmp_path / "run.sh").write_text(command + "\n")
    assert read_config(tmp_path / "run.sh").setup.checkpointing == 0


FSDP_FILE = {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_version": 2}}
FSDP_RUN = {"swift_version": "4.2", "global_world_size": 2, "model": "m", "tuner_type": "full", "max_length": 64} | (
    {"vit_gradient_checkpointing": False, "freeze_vit": True, "gradient_checkpointing": True, "torch_compile": True}
)


@pytest.mark.parametrize(
    ("text", "file", "fields"),
    [
        (f"NPROC_PER_NODE=2 {SWIFT}--fsdp fsdp2\n", "run.sh", {"offload": "none"}),
        (f"NPROC_PER_NODE=2 {SWIFT}--fsdp '{json.dumps(FSDP_FILE)}'\n", "run.sh", {"offload": "parameters"}),
        (json.dumps(FSDP_RUN | FSDP_FILE), "args.json", {"offload": "parameters", "compile": True}),
        (
            f"F=/o/$(date +%s).json\ncat > $F <<E\n{json.dumps(FSDP_FILE)}\nE\nNPROC_PER_NODE=2 {SWIFT}--fsdp $F\n",
            "run.sh",
            {"offload": "parameters"},
        ),
    ],
)
def test_ms_swifts_fsdp_and_what_a_run_of_it_keeps_are_read(text: str, file: str, fields: dict[str, object]) -> None:
    """Between micro-batches its gradients stay whole: published runs of gemma-4-26B-A4B took 76.5 GiB of an H100
    with offloaded parameters and two micro-batches, 65 without either (fyh2001/megatron-sft-recipes, gemma4_opt/p1)."""
    config = read_text(text, file)
    setup = config.setup
    assert open_fields(config) <= {"accumulation_steps"}
    assert (setup.num_gpus, setup.parallel, setup.checkpointing, setup.sync_each_batch) == (2, "fsdp2", 1, False)
    assert {name: getattr(setup, name) for name in fields} == fields
    assert not config.refusals


def test_a_built_in_recipe_of_torchtune_says_how_to_write_it_out() -> None:
    with pytest.raises(ConfigError) as raised:
        read_text("tune run lora_finetune_single_device --config llama3_1/8B_lora\n", "run.sh")
    assert "tune cp" in raised.value.hint


LAUNCH = "python train.py --per_device_train_batch_size 1\n"
OF_OBJECTIVE = "training: {{{}, per_device_train_batch_size: 2}}\nmodel: {{name: m/m}}\n"
OF_SWIFT, RLHF = (f"swift {verb} --model Qwen/Qwen3-0.6B " for verb in ("sft", "rlhf"))
REFUSED: list[tuple[type[ConfigError], str, str, tuple[str, ...]]] = [
    # text for a shell, or for a person, is no file
    (Undetermined, r"starts train\.py", "run.sh", (f"bash <<EOF\n{LAUNCH}EOF\n", f"ssh n1 <<'EOF'\n{LAUNCH}EOF\n")),
    (NotATraining, "starts no training", "run.sh", (f"cat <<EOF\nusage: {LAUNCH}EOF\n",)),
    (NotPlanned, "hands its training over", "finetuning.py", (
        "import fire\nfrom llama_cookbook.finetuning import main\nfire.Fire(main)\n",
        "from llamafactory.train.tuner import run_exp\ndef main():\n    run_exp()\nmain()\n",
        "from swift.llm import sft_main\nif __name__ == '__main__':\n    sft_main()\n",
        "import typer\nfrom our_tool.pretrain import setup as begin\ntyper.run(begin)\n",
    )),
    (NotATraining, "no config of a known tool", "export.yaml", (
        "base_model: Qwen/Qwen2.5-1.5B\nadapter_path: out\noutput_name: mine\nquantization: q4_k_m\n",
    )),
    (NotATraining, "no trainer", "finetuning.py", (
        "from sklearn.model_selection import train_test_split\ntrain_test_split(a)\n",
        "from transformers.trainer_utils import get_last_checkpoint\nget_last_checkpoint('o')\n",
        "from our_tool.evaluation import main\nmain()\n",
        "from our_tool.training import plot\n",
    )),
    # tools whose flags are not read
    (NotPlanned, "MLX-LM", "run.sh", ("mlx_lm.lora --model Qwen/Qwen2.5-7B --train --data d --batch-size 1\n",)),
    (NotPlanned, "mlx_lm", "run.sh", ("python -m mlx_lm.lora --train --model m\n",)),
    (NotPlanned, "trains with megatron", "run.sh", ("megatron sft --model Qwen/Qwen2.5-7B",)),
    (NotPlanned, "trains with megatron", "run.sh", ("torchrun pretrain_gpt.py --tensor-model-parallel-size 4",)),
    (NotPlanned, "trains with openrlhf", "train_sft.sh", (
        "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft \\\n   --data.max_len 2048 \\\nEOF\n"
        'if [[ ${1} != "slurm" ]]; then\n    deepspeed --module $training_commands\nfi\n',
    )),
    (NotPlanned, "rlhf_type grpo", "run.sh", (  # a text of several lines, one of which looks like a comment
        f'PROMPT="Say <think>\n#### 42"\n{RLHF}--rlhf_type grpo --system "$PROMPT"\n',
    )),
    (NotPlanned, "trains with megatron", "run.sh", (r"megatron sft --chars_to_ignore , \; \: \" % --model m\n",)),
    (NotPlanned, "AutoTrain", "run.sh", (
        "autotrain llm --train --model m --peft\n", "CUDA_VISIBLE_DEVICES=0 autotrain llm --model m\n",
    )),
    # files of engines
    (NotPlanned, "AutoTrain", "conf.yaml", (
        "task: llm-sft\nbase_model: m\nproject_name: x\nparams: {peft: true, batch_size: 2}\n",
    )),
    (NotPlanned, "NeMo-RL", "conf.yaml", (
        "grpo: {num_prompts_per_step: 32}\npolicy: {model_name: m}\n",
        "dpo: {max_num_epochs: 1}\npolicy: {model_name: m}\ncluster: {}\n",
    )),
    (NotPlanned, "NeMo AutoModel", "conf.yaml", ("model: {_target_: m}\nstep_scheduler: {local_batch_size: 4}\n",)),
    (NotPlanned, "litgpt's pretraining", "conf.yaml", (
        "model_name: pythia-14m\nmodel_config:\ninitial_checkpoint_dir:\ntrain: {micro_batch_size: 4}\n",
    )),
    (NotPlanned, "a config of xtuner", "internlm_7b_qlora_e3.py", (
        "from xtuner.engine.runner import TrainLoop\ntrain_cfg = dict(type=TrainLoop, max_epochs=3)\n",
    )),
    (NotPlanned, r"fine-tuning \(qat\)", "8B_full.yaml", (
        "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\nloss: {_component_: m.LinearCrossEntropyLoss}\n"
        "quantizer: {_component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer}\n",
    )),
    (NotPlanned, r"fine-tuning \(generation\)", "generation_v2.yaml", (
        "model: {_component_: torchtune.models.llama2.llama2_7b}\ntokenizer: {max_seq_len: 2048}\nmax_new_tokens: 9\n",
    )),
    (NotPlanned, "litgpt, whose flags", "run.sh", ("litgpt finetune_lora a/b\n", "litgpt pretrain pythia-14m\n")),
    (ConfigError, "tensor_degree 2", "run.sh", (
        f"NPROC_PER_NODE=4 {OF_SWIFT}--max_length 64 --deepspeed zero2 --deepspeed_autotp_size 2 "
        "--sequence_parallel_size 2",
    )),
    (NotPlanned, "Firefly", "conf.yaml", (
        "model_name_or_path: m\ntrain_file: x\ntrain_mode: qlora\nmax_seq_length: 64\n",
    )),
    (NotPlanned, "LLaMA-Factory's v1", "conf.yaml", (
        "model: m\ntrain_dataset: x\npeft_config: {name: lora}\nmicro_batch_size: 1\n",
    )),
    (NotPlanned, "trains with JAX", "train.py", ("import jax\nfrom mine import Loop\nLoop(jax.devices()).train()\n",)),
    (NotPlanned, "trains with TensorFlow", "train.py", (
        "from tensorflow import keras\nm = keras.Sequential()\nm.fit(x)\n",
    )),
    (NotPlanned, "trains with PaddlePaddle", "train.py", ("import paddle\nfrom mine import go\ngo(paddle)\n",)),
    # other objectives
    *(
        (NotPlanned, f"trains with TRL's {trainer}:", "train.py", (
            f"from trl.experimental.x import {trainer}\nfrom trl import TPOConfig\nm = m()\n"
            f"{trainer}(model='gpt2', args=TPOConfig('o', max_length=64)).train()\n",
        ))
        for trainer in ("TPOTrainer", "SDFTTrainer", "SDPOTrainer")
    ),
    (NotPlanned, r"trains with \w+ \((segmentation|depth estimation|masked images|speech)\)", "train.py", tuple(
        f"from transformers import *\nm = {model}\nTrainer(m, TrainingArguments('o')).train()\n"
        for model in (
            "AutoModelForUniversalSegmentation.from_pretrained('a/b')", "AutoModelForDepthEstimation.from_config(c)",
            "ViTMAEForPreTraining(c)", "Wav2Vec2ForPreTraining(c)",
        )
    )),
    (NotPlanned, "rm by its name", "rm_qwen3b.yaml", (
        "model_name_or_path: m/m\ndo_train: true\ntrain_file_dir: a\nvalidation_file_dir: b\nuse_peft: true\n"
        "lora_rank: 8\nmax_source_length: 512\nmax_target_length: 512\ntarget_modules: all\n"
        "per_device_train_batch_size: 4\n",
    )),
    (NotPlanned, "not planned", "own.yaml", tuple(
        OF_OBJECTIVE.format(word) for word in ("method: simpo", "task: rlhf_alignment", "stage: classification")
    )),
    (ConfigError, "no config of a known tool", "two.yaml", ("a: 1\n---\nb: 2\n",)),
    (NotPlanned, "rlhf_type grpo with a step of ms-swift's own", "run.sh", (f"{RLHF}--rlhf_type grpo",)),
    (NotPlanned, "task_type embedding with a step", "run.sh", (f"{OF_SWIFT}--task_type embedding",)),
    (NotPlanned, "task_type generative_reranker", "run.sh", (f"{OF_SWIFT}--task_type generative_reranker",)),
    (ConfigError, "grpo.py: num_generations must be a whole number of at least 2", "grpo.py", (
        "from trl import *\nGRPOTrainer('m/m', args=GRPOConfig(num_generations=1)).train()\n",
    )),
    (NotPlanned, r"reinforcement learning \(num_generations, reward_funcs\)", "grpo.yaml", (
        "model: Qwen/Qwen3-8B\ntrain_type: lora\nmax_length: 512\nnum_generations: 8\nreward_funcs: [accuracy]\n",
    )),
    (NotPlanned, "stage rm with a step of LLaMA-Factory's own", "a.yaml", (
        "model_name_or_path: m\nstage: rm\ndo_train: true\nfinetuning_type: lora\n",
    )),
    (NotPlanned, r"trains (ASFT with a step|with Megatron)", "a.yaml", tuple(
        f"model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: full\n{key}\n"
        for key in ("use_asft_loss: true", "pipeline_model_parallel_size: 4", "expert_model_parallel_size: 1")
    )),
    (ConfigError, "pref_loss must be one of", "a.yaml", (
        "model_name_or_path: m\nstage: dpo\npref_loss: cal_dpo\ndo_train: true\nfinetuning_type: lora\n",
    )),
    (NotPlanned, "rl: ebft with a step of Axolotl's own", "a.yml", ("base_model: m\nrl: ebft\nsequence_len: 64\n",)),
    (NotPlanned, r"rl: grpo \(async_prefetch\)", "a.yml", (
        "base_model: m\nrl: grpo\nsequence_len: 64\ntrl: {async_prefetch: true}\n",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "file", "text"), [(*row[:3], text) for row in REFUSED for text in row[3]])
def test_what_is_not_planned_is_refused_by_its_name(error: type[ConfigError], words: str, file: str, text: str) -> None:
    with pytest.raises(error, match=words):
        read_text(text, file)


ARGUMENTS_ALONE = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nlearning_rate: 1e-3\nfp16: true\n"


@pytest.mark.parametrize("more", ["", "optim: adamw_torch\nsave_steps: 5\n", "warmup_ratio: 0.1\noutput_dir: out\n"])
def test_the_trainers_arguments_alone_are_no_file_of_trl(more: str) -> None:
    config = read_text(ARGUMENTS_ALONE + more, "trainer.yaml")
    assert config.format == "own settings"
    assert {"model", "method", "seq_len_tokens", "checkpointing"} <= open_fields(config)
    says(read_text(ARGUMENTS_ALONE + more + "model_name_or_path: Qwen/Qwen3-0.6B\n", "trainer.yaml"), "format", "trl")


@pytest.mark.parametrize(
    "statements",
    ["args.use_cpu = True\n", "args = SFTConfig('o', no_cuda=True)\n", "args = SFTConfig(**{'use_cpu': True})\n"],
)
def test_a_training_on_the_host_is_none_on_a_gpu(statements: str) -> None:
    with pytest.raises(NotATraining, match="trains on the CPU"):
        read(statements + LOADED.format("") + TRAINED)
    assert read(statements.replace("True", "False") + LOADED.format("") + TRAINED).setup.method == "full"


@pytest.mark.parametrize(
    "statements",
    [
        "import json\nargs = SFTConfig('o', use_cpu=json.load(open('x'))['cpu'])\n",
        "import json\nargs = SFTConfig('o', no_cuda=json.load(open('x'))['cpu'])\n",
        "import json\nargs = SFTConfig('o')\nargs.use_cpu = json.load(open('x'))['cpu']\n",
    ],
)
def test_a_training_that_may_be_on_the_host_is_taken_to_be_on_the_gpu_and_that_is_said(statements: str) -> None:
    assert any(
        assumption.startswith("trains on the GPU: ")
        for assumption in read(statements + LOADED.format("") + TRAINED).assumptions
    )
    resolvable = statements.replace("json.load(open('x'))['cpu']", "not torch.cuda.is_available()")
    assert not any(
        "on the GPU" in assumption for assumption in read(resolvable + LOADED.format("") + TRAINED).assumptions
    )


@pytest.mark.parametrize("package", ["yaml", "tomllib", "numpy as np", "transformers"])
def test_what_transformers_brings_is_not_asked_for(package: str) -> None:
    name = package.rpartition(" ")[2]
    guard = f"try:\n    import {package}\nexcept ImportError:\n    {name} = None\n    args.max_length = 64\n"
    assert open_fields(read(guard + LOADED.format("") + TRAINED)) == set()
    other = guard.replace(package, "liger_kernel").replace(f"    {name} = None\n", "")
    assert open_fields(read(other + LOADED.format("") + TRAINED)) == {"seq_len_tokens"}
