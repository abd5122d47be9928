"""FSDP2 as Accelerate sets it up: what a rank holds."""

from collections.abc import Iterable
from dataclasses import replace
from typing import final

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.engines.base import Engine
from planner.memory.engines.expert_parallel import (
    gathered_with_experts,
    moe_layers_without_experts,
    share_of,
    without_experts,
)
from planner.memory.engines.gather import Groups, gathered_groups, scales_bytes
from planner.memory.engines.splits import gathered_head
from planner.memory.layer_terms import replicas
from planner.memory.rank_part import RankPart
from planner.memory.states import (
    COMPUTE,
    ONE_GRADIENT,
    REFERENCE,
    Allocation,
    RankState,
    gradient_allocation,
    halves_stay_apart,
    part_trained,
    pinned,
    rank_state,
    state_bytes,
    weight_allocation,
    weight_bytes,
)
from planner.memory.trained import Trained
from planner.models.spec import LinearSpec, ModelSpec
from planner.options.losses import LOSSES, TRL_VOCAB_CHUNK
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup


def dtensor_refusal(setup: TrainSetup) -> str:
    """Why the setup's optimizer cannot step FSDP2's DTensors, "" where it can."""
    if setup.parallel != "fsdp2" or setup.fsdp_version != 2 or OPTIMIZERS[setup.optimizer].steps_dtensors:
        return ""
    if setup.optimizer == "adafactor":
        return (
            "transformers' Adafactor mixes plain tensors with FSDP2's DTensors and raises (transformers 5.23 "
            "optimization.py: zeros of the gradient's shape)"
        )
    return (
        f"bitsandbytes' {setup.optimizer} has no step for FSDP2's DTensors (bitsandbytes-foundation/"
        "bitsandbytes issue 1633)"
    )


