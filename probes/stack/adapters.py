"""LoRA through peft, with the adapter data type that the trainer would give it."""

import warnings
from typing import Any

import torch

from planner.models.adapters import spec_from_config
from planner.models.targets import Targets, peft_target_modules
from planner.setup import TrainSetup
from probes.stack.quantize import is_router

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def target_modules(config: Any, targets: Targets) -> str | list[str]:
    """PEFT's `target_modules` for transformers' configuration, at any depth: what the planner counts and writes.

    Sizes of single layers (`per_layer_config`, which keeps the layers that a truncated copy no longer has) say nothing
    about names.
    """
    if targets != "attention":  # words and names need no inventory
        return targets if isinstance(targets, str) else list(targets)
    raw = config.to_dict()
    raw.get("text_config", raw).pop("per_layer_config", None)
    return peft_target_modules(spec_from_config(raw, model_id=config.model_type, source="built model"), targets)


def _task(config: Any, setup: TrainSetup) -> str:
    """peft's kind of task; of a score's it trains the head beside the adapters."""
    if setup.aim.head == "score":
        return "SEQ_CLS"
    return "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"


def add_adapters(model: Any, setup: TrainSetup) -> Any:
    """`model` wrapped by peft, frozen base, adapters in `setup.resolved_adapter_dtype`.

    Source: peft 0.21 `get_peft_model`; TRL 1.16 `SFTTrainer.__init__` casts a quantized base's adapters to bf16.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=setup.lora_rank,
        lora_alpha=2 * setup.lora_rank,
        target_modules=target_modules(model.config, setup.lora_targets),
        lora_dropout=setup.lora_dropout,
        exclude_modules=sorted(name for name, one in model.named_modules() if is_router(one)) or None,
        bias="none",
        modules_to_save=list(setup.modules_to_save) or None,
        task_type=_task(model.config, setup),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, config)
    dtype = _DTYPES[setup.resolved_adapter_dtype]
    every = setup.quantized and setup.stack == "trl"  # TRL casts whatever is trained
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and parameter.dtype is not dtype and (every or "lora_" in name):
            parameter.data = parameter.data.to(dtype)
    return wrapped
