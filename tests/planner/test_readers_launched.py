"""Runs are read from what starts them: task files of schedulers, cells of notebooks, shells inside shells."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from planner.core.errors import ConfigError, NotATraining, NotPlanned, Undetermined, UsageError
from planner.frameworks.exporters.common import USUAL_LINEAR_MODULES
from planner.frameworks.readers import FileContext, read_config, read_text
from planner.frameworks.readers.rewrite import rewrite
from planner.frameworks.readers.types import EXPANDABLE, TEXT_ALONE, ReadConfig, overrides, parse_sets
from planner.models import catalogue
from planner.models.resolve import resolve_model
from planner.models.targets import lora_linears
from planner.options.images import Images
from tests.planner.helpers import open_fields, says

PROGRAM = """
import os, sys
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from dataclasses import dataclass

@dataclass
class Words:
    model_name: str = "meta-llama/Llama-3.1-8B"

parser = HfArgumentParser((Words, TrainingArguments))
if "--config" in sys.argv:
    words, args = parser.parse_yaml_file(yaml_file=os.path.abspath(sys.argv[sys.argv.index("--config") + 1]))
else:
    words, args = parser.parse_args_into_dataclasses()
args.gradient_accumulation_steps = int(os.environ.get("STEPS", 1))
model = AutoModelForCausalLM.from_pretrained(words.model_name)
model.resize_token_embeddings(32)
block_size = 512
Trainer(model=model, args=args).train()
"""
WRITTEN = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")
block_size = 512
args = TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=8, bf16=True)
Trainer(model=model, args=args).train()
"""
LAUNCH = "python train.py --per_device_train_batch_size 4 --bf16"
AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_target_linear: true
sequence_len: 512
micro_batch_size: 4
gradient_accumulation_steps: 8
optimizer: adamw_torch
bf16: true
"""
INDENTED = "".join(f"    {line}\n" for line in AXOLOTL.strip().splitlines())
TASKS = {
    "SkyPilot": f"resources: {{accelerators: 'H100:8'}}\nenvs: {{STEPS: 8}}\nrun: |\n  set -e\n  {LAUNCH}\n",
    "dstack": f"type: task\nenv:\n  - STEPS=8\ncommands:\n  - pip install x\n  - {LAUNCH}\n",
    "Kubernetes": f"""
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - env: [{{name: STEPS, value: "8"}}]
          command: [bash, -c]
          args: ["cd /code && {LAUNCH}"]
""",
    "Kubernetes with its config": f"""
