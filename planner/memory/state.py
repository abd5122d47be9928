"""`RankState`: what one rank holds beside its activations, moment by moment of a step; an engine builds it."""

from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

from planner.errors import SetupError
from planner.memory.dtypes import SIZE_BYTES, dtype_policy_of
from planner.memory.matrix_inputs import shared_bytes
from planner.memory.optimizer import state_bytes, step_bytes
from planner.memory.rank_part import RankPart
from planner.memory.trained import Trained, trained_parameters
from planner.memory.types import Category
from planner.memory.weights import weight_bytes
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.records import dataclass
from planner.setup import TrainSetup

MOMENTS = ("start", "gather", "forward", "loss", "head", "first", "turn", "last", "end", "step")
"""The moments that can be the peak: the first weights arriving, before any activation; those for the last layer or the
head arriving; the last layer's forward; the loss; the head's gradient on its way (all activations still there); the
backward's first layer; its turn from an encoder-decoder's decoder to its encoder; its last layer; its end (the
embedding's gradient and what is still in buffers, all activations gone); and the optimizer step."""
COMPUTE = ("start", "gather", "forward", "loss", "head", "first", "turn", "last")
REFERENCE = "reference model (a frozen copy)"
BACKWARD = ("head", "first", "turn", "last", "end")


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of one kind that a rank holds at some moments (all of MOMENTS: resident)."""

    category: Category
    name: str
    size_bytes: int
    moments: tuple[str, ...] = MOMENTS

    @property
    def resident(self) -> bool:
        """Held all along."""
        return len(self.moments) == len(MOMENTS)


def weights_held(name: str, size_bytes: int, *moments: str) -> Held:
    """Weights at these moments; all along where none is named."""
    return Held(category="weights", name=name, size_bytes=size_bytes, moments=moments or MOMENTS)


def gradients_held(name: str, size_bytes: int, *moments: str) -> Held:
    """Gradients, and the buffers that they travel in, at these moments; all along where none is named."""
    return Held(category="gradients", name=name, size_bytes=size_bytes, moments=moments or MOMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
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
        reference_forward_bytes: alive while a reference's layers run, beyond what is held at "loss"; `arriving_bytes`:
        of the next
            layer's weights, before it runs.
        host_bytes: states in this rank's host memory, optimizer states not counted (`host_state_bytes`).
        moment_bytes: what `held` adds up to at each moment beyond what is "resident".
    """

    part: RankPart
    setup: TrainSetup
    trained: Trained
    local: Trained
    held: tuple[Held, ...]
    optimizer_on_device: bool = True
    stepped: int | None = None
    gone_in_step_bytes: int = 0
    loss_forward_bytes: int = 0
    loss_backward_bytes: int = 0
    reference_forward_bytes: int = 0
    arriving_bytes: int = 0
    host_bytes: int = 0
    moment_bytes: dict[str, int] = field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        totals = dict.fromkeys((*MOMENTS, "resident"), 0)
        for one in self.held:
            for moment in ("resident",) if one.resident else one.moments:
                totals[moment] += one.size_bytes
        self.moment_bytes.update(totals)

    def optimizer_bytes(self, optimizer: str) -> tuple[int, int]:
        """Bytes on the device of (states, temporaries of the step beyond what is held at "step") for an optimizer on
        this rank's shard."""
        if not self.optimizer_on_device:
            return 0, 0
        local = self.local
        of_tensors = {"matrix_edge_sum": local.edge_sum, "wide": local.wide, "small": local.small}
        states = state_bytes(local.num, local.dtype, optimizer, **of_tensors)
        num = local.num if self.stepped is None else self.stepped
        temporary = step_bytes(num, local.dtype, optimizer, largest_tensor=min(num, local.largest))
        if local.copies:  # a group of their own in every multi-tensor step
            states += state_bytes(local.copies, local.copies_dtype, optimizer)
            largest = min(local.copies, local.largest)
            temporary = max(temporary, step_bytes(local.copies, local.copies_dtype, optimizer, largest_tensor=largest))
        return states, max(0, temporary - self.gone_in_step_bytes)

    def host_state_bytes(self, optimizer: str) -> int:
        """Bytes of optimizer states in host memory: of this rank's shard, where they are offloaded."""
        if self.optimizer_on_device:
            return 0
        return state_bytes(self.local.num, self.local.dtype, optimizer, matrix_edge_sum=self.local.edge_sum)


def rank_state(part: RankPart, setup: TrainSetup, held: Iterable[Held], **other: Any) -> RankState:
    """The state of a rank that shards: what holds nothing is left out."""
    return RankState(part=part, setup=setup, held=tuple(one for one in held if one.size_bytes), **other)


def part_trained(model: ModelSpec, setup: TrainSetup) -> Trained:
    """`trained_parameters` of a part; nothing where explicit targets match no module of it (a stage without head)."""
    try:
        return trained_parameters(model, setup)
    except SetupError:
        return Trained(num=0, dtype=setup.resolved_adapter_dtype, edge_sum=0, largest=0, head=0, embeddings=0)


