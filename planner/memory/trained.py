"""What training updates: how many parameters of which type and shapes, of full fine-tuning and of each adapter."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.memory.dtypes import SIZE_BYTES, copies_dtype
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec, NormSpec
from planner.models.targets import Adapted, lora_linears, lora_params, lora_rank
from planner.options.adapters import ADAPTERS, TOKEN_FORMS, Adapter
from planner.setup import TrainSetup
from planner.setup.allowed import SAVED_EMBEDDINGS, SAVED_HEADS

UNPAGED = 100_000
"""Elements of a tensor from which on a paged optimizer pages its states; the scales of 8-bit states it never does.
Source: bitsandbytes 0.50 `optim/optimizer.py` get_state_buffer, `Optimizer2State.init_state` (absmax1, absmax2)."""


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
    """Not in `num`: whole modules trained as copies, where their type is another than the adapters'."""
    copies_dtype: str = ""
    wide: int = 0
    """Of both: elements of embedding tables, whose 8-bit optimizer states the stack keeps in 32 bits."""
    small: int = 0
    """Of `num`: elements of adapters below UNPAGED elements."""
    idle: "Trained | None" = None
    """Of them: adapters that no gradient reaches, as of an image encoder on text."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the trained parameters, and of their gradients."""
        return self.num * SIZE_BYTES[self.dtype] + self.copies * SIZE_BYTES[self.copies_dtype or self.dtype]

    @property
    def reached(self) -> "Trained":
        """Those that a gradient reaches: of the others an optimizer makes no states."""
        idle = self.idle
        if idle is None:
            return self
        edges, small = self.edge_sum - idle.edge_sum, self.small - idle.small
        return replace(self, num=self.num - idle.num, edge_sum=edges, small=small, idle=None)

    @property
    def outer_bytes(self) -> int:
        """Size of one element of a trained embedding or head."""
        return SIZE_BYTES[self.copies_dtype or self.dtype]


def trained_parameters(model: ModelSpec, setup: TrainSetup) -> Trained:
    """The trained parameters of full fine-tuning (all of them) or of LoRA (A [rank, in] and B [out, rank] per matrix).

    Source: Hu et al. 2021, LoRA, section 4.1, https://arxiv.org/abs/2106.09685.
    """
    whole = model
    if setup.trained_layers:
        model = layers_alone(model, setup.trained_layers)
    if setup.frozen_encoder and model.is_encoder_decoder:
        model = decoder_alone(model)
    if setup.method == "full":
        dtype = "fp32" if setup.widens_trained else setup.weight_dtype
        return _trained_full(model, dtype, setup.trainer.wide_embedding_states, setup.images is not None)
    shape = setup.lora_targets, setup.lora_rank, setup.resolved_adapter_dtype
    if setup.kind.like_lora:
        adapters = _trained_lora(model, *shape, setup.images is not None)
    else:
        adapters = _trained_kind(model, setup.adapter, *shape)
    return with_copies(adapters, whole, setup) if setup.modules_to_save else adapters


Layers = int | tuple[int, ...]
"""`TrainSetup.trained_layers`."""


def layer_numbers(selection: Layers, full: int) -> Sequence[int]:
    """Numbers of the layers that train, of so many.

    Raises:
        SetupError: a number that no layer has.
    """
    if isinstance(selection, tuple):
        if selection[-1] >= full:
            raise SetupError(f"trained_layers names layer {selection[-1]}, the last of {full} has number {full - 1}")
        return selection
    return range(min(full, -selection)) if selection < 0 else range(max(0, full - (selection or full)), full)


@lru_cache(maxsize=256)
def layers_alone(model: ModelSpec, selection: Layers) -> ModelSpec:
    """The layers that train alone: nothing before them, between them or behind.

    Source: LLaMA-Factory 0.9 `model/adapter.py` _setup_freeze_tuning (whatever is no trained layer is frozen,
    embeddings, norm and head too); peft 0.21 LoraConfig.layers_to_transform.
    """
    order = [model.layer_order[number] for number in layer_numbers(selection, model.num_layers)]
    used = sorted(set(order))
    layers = tuple(model.layer_kinds[kind] for kind in used)
    return replace(
        model,
        layer_kinds=layers,
        layer_order=tuple(used.index(kind) for kind in order),
        embeddings=(),
        head=None,
        tied=False,
        outer_linears=(),
        outer_norms=(),
        num_outer_other_params=0,
        idle_layers=(),
        num_idle_other_params=0,
    )