@final
class Fsdp2(Engine):
    """FSDP2 as Accelerate sets it up: everything cut along the first dimension, gathered block by block.

    With mixed precision the trained parameters are cut in fp32 (not where 4-bit parameters are present) and gathered in
    16 bit; sharded gradients and states follow the sharded type, unsharded gradients and the reduce-scatter are 16 bit.
    Hybrid shard cuts over `shard_degree` GPUs instead of all. Axolotl's own function (`Stack.one_root`) upcasts none,
    and makes one group of tables, final norm and head, gathered from the forward to the backward's end.

    Source: accelerate 1.15 `fsdp2_prepare_model`; `_gathered` and `_gradients` for what lives when.
    Not counted: the separate pools of the communication streams (in the allocator's gap).
    Measured: against 50 dry runs of Accelerate's own preparation (layout_formula_vs_dryrun.py of 00bc1b5f, seed 7,
    21 November 2026): median error 0.1 %, worst 2.4 %.
    """

    name = "FSDP2"
    tie_break = 2
    shares = "weights, gradients and optimizer states"
    sends = "weights are gathered before every forward and every backward"
    reduces_layers = True
    reference = "cut over the GPUs, and all of it gathered at once for its forward: TRL makes one FSDP group of it"

    def state(self, part: RankPart, setup: TrainSetup, *, accumulated: bool) -> RankState:
        if setup.expert_degree > 1:
            return self._expert_parallel_state(part, setup, accumulated=accumulated)
        inner = self.computes(setup)
        trained = part_trained(part.model, inner)
        shards, model = setup.shards, part.model
        groups = gathered_groups(model, inner, shards)
        local = _shard(model, groups, setup)
        weights = _weights(model, setup, groups, local)
        on_host = setup.offload == "parameters"
        allocations = [] if on_host else list(weights)
        allocations.append(weight_allocation("quantization states", scales_bytes(model, setup)))
        loss_forward = loss_backward = reference_forward = arriving = 0
        if setup.pipeline_degree > 1:
            # from its first backward to the step's end PyTorch's schedules keep every group gathered and reduce no
            # gradient, which add up in fp32, the type of their reduction (PyTorch 2.13 `pipelining/stage.py`
            # backward_maybe_with_nosync, perform_reduce_grad; torchtitan 0.2.2 `apply_fsdp`, reduce_dtype fp32)
            alive = (*COMPUTE, "end")
            allocations += [
                weight_allocation("gathered weights", groups.whole, *alive),
                gradient_allocation("unsharded gradients", SIZE_BYTES["fp32"] * trained.num, *alive),
                gradient_allocation(f"gradients / {shards}", local.size_bytes, "step"),
            ]
        else:
            allocations += _block_by_block(model, setup, inner, groups, trained, local, accumulated)
            loss_forward, loss_backward = _at_the_loss(model, setup, inner, groups)
            if setup.asks_reference:
                reference_forward, arriving = _reference_bytes(setup, groups, local, accumulated=accumulated)
        return rank_state(
            part,
            inner,
            allocations,
            trained=trained,
            local=local,
            optimizer_on_device=not on_host,
            loss_forward_bytes=loss_forward,
            loss_backward_bytes=loss_backward,
            regathered_bytes=groups.wide_root if setup.reshard_after_forward else 0,
            reference_forward_bytes=reference_forward,
            arriving_bytes=arriving,
            holes_bytes=_holes(setup, groups),
            host_bytes=_host_bytes(model, setup, weights, local) if on_host else 0,
        )

    def _expert_parallel_state(self, part: RankPart, setup: TrainSetup, *, accumulated: bool) -> RankState:
        """The state where experts are distributed: the rest of the model sharded over all ranks, they in their own
        groups."""
        inner, rest = self.computes(setup), without_experts(part.model)
        share, groups = share_of(part.model, replicas(setup)), gathered_groups(rest, inner, setup.shards)
        around = gathered_groups(moe_layers_without_experts(part.model), inner, setup.shards).layer
        trained, outer = part_trained(rest, inner), _shard(rest, groups, setup)
        local = replace(outer, num=outer.num + share.stored, largest=max(outer.largest, share.largest))
        allocations = [weight_allocation(f"weights / {setup.shards}", SIZE_BYTES[local.dtype] * local.num)]
        allocations += gathered_with_experts(rest, groups, around, share, inner)
        if rest.tied:  # transformers wraps both ends of the tie
            allocations.append(weight_allocation("tied table, gathered twice", groups.tail, *COMPUTE))
        allocations += _reducing(rest, groups, trained, local, setup, halves=2, keep=False, accumulated=accumulated)
        if accumulated and setup.defers_reduction:
            allocations += _waiting_gradients(
                rest, setup, trained, local, expert_elements=share.stored * share.replicas
            )
        else:
            allocations += _sharded_gradients(groups, local, setup.shards, accumulated, expert_elements=share.layer)
        left = SIZE_BYTES[inner.weight_dtype] * share.gathered if share.replicas > 1 else 0
        return rank_state(
            part,
            inner,
            allocations,
            trained=trained,
            local=local,
            stepped=max(outer.num, share.stored),  # the Trainer makes a group of parameters for every mesh
            loss_forward_bytes=left if rest.tied else groups.tail,
            loss_backward_bytes=0 if LOSSES[setup.loss].whole_logits else around,
        )

    def casts_to_half(self, setup: TrainSetup) -> bool:
        return setup.autocast_dtype is not None  # without mixed precision there is no policy

    def refuses(self, model: ModelSpec, setup: TrainSetup) -> str:
        if setup.quantization == "int8":
            return (
                "FSDP cannot shard bitsandbytes' int8 weights, whose matrices and scales live outside the parameter "
                "(bitsandbytes 0.50 Int8Params; huggingface/peft issue 2833)"
            )
        if setup.kbit_fp32_cast and self.casts_to_half(setup):
            return (
                "peft's k-bit cast to fp32 has no effect under FSDP2, whose mixed-precision policy computes in 16 bit "
                "(accelerate 1.15 FullyShardedDataParallelPlugin.set_mixed_precision)"
            )
        if setup.loss == "liger" and setup.method != "full" and not model.tied and setup.fsdp_version == 2:
            return (
                "Liger's fused loss reads the head's weight, which stays cut under peft: the head is its own group, "
                "whose forward nobody calls (liger-kernel 0.8.5 llama.py lce_maybe_trainable_lm_head knows FSDP "
                "version 1 alone; dry-run: mixed torch.Tensor and DTensor)"
            )
        return dtensor_refusal(setup)


