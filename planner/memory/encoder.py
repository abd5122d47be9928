"""What stands around the layers of an encoder-decoder's encoder: convolutions over sound, the norm behind it, and its
output, which the decoder's layers look at."""

from planner.memory.activations import norm_output_dtype, norm_saved
from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.layer_context import LayerContext
from planner.memory.layer_costs import LayerMoment
from planner.memory.traits import traits_of
from planner.models.spec import FrontEnd, ModelSpec
from planner.records import dataclass
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBytes:
    """Bytes of one micro-batch's encoder, whose forward is the first thing of a step and whose backward the last.

    Attributes:
        inputs: the sound, which stays until the step's end as pixels do.
        layers: of what is stored, what its layers keep, to the backward's end.
        sound: of what is stored, what the convolutions before them keep, to the backward's end.
        output: of what is stored, its norm's input and its result: gone at the turn from decoder to encoder.
        gradient: of its result, while the decoder's backward adds it up.
        end: the backward of the convolutions beyond what they keep.
        forward: temporaries of its forward at their largest.
        moments: what can be the largest moment of one of its layers' backward.
    """

    inputs: int = 0
    layers: int = 0
    sound: int = 0
    output: int = 0
    gradient: int = 0
    end: int = 0
    forward: int = 0
    moments: tuple[LayerMoment, ...] = ()


NO_ENCODER = EncoderBytes()
"""Of a decoder alone."""


def around_the_encoder(model: ModelSpec, setup: TrainSetup, flow: Flow, *, reached: bool) -> EncoderBytes:
    """What its layers do not keep themselves.

    Args:
        reached: whether the backward goes into the encoder.
    """
    around = LayerContext(
        setup=setup,
        flow=flow,
        adapted=frozenset(),
        kernel="flash",
        tokens=setup.micro_batch_seqs * (model.encoder_tokens or setup.seq_len_tokens),
        hidden=model.hidden_size,
        traits=traits_of(model),
    )
    norm = model.outer_norms[0]
    result = SIZE_BYTES[norm_output_dtype(norm, around, flow.residual)] * around.tokens * model.hidden_size
    kept = norm_saved(norm, around, flow.residual) if reached else 0
    output, gradient = kept + result, result if reached else 0
    front = model.front_end
    if front is None:
        return EncoderBytes(output=output, gradient=gradient)
    elements = setup.micro_batch_seqs * front.input_elements
    narrow = setup.autocast_dtype is None and not setup.kbit_fp32_cast
    inputs = elements * SIZE_BYTES[setup.weight_dtype if narrow else "fp32"]
    sound, end = _convolutions(front, model, setup, flow) if reached else (0, 0)
    return EncoderBytes(inputs=inputs, output=output, gradient=gradient, sound=sound, end=end)


def _convolutions(front: FrontEnd, model: ModelSpec, setup: TrainSetup, flow: Flow) -> tuple[int, int]:
    """(bytes that the convolutions keep, bytes of their backward beyond those).

    Trained ones keep their input (under autocast a 16-bit copy, and one of an fp32 weight), each GELU its own. Beside
    adapters and checkpointing the first one's output is a leaf (`enable_input_require_grads`; `WhisperEncoder` names
    `conv1`), and what follows it is kept; its gradient stays to the end.

    Source: transformers 5.23 `WhisperEncoder.forward`; PyTorch `convolution_backward`.
    Shapes: [seqs, mel bins, frames], [seqs, hidden, frames], [seqs, hidden, frames / 2].
    """
    trained = setup.method == "full"
    if not trained and not setup.checkpointing:
        return 0, 0
    size = SIZE_BYTES[flow.autocast or flow.table]
    wide = setup.micro_batch_seqs * model.hidden_size * front.frames * size
    copied = flow.autocast is not None
    kept = 2 * wide + wide // 2  # both inputs of GELUs, and the second convolution's
    kept += setup.micro_batch_seqs * front.input_elements * size * (trained and copied)
    if copied and flow.table == "fp32":
        kept += size * 3 * model.hidden_size * (model.hidden_size + front.mel_bins * trained)
    return kept, 2 * wide
