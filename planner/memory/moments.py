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
    "pinned": "inputs that int8 matrices keep",
    "inputs": "checkpointed layer inputs",
    "streams": "residual streams made and joined",
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

    The backward is largest at its first layer, at its last (activations fall and gradients rise linearly in between;
    between an encoder-decoder's halves they do so apart), each at every moment of a layer, or when all activations are
    gone and the embedding's gradient comes.

    Args:
        last: whether the part has the loss.
    """
    of_text, seen = stored_terms(parts), _seen(parts)
    stored = (*of_text, *seen[:3])
    found = _ahead(parts, of_text, seen, last=last)
    if model.is_encoder_decoder:
        return (*found, *_halves(model, parts, stored))
    size = total_bytes(of_text)
    others = size * (parts.forwards - 1) // parts.forwards  # of forwards whose backward comes later
    at_last: Term = ("activations", LEFT, max(others, size // max(1, model.num_layers)))
    if parts.hooked > at_last[2]:
        at_last = ("activations", HOOKED, parts.hooked)
    for moment in parts.layer_moments:
        of_layer = _of_layer(moment)
        found += [Moment("first", (*stored, *of_layer)), Moment("last", (at_last, *seen[:3], *of_layer))]
    return (*found, Moment("end", (("activations", LEFT, others),) if others else ()))


def _ahead(parts: ActivationParts, of_text: tuple[Term, ...], seen: tuple[Term, ...], *, last: bool) -> list[Moment]:
    """Before the layers' backward, and the backward of a tower, which comes behind it."""
    stored = (*of_text, *seen[:3])
    kept = (*of_text, *seen, ("activations", "autocast's cache", parts.cast_cache))
    temporaries: Term = ("activations", "one layer's forward temporaries", parts.forward_temp)
    unpacked: Term = ("dequantization", "one dequantized matrix in the forward", parts.dequantized)
    norm: Term = ("activations", "final norm", parts.final_norm)
    found = [
        Moment("start", ()),
        Moment("gather", kept),
        Moment("forward", (*kept, temporaries, unpacked)),
        Moment("loss", (*stored, norm) if last else ()),
        Moment("head", stored),
    ]
    if seen:
        running: Term = ("activations", "one layer's forward temporaries", parts.tower.forward)
        found.append(Moment("forward", (*seen, running)))
        name = "one recomputed layer of the tower, and gradients"
        found += [Moment("last", (*seen[:2], ("activations", name, size))) for size in parts.tower.backward]
    return found


def _of_layer(moment: LayerMoment) -> tuple[Term, ...]:
    """What one layer's backward makes."""
    return (
        ("activations", "one recomputed layer", moment.recomputed),
        ("workspace", "one layer's gradients of activations", moment.transient),
        ("dequantization", "one dequantized matrix in the backward", moment.dequantized),
    )


def _halves(model: ModelSpec, parts: ActivationParts, stored: tuple[Term, ...]) -> list[Moment]:
    """The forward of an encoder and the backward of both halves: at the turn the decoder's activations are gone but for
    position biases, which meet their gradients at its first layer. A decoder's own table has its gradient then too."""
    encoder = parts.encoder
    kept: Term = ("activations", LEFT, encoder.layers + encoder.sound)
    together = parts.stored["bias"] + parts.at_first_decoder_layer
    biases: Term = ("activations", "position biases and their gradients", together)
    gradient: Term = ("workspace", "the gradient of the encoder's output", encoder.gradient)
    running: Term = ("activations", "one layer's forward temporaries", encoder.forward)
    found = [Moment("forward", (kept, running))]
    for moment in parts.layer_moments:
        of_layer = (gradient, *_of_layer(moment))
        found += [Moment("first", (*stored, *of_layer)), Moment("turn", (kept, biases, *of_layer))]
        if not encoder.moments:
            found.append(Moment("last", _of_layer(moment)))
    share = encoder.layers // max(1, model.num_encoder_layers) + encoder.sound
    for moment in encoder.moments:
        found.append(Moment("turn", (kept, *_of_layer(moment))))
        found.append(Moment("last", (("activations", LEFT, share), *_of_layer(moment))))
    if model.front_end is None:
        return [*found, Moment("end", ())]
    end: Term = ("workspace", "the convolutions' gradients", encoder.end)
    return [*found, Moment("last", (("activations", LEFT, encoder.sound), end)), Moment("end", (kept, gradient))]


def stored_terms(parts: ActivationParts) -> tuple[Term, ...]:
    """What a micro-batch keeps from its forward to its backward."""
    kept: list[Term] = [("activations", _PART_NAMES[part], size) for part, size in parts.stored.items()]
    return (*kept, ("activations", "autocast copies of the weights", parts.weight_casts[1]))


def _seen(parts: ActivationParts) -> tuple[Term, ...]:
    """Of pictures: what their tower keeps for its backward, and what its forward hands to the text's."""
    if not parts.tower.inputs:
        return ()
    return (
        ("activations", "the tower's activations", parts.tower.stored),
        ("activations", "the tower's mask (patches x patches)", parts.tower.mask),
        ("activations", "between tower and text", parts.tower.behind),
        ("activations", "the tower's outputs", parts.tower.held),
    )
