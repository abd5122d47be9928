"""Ratios between two measured configurations that differ in one thing: predicted against measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import exp, log
from typing import Any

from planner.speed.roofline.points import Point

Change = Callable[[Point], Any]


def _setup(point: Point, **changes: Any) -> Any:
    return replace(point.setup, **changes)


def _same_method(point: Point) -> Any:
    return _setup(
        point, method="lora", quantization="none", kbit_fp32_cast=False, precision="bf16-pure", adapter_dtype="auto"
    ) if point.setup.method != "full" else point.key  # fmt: skip


def _full_as_lora(point: Point) -> Any:
    if point.setup.method == "qlora":
        return point.key
    return _setup(
        point, method="full", lora_rank=0, lora_targets="all-linear", lora_dropout=0.0, precision="bf16-pure",
        adapter_dtype="auto",
    )  # fmt: skip


RATIOS: dict[str, tuple[Change, Change]] = {
    # name: (what both must share, what must differ)
    "micro-batch doubled": (
        lambda p: (_setup(p, micro_batch_seqs=1), p.conditions),
        lambda p: p.setup.micro_batch_seqs,
    ),
    "checkpointing on / off": (lambda p: (_setup(p, checkpointing=0), p.conditions), lambda p: p.setup.checkpointing),
    "QLoRA / LoRA": (lambda p: (_same_method(p), replace(p.conditions, fused_lora=False)), lambda p: p.setup.method),
    "QLoRA with / without fp32 cast": (
        lambda p: (_setup(p, kbit_fp32_cast=False) if p.setup.quantized else p.key, p.conditions),
        lambda p: p.setup.kbit_fp32_cast,
    ),
    "full / LoRA": (lambda p: (_full_as_lora(p), replace(p.conditions, fused_lora=False)), lambda p: p.setup.method),
    "sequence length": (
        lambda p: (p.group == "llm_foundry" or p.key, p.conditions, p.setup.checkpointing),
        lambda p: p.setup.seq_len_tokens,
    ),
    "flash / eager attention": (lambda p: (_setup(p, attention="sdpa"), p.conditions), lambda p: p.setup.attention),
    "fused kernels on / off": (
        lambda p: (p.setup, replace(p.conditions, fused_norm_rope=False, fused_loss=False, fused_lora=False)),
        lambda p: p.conditions.fused_norm_rope,
    ),
    "LoRA on all matrices / on attention": (
        lambda p: (_setup(p, lora_targets="attention") if p.setup.method != "full" else p.key, p.conditions),
        lambda p: p.setup.lora_targets == "all-linear",
    ),
    "torch.compile on / off": (lambda p: (_setup(p, compile=False), p.conditions), lambda p: p.setup.compile),
    "with / without optimizer step": (
        lambda p: (p.setup, replace(p.conditions, optimizer_part=1.0)),
        lambda p: p.conditions.optimizer_part,
    ),
}


def pairs(points: Sequence[Point], name: str) -> Iterator[tuple[Point, Point]]:
    """All pairs of one source, model and GPU that differ only as `name` says; doublings only where it says doubled."""
    share, differ = RATIOS[name]
    buckets: dict[Any, list[Point]] = {}
    for point in points:
        key = (point.group, point.labels["model"], point.gpu.key, share(point))
        buckets.setdefault(key, []).append(point)
    for bucket in buckets.values():
        for first, second in combinations(bucket, 2):
            if differ(first) == differ(second):
                continue
            if name == "micro-batch doubled" and max(differ(first), differ(second)) != 2 * min(
                differ(first), differ(second)
            ):
                continue
            yield first, second


def ratio_errors(points: Sequence[Point], predicted: Mapping[str, float], name: str) -> list[float]:
    """Absolute relative errors of the predicted ratio of every such pair."""
    errors = []
    for first, second in pairs([p for p in points if p.key in predicted], name):
        measured = log(first.tokens_per_s / second.tokens_per_s)
        errors.append(abs(exp(log(predicted[first.key] / predicted[second.key]) - measured) - 1.0))
    return errors
