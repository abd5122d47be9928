"""`Share`: what one rank of a spread holds beyond its activations, by moment of the step, as each engine does it.

Activations and the loss chain come from the one-GPU terms on the rank's own part; this module says in which types they
run (`engine_setup`), which states are resident, and what the engine's buffers add at which moment.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from planner.errors import SetupError
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.model import (
    ActivationParts,
    BackwardPeak,
    Trained,
    backward_moments,
    halves_stay_apart,
    trained_parameters,
)
from planner.memory.optimizer import state_bytes, step_bytes
from planner.memory.weights import nf4_bytes, weight_bytes
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec
from planner.models.targets import lora_linears, lora_params
from planner.parallel.rank import RankPart
from planner.setup import SHARDED, TrainSetup

MOMENTS = ("forward", "loss", "first", "last", "end", "step")
"""The moments that can be the peak: the last layer's forward, the loss, the backward's first and last layer, the
backward's end (the embedding's gradient and what is still in buffers, all activations gone) and the optimizer step."""
COMPUTE = ("forward", "loss", "first", "last")
BACKWARD = ("first", "last", "end")

ZERO_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `reduce_bucket_size`. Source: DeepSpeed 0.19 `runtime/zero/config.py`."""
ZERO3_PREFETCH_ELEMENTS = 50_000_000
"""`stage3_prefetch_bucket_size`. Source: as above."""
ZERO3_PERSISTENT_ELEMENTS = 100_000
"""`stage3_param_persistence_threshold`: smaller parameters stay gathered. Source: as above."""
ZERO3_REUSE_ELEMENTS = 1_000_000_000
"""`stage3_max_reuse_distance`: a parameter used again within so many elements is not released. Source: as above."""
ZERO3_SUB_GROUP_ELEMENTS = 1_000_000_000
"""`sub_group_size`: elements whose optimizer step runs at once. Source: as above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of one kind that a rank holds at some moments (all of MOMENTS: resident)."""

    category: str
    name: str
    size_bytes: int
    moments: tuple[str, ...] = MOMENTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's states and buffers.

    Attributes:
        setup: the one-GPU setup whose data types really run under the engine.
        trained: the part's trained parameters in the type of their unsharded gradients.
        local: what this rank's optimizer updates: its shard, in the type it keeps it in.
        optimizer_on_device: False where optimizer states lie in host memory.
        loss_forward_bytes: alive in the loss's forward only (not in its backward).
        host_bytes: states in this rank's host memory, optimizer states not counted (`host_state_bytes`).
    """

    part: RankPart
    setup: TrainSetup
    trained: Trained
    local: Trained
    optimizer_on_device: bool
    held: tuple[Held, ...]
    loss_forward_bytes: int = 0
    host_bytes: int = 0
    moment_bytes: dict[str, int] = field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        totals = dict.fromkeys(MOMENTS, 0)
        resident = 0
        for one in self.held:
            if len(one.moments) == len(MOMENTS):
                resident += one.size_bytes
            else:
                for moment in one.moments:
                    totals[moment] += one.size_bytes
        totals["resident"] = resident
        self.moment_bytes.update(totals)

    def optimizer_bytes(self, optimizer: str) -> tuple[int, int]:
        """Bytes on the device of (states, temporaries of the step) for an optimizer on this rank's shard."""
        if not self.optimizer_on_device:
            return 0, 0
        local = self.local
        states = state_bytes(local.num, local.dtype, optimizer, matrix_edge_sum=local.edge_sum)
        return states, step_bytes(local.num, local.dtype, optimizer, largest_tensor=local.largest)

    def host_state_bytes(self, optimizer: str) -> int:
        """Bytes of optimizer states in host memory: of this rank's shard, where they are offloaded."""
        if self.optimizer_on_device:
            return 0
        return state_bytes(self.local.num, self.local.dtype, optimizer, matrix_edge_sum=self.local.edge_sum)


def zero_bucket_elements(num_trained: int) -> int:
    """Elements of DeepSpeed's reduce bucket that the plan assumes and launch files write.

    The buffer is allocated whole whatever is trained, so a small adapter gets a bucket of its own size.

    Source: DeepSpeed 0.19 `stage_1_and_2.py` setup_buckets, `stage3.py` __init__.
    """
    return max(1, min(ZERO_BUCKET_ELEMENTS, num_trained))


