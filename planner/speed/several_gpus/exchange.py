"""What communication adds to a micro-batch: data-parallel gathers and reductions, tensor splits, hand-overs."""

from typing import NamedTuple

from planner.memory.dtypes import SIZE_BYTES, dtype_policy_of
from planner.memory.engines.fsdp2 import sharded_dtype
from planner.memory.layer_terms import rank_heads
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed.roofline.calibration import LayoutConstants
from planner.speed.several_gpus.collectives import Collectives, Group, group_of
from planner.speed.several_gpus.compute import Micro
from planner.speed.several_gpus.traffic import Traffic, computed, reduces_each

DDP_BUCKET_BYTES = 25 * 1024 * 1024
ZERO_BUCKET_BYTES = 5e8 * 2
"""DeepSpeed's reduce_bucket_size default, 5e8 elements of 16 bits."""
_TENSOR_SUMS = 2
"""All-reduces of one layer, forward, and again backward: behind the attention's and the MLP's row-split matrix."""

_ROW_PASSES = 12
"""Times a dispatch reads or writes its rows in a GPU's own memory, one way: gathered, sorted back, widened for their
sum, beside what routed experts do anyway."""
_REDUCE_BYTES = 2 + 6 * 4
"""Bytes per gradient that a group of one rank reads and writes to reduce it: widened, divided, copied."""


class Exposed(NamedTuple):
    """Seconds that one micro-batch waits: `quiet_s` without the reduction of gradients, `reducing_s` with it."""

    quiet_s: float
    reducing_s: float


def _times_wider(setup: TrainSetup) -> float:
    """How many times the bytes on the wire FSDP2 copies between host and GPU: whole models' shards in their own type,
    cast on the GPU; other engines, and adapters, as many.

    Source: PyTorch 2.13 `_fsdp_param.py` all_gather_inputs, `_fsdp_collectives.py` foreach_reduce (orig_dtype).
    """
    if setup.parallel != "fsdp2" or setup.method != "full":
        return 1.0
    dtypes = dtype_policy_of(computed(setup))
    return SIZE_BYTES[sharded_dtype(setup)] / SIZE_BYTES[dtypes.autocast or dtypes.table]


