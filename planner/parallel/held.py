"""`Held` and `Share`: what one rank holds beyond its activations, by moment of the step; what all engines share."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.errors import SetupError
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.micro_batch import ActivationParts, LayerMoment
from planner.memory.moments import BackwardPeak, backward_moments, halves_stay_apart
from planner.memory.optimizer import state_bytes, step_bytes
from planner.memory.trained import Trained, trained_parameters
from planner.memory.weights import nf4_bytes, weight_bytes
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec
from planner.models.targets import lora_linears
from planner.parallel.rank import RankPart
from planner.setup import TrainSetup

MOMENTS = ("gather", "forward", "loss", "head", "first", "last", "end", "step")
"""The moments that can be the peak: weights arriving for the last layer or the head, the last layer's forward, the
loss, the head's gradient on its way (all activations still there), the backward's first and last layer, the backward's
end (the embedding's gradient and what is still in buffers, all activations gone) and the optimizer step."""
COMPUTE = ("gather", "forward", "loss", "head", "first", "last")
BACKWARD = ("head", "first", "last", "end")


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
        stepped: elements that its optimizer steps at once, None for all of `local`.
        gone_in_step_bytes: of what is held at "step", gone when the optimizer makes its temporaries.
        loss_forward_bytes: alive in the loss's forward only (not in its backward).
        loss_backward_bytes: alive in its backward only.
        host_bytes: states in this rank's host memory, optimizer states not counted (`host_state_bytes`).
    """

    part: RankPart
    setup: TrainSetup
    trained: Trained
    local: Trained
    optimizer_on_device: bool
    held: tuple[Held, ...]
    stepped: int | None = None
    gone_in_step_bytes: int = 0
    loss_forward_bytes: int = 0
    loss_backward_bytes: int = 0
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
        """Bytes on the device of (states, temporaries of the step beyond what is held at "step") for an optimizer on
        this rank's shard."""
        if not self.optimizer_on_device:
            return 0, 0
        local = self.local
        states = state_bytes(local.num, local.dtype, optimizer, matrix_edge_sum=local.edge_sum)
        num = local.num if self.stepped is None else self.stepped
        temporary = step_bytes(num, local.dtype, optimizer, largest_tensor=min(num, local.largest))
        return states, max(0, temporary - self.gone_in_step_bytes)

    def host_state_bytes(self, optimizer: str) -> int:
        """Bytes of optimizer states in host memory: of this rank's shard, where they are offloaded."""
        if self.optimizer_on_device:
            return 0
        return state_bytes(self.local.num, self.local.dtype, optimizer, matrix_edge_sum=self.local.edge_sum)


def part_trained(model: ModelSpec, setup: TrainSetup) -> Trained:
    """`trained_parameters` of a part; nothing where explicit targets match no module of it (a stage without head)."""
    try:
        return trained_parameters(model, setup)
    except SetupError:
        return Trained(num=0, dtype=setup.resolved_adapter_dtype, edge_sum=0, largest=0, head=0, embeddings=0)


def weights(model: ModelSpec, setup: TrainSetup) -> Iterator[Held]:
    for name, size in weight_bytes(model, setup).items():
        if size:
            yield Held(category="weights", name=f"weights: {name}", size_bytes=size)


def whole_gradients(model: ModelSpec, inner: TrainSetup, trained: Trained, accumulated: bool) -> list[Held]:
    """Gradients that stay whole until the step, as on one GPU (`planner.memory.moments.backward_moments`)."""
    nothing = ActivationParts(
        stored={"bias": 0},
        recomputed=0,
        transient=0,
        forward_temp=0,
        dequantized=0,
        final_norm=0,
        weight_casts=(0, 0),
        adapter_casts=0,
        layer_moments=(LayerMoment(recomputed=0, transient=0, dequantized=0),),
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


def gathered_head(model: ModelSpec, setup: TrainSetup, weight_dtype: str) -> list[Held]:
    """The whole head that TRL's chunked loss gathers from a head split by tensor parallelism.

    Source: trl 1.16 trainer/utils.py (`full_tensor`).
    """
    if setup.tensor_degree == 1 or setup.loss != "chunked" or model.head is None:
        return []
    own = model.num_embedding_params if model.tied else model.num_head_params
    size = setup.tensor_degree * own * SIZE_BYTES[weight_dtype]
    return [Held(category="weights", name="gathered head", size_bytes=size, moments=("loss",))]


def backward_moment(peak: BackwardPeak) -> str:
    """Which of MOMENTS one of the one-GPU backward's moments is."""
    return {"head": "head", "last layer": "last", "embedding": "end"}.get(peak.where, "first")


def adapted(model: ModelSpec, setup: TrainSetup) -> tuple[tuple[LayerSpec, int, tuple[LinearSpec, ...]], ...]:
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