HOLES_OF_LAYER, HOLES_OF_TABLE = 0.9, 1 / 3
"""Shares of a layer's weights and of the largest table's that stay behind as holes where groups are gathered and freed
again and again. Fitted to 109 replays of the dry run with expandable segments (95th percentile of the reserved peak
17.4 -> 10.5 %, lowest -27 -> -14 %), held against 61 others (12.9 -> 11.0 %, -23 -> -13 %; 29 November 2026)."""


def _holes(setup: TrainSetup, groups: Groups) -> int:
    if setup.is_split or setup.offload != "none" or not setup.reshard_after_forward:
        return 0
    table = max(groups.embedding, groups.tail, groups.wide_root if LOSSES[setup.loss].whole_logits else 0)
    return int(HOLES_OF_LAYER * groups.layer + HOLES_OF_TABLE * table)


def _block_by_block(
    model: ModelSpec,
    setup: TrainSetup,
    inner: TrainSetup,
    groups: Groups,
    trained: Trained,
    local: Trained,
    accumulated: bool,
) -> list[Allocation]:
    # of a tied table's gradient, before they are one
    halves = 2 + int(halves_stay_apart(model, inner))
    keep = not setup.reshard_after_forward
    head_apart = setup.method != "full" and setup.loss == "chunked"
    allocations = _gathered(model, groups, keep=keep, head_apart=head_apart, loading=_loading(model, setup))
    if setup.copies_reference and keep:
        allocations.append(weight_allocation("reference model, gathered", groups.whole))
    allocations += gathered_head(model, setup, inner.weight_dtype)
    if model.tied and setup.sharded_at_loading:  # transformers wraps both ends of the tie
        allocations.append(weight_allocation("tied table, gathered twice", groups.tail, *COMPUTE))
    allocations += _reducing(model, groups, trained, local, setup, halves=halves, keep=keep, accumulated=accumulated)
    if accumulated and setup.defers_reduction:
        allocations += _waiting_gradients(model, setup, trained, local)
    elif setup.offload != "parameters":
        allocations += _sharded_gradients(groups, local, setup.shards, accumulated)
    return allocations


def _waiting_gradients(
    model: ModelSpec, setup: TrainSetup, trained: Trained, local: Trained, *, expert_elements: int = 0
) -> list[Allocation]:
    """Whole gradients, which wait for the step's last micro-batch in the type of their reduction: Accelerate's 16 bit,
    transformers' own fp32 under autocast, of which a vocabulary-split table's is whole and a tied head's is another, as
    each has a group of its own.

    Source: accelerate 1.15 `Accelerator.no_sync`; transformers 5.23 `Trainer._defer_fsdp_gradient_reduction`; PyTorch
    2.13 `FSDPParam.to_accumulated_grad_if_needed`.
    """
    name, alive = "unsharded gradients", (*COMPUTE, "end")
    if not setup.sharded_at_loading:
        step = local.size_bytes if setup.offload != "parameters" else 0
        return [
            gradient_allocation(name, trained.size_bytes, *alive),
            gradient_allocation(f"gradients / {setup.shards}", step, "step"),
        ]
    size = SIZE_BYTES["fp32" if setup.autocast_dtype is not None else trained.dtype]
    whole = (setup.tensor_degree - (not model.tied)) * model.num_embedding_params + expert_elements
    return [gradient_allocation(name, size * (trained.num + whole), *alive, "step")]


