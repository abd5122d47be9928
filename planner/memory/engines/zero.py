"""DeepSpeed's ZeRO: what a rank holds under stages 1 to 3, with and without offloading."""

from dataclasses import replace
from typing import final

from planner.core.shipped import model_types
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.engines.base import Engine
from planner.memory.engines.gather import adapted, gathered_groups, scales_bytes
from planner.memory.rank_part import RankPart
from planner.memory.states import (
    BACKWARD,
    COMPUTE,
    REFERENCE,
    Allocation,
    RankState,
    gradient_allocation,
    halves_stay_apart,
    part_trained,
    rank_state,
    weight_allocation,
    weight_bytes,
    whole_gradients,
    whole_weights,
)
from planner.memory.trained import Trained
from planner.models.spec import ModelSpec
from planner.options.optimizers import OPTIMIZERS
from planner.options.zero_buffers import ZeroBuffers
from planner.setup import TrainSetup

ZERO3_LEAVES = model_types("zero3_leaves")
"""Model types whose expert blocks are gathered, and whose gradients wait, as one. Source: DeepSpeed's
`runtime/zero/leaf_module_config.py`."""
NORM_CHUNK_ELEMENTS = 250_000_000
"""Elements of which ZeRO-3 takes a norm at once. Source: DeepSpeed 0.19 `stage3.py` `_constant_buffered_norm2`."""


def own_buffers(num_trained: int) -> ZeroBuffers:
    """DeepSpeed's buffers as a plan assumes them and its launch files write them.

    The reduce bucket is allocated whole whatever is trained, so a small adapter gets one of its own size.

    Source: DeepSpeed 0.19 `stage_1_and_2.py` setup_buckets, `stage3.py` __init__.
    """
    usual = ZeroBuffers()
    return replace(usual, reduce_bucket_elements=max(1, min(usual.reduce_bucket_elements, num_trained)))


def _buffers(setup: TrainSetup, model: ModelSpec, trained: Trained) -> ZeroBuffers:
    """Those of the configuration that a setup was read with, else a plan's own."""
    read = setup.zero_buffers
    return own_buffers(trained.num) if read is None else read.filled_in(model.hidden_size)


class _Zero(Engine):
    """What DeepSpeed's stages share."""

    shares = "optimizer states"
    sends = "gradients are sent, and the updated weights come back"
    keeps_fp32_masters = True

    def casts_to_half(self, setup: TrainSetup) -> bool:
        return setup.compute_dtype != "fp32"

    def refuses(self, model: ModelSpec, setup: TrainSetup) -> str:
        if setup.kbit_fp32_cast and self.casts_to_half(setup):
            return (
                "peft's k-bit cast to fp32 has no effect under DeepSpeed, which casts every floating parameter to 16 "
                "bit (DeepSpeed 0.19 engine.py, _cast_module_mixed_precision)"
            )
        if setup.offload != "none" and not OPTIMIZERS[setup.optimizer].steps_on_cpu:
            return (
                f"ZeRO-Offload steps on the CPU with DeepSpeedCPUAdam, not {setup.optimizer} (DeepSpeed 0.19 "
                "engine.py, zero_force_ds_cpu_optimizer)"
            )
        return ""

    def state(self, part: RankPart, setup: TrainSetup, *, accumulated: bool) -> RankState:
        inner = self.computes(setup)
        return _stages_1_and_2(part, setup, inner, part_trained(part.model, inner), accumulated)


@final
class Zero1(_Zero):
    """Optimizer states cut."""

    name = "ZeRO-1"
    tie_break = 3


@final
class Zero2(_Zero):
    """Gradients cut too."""

    name = "ZeRO-2"
    tie_break = 4
    shares = "optimizer states and gradients"
    sends = "gradients are sent to the GPU that keeps them, and the updated weights come back"


@final
class Zero3(_Zero):
    """Weights cut too."""

    name = "ZeRO-3"
    tie_break = 5
    shares = "weights, gradients and optimizer states"
    sends = "weights are gathered before every forward and every backward"
    reference = "cut over the GPUs and gathered module by module, by a DeepSpeed engine of its own"

    def state(self, part: RankPart, setup: TrainSetup, *, accumulated: bool) -> RankState:
        inner = self.computes(setup)
        return _stage_3(part, setup, inner, part_trained(part.model, inner), accumulated)

    def refuses(self, model: ModelSpec, setup: TrainSetup) -> str:
        if setup.quantization == "int8":
            return (
                "ZeRO-3 cannot partition bitsandbytes' int8 weights: Int8Params keeps the whole matrix beside the "
                "parameter (bitsandbytes 0.50 Int8Params.CB)"
            )
        return super().refuses(model, setup)