def engine_setup(setup: TrainSetup) -> TrainSetup:
    """The one-GPU setup whose data types a rank really computes in.

    DDP wraps the same autocast model. FSDP2 under Accelerate never gets autocast: a mixed-precision policy gathers
    weights in 16 bit and computes there. DeepSpeed casts every floating parameter to 16 bit, adapters too, and keeps
    its own fp32 masters. Both therefore flow as pure 16 bit.

    Source: accelerate 1.15 `Accelerator._prepare_fsdp2` (no `prepare_model`), `FullyShardedDataParallelPlugin.
    set_mixed_precision`; native_amp is off for DeepSpeed; DeepSpeed 0.19 `engine.py` _configure_distributed_model.
    """
    plain = {
        "num_gpus": 1,
        "parallel": "none",
        "tensor_degree": 1,
        "pipeline_degree": 1,
        "pipeline_schedule": "1f1b",
        "shard_degree": 0,
        "reshard_after_forward": True,
        "offload": "none",
    }
    if not casts_to_half(setup):
        return setup.trusted_with(**plain)
    half = setup.compute_dtype
    adapter = {} if setup.method == "full" else {"adapter_dtype": half}
    return setup.trusted_with(**plain, **adapter, precision=f"{half}-pure", kbit_fp32_cast=False)


def casts_to_half(setup: TrainSetup) -> bool:
    """Whether the engine computes in 16 bit without autocast, whatever type the weights are kept in."""
    if setup.parallel == "fsdp2":
        return setup.autocast_dtype is not None  # without mixed precision there is no policy
    return setup.parallel in SHARDED and setup.compute_dtype != "fp32"


def share_of(part: RankPart, setup: TrainSetup, *, accumulated: bool) -> Share:
    """The share of one rank that holds `part`.

    Args:
        accumulated: whether gradients of earlier micro-batches are alive while the next one runs.
    """
    inner = engine_setup(setup)
    trained = part_trained(part.model, inner)
    if setup.parallel == "fsdp2":
        return _fsdp2(part, setup, inner, trained, accumulated)
    if setup.parallel in ("zero1", "zero2"):
        return _zero12(part, setup, inner, trained, accumulated)
    if setup.parallel == "zero3":
        return _zero3(part, setup, inner, trained, accumulated)
    return _replicated(part, setup, inner, trained, accumulated)


def part_trained(model: ModelSpec, setup: TrainSetup) -> Trained:
    """`trained_parameters` of a part; nothing where explicit targets match no module of it (a stage without head)."""
    try:
        return trained_parameters(model, setup)
    except SetupError:
        return Trained(num=0, dtype=setup.resolved_adapter_dtype, edge_sum=0, largest=0, head=0, embeddings=0)


# --- replicated: one GPU's terms, DDP's buckets -----------------------------------------------------------------------


def _replicated(part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool) -> Share:
    """Everything whole on every rank; DDP adds its buckets, nn.DataParallel what GPU 0 collects.

    DDP's Reducer allocates one flat buffer per bucket at construction and keeps it: as many bytes as the trained
    parameters, beside the gradients themselves (gradient_as_bucket_view is off by default). nn.DataParallel copies the
    weights to every GPU for one step and adds all gradients up on GPU 0, which also runs the optimizer.

    Source: PyTorch 2.13 `csrc/distributed/c10d/reducer.cpp` initialize_buckets; accelerate 1.15
    `DistributedDataParallelKwargs`; `nn/parallel/replicate.py`, `_functions.py` ReduceAddCoalesced.
    """
    held = [*_weights(part.model, inner)]
    if setup.method != "full":
        held.append(Held(category="adapters", name="LoRA matrices", size_bytes=trained.size_bytes))
    held += _whole_gradients(part.model, inner, trained, accumulated and not part.follower)
    if setup.parallel == "ddp":
        held.append(Held(category="gradients", name="DDP's buckets", size_bytes=trained.size_bytes))
    if setup.parallel == "dp" and not part.follower:
        held.append(
            Held(
                category="gradients",
                name="sum of all GPUs' gradients",
                size_bytes=trained.size_bytes,
                moments=("last", "end"),
            )
        )
    if part.follower:  # its gradients are gone when GPU 0 has added them up
        held = [
            one if one.moments == MOMENTS else replace(one, moments=tuple(m for m in one.moments if m != "step"))
            for one in held
        ]
    local = trained if not part.follower else replace(trained, num=0, edge_sum=0, largest=0)
    return Share(part=part, setup=inner, trained=trained, local=local, optimizer_on_device=True, held=tuple(held))


