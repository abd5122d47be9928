"""What computing one micro-batch holds, moment by moment of a step (`planner.memory.state.MOMENTS`)."""

from typing import NamedTuple

from planner.memory.layer_costs import LayerMoment
from planner.memory.parts import ActivationParts
from planner.memory.types import Term, total_bytes
from planner.models.spec import ModelSpec

_PART_NAMES = {
    "norm": "norm inputs",
    "attention": "attention inputs and outputs",
    "scores": "attention scores (tokens x tokens)",
    "mlp": "MLP activations",
    "adapters": "adapter input copies",
    "pinned": "inputs that quantized matrices keep",
    "inputs": "checkpointed layer inputs",
    "bias": "position biases (tokens x tokens)",
    "masks": "attention masks (tokens x tokens)",
    "sound": "what the convolutions keep",
    "output": "the encoder's norm and output",
}

HOOKED = "layer inputs and gradients that FSDP 1's hooks hold"
LEFT = "what is left of the activations"


class Moment(NamedTuple):
    """What computing holds at one of `planner.memory.state.MOMENTS`, beside what the engine holds then."""

    name: str
    terms: tuple[Term, ...]

    @property
    def size_bytes(self) -> int:
        """All terms."""
        return total_bytes(self.terms)


def computing(model: ModelSpec, parts: ActivationParts, *, last: bool = True) -> tuple[Moment, ...]:
    """What one micro-batch's activations are at every moment; each by itself is affine in the micro-batch.

    The backward is largest at its first layer, at its last (activations fall and gradients rise linearly in between),
    each at every moment of a layer, or when all activations are gone and the embedding's gradient comes.

    Args:
        last: whether the part has the loss.
    """
    of_text, seen = stored_terms(parts), _seen(parts)
    stored = (*of_text, *seen)
    found = _ahead(parts, stored, seen, last=last)
    size = total_bytes(of_text)
    others = size * (parts.forwards - 1) // parts.forwards  # of forwards whose backward comes later
    at_last: Term = ("activations", LEFT, max(others, size // max(1, model.num_layers)))
    if parts.hooked > at_last[2]:
        at_last = ("activations", HOOKED, parts.hooked)
    for moment in parts.layer_moments:
        of_layer = _of_layer(moment)
        found += [Moment("first", (*stored, *of_layer)), Moment("last", (at_last, *seen, *of_layer))]
    return (*found, Moment("end", (("activations", LEFT, others),) if others else ()))


def _ahead(parts: ActivationParts, stored: tuple[Term, ...], seen: tuple[Term, ...], *, last: bool) -> list[Moment]:
    """Before the layers' backward, and the backward of an encoder, which comes behind it."""
    cached: Term = ("activations", "keys and values in the model's cache", parts.cached)
    kept = (*stored, cached, ("activations", "autocast's cache", parts.cast_cache))
    temporaries: Term = ("activations", "one layer's forward temporaries", parts.forward_temp)
    unpacked: Term = ("dequantization", "one dequantized matrix in the forward", parts.dequantized)
    norm: Term = ("activations", "final norm", parts.final_norm)
    found = [
        Moment("start", ()),
        Moment("gather", kept),
        Moment("forward", (*kept, temporaries, unpacked)),
        Moment("loss", (*stored, cached, norm) if last else ()),
        Moment("head", stored),
    ]
    if seen:
        running: Term = ("activations", "one layer's forward temporaries", parts.encoder.forward)
        found.append(Moment("forward", (*seen, running)))
        name = "one recomputed layer of the tower, and gradients"
        found += [Moment("last", (*seen[:2], ("activations", name, size))) for size in parts.encoder.backward]
    return found


def _of_layer(moment: LayerMoment) -> tuple[Term, ...]:
    """What one layer's backward makes."""
    return (
        ("activations", "one recomputed layer", moment.recomputed),
        ("workspace", "one layer's gradients of activations", moment.temporary),
        ("dequantization", "one dequantized matrix in the backward", moment.dequantized),
    )


def stored_terms(parts: ActivationParts) -> tuple[Term, ...]:
    """What a micro-batch keeps from its forward to its backward."""
    kept: list[Term] = [("activations", _PART_NAMES[part], size) for part, size in parts.stored.items()]
    return (*kept, ("activations", "autocast copies of the weights", parts.weight_casts[1]))


def _seen(parts: ActivationParts) -> tuple[Term, ...]:
    """Of pictures: what their encoder keeps for its backward, and what its forward hands to the text's."""
    if not parts.encoder.inputs:
        return ()
    return (
        ("activations", "the tower's activations", parts.encoder.stored),
        ("activations", "the tower's mask (patches x patches)", parts.encoder.mask),
        ("activations", "between tower and text", parts.encoder.behind),
    )