def whole_weights(model: ModelSpec, setup: TrainSetup, trained: Trained) -> Iterator[Held]:
    """The weights, and what LoRA adds to them, as they are on one GPU."""
    for name, size in weight_bytes(model, setup).items():
        if size:
            yield Held(category="weights", name=f"weights: {name}", size_bytes=size)
    if setup.method != "full":
        yield Held(
            category="adapters",
            name=f"{'LoRA matrices' if setup.adapter == 'lora' else setup.kind.title.partition(' (')[0]}"
            f"{' and whole modules' if setup.modules_to_save else ''}",
            size_bytes=trained.size_bytes,
        )
        if setup.kind.form == "shared":
            linears = [one for _, _, group in lora_linears(model, setup.lora_targets) for one in group]
            yield Held(
                category="adapters", name="frozen matrices that all share", size_bytes=shared_bytes(setup, linears)
            )
        if setup.kind.form == "rows":
            table = max(one.num_params for one in model.embeddings) * SIZE_BYTES[dtype_policy_of(setup).table]
            yield Held(
                category="gradients", name="gradient of the embedding with its rows", size_bytes=table, moments=("end",)
            )
            if model.tied and setup.loss == "full" and not setup.kbit_fp32_cast:
                name = "the tied head with its rows"  # multiplied from a copy of the table
                yield Held(category="weights", name=name, size_bytes=table, moments=("loss", "head"))
    elif setup.copies_reference:
        size = sum(weight_bytes(model, setup).values())
        yield Held(category="weights", name=REFERENCE, size_bytes=size)


def heeds_loss(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether `whole_weights` and `whole_gradients` ask which loss it is: of a tied head, trained or with its rows."""
    return model.tied and (setup.method == "full" or setup.kind.form == "rows")


def halves_stay_apart(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether the two halves of a tied embedding's gradient make a third tensor instead of being added in place.

    The engine adds into the first one where nothing else holds its storage; the head's own matrix multiplication gives
    it transposed, which does. A cast (autocast) or a fused loss gives a fresh tensor.

    Source: PyTorch `input_buffer.cpp` `can_accumulate_inplace`; tests/probes/test_dryrun_gradient_sums.py.
    """
    return model.tied and setup.method == "full" and setup.loss == "full" and setup.autocast_dtype is None


def backward_gradients(model: ModelSpec, setup: TrainSetup, trained: Trained, *, accumulated: bool) -> dict[str, int]:
    """Bytes of the gradients that are kept whole, at the backward's "first" layer, its "last" one (all there but the
    embedding's and this layer's), its "end" (the embedding's own, when all activations are gone) and the "turn" to an
    encoder-decoder's encoder (the decoder's).

    In between, activations fall and gradients rise linearly with the layers, so the maximum is at an end. With
    accumulation the gradients of earlier micro-batches are alive all along (not counted here), and a new one only until
    it is added.
    """
    size = trained.outer_bytes
    # of several forwards autograd adds up a weight's gradients before it gives them to the weight
    if setup.live_forwards > 1:
        whole = trained.size_bytes
        return {"first": 0, "turn": 0, "last": whole, "end": whole + trained.embeddings * size}
    head = 0 if accumulated else trained.head * size
    largest = trained.embeddings * size
    if model.front_end is not None:
        return _of_a_decoders_table(model, setup, trained, accumulated=accumulated)
    # the head's, which waits for the embedding's; copies of a tied pair are two
    half = trained.head * size if model.tied and setup.method == "full" else 0
    first = turn = head
    if accumulated:
        last = half
    else:
        turn += int(decoder_share(model) * max(0, trained.size_bytes - head))
        others = trained.size_bytes - (0 if half >= largest else largest)
        last = max(0, others - (others - head) // max(1, model.num_layers))
    # beside the gradients kept: the other half of a tied one, their sum, and a new one about to be accumulated, of the
    # tied table or, while the head's half still waits, of a larger one (Gemma 4's inputs of each layer)
    more = half * (1 + int(halves_stay_apart(model, setup)))
    if accumulated:
        more = max(more + half, half + largest)
    end = (0 if accumulated else trained.size_bytes) + more
    return {"first": first, "turn": turn, "last": last, "end": end}


def _of_a_decoders_table(model: ModelSpec, setup: TrainSetup, trained: Trained, *, accumulated: bool) -> dict[str, int]:
    """The same where the tied table is the decoder's alone: its gradient comes before the encoder's, at the "end" of
    the decoder's backward, and what comes last is a convolution's."""
    half = trained.head * trained.outer_bytes
    halves = half * (1 + int(halves_stay_apart(model, setup)))
    if accumulated:
        return {"first": half, "turn": 0, "last": 0, "end": halves + half}
    layers = trained.size_bytes - half
    decoders = int((1.0 if setup.frozen_encoder else decoder_share(model)) * layers)
    last = trained.size_bytes - int((1.0 - decoder_share(model)) * layers) // max(1, model.num_encoder_layers)
    return {"first": half, "turn": half + decoders, "last": last, "end": half + decoders + halves}


def decoder_share(model: ModelSpec) -> float:
    """Share of an encoder-decoder's layer parameters that is the decoder's; 0 of other models."""
    return model.once("decoder share", _decoder_share)


def _decoder_share(model: ModelSpec) -> float:
    parts = [(layer.num_params * num, layer.cross_attention is not None) for layer, num in model.layer_counts]
    return sum(num for num, decoder in parts if decoder) / max(1, sum(num for num, _ in parts))


def whole_gradients(model: ModelSpec, setup: TrainSetup, trained: Trained, accumulated: bool) -> list[Held]:
    """Gradients that stay whole until the step, as on one GPU."""
    at = backward_gradients(model, setup, trained, accumulated=accumulated)
    found = [
        Held(category="gradients", name="gradients in the backward", size_bytes=size, moments=(moment,))
        for moment, size in at.items()
    ]
    found.append(Held(category="gradients", name="gradients", size_bytes=trained.size_bytes, moments=("step",)))
    if accumulated:
        kept = (*COMPUTE, "end")
        found.append(
            Held(category="gradients", name="accumulated gradients", size_bytes=trained.size_bytes, moments=kept)
        )
    return found
