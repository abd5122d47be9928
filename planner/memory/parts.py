"""What one micro-batch's activations add up to: the type that its terms are handed on in."""

from typing import NamedTuple

from planner.memory.layer_costs import LayerMoment
from planner.memory.reference import ReferenceForward
from planner.records import dataclass

PARTS = (
    "norm", "attention", "scores", "mlp", "adapters", "pinned", "inputs", "bias", "masks", "sound", "output",
)  # fmt: skip
"""Of what the layers keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBytes:
    """Bytes of one micro-batch's pictures.

    Attributes:
        inputs: the pixels. The batches of all micro-batches of a step are on the device at once (transformers 5.23
            `Trainer.get_batch_samples`), so that they stay until the step's end.
        stored: from the encoder's forward to its backward; 0 where nothing asks for a gradient there.
        mask: as long, of all frames with all: it grows with the square of the micro-batch.
        behind: between its layers and the text, gone when the layers' backward comes.
        forward: the encoder's own forward at its largest beyond what is stored.
        backward: its backward's moments beyond what is stored.
    """

    inputs: int = 0
    stored: int = 0
    mask: int = 0
    behind: int = 0
    forward: int = 0
    backward: tuple[int, ...] = ()


NO_ENCODER = EncoderBytes()
"""Of text alone."""


class ActivationParts(NamedTuple):
    """Activations of one micro-batch, all in bytes.

    Attributes:
        stored: kept over the layers, by part.
        recomputed: the largest checkpointed layer during its backward; temporary: one layer's gradients of activations.
        forward_temp: one layer's forward temporaries.
        dequantized: one 16-bit copy of a quantized matrix.
        weight_casts: autocast's copies of weights alive in (forward and loss, backward).
        layer_moments: what can be the largest moment of one layer's backward; `recomputed` and `temporary` are those of
            the largest.
        forwards: with gradients, one after another, before one backward; all that is kept is of all of them.
        sound: of a micro-batch's clips, which stay until the step's end.
        encoder: of the pictures (`planner.memory.modality_encoder`).
        asked: of a reference that is asked beside all this.
        hooked: at the backward's end, in place of what is left of what is stored
            (`planner.memory.micro_batch.hooked_bytes`).
        cached: keys and values in the model's cache until its outputs are dropped or replaced.
    """

    stored: dict[str, int]
    recomputed: int
    temporary: int
    forward_temp: int
    dequantized: int
    final_norm: int
    weight_casts: tuple[int, int]
    adapter_casts: int
    layer_moments: tuple[LayerMoment, ...] = ()
    forwards: int = 1
    sound: int = 0
    encoder: EncoderBytes = NO_ENCODER
    asked: ReferenceForward = ReferenceForward()
    hooked: int = 0
    cached: int = 0

    @property
    def cast_cache(self) -> int:
        """What autocast keeps until the forward ends, beyond what lives on into the backward."""
        return self.weight_casts[0] - self.weight_casts[1] + self.adapter_casts

    @property
    def until_loss(self) -> int:
        """Bytes that are gone when the loss's own backward begins: the policy's, or the reference's."""
        return max(self.cast_cache, self.asked.cached)
