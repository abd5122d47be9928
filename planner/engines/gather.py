"""What FSDP2 (and ZeRO-3) gathers at once: the communication groups of a model, in bytes and trained elements."""

from dataclasses import dataclass
from functools import lru_cache

from planner.errors import SetupError
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.weights import nf4_bytes
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec
from planner.models.targets import lora_linears, lora_params, lora_rank
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Bytes of gathered weights by communication group, and the trained elements among them.

    Attributes:
        layer: the largest block; `layers`: all of them.
        embedding: the table with a group of its own.
        tail: final norm and head (and the table where the head is tied).
        root: the rest.
        layer_gradients: elements of the largest block's gradients, not padded.
        matrix: elements of the largest trained matrix of a block, stacks of experts left out.
        padding: elements that cutting along the first dimension adds to all blocks: of frozen and of trained weights.
    """

    layer: int
    layers: int
    embedding: int
    tail: int
    root: int
    layer_trained: int
    layer_gradients: int
    embedding_trained: int
    tail_trained: int
    matrix: int
    padding: tuple[int, int]


def gathered_groups(model: ModelSpec, inner: TrainSetup, shards: int) -> Groups:
    """The groups in which Accelerate's FSDP2 gathers weights, in bytes as gathered (ZeRO-3 gathers the same tensors; it
    cuts flat ones: `shards` 1 for no padding).

    FSDP2 cuts along the first dimension and pads it: a stack of 8 experts over 16 ranks, or a LoRA matrix of 16 rows
    over 64, is stored and gathered at twice and four times its size.

    Args:
        inner: the setup whose types are gathered.

    Source: accelerate 1.15 `fsdp2_prepare_model`: one group per block, the input embedding alone (with the tail where
    tied), [final norm, head] never resharded after the forward, the root for what is left; PyTorch 2.13
    `_fsdp_param.py` padded_sharded_param_size.
    """
    return _groups(model, inner.trusted_with(attention="", loss="", checkpointing=0, micro_batch_seqs=1), shards)


@lru_cache(maxsize=512)
def _groups(model: ModelSpec, inner: TrainSetup, shards: int) -> Groups:
    full = inner.method == "full"
    plain = SIZE_BYTES["fp32" if inner.kbit_fp32_cast else inner.weight_dtype]
    adapter_size = SIZE_BYTES[inner.resolved_adapter_dtype]
    adapters = {} if full else {id(layer): linears for layer, _, linears in adapted(model, inner)}
    sizes, trained, gradients, matrices = [0], [0], [0], [0]
    total = frozen_padding = trained_padding = 0
    for layer, num in model.layer_counts:
        own, rows = 0, 0
        for one in adapters.get(id(layer), ()):
            own += lora_params(one, inner.lora_rank)
            ranks = lora_rank(one, inner.lora_rank) * one.num
            rows += (padded(ranks, shards) - ranks) * one.in_features
            matrices.append(ranks * max(one.in_features, one.out_features))
        stacks = sum(
            (padded(one.num, shards) - one.num) * one.in_features * one.out_features
            for one in layer.linears
            if one.module == "parameter" and one.num > 1
        )
        size = _layer_bytes(layer, inner, plain) + stacks * plain + (own + rows) * adapter_size
        sizes.append(size)
        trained.append(layer.num_params + stacks if full else own + rows)
        gradients.append(layer.num_params if full else own)
        if full:
            matrices += [one.in_features * one.out_features for one in layer.linears if one.module != "parameter"]
        total += num * size
        frozen_padding += 0 if full else num * stacks
        trained_padding += num * (stacks if full else rows)
    norm = sum(one.num_params for one in model.outer_norms[-1:])
    tables = max((table.num_params for table in model.embeddings), default=0)
    others = model.num_embedding_params - tables
    outer = others + model.num_outer_other_params + sum(one.num_params for one in model.outer_norms[:-1])
    outer += sum(one.num_weights + one.num_bias for one in model.outer_linears)
    outer += sum(layer.num_params * num for layer, num in model.idle_layers) + model.num_idle_other_params
    tail = norm + model.num_head_params + (tables if model.tied else 0)
    return Groups(
        layer=max(sizes),
        layers=total,
        embedding=0 if model.tied else tables * plain,
        tail=tail * plain,
        root=outer * plain,
        layer_trained=max(trained),
        layer_gradients=max(gradients),
        embedding_trained=tables if full and not model.tied else 0,
        tail_trained=tail if full else 0,
        matrix=max(matrices),
        padding=(frozen_padding, trained_padding),
    )


def padded(rows: int, shards: int) -> int:
    """Rows of a tensor that FSDP2 cuts into `shards` equal parts."""
    return -(-rows // shards) * shards


def _layer_bytes(layer: LayerSpec, inner: TrainSetup, plain: int) -> int:
    """Bytes of one block's gathered weights: 4-bit weights travel packed, their scales are never cut."""
    total = (sum(norm.num_params for norm in layer.norms) + layer.num_other_params) * plain
    for one in layer.linears:
        if not inner.quantized or not one.quantizes:
            total += (one.num_weights + one.num_bias) * plain
        else:
            packed = one.num_weights if inner.quantization == "int8" else -(-one.num_weights // 2)
            total += packed + one.num_bias * plain
    return total


def adapted(model: ModelSpec, setup: TrainSetup) -> tuple[tuple[LayerSpec, int, tuple[LinearSpec, ...]], ...]:
    """The adapted matrices of a part's layers; none where explicit targets match no module of it."""
    try:
        return lora_linears(model, setup.lora_targets)
    except SetupError:
        return ()


def scales_bytes(model: ModelSpec, setup: TrainSetup) -> int:
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