def _weights(model: ModelSpec, setup: TrainSetup) -> Iterator[Held]:
    for name, size in weight_bytes(model, setup).items():
        if size:
            yield Held(category="weights", name=f"weights: {name}", size_bytes=size)


def _whole_gradients(model: ModelSpec, inner: TrainSetup, trained: Trained, accumulated: bool) -> list[Held]:
    """Gradients that stay whole until the step, as on one GPU (`planner.memory.model.backward_moments`)."""
    nothing = ActivationParts(
        stored={"bias": 0},
        recomputed=0,
        transient=0,
        forward_temp=0,
        dequantized=0,
        final_norm=0,
        weight_casts=(0, 0),
        adapter_casts=0,
        at_first_decoder_layer=int(model.is_encoder_decoder and inner.checkpointing > 0),
    )
    apart = halves_stay_apart(model, inner)
    moments = backward_moments(model, nothing, trained, accumulated=accumulated, apart=apart)
    name = "gradients in the backward"
    found = [
        Held(category="gradients", name=name, size_bytes=one.gradients, moments=(backward_moment(one),))
        for one in moments
    ]
    found.append(Held(category="gradients", name="gradients", size_bytes=trained.size_bytes, moments=("step",)))
    if accumulated:
        kept = (*COMPUTE, "end")
        found.append(
            Held(category="gradients", name="accumulated gradients", size_bytes=trained.size_bytes, moments=kept)
        )
    return found


def backward_moment(peak: BackwardPeak) -> str:
    """Which of MOMENTS one of the one-GPU backward's moments is."""
    return {"last layer": "last", "embedding": "end"}.get(peak.where, "first")


