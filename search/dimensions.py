"""The dimensions of the search, as data: what may vary, how alike two values are, how far the formula may miss.

Every field of `TrainSetup` is either a dimension here or named in `FIXED` with the reason; a test checks it. A new
field on `TrainSetup` needs a row here and a distribution in `search.study.SPACE`: the sampler, the study and the
reports read this table.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from planner.setup import LATER_FIELDS, LAYOUT_FIELDS, TrainSetup

Kind = Literal["category", "log2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One field of `TrainSetup` that the search may vary.

    Attributes:
        name: field name.
        kind: "category" (values are alike or not) or "log2" (positive numbers; alike when their ratio is near 1).
        speed_sd, memory_sd: prior standard deviation of the formula's log error from one value of this field to
            another, beyond what misjudged parts explain. Judgement, dated November 2026: a kernel misjudged by 40 %
            that takes a seventh of the step is 6 %; a rank, 1 %. For memory the formula's ratio to recorded runs (fms,
            A100) stays within 1 % over precision, quantization and micro-batch. The overall scale is learned.
        attribution: how likely this field is what makes a setup fail to run (a missing kernel, a crash), relative to
        others.
        length: for "log2": over how many doublings an effect stays correlated.
        alike: for "category": correlation left, in the interaction part, between setups that differ in this field.
    """

    name: str
    kind: Kind
    speed_sd: float
    memory_sd: float
    length: float = 3.0
    alike: float = 0.5
    attribution: float = 1.0


DIMENSIONS: tuple[Dimension, ...] = (
    Dimension(name="method", kind="category", speed_sd=0.03, memory_sd=0.006, attribution=1),
    Dimension(name="precision", kind="category", speed_sd=0.03, memory_sd=0.005, attribution=2),
    Dimension(name="quantization", kind="category", speed_sd=0.03, memory_sd=0.006, attribution=5),
    Dimension(name="kbit_fp32_cast", kind="category", speed_sd=0.03, memory_sd=0.008, attribution=1),
    Dimension(name="lora_rank", kind="log2", speed_sd=0.01, memory_sd=0.002, length=4.0, attribution=0.1),
    Dimension(name="lora_targets", kind="category", speed_sd=0.02, memory_sd=0.004, attribution=0.5),
    Dimension(name="lora_dropout", kind="category", speed_sd=0.015, memory_sd=0.004, attribution=0.1),
    Dimension(name="adapter_dtype", kind="category", speed_sd=0.015, memory_sd=0.003, attribution=1),
    Dimension(name="optimizer", kind="category", speed_sd=0.015, memory_sd=0.006, alike=0.7, attribution=3),
    Dimension(name="attention", kind="category", speed_sd=0.05, memory_sd=0.012, attribution=10),
    Dimension(name="checkpointing", kind="category", speed_sd=0.03, memory_sd=0.008, attribution=0.5),
    Dimension(name="loss", kind="category", speed_sd=0.02, memory_sd=0.006, attribution=5),
    Dimension(name="micro_batch_seqs", kind="log2", speed_sd=0.04, memory_sd=0.006, length=2.0, attribution=0.1),
    Dimension(name="packing", kind="category", speed_sd=0.04, memory_sd=0.005, attribution=1),
    Dimension(name="compile", kind="category", speed_sd=0.04, memory_sd=0.006, attribution=10),
    Dimension(name="kernels", kind="category", speed_sd=0.05, memory_sd=0.008, attribution=10),
    Dimension(name="activation_offload", kind="category", speed_sd=0.05, memory_sd=0.008, attribution=2),
    Dimension(name="selective_checkpointing", kind="category", speed_sd=0.04, memory_sd=0.008, attribution=3),
    Dimension(name="num_gpus", kind="log2", speed_sd=0.05, memory_sd=0.01, attribution=2),
    Dimension(name="parallel", kind="category", speed_sd=0.06, memory_sd=0.02, attribution=5),
    Dimension(name="tensor_degree", kind="log2", speed_sd=0.06, memory_sd=0.02, attribution=5),
    Dimension(name="context_degree", kind="log2", speed_sd=0.06, memory_sd=0.02, attribution=5),
    Dimension(name="expert_degree", kind="log2", speed_sd=0.06, memory_sd=0.02, attribution=5),
    Dimension(name="pipeline_degree", kind="log2", speed_sd=0.06, memory_sd=0.02, attribution=5),
    Dimension(name="pipeline_schedule", kind="category", speed_sd=0.03, memory_sd=0.01, attribution=1),
    Dimension(name="shard_degree", kind="log2", speed_sd=0.04, memory_sd=0.01, attribution=1),
    Dimension(name="reshard_after_forward", kind="category", speed_sd=0.03, memory_sd=0.01, attribution=0.5),
    Dimension(name="offload", kind="category", speed_sd=0.06, memory_sd=0.02, attribution=3),
)

