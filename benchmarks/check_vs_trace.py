"""`plan check` against `plan trace` on small programs: where both answer, are they the same?

    python -m benchmarks.check_vs_trace [NAME ...] [--gpu GPU] [--tool NAME=PYTHON ...]

Programs of TRL's and transformers' trainers, each with something of its own (PROGRAMS below): written into a folder of
this run, read by the formula, then run whole by the phantom GPU for two optimizer steps. Told per program: the peaks
and tokens/s of both, and what the reading said that it does not follow. Aim: within 2 %, or said.
Results: benchmarks/data/check_vs_trace.json, by name; rows of programs that were not named stay.

    python -m benchmarks.check_vs_trace --fix [NAME ...]

Instead: each program on a card that has 75 and 50 % of what it needs, mended by `plan check --fix`; the written file is
run by the phantom GPU. Aim: each runs, fits, differs from its original only where the answer says so, and has no
shorter sequences where another change would do. Results: benchmarks/data/check_fixes.json. Needs liger-kernel and
triton beside what the tests need, both without their dependencies.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "data" / "check_vs_trace.json"
FIXES = ROOT / "benchmarks" / "data" / "check_fixes.json"
SHARES = (0.75, 0.5)
HEAD = """
import torch
from datasets import Dataset
from peft import *
from transformers import *
from trl import *
NAME = "Qwen/Qwen2.5-0.5B"
tok = AutoTokenizer.from_pretrained(NAME)
tok.pad_token = tok.eos_token
long = "b " * 4096
"""
TEXTS = "ds = Dataset.from_list([{'text': long}] * 64)\n"
PAIRS = "ds = Dataset.from_list([{'prompt': 'a', 'chosen': long, 'rejected': long}] * 64)\n"
MARKED = "ds = Dataset.from_list([{'prompt': 'a', 'completion': long, 'label': i % 2 == 0} for i in range(64)])\n"
CUT = """
def cut(rows):
    found = tok(rows["text"], truncation=True, padding="max_length", max_length=512)
    return {**found, "labels": found["input_ids"]}
ds = ds.map(cut, batched=True, remove_columns=["text"])
"""
LABELLED = CUT.replace('found["input_ids"]', "[0] * len(rows['text'])")
CALL = "{kind}Trainer(model={model}, args={arguments}('out', max_steps=2, report_to='none', {args}), train_dataset=ds"
LOAD = "model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16{more})\n"
LORA = "LoraConfig(r=16, target_modules='all-linear', task_type='CAUSAL_LM'{more})"
ADAPTER = LORA.format(more="")
SAVES = LORA.format(more=", modules_to_save=['lm_head']")
DORA = LORA.format(more=", use_dora=True")
ATTENTION = LORA.format(more=", use_rslora=True").replace("'all-linear'", "['q_proj', 'v_proj']")
WRAP = f"model = get_peft_model(model, {ADAPTER})\n"
FOUR = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16)"
BASE = "per_device_train_batch_size=2, gradient_accumulation_steps=2, max_length=1024, bf16=True"
PLAIN = "per_device_train_batch_size=2, gradient_accumulation_steps=2, bf16=True"


def sft(args: str = BASE, more: str = "", *, load: str = LOAD.format(more=""), model: str = "model") -> str:
    made = CALL.format(kind="SFT", model=model, arguments="SFTConfig", args=args)
    return f"{TEXTS}{load}{made}{more}).train()\n"


def hf(args: str = PLAIN, more: str = "", *, load: str = LOAD.format(more=""), data: str = CUT) -> str:
    """transformers' trainer on rows of 512 tokens."""
    made = CALL.format(kind="", model="model", arguments="TrainingArguments", args=args)
    return f"{TEXTS}{data}{load}{made}{more}).train()\n"


def preferences(kind: str, args: str = BASE, more: str = "", data: str = PAIRS) -> str:
    made = CALL.format(kind=kind, model="model", arguments=f"{kind}Config", args=args)
    return f"{data}{LOAD.format(more='')}{made}, processing_class=tok{more}).train()\n"