def _fraction(trained: Trained, shards: int, dtype: str) -> Trained:
    """One shard of the trained parameters. Adafactor's rows and columns are cut along with them."""
    return Trained(
        num=-(-trained.num // shards),
        dtype=dtype,
        edge_sum=-(-trained.edge_sum // shards),
        largest=-(-trained.largest // shards),
        head=-(-trained.head // shards),
        embeddings=-(-trained.embeddings // shards),
    )


# --- DeepSpeed ZeRO ---------------------------------------------------------------------------------------------------


def _flat(trained: Trained, shards: int) -> Trained:
    """ZeRO's optimizer sees one flat fp32 partition: Adafactor cannot factor it and keeps a full second moment."""
    num = -(-trained.num // shards)
    return Trained(num=num, dtype="fp32", edge_sum=num, largest=num, head=0, embeddings=0)


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


def _zero12(part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool) -> Share:
    """ZeRO-1 and ZeRO-2: weights whole, fp32 masters and optimizer states cut; ZeRO-2 also cuts gradients.

    ZeRO-1 keeps whole 16-bit gradients until the last micro-batch and then reduces them through one bucket. ZeRO-2
    moves each gradient into the bucket as it appears, reduces full buckets (a flattened copy of the bucket's slices
    is what crosses the link) and keeps this rank's part; with accumulation the parts of earlier micro-batches are
    alive beside the new ones. The step makes a flat and an fp32 copy of this rank's gradients.

    Source: Rajbhandari et al. 2020, ZeRO, section 5, https://arxiv.org/abs/1910.02054; DeepSpeed 0.19
    `stage_1_and_2.py`: __init__, setup_buckets, reduce_ipg_grads, copy_grads_in_partition, allreduce_bucket, step
    (overlap_comm off, contiguous_gradients on: its defaults for these stages).
    Not counted: the load's second copy while parameters are flattened; padding of partitions.
    """
    shards, size = setup.shards, SIZE_BYTES[trained.dtype]
    held = [*_weights(part.model, inner)]
    if setup.method != "full":
        held.append(Held(category="adapters", name="LoRA matrices", size_bytes=trained.size_bytes))
    local = _flat(trained, shards)
    offloaded = setup.offload != "none"
    masters = 4 * local.num
    if not offloaded:
        held.append(Held(category="optimizer", name=f"fp32 master weights / {shards}", size_bytes=masters))
    bucket = size * zero_bucket_elements(trained.num)
    own = size * local.num
    if setup.parallel == "zero1":
        whole = _whole_gradients(part.model, inner, trained, accumulated)
        held += [one for one in whole if one.moments != ("step",)]
        held.append(Held(category="gradients", name=f"gradients / {shards}", size_bytes=own, moments=("end",)))
        buffer = (*COMPUTE, "end") if accumulated else BACKWARD
        held.append(Held(category="gradients", name="ZeRO's reduce bucket", size_bytes=bucket, moments=buffer))
        held.append(Held(category="gradients", name="flattened bucket on its way", size_bytes=bucket, moments=("end",)))
    else:
        held += _param_gradient(part.model, inner, trained)
        held.append(Held(category="gradients", name="ZeRO's reduce bucket", size_bytes=bucket, moments=BACKWARD))
        held.append(Held(category="gradients", name="flattened bucket on its way", size_bytes=bucket, moments=BACKWARD))
        kept = 0 if offloaded else own
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


def _zero3(part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool) -> Share:
    """ZeRO-3: 16-bit weights, fp32 masters, states and gradients cut; weights gathered module by module.

    Gathered at once: the layer at work and up to `stage3_prefetch_bucket_size` elements ahead; around the loss also
    what is used again within `stage3_max_reuse_distance`, about half of it (a third with checkpointing, where layers
    are used once more) of the last layers. Parameters below the persistence threshold stay gathered (norms, most LoRA
    matrices). The bucket and this rank's gradients are allocated once and kept.

    Source: DeepSpeed 0.19 `stage3.py` (ipg bucket, grad_partitions_flat_buffer, sub groups),
    `partitioned_param_coordinator.py` __params_to_release, `parameter_offload.py` mark_persistent_parameters.
    Not counted: hpZ and MiCS groups, NVMe.
    """
    shards, size, model = setup.shards, SIZE_BYTES[trained.dtype], part.model
    local = _flat(trained, shards)
    on_host = setup.offload == "parameters"
    offloaded = setup.offload != "none"
    scales = _scales(model, inner)
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
    groups = gathered_groups(model, setup, inner)
    reuse = size * ZERO3_REUSE_ELEMENTS // (3 if setup.checkpointing else 2)
    kept = min(groups.layers, max(reuse, groups.layer))
    ahead = min(size * ZERO3_PREFETCH_ELEMENTS, groups.layers)
    name = "gathered weights"
    held.append(Held(category="weights", name=name, size_bytes=kept + ahead, moments=("forward",)))
    held.append(Held(category="weights", name=name, size_bytes=kept + groups.tail, moments=("loss", "first")))
    held.append(
        Held(
            category="weights",
            name=name,
            size_bytes=max(groups.layer + ahead, groups.embedding),
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
        for _, num, linears in _adapted(model, setup):
            for one in linears:
                rank = setup.lora_rank
                for side in (one.in_features, one.out_features):
                    if rank * side < ZERO3_PERSISTENT_ELEMENTS:
                        elements += num * one.num * rank * side
    return size * elements


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Bytes of gathered weights by communication group, and the trained elements among them.

    `layer`: the largest block; `layers`: all of them; `embedding`: tables with a group of their own; `tail`: final norm
    and head (and the table where the head is tied); `root`: the rest.
    """

    layer: int
    layers: int
    embedding: int
    tail: int
    root: int
    layer_trained: int
    embedding_trained: int
    tail_trained: int


def gathered_groups(model: ModelSpec, setup: TrainSetup, inner: TrainSetup) -> Groups:
    """The groups in which Accelerate's FSDP2 gathers weights, in bytes as gathered (ZeRO-3 gathers the same tensors).

    Source: accelerate 1.15 `fsdp2_prepare_model`: one group per block, the input embedding alone (with the tail where
    tied), [final norm, head] never resharded after the forward, the root for what is left.
    """
    return _groups(model, setup.method, inner, SIZE_BYTES[inner.resolved_adapter_dtype])


@lru_cache(maxsize=512)
def _groups(model: ModelSpec, method: str, inner: TrainSetup, adapter_size: int) -> Groups:
    plain = SIZE_BYTES["fp32" if inner.kbit_fp32_cast else inner.weight_dtype]
    adapters: dict[int, int] = {}
    if method != "full":
        for layer, _, linears in _adapted(model, inner):
            adapters[id(layer)] = sum(lora_params(one, inner.lora_rank) for one in linears)
    sizes, trained, total = [0], [0], 0
    for layer, num in model.layer_counts:
        own = adapters.get(id(layer), 0)
        size = _layer_gathered(layer, inner, plain) + own * adapter_size
        sizes.append(size)
        trained.append(layer.num_params if method == "full" else own)
        total += num * size
    norm = sum(one.num_params for one in model.outer_norms[-1:])
    tables = max((table.num_params for table in model.embeddings), default=0)
    others = model.num_embedding_params - tables
    outer = others + model.num_outer_other_params + sum(one.num_params for one in model.outer_norms[:-1])
    outer += sum(one.num_weights + one.num_bias for one in model.outer_linears)
    outer += sum(layer.num_params * num for layer, num in model.idle_layers) + model.num_idle_other_params
    tail = norm + model.num_head_params + (tables if model.tied else 0)
    full = method == "full"
    return Groups(
        layer=max(sizes),
        layers=total,
        embedding=0 if model.tied else tables * plain,
        tail=tail * plain,
        root=outer * plain,
        layer_trained=max(trained),
        embedding_trained=tables if full and not model.tied else 0,
        tail_trained=tail if full else 0,
    )


def _layer_gathered(layer: LayerSpec, inner: TrainSetup, plain: int) -> int:
    """Bytes of one block's gathered weights: 4-bit weights travel packed, their scales are never cut."""
    total = (sum(norm.num_params for norm in layer.norms) + layer.num_other_params) * plain
    for one in layer.linears:
        if not inner.quantized or one.module == "parameter":
            total += (one.num_weights + one.num_bias) * plain
        else:
            packed = one.num_weights if inner.quantization == "int8" else -(-one.num_weights // 2)
            total += packed + one.num_bias * plain
    return total


def _adapted(model: ModelSpec, setup: TrainSetup) -> tuple[tuple[LayerSpec, int, tuple[LinearSpec, ...]], ...]:
    try:
        return lora_linears(model, setup.lora_targets)
    except SetupError:
        return ()


def _scales(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of NF4's quantization states, which no engine cuts: everything but the packed codes."""
    if setup.quantization not in ("nf4", "nf4-double"):
        return 0
    double = setup.quantization == "nf4-double"
    total = 0
    for layer, num in (*model.layer_counts, *model.idle_layers):
        for one in layer.linears:
            if one.module != "parameter":
                elements = one.in_features * one.out_features
                total += num * one.num * (nf4_bytes(elements, double=double) - -(-elements // 2))
    return total


def _fsdp2(part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool) -> Share:
    """FSDP2 as Accelerate sets it up: everything cut along the first dimension, gathered block by block.

    With mixed precision the trained parameters are cut in fp32 (not where 4-bit parameters are present) and gathered in
    16 bit; sharded gradients and states follow the sharded type, unsharded gradients and the reduce-scatter are 16 bit.
    Forward: the block's gathered weights and the all-gather's own buffer, freed one block later. Backward: the block's
    weights and the prefetched block's buffer, the block's unsharded gradients, and the previous block's reduce-scatter
    input. Final norm and head stay gathered from the forward to their backward; a tied table from the start to the end,
    with its unsharded gradient. Hybrid shard cuts over `shard_degree` GPUs instead of all.

    Source: PyTorch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py` (wait_for_unshard, post_backward,
    _backward_prefetch), `_fsdp_collectives.py` (foreach_all_gather, foreach_reduce); accelerate 1.15
    `fsdp2_prepare_model`.
    Not counted: padding of small first dimensions (LoRA matrices of fewer rows than ranks); the separate pools of the
    communication streams (in the allocator's gap). Accumulation is taken with `sync_each_batch`: without it the
    gradients of the whole model stay unsharded between micro-batches.
    """
    shards, model = setup.shards, part.model
    unsharded = SIZE_BYTES[trained.dtype]
    dtype = sharded_dtype(setup)
    local = _fraction(trained, shards, dtype)
    weights = _fsdp2_weights(model, setup, shards, local)
    on_host = setup.offload == "parameters"
    held = [] if on_host else list(weights)
    scales = _scales(model, setup)
    held.append(Held(category="weights", name="quantization states", size_bytes=scales))
    groups = gathered_groups(model, setup, inner)
    whole = not setup.reshard_after_forward
    tied = groups.tail if model.tied else 0
    halves = 2 + int(halves_stay_apart(model, inner))  # of a tied table's gradient, before they are one
    layer_grads = groups.layer_trained * unsharded
    tail_grads = groups.tail_trained * unsharded
    embedding_grads = groups.embedding_trained * unsharded
    kept = groups.layers if whole else groups.layer
    own = 0 if on_host else local.size_bytes
    name = "gathered weights"
    held += [
        Held(category="weights", name=name, size_bytes=kept + tied, moments=("forward",)),
        Held(category="weights", name="all-gather buffer", size_bytes=groups.layer, moments=("forward",)),
        Held(
            category="weights",
            name=name,
            size_bytes=groups.tail + (groups.layers if whole else 0),
            moments=("loss",),
        ),
        Held(
            category="weights",
            name=name,
            size_bytes=(groups.layers if whole else 2 * groups.layer) + tied,
            moments=("first",),
        ),
        Held(
            category="weights",
            name=name,
            size_bytes=groups.layer + (0 if whole else max(groups.layer, groups.embedding)) + tied,
            moments=("last",),
        ),
        Held(category="weights", name="gathered root group", size_bytes=groups.root, moments=(*COMPUTE, "end")),
        Held(
            category="gradients",
            name="unsharded gradients of a layer",
            size_bytes=layer_grads,
            moments=("first", "last"),
        ),
        # the input of the reduce-scatter before: the head's while the last layer runs, a layer's later on
        Held(
            category="gradients",
            name="reduce-scatter buffer",
            size_bytes=tail_grads,
            moments=("first",),
        ),
        Held(
            category="gradients",
            name="reduce-scatter buffer",
            size_bytes=layer_grads + (tail_grads if model.tied else 0),
            moments=("last",),
        ),
        Held(
            category="gradients",
            name="last unsharded gradients and their reduce-scatter",
            size_bytes=layer_grads + groups.tail + halves * tail_grads
            if model.tied
            else max(groups.embedding + embedding_grads + layer_grads, 2 * embedding_grads),
            moments=("end",),
        ),
    ]
    if accumulated:
        held.append(
            Held(
                category="gradients",
                name=f"accumulated gradients / {shards}",
                size_bytes=own,
                moments=(*COMPUTE, "end", "step"),
            )
        )
    else:
        held.append(
            Held(
                category="gradients",
                name=f"gradients / {shards}",
                size_bytes=own,
                moments=("last", "end", "step"),
            )
        )
    return Share(
        part=part,
        setup=inner,
        trained=trained,
        local=local,
        optimizer_on_device=not on_host,
        held=tuple(one for one in held if one.size_bytes),
        loss_forward_bytes=groups.tail if not model.tied else groups.layer,
        host_bytes=sum(one.size_bytes for one in weights) + local.size_bytes if on_host else 0,
    )


def sharded_dtype(setup: TrainSetup) -> str:
    """Type in which FSDP2 keeps trained parameters, their sharded gradients and states.

    Source: accelerate 1.15 `fsdp2_prepare_model`: upcast to fp32 under mixed precision, but not where 4-bit parameters
    are present.
    """
    own = setup.weight_dtype if setup.method == "full" else setup.resolved_adapter_dtype
    if setup.autocast_dtype is None or setup.quantization in ("nf4", "nf4-double"):
        return own
    return "fp32"


def _fsdp2_weights(model: ModelSpec, setup: TrainSetup, shards: int, local: Trained) -> list[Held]:
    """The sharded weights: trained ones in the sharded type, frozen ones as loaded."""
    name = f"weights / {shards}"
    if setup.method == "full":
        size = -(-model.num_params * SIZE_BYTES[local.dtype] // shards)
        return [Held(category="weights", name=name, size_bytes=size)]
    loaded = sum(weight_bytes(model, setup).values()) - _scales(model, setup)
    return [
        Held(category="weights", name=name, size_bytes=-(-loaded // shards)),
        Held(category="adapters", name=f"LoRA matrices / {shards}", size_bytes=local.size_bytes),
    ]
