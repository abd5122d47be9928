"""Checkpoints that are published quantized: how a trainer loads them so that they train as planned."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.core.shipped import model_types
from planner.models.spec import LayerSpec, ModelSpec
from planner.setup import TrainSetup

DEQUANTIZING = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""`quant_method` of a config.json -> transformers' class that loads such weights in 16 bits with `dequantize=True`.

MXFP4 weights do not train (quantizer_mxfp4.py `is_trainable`); FP8 ones would, in another memory than is planned. With
any other configuration handed to `from_pretrained` transformers refuses: a checkpoint is never quantized twice.

Source: transformers 5.23 `quantizers/auto.py` merge_quantization_configs, `utils/quantization_config.py`.
"""

PLAIN_COPIES = {"openai/gpt-oss-20b": "unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-120b": "unsloth/gpt-oss-120b-BF16"}
"""Published model -> the same weights unpacked to 16 bits, which can be quantized to be trained.

Source: huggingface.co/unsloth, github.com/unslothai/unsloth/issues/3351 ("a dequantized version of the model").
"""

PUBLISHERS = ("unsloth", "nousresearch")
"""Of copies whose names say in which type they are stored."""


def plain_copy(model: ModelSpec) -> ModelSpec | None:
    """The 16-bit copy of a model that is published in a type that is not quantized again; None where none is known."""
    copy = PLAIN_COPIES.get(model.model_id) if dequantizing_class(model) else None
    if copy is None:
        return None
    config = {key: value for key, value in model.config.items() if key != "quantization_config"}
    return replace(model, model_id=copy, config=config)


def _stored(model: ModelSpec | None) -> Mapping[str, Any] | None:
    stored = model.config.get("quantization_config") if model is not None else None
    return stored if isinstance(stored, Mapping) else None


def stored_method(model: ModelSpec | None) -> str:
    """How the published weights are quantized: `quant_method` of the config.json, "" where they are plain."""
    stored = _stored(model)
    return "" if stored is None else str(stored.get("quant_method", "method unknown"))[:40]


def dequantizing_class(model: ModelSpec | None) -> str:
    """transformers' class that loads the published weights in 16 bits, "" where nothing has to be said."""
    return DEQUANTIZING.get(stored_method(model), "")


def stored_bits(model: ModelSpec | None) -> str:
    """Our name for what bitsandbytes published a checkpoint in: "nf4-double", "nf4" or "int8"; "" for anything else."""
    return _bits(_stored(model) or {})


def _bits(stored: Mapping[str, object]) -> str:
    if stored.get("quant_method", "bitsandbytes") != "bitsandbytes":
        return ""
    if stored.get("load_in_8bit") or stored.get("_load_in_8bit"):
        return "int8"
    if not (stored.get("load_in_4bit") or stored.get("_load_in_4bit")) or stored.get("bnb_4bit_quant_type") == "fp4":
        return ""
    return "nf4-double" if stored.get("bnb_4bit_use_double_quant") else "nf4"


def packed_refusal(model: ModelSpec) -> str:
    """Why no launch file trains a checkpoint, "" where one does: stored in a form that is neither bitsandbytes' nor
    unpacked at loading, it loads in another memory than is planned, by a package that no file installs."""
    method = stored_method(model)
    if not method or stored_bits(model) or dequantizing_class(model):
        return ""
    return f"{model.model_id} is stored in {method}, as which it would load: name the original model, in 16 bits"


PACKED = ("awq", "gptq", "auto-round", "autoround")
"""`quant_method` of checkpoints that transformers loads packed, and peft trains adapters on."""


def packed_as(model: ModelSpec | None) -> str:
    """Our quantization that takes about as much as a packed checkpoint (AWQ's and GPTQ's 4 bits, with a scale of 16 and
    a zero of 4 bits for 128 weights; "int8" of 8 bits); "" of any other.

    Source: transformers 5.23 `quantizers/auto.py`, peft 0.21 `tuners/lora/awq.py` and `gptq.py`.
    """
    stored = _stored(model)
    if stored is None or stored_method(model) not in PACKED:
        return ""
    return {4: "nf4-double", 8: "int8"}.get(stored.get("bits", stored.get("w_bit", 4)), "")


