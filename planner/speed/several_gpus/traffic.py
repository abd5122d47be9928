"""What has to cross the links: bytes of weights and gradients of one part of a model, by layer and outside the layers.

Engines shard by unit: one per transformer layer, and a root unit with embeddings, head and final norm.
"""

from planner.core.records import dataclass
from planner.memory.dtypes import SIZE_BYTES, dtype_policy_of
from planner.memory.engines import engine_of
from planner.memory.trained import trained_parameters
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed.roofline.counts import adapted_linears
from planner.speed.roofline.types import CURRENT, Conditions

_QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5, "nf4-double": 0.5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of one part of the model, as engines put them on the wire.

    Attributes:
        layers: units that are gathered one by one.
        layer_bytes: weights of an average layer, adapters included; root_bytes: all weights outside the layers.
        layer_gradient_bytes, root_gradient_bytes: the same of trained weights.
        last_gradient_bytes: gradients that are ready only when the backward ends (the embedding's, or the first
            layer's where it is frozen): nothing is left to hide them behind.
        expert_bytes, expert_gradient_bytes: of an average layer, where they are distributed over GPUs and the two above
            leave them out: those of this rank.
        logit_bytes: of one token's logits.
        trained_params: elements that the optimizer updates.
        small_units: adapter matrices that are gathered one by one, outside their layer's unit.
    """

    layers: int
    layer_bytes: float
    root_bytes: float
    layer_gradient_bytes: float
    root_gradient_bytes: float
    last_gradient_bytes: float
    logit_bytes: float
    trained_params: float
    small_units: int = 0
    expert_bytes: float = 0.0
    expert_gradient_bytes: float = 0.0

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.layers * self.layer_bytes + self.root_bytes

    @property
    def gradient_bytes(self) -> float:
        """All gradients."""
        return self.layers * self.layer_gradient_bytes + self.root_gradient_bytes


def computed(setup: TrainSetup, conditions: Conditions = CURRENT) -> TrainSetup:
    """The one-GPU setup whose data types a rank computes in and puts on the wire: what its engine says of memory too.

    FSDP 1, which some measured runs used, is wrapped after Accelerate's `prepare_model` and keeps its autocast.
    """
    if conditions.fsdp_1 and setup.parallel == "fsdp2" and setup.autocast_dtype is not None:
        return setup.replace_trusted(precision=f"{setup.autocast_dtype}-autocast")
    return engine_of(setup).computes(setup)


def reduces_each(setup: TrainSetup, *, fsdp_1: bool) -> bool:
    """Whether each micro-batch's gradients are reduced to a rank's share, not the last one's sum: ZeRO 2 and 3, FSDP2
    as launch files here have it (`sync_each_batch`); published runs of FSDP 1 waited."""
    return setup.parallel in ("zero2", "zero3") or (
        setup.parallel == "fsdp2" and not setup.defers_reduction and not fsdp_1
    )


def traffic_of(part: ModelSpec, setup: TrainSetup, conditions: Conditions = CURRENT) -> Traffic:
    """The traffic of one part of a model under a setup's data types, counted once per what it depends on."""
    key = (
        "traffic", setup.parallel, setup.method, setup.precision, setup.quantization, setup.kbit_fp32_cast,
        setup.lora_rank, setup.lora_targets, setup.adapter, setup.adapter_dtype, conditions.fp32_reduction,
        conditions.fsdp_1,
    )  # fmt: skip
    return part.once(key, lambda spec: _count(spec, setup, conditions))


def _quantized_weights(part: ModelSpec) -> int:
    """Of all its layers, those that a quantized base packs."""
    linears = ((linear, count) for layer, count in part.layer_counts for linear in layer.linears)
    return sum(count * linear.num_weights for linear, count in linears if linear.quantizes)


def _count(part: ModelSpec, setup: TrainSetup, conditions: Conditions) -> Traffic:
    dtypes = dtype_policy_of(computed(setup, conditions))
    sharded = setup.parallel in ("zero1", "zero2", "zero3", "fsdp2")
    weight_size = SIZE_BYTES[dtypes.autocast or dtypes.table] if setup.parallel == "fsdp2" else SIZE_BYTES[dtypes.table]
    layers = part.num_layers
    quantized = _quantized_weights(part) if setup.quantized else 0
    expert_weights = part.num_expert_parallel_weights
    in_layers = sum(layer.num_params * count for layer, count in part.layer_counts) - expert_weights
    layer_bytes = (in_layers - quantized) * weight_size + quantized * _QUANTIZED_BYTES.get(setup.quantization, 0.0)
    root_params = part.num_params - in_layers - expert_weights
    small = 0
    if setup.method == "full":
        size = weight_size if sharded else SIZE_BYTES[dtypes.table]
        trained, root = float(in_layers), float(root_params)
        last = float(part.num_embedding_params) * size
    else:
        size = (
            SIZE_BYTES[dtypes.autocast or dtypes.adapter] if setup.parallel == "fsdp2" else SIZE_BYTES[dtypes.adapter]
        )
        adapted = adapted_linears(part, setup.lora_targets)
        trained, root = float(setup.lora_rank * adapted.params_per_rank), 0.0
        if not setup.kind.like_lora:
            trained = float(trained_parameters(part, setup).num)
        small = 2 * adapted.modules if conditions.fsdp_1 else 0
        last = 0.0
        layer_bytes += trained * size
    sent = 4 if conditions.fp32_reduction else size
    each = trained * sent / layers if layers else 0.0
    return Traffic(
        layers=layers,
        layer_bytes=layer_bytes / layers if layers else 0.0,
        root_bytes=root_params * weight_size,
        layer_gradient_bytes=each,
        root_gradient_bytes=root * sent,
        last_gradient_bytes=max(last, each),
        logit_bytes=float(part.vocab_size * SIZE_BYTES[dtypes.compute]),
        trained_params=trained + root + expert_weights,
        small_units=small,
        expert_bytes=expert_weights * weight_size / layers if layers else 0.0,
        expert_gradient_bytes=expert_weights * sent / layers if layers else 0.0,
    )
