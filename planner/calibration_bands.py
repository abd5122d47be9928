"""Error bands of the rungs: fitted on comparisons, dated; docs/accuracy says on which."""

from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

USUAL_BAND = 0.04
"""One fused attention kernel, experts, linear or eager attention alike: 90th percentile against the dry run 1 to 3 %,
and about 1 % between dry run and card."""
SMALL_MODEL_BAND = 0.09
"""Below a billion parameters little tensors and rounding weigh more: 90th percentile 9 %."""
WIDE_BAND = 0.10
"""Dropouts, int8 with checkpointing, the math kernel's scores: formula and dry run differ most there."""
ENCODER_DECODER_BAND = 0.12
"""T5's position biases, dropouts and fp16 clamps: up to 9 % seen, at the first decoder layer on the math kernel."""
TREE_BAND = 0.16
"""Architectures without an adapter: their matrices are exact, what their layers keep is assumed to be as in others. The
worst of 45 points (nine types, five setups each) against the dry run (docs/accuracy/formula-vs-dry-run.md)."""
TREE_MIXTURE_BAND = 0.50
"""Mixtures among them: how the experts are called decides what they keep. The worst of 10 points, two types."""
SMALL_PARAMS = 1_000_000_000
SPREAD_BAND = 0.10
"""Added with several GPUs. Against the dry run of a rank the formula errs no more than on one GPU (DDP and FSDP2: 90th
percentile 2 %), but no card has confirmed it here: with one GPU's band it makes 14 %, the 90th percentile against 106
published configurations, nearly all of them FSDP 1 (docs/accuracy/multi-gpu.md, November 2026). ZeRO has the same band
and less behind it: -7 % of two published ZeRO-2 runs, the phases of a small model under DeepSpeed 0.19.8 on two CPU
ranks, and 253 setups in a model of its engine (worst 11 %; docs/accuracy/spread-formula-vs-dry-run.md)."""


def memory_band(model: ModelSpec, setup: TrainSetup) -> float:
    """Half-width of the formula's memory band for one setup, as a fraction: one GPU's, and SPREAD_BAND with several.

    Source: docs/accuracy/formula-vs-dry-run.md, 90th percentiles by kind of setup (November 2026).
    """
    return _one_gpu_band(model, setup) + (SPREAD_BAND if setup.num_gpus > 1 else 0.0)


def _one_gpu_band(model: ModelSpec, setup: TrainSetup) -> float:
    if model.is_encoder_decoder:
        return ENCODER_DECODER_BAND
    if model.from_tree:
        experts = any(layer.mlp is not None and layer.mlp.kind == "moe" for layer in model.layer_kinds)
        return TREE_MIXTURE_BAND if experts else TREE_BAND
    traits = traits_of(model)
    if setup.lora_dropout > 0 or traits.attention_dropout or traits.residual_dropout or setup.quantization == "int8":
        return WIDE_BAND
    if setup.attention == "sdpa" and setup.precision in ("fp32", "fp16-mixed", "fp16-autocast"):
        return WIDE_BAND  # older cards and fp32 may fall back to the math kernel
    return SMALL_MODEL_BAND if model.num_params < SMALL_PARAMS else USUAL_BAND