MAX_KEPT = 5000


def kept_names(config: Mapping[str, object]) -> tuple[str, ...]:
    """The modules that a checkpoint published by bitsandbytes keeps in 16 bits ("dynamic" 4-bit checkpoints name some
    hundred); none for any other checkpoint."""
    stored = config.get("quantization_config")
    names = stored.get("llm_int8_skip_modules") if isinstance(stored, Mapping) and _bits(stored) else None
    return tuple(name for name in names[:MAX_KEPT] if isinstance(name, str) and name) if isinstance(names, list) else ()


def is_kept(module: str, names: tuple[str, ...]) -> bool:
    """Whether one of these names stands for a module: the module itself, what it lies in, or how its name ends.

    transformers also takes a name as a regular expression, which nobody publishes and no stranger's file is trusted
    with.

    Source: transformers 5.23 `should_convert_module`.
    """
    return any(module == name or module.startswith(f"{name}.") or module.endswith(name) for name in names)


def with_kept(model: ModelSpec) -> ModelSpec:
    """The inventory with the matrices marked that the published checkpoint keeps in 16 bits."""
    names = kept_names(model.config)
    if not names:
        return model
    kinds: dict[LayerSpec, int] = {}
    order = tuple(
        kinds.setdefault(_marked(model.layer_kinds[kind], index, names), len(kinds))
        for index, kind in enumerate(model.layer_order)
    )
    idle = tuple((_marked(layer, 0, names), num) for layer, num in model.idle_layers)
    return replace(model, layer_kinds=tuple(kinds), layer_order=order, idle_layers=idle)


def _marked(layer: LayerSpec, index: int, names: tuple[str, ...]) -> LayerSpec:
    marks = [is_kept(f"{layer.path}.{index}.{linear.name}", names) for linear in layer.linears]
    marked = (replace(linear, kept=linear.kept or mark) for linear, mark in zip(layer.linears, marks, strict=True))
    return replace(layer, linears=tuple(marked))


def kept_fraction(model: ModelSpec) -> float:
    """Share of the matrices' elements that a checkpoint published quantized keeps in 16 bits."""
    linears = [(linear, num) for layer, num in model.layer_counts for linear in layer.linears]
    whole = sum(linear.num_weights * num for linear, num in linears)
    return sum(linear.num_weights * num for linear, num in linears if linear.kept) / whole if whole else 0.0


CLAMPS_WEIGHTS = model_types("clamps_weights")
"""Source: transformers 5.23 Gemma3nTextAltUp.predict; the dry run ends there with bitsandbytes' layers."""


def quantizes(model: ModelSpec) -> bool:
    return any(linear.quantizes for layer in model.layer_kinds for linear in layer.linears)


def stored_refusal(setup: TrainSetup, model: ModelSpec | None) -> str:
    """Why a setup cannot train the published checkpoint, "" where it can."""
    if model is None:
        return ""
    if setup.quantized and model.model_type in CLAMPS_WEIGHTS:
        return f"{model.model_type} clamps weights in place while it trains (AltUp), which packed ones cannot be"
    if setup.quantized and not setup.trainer.own_models and not quantizes(model):
        return f"transformers quantizes no matrix of {model.model_type}, whose layers are no plain nn.Linear: use lora"
    converted = setup.stack == "unsloth" and setup.quantize_experts
    if setup.quantized and dequantizing_class(model) and not converted:
        copy = PLAIN_COPIES.get(model.model_id, "")
        return (
            f"{model.model_id} is published in {stored_method(model)}, which bitsandbytes cannot quantize again: name "
            f"a 16-bit copy of it{copy and f' ({copy})'}"
        )
    bits = stored_bits(model)
    if bits and setup.quantization != bits:
        return f"{model.model_id} is published in {bits} by bitsandbytes and loads as that: name a 16-bit copy of it"
    return ""