def adapted(more: str = "") -> str:
    return LOAD.format(more="") + f"model = get_peft_model(model, {LORA.format(more=more)})\n"


QUANTIZED = LOAD.format(more=f", quantization_config={FOUR}")
IN_8_BITS = LOAD.format(more=", quantization_config=BitsAndBytesConfig(load_in_8bit=True)")
IN_FLOAT32 = LOAD.format(more="").replace("bfloat16", "float32")
KBIT = "model = prepare_model_for_kbit_training(model)\n"
WITH = ", peft_config={}"
EVALUATES = ", eval_strategy='steps', eval_steps=1, per_device_eval_batch_size=8"
CLASSIFIER = (
    "model = AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=2, dtype=torch.bfloat16)\n"
    "model.config.pad_token_id = 0\n"
)
RESIZED = "tok.add_special_tokens({'pad_token': '<pad>'})\nmodel.resize_token_embeddings(len(tok))\n"
GUARD = (
    "import os\ndef main():\n    if os.environ.get('NO_SUCH_SWITCH', '0') == '1':\n"
    "        raise SystemExit('off')\nmain()\n"
)
OWN = (
    "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.inner = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16)\n"
    "    def forward(self, input_ids, attention_mask=None, labels=None):\n"
    "        return self.inner(input_ids, attention_mask=attention_mask, labels=labels)\nmodel = Net()\n"
)
PROGRAMS = {
    "sft-full": sft(),
    "sft-by-name": sft(model="NAME", load=""),
    "sft-lora": sft(more=WITH.format(ADAPTER)),
    "sft-lora-no-checkpointing": sft(BASE + ", gradient_checkpointing=False", WITH.format(ADAPTER)),
    "sft-qlora": sft(more=WITH.format(ADAPTER), load=QUANTIZED),
    "sft-packed": sft(BASE + ", packing=True", WITH.format(ADAPTER)),
    "sft-saved-modules": sft(more=WITH.format(SAVES)),
    "sft-eval": sft(BASE + EVALUATES, ", eval_dataset=ds.select(range(8))"),
    "sft-8bit-adam": sft(BASE + ", optim='adamw_bnb_8bit'"),
    "sft-adafactor": sft(BASE + ", optim='adafactor'"),
    "sft-sgd-fp32": sft(BASE.replace("bf16=True", "bf16=False") + ", optim='sgd'", load=IN_FLOAT32),
    "sft-dora": sft(more=WITH.format(DORA)),
    "sft-rslora-attention": sft(more=WITH.format(ATTENTION)),
    "hf-full-mixed": hf(load=IN_FLOAT32),
    "hf-full-checkpointing": hf(PLAIN + ", gradient_checkpointing=True"),
    "hf-lora": hf(load=adapted()),
    "hf-kbit": hf(load=QUANTIZED + KBIT + WRAP),
    "hf-kbit-unquantized": hf(load=LOAD.format(more="") + KBIT + WRAP),
    "hf-int8": hf(load=IN_8_BITS + WRAP),
    "hf-classification": hf(data=LABELLED, load=CLASSIFIER),
    "hf-resized": hf(load=LOAD.format(more="") + RESIZED + WRAP),
    "hf-guarded": GUARD + hf(load=adapted()),
    "hf-own-model": hf(load=OWN),
    "dpo-lora": preferences("DPO", more=WITH.format(ADAPTER)),
    "kto-lora": preferences("KTO", more=WITH.format(ADAPTER), data=MARKED),
}
"""Name -> what follows HEAD; variants of this repository's own test programs and of public ones."""


class Case(NamedTuple):
    """A file that is read, what lies beside it, and what runs it: words behind the interpreter ("" first: behind none),
    with {file} for the file."""

    file: str
    text: str
    command: tuple[str, ...] = ("{file}",)
    beside: Mapping[str, str] = MappingProxyType({})
    tool: str = ""


