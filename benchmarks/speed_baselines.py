"""Two simple predictors of tokens/s on the same splits: 6 N D over a constant MFU, and gradient-boosted regression."""

from collections.abc import Sequence
from math import exp, log
from statistics import median

from planner.speed.roofline.points import Point


def peak(point: Point) -> float:
    """Data-sheet rate for the setup's compute type."""
    gpu = point.gpu
    half = gpu.bf16_flops_per_s or gpu.fp16_flops_per_s or gpu.fp32_flops_per_s or 1.0
    return half if point.setup.compute_dtype != "fp32" else gpu.fp32_flops_per_s or half


def constant_mfu(train: Sequence[Point], holdout: Sequence[Point]) -> list[float]:
    """tokens/s = MFU x peak / (6 x active parameters), the MFU that fits the training points best (median)."""
    mfu = median(p.tokens_per_s * 6 * p.model.num_active_params / peak(p) for p in train)
    return [mfu * peak(p) / (6 * p.model.num_active_params) for p in holdout]


def features(point: Point) -> list[float]:
    """What a regression can know of a point: sizes, rates and switches."""
    setup, gpu, model, conditions = point.setup, point.gpu, point.model, point.conditions
    return [
        log(model.num_params), log(model.num_active_params), float(model.num_layers), float(model.hidden_size),
        log(model.vocab_size), log(peak(point)), log(gpu.memory_bandwidth_bytes_per_s), float(gpu.sm_count or 0),
        log(setup.micro_batch_seqs), log(setup.accumulation_steps), log(setup.seq_len_tokens),
        log(setup.tokens_per_micro_batch), float(setup.method == "full"), float(setup.method == "qlora"),
        float(setup.lora_rank), float(setup.lora_targets == "all-linear"), float(setup.checkpointing),
        float(setup.kbit_fp32_cast), float(setup.autocast_dtype is not None), float(setup.compute_dtype == "fp16"),
        float(setup.attention == "eager"), float(setup.attention == "flash-attention-2"), float(setup.loss == "liger"),
        float(setup.compile), float(conditions.fused_norm_rope), float(conditions.fused_lora),
        float(conditions.masked_attention), float(conditions.optimizer_part), float(point.labels["num_gpus"]),
    ]  # fmt: skip


def boosted_regression(train: Sequence[Point], holdout: Sequence[Point]) -> list[float]:
    """Gradient-boosted trees on log(tokens/s): scikit-learn's histogram form, default depth, 300 rounds."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    machine = HistGradientBoostingRegressor(max_iter=300, learning_rate=0.08, min_samples_leaf=5, random_state=0)
    machine.fit([features(p) for p in train], [log(p.tokens_per_s) for p in train])
    return [exp(value) for value in machine.predict([features(p) for p in holdout])]
