"""Single changes to a setup that keep its effective batch: what is tried to make it fit, or faster."""

from collections.abc import Callable, Mapping
from functools import cache

from planner.core.errors import SetupError
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import missing_kernels, packs_apart, padded
from planner.memory.engines import why_not
from planner.models.spec import ModelSpec
from planner.options.kernels import LIGER_PARTS
from planner.options.losses import LOSSES
from planner.options.optimizers import OPTIMIZERS, PLANNED_OPTIMIZERS
from planner.options.stacks import STACKS
from planner.planning.space import PLANNED_CACHES
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction
from planner.setup.packages import CHUNKED_TYPES, DELTA

Predict = Callable[[TrainSetup], Prediction]

LEAST_RANK = 4
"""No change asks for adapters of a lower one."""
Tried = tuple[str, Mapping[str, object], bool]
"""(label, fields of the setup after it, whether the training changes)."""


def single_changes(
    setup: TrainSetup, gpu: GpuSpec, model: ModelSpec, *, reentrant: bool = False, samples_per_row: float = 0.0
) -> list[tuple[str, TrainSetup, bool]]:
    """(label, setup, whether training changes) of every change to one decision; the effective batch never changes.

    Args:
        reentrant: whether the versions that run it checkpoint in the older form unless they are told.
        samples_per_row: that a packed row holds, 0 where that is not known.
    """
    tried: list[Tried] = [
        *_checkpointings(setup, reentrant=reentrant or STACKS[setup.stack].reentrant_checkpointing),
        *_where(
            (
                setup.attention != "flash-attention-2" and gpu.flash_attention_2 and setup.compute_dtype != "fp32",
                ("flash attention 2", {"attention": "flash-attention-2"}, False),
            ),
            (setup.attention == "eager", ("SDPA attention", {"attention": "sdpa"}, False)),
        ),
        *_losses_and_kernels(setup, model),
        *(_packed(setup, samples_per_row) if packs_apart(model, setup.attention) else ()),
        *(
            (f"{name} optimizer", {"optimizer": name}, False)
            for name in PLANNED_OPTIMIZERS
            if OPTIMIZERS[setup.optimizer].adamw and name != setup.optimizer
        ),
        *_batches(setup),
        *(
            (f"{package} of today", {field: ""}, False)
            for field, package in (("trl_version", "TRL"), ("bitsandbytes_version", "bitsandbytes"))
            if getattr(setup, field)
        ),
        *_weights(setup, gpu),
        *(
            (f"adapters of rank {rank}", {"lora_rank": rank}, True)
            for rank in (setup.lora_rank // 2, setup.lora_rank // 4)
            if setup.method != "full" and setup.kind.size == "rank" and rank >= LEAST_RANK
        ),
        *(
            (f"sequences of {length} tokens", {"seq_len_tokens": length}, True)
            for length in (setup.seq_len_tokens // 2, setup.seq_len_tokens // 4)
            if length >= 128
        ),
        *_layouts(setup),
    ]
    if setup.wide_stacks and model.expert_stacks:
        tried.append((f"experts in {setup.quantization} too", {"quantize_experts": True}, True))
    changes: list[tuple[str, TrainSetup, bool]] = []
    for label, values, changes_training in tried:
        try:
            changed = setup.replace(**values)
        except SetupError:
            continue
        if missing_kernels(model, gpu, changed):
            continue
        if setup.num_gpus == 1 or not why_not(model, changed):
            changes.append((label, changed, changes_training))
    return changes


def _checkpointings(setup: TrainSetup, *, reentrant: bool) -> list[Tried]:
    # a trainer that is told to checkpoint takes its own form of it
    form = {} if setup.checkpointing else {"reentrant_checkpointing": reentrant}
    off = {"checkpointing": 0, "activation_offload": False, "reentrant_checkpointing": False}
    changes: list[Tried] = [
        ("checkpoint every layer", {"checkpointing": 1, **form}, False),
        ("no gradient checkpointing", {**off, "selective_checkpointing": False}, False),
        ("checkpoint every 2nd layer", {"checkpointing": 2, **form}, False),
    ]
    return [change for change in changes if change[1]["checkpointing"] != setup.checkpointing]


def _where(*rows: tuple[bool, Tried]) -> list[Tried]:
    """The changes whose condition holds."""
    return [change for holds, change in rows if holds]


def _losses_and_kernels(setup: TrainSetup, model: ModelSpec) -> list[Tried]:
    whole = LOSSES[setup.loss].whole_logits
    has_liger = model.model_type in LIGER_PARTS
    changes: list[Tried] = [
        (f"{loss} loss (no full logits)", {"loss": loss}, False)
        for loss, row in LOSSES.items()
        if whole
        and not row.whole_logits
        and not (loss == "liger" and has_liger)
        and setup.objective_spec.supervised  # the others have the loss of their trainer
    ]
    if setup.kernels == "eager" and has_liger:  # one switch in most tools, which takes the loss along
        label = "Liger kernels and loss (no full logits)" if whole else "Liger kernels"
        changes.append((label, {"kernels": "liger", "loss": "liger" if whole else setup.loss}, False))
    if setup.linear_attention == "torch" and model.model_type in CHUNKED_TYPES:
        changes.append((f"{DELTA}, installed", {"linear_attention": "fla"}, False))
    return changes


def _weights(setup: TrainSetup, gpu: GpuSpec) -> list[Tried]:
    mixed, full, double = setup.precision == "bf16-mixed", setup.method == "full", {"quantization": "nf4-double"}
    dtype = {} if setup.adapter_dtype == "auto" else {"adapter_dtype": "fp32"}
    return _where(
        # whose matrices keep their inputs past the form of today (bitsandbytes 0.50)
        (
            setup.quantization == "int8" and setup.checkpointing > 0 and not setup.reentrant_checkpointing,
            ("reentrant checkpointing", {"reentrant_checkpointing": True}, False),
        ),
        (setup.quantization == "int8", ("4-bit base", double, True)),
        (mixed and not full, ("bf16 weights", {"precision": "bf16-autocast"}, False)),
        (mixed and full, ("bf16 weights under autocast", {"precision": "bf16-autocast"}, True)),
        (setup.precision == "fp32" and gpu.bf16, ("bf16 autocast", {"precision": "bf16-mixed"}, True)),
        (setup.method == "lora", ("4-bit base (QLoRA)", {"method": "qlora", **double, **dtype}, True)),
        (setup.quantization == "nf4", ("double quantization", double, True)),
    )


def enough_alone(
    setup: TrainSetup, model: ModelSpec, gpu: GpuSpec, budget_bytes: int, predict: Predict
) -> tuple[str, ...]:
    """The single changes that make a setup fit which does not: those that leave the training as it is first, the
    fastest first."""
    enough, predict = [], cache(predict)  # each speed is over that of one setup
    for label, other, changes_training in single_changes(setup, gpu, model):
        after = predict(other)
        if after.peak_device_bytes <= budget_bytes:
            enough.append((changes_training, -speedup(model, setup, other, predict), label))
    return tuple(label for *_, label in sorted(enough))


def _layouts(setup: TrainSetup) -> list[Tried]:
    """Other ways of spreading the same job over its GPUs; none on one GPU, and none of a job that is split."""
    if setup.data_degree < 2 or setup.data_degree != setup.num_gpus:
        return []
    plain: dict[str, object] = {"shard_degree": 0, "reshard_after_forward": True, "sync_each_batch": True}
    plain |= {"offload": "none", "zero_buffers": None}
    labels = {"ddp": "DDP (no sharding)", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
    offloads, can = setup.offload != "none", setup.parallel in ("fsdp2", "zero3")
    cut = not setup.sync_each_batch and setup.accumulation_steps > 1
    return _where(
        (cut, ("sync_each_batch (gradients are cut after every micro-batch)", {"sync_each_batch": True}, False)),
        *((name != setup.parallel, (label, {**plain, "parallel": name}, False)) for name, label in labels.items()),
        (offloads, ("nothing in the host's memory", {"offload": "none"}, False)),
        (not offloads and can, ("weights and optimizer in the host's memory", {"offload": "parameters"}, False)),
    )


def _packed(setup: TrainSetup, samples_per_row: float) -> list[Tried]:
    """Rows of packed samples, one at once, of which a step learns from about as many."""
    if not samples_per_row or setup.packing or not setup.objective_spec.packs:
        return []
    rows = max(1, round(setup.micro_batch_seqs * setup.accumulation_steps / samples_per_row))
    label = f"packing: rows of some {samples_per_row:.0f} samples, {rows} a step"
    return [(label, {"packing": True, "micro_batch_seqs": 1, "accumulation_steps": rows}, True)]


def _batches(setup: TrainSetup) -> list[Tried]:
    """Other splits of the same effective batch, nearest first; where that is what trains, gradient caches."""
    if setup.objective_spec.whole_batch:
        sizes = [size for size in PLANNED_CACHES if size < (setup.cached_seqs or setup.micro_batch_seqs)]
        return [(f"a cached loss, {size} sequences at once", {"cached_seqs": size}, False) for size in sizes]
    if setup.trainer.steps_in_backward:
        return []
    now, total, changes = setup.micro_batch_seqs, setup.micro_batch_seqs * setup.accumulation_steps, list[Tried]()
    for micro in dict.fromkeys((1, now // 4, now // 2, 2 * now, 4 * now)):
        if micro >= 1 and micro != now and total % micro == 0:
            label = f"micro-batch {micro} x {total // micro} accumulation steps"
            changes.append((label, {"micro_batch_seqs": micro, "accumulation_steps": total // micro}, False))
    return changes


def speedup(model: ModelSpec, before: TrainSetup, after: TrainSetup, predict: Predict) -> float:
    """Tokens/s after over before (1.0 where unknown), of full micro-batches or of those whose samples differ in length,
    whichever gains less: nothing here says which the data make, unless `predict` is one of known samples."""
    full = before, after
    uneven = tuple(padded(model, setup) or setup for setup in full)
    speeds = [[predict(setup).tokens_per_s or 0.0 for setup in pair] for pair in dict.fromkeys((full, uneven))]
    return min(now / was if was and now else 1.0 for was, now in speeds)