ROWS = [{"instruction": "b " * 3000, "input": "", "output": "a " * 3000}] * 32
LLAMAFACTORY = {
    "data/rows.json": json.dumps(ROWS),
    "data/dataset_info.json": json.dumps({"rows": {"file_name": "rows.json"}}),
    "run.py": (
        "import sys, types, yaml, transformers\n"
        "sys.modules.setdefault('torchaudio', types.ModuleType('torchaudio'))  # imported for sound alone\n"
        "from llamafactory.train.tuner import run_exp\nrun_exp(yaml.safe_load(open(sys.argv[1])))\n"
    ),
}
FACTORY = """# rows of a thousand tokens
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: {method}
dataset: rows
dataset_dir: data
template: qwen
cutoff_len: {length}
output_dir: out
per_device_train_batch_size: {micro}   # as many as the card has room for
gradient_accumulation_steps: 2
max_steps: 2
report_to: none
{more}"""
TRL_FILE = """model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
output_dir: out
max_steps: 2
report_to: none
max_length: 1024
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
{}"""
TAKES_WORDS = (
    "parser = HfArgumentParser(TrainingArguments)\n(args,) = parser.parse_args_into_dataclasses()\n"
    "Trainer(model=model, args=args, train_dataset=ds).train()\n"
)
LAUNCH = """#!/bin/bash
set -e
python train.py --output_dir out --max_steps 2 --report_to none --bf16 true \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 {}
"""


def factory(method: str, more: str, *, micro: int = 4, length: int = 1024, model: str = "Qwen/Qwen2.5-0.5B") -> Case:
    text = FACTORY.format(method=method, more=more, micro=micro, length=length, model=model)
    return Case("train.yaml", text, ("run.py", "{file}"), LLAMAFACTORY, "llamafactory")


AXOLOTL = """base_model: Qwen/Qwen2.5-7B
datasets: [{{path: rows.jsonl, ds_type: json, type: completion}}]
val_set_size: 0
output_dir: out
adapter: {adapter}
lora_r: 16
lora_alpha: 32
lora_dropout: 0.0
lora_target_linear: true
lora_mlp_kernel: false
lora_qkv_kernel: false
lora_o_kernel: false
sequence_len: 1024
pad_to_sequence_len: true
micro_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 2
optimizer: adamw_torch_fused
learning_rate: 0.0002
lr_scheduler: cosine
bf16: true
gradient_checkpointing: true
sdp_attention: true
{more}"""


def axolotl(adapter: str, more: str = "") -> Case:
    """A file of Axolotl. With its end each row is 1,024 of the stand-in's tokens: a shorter one brings a mask, by which
    PyTorch takes other attention."""
    extra_files = {"rows.jsonl": (json.dumps({"text": "a " * 511 + "a"}) + "\n") * 64}
    text = AXOLOTL.format(adapter=adapter, more=more)
    return Case("axolotl.yaml", text, ("-m", "axolotl.cli.train", "{file}"), extra_files, "axolotl")