apiVersion: v1
kind: ConfigMap
data:
  run.yaml: |
{INDENTED}
---
apiVersion: v1
kind: Pod
spec: {{containers: [{{command: [axolotl, train, /config/run.yaml]}}]}}
""",
    "Compose": f"services:\n  train:\n    environment: {{STEPS: '8'}}\n    command: {LAUNCH}\n",
    "Azure ML": (
        f"command: >-\n  STEPS=8 {LAUNCH.replace(' 4 ', ' ${{inputs.batch}} ')}\ncode: .\ninputs: {{batch: 4}}\n"
    ),
    "documents of which one trains": f"name: x\nowner: me\n---\n{AXOLOTL}",
}


def read(tmp_path: Path, name: str, text: str) -> ReadConfig:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / name).write_text(text)
    return read_config(tmp_path / name)


def cells(*sources: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": source} for source in sources]})


NOTEBOOKS = {
    "a line for the shell": cells("!pip install trl", f"!STEPS=8 {LAUNCH}"),
    "a cell of the shell": cells(f"%%bash\nexport STEPS=8\n{LAUNCH}"),
    "a program that it writes and starts elsewhere": cells(f"%%writefile written.py\n{WRITTEN}", "import os"),
    "a file that it writes": cells(f"%%writefile run.yaml\n{AXOLOTL}", "!axolotl train \\\n  run.yaml"),
}


def test_a_cell_that_no_python_reads_is_named_where_nothing_else_trains() -> None:
    broken = cells("import trl", "args = TrainingArguments(per_device_train_batch_size=,)\n", "trainer.train()")
    with pytest.raises(NotATraining) as refusal:
        read_text(broken, "t.ipynb")
    assert refusal.value.message.endswith("(not Python, and left out: cell 2)")


SUBMITS = (
    "from sagemaker.huggingface import HuggingFace\nfrom sagemaker.train import ModelTrainer\n"
    "from sagemaker.train.configs import Compute, SourceCode\nfrom sagemaker.train.distributed import Torchrun\n"
    "steps = 8\nparameters = {'per_device_train_batch_size': 4, 'bf16': True, 'gradient_accumulation_steps': steps}\n"
)
SUBMITTED = {
    "an estimator": "HuggingFace(entry_point='train.py', source_dir='scripts', instance_type='ml.g5.12xlarge', "
    "distribution={'torch_distributed': {'enabled': True}}, hyperparameters=parameters).fit()\n",
    "a trainer of jobs": "ModelTrainer(source_code=SourceCode(source_dir='scripts', entry_script='train.py'), "
    "compute=Compute(instance_type='ml.g5.12xlarge'), distributed=Torchrun(), hyperparameters=parameters).train()\n",
}


@pytest.mark.parametrize("job", SUBMITTED)
def test_what_is_submitted_to_sagemaker_is_read_as_its_containers_start_it(job: str, tmp_path: Path) -> None:
    own = 'args.gradient_accumulation_steps = int(os.environ.get("STEPS", 1))\n'
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(PROGRAM.replace(own, ""))
    for name, text in (("job.py", SUBMITS + SUBMITTED[job]), ("job.ipynb", cells(SUBMITS, "!ls", SUBMITTED[job]))):
        setup = read(tmp_path, name, text).setup
        assert (setup.micro_batch_seqs, setup.accumulation_steps, setup.num_gpus) == (4, 8, 4)
    with pytest.raises(NotPlanned, match="SageMaker's own engine"):
        read(tmp_path, "job.py", SUBMITS + SUBMITTED["an estimator"].replace("torch_distributed", "smdistributed"))
    open_words = SUBMITS.replace("'per_device_train_batch_size': 4", "'per_device_train_batch_size': input()")
    assert "micro_batch_seqs" in open_fields(read(tmp_path, "job.py", open_words + SUBMITTED[job]))
    some = SUBMITTED[job].replace("instance_type=", "instance_count=input(), instance_type=")
    assert any("--nnodes $SM_HOST_COUNT" in gap.reason for gap in read(tmp_path, "job.py", SUBMITS + some).missing)


SHELLS = {
    "a shell in a container": f'srun apptainer exec img bash -lc "\n  python eval.py\n  STEPS=8 {LAUNCH}\n"\n',
    "a default for what is not set": f': "${{STEPS:=8}}"\nexport STEPS\n{LAUNCH}\n',
    "a config among the words": "export STEPS=8\npython train.py --config run.yaml\n",
}
STARTED = {"task.yaml": TASKS, "run.ipynb": NOTEBOOKS, "run.sh": SHELLS}


@pytest.mark.parametrize(
    ("file", "name"),
    [(file, name) for file, texts in STARTED.items() for name in texts],
)
def test_what_starts_a_run_is_read_by_what_it_starts(file: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("per_device_train_batch_size: 4\nbf16: true\n")
    setup = read(tmp_path, file, STARTED[file][name]).setup
    steps = 8 if name != "a sweep" else 1  # the program sets it itself
    assert (setup.micro_batch_seqs, setup.accumulation_steps, setup.seq_len_tokens) == (4, steps, 512)


def test_a_variable_that_only_the_shell_knows_is_not_the_programs_default(tmp_path: Path) -> None:
    config = read(tmp_path, "run.sh", f"STEPS=$1 {LAUNCH}\n")
    assert "accumulation_steps" in {gap.field for gap in config.missing}
    either = f"export STEPS=8\nif nvidia-smi; then\n  export STEPS=2\nfi\n{LAUNCH}\n"
    assert "accumulation_steps" in {gap.field for gap in read(tmp_path, "run.sh", either).missing}


PARSED = """
import argparse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True)
words = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")
block_size = 512
Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=words.batch_size, bf16=True)).train()
"""


MAY_TAKE = {
    "the rest is ignored": ("words = parser.parse_args()", "words, _ = parser.parse_known_args()"),
    "others' code adds options": ("words =", "import own\nown.add_options(parser)\nwords ="),
    "a computed option": ("words =", "parser.add_argument(own_name())\nwords ="),
    "the rest is the program's": ("words =", "parser.add_argument('r', nargs=argparse.REMAINDER)\nwords ="),
}


@pytest.mark.parametrize(
    ("words", "batch", "lacks"),
    [("--batch 16 --no-cache", 16, ""), ("--batch_size=2", 2, ""), ("--rank 8", 4, "takes no --rank")]
    + [("--batch 2 --rank 8", 2, change) for change in MAY_TAKE],
)
def test_the_beginning_of_an_option_is_the_option_and_one_that_is_not_there_is_told(
    words: str, batch: int, lacks: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PARSED.replace(*MAY_TAKE.get(lacks, ("", ""))))
    (tmp_path / "run.sh").write_text(f"python train.py {words}\n")
    config = read_config(tmp_path / "run.sh")
    assert "micro_batch_seqs" not in {gap.field for gap in config.missing}
    assert config.setup.micro_batch_seqs == batch
    told = [sentence for sentence in config.assumptions if "takes no" in sentence]
    assert [lacks in sentence for sentence in told] == ([True] if lacks.startswith("takes") else [])


@pytest.mark.parametrize(
    ("declared", "words", "fields"),
    [
        ("'--targets', nargs='+'", "--targets q_proj v_proj --batch 2", {"lora_targets": ("q_proj", "v_proj")}),
        ("'--four', type=bool, default=False", "--batch 2 --four False", {"quantization": "nf4"}),
        ("'--four', type=bool, default=False", "--batch 2", {"quantization": "none"}),
        ("'--rank', type=int", "--rank 4 --batch 8 --rank 16 --batch 2", {"lora_rank": 16}),
    ],
)
def test_words_are_taken_as_argparse_takes_them(
    declared: str, words: str, fields: dict[str, object], tmp_path: Path
) -> None:
    """A list takes every word behind its option, type=bool makes True of any, and an option's last word counts."""
    use = {"--targets": "target_modules=words.targets", "--rank": "r=words.rank", "--four": "r=8"}
    lora = next(text for flag, text in use.items() if flag in declared)
    load = "load_in_4bit=words.four" if "--four" in declared else "dtype='bfloat16'"
    (tmp_path / "train.py").write_text(
        PARSED.replace("words =", f"parser.add_argument({declared})\nwords =")
        .replace('8B")', f'8B", {load})\nfrom peft import LoraConfig, get_peft_model\n')
        .replace("block_size =", f"model = get_peft_model(model, LoraConfig({lora}))\nblock_size =")
    )
    (tmp_path / "run.sh").write_text(f"python train.py {words}\n")
    setup = read_config(tmp_path / "run.sh").setup
    assert setup.micro_batch_seqs == 2
    assert {name: getattr(setup, name) for name in fields} == fields


HANDED = {
    "a list": (PARSED, "parse_args()", 'parse_args(["--batch_size", "2"])', 2),
    "a text": (PARSED, "parse_args()", "parse_args('--batch_size 2'.split())", 2),
    "none": (PARSED, "parse_args()", "parse_args(args=[])", 4),
    "the command line's": (PARSED, "parse_args()", "parse_args(sys.argv[1:])", 8),
    "a dictionary": (
        "from transformers import HfArgumentParser\nfrom trl import SFTConfig, SFTTrainer\n"
        "(args,) = HfArgumentParser(SFTConfig).WORDS\nSFTTrainer('Qwen/Qwen3-0.6B', args=args).train()\n",
        "WORDS",
        "parse_dict({'per_device_train_batch_size': 2, 'max_length': 64})",
        2,
    ),
}


@pytest.mark.parametrize("name", HANDED)
def test_words_that_a_program_hands_its_parser_are_in_the_command_lines_place(name: str, tmp_path: Path) -> None:
    text, old, new, batch = HANDED[name]
    (tmp_path / "train.py").write_text("import sys\n" + text.replace(old, new))
    (tmp_path / "run.sh").write_text("python train.py --batch_size 8\n")
    config = read_config(tmp_path / "run.sh")
    assert "micro_batch_seqs" not in {gap.field for gap in config.missing}
    assert config.setup.micro_batch_seqs == batch


