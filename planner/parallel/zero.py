"""DeepSpeed's ZeRO: what a rank holds under stages 1 to 3, with and without offloading."""

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.model import Trained, halves_stay_apart
from planner.memory.weights import weight_bytes
from planner.models.spec import ModelSpec
from planner.parallel.gather import gathered_groups
from planner.parallel.held import BACKWARD, COMPUTE, Held, Share, adapted, scales_bytes, weights, whole_gradients
from planner.parallel.rank import RankPart
from planner.setup import TrainSetup

ZERO_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `reduce_bucket_size`. Source: DeepSpeed 0.19 `runtime/zero/config.py`."""
ZERO3_PREFETCH_ELEMENTS = 50_000_000
"""`stage3_prefetch_bucket_size`. Source: as above."""
ZERO3_PERSISTENT_ELEMENTS = 100_000
"""`stage3_param_persistence_threshold`: smaller parameters stay gathered. Source: as above."""
ZERO3_REUSE_ELEMENTS = 1_000_000_000
"""`stage3_max_reuse_distance`: a parameter used again within so many elements is not released. Source: as above."""
ZERO3_LIVE_ELEMENTS = 1_000_000_000
"""`stage3_max_live_parameters`: nothing is gathered ahead beyond so many whole elements. Source: as above."""
ZERO3_SUB_GROUP_ELEMENTS = 1_000_000_000
"""`sub_group_size`: elements whose optimizer step runs at once. Source: as above."""


def zero_bucket_elements(num_trained: int) -> int:
    """Elements of DeepSpeed's reduce bucket that the plan assumes and launch files write.

    The buffer is allocated whole whatever is trained, so a small adapter gets a bucket of its own size.

    Source: DeepSpeed 0.19 `stage_1_and_2.py` setup_buckets, `stage3.py` __init__.
    """
    return max(1, min(ZERO_BUCKET_ELEMENTS, num_trained))


def zero12(part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool) -> Share:
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
    shards, size = setup.shards, SIZE_BYTES[trained.dtype]
    held = [*weights(part.model, inner)]
    if setup.method != "full":
        held.append(Held(category="adapters", name="LoRA matrices", size_bytes=trained.size_bytes))
    local = _flat(trained, shards)
    offloaded = setup.offload != "none"
    masters = 4 * local.num
    if not offloaded:
        held.append(Held(category="optimizer", name=f"fp32 master weights / {shards}", size_bytes=masters))
    bucket = size * zero_bucket_elements(trained.num)
    own = size * local.num
    # this rank's part is made after the first full bucket: with a single one, when its flattened copy is gone
    single = bucket == size * trained.num
    late = max(0, own - bucket) if single or setup.parallel == "zero1" else own
    if setup.parallel == "zero1":
        whole = whole_gradients(part.model, inner, trained, accumulated)
        held += [one for one in whole if one.moments != ("step",)]
        buffer = (*COMPUTE, "end") if accumulated else BACKWARD
        held.append(Held(category="gradients", name="ZeRO's reduce bucket", size_bytes=bucket, moments=buffer))
        # gradients move through the bucket: its flattened copy, and then this rank's part, take the place they leave
        held.append(Held(category="gradients", name=f"gradients / {shards}", size_bytes=late, moments=("end",)))
    else:
        held += _param_gradient(part.model, inner, trained)
        held.append(Held(category="gradients", name="ZeRO's reduce bucket", size_bytes=bucket, moments=BACKWARD))
        held.append(Held(category="gradients", name="flattened bucket on its way", size_bytes=bucket, moments=BACKWARD))
        kept = 0 if offloaded else late
        held.append(Held(category="gradients", name=f"gradients / {shards}", size_bytes=kept, moments=("last", "end")))
        if accumulated and not offloaded:
            held.append(
                Held(
                    category="gradients",
                    name=f"accumulated gradients / {shards}",
                    size_bytes=own,
                    moments=(*COMPUTE, "end"),
                )
            )
    host = 0
    if offloaded:
        # masters, gradients and a 16-bit copy of the partition lie in host memory, pinned; one parameter's on the GPU
        host = masters + 4 * local.num + size * local.num
        held.append(Held(category="gradients", name="offload's gradient buffer", size_bytes=size * trained.largest))
    else:
        held.append(
            Held(
                category="gradients",
                name=f"gradients / {shards}, flat and in fp32",
                size_bytes=(2 * size + 4) * local.num,
                moments=("step",),
            )
        )
    return Share(
        part=part,
        setup=inner,
        trained=trained,
        local=local,
        optimizer_on_device=not offloaded,
        held=tuple(one for one in held if one.size_bytes),
        host_bytes=host,
    )


def zero3(part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool) -> Share:
    """ZeRO-3: 16-bit weights, fp32 masters, states and gradients cut; weights gathered module by module.

    Gathered at once: the layer at work and up to `stage3_prefetch_bucket_size` elements ahead, which stand beside the
    flat buffer they came in when they are copied out; around the loss also what is used again within
    `stage3_max_reuse_distance`, about half of it (a third with checkpointing, where layers are used once more) of the
    last layers. Parameters below the persistence threshold stay gathered (norms, most LoRA
    matrices). The bucket and this rank's gradients are allocated once and kept.

    Source: DeepSpeed 0.19 `stage3.py` (ipg bucket, grad_partitions_flat_buffer, sub groups),
    `partitioned_param_coordinator.py` __params_to_release, `parameter_offload.py` mark_persistent_parameters.
    Not counted: hpZ and MiCS groups, NVMe.
    Measured: DeepSpeed 0.19.8 on two CPU ranks, phase by phase within 1.5 % (tests/planner/parallel/test_zero.py).
    """
    shards, size, model = setup.shards, SIZE_BYTES[trained.dtype], part.model
    local = _flat(trained, shards)
    on_host = setup.offload == "parameters"
    offloaded = setup.offload != "none"
    scales = scales_bytes(model, inner)
    loaded = sum(weight_bytes(model, inner).values()) - scales
    weights = [Held(category="weights", name=f"weights / {shards}", size_bytes=-(-loaded // shards))]
    if setup.method != "full":
        weights.append(
            Held(category="adapters", name=f"LoRA matrices / {shards}", size_bytes=-(-trained.size_bytes // shards))
        )
    held = [] if on_host else list(weights)
    host = sum(one.size_bytes for one in weights) if on_host else 0
    held.append(Held(category="weights", name="quantization states", size_bytes=scales))
    masters = 4 * local.num if trained.dtype != "fp32" else 0  # fp32 partitions are their own masters
    own = size * local.num
    if offloaded:
        host += masters + 4 * local.num + own
    else:
        held.append(Held(category="optimizer", name=f"fp32 master weights / {shards}", size_bytes=masters))
        held.append(Held(category="gradients", name=f"gradients / {shards}", size_bytes=own))
        step = min(ZERO3_SUB_GROUP_ELEMENTS, local.num)
        copies = size + 4 if trained.dtype != "fp32" else 4
        held.append(
            Held(
                category="gradients",
                name="one sub-group's gradients in fp32",
                size_bytes=copies * step,
                moments=("step",),
            )
        )
    bucket = size * zero_bucket_elements(trained.num)
    held.append(Held(category="gradients", name="ZeRO's reduce bucket", size_bytes=bucket))
    held.append(
        Held(category="gradients", name="reduce-scatter's copy of the bucket", size_bytes=bucket, moments=BACKWARD)
    )
    held += _param_gradient(model, inner, trained)
    groups = gathered_groups(model, inner, 1)
    reuse = size * ZERO3_REUSE_ELEMENTS // (3 if setup.checkpointing else 2)
    kept = min(groups.layers, max(reuse, groups.layer))
    everything = groups.layers + groups.embedding + groups.tail
    ahead = min(size * ZERO3_PREFETCH_ELEMENTS, everything)
    name = "gathered weights"
    held.append(
        Held(
            category="weights",
            name=name,
            size_bytes=min(everything, kept + ahead) + ahead,
            moments=("gather", "forward"),
        )
    )
    held.append(Held(category="weights", name=name, size_bytes=kept + groups.tail, moments=("loss", "head", "first")))
    held.append(
        Held(
            category="weights",
            name=name,
            size_bytes=min(everything, max(groups.layer + ahead, groups.embedding)),
            moments=("last", "end"),
        )
    )
    held.append(Held(category="weights", name="weights that stay gathered", size_bytes=persistent_bytes(model, inner)))
    return Share(
        part=part,
        setup=inner,
        trained=trained,
        local=local,
        optimizer_on_device=not offloaded,
        held=tuple(one for one in held if one.size_bytes),
        host_bytes=host,
    )


def persistent_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the parameters that ZeRO-3 keeps gathered: those below its persistence threshold."""
    size = SIZE_BYTES[setup.weight_dtype]
    elements = 0
    for layer, num in model.layer_counts:
        elements += num * sum(norm.num_params for norm in layer.norms if norm.size < ZERO3_PERSISTENT_ELEMENTS)
        elements += num * sum(one.num_bias for one in layer.linears if one.out_features < ZERO3_PERSISTENT_ELEMENTS)
    elements += sum(norm.num_params for norm in model.outer_norms)
    if setup.method != "full":
        for _, num, linears in adapted(model, setup):
            for one in linears:
                rank = setup.lora_rank
                for side in (one.in_features, one.out_features):
                    if rank * side < ZERO3_PERSISTENT_ELEMENTS:
                        elements += num * one.num * rank * side
    return size * elements