TORCHTUNE = """output_dir: out
model: {{_component_: torchtune.models.llama3_1.{builder}}}
tokenizer: {{_component_: parts.padding, max_seq_len: 2048}}
checkpointer: {{_component_: parts.Weights, checkpoint_dir: Meta-Llama-3.1-8B, model_type: LLAMA3}}
resume_from_checkpoint: false
save_adapter_weights_only: false
dataset: {{_component_: parts.rows, packed: false}}
seed: 1
shuffle: false
epochs: 1
max_steps_per_epoch: 3
batch_size: {micro}
gradient_accumulation_steps: 1
optimizer: {{_component_: {optimizer}, lr: 2e-5}}
{more}
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
device: cuda
enable_activation_checkpointing: true
enable_activation_offloading: false
dtype: bf16
clip_grad_norm: null
compile: false
metric_logger: {{_component_: torchtune.training.metric_logging.DiskLogger, log_dir: out/logs}}
log_every_n_steps: 1
log_peak_memory_stats: true
profiler: {{_component_: torchtune.training.setup_torch_profiler, enabled: false}}
"""
TORCHTUNE_PARTS = """from types import SimpleNamespace
import torch
WIDE, INNER, WORDS, HEADS = 4096, 14336, 128256, 1024
LAYER = {"attn.q_proj.weight": (WIDE, WIDE), "attn.k_proj.weight": (HEADS, WIDE), "attn.v_proj.weight": (HEADS, WIDE),
         "attn.output_proj.weight": (WIDE, WIDE), "mlp.w1.weight": (INNER, WIDE), "mlp.w3.weight": (INNER, WIDE),
         "mlp.w2.weight": (WIDE, INNER), "sa_norm.scale": (WIDE,), "mlp_norm.scale": (WIDE,)}
SIZES = {"tok_embeddings.weight": (WORDS, WIDE), "norm.scale": (WIDE,), "output.weight": (WORDS, WIDE)}
SIZES |= {f"layers.{layer}.{name}": size for layer in range(32) for name, size in LAYER.items()}
def padding(**_): return SimpleNamespace(pad_id=0)
def rows(tokenizer, packed): return [{"tokens": [5] * 2048, "labels": [5] * 2048}] * 64
class Weights:
    def __init__(self, **_): pass
    def load_checkpoint(self, **_):
        return {"model": {name: torch.empty(size, dtype=torch.bfloat16) for name, size in SIZES.items()}}
    def save_checkpoint(self, *_, **__): pass
"""
TORCHTUNE_RUN = """import importlib.util, pathlib, sys, torchtune
from omegaconf import OmegaConf
sys.path.insert(0, ".")
place = pathlib.Path(torchtune.__file__).parents[1] / "recipes/{recipe}.py"
found = importlib.util.spec_from_file_location("recipe", place)  # the folder is no package
module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
config = OmegaConf.load(sys.argv[1])
recipe = module.{name}(cfg=config)
recipe.setup(cfg=config)
recipe.train()
"""


def torchtune(recipe: str, name: str, **words: Any) -> Case:
    """A recipe's file; it is imported, as `tune run` starts a process."""
    usual = {"builder": "llama3_1_8b", "micro": 2, "optimizer": "bitsandbytes.optim.PagedAdamW8bit", "more": ""}
    extra_files = {"run.py": TORCHTUNE_RUN.format(recipe=recipe, name=name), "parts.py": TORCHTUNE_PARTS}
    return Case("tune.yaml", TORCHTUNE.format(**{**usual, **words}), ("run.py", "{file}"), extra_files, "torchtune")


FULL_RECIPE = ("full_finetune_single_device", "FullFinetuneRecipeSingleDevice")
IN_BWD, KEPT = "optimizer_in_bwd: true", "optimizer_in_bwd: false"


def trl_file(more: str) -> Case:
    return Case("trl.yaml", TRL_FILE.format(more), ("-m", "trl.scripts.sft", "--config", "{file}"))


def launch(words: str, load: str = LOAD.format(more="")) -> Case:
    """A launch whose program takes the Trainer's arguments from its words."""
    program = HEAD + TEXTS + CUT + load + TAKES_WORDS
    return Case("run.sh", LAUNCH.format(words), ("", "bash", "{file}"), {"train.py": program})


SETTINGS = "# per card\ntrain: {batch: 4, steps: 2}  # eight a step\nflags:\n  checkpointing: false\n"
FROM_FILE = CALL.format(
    kind="",
    model="model",
    arguments="TrainingArguments",
    args="bf16=True, per_device_train_batch_size=c['train']['batch'], "
    "gradient_accumulation_steps=c['train']['steps'], gradient_checkpointing=c['flags']['checkpointing']",
)


def beside(opened: str, command: str = "") -> Case:
    """A program that takes its settings from a YAML beside it, which it opens by its name or by its command line."""
    load = f"import sys, yaml\nc = yaml.safe_load(open({opened}))\n" + LOAD.format(more="")
    program = HEAD + TEXTS + CUT + load + FROM_FILE + ").train()\n"
    files = {"conf/run.yaml": SETTINGS}
    if not command:
        return Case("train.py", program, beside=files)
    return Case("run.sh", command, ("", "bash", "{file}"), {**files, "train.py": program})