@lru_cache(maxsize=256)
def parted(model: ModelSpec, selection: Layers) -> ModelSpec:
    """The model whose layers that do not train are kinds of their own, behind the others; itself where all do."""
    numbers = set(layer_numbers(selection, model.num_layers))
    order = tuple(kind if place in numbers else -1 - kind for place, kind in enumerate(model.layer_order))
    frozen = sorted({-1 - kind for kind in order if kind < 0})
    if not frozen:
        return model
    place = {-1 - kind: len(model.layer_kinds) + number for number, kind in enumerate(frozen)}
    kinds = (*model.layer_kinds, *(replace(model.layer_kinds[kind], frozen=True) for kind in frozen))
    return replace(model, layer_kinds=kinds, layer_order=tuple(place.get(kind, kind) for kind in order))


def frozen_below(model: ModelSpec, setup: TrainSetup) -> int:
    """Layers below the first that trains, which keep nothing for the backward: it ends above them. With checkpointing
    transformers makes the embeddings ask for gradients, and it goes through all layers.

    Source: transformers 5.23 `PreTrainedModel.activation_checkpointing_enable` (enable_input_require_grads).
    """
    if model.is_encoder_decoder and not _reaches_encoder(model, setup):
        return model.num_encoder_layers
    trains_embedding = bool({*setup.modules_to_save} & {*SAVED_EMBEDDINGS})
    if not setup.trained_layers or trains_embedding or (setup.checkpointing and not whole_where_frozen(setup)):
        return 0
    return layer_numbers(setup.trained_layers, model.num_layers)[0]


def whole_where_frozen(setup: TrainSetup) -> bool:
    """Whether layers that do not train run without a checkpoint, whatever the others do."""
    return setup.trainer.checkpoints_trained and bool(setup.trained_layers) and setup.method == "full"


def _reaches_encoder(model: ModelSpec, setup: TrainSetup) -> bool:
    if setup.method == "full" or setup.checkpointing or not setup.kind.adapts_matrices:
        return not setup.frozen_encoder
    names = adapted_names(model, setup.lora_targets)
    kinds = zip(model.layer_kinds, names, strict=True)
    return any(adapted for layer, adapted in kinds if layer.cross_attention is None)


@lru_cache(maxsize=64)
def decoder_alone(model: ModelSpec) -> ModelSpec:
    """What trains where the encoder is frozen (transformers 5.23 `freeze_encoder`): convolutions, its layers, its norm
    and its table are not there."""
    kinds = [layer for layer in model.layer_kinds if layer.cross_attention is not None]
    first = model.layer_kinds.index(kinds[0])
    return replace(
        model,
        layer_kinds=tuple(kinds),
        layer_order=tuple(kind - first for kind in model.layer_order[model.num_encoder_layers :]),
        outer_norms=model.outer_norms[1:],
        num_outer_other_params=0,
        embeddings=tuple(table for table in model.embeddings if not table.frozen),
    )


def with_copies(adapters: Trained, model: ModelSpec, setup: TrainSetup) -> Trained:
    """The adapters with the embedding and head that peft trains whole beside them.

    Each is a copy of its own, even of a tied pair, of the type that `copies_dtype` says.

    Source: peft 0.21 `utils/other.py` ModulesToSaveWrapper (deepcopy), `tuners/tuners_utils.py` cast_adapter_dtype
    (adapters alone).
    """
    dtype = copies_dtype(setup)
    names = set(setup.modules_to_save)
    tables = max((table.num_params for table in model.embeddings), default=0) if names & set(SAVED_EMBEDDINGS) else 0
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
        wide=tables if setup.trainer.wide_embedding_states else 0,
    )


@lru_cache(maxsize=256)
def _trained_full(model: ModelSpec, dtype: str, wide_tables: bool, sees: bool) -> Trained:
    matrices = [(linear, num) for layer, num in model.layer_counts for linear in layer.linears]
    edges = sum(num * linear.num * (linear.in_features + linear.out_features) for linear, num in matrices)
    tensors = [
        linear.in_features * linear.out_features * (linear.num if linear.module == "parameter" else 1)
        for linear, _ in matrices
    ]
    return Trained(
        num=model.num_params
        - _num_idle(model, sees)
        - sum(table.num_params for table in model.embeddings if table.frozen),
        dtype=dtype,
        edge_sum=edges + sum(table.num_rows + table.dim for table in model.embeddings),
        largest=max([*tensors, *(table.num_params for table in model.embeddings), model.num_head_params]),
        head=model.head.num_weights if model.head is not None else 0,
        embeddings=max((table.num_params for table in model.embeddings), default=0),
        wide=sum(table.num_params for table in model.embeddings) if wide_tables else 0,
    )