SET_LATER = {
    "global": "B = None\ndef setup():\n    global B\n    B = 2\nsetup()\nargs = Arguments(batch=B)",
    "nonlocal": (
        "def of():\n    b = 1\n    def more():\n        nonlocal b\n        b += 1\n    more()\n    return b\n"
        "args = Arguments(batch=of())"
    ),
    "partial": "make = functools.partial(Arguments, batch=2)\nargs = make(output_dir='o')",
    "partial of a function": (
        "def make(kind, b):\n    return kind(batch=b)\nargs = functools.partial(make, Arguments)(b=2)"
    ),
    "set_training": "args = Arguments(batch=4).set_training(1e-4, 2)",
    "set_dataloader": "args = Arguments('o')\nargs.set_dataloader(train_batch_size=2)",
    "shift": "args = Arguments(batch=1 << 1)",
    "under a condition": (
        "B = 4\ndef setup():\n    global B\n    if input():\n        B = 2\nsetup()\nargs = Arguments(batch=B)"
    ),
}


@pytest.mark.parametrize("name", SET_LATER)
def test_what_another_scope_a_partial_or_a_setter_says_is_read(name: str) -> None:
    body = SET_LATER[name].replace("Arguments", "TrainingArguments").replace("batch=", "per_device_train_batch_size=")
    text = (
        "import functools\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        f"model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B')\nblock_size = 64\n{body}\n"
        "Trainer(model=model, args=args).train()\n"
    )
    config = read_text(text, "train.py")
    is_open = "micro_batch_seqs" in {gap.field for gap in config.missing}
    assert (is_open, is_open or config.setup.micro_batch_seqs) == ((name == "under a condition"), is_open or 2)


@pytest.mark.parametrize("asked", ["platform.system() == 'Windows'", "sys.platform == 'win32'", "os.name == 'nt'"])
def test_a_program_runs_on_linux(asked: str) -> None:
    text = PARSED.replace("words.batch_size", f"1 if {asked} else 4").replace(
        "import argparse", "import argparse, os, platform, sys"
    )
    assert read_text(text, "train.py").setup.micro_batch_seqs == 4


def test_a_models_loader_elsewhere_leaves_its_quantization_open() -> None:
    body = """
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def build(model, data):
    args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=512)
    return SFTTrainer(model, args=args, train_dataset=data, peft_config=LoraConfig(r=8))
"""
    assert {"model", "quantization", "precision"} <= {gap.field for gap in read_text(body, "lib.py").missing}