FIXED: dict[str, str] = {
    "accumulation_steps": "follows from the micro-batch: sequences per optimizer step are constant",
    "seq_len_tokens": "the user's: the length of the longest sequence",
    "quantize_experts": "planned where nothing else fits, for Axolotl alone: no probe here runs it",
    "modules_to_save": "the user's: what is trained whole beside the adapters",
    "trained_layers": "the user's: which layers train",
    "objective": "the user's: what the step trains for",
    "rollout": "the user's and the plan's: completions of a prompt, who generates them, how many at once",
    "images": "the user's: pictures of a sample",
    "frozen_encoder": "the user's: whether the half that hears trains",
    "precomputed_reference": "the user's: no reference in the steps",
    "hard_negatives": "the user's: texts beside each pair of a contrastive batch",
    "cached_seqs": "the plan's: sequences at once under a gradient cache",
    "linear_attention": "the plan's: flash-linear-attention wherever it runs",
    "uneven": "the data's: of what lengths samples are",
    "adapter": "the user's: a plan proposes LoRA",
    "stack": "the launch target's: whose code runs",
    "expandable_segments": "as every launch file sets it",
    "reentrant_checkpointing": "the stack's",
    **dict.fromkeys(
        ("transformers_version", "bitsandbytes_version", "trl_version"), "today's, which every launch file installs"
    ),
    "use_cache": "off, as every launch file sets it",
    "fsdp_version": "2, as every launch file sets it: 1 is what other people's runs may have",
    "zero_buffers": "as every launch file sizes them",
    "sync_each_batch": "on, as every launch file sets it: the Trainer by itself keeps whole gradients",
}

NAMES = tuple(dimension.name for dimension in DIMENSIONS)

PAIR = ("attention", "precision")
PAIR_SPEED_SD, PAIR_MEMORY_SD = 0.03, 0.02
"""Which kernel runs depends on both: SDPA falls back to its math kernel for some data types (torch 2.13).
Small, because a fallback is no smooth error but a surprise, which `attribution` explains."""

RECIPE = ("method", "quantization", "checkpointing")
"""Fields that decide which kernels run at all: the effect of another field may differ between two recipes. How a job is
spread decides what is sent, not what is computed."""


def value_of(setup: TrainSetup, name: str) -> Any:
    """A setup's value of one dimension as a plain, hashable value (module names joined by commas)."""
    value = getattr(setup, name)
    return ",".join(value) if isinstance(value, tuple) else value


@lru_cache(maxsize=1 << 15)
def key_of(setup: TrainSetup) -> str:
    """A stable text key of one setup: all its fields, in order. Equal setups have equal keys.

    Fields that only several GPUs have, and later ones, are left out at their defaults: old studies keep their keys.
    """
    seldom = (*LAYOUT_FIELDS, *LATER_FIELDS)
    names = (*(name for name in (*NAMES, *FIXED) if name not in seldom), *setup.seldom)
    return "|".join(f"{name}={value_of(setup, name)}" for name in names)
