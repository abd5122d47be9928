"""What the optimizer updates: the parameters of full fine-tuning or of LoRA, and which matrices carry adapters."""

from dataclasses import dataclass, replace
from functools import lru_cache

from planner.memory.dtypes import SIZE_BYTES
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears, lora_params, lora_rank
from planner.setup import SAVED_EMBEDDINGS, SAVED_HEADS, TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the optimizer updates: how many parameters, of what type, and the shapes that matter."""

    num: int
    dtype: str
    edge_sum: int
    largest: int
    head: int
    embeddings: int
    stacked: int = 0
    """Of `num`: adapters of stacked experts, which peft itself casts to the base's type."""
    copies: int = 0
    copies_dtype: str = ""
    """Beside `num`: whole modules trained as copies, where their type is another than the adapters'."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the trained parameters, and of their gradients."""
        return self.num * SIZE_BYTES[self.dtype] + self.copies_bytes

    @property
    def copies_bytes(self) -> int:
        """Bytes of the copies that have a type of their own."""
        return self.copies * SIZE_BYTES[self.copies_dtype] if self.copies else 0

    @property
    def outer_bytes(self) -> int:
        """Size of one element of a trained embedding or head."""
        return SIZE_BYTES[self.copies_dtype or self.dtype]


def trained_parameters(model: ModelSpec, setup: TrainSetup) -> Trained:
    """The trained parameters of full fine-tuning (all of them) or of LoRA (A [rank, in] and B [out, rank] per matrix).

    Source: Hu et al. 2021, LoRA, section 4.1, https://arxiv.org/abs/2106.09685.
    """
    if setup.method == "full":
        return _trained_full(model, setup.weight_dtype)
    adapters = _trained_lora(model, setup.lora_targets, setup.lora_rank, setup.resolved_adapter_dtype)
    return with_copies(adapters, model, setup) if setup.modules_to_save else adapters


def with_copies(adapters: Trained, model: ModelSpec, setup: TrainSetup) -> Trained:
    """The adapters with the embedding and head that peft trains whole beside them.

    Each is a copy of its own, even of a tied pair, in the type of its weights; TRL casts what is trained beside a
    quantized base to bf16, adapters and copies alike.

    Source: peft 0.21 `utils/other.py` ModulesToSaveWrapper (deepcopy), `tuners/tuners_utils.py` cast_adapter_dtype
    (adapters alone); trl 1.16 `SFTTrainer.__init__`.
    """
    dtype = "fp32" if setup.kbit_fp32_cast else setup.weight_dtype
    if setup.quantized and setup.stack == "trl":
        dtype = adapters.dtype
    names = set(setup.modules_to_save)
    tables = max((one.num_params for one in model.embeddings), default=0) if names & set(SAVED_EMBEDDINGS) else 0
    head = 0
    if names & set(SAVED_HEADS) and model.head is not None:
        head = model.head.num_weights + model.head.num_bias
    edges = (model.vocab_size + model.hidden_size) * (bool(tables) + bool(head))
    apart = dtype != adapters.dtype
    return replace(
        adapters,
        head=head,
        embeddings=tables,
        largest=max(adapters.largest, tables, head),
        edge_sum=adapters.edge_sum + edges,
        num=adapters.num if apart else adapters.num + tables + head,
        copies=tables + head if apart else 0,
        copies_dtype=dtype if apart else "",
    )


@lru_cache(maxsize=256)
def _trained_full(model: ModelSpec, dtype: str) -> Trained:
    matrices = [(one, num) for layer, num in model.layer_counts for one in layer.linears]
    edges = sum(num * one.num * (one.in_features + one.out_features) for one, num in matrices)
    idle = sum(layer.num_params * num for layer, num in model.idle_layers) + model.num_idle_other_params
    tensors = [
        one.in_features * one.out_features * (one.num if one.module == "parameter" else 1) for one, _ in matrices
    ]
    return Trained(
        num=model.num_params - idle,  # a tower that sees no text token gets no gradient
        dtype=dtype,
        edge_sum=edges + sum(table.num_rows + table.dim for table in model.embeddings),
        largest=max([*tensors, *(table.num_params for table in model.embeddings), model.num_head_params]),
        head=model.head.num_weights if model.head is not None else 0,
        embeddings=max((table.num_params for table in model.embeddings), default=0),
    )


@lru_cache(maxsize=256)
def _trained_lora(model: ModelSpec, targets: str | tuple[str, ...], rank: int, dtype: str) -> Trained:
    num = edges = largest = stacked = 0
    for _, repeats, linears in lora_linears(model, targets):
        for one in linears:
            real = lora_rank(one, rank)
            num += repeats * lora_params(one, rank)
            edges += repeats * one.num * (one.in_features + one.out_features + 2 * real)
            experts = one.num if one.module == "parameter" else 1
            stacked += repeats * lora_params(one, rank) if one.module == "parameter" else 0
            largest = max(largest, experts * real * max(one.in_features, one.out_features))
    return Trained(num=num, dtype=dtype, edge_sum=edges, largest=largest, head=0, embeddings=0, stacked=stacked)


@lru_cache(maxsize=256)
def adapted_names(model: ModelSpec, targets: str | tuple[str, ...] | None) -> tuple[frozenset[str], ...]:
    """Names of the adapted matrices for each kind of layer, in the order of `layer_kinds`."""
    if targets is None:
        return tuple(frozenset() for _ in model.layer_kinds)
    names: dict[int, frozenset[str]] = {}
    for layer, _, linears in lora_linears(model, targets):
        names[id(layer)] = frozenset(one.name for one in linears)
    return tuple(names.get(id(layer), frozenset()) for layer in model.layer_kinds)