OWN = {
    "another program's lora_rank": (
        "model_name_or_path: m/m\ndataset_dir: data\nmax_length: 512\nbf16: true\nload_in_4bit: true\n"
        "bnb_4bit_use_double_quant: true\nlora_rank: 16\nper_device_train_batch_size: 2\n"
        "gradient_accumulation_steps: 8\n"
    ),
    "blocks": (
        "model: {name_or_path: m/m}\nquantization: {load_in_4bit: true, double_quant: true}\n"
        "lora: {r: 16}\ndata: {max_length: 512}\n"
        "training: {per_device_train_batch_size: 2, gradient_accumulation_steps: 8, bf16: true}\n"
    ),
    "stages": (
        "model: {name: m/m, load_in_4bit: true, bnb_4bit_use_double_quant: true}\nbf16: true\n"
        "sft: {lora_r: 16, max_seq_length: 512, per_device_train_batch_size: 2, gradient_accumulation_steps: 8}\n"
        "dpo: {lora_r: 8, max_seq_length: 256, per_device_train_batch_size: 1, gradient_accumulation_steps: 4}\n"
    ),
    "Axolotl's model beside foreign names": (
        "base_model: m/m\nlora_r: 16\nload_in_4bit: true\ndouble_quant: true\nmax_seq_length: 512\nbatch_size: 2\n"
        "gradient_accumulation: 8\ntrain_data: x\nnarrative_eval: y\nlocal_model_dir: z\n"
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_programs_own_settings_are_read_by_their_names(name: str) -> None:
    config = read_text(OWN[name], "own.yaml")
    setup = config.setup
    assert (config.model_id, setup.lora_rank, setup.quantization) == ("m/m", 16, "nf4-double")
    assert (setup.micro_batch_seqs, setup.accumulation_steps, setup.seq_len_tokens) == (2, 8, 512)


SWIFT = "swift sft --model Qwen/Qwen2.5-7B-Instruct --train_type lora --torch_dtype bfloat16 "


def test_swifts_file_stands_for_words_that_go_over_it(tmp_path: Path) -> None:
    """Source: ms-swift@3602360a cli/main.py parse_yaml_args."""
    file = (
        "model: Qwen/Qwen3-8B\nmax_length: 512\ndeepspeed: zero2\nENV: {NPROC_PER_NODE: 4, CELOSS_PARALLEL_SIZE: 1}\n"
    )
    (tmp_path / "sft.yaml").write_text(file)
    (tmp_path / "run.sh").write_text("swift sft sft.yaml --max_length 1024 --dataset a.jsonl b.json\n")
    config = read_config(tmp_path / "run.sh")
    setup = config.setup
    assert (config.model_id, setup.seq_len_tokens, setup.num_gpus, setup.parallel) == (
        "Qwen/Qwen3-8B",
        1024,
        4,
        "zero2",
    )
    visible = file.replace("ENV: {", "rlhf_type: kto\nENV: {CUDA_VISIBLE_DEVICES: '0,1,2,3,4,5,6,7', ")
    (tmp_path / "rlhf.yaml").write_text(visible)
    (tmp_path / "run.sh").write_text("swift rlhf rlhf.yaml\n")
    setup = read_config(tmp_path / "run.sh").setup
    assert (setup.objective, setup.num_gpus, setup.parallel) == ("kto", 4, "zero2")
    (tmp_path / "rlhf.yaml").write_text("model: gpt2\nENV: four\n")
    with pytest.raises(ConfigError, match="ENV must be a block"):
        read_config(tmp_path / "run.sh")
    (tmp_path / "run.sh").write_text("swift sft other.yaml\n")
    with pytest.raises(Undetermined, match=r"other\.yaml"):
        read_config(tmp_path / "run.sh")


@pytest.mark.parametrize("variables", ["NNODES=$WORLD_SIZE NPROC_PER_NODE=8", "NPROC_PER_NODE=$GPUS"])
def test_processes_that_only_the_cluster_knows_are_asked_for(variables: str) -> None:
    launch = f"{variables} swift sft --model Qwen/Qwen3-8B --max_length 512 --deepspeed zero2"
    assert [entry.field for entry in read_text(launch, "run.sh").missing] == ["num_gpus"]
    assert read_text(launch, "run.sh", around=FileContext(num_gpus=16)).setup.num_gpus == 16


def test_all_linear_among_other_names_is_every_matrix_beside_them() -> None:
    launch = "swift sft --model Qwen/Qwen2.5-1.5B --max_length 512 --target_modules all-linear all-embedding lm_head"
    config = read_text(launch, "run.sh", model=resolve_model("Qwen/Qwen2.5-1.5B"))
    assert set(config.setup.lora_targets) == {*USUAL_LINEAR_MODULES, "lm_head"}
    assert config.adapted_tables == ("embed_tokens",)


@pytest.mark.parametrize(
    ("command", "field", "reason"),
    [
        ("swift sft --sft_type lora --model_type llama3-8b --max_length -1", "seq_len_tokens", "is -1"),
        ("tune run lora_finetune_single_device --config tune.yaml batch_size=$SIZE", "micro_batch_seqs", "is $SIZE"),
    ],
)
def test_words_of_a_launch_that_leave_a_setting_open_are_asked_for(
    command: str, field: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "tune.yaml").write_text(
        "model: {_component_: torchtune.models.llama3.lora_llama3_8b}\nbatch_size: 2\n"
        "tokenizer: {max_seq_len: 64}\ncheckpointer: {checkpoint_dir: /m/Meta-Llama-3-8B}\n"
        "dataset: [{_component_: torchtune.datasets.alpaca_dataset, packed: false}]\n"
    )
    (tmp_path / "run.sh").write_text(command)
    missing = {gap.field: gap.reason for gap in read_config(tmp_path / "run.sh").missing}
    assert reason in missing[field]


def test_blocks_on_a_command_line_are_json() -> None:
    config = read_text(SWIFT + "--max_length 64 --gradient_checkpointing_kwargs '{\"use_reentrant\": false}'", "run.sh")
    assert (config.setup.checkpointing, config.setup.reentrant_checkpointing) == (1, False)


def test_a_condition_among_a_launchers_words_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WRITTEN)
    (tmp_path / "run.sh").write_text('accelerate launch $([ "$A" = "b" ] && echo "--use_deepspeed") "train.py"')
    assert read_config(tmp_path / "run.sh").setup.micro_batch_seqs == 4


def test_an_empty_word_names_no_model() -> None:
    assert read_text("python sft.py --model '' --train_type lora --max_length 64", "run.sh").model_id is None


@pytest.mark.parametrize(
    ("file", "launch"),
    [
        ("max_length: 64\nuse_peft: true\nmodel_name_or_path: {}\n", "trl sft --config a.yaml --{} 2"),
        (
            "stage: sft\ndo_train: true\nmodel_name_or_path: {}\ntemplate: llama3\ncutoff_len: 64\n",
            "llamafactory-cli train a.yaml {}=2",
        ),
        (AXOLOTL, "axolotl train a.yaml --micro-batch-size 2"),
    ],
    ids=["TRL", "LLaMA-Factory", "Axolotl"],
)
def test_words_behind_a_tools_file_are_on_top_of_it(file: str, launch: str, tmp_path: Path) -> None:
    size = "per_device_train_batch_size"
    eight = "" if file == AXOLOTL else f"{size}: 8\n"
    (tmp_path / "a.yaml").write_text(file.format("meta-llama/Llama-3.1-8B") + eight)
    (tmp_path / "run.sh").write_text(launch.format(size))
    assert read_config(tmp_path / "run.sh").setup.micro_batch_seqs == 2


FLAGS = """#!/bin/bash
# --per_device_train_batch_size 16 on a big card
trl sft --model_name_or_path meta-llama/Llama-3.1-8B --use_peft \\
    --per_device_train_batch_size 16 \\
    --gradient_accumulation_steps=2 --max_length 64 \\
    --gradient_checkpointing  # all of them
echo done
"""


def test_flags_that_stand_in_a_launch_are_rewritten_where_they_stand() -> None:
    edits = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "gradient_checkpointing": False}
    text = rewrite(FLAGS, "run.sh", {**edits, "optim": "adamw_bnb_8bit"})
    lines = FLAGS.splitlines()
    changed = [after for before, after in zip(lines, text.splitlines(), strict=True) if before != after]
    assert changed == [
        "    --per_device_train_batch_size 4 \\",
        "    --gradient_accumulation_steps=8 --max_length 64 \\",
        "    --gradient_checkpointing False --optim adamw_bnb_8bit  # all of them",
    ]
    setup = read_text(text, "run.sh").setup
    assert (setup.micro_batch_seqs, setup.accumulation_steps, setup.checkpointing) == (4, 8, 0)
    assert setup.optimizer == "adamw-8bit"


@pytest.mark.parametrize("launch", ["trl sft --max_length $LENGTH", "trl sft --max_length 64; trl sft --max_length 8"])
def test_a_flag_that_stands_in_no_one_place_is_left(launch: str) -> None:
    with pytest.raises(ConfigError, match="stands in no one place"):
        rewrite(launch, "run.sh", {"max_length": 32})
    with pytest.raises(ConfigError, match="says none of"):
        rewrite(launch, "run.sh", {"optim": "sgd"})


MODEL_WORDS = "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --max_length 512"