class DataParallel:
    """Communication of the data-parallel copies: what one micro-batch and one step expose.

    `host_rate` above 0: bytes per second of a GPU's link to its host, through which offloaded weights and gradients
    pass before they are gathered and after they are reduced: under FSDP2 in the type of the shards.
    """

    __slots__ = (
        "_alike", "_collectives", "_host_rate", "_overlap_cost", "_reduces_each",
        "_replicas", "_setup", "_shards", "_traffic",
    )  # fmt: skip

    def __init__(
        self,
        setup: TrainSetup,
        collectives: Collectives,
        traffic: Traffic,
        constants: LayoutConstants,
        *,
        fsdp_1: bool = False,
        host_rate: float = 0.0,
    ) -> None:
        cluster, inner = collectives.cluster, setup.tensor_degree
        self._setup, self._collectives, self._traffic = setup, collectives, traffic
        self._overlap_cost = constants.overlap_cost_fsdp_1 if fsdp_1 else constants.overlap_cost
        self._shards: Group = group_of(cluster, setup.shards if setup.shards > 1 else setup.shardable_ranks, inner)
        self._replicas: Group = group_of(cluster, setup.shardable_ranks // self._shards.size, inner * self._shards.size)
        ways = setup.expert_degree  # ranks that hold the same experts stand that far apart
        self._alike: Group = group_of(cluster, self._shards.size // ways, inner * ways)
        self._reduces_each = reduces_each(setup, fsdp_1=fsdp_1)
        self._host_rate = host_rate / _times_wider(setup) if host_rate else 0.0

    def micro(self, micro: Micro, seqs: int) -> Exposed:
        """Exposed communication of one micro-batch of `seqs` sequences whose compute takes `micro`."""
        parallel = self._setup.parallel
        if self._setup.shardable_ranks == 1 and not self._host_rate:
            return Exposed(0.0, 0.0)
        if parallel == "dp":
            return Exposed(self._one_process(seqs), self._one_process(seqs))
        if parallel in ("zero3", "fsdp2"):
            reducing = self._sharded(micro, True)
            return Exposed(reducing if self._reduces_each else self._sharded(micro, False), reducing)
        reducing = self._reduced(micro)
        return Exposed(reducing if self._reduces_each else 0.0, reducing)

    def step_s(self) -> float:
        """Exposed communication after the optimizer: ZeRO 1 and 2 gather the new weights."""
        if self._setup.parallel not in ("zero1", "zero2"):
            return 0.0
        return self._collectives.all_gather_s(self._traffic.gradient_bytes, self._shards)

    def _reduced(self, micro: Micro) -> float:
        """Gradients in buckets, all-reduced behind the rest of the backward.

        DDP fills 25 MiB; DeepSpeed's stages 1 and 2 fill 5e8 elements and all-reduce them too (each rank then keeps
        its share), which is twice a reduce-scatter's volume; `overlap_comm` is on in the launch files. The last bucket
        has nothing left to hide behind.

        Source: torch 2.13 `nn/parallel/distributed.py`; deepspeed 0.19 `runtime/zero/stage_1_and_2.py` average_tensor
        (use_multi_rank_bucket_allreduce is True).
        """
        traffic = self._traffic
        total = traffic.gradient_bytes
        if total <= 0:
            return 0.0
        bucket = DDP_BUCKET_BYTES if self._setup.parallel == "ddp" else ZERO_BUCKET_BYTES
        count = max(1.0, total / bucket)
        all_s = count * self._collectives.all_reduce_s(total / count, self._shards)
        if self._host_rate:  # each rank copies its share of the gradients to the host
            all_s += total / self._shards.size / self._host_rate
        last = min(max(traffic.last_gradient_bytes, bucket), total)
        last_s = all_s * last / total
        exposed = last_s + max(0.0, all_s - last_s - micro.backward_s * (1.0 - last / total))
        return exposed + self._overlap_cost * max(all_s - exposed, 0.0)

    def _sharded(self, micro: Micro, reduce: bool) -> float:
        """Weights gathered layer by layer one layer ahead, gradients scattered one layer behind.

        Exposed: the root unit and the first layer, whatever a layer's transfer takes longer than its compute, and the
        reductions after the last layer's backward. FSDP2 keeps the root unit gathered until its backward.

        Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py` (implicit prefetch in the forward,
        explicit one in the backward); Zhao et al. 2023, PyTorch FSDP, section 3.3, arXiv:2304.11277.
        """
        traffic, setup = self._traffic, self._setup
        layers = max(traffic.layers, 1)
        gather, root = self._gather_s(traffic.layer_bytes), self._gather_s(traffic.root_bytes)
        scatter = self._scatter_s(traffic.layer_gradient_bytes, self._shards) if reduce else 0.0
        scatter_root = self._scatter_s(traffic.root_gradient_bytes, self._shards) if reduce else 0.0
        if traffic.expert_bytes:
            gather += self._collectives.all_gather_s(traffic.expert_bytes, self._alike)
            scatter += self._scatter_s(traffic.expert_gradient_bytes, self._alike) if reduce else 0.0
        regather = gather if setup.reshard_after_forward else 0.0
        root_again = root if setup.parallel == "zero3" else 0.0
        forwards = 1 + (setup.extra_forwards if setup.reshard_after_forward else 0)
        forward = root + forwards * (gather + (layers - 1) * max(0.0, gather - micro.forward_s / layers))
        backward = root_again + regather + (layers - 1) * max(0.0, regather + scatter - micro.backward_s / layers)
        exposed = forward + backward + scatter + scatter_root
        total = root + root_again + layers * (forwards * gather + regather + scatter) + scatter_root
        return exposed + self._overlap_cost * max(total - exposed, 0.0)

    def _gather_s(self, size_bytes: float) -> float:
        """All-gather of a unit, after its share came from the host where weights are offloaded."""
        seconds = self._collectives.all_gather_s(size_bytes, self._shards)
        if self._host_rate and self._setup.offload == "parameters":
            seconds += size_bytes / self._shards.size / self._host_rate
        return seconds

    def _scatter_s(self, size_bytes: float, group: Group) -> float:
        """Reduce-scatter within the shard group, then an all-reduce of the share over its replicas (hybrid shard), then
        its copy to the host where the optimizer is there."""
        share = size_bytes / group.size
        seconds = self._collectives.all_gather_s(size_bytes, group) + self._collectives.all_reduce_s(
            share, self._replicas
        )
        return seconds + (share / self._host_rate if self._host_rate else 0.0)

    def _one_process(self, seqs: int) -> float:
        """nn.DataParallel: weights to every GPU before each forward, logits and gradients back to GPU 0, not hidden.

        Source: torch 2.13 `nn/parallel/data_parallel.py` (replicate, gather), `_functions.py` Broadcast (its backward
        adds the gradients up on GPU 0).
        """
        traffic, setup = self._traffic, self._setup
        logits = setup.data_degree * seqs * setup.seq_len_tokens * traffic.logit_bytes
        seconds = self._collectives.send_s(traffic.weight_bytes + traffic.gradient_bytes, self._shards)
        return seconds + self._collectives.all_gather_s(logits, self._shards)


def tensor_s(part: ModelSpec, setup: TrainSetup, collectives: Collectives, seqs: int) -> tuple[float, float]:
    """Forward and backward seconds of tensor parallelism's all-reduces in one micro-batch; none of them is hidden.

    Four per layer, [tokens, hidden] each; recomputed layers repeat the forward's two. The gathered head adds its
    logits, forward, and the gradient of its input, backward. Sequence parallelism sends as much: each all-reduce is a
    reduce-scatter behind the split matrices and an all-gather before the next; the embeddings' output is scattered and
    the head's input gathered.

    Source: Shoeybi et al. 2019, Megatron-LM, section 3, arXiv:1909.08053.
    """
    if setup.tensor_degree == 1:
        return 0.0, 0.0
    group = group_of(collectives.cluster, setup.tensor_degree)
    tokens = seqs * setup.seq_len_tokens
    size = SIZE_BYTES[dtype_policy_of(computed(setup)).compute]
    all_reduce = collectives.all_reduce_s(tokens * part.hidden_size * size, group)
    recomputed_layers = -(-part.num_layers // setup.checkpointing) if setup.checkpointing else 0
    forward = _TENSOR_SUMS * part.num_layers * all_reduce
    backward = _TENSOR_SUMS * (part.num_layers + recomputed_layers) * all_reduce
    if setup.stream_degree > 1:
        return forward + all_reduce, backward + all_reduce
    if part.head is not None and not part.tied:
        logits = tokens * part.head.out_features * setup.tensor_degree * size
        forward += collectives.all_gather_s(logits, group)
        backward += all_reduce
    return forward, backward


def context_s(part: ModelSpec, setup: TrainSetup, collectives: Collectives, seqs: int) -> tuple[float, float]:
    """Forward and backward seconds in which the ranks of a cut sequence exchange what attention needs, in every layer;
    recomputed layers repeat the forward's. None of it is taken to be hidden.

    A ring gathers keys and values, and again in the backward, where their fp32 gradients go round piece by piece.
    Ulysses sends queries, keys, values and results from all to all: every rank keeps one part of each.

    Source: as `planner.memory.layer_terms`; PyTorch's backward sends gradients by `_AllToAllRotater`.
    """
    degree = setup.context_degree
    if degree == 1:
        return 0.0, 0.0
    group = group_of(collectives.cluster, degree)
    inner = computed(setup)
    size, tokens = SIZE_BYTES[dtype_policy_of(inner).attention_input], seqs * inner.seq_len_tokens
    forward = backward = 0.0
    for layer, count in part.layer_counts:
        if layer.attention is None:
            continue
        spec = rank_heads(layer.attention, inner)
        pairs = tokens * spec.num_kv_heads * (spec.head_dim + spec.value_head_dim)
        if setup.uses_ring_attention:
            ahead = collectives.all_gather_s(degree * size * pairs, group)
            back = ahead + degree * collectives.send_s(4 * pairs, group)
        else:
            turned = tokens * spec.num_heads * (spec.head_dim + spec.value_head_dim)
            ahead = back = collectives.all_gather_s(size * (turned + pairs), group)
        forward += count * ahead
        backward += count * back
    recomputed_share = -(-part.num_layers // setup.checkpointing) / part.num_layers if setup.checkpointing else 0
    return forward, backward + recomputed_share * forward


def experts_s(
    part: ModelSpec, setup: TrainSetup, collectives: Collectives, bandwidth: float, seqs: int
) -> tuple[float, float]:
    """Forward and backward seconds in which distributed experts get their tokens, in every layer that has them;
    recomputed layers repeat the forward's. None of it is hidden: the host waits for the counts.

    Two exchanges from all to all, of every token's active copies to the experts and back, each way again in the
    backward; beside them what moves those rows within a GPU's memory, and the experts' weights and gradients through
    their own copies in the type that is computed and reduced. Routing is taken to be balanced.

    Source: as `planner.memory.layer_terms`; the passes are counted in a dry run's events. Nobody measured them.

    Args:
        bandwidth: bytes per second of a GPU's memory.
    """
    if setup.expert_degree == 1:
        return 0.0, 0.0
    group = group_of(collectives.cluster, setup.expert_degree)
    dtypes = dtype_policy_of(computed(setup))
    forward = backward = 0.0
    for layer, count in part.layer_counts:
        if layer.mlp is None or layer.mlp.kind != "moe":
            continue
        rows = seqs * setup.seq_len_tokens * layer.mlp.num_active_experts * part.hidden_size * SIZE_BYTES[dtypes.table]
        once = 2 * collectives.all_gather_s(rows, group) + _ROW_PASSES * rows / bandwidth
        byte_pass_s = sum(linear.num_weights for linear in layer.linears if linear.expert_parallel) / bandwidth
        copied = byte_pass_s * (SIZE_BYTES[setup.weight_dtype] + SIZE_BYTES[dtypes.table])
        reduced = byte_pass_s * _REDUCE_BYTES * (setup.shards == setup.expert_degree)
        forward += count * (once + copied)
        backward += count * (once + copied + reduced)
    recomputed_share = -(-part.num_layers // setup.checkpointing) / part.num_layers if setup.checkpointing else 0
    return forward, backward + recomputed_share * forward


def hand_over_s(setup: TrainSetup, hidden_size: int, collectives: Collectives, seqs: int) -> float:
    """Seconds to pass one micro-batch's hidden states to the next stage or GPU (and its gradient back).

    Stages are the outermost dimension: over several nodes at least one hand-over crosses the network, and the slowest
    one sets the pace; all ranks of the stage in a node send at the same time.
    """
    cluster = collectives.cluster
    stride = 1 if setup.parallel == "device-map" else setup.num_gpus // setup.pipeline_degree
    nodes = 2 if cluster.num_nodes > 1 else 1
    pair = Group(size=2, per_node=2 // nodes, sharing=min(stride, cluster.gpus_per_node))
    size = SIZE_BYTES[dtype_policy_of(computed(setup)).residual]
    return collectives.send_s(seqs * setup.seq_len_tokens * hidden_size * size, pair)