def _stages_1_and_2(
    part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool
) -> RankState:
    """ZeRO-1 and ZeRO-2: weights whole, fp32 masters and optimizer states cut; ZeRO-2 also cuts gradients.

    ZeRO-1 keeps whole 16-bit gradients until the last micro-batch and then reduces them through one bucket. ZeRO-2
    moves each gradient into the bucket as it appears, reduces full buckets (a flattened copy of the bucket's slices
    is what crosses the link) and keeps this rank's part; with accumulation the parts of earlier micro-batches are
    alive beside the new ones. The step makes a flat and an fp32 copy of this rank's gradients.

    Source: Rajbhandari et al. 2020, ZeRO, section 5, https://arxiv.org/abs/1910.02054; DeepSpeed 0.19
    `stage_1_and_2.py`: __init__, setup_buckets, reduce_ipg_grads, copy_grads_in_partition, allreduce_bucket, step
    (overlap_comm off, contiguous_gradients on: its defaults for these stages).
    Not counted: the load's second copy while parameters are flattened; padding of partitions.
    Measured: DeepSpeed 0.19.8 on two CPU ranks, phase by phase within 1.5 % (tests/planner/parallel/test_zero.py).
    """
    size, offloaded = SIZE_BYTES[trained.dtype], setup.offload != "none"
    local = _flat(trained, setup.shards)
    allocations = [*whole_weights(part.model, inner, trained)]
    if not offloaded:
        allocations.append(_masters(setup.shards, 4 * local.num))
    allocations += _bucketed(part.model, setup, inner, trained, local, accumulated)
    if offloaded:
        allocations.append(gradient_allocation("offload's gradient buffer", size * trained.largest))
        allocations.append(_norm(min(local.num, trained.embeddings)))
    else:
        name = f"gradients / {setup.shards}, flat and in fp32"
        allocations.append(gradient_allocation(name, (2 * size + 4) * local.num, "step"))
    return rank_state(
        part,
        inner,
        allocations,
        trained=trained,
        local=local,
        optimizer_on_device=not offloaded,
        gone_in_step_bytes=0 if offloaded else 2 * size * local.num,
        # masters, gradients and a 16-bit copy of the partition lie in host memory, pinned
        host_bytes=(8 + size) * local.num if offloaded else 0,
    )


def _masters(shards: int, size_bytes: int) -> Allocation:
    return Allocation(category="optimizer", name=f"fp32 master weights / {shards}", size_bytes=size_bytes)


def _bucketed(
    model: ModelSpec, setup: TrainSetup, inner: TrainSetup, trained: Trained, local: Trained, accumulated: bool
) -> list[Allocation]:
    shards, size, offloaded = setup.shards, SIZE_BYTES[trained.dtype], setup.offload != "none"
    buffers = _buffers(setup, model, trained)
    bucket = size * min(buffers.reduce_bucket_elements, trained.num)  # as far as gradients fill it
    buckets = size * buffers.reduce_bucket_elements * (2 if buffers.overlaps else 1)
    # the gradient partition takes the whole of every parameter that it touches: on the first rank a whole table
    partition = size * max(local.num, trained.embeddings)
    # this rank's part is made after the first full bucket: with a single one, when its flattened copy is gone
    single = bucket == size * trained.num
    late = max(0, partition - bucket) if single or setup.parallel == "zero1" else partition
    if setup.parallel == "zero1":
        whole = whole_gradients(model, inner, trained, accumulated)
        allocations = [allocation for allocation in whole if allocation.moments != ("step",)]
        buffer = (*COMPUTE, "end") if accumulated else BACKWARD
        allocations.append(gradient_allocation("ZeRO's reduce bucket", buckets, *buffer))
        # gradients move through the bucket: its flattened copy, and then this rank's part, take the place they leave
        late = 0 if offloaded else late
        return [*allocations, gradient_allocation(f"gradients / {shards}", late, "end")]
    matrix = _stacks(model)[2]
    allocations = [
        gradient_allocation("ZeRO's reduce bucket", buckets, *BACKWARD),
        *_gradients_and_copy(model, inner, trained, bucket, matrix, "flattened bucket on its way"),
        gradient_allocation(f"gradients / {shards}", 0 if offloaded else late, "last", "end"),
    ]
    if accumulated and not offloaded:
        allocations.append(gradient_allocation(f"accumulated gradients / {shards}", partition, *COMPUTE, "end"))
    return allocations


