"""LoRA through peft, with the adapter data type that the trainer would give it."""

import warnings
from typing import Any

import torch

from planner.setup import TrainSetup
from probes.stack.quantize import is_router

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION_LEAVES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "dense", "c_attn",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "Wqkv", "q", "k", "v", "o",
    "in_proj_qkvz", "in_proj_qkv", "in_proj_z",
)  # fmt: skip
_ATTENTION_PARENTS = ("attn", "attention", "Attention")
_IDLE_TOWERS = ("vision", "visual", "audio")


def attention_targets(model: Any) -> list[str]:
    """Full names of the projections of the model's attention (or linear-attention) modules.

    A projection counts when its own name is one of the usual ones and a module around it is called an attention:
    GPT-NeoX's `dense` is adapted, the `dense_h_to_4h` of its MLP is not. Towers that see no text are left out. The
    same as `planner.models.targets` chooses from the specification (a test compares them).
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        if module is head or not isinstance(module, (torch.nn.Linear, Conv1D)):
            continue
        path, _, leaf = name.rpartition(".")
        inside = any(word in part for part in path.split(".") for word in _ATTENTION_PARENTS)
        idle = any(word in part for part in path.split(".") for word in _IDLE_TOWERS)
        if inside and not idle and (leaf in ATTENTION_LEAVES or leaf == "c_proj"):
            found.append(name)
    if not found:
        raise ValueError(f"{type(model).__name__}: no attention projections found to adapt")
    return found


def add_adapters(model: Any, setup: TrainSetup) -> Any:
    """`model` wrapped by peft, frozen base, adapters in `setup.resolved_adapter_dtype`.

    Source: peft 0.21 `get_peft_model`; TRL 1.16 `SFTTrainer.__init__` casts a quantized base's adapters to bf16.
    """
    from peft import LoraConfig, get_peft_model

    targets: Any = setup.lora_targets
    if targets == "attention":
        targets = attention_targets(model)
    elif not isinstance(targets, str):
        targets = list(targets)
    config = LoraConfig(
        r=setup.lora_rank,
        lora_alpha=2 * setup.lora_rank,
        target_modules=targets,
        lora_dropout=setup.lora_dropout,
        exclude_modules=sorted(name for name, one in model.named_modules() if is_router(one)) or None,
        bias="none",
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, config)
    dtype = _DTYPES[setup.resolved_adapter_dtype]
    for parameter in wrapped.parameters():
        if parameter.requires_grad and parameter.dtype is not dtype:
            parameter.data = parameter.data.to(dtype)
    return wrapped
