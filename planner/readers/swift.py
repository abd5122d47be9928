"""ms-swift (`swift sft --model ... --tuner_type lora`, or the same keys as YAML) as setups. Defaults of ms-swift 4."""

import math
from typing import Any

from planner.errors import NotPlanned
from planner.models.spec import ModelSpec
from planner.readers import common, hf
from planner.readers.fields import adapter_kind, said
from planner.readers.sharding import Sharding, parallel_of, zero_stage
from planner.readers.types import Missing, ReadConfig
from planner.readers.values import Settings
from planner.tools.others import SWIFT

FORMAT = "ms-swift"
MODELS = {"model", "model_id_or_path", "model_type"}
OLD = ("sft_type", "model_id_or_path", "lora_dropout_p", "lora_target_modules")
"""Settings of ms-swift 2 (the older `swift sft`), which cuts at 2,048 tokens by itself and adapts attention alone.

Source: modelscope/ms-swift v2.6 `swift/llm/utils/argument.py`.
"""
MARKS = {"tuner_type", "train_type", "sft_type", "quant_bits", "rlhf_type", "vit_gradient_checkpointing"}
"""Settings that only ms-swift has."""
GLOBAL_BATCH = 16
"""Sequences per step where no accumulation is given.

Source: ms-swift@3602360a swift/trainers/arguments.py `__post_init__`; other defaults: swift/arguments/*.py there.
"""


def read(
    values: dict[str, Any], name: str, model: ModelSpec | None = None, *, sharding: Sharding | None = None
) -> ReadConfig:
    """The setup of an ms-swift run.

    Raises:
        ConfigError: another objective than supervised training, another tuner than LoRA or full.
    """
    settings = Settings(values, name)
    sharding = sharding or Sharding()
    if settings.has("rlhf_type"):
        raise NotPlanned(
            f"{name}: {settings.raw('rlhf_type')} (rlhf_type) is not planned", hint="supervised fine-tuning is"
        )
    task = settings.text("task_type", "causal_lm")
    if task != "causal_lm":
        raise NotPlanned(f"{name}: task_type {task} is not planned", hint="supervised fine-tuning is")
    old = any(settings.has(key) for key in OLD)
    tuner = settings.text(settings.first("sft_type", "tuner_type", "train_type"), "lora")
    if tuner not in ("lora", "full"):
        raise NotPlanned(f"{name}: tuner {tuner} is not planned", hint="lora and full are")
    missing: list[Missing] = []
    micro: int = said(settings, SWIFT, "micro_batch_seqs")["micro_batch_seqs"]
    steps = max(1, math.ceil(GLOBAL_BATCH / micro / sharding.num_gpus))
    if not settings.has("gradient_accumulation_steps"):
        settings.assume(f"gradient_accumulation_steps absent: {steps}, for {GLOBAL_BATCH} sequences a step")
    bits = settings.integer(settings.first("quant_bits", "quantization_bit"), 0)
    method = "full" if tuner == "full" else "qlora" if bits else "lora"
    if bits not in (0, 4, 8) or settings.text("quant_method", "bnb") != "bnb":
        settings.approximate(f"{settings.raw('quant_method', 'bnb')} with {bits} bits is counted as bitsandbytes'")
    double = settings.flag("bnb_4bit_use_double_quant", True)
    dtype = settings.first("torch_dtype", "dtype")
    weights = hf.weight_dtype(settings, dtype, "auto", model) if settings.raw(dtype) != "AUTO" else "bf16"
    fp16 = settings.flag("fp16", weights == "fp16")
    autocast = "fp16" if fp16 else "bf16" if settings.flag("bf16", weights == "bf16") else None
    uncut = str(settings.raw("max_length")) == "-1" if settings.has("max_length") else not old
    if uncut:
        said_so = "is -1" if settings.has("max_length") else "absent"
        reason = f"{name}: max_length {said_so}: ms-swift cuts at the model's own limit"
        missing.append(Missing(field="seq_len_tokens", reason=reason))
    fields: dict[str, Any] = {
        "method": method,
        "quantization": "none" if method != "qlora" else "int8" if bits == 8 else "nf4-double" if double else "nf4",
        "precision": common.precision(settings, weights, autocast, method),
        **(said(settings, SWIFT, "lora_rank", "lora_dropout") if method != "full" else {"lora_rank": 0}),
        "micro_batch_seqs": micro,
        "accumulation_steps": settings.integer("gradient_accumulation_steps", steps, at_least=1),
        "seq_len_tokens": 2048 if uncut else settings.integer("max_length", 2048, at_least=1),
        "packing": settings.flag("packing", False) or settings.flag("padding_free", False),
        "optimizer": common.optimizer(settings, "optim", "adamw_torch_fused"),
        "attention": _attention(settings, model),
        "checkpointing": hf.checkpointing(settings, True),
        **common.liger(settings, settings.flag("use_liger_kernel", False), "full", model),
    }
    fields["activation_offload"] = hf.offloads(settings, fields["checkpointing"])
    if method != "full":
        fields["lora_targets"] = common.targets(_targets(settings, old), model, settings)
        saved = settings.first("modules_to_save", "lora_modules_to_save")
        fields["modules_to_save"] = common.modules_to_save(settings, saved)
        fields = common.adapter(settings, fields, adapter_kind(settings, FORMAT), model)
    for key, sentence in (
        ("use_galore", "GaLore's projected optimizer states are counted as AdamW's"),
        ("freeze_parameters_ratio", "frozen parts of the model are counted as trained"),
    ):
        if settings.raw(key) not in (None, False, "false", "0", 0, []):
            settings.approximate(sentence)
    spread = zero_stage(settings, settings.raw("deepspeed"), sharding) if settings.has("deepspeed") else {}
    fields |= parallel_of(settings, spread, sharding.num_gpus)
    return ReadConfig(
        format=FORMAT,
        adapted_tables=settings.tables,
        path=name,
        model_id=settings.optional_text(settings.first("model", "model_id_or_path", "model_type")),
        setup=common.build(settings, fields),
        missing=tuple(missing),
        assumptions=tuple(settings.assumptions),
        approximations=tuple(settings.approximations),
        values=values,
    )


def _targets(settings: Settings, old: bool) -> tuple[str, ...]:
    names = settings.names(settings.first("target_modules", "lora_target_modules"))
    if names in ((), ("DEFAULT",), ("AUTO",)):
        return ("q_proj", "k_proj", "v_proj") if old else ("all-linear",)
    return ("all-linear",) if names == ("ALL",) else names


def _attention(settings: Settings, model: ModelSpec | None) -> str:
    word = {"flash_attn": "flash_attention_2", "flash_attention": "flash_attention_2"}
    value = settings.optional_text("attn_impl")
    if value is None and settings.has("use_flash_attn") and settings.raw("use_flash_attn") != "auto":
        value = "flash_attn" if settings.flag("use_flash_attn", False) else None
    named = {"attn": word.get(value, value)} if value else {}
    return common.attention(Settings(named, settings.name), "attn", model)
