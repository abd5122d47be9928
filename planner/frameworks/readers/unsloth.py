"""Unsloth's own YAML (`unsloth train -c FILE`) as setups. Defaults of Unsloth 2026.10."""

import re
from typing import Any

from planner.frameworks.readers import common, versions
from planner.frameworks.readers.common import adapter_kind, config, settings_fields
from planner.frameworks.readers.sharding import parallel_of
from planner.frameworks.readers.types import LowerBound, ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.unsloth import UNSLOTH, converted, own_kernels
from planner.memory.attention_kernels import attention_refusal, default_attention
from planner.models.encoders import MODALITIES
from planner.models.targets import repeated_leaves
from planner.options.precisions import FP16_OVERFLOWS, precision_of
from planner.setup.allowed import FLEX

FORMAT = "unsloth"
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MARKS = {"training_type", "vision_all_linear", "finetune_vision_layers", "train_on_completions", "format_type"}
"""Settings that only Unsloth's files have."""


def is_config(values: dict[str, Any]) -> bool:
    """Whether a mapping has Unsloth's blocks and no others, or settings that only Unsloth has in one of them."""
    blocks = [values[title] for title in versions.blocks(FORMAT) if isinstance(values.get(title), dict)]
    marked = any(MARKS & set(block) for block in blocks)
    only = (
        {"training", "lora"} & set(values)
        and set(values) <= {"model", *versions.blocks(FORMAT)}
        and len(blocks) == len(values) - 1
    )
    return bool(blocks) and (marked or (bool(only) and isinstance(values.get("model"), str)))


def read(settings: Settings) -> ReadConfig:
    top = settings
    top.note_unknown(("model", *versions.blocks(FORMAT)), UNSLOTH)
    parts = {section: top.block(section) for section in versions.blocks(FORMAT)}
    for section, accepted in versions.blocks(FORMAT).items():
        parts[section].note_unknown(accepted, UNSLOTH)
    training, lora = parts["training"], parts["lora"]
    fields, conversion = converted(_method(training, lora), training.model)
    if conversion:
        training.assume(conversion)
    word = training.raw("gradient_checkpointing", "unsloth")
    unsloths = isinstance(word, str) and word.strip().lower() == "unsloth"
    fields |= {
        "optimizer": "adamw-8bit",
        "attention": attention(training),
        "loss": "chunked",
        # whether layers are recomputed, and their inputs lie in host memory (Unsloth's own form)
        "checkpointing": int(unsloths or (word != "none" and training.flag("gradient_checkpointing", True))),
        "activation_offload": unsloths,
        **settings_fields(training, UNSLOTH, "micro_batch_seqs", "accumulation_steps", "seq_len_tokens", "packing"),
    }
    fields = common.adapter(lora, fields, adapter_kind(lora, FORMAT))
    fields["kernels"] = own_kernels(fields, training.model)
    training.assume("Unsloth's config names no optimizer: its adamw_8bit")
    if unknown := [key for part in (top, *parts.values()) for key in part.unknown_keys]:
        top.assume(f"unsloth train does not start with settings that it does not know ({', '.join(unknown)[:200]})")
    fields |= parallel_of(top, {})
    data = parts["data"].raw("dataset")
    return config(UNSLOTH, top, fields, dataset=data if isinstance(data, str) else None)


def pattern(lora: Settings, names: tuple[str, ...], owner: str) -> str:
    """The expression by which Unsloth picks the matrices of a model of more than text; "" where names or all it is.

    Args:
        owner: Unsloth's class that puts the adapters on.

    Source: unsloth `models/vision.py`, `models/llama.py` get_peft_model; unsloth_zoo `peft_utils.py` get_peft_regex
    (November 2026). Not counted: Gemma's embedders of pictures, 0.1 % of the adapters.
    Measured: as many parameters as eight of ten published notebooks print; of Gemma 4's E2B and E4B 4 % fewer, of
    whose layers transformers 5.23 builds fewer keys and values (tests/planner/test_readers_program.py).
    """
    model, defaults = lora.model, {"vision_layers": owner != "FastLanguageModel"}
    if model is None or MODALITIES.isdisjoint(model.config) or names == ("all-linear",):
        return ""
    tags = {
        "vision_layers": "vision|image|visual|patch", "language_layers": "language|text",
        "attention_modules": "self_attn|attention|attn|mixer", "mlp_modules": "mlp|feed_forward|ffn|dense|mixer",
    }  # fmt: skip
    on = [of for of in tags if lora.flag(f"finetune_{of}", defaults.get(of, True))]
    if names and len(on) == len(tags):
        return ""
    layers, modules = ("|".join(tags[of] for of in on if of.endswith(kind)) for kind in ("layers", "modules"))
    if not (layers and modules):
        lora.refusals.append("Unsloth stops: no layers, or no modules of them, to finetune")
    leaves = "|".join(map(re.escape, names or repeated_leaves(model)))
    return rf".*?(?:{layers}).*?(?:{modules}).*?(?:{leaves})"


def attention(settings: Settings) -> str:
    """FlexAttention for sinks, where the card has its kernels.

    Source: unsloth_zoo 2026.10.9 `temporary_patches/gpt_oss.py` patch_GptOssAttention; unsloth `models/_utils.py`
    _flex_attention_gpu_is_supported.
    """
    gpu, model = settings.outside.gpu, settings.model
    flexible = model is not None and not attention_refusal(model, FLEX) and (gpu is None or gpu.flash_attention_2)
    return FLEX if flexible else default_attention(model)


def precision(settings: Settings, *, full: bool, weights: str, autocast: str | None = None, wide: bool = False) -> str:
    """The precision that Unsloth trains in: bf16 weights become fp16 on a card without bf16, and fp16 weights that are
    trained fp32; where fp16 overflows, it computes parts of a layer in fp32.

    Args:
        weights: the type that they are loaded in.
        autocast: the type that the trainer is told, if any.
        wide: `float32_mixed_precision`.

    Source: unsloth 2026.10.9 `models/vision.py` from_pretrained, post_patch_model; `models/rl.py` mixed_precision (fp32
    that was asked for has no autocast on a card without bf16); unsloth_zoo `training_utils.py`, `model_lists.py`.
    """
    half, model = settings.outside.half, settings.model
    loaded = half if weights == "bf16" else weights
    if loaded == "fp16" and model is not None and model.model_type in FP16_OVERFLOWS:
        parts = f"Unsloth computes parts of {model.model_type} in fp32 on a card without bf16"
        settings.approximate(LowerBound(f"{parts}: counted in fp16", "activations"))
        autocast, half = None, "fp32"
    if full and loaded == "bf16" and not wide:
        return "bf16-pure"
    if not full and loaded != "fp32":
        return f"{autocast or loaded}-autocast"
    autocast = autocast or (None if loaded == "fp32" and half == "fp16" else half)
    return precision_of("fp32", autocast if autocast != "fp32" else None)


def _method(training: Settings, lora: Settings) -> dict[str, Any]:
    if training.text("training_type", "lora").strip().lower() == "full":
        full = precision(training, full=True, weights="bf16")
        return {"method": "full", "quantization": "none", "precision": full, "lora_rank": 0}
    four = training.flag("load_in_4bit", True)
    names = lora.names("target_modules") or DEFAULT_TARGETS
    autocast = precision(training, full=False, weights="bf16")
    quantization = "nf4-double" if four else "none"
    return common.adapters(lora, UNSLOTH, quantization, names, precision=autocast, adapter_dtype="fp32")
