"""`RankPart`: the part of the model that the GPUs of one kind hold, as a `ModelSpec` of its own.

Pipeline stages and device-map parts are cut by layers, tensor shards by columns and rows; the one-GPU term functions
then run on the part as they are.
"""

from dataclasses import replace
from functools import lru_cache

from planner.core.records import dataclass
from planner.models.spec import AttentionSpec, LinearSpec, ModelSpec
from planner.options.objectives import Head
from planner.setup import TrainSetup

_COLUMNS = frozenset({"q", "k", "v", "qkv", "gate", "up", "gate_up"})
_ROWS = frozenset({"o", "down"})


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What `num_ranks` GPUs of the job hold alike.

    Attributes:
        name: for people ("every rank", "stage 2 of 4", "GPU 0 of 4").
        model: the part as a model of its own.
        in_flight: micro-batches whose activations are alive at once.
        first: whether it holds the embeddings and sees token ids.
        last: whether it holds the head and the loss.
        follower: nn.DataParallel's GPUs beside the first: a copy of the weights for one step, no optimizer.
        stage: its place among the stages, from 0.
    """

    name: str
    num_ranks: int
    model: ModelSpec
    in_flight: int = 1
    first: bool = True
    last: bool = True
    follower: bool = False
    stage: int = 0


def rank_parts(model: ModelSpec, setup: TrainSetup) -> tuple[RankPart, ...]:
    """The distinct parts of a job, in the order of the layers; one part where every GPU holds the same.

    Layers are cut as evenly as they go, earlier stages take the remainder (the last also holds the head and the loss).
    Embeddings stay on the first part, final norm and head on the last; a tied head becomes a copy of the table there.

    Source: PyTorch 2.13 `torch/distributed/pipelining`; accelerate 1.15 `infer_auto_device_map` (cuts by size, which is
    by layers where they are alike).
    """
    model = headed(model, setup.objective_spec.head)
    stages = setup.num_gpus if setup.parallel == "device-map" else setup.pipeline_degree
    stages = min(stages, model.num_layers)
    if setup.parallel == "dp":
        return (RankPart(name="GPU 0", num_ranks=1, model=model),)
    if stages == 1:
        piece = expert_shard(tensor_shard(model, setup.tensor_degree), setup.expert_degree)
        return (RankPart(name="every rank", num_ranks=setup.num_gpus, model=piece),)
    parts, start, device_map = [], 0, setup.parallel == "device-map"
    for stage, size in enumerate(stage_sizes(model.num_layers, stages)):
        piece = tensor_shard(_stage(model, start, size, stage == 0, stage == stages - 1), setup.tensor_degree)
        parts.append(
            RankPart(
                name=f"GPU {stage} of {stages}" if device_map else f"stage {stage + 1} of {stages}",
                num_ranks=1 if device_map else setup.num_gpus // stages,
                model=piece,
                in_flight=1 if device_map else in_flight(setup, stage, setup.accumulation_steps),
                first=stage == 0,
                last=stage == stages - 1,
                stage=stage,
            )
        )
        start += size
    return tuple(parts)


def headed(model: ModelSpec, head: Head) -> ModelSpec:
    """The model with what an objective puts on its layers: its own head, one number per token ("score"), or nothing.

    Source: transformers 5.23 `GenericForSequenceClassification`: `score`, a matrix without bias, never quantized; the
    embeddings stay, tied or not.
    """
    return model if head == "vocabulary" else _other_head(model, scores=head != "none")


@lru_cache(maxsize=256)
def _other_head(model: ModelSpec, *, scores: bool) -> ModelSpec:
    score = LinearSpec(name="score", role="other", in_features=model.hidden_size, out_features=1)
    return replace(model, head=score if scores else None, tied=False, logit_softcap=False)


def stage_sizes(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as they go; earlier stages take the remainder."""
    least, more = divmod(num_layers, stages)
    return tuple(least + (stage < more) for stage in range(stages))


def followers(model: ModelSpec, setup: TrainSetup) -> tuple[RankPart, ...]:
    """nn.DataParallel's GPUs beside the first; their memory is never the largest."""
    if setup.parallel != "dp":
        return ()
    return (RankPart(name="every other GPU", num_ranks=setup.num_gpus - 1, model=model, follower=True),)


