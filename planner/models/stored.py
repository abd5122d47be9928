"""Checkpoints that are published quantized: how a trainer loads them so that they train as planned."""

from collections.abc import Mapping

from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

DEQUANTIZING = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""`quant_method` of a config.json -> transformers' class that loads such weights in 16 bits with `dequantize=True`.

MXFP4 weights do not train (quantizer_mxfp4.py `is_trainable`); FP8 ones would, in another memory than is planned. With
any other configuration handed to `from_pretrained` transformers refuses: a checkpoint is never quantized twice.

Source: transformers 5.23 `quantizers/auto.py` merge_quantization_configs, `utils/quantization_config.py`.
"""


def stored_method(model: ModelSpec | None) -> str:
    """How the published weights are quantized: `quant_method` of the config.json, "" where they are plain."""
    stored = model.config.get("quantization_config") if model is not None else None
    return str(stored.get("quant_method", "method unknown"))[:40] if isinstance(stored, Mapping) else ""


def dequantizing_class(model: ModelSpec | None) -> str:
    """transformers' class that loads the published weights in 16 bits, "" where nothing has to be said."""
    return DEQUANTIZING.get(stored_method(model), "")


def stored_refusal(setup: TrainSetup, model: ModelSpec | None) -> str:
    """Why a setup cannot train the published checkpoint, "" where it can."""
    if model is not None and setup.quantized and dequantizing_class(model):
        return (
            f"{model.model_id} is published in {stored_method(model)}, which bitsandbytes cannot quantize again: name "
            "a 16-bit copy of it"
        )
    return ""