def _own_gather(model: ModelSpec, setup: TrainSetup, inner: TrainSetup, groups: Groups) -> tuple[int, int]:
    """Of a head that TRL gathers by itself, in the type that it is cut in: (bytes beyond those of its group's gather,
    of one tile cast to the product's type)."""
    wide = SIZE_BYTES["fp32" if setup.kbit_fp32_cast else setup.weight_dtype]
    half = SIZE_BYTES[inner.compute_dtype]
    if setup.loss != "chunked" or setup.method == "full" or model.tied or wide == half:
        return 0, 0
    return groups.tail * (wide - half) // half, half * model.hidden_size * min(model.vocab_size, TRL_VOCAB_CHUNK)


def _at_the_loss(model: ModelSpec, setup: TrainSetup, inner: TrainSetup, groups: Groups) -> tuple[int, int]:
    """(bytes of gathered weights and buffers beside the loss's forward, beside its backward)."""
    # under peft the head's group is the head alone, whose forward TRL does not call: it gathers the weight itself, and
    # the last layer's buffer stays
    own_gather = setup.loss == "chunked" and setup.method != "full"
    more, cast = _own_gather(model, setup, inner, groups)
    forward = groups.layer if model.tied or own_gather or not groups.tail else groups.tail
    if setup.copies_reference and setup.reshard_after_forward:  # whose forward and loss come after the policy's
        forward = 2 * groups.whole
    elif (
        setup.asks_reference and setup.method != "full"
    ):  # the tail is there already; TRL's own gather makes a second one
        forward = groups.layer if setup.reshard_after_forward else 0
        forward += groups.tail + more if setup.loss == "chunked" and not model.tied else 0
    # a wide root comes again for the loss's backward, and the last layer is fetched with it
    ahead = not LOSSES[setup.loss].whole_logits or groups.wide_root
    backward = groups.layer if ahead and setup.reshard_after_forward else 0
    return forward + more + cast, backward + more + 2 * cast


def _reference_bytes(setup: TrainSetup, groups: Groups, local: Trained, *, accumulated: bool) -> tuple[int, int]:
    """(gathered weights and buffers while a reference's layers run, beyond what is held at the loss; what more of them
    is there before a layer runs): of the policy what stays gathered, and where its adapters are off a block with its
    buffer, before that two blocks, the embedding or a wide root; of a copy all of it, and the buffer that it came in,
    which lives as long as its forward does: TRL makes one group of it. Kept gathered it is resident.

    Source: trl 1.16 `models/utils.py` prepare_fsdp; PyTorch 2.13 `FSDPState._post_forward` (all_gather_state).
    """
    if setup.copies_reference:
        whole = groups.whole
        if setup.reshard_after_forward:
            return 2 * whole, 0
        # its buffer is there once, before the first gradients and the optimizer's states
        later = state_bytes(local.num, local.dtype, setup.optimizer, matrix_edge_sum=local.edge_sum)
        later += local.size_bytes if accumulated else 0
        return max(0, whole - later), 0
    if not setup.reshard_after_forward:
        return 0, 0
    return 2 * groups.layer, max(groups.layer, 2 * (groups.embedding - groups.layer), groups.wide_root)