def in_flight(setup: TrainSetup, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations stage `stage` (from 0) holds at once, at most.

    GPipe runs all forwards before the first backward: every one of them. 1F1B starts backwards as soon as the last
    stage has a loss: stage s of p holds min(m, p - s).

    Source: Huang et al. 2019, GPipe, section 2.3, https://arxiv.org/abs/1811.06965; Narayanan et al. 2021,
    Megatron-LM, section 2.2, https://arxiv.org/abs/2104.04473; PyTorch 2.13 `pipelining/schedules.py` Schedule1F1B
    (warm-up of min(m, p - s) micro-batches).
    """
    if setup.pipeline_schedule == "gpipe":
        return micro_batches
    return min(micro_batches, setup.pipeline_degree - stage)


@lru_cache(maxsize=256)
def _stage(model: ModelSpec, start: int, size: int, first: bool, last: bool) -> ModelSpec:
    """`size` layers from `start` on, with what stands before the first or behind the last."""
    order = model.layer_order[start : start + size]
    used = sorted(set(order))
    index = {kind: position for position, kind in enumerate(used)}
    return replace(
        model,
        layer_kinds=tuple(model.layer_kinds[kind] for kind in used),
        layer_order=tuple(index[kind] for kind in order),
        embeddings=model.embeddings if first else (),
        head=model.head if last else None,
        tied=model.tied and first and last,
        outer_linears=model.outer_linears if first else (),
        outer_norms=model.outer_norms if last else (),
        num_outer_other_params=model.num_outer_other_params if first else 0,
        idle_layers=model.idle_layers if first else (),
        num_idle_other_params=model.num_idle_other_params if first else 0,
    )


def tensor_shard(model: ModelSpec, degree: int) -> ModelSpec:
    """One rank's share of a model under tensor parallelism: column-split q, k, v, gate, up and head, row-split o and
    down, the table split by vocabulary; norms whole.

    The head's output is gathered: every rank holds all logits. Fewer key-value heads than ranks are repeated, one per
    rank. A split table's gradient is whole all the same (`planner.memory.engines.splits`).

    Source: Shoeybi et al. 2019, Megatron-LM, section 3, https://arxiv.org/abs/1909.08053; transformers 5.23
    `base_model_tp_plan` ("colwise", "rowwise"), `_tp_plan` of the head ("colwise_gather_output") and of every
    `embed_tokens` ("embedding_rowwise", distributed/mixin.py).
    Not counted: sequence and loss parallelism, which those plans do not use (`TrainSetup.stream_degree`).
    """
    return model if degree == 1 else _tensor_shard(model, degree)


def expert_shard(model: ModelSpec, degree: int) -> ModelSpec:
    """One rank's share of a model whose experts are distributed: an even number of each layer's, whole; all else as it
    is.

    Source: transformers 5.23 `distributed/expert_parallel.py` MoEParamShard ("grouped_gemm").
    """
    return model if degree == 1 else _expert_shard(model, degree)


@lru_cache(maxsize=256)
def _expert_shard(model: ModelSpec, degree: int) -> ModelSpec:
    kinds = tuple(
        replace(
            layer,
            linears=tuple(
                replace(linear, num=linear.num // degree, expert_parallel=True) if linear.is_stack else linear
                for linear in layer.linears
            ),
        )
        for layer in model.layer_kinds
    )
    return replace(model, layer_kinds=kinds)


@lru_cache(maxsize=256)
def _tensor_shard(model: ModelSpec, degree: int) -> ModelSpec:
    """The share at a degree above 1; a cache must not answer degree 1 with an equal model's object."""

    def cut(size: int, ways: int = degree) -> int:
        return -(-size // ways)

    def of_attention(spec: AttentionSpec | None) -> AttentionSpec | None:
        if spec is None:
            return None
        return replace(spec, num_heads=cut(spec.num_heads), num_kv_heads=max(1, spec.num_kv_heads // degree))

    def of_linear(linear: LinearSpec, attention: AttentionSpec | None) -> LinearSpec:
        if linear.role in _COLUMNS:
            of_keys = attention if linear.role in ("k", "v") else None
            ways = min(degree, of_keys.num_kv_heads) if of_keys else degree
            return replace(linear, out_features=cut(linear.out_features, ways))
        return replace(linear, in_features=cut(linear.in_features)) if linear.role in _ROWS else linear

    kinds = []
    for layer in model.layer_kinds:
        mlp = layer.mlp and replace(
            layer.mlp,
            intermediate_size=cut(layer.mlp.intermediate_size),
            shared_intermediate_size=cut(layer.mlp.shared_intermediate_size),
        )
        shard = replace(
            layer,
            linears=tuple(of_linear(linear, layer.attention) for linear in layer.linears),
            norms=tuple(replace(norm, rows_per_token=cut(norm.rows_per_token)) for norm in layer.norms),
            attention=of_attention(layer.attention),
            cross_attention=of_attention(layer.cross_attention),
            mlp=mlp,
        )
        kinds.append(shard)
    head = model.head
    if head is not None and not model.tied:
        head = replace(head, out_features=cut(head.out_features))
    tables = tuple(
        replace(table, num_rows=cut(table.num_rows)) if table.num_rows == model.vocab_size else table
        for table in model.embeddings
    )
    return replace(model, layer_kinds=tuple(kinds), head=head, embeddings=tables)