@pytest.mark.parametrize(
    ("launch", "written"),
    [
        (f"{MODEL_WORDS} --learning_rate 1e-4 --bf16\n", "--learning_rate 1e-4 --optim sgd --bf16"),
        (f"{MODEL_WORDS} --output_dir=out", "--output_dir=out --optim sgd"),
        (f"{MODEL_WORDS} --output_dir $DIR \\\n  --bf16", "--output_dir $DIR --optim sgd \\\n  --bf16"),
        (
            f"{MODEL_WORDS} --output_dir $DIR/'a b'/c --learning_rate 1",
            "--output_dir $DIR/'a b'/c --learning_rate 1 --optim",
        ),
        (f"{MODEL_WORDS} --output_dir $(date +%s) --learning_rate 1", "$(date +%s) --learning_rate 1 --optim sgd"),
    ],
)
def test_a_word_that_no_launch_says_goes_beside_one_of_its_trainers(launch: str, written: str) -> None:
    fixed = rewrite(launch, "run.sh", {"optim": "sgd"})
    assert written in fixed
    assert read_text(f"DIR=out\n{fixed}", "run.sh").setup.optimizer == "sgd"


PICTURES = (
    "model_name_or_path: google/gemma-3-4b-it\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: a\n"
    "cutoff_len: 2048\nper_device_train_batch_size: 1\nbf16: true\nimage_max_pixels: 262144\n"
)


def test_what_a_sample_shows_is_known_to_the_data_alone() -> None:
    config = read_text(PICTURES, "mm.yaml", model=catalogue.load("google/gemma-3-4b-it"))
    assert [gap.field for gap in config.missing] == ["images"]
    given = overrides(config, parse_sets(["images=2x512x384"]))
    assert (given.setup.images, given.missing) == (Images(num=2, width=512, height=384), ())
    alone = overrides(config, parse_sets(["images=none"]))
    assert (alone.setup.images, alone.missing) == (None, ())
    with pytest.raises(UsageError, match="NUMxWIDTHxHEIGHT"):
        parse_sets(["images=many"])
    text_only = read_text(
        "model_name_or_path: google/gemma-3-4b-it\nuse_peft: true\ndataset_name: a\n",
        "trl.yaml",
        model=catalogue.load("google/gemma-3-4b-it"),
    )
    assert TEXT_ALONE in text_only.assumptions
    assert TEXT_ALONE not in overrides(text_only, parse_sets(["images=1x512x512"])).assumptions
    blind = read_text(PICTURES, "mm.yaml", model=catalogue.load("meta-llama/Llama-3.1-8B"))
    assert [gap.field for gap in blind.missing] == ["images"]


BRANCHES = """SIZE=$1
if [ "$SIZE" = "7b" ]; then
  MODEL=meta-llama/Llama-2-7b-hf
  BATCH=4
elif [[ $SIZE == 8b ]]; then
  MODEL=meta-llama/Llama-3.1-8B
  BATCH=2
else
  MODEL=meta-llama/Llama-2-13b-hf
  BATCH=1
fi
if [ -z "$STEPS" ]; then
  STEPS=8
fi
if [ $BATCH -gt 99 ]; then
  BATCH=99
  exit 1
fi
trl sft --model_name_or_path $MODEL --per_device_train_batch_size $BATCH --gradient_accumulation_steps $STEPS \\
  --max_length 512
"""


CASES = """SIZE=$1
STEPS=8
case "$SIZE" in
  7b) MODEL=meta-llama/Llama-2-7b-hf; BATCH=4 ;;
  8b|llama3*)
    MODEL=meta-llama/Llama-3.1-8B
    BATCH=2
    ;;
  *)
    echo "unknown size"
    exit 1
    ;;
esac
case $(hostname) in node*) STEPS=8;; esac
trl sft --model_name_or_path $MODEL --per_device_train_batch_size $BATCH --gradient_accumulation_steps $STEPS \\
  --max_length 512
"""


@pytest.mark.parametrize(
    ("script", "third"), [(BRANCHES, ("70b", "Llama-2-13b-hf", 1)), (CASES, ("llama3-8", "Llama-3.1-8B", 2))]
)
def test_the_branch_of_a_script_that_is_certainly_taken_counts_and_others_are_open(
    script: str, third: tuple[str, str, int]
) -> None:
    config = read_text(script, "run.sh")
    assert {gap.field for gap in config.missing} == {"model", "micro_batch_seqs"}
    assert config.setup.accumulation_steps == 8
    for size, model, batch in (("7b", "Llama-2-7b-hf", 4), ("8b", "Llama-3.1-8B", 2), third):
        says(
            read_text(script.replace("SIZE=$1", f"SIZE={size}"), "run.sh"),
            "model_id micro_batch_seqs",
            (f"meta-llama/{model}", batch),
        )