def _stage_3(part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool) -> RankState:
    """ZeRO-3: 16-bit weights, fp32 masters, states and gradients cut; weights gathered module by module.

    Gathered at once: every call of a module asks for `stage3_prefetch_bucket_size` more elements, so that what is
    live fills up to `stage3_max_live_parameters` (1e9) all along, with the tensor that crosses the limit beyond it;
    less only where less is left to be used in the step. Parameters below the persistence threshold stay gathered
    (norms, most LoRA matrices). What keeps a view of a gathered weight keeps all of it until its backward:
    bitsandbytes' 4-bit layers (without checkpointing, and with that which is not reentrant: its forward builds a graph)
    and experts in stacks (without). The bucket and this
    rank's gradients are allocated once and kept.

    Source: DeepSpeed 0.19 `stage3.py` (ipg bucket, grad_partitions_flat_buffer, sub groups),
    `partitioned_param_coordinator.py` __params_to_release, `parameter_offload.py` mark_persistent_parameters.
    Not counted: hpZ and MiCS groups, NVMe.
    Measured: DeepSpeed 0.19.8 on two CPU ranks, phase by phase within 1.5 % (tests/planner/parallel/test_zero.py).
    """
    size, model = SIZE_BYTES[trained.dtype], part.model
    local = _flat(trained, setup.shards)
    buffers, (_, block_stacks, largest) = _buffers(setup, model, trained), _stacks(model)
    # a sub-group ends with the parameter that fills it
    stepped = min(max(buffers.sub_group_elements, -(-trained.largest // setup.shards)), local.num)
    allocations, host = _cut(part, setup, inner, trained, local, stepped)
    bucket = size * min(buffers.reduce_bucket_elements, trained.num)
    waiting = max(largest, block_stacks) if model.model_type in ZERO3_LEAVES else largest
    copy = "reduce-scatter's copy of the bucket"
    allocations.append(gradient_allocation("ZeRO's reduce bucket", size * buffers.reduce_bucket_elements))
    allocations += _gradients_and_copy(model, inner, trained, bucket, waiting, copy)
    layer = gathered_groups(model, inner, 1).layer
    loss_forward, reference_forward = _reference_bytes(model, inner, buffers) if setup.asks_reference else (0, 0)
    waiting_layers = model.num_layers - _blocks_per_bucket(model, trained, bucket)
    gathered = _gathered(model, inner, buffers, max(layer, layer * waiting_layers))
    # the stream of the gathers has a pool of its own, which keeps what the forward had in it beside the loss
    at_most, at_loss = (allocation.size_bytes for allocation in gathered[:2])
    allocations += gathered
    persistent = persistent_bytes(model, inner, buffers.persistent_elements)
    allocations.append(weight_allocation("weights that stay gathered", persistent))
    return rank_state(
        part,
        inner,
        allocations,
        trained=trained,
        local=local,
        optimizer_on_device=setup.offload == "none",
        stepped=stepped,
        gone_in_step_bytes=size * stepped if trained.dtype != "fp32" else 0,
        loss_forward_bytes=loss_forward,
        reference_forward_bytes=reference_forward,
        holes_bytes=max(0, at_most - at_loss),
        host_bytes=host,
    )


def _cut(
    part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, local: Trained, stepped: int
) -> tuple[list[Allocation], int]:
    """(weights, masters and gradients of which this rank keeps its part, bytes of those in the host's memory)."""
    shards, size, model = setup.shards, SIZE_BYTES[trained.dtype], part.model
    on_host = setup.offload == "parameters"
    scales = scales_bytes(model, inner)
    loaded = sum(weight_bytes(model, inner).values()) - scales
    weights = [weight_allocation(f"weights / {shards}", -(-loaded // shards))]
    if setup.copies_reference:
        weights.append(weight_allocation(f"{REFERENCE} / {shards}", -(-loaded // shards)))
    if setup.method != "full":
        weights.append(
            Allocation(
                category="adapters", name=f"LoRA matrices / {shards}", size_bytes=-(-trained.size_bytes // shards)
            )
        )
    allocations = [] if on_host else list(weights)
    host = sum(weight.size_bytes for weight in weights) if on_host else 0
    allocations.append(weight_allocation("quantization states", scales))
    masters = 4 * local.num if trained.dtype != "fp32" else 0  # fp32 partitions are their own masters
    gradient_bytes = size * local.num
    if setup.offload != "none":
        host += masters + 4 * local.num + gradient_bytes
        allocations.append(_norm(min(NORM_CHUNK_ELEMENTS, -(-trained.embeddings // shards))))
        return allocations, host
    allocations.append(_masters(shards, masters))
    allocations.append(gradient_allocation(f"gradients / {shards}", gradient_bytes))
    copies = size + 4 if trained.dtype != "fp32" else 4
    allocations.append(gradient_allocation("one sub-group's gradients in fp32", copies * stepped, "step"))
    return allocations, host


def _norm(elements: int) -> Allocation:
    """The norm of one parameter's gradient is taken in fp64 before it goes to the host: of the embedding's, the last.

    Source: DeepSpeed 0.19.8 `set_norm_for_param_grad_in_gpu`, `_offload_grad_partition_at_boundary`.
    """
    return gradient_allocation("gradient in fp64 for its norm", 8 * elements, "end")


def persistent_bytes(model: ModelSpec, setup: TrainSetup, threshold: int) -> int:
    """Bytes of the parameters that ZeRO-3 keeps gathered: those with fewer elements than its persistence threshold."""
    size = SIZE_BYTES[setup.weight_dtype]
    elements = 0
    for layer, num in model.layer_counts:
        elements += num * sum(norm.num_params for norm in layer.norms if norm.size < threshold)
        elements += num * sum(linear.num_bias for linear in layer.linears if linear.out_features < threshold)
    elements += sum(norm.num_params for norm in model.outer_norms)
    if setup.method != "full":
        for _, num, linears in adapted(model, setup):
            for linear in linears:
                rank = setup.lora_rank
                for side in (linear.in_features, linear.out_features):
                    if rank * side < threshold:
                        elements += num * linear.num * rank * side
    return size * elements


def _gathered(model: ModelSpec, inner: TrainSetup, buffers: ZeroBuffers, late: int) -> list[Allocation]:
    """What is gathered at every moment: see `zero3`.

    Args:
        late: bytes of the blocks that are still to come back when the backward's last moment is taken.

    Source: DeepSpeed 0.19.8 `partitioned_param_coordinator.py`, in a model of which (removed in
    November 2026) 253 setups ran, to which these closed forms are fitted (docs/accuracy/spread-formula-vs-dry-run.md).
    """
    groups, half = gathered_groups(model, inner, 1), SIZE_BYTES[inner.weight_dtype]
    everything = groups.layers + groups.embedding + groups.tail
    stacks, block_stacks, largest = _stacks(model)
    size = 1 if inner.quantized and not stacks else half  # of most elements: packed ones are bytes, stacks stay 16-bit
    over = size * largest // 2  # the tensor that crosses the limit, on average
    live = size * buffers.live_elements
    ahead = min(size * min(buffers.prefetch_elements, buffers.live_elements), everything)
    # what views keep until their backward: no forward without a graph; stacks unless adapters make new ones of them
    viewed = groups.layers - half * stacks if inner.quantized else 0
    if inner.reentrant_checkpointing and inner.checkpointing == 1:
        viewed = 0
    if stacks and not inner.checkpointing:
        reached = () if inner.method == "full" else adapted(model, inner)
        if not any(linear.module == "parameter" for _, _, linears in reached for linear in linears):
            viewed += half * stacks
    # the head is asked for last, when what is live is just below the limit; a fused loss has read it from the beginning
    head = groups.tail if inner.checkpointing and inner.loss == "full" else over
    forward = max(min(everything, live + head) + ahead, min(everything, viewed + groups.tail), 2 * half * block_stacks)
    loss = max(min(everything, max(live + over, groups.tail)), min(everything, viewed + groups.tail))
    # the backward gathers ahead again, in quantized layers beside the views
    regathered = 0
    if inner.quantized and inner.checkpointing and groups.layers > live:
        regathered = max(viewed, groups.layer) + groups.tail + live
    # experts' stacks come in one buffer and are copied out of it; a recomputed block finds its own still there
    first = max(min(everything, loss + ahead), regathered, 0 if inner.checkpointing else 2 * half * block_stacks)
    last = min(everything, max(groups.layer, min(live + over, late + groups.embedding)))
    # a head that a fused loss reads is there for the whole forward and backward
    read = groups.tail if inner.loss != "full" and not model.tied else 0
    name = "gathered weights"
    return [
        weight_allocation(name, forward, "gather", "forward"),
        weight_allocation(name, loss, "loss", "head"),
        weight_allocation(name, first, "first", "turn"),
        weight_allocation(name, last + read, "last"),
        weight_allocation(name, (groups.embedding or groups.tail) + read, "end"),
    ]


def _reference_bytes(model: ModelSpec, inner: TrainSetup, buffers: ZeroBuffers) -> tuple[int, int]:
    """(bytes gathered beside a reference's loss, beside its layers), beyond what the policy has gathered at its loss. A
    copy has an engine and a limit of its own, and nothing of it is used again: what it gathered is freed as it goes.

    Source: trl 1.16 `models/utils.py` prepare_deepspeed (stage 3 stays); DeepSpeed 0.19 `engine.py`
    _configure_zero_optimizer (without an optimizer `DeepSpeedZeRoOffload`), `partitioned_param_coordinator.py`.
    Not measured: no run of it was followed.
    """
    groups = gathered_groups(model, inner, 1)
    half = SIZE_BYTES[inner.weight_dtype]
    everything = groups.layers + groups.embedding + groups.tail
    live = min(everything, half * (buffers.live_elements + _stacks(model)[2] // 2))
    ahead = min(half * min(buffers.prefetch_elements, buffers.live_elements), everything)
    if inner.copies_reference:
        return max(live, groups.tail), live + ahead
    return 0, ahead


def _stacks(model: ModelSpec) -> tuple[int, int, int]:
    """Elements of (all stacks of experts, those of one block, a block's largest tensor)."""
    total = block = largest = 0
    for layer, num in model.layer_counts:
        stacks = [
            linear.num * linear.in_features * linear.out_features
            for linear in layer.linears
            if linear.module == "parameter"
        ]
        plain = [linear.in_features * linear.out_features for linear in layer.linears if linear.module != "parameter"]
        total, block = total + num * sum(stacks), max(block, sum(stacks))
        largest = max(largest, *stacks, *plain)
    return total, block, largest


EARLY_BUCKET = 4
"""A bucket that is full within a quarter of the blocks counts as full at the backward's first block."""


def _blocks_per_bucket(model: ModelSpec, trained: Trained, bucket_bytes: int) -> int:
    """After how many blocks of the backward a bucket is full and copied; all of them where everything fits."""
    bucket = bucket_bytes // SIZE_BYTES[trained.dtype]
    if bucket >= trained.num:
        return model.num_layers
    blocks = trained.num - trained.head - trained.embeddings
    return min(model.num_layers, -(-bucket * model.num_layers // max(1, blocks)))


def _gradients_and_copy(
    model: ModelSpec, inner: TrainSetup, trained: Trained, bucket: int, matrix: int, name: str
) -> list[Allocation]:
    """Gradients before the engine moves them into its bucket, and the copy in which a bucket crosses the link.

    The head's gradient comes first, then the matrices of the last layer, the embedding's last. A tied head's half waits
    for the embedding's, and the two may make a third (`halves_stay_apart`). The copy is made when the next gradient
    finds the bucket full: not before the head's has come, and only at the end where everything fits into one. It never
    meets the halves, as the sum of them is what finds the bucket full.
    """
    size = SIZE_BYTES[trained.dtype]
    gradient = "one parameter's gradient"
    single = bucket >= size * trained.num
    waiting = trained.embeddings if model.tied else 0
    halves = 1 + int(model.tied) + int(halves_stay_apart(model, inner))
    matrix = min(matrix, trained.num)
    blocks = _blocks_per_bucket(model, trained, bucket)
    # a gradient larger than the bucket is reduced where it lies, and what stood in the bucket before it is little
    copy = 0 if single or size * matrix > bucket else bucket
    end = size * halves * trained.embeddings
    if not single:
        end = max(end, size * trained.embeddings + bucket)
    allocations = [
        gradient_allocation(gradient, size * trained.head, "head"),
        gradient_allocation(gradient, size * (waiting + matrix), "first", "turn"),
        gradient_allocation(gradient, size * (waiting + matrix), "last"),
        gradient_allocation(name, copy, "last"),
    ]
    if EARLY_BUCKET * blocks <= model.num_layers:
        allocations.append(gradient_allocation(name, copy, "first", "turn"))
    return [
        *allocations,
        gradient_allocation(gradient, end, "end") if end > bucket else gradient_allocation(name, bucket, "end"),
    ]


def _flat(trained: Trained, shards: int) -> Trained:
    """ZeRO's optimizer sees one flat fp32 partition: Adafactor cannot factor it and keeps a full second moment."""
    num = -(-trained.num // shards)
    return Trained(num=num, dtype="fp32", edge_sum=num, largest=num, head=0, embeddings=0)