LORA_FILE = "lora_rank: 16\nlora_target: all\n"
CASES = {name: Case("train.py", HEAD + body) for name, body in PROGRAMS.items()} | {
    "lf-lora": factory("lora", LORA_FILE + "bf16: true\n"),
    "lf-qlora": factory("lora", LORA_FILE + "quantization_bit: 4\nbf16: true\n"),
    "lf-full": factory("full", "bf16: true\npure_bf16: true\n"),
    "lf-7b-lora": factory("lora", LORA_FILE + "bf16: true\n", model="Qwen/Qwen2.5-7B"),
    "lf-7b-qlora": factory("lora", LORA_FILE + "quantization_bit: 4\nbf16: true\n", model="Qwen/Qwen2.5-7B"),
    "axolotl-lora": axolotl("lora"),
    "axolotl-qlora": axolotl("qlora", "load_in_4bit: true\n"),
    "lf-long": factory("lora", LORA_FILE + "bf16: true\n", micro=1, length=4096),
    "lf-no-checkpointing": factory("lora", LORA_FILE + "bf16: true\ndisable_gradient_checkpointing: true\n"),
    "lf-liger": factory("lora", LORA_FILE + "bf16: true\nenable_liger_kernel: true\n"),
    "torchtune-in-bwd": torchtune(*FULL_RECIPE, more=IN_BWD),
    "torchtune-in-bwd-one": torchtune(*FULL_RECIPE, micro=1, more=IN_BWD),
    "torchtune-full": torchtune(*FULL_RECIPE, more=KEPT),
    "trl-yaml-full": trl_file("dtype: bfloat16\n"),
    "trl-yaml-lora": trl_file("use_peft: true\nlora_r: 16\nlora_target_modules: all-linear\ndtype: bfloat16\n"),
    "trl-yaml-packed": trl_file("use_peft: true\npacking: true\ndtype: bfloat16\ngradient_checkpointing: false\n"),
    "launch-full": launch("--optim adamw_torch"),
    "launch-lora": launch("--optim adamw_torch", adapted()),
    "yaml-beside": beside("'conf/run.yaml'"),
    "launch-yaml-beside": beside("sys.argv[1]", "#!/bin/bash\nset -e\npython train.py conf/run.yaml\n"),
    "launch-trl-yaml": Case(
        "run.sh",
        "python -m trl.scripts.sft --config t.yaml\n",
        ("", "bash", "{file}"),
        {"t.yaml": TRL_FILE.format("dtype: bfloat16\ngradient_checkpointing: false\n")},
    ),
    "launch-fp32": launch("--optim adamw_torch", LOAD.format(more="").replace("bfloat16", "float32")),
}
"""Name -> the file; those of a tool's own need an interpreter that has it (`--tool`)."""


def written(name: str, folder: Path) -> Case:
    case = CASES[name]
    for path, text in {**case.beside, case.file: case.text}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    return case


def traced_file(case: Case, file: str, folder: Path, gpu: list[str], tools: dict[str, str]) -> tuple[Any, str]:
    words = [word.format(file=file) for word in case.command]
    start = words[1:] if words[0] == "" else [tools.get(case.tool) or sys.executable, *words]
    return answered(["trace", *gpu, "--json=full", "-y", "--", *start], folder)


