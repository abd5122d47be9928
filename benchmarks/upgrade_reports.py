"""`plan diff`, by setting and by trace, on public reports that memory grew with an upgrade: does it name the cause?

    python -m benchmarks.upgrade_reports [NUMBER ...]

Scripts made of what a report shows (CASES below), a small model in its place, under the releases that it names, in
environments that uv makes. Named: among the rows that the answer shows, one that grew has the words that the thread
gives as the cause; they stand here, from the thread, before the run. Results: benchmarks/data/upgrade_threads.csv, the
columns by_setting, by_trace and evidence; rows without a script say why, and stay. Needs a package index.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from finetune_planner.cli.diff_traces import GROUPS, NUM_ROWS

THREADS = Path(__file__).parent / "data" / "upgrade_threads.csv"
GPU = "a100-80gb"
NAME = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
DATA = f"""
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments
tok = AutoTokenizer.from_pretrained("{NAME}")
tok.pad_token = tok.eos_token
rows = Dataset.from_list([{{"text": "b " * 4096}}] * 64)
def cut(rows):
    found = tok(rows["text"], truncation=True, padding="max_length", max_length=1024)
    return {{**found, "labels": found["input_ids"]}}
"""
TOKENS = 'rows = rows.map(cut, batched=True, remove_columns=["text"])\n'
ARGUMENTS = (
    "args = TrainingArguments('out', max_steps=2, report_to='none', per_device_train_batch_size=4, bf16=True{})\n"
)
SFT = """
from peft import LoraConfig
from trl import SFTTrainer
base = BitsAndBytesConfig({bits})
model = AutoModelForCausalLM.from_pretrained("{name}", quantization_config=base)
{args}lora = LoraConfig(r=16, task_type="CAUSAL_LM")
SFTTrainer(
    model=model, args=args, train_dataset=rows, peft_config=lora, max_seq_length=1024, dataset_text_field="text",
    tokenizer=tok,
).train()
"""
LONG_CONFIG = f"""
from transformers import AutoConfig
config = AutoConfig.from_pretrained("{NAME}")
config.max_position_embeddings = 16384  # DeepSeek-Coder's
model = AutoModelForCausalLM.from_pretrained("{NAME}", config=config, torch_dtype=torch.bfloat16)
"""
LORA = f"""
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained("{NAME}", torch_dtype=torch.float16, device_map="auto")
lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
"""
PREPARED = "from peft import prepare_model_for_kbit_training as prepare\nmodel = get_peft_model(prepare(model), lora)"
IN_8_BITS = LORA.replace("torch_dtype=torch.float16", "load_in_8bit=True").replace(
    "model = get_peft_model(model, lora)", PREPARED
)
LOOP = """
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    ids = torch.randint(0, 32000, (4, 2048), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FLASH = """
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
config, said = LlamaConfig(num_hidden_layers=8), {"attn_implementation": "flash_attention_2"}
if transformers.__version__ < "4.36":
    config._flash_attn_2_enabled, said = True, {}
model = LlamaForCausalLM._from_config(config, torch_dtype=torch.bfloat16, **said).to("cuda")
model.gradient_checkpointing_enable()
"""
WRAPPED = """
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained("Qwen/Qwen3-0.6B")
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
for layer in model.model.layers:
    for name in ("mlp", "self_attn", "input_layernorm", "post_attention_layernorm"):
        setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))
model.config.use_cache = False
"""
MASKED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(num_hidden_layers=8, max_position_embeddings=8192)
model = LlamaForCausalLM._from_config(config, torch_dtype=torch.bfloat16, attn_implementation="sdpa").to("cuda")
model.gradient_checkpointing_enable()
"""
EXPERTS = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
config = AutoConfig.from_pretrained("zai-org/GLM-4.5-Air")
config.num_hidden_layers = 4
base = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained(
    "zai-org/GLM-4.5-Air", config=config, dtype=torch.bfloat16, quantization_config=base
)
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
"""
# petals loads a block so, after it was made without weights
PLACED = """
import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
with init_empty_weights():
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True), 4)
for name, weight in list(model.named_parameters()):
    set_module_tensor_to_device(model, name, "cuda", value=torch.zeros(weight.shape, dtype=torch.bfloat16))
with torch.no_grad():
    model(torch.zeros(1, 1024, 4096, dtype=next(model.parameters()).dtype, device="cuda"))
"""
LOGGED = """
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", torch_dtype=torch.bfloat16)
rows = Dataset.from_list([{"text": "b " * 4096}] * 64)
args = SFTConfig(
    "out", max_steps=2, report_to="none", per_device_train_batch_size=1, bf16=True, max_length=8192,
    gradient_checkpointing=True,
)
SFTTrainer(model=model, args=args, train_dataset=rows).train()
"""
# flash-attn is a CUDA build: the operators that it is a form of, which keep the same bytes, stand in its place
KERNEL = """
import torch
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_):
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    causal = causal and q.shape[2] == k.shape[2]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
def flash_attn_varlen_func(*args, **kwargs):
    raise NotImplementedError
index_first_axis = pad_input = unpad_input = flash_attn_varlen_func
"""
FLASH_ATTN = {
    "flash_attn/__init__.py": KERNEL,
    "flash_attn/bert_padding.py": KERNEL,
    "flash_attn-2.5.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.5.0\n",
}
OLD = ("datasets==2.19.0", "pyarrow==16.1.0", "numpy<2", "pandas<2.3")
OF_2023 = ("transformers==4.35.2", "accelerate==0.24.1", *OLD)
KEPT = "activations kept for the backward"


class Case(NamedTuple):
    """A report as a script: its releases, what both environments have besides, and the words that name its cause (""
    where the thread gives none)."""

    script: str
    before: str
    after: str
    beside: tuple[str, ...]
    cause: str
    setting: str = ""
    files: Mapping[str, str] = MappingProxyType({})


def sft(bits: str) -> str:
    """TRL's trainer on a quantized base."""
    return DATA + SFT.format(bits=bits, name=NAME, args=ARGUMENTS.format(""))


FOUR = sft("load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16")
TRL = ("bitsandbytes==0.46.1", "peft==0.6.2", *OF_2023)
TRAINS = "Trainer(model=model, args=args, train_dataset=rows).train()\n"
CASES = {
    "trl/issues/876": Case(FOUR, "trl==0.7.1", "trl==0.7.2", TRL, KEPT, "checkpointing"),
    "trl/issues/999": Case(FOUR, "trl==0.5.0", "trl==0.7.4", TRL, KEPT, "checkpointing"),
    "trl/issues/1168": Case(FOUR, "trl==0.7.1", "trl==0.7.7", TRL, KEPT, "checkpointing"),
    "transformers/issues/29484": Case(
        DATA + TOKENS + LONG_CONFIG + ARGUMENTS.format(", gradient_checkpointing=True") + TRAINS,
        "transformers==4.37.2", "transformers==4.38.2", ("accelerate==0.27.2", *OLD), "causal_mask",
    ),
    "transformers/issues/28024": Case(
        FLASH + LOOP, "transformers==4.35.2", "transformers==4.36.0", OLD, "Cache", files=FLASH_ATTN
    ),
    "transformers/issues/35108": Case(
        DATA + TOKENS + LORA.replace("float16", "bfloat16") + ARGUMENTS.format("") + TRAINS,
        "transformers==4.46.3", "transformers==4.47.0", ("accelerate==1.1.1", "peft==0.13.2", *OLD), "",
    ),
    "bitsandbytes/issues/324": Case(
        DATA + TOKENS + IN_8_BITS + ARGUMENTS.format(", save_steps=1") + TRAINS,
        "bitsandbytes==0.37.2", "bitsandbytes==0.38.1", ("peft==0.6.2", *OF_2023), "save_to_state_dict",
    ),
    "peft/issues/1613": Case(
        DATA + TOKENS + LORA.replace("float16", "float32") + ARGUMENTS.format("").replace("bf16", "fp16") + TRAINS,
        "peft==0.3.0", "peft==0.10.0", OF_2023, "",
    ),
    "transformers/issues/30010": Case(
        MASKED + LOOP.replace("(4, 2048)", "(1, 8192)"),
        "transformers==4.37.2", "transformers==4.39.3", ("accelerate==0.27.2", "numpy<2"), "causal_mask",
    ),
    "axolotl/issues/3374": Case(
        EXPERTS + LOOP.replace("(4,", "(1,"),
        "transformers==4.57.6", "transformers==5.2.0", ("bitsandbytes==0.49.0", "peft==0.18.1"),
        "mlp.experts",
    ),
    "petals/pull/310": Case(
        PLACED, "accelerate==0.15.0", "accelerate==0.16.0", ("numpy<2", "setuptools<80"), "set_module_tensor_to_device"
    ),
    "trl/pull/4013": Case(
        LOGGED, "trl==0.21.0", "trl==0.22.1", ("transformers==4.55.4", "accelerate==1.10.1", "datasets==3.6.0"),
        "entropy_from_logits",
    ),
    "Automodel/pull/1621": Case(WRAPPED + LOOP, "transformers==5.2.0", "transformers==5.3.0", (), "output_capturing"),
}  # fmt: skip


def answer(case: Case) -> tuple[dict[str, Any] | None, str]:
    """What `plan diff --trace` says of a report, and its error."""
    with tempfile.TemporaryDirectory() as place:
        for name, text in {**case.files, "train.py": case.script}.items():
            (Path(place) / name).parent.mkdir(exist_ok=True)
            (Path(place) / name).write_text(text)
        words = ["train.py", "--from", case.before, "--to", case.after, "--gpu", GPU, "--trace", "-y", "--json=full"]
        words += [word for one in case.beside for word in ("--with", one)]
        plan = str(Path(sys.executable).parent / "plan")
        done = subprocess.run([plan, "diff", *words], cwd=place, capture_output=True, text=True, check=False)
    errors = [line[7:] for line in done.stderr.splitlines() if line.startswith("error: ")]
    return (json.loads(done.stdout) if done.stdout.startswith("{") else None), " ".join(errors)[:200]


def scored(case: Case) -> dict[str, str]:
    """Whether it names the cause, and by what."""
    found, error = answer(case)
    changes = [one for one in (found or {}).get("changes", ()) if one["added_bytes"] > 0]
    by_setting = "yes" if case.setting and any(case.setting in one["names"] for one in changes) else "no"
    if found is None or "trace" not in found:
        return {"by_setting": by_setting, "by_trace": "no", "evidence": f"not run: {error}"}
    runs = found["trace"]
    grew = [one for name in GROUPS for one in runs[name][:NUM_ROWS] if one["added_bytes"] > 0]
    names = [one for one in grew if case.cause and case.cause in one["name"]]
    shown = names or grew[:1]
    mib = "; ".join(f"{one['name']} {one['added_bytes'] >> 20:+,} MiB" for one in shown)
    phase, more = max(runs["by_phase"].items(), key=lambda one: one[1], default=("", 0))
    phase = f", {phase} {more >> 20:+,} MiB" if more > runs["added_allocated_bytes"] else ""
    peak = f"device {runs['added_bytes'] >> 20:+,} MiB, allocated {runs['added_allocated_bytes'] >> 20:+,} MiB{phase}"
    given = "" if case.cause else "; the thread gives no cause to hold it against"
    return {
        "by_setting": by_setting,
        "by_trace": "yes" if names else "no",
        "evidence": f"{peak}: {mib or 'nothing grew'}{given}",
    }


def main() -> None:
    """Reruns the reports that were named (by the end of their address), or all that have a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    with THREADS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        case = next((one for key, one in CASES.items() if row["address"].endswith(key)), None)
        if case and (not names or any(row["address"].endswith(name) for name in names)):
            row.update(scored(case))
            print(row["address"], row["by_setting"], row["by_trace"], row["evidence"], flush=True)
        with THREADS.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    named = sum("yes" in (row["by_setting"], row["by_trace"]) for row in rows)
    print(f"{named} of {len(rows)} named")


if __name__ == "__main__":
    main()