def _loading(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the largest table as a rank receives it whole, in the type that it is cut in, with a second part of it
    where the state dict names it twice or it goes to the host. Of weights that train the optimizer's states are more.

    Source: accelerate 1.15 `fsdp2_load_full_state_dict`.
    """
    if setup.method == "full":
        return 0
    wide = SIZE_BYTES["fp32" if setup.kbit_fp32_cast else setup.weight_dtype]
    table = wide * max([table.num_params for table in model.embeddings], default=0)
    return table + (table // setup.shards if model.tied or setup.offload == "parameters" else 0)


def _gathered(model: ModelSpec, groups: Groups, *, keep: bool, head_apart: bool, loading: int) -> list[Allocation]:
    """Gathered weights and all-gather buffers; `keep`: groups stay gathered from their forward to their backward.
    Before the first comes what loading held.

    Forward: a block's weights and the buffer they came in, freed when the next block's weights have been copied out of
    theirs: at that moment two buffers and the new weights. Backward: a block's weights and the buffer of the one
    prefetched, which is the embedding for the first block. Final norm and head stay gathered from the forward to their
    backward, a tied table from the start to the end.

    Source: PyTorch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py` (wait_for_unshard, whose local name keeps
    the buffer before, post_backward, _backward_prefetch), `_fsdp_collectives.py` (foreach_all_gather).
    """
    tied = groups.tail if model.tied else 0
    # under peft the final norm is not found: the head's group arrives with the head, whose forward TRL does not call
    arriving_tail = 0 if head_apart else groups.tail - tied
    ahead = 0 if keep else groups.layer
    unsharded = groups.layers + groups.embedding if keep else 0
    name, buffer = "gathered weights", "all-gather buffer"
    # a table that stays gathered is there beside the block, with the buffers of both
    start = groups.embedding + max(groups.embedding, 2 * groups.layer)
    table = max(groups.embedding, tied)
    start = 2 * (table + groups.layer) if model.tied or keep else start
    start = max(start, groups.root - groups.wide_root + 2 * table)  # the root's buffer goes when the table has come
    arriving = max(2 * groups.layer + max(unsharded, groups.layer), unsharded + groups.layer + 2 * arriving_tail)
    return [
        weight_allocation(name, max(start, loading - groups.root - groups.wide_root), "start"),
        weight_allocation(name, tied + arriving, "gather"),
        weight_allocation(name, tied + max(unsharded, groups.layer), "forward"),
        weight_allocation(buffer, groups.layer, "forward"),
        weight_allocation(name, groups.tail + unsharded, "loss"),
        weight_allocation(name, tied + unsharded, "head"),
        weight_allocation(name, tied + max(unsharded, groups.layer), "first", "turn"),
        weight_allocation(name, tied + groups.layer + (groups.embedding if keep else 0), "last"),
        weight_allocation(buffer, ahead, "head", "first", "turn"),
        weight_allocation(buffer, 0 if keep else max(ahead, groups.embedding), "last"),
        weight_allocation("gathered root group", groups.root, *COMPUTE, "end"),
        weight_allocation(buffer, groups.wide_root, "start"),
    ]


def _sharded_gradients(
    groups: Groups, local: Trained, shards: int, accumulated: bool, *, expert_elements: int = 0
) -> list[Allocation]:
    """This rank's gradients: those of earlier micro-batches all along, or growing with the backward (at the last
    layer's all but its own and the table's); `expert_elements`: elements of a layer's experts, sharded apart."""
    size = SIZE_BYTES[local.dtype]
    if accumulated:
        name, alive = f"accumulated gradients / {shards}", (*COMPUTE, "end", "step")
        return [gradient_allocation(name, local.size_bytes, *alive)]
    name = f"gradients / {shards}"
    late = max(groups.embedding_trained, groups.tail_trained, groups.root_trained)
    missing = size * (groups.layer_trained + late) // shards
    missing += size * expert_elements
    return [
        gradient_allocation(name, max(0, local.size_bytes - missing), "last"),
        gradient_allocation(name, local.size_bytes, "end", "step"),
    ]


def _reducing(
    model: ModelSpec,
    groups: Groups,
    trained: Trained,
    local: Trained,
    setup: TrainSetup,
    *,
    halves: int,
    keep: bool,
    accumulated: bool,
) -> list[Allocation]:
    """Unsharded gradients on their way, and the reduce-scatter's buffers; `keep`: blocks stay gathered.

    A group's gradients are copied into the reduce-scatter's input, reduced into a shard of the same type and cast to
    the sharded type; the input lives until the next group's is made. At the peak of a block's backward only its last
    matrix has a gradient. A tied head's half waits for the table's own. A hybrid shard's groups keep what they
    all-reduced until the backward ends, where it was cast.

    Source: PyTorch 2.13 `_fsdp_collectives.py` (foreach_reduce), `_fsdp_param_group.py` (reduce_scatter_states,
    _all_reduce_state).
    """
    shards, size, local_size = setup.shards, SIZE_BYTES[trained.dtype], SIZE_BYTES[local.dtype]
    in_fp32 = setup.sharded_at_loading and setup.autocast_dtype is not None  # transformers' own policy
    wide = SIZE_BYTES["fp32"] if in_fp32 or setup.trainer.reduces_fp32 else size
    cast = local_size if local_size != wide else 0
    layer, tail = size * groups.layer_trained, size * groups.tail_trained
    table, waiting = (groups.tail_trained, tail) if model.tied else (groups.embedding_trained, 0)

    def bytes_of(elements: int, *, new: bool = accumulated) -> int:
        """Gradients, the reduce-scatter's input, its output, and where it is not counted as a gradient yet its cast."""
        return (size + wide) * elements + (wide + cast * new) * elements // shards

    def to_come(elements: int) -> int:
        """Of this rank's gradients, those that are not there yet."""
        return 0 if accumulated else local_size * elements // shards

    head = bytes_of(groups.layer_trained, new=True) - (groups.layer if keep else 0)
    head = head + waiting if model.tied else max(head, bytes_of(groups.tail_trained, new=True))
    coming = to_come(table)
    end = max(
        bytes_of(groups.layer_trained) + max(groups.embedding, waiting) - coming,
        (groups.tail + halves * tail if model.tied else groups.embedding + size * table) + layer - coming,
        bytes_of(table) - (0 if cast else coming),  # without a cast what is reduced is this rank's gradient
        # a frozen embedding comes back where adapters under checkpointing make its output ask for a gradient
        0 if table else 2 * groups.embedding + layer,
    )
    # from the gradients that are counted, as those of earlier micro-batches are, or not on the device
    apart = cast or accumulated or setup.offload == "parameters"
    own_share = local.num if setup.expert_degree > 1 else trained.num // shards
    reduced = wide * own_share if apart and setup.shards < setup.data_degree else 0
    root_head = min(groups.root_trained, model.num_head_params or model.num_embedding_params)
    if groups.root_trained:  # a wide root, which is gathered no more when its gradients are copied
        of_root = bytes_of(groups.root_trained) - groups.wide_root - to_come(groups.root_trained)
        end = max(end, of_root, size * (groups.root_trained + (halves - 1) * model.tied * root_head) + layer)
    buffer = "reduce-scatter buffer"
    return [
        gradient_allocation("gradients being reduced", max(0, head), "head"),
        gradient_allocation(ONE_GRADIENT, min(size * groups.matrix, layer), "first", "turn", "last"),
        gradient_allocation(buffer, tail, "first"),
        gradient_allocation(buffer, layer + waiting, "turn", "last"),
        gradient_allocation("unsharded gradient of the head", size * root_head, "first", "turn", "last"),
        gradient_allocation("last gradients being reduced", max(0, end), "end"),
        gradient_allocation("all-reduced gradients before the cast", reduced, "last", "end"),
    ]


def _shard(model: ModelSpec, groups: Groups, setup: TrainSetup) -> Trained:
    """One rank's share of what `setup` trains, padding included: rank 0's shard is a full one. Whole modules beside
    adapters stay in their weights' type where nothing is upcast."""
    trained, shards, upcast = part_trained(model, setup), setup.shards, _upcasts(setup)
    return Trained(
        num=-(-(trained.num + trained.copies * upcast + groups.padding[1]) // shards),
        dtype=sharded_dtype(setup),
        copies=0 if upcast else -(-trained.copies // shards),
        copies_dtype="" if upcast else trained.copies_dtype,
        edge_sum=-(-trained.edge_sum // shards),
        largest=-(-trained.largest // shards),
        head=-(-trained.head // shards),
        embeddings=-(-trained.embeddings // shards),
    )


def sharded_dtype(setup: TrainSetup) -> str:
    """Type in which FSDP2 keeps trained parameters, their sharded gradients and states."""
    loaded_dtype = setup.weight_dtype if setup.method == "full" else setup.resolved_adapter_dtype
    return "fp32" if _upcasts(setup) else loaded_dtype


def _upcasts(setup: TrainSetup) -> bool:
    """Whether trained parameters are cut in fp32 whatever they were loaded in.

    Source: accelerate 1.15 `fsdp2_prepare_model` (under mixed precision, but not where 4-bit parameters are present),
    which axolotl 0.21 `monkeypatch/accelerate/fsdp2.py` replaces (patch_accelerate_fsdp2), and transformers' own FSDP2.
    """
    as_loaded = setup.sharded_at_loading or setup.trainer.one_root or setup.autocast_dtype is None
    return not as_loaded and setup.quantization not in ("nf4", "nf4-double")


def _weights(model: ModelSpec, setup: TrainSetup, groups: Groups, local: Trained) -> list[Allocation]:
    """The sharded weights: trained ones in the sharded type, frozen ones as loaded."""
    shards = setup.shards
    name = f"weights / {shards}"
    if setup.method == "full":
        num = model.num_params + groups.padding[1]
        weights = [weight_allocation(name, -(-num * SIZE_BYTES[local.dtype] // shards))]
        if setup.copies_reference:
            weights.append(
                weight_allocation(f"{REFERENCE} / {shards}", -(-num * SIZE_BYTES[setup.weight_dtype] // shards))
            )
        return weights
    loaded = sum(weight_bytes(model, setup).values()) - scales_bytes(model, setup)
    loaded += groups.padding[0] * SIZE_BYTES[setup.weight_dtype]
    return [
        weight_allocation(name, -(-loaded // shards)),
        Allocation(category="adapters", name=f"LoRA matrices / {shards}", size_bytes=local.size_bytes),
    ]


def _host_bytes(model: ModelSpec, setup: TrainSetup, weights: list[Allocation], local: Trained) -> int:
    """One rank's weights and gradients in the host's pinned memory.

    FSDP2 pins the shard of every tensor and its gradient; FSDP1 those of flat groups (each block, and the rest), and a
    gradient beside each, frozen or not.

    Source: PyTorch 2.13 `_fsdp_param.py` _init_sharded_param, `_fsdp_collectives.py` foreach_reduce; `_flat_param.py`
    init_flat_param_attributes (_cpu_grad).
    Not counted: rounding of norms, biases and adapters.
    """
    dtype = local.dtype if setup.method == "full" else setup.weight_dtype
    blocks = [(_matrices(layer.linears, setup, dtype), num) for layer, num in model.layer_counts]
    tables = [(1, table.num_params * SIZE_BYTES[dtype]) for table in model.embeddings]
    tables += _matrices((*model.outer_linears, *([] if model.tied or not model.head else [model.head])), setup, dtype)
    if setup.fsdp_version == 1:
        blocks = [([(1, sum(num * size for num, size in matrices))], num) for matrices, num in blocks]
        tables = [(1, sum(num * size for num, size in tables))]
    held = sum(weight.size_bytes for weight in weights)
    for matrices, repeats in (*blocks, (tables, 1)):
        for num, size in matrices:
            shard = -(-size // setup.shards)
            held += repeats * num * (pinned(shard) - shard)
    return 2 * held if setup.fsdp_version == 1 or setup.method == "full" else held + local.size_bytes


def _matrices(linears: Iterable[LinearSpec], setup: TrainSetup, dtype: str) -> list[tuple[int, int]]:
    """(how many, bytes of each) of the tensors that hold these matrices; a 4-bit one's packed codes."""
    sizes = []
    for linear in linears:
        num = 1 if linear.is_stack else linear.num
        size = SIZE_BYTES[dtype] * linear.in_features * linear.out_features * (linear.num if linear.is_stack else 1)
        if setup.quantized and linear.quantizes:
            size = -(-linear.in_features * linear.out_features // 2)
        sizes.append((num, size))
    return sizes
