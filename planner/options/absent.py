"""What a person may ask for by name and no plan has: why, and what there is instead.

docs/kernels.md, "Parts that are no choice", has the sources. To add one, add its row; once it is planned, take it out.
"""

import re
from collections.abc import Mapping

_FP8 = (
    "fp8 keeps the weights in 16 bits and gains about 10 % in full fine-tuning over FSDP2 at best, loses with "
    "checkpointing or small matrices, and has no backward for LoRA on a stored fp8 base"
)
_FP4 = (
    "transformers trains such a base only unpacked to 16 bits; Axolotl's SonicMoE and ScatterMoE kernels train LoRA "
    "beside packed experts (published: Qwen3-30B-A3B in NVFP4, 2,048 tokens in 31 GiB); nothing here predicts that step"
)
_OTHER_UPDATE = "changes what is optimized: its memory and its learning rates are not AdamW's, and no run was compared"
_EIGHT_BIT = "adamw-8bit or paged-adamw-8bit"
_NF4 = "nf4-double, or int8"

_ROWS: Mapping[str, tuple[str, str]] = {
    "fp8 float8 fp8-mixed mxfp8 te transformer-engine": (_FP8, "bf16-autocast or bf16-mixed; for a base, nf4"),
    "nvfp4 mxfp4 fp4": (_FP4, _NF4),
    "gptq awq hqq aqlm": ("its base was quantized beforehand and is not read here", _NF4),
    "muon shampoo soap sophia came prodigy schedule-free": (f"it {_OTHER_UPDATE}", "adamw-fused"),
    "galore apollo q-galore": (f"it {_OTHER_UPDATE}", f"{_EIGHT_BIT}, or --method lora"),
    "lomo adalomo": (
        "it steps inside the backward and so has neither accumulation nor gradient clipping, which every plan has",
        f"{_EIGHT_BIT}, or --method lora",
    ),
    "optimizer-in-backward torchtune-in-bwd": (
        "nothing accumulates or is clipped with it; `plan check` reads and predicts torchtune's optimizer_in_bwd",
        f"{_EIGHT_BIT}, or --method lora",
    ),
    "adamw-torchao-8bit adamw-torchao-4bit torchao-adamw-8bit ao-adamw-8bit": (
        "it steps through torch.compile, which nothing here runs; its 8-bit states take the bytes of adamw-8bit's; of "
        "16-bit DTensors it fails (torchao 0.18, PyTorch 2.13: pytorch/ao pull 4216), and on a CPU it takes 30 "
        "times as long as fused AdamW",
        _EIGHT_BIT,
    ),
    "scattermoe sonicmoe split-lora megablocks fused-moe": (
        "nothing here predicts its experts' step, of which memory alone was published",
        "liger, or fused where the tool has it; --quantize-experts holds the experts in 4 bits",
    ),
    "cce cut-cross-entropy": ("it holds no logits, as Liger's fused loss, and as that it is read", "liger"),
    "nvme": (
        "DeepSpeed's offload to a drive takes the drive's time, which nothing here predicts",
        "parameters, with --host-memory",
    ),
    "fp16-pure": ("nothing scales the gradients of fp16 adapters; `plan check` reads it", "fp16-autocast"),
    "tiled-mlp alst": ("nothing here predicts an MLP cut into pieces of the sequence", "--context-degree"),
    "fa3 flash-attention-3 flash-attn-3": (
        "it is as fast as cuDNN's kernel on Hopper, which sdpa takes by itself without a package, and needs Hopper",
        "sdpa",
    ),
    "fa4 flash-attention-4 flash-attn-4": ("no comparison of its training with sdpa's was found", "sdpa"),
    "flex": ("it is called flex-attention here, for models with attention sinks", "flex-attention, or sdpa"),
    "megatron megatron-lm megatron-bridge megatron-swift nemo nemo-automodel": (
        "it keeps weights, optimizer and pipeline in forms of its own: nothing here predicts its step or writes its "
        "files",
        "--target trl with --parallel fsdp2, --tensor-degree, --pipeline-degree or --expert-degree",
    ),
    "torchtune litgpt ms-swift swift": (
        "no file is written for it; `plan check` reads and predicts its own",
        "--target trl, hf, axolotl or llamafactory",
    ),
    "verl openrlhf nemo-rl slime areal prime-rl sglang": (
        "it runs generation and training as one program of its own (Ray, vLLM or SGLang): nothing here predicts its "
        "step",
        "--target trl with --objective grpo",
    ),
    "async-grpo async-rl": (
        "TRL's experimental AsyncGRPOTrainer trains while a vLLM server on other cards generates: how often one "
        "waits for the other is not predicted",
        "--objective grpo, with --generator vllm-server",
    ),
    "wsd warmup-stable-decay cooldown": (
        "a schedule of the learning rate changes neither memory nor speed, and the files have one for every length",
        "lr_scheduler_type: warmup_stable_decay with lr_scheduler_kwargs: {num_decay_steps: N} in the file "
        "(transformers', so TRL's, Axolotl's and LLaMA-Factory's)",
    ),
    "linear-probing linear-probe head-only": (
        "frozen layers can be run once and their outputs kept: training the head is then no job of a GPU's size",
        "--method lora with --trained-layers 1",
    ),
    "padding-free flattening": (
        "packed rows are padding-free, and each as long as the other, so that the peak is known",
        "--packing",
    ),
    "kda chunk-kda kimi-delta-attention": (
        "no run of flash-linear-attention's chunk_kda was compared: counted as transformers' loop",
        "--linear-attention torch",
    ),
    "distillation gkd kd minillm": (
        "nothing here predicts a teacher beside the student",
        "--objective sft on what the teacher wrote",
    ),
    "houlsby bottleneck pfeiffer adapters": (
        "peft has no such adapter: it is the adapters library's, whose trainer nothing here predicts",
        "lora",
    ),
    "simpo cpo": (
        "TRL's experimental CPOTrainer is not predicted here; as ORPO's, its loss asks no reference model",
        "--objective orpo",
    ),
    "ipo mpo apo": ("it is DPO's step under another loss_type, of the same memory and speed", "--objective dpo"),
    "gspo dapo dr-grpo bnpo cispo sapo": (
        "it is GRPO's step with another loss_type or importance_sampling_level, of the same memory and speed",
        "--objective grpo",
    ),
    "online-dpo xpo nash-md": (
        "nothing here predicts a reward model that judges pairs in the step",
        "--objective grpo",
    ),
    "prm process-reward": (
        "TRL's experimental PRMTrainer scores steps of an answer: not predicted",
        "--objective reward",
    ),
    "ppo": ("nothing here predicts a value model beside the policy", "--objective grpo"),
}
ABSENT = {name: row for names, row in _ROWS.items() for name in names.split()}
"""Name -> (why it is no choice, what to use)."""


def absent(name: object) -> tuple[str, str] | None:
    """The row of a name as people write it, None where there is none."""
    return ABSENT.get(re.sub("[ _]", "-", str(name).strip().lower()))


def known_unplanned(option: str, value: object) -> tuple[str, str] | None:
    """(problem, hint) for a value of an option that is known and no choice; None for any other."""
    row = absent(value)
    return (f"{option} {value} is not planned: {row[0]}", f"use {row[1]}") if row is not None else None
