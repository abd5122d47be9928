"""What FSDP2 (and ZeRO-3) gathers at once: the communication groups of a model, in bytes and trained elements."""

from collections.abc import Iterable
from functools import lru_cache
from operator import mul

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.states import nf4_bytes
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec
from planner.models.targets import lora_linears, lora_params, lora_rank
from planner.setup import TrainSetup
from planner.setup.allowed import SAVED_EMBEDDINGS, SAVED_HEADS


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Bytes of gathered weights by communication group, and the trained elements among them.

    Attributes:
        layer: the largest block; `layers`: all of them.
        embedding: the table with a group of its own.
        tail: final norm and head (and the table where the head is tied).
        root: the rest; `root_trained`: trained elements of a root that holds the tables and the head.
        matrix: elements of the largest matrix of a block that is trained whole, or of its stacks of experts: their
            gradients are all there when the last of them is made.
        padding: elements that cutting along the first dimension adds to all blocks: of frozen and of trained weights.
    """

    layer: int
    layers: int
    embedding: int
    tail: int
    root: int
    layer_trained: int
    embedding_trained: int
    tail_trained: int
    root_trained: int
    matrix: int
    padding: tuple[int, int]

    @property
    def whole(self) -> int:
        """Bytes of all weights as gathered."""
        return self.layers + self.embedding + self.tail + self.root

    @property
    def wide_root(self) -> int:
        """Bytes of a root that holds the tables and the head, which comes before the first block."""
        return 0 if self.tail or self.embedding else self.root


def gathered_groups(model: ModelSpec, inner: TrainSetup, shards: int) -> Groups:
    """The groups in which Accelerate's FSDP2 gathers weights, in bytes as gathered (ZeRO-3 gathers the same tensors; it
    cuts flat ones: `shards` 1 for no padding).

    FSDP2 cuts along the first dimension and pads it: a stack of 8 experts over 16 ranks, or a LoRA matrix of 16 rows
    over 64, is stored and gathered at twice and four times its size.

    Args:
        inner: the setup whose types are gathered.

    Source: axolotl 0.21 `monkeypatch/accelerate/fsdp2.py`: blocks and the root alone; accelerate 1.15
    `fsdp2_prepare_model`: one group per block, the input embedding alone (with the tail where
    tied), [final norm, head] never resharded after the forward, the root for what is left; PyTorch 2.13
    `_fsdp_param.py` padded_sharded_param_size.
    """
    return _groups(model, inner.replace_trusted(attention="", loss="", checkpointing=0, micro_batch_seqs=1), shards)


def _block(
    layer: LayerSpec, adapted_ones: Iterable[LinearSpec], inner: TrainSetup, shards: int
) -> tuple[int, int, int, int, int]:
    """Of one block (bytes as gathered, elements that train, its largest matrix that is trained whole, what padding adds
    to frozen weights, to trained ones). 4-bit weights travel packed, their scales are never cut."""
    full = inner.method == "full"
    plain = SIZE_BYTES["fp32" if inner.kbit_fp32_cast else inner.weight_dtype]
    size = (sum(norm.num_params for norm in layer.norms) + layer.num_other_params) * plain
    stacks = adapters = rows = 0
    for linear in layer.linears:
        if not inner.quantized or not linear.quantizes:
            size += (linear.num_weights + linear.num_bias) * plain
        else:
            packed = linear.num_weights if inner.quantization == "int8" else -(-linear.num_weights // 2)
            size += packed + linear.num_bias * plain
        if linear.module == "parameter" and linear.num > 1:
            stacks += (padded(linear.num, shards) - linear.num) * linear.in_features * linear.out_features
    size += stacks * plain
    if full:
        whole = (linear.in_features * linear.out_features for linear in layer.linears if linear.module != "parameter")
        matrix = max(0, *whole, sum(linear.num_weights for linear in layer.linears if linear.is_stack))
        return size, layer.num_params + stacks, matrix, 0, stacks
    for linear in adapted_ones:
        ranks = lora_rank(linear, inner.lora_rank) * linear.num
        adapters += lora_params(linear, inner.lora_rank)
        rows += (padded(ranks, shards) - ranks) * linear.in_features
    size += (adapters + rows) * SIZE_BYTES[inner.resolved_adapter_dtype]
    return size, adapters + rows, 0, stacks, rows


@lru_cache(maxsize=512)
def _groups(model: ModelSpec, inner: TrainSetup, shards: int) -> Groups:
    full = inner.method == "full"
    plain = SIZE_BYTES["fp32" if inner.kbit_fp32_cast else inner.weight_dtype]
    adapters = {} if full else {id(layer): linears for layer, _, linears in adapted(model, inner)}
    blocks = [(*_block(layer, adapters.get(id(layer), ()), inner, shards), num) for layer, num in model.layer_counts]
    sizes, trained, matrices, frozen_rows, trained_rows, nums = zip(*blocks, strict=True)
    norm = sum(norm_spec.num_params for norm_spec in model.outer_norms[-1:])
    tables = max((table.num_params for table in model.embeddings), default=0)
    others = model.num_embedding_params - tables
    outer = others + model.num_outer_other_params + sum(norm_spec.num_params for norm_spec in model.outer_norms[:-1])
    outer += sum(linear.num_weights + linear.num_bias for linear in model.outer_linears)
    outer += sum(layer.num_params * num for layer, num in model.idle_layers) + model.num_idle_other_params
    tail = norm + model.num_head_params + (tables if model.tied else 0)
    saved = {*inner.modules_to_save}  # whose copies that train are gathered beside them
    saved_table, saved_head = (
        tables * bool(saved & {*SAVED_EMBEDDINGS}),
        (model.num_head_params or tables) * bool(saved & {*SAVED_HEADS}),
    )
    tail += saved_head + saved_table * model.tied
    root_trained = 0
    if inner.trainer.one_root:
        outer += tail + (0 if model.tied else tables + saved_table)
        root_trained, tail, tables, saved_table = outer if full else 0, 0, 0, 0
    return Groups(
        layer=max(sizes),
        layers=sum(map(mul, nums, sizes)),
        embedding=0 if model.tied else (tables + saved_table) * plain,
        tail=tail * plain,
        root=outer * plain,
        layer_trained=max(trained),
        embedding_trained=tables if full and not model.tied else 0,
        tail_trained=tail if full else 0,
        root_trained=root_trained,
        matrix=max(matrices),
        padding=(sum(map(mul, nums, frozen_rows)), sum(map(mul, nums, trained_rows))),
    )


def padded(rows: int, shards: int) -> int:
    """Rows of a tensor that FSDP2 cuts into `shards` equal parts."""
    return -(-rows // shards) * shards


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
        for linear in layer.linears:
            if linear.module != "parameter":
                elements = linear.in_features * linear.out_features
                total += num * linear.num * (nf4_bytes(elements, double=double) - -(-elements // 2))
    return total