def answered(words: list[str], folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The JSON of a command of ours, and its error."""
    tools = Path(sys.executable).parent
    command, here = [str(tools / "plan"), *words], {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=here)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return (json.loads(done.stdout) if done.stdout.startswith("{") else None), (errors or [""])[-1][7:300]


def row_of(name: str, gpu: str, tools: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder, start = Path(place), time.monotonic()
        case = written(name, folder)
        read, refused = answered(["check", case.file, "--gpu", gpu, "--no-dry-run", "--json=full"], folder)
        traced, failed = traced_file(case, case.file, folder, ["--gpu", gpu], tools)
    row: dict[str, Any] = {"wall_s": round(time.monotonic() - start)}
    if read is None or traced is None:
        return row | {"result": "not read" if read is None else "not traced", "why": refused or failed}
    keys = ("peak_allocated_bytes", "peak_reserved_bytes")
    row |= {f"checked_{key}": read["prediction"][key] for key in keys} | {f"traced_{key}": traced[key] for key in keys}
    row["allocated_error"] = round(row["checked_peak_allocated_bytes"] / traced["peak_allocated_bytes"] - 1, 4)
    row["band"] = read["memory_band"]
    if traced["speed"]:
        speeds = {"checked": read["prediction"], "traced": traced["speed"]}
        row |= {f"{name}_tokens_per_s": round(speed["tokens_per_s"], 1) for name, speed in speeds.items()}
    return row | {"result": "both", "said": [*read["approximations"], *read["notes"], *read["prediction"]["notes"]]}


def fixed(name: str, gpu: str, share: float, tools: dict[str, str]) -> dict[str, Any]:
    """What became of a program where the card has a share of what it needs."""
    with tempfile.TemporaryDirectory() as place:
        folder, start = Path(place), time.monotonic()
        case = written(name, folder)
        read, refused = answered(["check", case.file, "--gpu", gpu, "--json=full"], folder)
        if read is None:
            return {"result": "not read", "why": refused}
        needed = read["prediction"]["peak_device_bytes"]
        memory = ["--gpu", gpu, "--memory-gib", f"{share * needed / 2**30 + 0.5:.3f}"]
        checked, refused = answered(["check", case.file, *memory, "--fix", "--json=full"], folder)
        fix = checked["fix"] if checked is not None else {}
        row: dict[str, Any] = {"needed_bytes": needed, "changes": fix.get("changes", [])}
        if checked is None or not fix.get("path"):
            row |= {"result": "no file", "why": fix.get("refused") or refused, "command": fix.get("command", "")}
            return row
        row |= {"budget_bytes": checked["budget_bytes"], "verdict": fix["verdict"], "diff": fix["diff"]}
        traced, failed = traced_file(case, fix["path"], folder, memory, tools)
        rechecked, refused = answered(["check", fix["path"], *memory, "--no-dry-run", "--json=full"], folder)
    row["wall_s"] = round(time.monotonic() - start)
    if traced is None or rechecked is None:
        return row | {"result": "does not run" if traced is None else "not read again", "why": failed or refused}
    was, now = checked["setup"], rechecked["setup"]
    differing = [field for field in was if was[field] != now.get(field)]
    singles = {change["label"]: change for change in checked["changes"]}
    stated = {field for label in row["changes"] for field in singles.get(label, {"fields": differing})["fields"]}
    row["untold"] = [field for field in differing if field not in stated]
    spared = [
        label for label, change in singles.items() if change["verdict"] == "fits" and not change["changes_training"]
    ]
    row["cut_needlessly"] = spared if "seq_len_tokens" in stated else []
    row["traced_bytes"] = traced["peak_device_bytes"]
    return row | {"result": "fits" if row["traced_bytes"] <= row["budget_bytes"] else "does not fit"}


def write(path: Path, key: str, row: dict[str, Any]) -> None:
    table = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(dict(sorted({**table, key: row}.items())), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--fix", action="store_true", help="run what --fix writes")
    parser.add_argument("--tool", action="append", default=[], help="NAME=PYTHON: as tools/validators/NAME.sh makes it")
    arguments = parser.parse_args()
    tools = dict(tool.split("=", 1) for tool in arguments.tool)
    names = arguments.names or [name for name, case in CASES.items() if not case.tool or tools.get(case.tool)]
    for name in names:
        if not arguments.fix:
            row = row_of(name, arguments.gpu, tools)
            write(OUT, name, row)
            print(name, row["result"], row.get("allocated_error", row.get("why")), f"{row['wall_s']} s", flush=True)
        for share in SHARES if arguments.fix else ():
            row = fixed(name, arguments.gpu, share, tools)
            write(FIXES, f"{name} at {share:g}", row)
            shown = [row.get(key) for key in ("result", "untold", "cut_needlessly", "why", "changes")]
            print(name, share, *shown, flush=True)


if __name__ == "__main__":
    main()