def _param_gradient(model: ModelSpec, inner: TrainSetup, trained: Trained) -> list[Held]:
    """Gradients before the engine moves them into its bucket: the head's first, a matrix of the last layer, and the
    embedding's last. A tied head's half waits for the embedding's, and the two may make a third (`halves_stay_apart`).
    """
    size = SIZE_BYTES[trained.dtype]
    name = "one parameter's gradient"
    waiting = trained.embeddings if model.tied else 0
    halves = 1 + int(model.tied) + int(halves_stay_apart(model, inner))
    matrix = max(
        (one.in_features * one.out_features for layer in model.layer_kinds for one in layer.linears), default=0
    )
    matrix = min(matrix, trained.largest)
    first = max(trained.head, matrix)
    return [
        Held(category="gradients", name=name, size_bytes=size * first, moments=("first",)),
        Held(category="gradients", name=name, size_bytes=size * (waiting + matrix), moments=("last",)),
        Held(category="gradients", name=name, size_bytes=size * halves * trained.embeddings, moments=("end",)),
    ]


def _flat(trained: Trained, shards: int) -> Trained:
    """ZeRO's optimizer sees one flat fp32 partition: Adafactor cannot factor it and keeps a full second moment."""
    num = -(-trained.num // shards)
    return Trained(num=num, dtype="fp32", edge_sum=num, largest=num, head=0, embeddings=0)