def _unreached(model: ModelSpec, sees: bool) -> list[tuple[LayerSpec, int]]:
    """Layers that see no picture and hear nothing, and get no gradient; Gemma 3n's embedders look up text too."""
    return [
        (layer, num)
        for layer, num in model.idle_layers
        if layer.kind != "embedder" and (not sees or "audio" in layer.path)
    ]


def unused_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of what trains and gets no gradient, as an encoder of pictures, or adapters on it, on text alone: DDP has
    buckets for it, and stops in the second step unless it looks for such parameters.

    Source: PyTorch 2.13 `nn/parallel/distributed.py` find_unused_parameters; trl 1.16 `SFTTrainer.__init__`.
    """
    if setup.method != "full":
        idle = trained_parameters(model, setup).idle
        return idle.size_bytes if idle is not None else 0
    if setup.trained_layers or setup.frozen_encoder:
        return 0
    return (
        _num_idle(model, setup.images is not None) * SIZE_BYTES["fp32" if setup.widens_trained else setup.weight_dtype]
    )


def _num_idle(model: ModelSpec, sees: bool) -> int:
    idle = sum(layer.num_params * num for layer, num in _unreached(model, sees))
    return idle + (0 if sees else model.num_idle_other_params)


@lru_cache(maxsize=256)
def _trained_lora(model: ModelSpec, targets: str | tuple[str, ...], rank: int, dtype: str, sees: bool) -> Trained:
    unreached = {id(layer) for layer, _ in _unreached(model, sees)}
    adapted = lora_linears(model, targets)
    idle = [group for group in adapted if id(group[0]) in unreached]
    adapters = _lora_matrices(adapted, rank, dtype)
    return replace(adapters, idle=_lora_matrices(idle, rank, dtype)) if idle else adapters


def _lora_matrices(adapted: Sequence[tuple[LayerSpec, int, Sequence[LinearSpec]]], rank: int, dtype: str) -> Trained:
    num = edges = largest = stacked = small = 0
    for _, repeats, linears in adapted:
        for linear in linears:
            real = lora_rank(linear, rank)
            for edge in (linear.in_features, linear.out_features) if linear.module != "parameter" else ():
                small += repeats * linear.num * real * edge if real * edge < UNPAGED else 0
            num += repeats * lora_params(linear, rank)
            edges += repeats * linear.num * (linear.in_features + linear.out_features + 2 * real)
            experts = linear.num if linear.module == "parameter" else 1
            stacked += repeats * lora_params(linear, rank) if linear.module == "parameter" else 0
            largest = max(largest, experts * real * max(linear.in_features, linear.out_features))
    return Trained(
        num=num, dtype=dtype, edge_sum=edges, largest=largest, head=0, embeddings=0, stacked=stacked, small=small
    )


@lru_cache(maxsize=256)
def _trained_kind(model: ModelSpec, kind: str, targets: str | tuple[str, ...], size: int, dtype: str) -> Trained:
    """The trained parameters of another adapter than LoRA, from the shapes of its tensors."""
    row = ADAPTERS[kind]
    if row.shapes is None:
        shapes = outer_shapes(model, row, size)
    else:
        shapes = [
            shape
            for _, repeats, linears in kind_linears(model, kind, targets)
            for linear in linears
            for shape in row.shapes(linear.in_features, linear.out_features, size, linear.role == "down")
            * (repeats * linear.num)
        ]
    elements = [rows * max(1, columns) for rows, columns in shapes]
    return Trained(
        num=sum(elements),
        dtype=dtype,
        edge_sum=sum(rows + columns for rows, columns in shapes),
        largest=max(elements),
        head=0,
        embeddings=sum(elements) if row.form in TOKEN_FORMS else 0,  # theirs are the last gradients of a backward
    )


def kind_linears(model: ModelSpec, kind: str, targets: str | tuple[str, ...]) -> Adapted:
    """`lora_linears` of another adapter, which adapts modules alone.

    Raises:
        SetupError: the targets reach stacked experts, which are parameters: peft adapts those with LoRA alone.
    """
    targeted = lora_linears(model, targets)
    if any(linear.module == "parameter" for _, _, linears in targeted for linear in linears):
        raise SetupError(
            f"peft adapts the stacked experts of {model.model_id} with LoRA alone, got adapter {kind!r}",
            hint="use --targets attention, or --adapter lora",
        )
    if not ADAPTERS[kind].conv1d and any(linear.module == "conv1d" for _, _, linears in targeted for linear in linears):
        raise SetupError(f"peft's adapter {kind!r} does not take the Conv1D matrices of {model.model_id}")
    return targeted


def outer_shapes(model: ModelSpec, row: Adapter, size: int) -> list[tuple[int, int]]:
    """Shapes of what an adapter trains that adapts no matrices.

    Source: peft 0.21 `tuners/prompt_tuning`, `p_tuning` (three matrices with bias), `prefix_tuning` with
    `utils/other.py` _prepare_prompt_learning_config (all keys and values of a token in one row), `ln_tuning`,
    `trainable_tokens` (one set of rows, also of a tied pair).

    Raises:
        SetupError: virtual tokens before an encoder-decoder's two sequences; norms without weights.
    """
    wide = model.hidden_size
    if row.form in TOKEN_FORMS and model.is_encoder_decoder:
        raise SetupError(f"adapter {row.name!r} is planned for decoders, got {model.model_type}")
    if row.form == "norms":
        shapes = [(norm.size, 0) for norm in tuned_norms(model) for _ in range(int(norm.weight) + int(norm.bias))]
        if not shapes:
            raise SetupError(f"the norms of {model.model_id} have no weights that adapter {row.name!r} could train")
        return shapes
    if row.form == "prefix":
        return [(size, 2 * model.num_layers * prefix_width(model))]
    if row.name == "p-tuning":
        return [(size, wide), *[(wide, wide), (wide, 0)] * 3]
    return [(size, wide)]


def tuned_norms(model: ModelSpec) -> list[NormSpec]:
    """The norms that LN-tuning trains: those of whole tokens in every layer, and the final one."""
    layers = [norm for layer, num in model.layer_counts for norm in layer.norms if of_tokens(norm) for _ in range(num)]
    return [*layers, *model.outer_norms[-1:]]


def scaled_inputs(model: ModelSpec, targets: str | Sequence[str]) -> list[str]:
    """Of IA3's targets, the MLP's last matrices, which it scales at their input (peft wants names of the targets)."""
    downs = {linear.name for layer in model.layer_kinds for linear in layer.linears if linear.role == "down"}
    if isinstance(targets, str):
        return sorted(downs)
    return [name for name in targets if any(down == name or down.endswith(f".{name}") for down in downs)]


def of_tokens(norm: NormSpec) -> bool:
    """Whether a norm is of whole tokens, not of queries or keys."""
    return norm.rows_per_token == 1 and norm.name.rpartition(".")[2] not in ("q_norm", "k_norm")


def prefix_width(model: ModelSpec) -> int:
    """Elements of one token's keys in one layer: those of the layer with the widest heads, which peft takes for all.

    Raises:
        SetupError: no layer keeps keys.
    """
    attentions = [layer.attention for layer in model.layer_kinds if layer.attention is not None]
    softmax = [attention for attention in attentions if attention.kind == "softmax"]
    if not softmax:
        raise SetupError(f"{model.model_id} has no attention whose keys a prefix could stand before")
    widest = max(softmax, key=lambda attention: attention.head_dim)
    return widest.num_kv_heads * widest.head_dim


@lru_cache(maxsize=256)
def adapted_names(model: ModelSpec, targets: str | tuple[str, ...] | None) -> tuple[frozenset[str], ...]:
    """Names of the adapted matrices for each kind of layer, in the order of `layer_kinds`."""
    if targets is None:
        return tuple(frozenset() for _ in model.layer_kinds)
    names: dict[int, frozenset[str]] = {}
    for layer, _, linears in lora_linears(model, targets):
        names[id(layer)] = frozenset(linear.name for linear in linears)
    return tuple(frozenset() if layer.frozen else names.get(id(layer), frozenset()) for layer in model.layer_kinds)