JOB = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
{setting}
srun {launch}
"""
WORDS = "train.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --max_length 64 --output_dir o"


@pytest.mark.parametrize(
    ("setting", "launch", "num_gpus"),
    [
        ("", "torchrun --nnodes 2 --nproc_per_node 4", 8),
        ("", "torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 --rdzv_backend c10d", 8),
        ("", "torchrun --nnodes ${SLURM_JOB_NUM_NODES} --nproc_per_node $SLURM_GPUS_ON_NODE", 8),
        ("NODES=$SLURM_NNODES", "python -m torch.distributed.run --nnodes $NODES --nproc_per_node 4", 8),
        ("", "python -u -m torch.distributed.run --nnodes 2 --nproc_per_node 4", 8),
        ("N=$(echo $SLURM_JOB_GPUS | tr ',' '\\n' | wc -l)", "torchrun --nnodes 2 --nproc_per_node $N", 8),
        ("", "deepspeed --num_nodes 2 --num_gpus 4", 8),
        ("", "accelerate launch --num_machines $SLURM_NNODES --num_processes $((SLURM_NNODES * 4))", 8),
        ("", "accelerate launch --num_machines 2 --num_processes $((SLURM_NNODES * (16 / 4)))", 8),
        ("", r"accelerate launch --num_machines 2 --num_processes $(expr $SLURM_NNODES \* 4)", 8),
        ("", "torchrun --nnodes 1:4 --nproc_per_node 4", 4),
        ("#SBATCH --gres=gpu:99999999999", "torchrun --standalone --nproc_per_node 4", 4),
    ],
)
def test_a_jobs_gpus_are_those_of_all_its_nodes(setting: str, launch: str, num_gpus: int, tmp_path: Path) -> None:
    """torchrun and DeepSpeed count the processes of a node, Accelerate those of the job; Slurm's variables count."""
    (tmp_path / "train.py").write_text(
        "from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser\n"
        "args, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()\n"
        "SFTTrainer(model.model_name_or_path, args=args).train()\n"
    )
    job = tmp_path / "job.sbatch"
    job.write_text(JOB.format(setting=setting, launch=f"{launch} {WORDS}"))
    config = read_config(job)
    assert (config.setup.num_gpus, max(1, config.num_nodes)) == (num_gpus, num_gpus // 4)
    assert any("on 2 nodes" in assumption for assumption in config.assumptions) == (num_gpus == 8)


ACCELERATE = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 6\n"
FACTORY = "model_name_or_path: gpt2\nstage: sft\ndo_train: true\nfinetuning_type: lora\ncutoff_len: 64\n"
TRL = "model_name_or_path: gpt2\ndataset_name: x/y\nmax_length: 64\nper_device_train_batch_size: 2\n"
LAUNCH_OWN = "accelerate launch --config_file own.yaml"
TRL_WORDS = "--model_name_or_path gpt2 --max_length 64"


@pytest.mark.parametrize(
    ("launch", "num_gpus", "parallel"),
    [
        ("axolotl train a.yaml --launcher torchrun -- --nnodes 2 --nproc-per-node 4", 8, "ddp"),
        ("axolotl train a.yaml --launcher accelerate -- --num_processes 4", 4, "ddp"),
        ("axolotl train a.yaml -- --num_processes 4 --num_machines 2", 4, "ddp"),
        ("axolotl train a.yaml --launcher python", 1, "none"),
        ("trl sft --config t.yaml --num_processes 4", 4, "ddp"),
        ("trl sft --num_processes=4 --config t.yaml", 4, "ddp"),
        ("trl sft --config t.yaml --accelerate_config own.yaml", 6, "ddp"),
        ("trl sft --config t.yaml --accelerate_config own.yaml --num_processes 2", 2, "ddp"),
        (f"{LAUNCH_OWN} --num_processes=1 -m trl.scripts.sft {TRL_WORDS}", 1, "none"),
        (
            f"{LAUNCH_OWN.replace('own', 'zero')} --zero_stage 2 --num_processes 4 -m trl.scripts.sft {TRL_WORDS}",
            4,
            "zero2",
        ),
        ("trl sft --config t.yaml --accelerate_config zero3", 8, "zero3"),
        ("trl sft --config t.yaml --accelerate_config zero3 --num_processes 2", 2, "zero3"),
        ("trl sft --config t.yaml --accelerate_config single_gpu", 1, "none"),
        (f"{LAUNCH_OWN.replace('own', 'zero')} -m trl.scripts.sft {TRL_WORDS}", 6, "zero3"),
        (
            f"accelerate launch --use_deepspeed --zero_stage 2 --num_processes 4 -m trl.scripts.sft {TRL_WORDS}",
            4,
            "zero2",
        ),
        (f"{LAUNCH_OWN} -m trl.scripts.sft {TRL_WORDS} --deepspeed ds_z3_config.json", 6, "zero3"),
        (f"{LAUNCH_OWN.replace('own', 'zero')} trl/scripts/sft.py {TRL_WORDS} --dataset_name x/y", 6, "zero3"),
        (f"{LAUNCH_OWN} -m axolotl.cli.train a.yaml", 6, "ddp"),
        ("CUDA_VISIBLE_DEVICES=0,1 trl sft --config t.yaml", 2, "ddp"),
        ("NNODES=2 NODE_RANK=0 NPROC_PER_NODE=4 llamafactory-cli train l.yaml", 8, "ddp"),
        ("export NNODES=2\nexport NPROC_PER_NODE=4\nllamafactory-cli train l.yaml", 8, "ddp"),
        ("export NNODES=2 NPROC_PER_NODE='4' \nllamafactory-cli train l.yaml", 8, "ddp"),
        ('export NPROC_PER_NODE="4" NOTE="a b=c"\nllamafactory-cli train l.yaml', 4, "ddp"),
        ("NPROC_PER_NODE=4 llamafactory-cli train l.yaml", 4, "ddp"),
    ],
)
def test_the_processes_that_a_tool_hands_on_are_counted(
    launch: str, num_gpus: int, parallel: str, tmp_path: Path
) -> None:
    for name, text in {
        "a.yaml": AXOLOTL,
        "t.yaml": TRL,
        "l.yaml": FACTORY,
        "own.yaml": ACCELERATE,
        "zero.yaml": ACCELERATE.replace("MULTI_GPU", "DEEPSPEED") + "deepspeed_config: {zero_stage: 3}\n",
        "run.sh": launch,
    }.items():
        (tmp_path / name).write_text(text)
    setup = read_config(tmp_path / "run.sh").setup
    assert (setup.num_gpus, setup.parallel) == (num_gpus, parallel)


def test_what_the_shell_puts_over_a_launch_config_is_not_the_configs(tmp_path: Path) -> None:
    """alignment-handbook's `recipes/launch.slurm`, open-r1's `slurm/train.slurm`: the file is of one node."""
    (tmp_path / "own.yaml").write_text(ACCELERATE.replace("MULTI_GPU", "DEEPSPEED"))
    script = tmp_path / "run.sh"
    steps = "--gradient_accumulation_steps $(grep steps t.yaml | awk '{print $2}')"
    script.write_text(f"{LAUNCH_OWN} {steps} --num_processes $WORLD_SIZE -m trl.scripts.sft {TRL_WORDS}")
    assert read_config(script, num_gpus=16).setup.num_gpus == 16
    assert "num_gpus" in {gap.field for gap in read_config(script).missing}


OF_FSDP = "{activation_checkpointing: true}"
FSDP_WORDS = ["--fsdp", "full_shard auto_wrap", "--fsdp_config", "fsdp.json"]


@pytest.mark.parametrize(
    ("words", "file", "checkpointing", "refused"),
    [
        (
            ["--fsdp", "full_shard auto_wrap", "--fsdp_config", "fsdp.json", "--gradient_checkpointing", "false"],
            "",
            1,
            False,
        ),
        (FSDP_WORDS, "", 1, True),  # TRL's own is on
        (["--gradient_checkpointing", "false"], f"distributed_type: FSDP\nfsdp_config: {OF_FSDP}\n", 1, False),
        ([], f"distributed_type: FSDP\nfsdp_config: {OF_FSDP}\n", 1, True),
        (["--gradient_checkpointing", "false"], "distributed_type: FSDP\n", 0, False),
    ],
)
def test_fsdps_own_checkpointing_is_read_and_not_taken_twice(
    words: list[str], file: str, checkpointing: int, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "fsdp.json").write_text('{"activation_checkpointing": true}')
    (tmp_path / "own.yaml").write_text((file or ACCELERATE) + "num_processes: 4\n" * bool(file))
    (tmp_path / "run.sh").write_text(f"{LAUNCH_OWN} -m trl.scripts.sft {TRL_WORDS} {shlex.join(words)}")
    config = read_config(tmp_path / "run.sh")
    assert (config.setup.checkpointing, config.setup.parallel) == (checkpointing, "fsdp2")
    assert (bool(config.refusals), config.setup.reentrant_checkpointing) == (refused, False)
    assert not config.missing


def test_the_file_that_llamafactorys_fsdp_names_is_read() -> None:
    factory = "model_name_or_path: gpt2\ndo_train: true\nfinetuning_type: full\nfsdp: full_shard auto_wrap\n"
    around = FileContext(num_gpus=4, written={"fsdp.json": '{"fsdp_offload_params": true}'})
    assert read_text(factory + "fsdp_config: fsdp.json\n", "a.yaml", around=around).setup.offload == "parameters"
    other = read_text(factory + "fsdp_config: other.json\n", "a.yaml", around=around)
    assert "offload" in [entry.field for entry in other.missing]


def test_a_files_hint_names_no_option_that_only_plan_has() -> None:
    zero = {"train.yaml": ACCELERATE.replace("MULTI_GPU", "DEEPSPEED") + "deepspeed_config: {zero_stage: 3}\n"}
    words = f"{TRL_WORDS} --use_vllm --vllm_mode colocate --reward_funcs accuracy_reward".replace(
        "max_", "vllm_max_model_"
    )
    launch = f"{LAUNCH_OWN.replace('own', 'train')} -m trl.scripts.grpo {words}"
    with pytest.raises(ConfigError, match="under zero3 is not modelled") as caught:
        read_text(launch, "run.sh", around=FileContext(written=zero))
    assert caught.value.hint == "in the file: use parallel ddp, fsdp2, zero1 or zero2"


def test_a_hint_with_a_programs_words_pastes(tmp_path: Path) -> None:
    """All of the words, as one that a shell takes apart as they were."""
    words = ["--model", "gpt2", "--fsdp", "full_shard auto_wrap", "--note", "it's", *(["--more", "x" * 50] * 5)]
    (tmp_path / "run.sh").write_text(shlex.join(["torchrun", "--nproc_per_node", "2", "elsewhere.py", *words]))
    with pytest.raises(Undetermined) as caught:
        read_config(tmp_path / "run.sh")
    pasted = shlex.split(caught.value.hint.partition(": ")[2])
    assert pasted[:4] == ["plan", "check", "elsewhere.py", "--args"]
    assert shlex.split(pasted[4]) == words


@pytest.mark.parametrize(
    ("words", "segments"),
    [
        ("", False),
        ("export PYTORCH_ALLOC_CONF=expandable_segments:True\n", True),
        ("PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True,max_split_size_mb:64' ", True),
        ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 ", False),
    ],
)
def test_segments_are_fixed_where_a_launch_does_not_say_more(words: str, segments: bool) -> None:
    assert read_text(words + SWIFT + "--max_length 512\n", "run.sh").setup.expandable_segments == segments


def test_a_program_may_set_the_allocator_itself() -> None:
    body = "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'\n" + PROGRAM
    around = FileContext(written={"train.py": body})
    assert read_text("python train.py\n", "run.sh", around=around).setup.expandable_segments
    assert read_text(body, "train.py").setup.expandable_segments
    last = FileContext(written={"train.py": body.replace(":True", ":False")})
    launch = "export PYTORCH_ALLOC_CONF=expandable_segments:True\npython train.py\n"
    assert not read_text(launch, "run.sh", around=last).setup.expandable_segments, "the program comes last"
    fixed = read_text(body.replace(":True", ":False"), "train.py")
    assert not fixed.setup.expandable_segments
    assert EXPANDABLE not in fixed.assumptions
    unsaid = read_text(PROGRAM, "train.py")
    assert unsaid.setup.expandable_segments
    assert EXPANDABLE in unsaid.assumptions
    assert EXPANDABLE not in overrides(unsaid, {"expandable_segments": "false"}).assumptions


@pytest.mark.parametrize("tool", ["llamafactory-cli", "python -m llamafactory.cli", "srun python3 -m llamafactory.cli"])
def test_llamafactorys_module_is_its_command_and_a_config_that_only_words_name_is_asked_for(tool: str) -> None:
    """Its inference behind it was taken for the training."""
    infer = "from transformers import TrainingArguments\nargs = TrainingArguments(output_dir='x')\n"
    sft = (
        "model_name_or_path: gpt2\nstage: sft\ndo_train: true\nfinetuning_type: full\nper_device_train_batch_size: 3\n"
    )
    files = FileContext(written={"infer.py": infer, "sft.yaml": sft})
    script = f"CONFIG=$1\n{tool} train $CONFIG\npython infer.py\n"
    with pytest.raises(Undetermined, match=r"llamafactory-cli .*: what that is its own command line says"):
        read_text(script, "run.sh", around=files)
    given = read_text(script, "run.sh", around=replace(files, arguments=("sft.yaml",)))
    assert (given.format, given.setup.micro_batch_seqs) == ("llamafactory", 3)


@pytest.mark.parametrize("look", ["prepare_data.py", "rewards.py"])
def test_what_looks_at_the_data_first_is_not_what_trains(look: str) -> None:
    """Its config was read as the run's, without the launcher: GRPO under FSDP2 as DDP, 302 GiB for 69."""
    config, spread = "model_name_or_path: gpt2\nmax_length: 512\n", "distributed_type: FSDP\nnum_processes: 2\n"
    files = {look: "import sys\nprint(open(sys.argv[1]).read())\n", "sft.yaml": config, "acc.yaml": spread}
    launch = f"python {look} sft.yaml\ntrl sft --config sft.yaml --accelerate_config acc.yaml\n"
    assert read_text(launch, "run.sh", around=FileContext(written=files)).setup.parallel == "fsdp2"


@pytest.mark.parametrize("word", ["expandable_segments:True", '"expandable_segments:True"  # all', "garbage:False"])
def test_the_environment_of_a_config_of_trl_sets_the_allocator(word: str) -> None:
    """trl 1.16 `TrlParser.parse_args_and_config`, in the process that the launched ones have their environment from."""
    config = f"model_name_or_path: gpt2\nmax_length: 512\nenv:\n  PYTORCH_ALLOC_CONF: {word}\n{chr(10) * 30_000}"
    alone = read_text(config, "sft.yaml")
    launched = read_text("trl sft --config sft.yaml\n", "run.sh", around=FileContext(written={"sft.yaml": config}))
    for reading in (alone, launched):
        assert reading.setup.expandable_segments == ("True" in word)
        assert EXPANDABLE not in reading.assumptions


def test_a_stack_that_sets_the_allocator_does_so_in_every_launch(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("base_model: gpt2\nadapter: lora\nsequence_len: 512\nmicro_batch_size: 1\n")
    (tmp_path / "run.sh").write_text("axolotl train a.yml\n")
    assert read_config(tmp_path / "run.sh").setup.expandable_segments


def test_ms_swift_lays_a_model_over_the_gpus_that_one_process_sees() -> None:
    seen, launch = "CUDA_VISIBLE_DEVICES=0,1,2,3 ", SWIFT + "--max_length 512\n"
    assert read_text(seen + launch, "run.sh").setup.parallel == "device-map"
    assert read_text(seen + "NPROC_PER_NODE=4 " + launch, "run.sh").setup.parallel == "ddp"


@pytest.mark.parametrize(("version", "optimizer"), [("4.47.0", "adamw"), ("4.57.0", "adamw-fused")])
def test_the_trainers_own_optimizer_is_that_of_its_version(version: str, optimizer: str) -> None:
    around = FileContext(versions={"transformers": version})
    factory = "stage: sft\ndo_train: true\nmodel_name_or_path: gpt2\ncutoff_len: 512\n"
    for name, text in (("run.sh", SWIFT + "--max_length 512\n"), ("a.yaml", factory)):
        setup = read_text(text, name, around=around).setup
        assert (setup.optimizer, bool(setup.transformers_version)) == (optimizer, version == "4.47.0")


@pytest.mark.parametrize("frozen", [True, False])
def test_ms_swift_says_by_its_settings_that_pictures_are_trained_on(frozen: bool) -> None:
    launch = f"NPROC_PER_NODE=2 swift sft --model m --max_length 2048 --freeze_vit {frozen} --deepspeed zero3"
    model, around = catalogue.load("Qwen/Qwen2.5-VL-7B-Instruct"), FileContext(num_gpus=2)
    config = read_text(f"{launch} --tuner_type full", "run.sh", model=model, around=around)
    assert [gap.field for gap in config.missing] == ["images"]
    assert "parallel zero3" in config.missing[0].reason
    (words,) = [text for text in config.approximations if "freeze_vit" in text]
    alone = overrides(config, parse_sets(["images=none"])).approximations
    shown = overrides(config, parse_sets(["images=1x512x512", "parallel=ddp"])).approximations
    assert [words in alone, words in shown] == [not frozen, frozen]
    adapters = read_text(launch, "run.sh", model=model, around=around).setup
    adapted = {layer.path for layer, _, _ in lora_linears(model, adapters.lora_targets)}
    assert any("visual" in path for path in adapted) is not frozen
    unsaid = read_text("swift sft --model m --max_length 512", "run.sh", model=model)
    assert (unsaid.missing, TEXT_ALONE in unsaid.assumptions) == ((), True)


def test_ms_swift_trains_on_a_packed_checkpoint_as_it_is_published() -> None:
    model = resolve_model("Qwen/Qwen2.5-7B-Instruct-AWQ")
    config = read_text(SWIFT + "--max_length 512\n", "run.sh", model=model)
    assert (config.setup.method, config.setup.quantization) == ("qlora", "nf4-double")
    assert any("awq" in approximation for approximation in config.approximations)


@pytest.mark.parametrize(
    ("visible", "processes", "num_gpus", "parallel"),
    [("0,1,2,3", 2, 2, "device-map"), ("0,1", 2, 2, "ddp"), ("0,1,2,3", 1, 4, "device-map")],
)
def test_swifts_processes_spread_the_model_over_the_gpus_that_each_sees(
    visible: str, processes: int, num_gpus: int, parallel: str
) -> None:
    started = f"NPROC_PER_NODE={processes} " * (processes > 1)
    launch = f"CUDA_VISIBLE_DEVICES={visible} {started}swift sft --model Qwen/Qwen3-8B --max_length 512"
    reading = read_text(launch, "a.sh")
    assert (reading.setup.num_gpus, reading.setup.parallel) == (num_gpus, parallel)
    assert reading.setup.accumulation_steps == 16 // processes  # a device map is one process
    assert any("DDP over device maps" in note for note in reading.approximations) == (visible.count(",") + 1 > num_gpus)


@pytest.mark.parametrize(
    ("pieces", "cut", "stack"), [(2048, 4, "ms-swift-cut-loss"), (2048, 1, "ms-swift"), (0, 4, "ms-swift")]
)
def test_swifts_loss_in_pieces_is_that_of_cut_sequences(pieces: int, cut: int, stack: str) -> None:
    launch = f"NPROC_PER_NODE=4 CELOSS_PARALLEL_SIZE={pieces} swift sft --model Qwen/Qwen3-8B --max_length 512"
    assert read_text(f"{launch} --sequence_parallel_size {cut}", "a.sh").setup.stack == stack
