"""Loggetta's command (`loggetta train`): QLoRA of a mixture whose 4-bit experts lie in the host's memory, one layer's
at a time on the card, by experts4bit-qlora.

Read in loggetta 0.7.0 (`cli.py`, docs/TRAINING.md) and experts4bit-qlora 0.58.1 (`recipe.py` QLoRASetup). It decides
again on the machine whether the run fits, and says so before it loads weights.
"""

import shlex

from planner.frameworks.exporters import common, prepare
from planner.frameworks.exporters.text import shown_path
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.allowed import EXPERT_TARGETS

TARGET = "loggetta"
FILE = "loggetta/train.sh"
VALIDATED_WITH = {"loggetta": "0.7.0", "experts4bit-qlora": "0.58.1"}
TYPES = frozenset({"ernie4_5_moe", "granitemoe", "mixtral", "olmoe", "qwen3_moe"})
"""Whose attention is four matrices and whose experts are stacks: others are not read (hybrids need another packing)."""
OPTIMIZERS = {"adamw": "adamw", "adamw-8bit": "adamw_8bit"}


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    quantization = "nf4-double" if setup.quantization == "nf4" else setup.quantization
    runs = {
        "precision": ("bf16-pure", "Loggetta computes in bf16, without autocast"),
        "adapter_dtype": ("bf16", "its adapters are bf16"),
        "kbit_fp32_cast": (False, "it casts nothing to fp32"),
        "quantization": (quantization, "bitsandbytes' nested statistics for what is no expert"),
        "checkpointing": (1, "every layer is recomputed: its experts are fetched anew"),
        "selective_checkpointing": (False, "its checkpoints recompute whole layers"),
        "activation_offload": (False, "its checkpoints stay on the card"),
        "attention": ("sdpa", "transformers' default"),
        "loss": ("full", "cut into pieces by itself where logits reach 1 GiB"),
        "packing": (True, "it fills rows of the length asked for"),
        "compile": (False, "it compiles nothing"),
        "optimizer": ("adamw-8bit" if "8bit" in setup.optimizer else "adamw", "it steps with AdamW"),
    }
    return common.differing(setup, runs)


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if not setup.single_gpu:
        return "Loggetta trains on one GPU"
    if setup.method == "full" or setup.adapter != "lora" or setup.lora_dropout:
        return "Loggetta trains LoRA without dropout beside experts in 4 bits"
    if not setup.quantize_experts:
        return "Loggetta holds a mixture's experts in 4 bits: plan with --quantize-experts"
    if setup.quantization == "int8" or setup.compute_dtype != "bf16":
        return "Loggetta computes in bf16 beside a base of 4 bits"
    if setup.lora_targets not in ("attention", EXPERT_TARGETS):
        return f"Loggetta adapts attention, or attention and experts (--targets {EXPERT_TARGETS})"
    if setup.optimizer == "adamw-fused" or "adamw" not in setup.optimizer:
        return f"Loggetta has AdamW and its 8-bit form, no {setup.optimizer}"
    if model is not None and model.model_type not in TYPES:
        return f"{model.model_type} was not read in experts4bit-qlora"
    return common.model_refusal(setup, model, TARGET)


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    setup, hyper = request.setup, request.hyper
    steps = common.counted_steps(request)
    data = f"{prepare.folder(request, TARGET)}/train.jsonl"
    form = prepare.form(request, TARGET)
    choices = {
        "r": setup.lora_rank,
        "alpha": hyper.lora_alpha,
        "attn_4bit": setup.quantized,
        "train_experts": setup.lora_targets == EXPERT_TARGETS,
    }
    words = [
        f"loggetta train {shlex.quote(shown_path(request.model_id))}",
        f"--dataset {shlex.quote(data)} --format {'text' if form == 'text' else 'chat'}",
        f"--seq {setup.seq_len_tokens} --micro-batch {setup.micro_batch_seqs} --grad-accum {setup.accumulation_steps}",
        f"--steps {hyper.max_steps} --repeat-data" if hyper.max_steps else f"--epochs {hyper.num_epochs:g}",
        f"--optimizer {'adamw_8bit' if '8bit' in setup.optimizer else 'adamw'} --learning-rate {hyper.learning_rate:g}",
        f"--warmup-steps {round(hyper.warmup_fraction * steps)} --seed {hyper.seed} --experts host",
        *(f"--fix {name}={str(value).lower()}" for name, value in choices.items()),
        f"--out {shlex.quote(shown_path(request.output_dir))}",
    ]
    text = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + " \\\n    ".join(words) + "\n"
    notes = (
        "It needs Linux and an NVIDIA card from compute capability 8.0 on; the adapter is experts4bit-qlora's, no peft "
        "folder (loggetta.load_adapter).",
        "Its rate falls to a tenth, not to zero; it keeps no checkpoints on the way and evaluates nothing.",
    )
    main = LaunchFile(path=FILE, text=text, executable=True)
    return Draft(title="Loggetta", main=main, command=f"bash launch/{FILE}", notes=notes)
