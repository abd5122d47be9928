"""What stands around the layers of an encoder-decoder's encoder: sound, the convolutions over it, and the encoder's
output, which the decoder's layers look at."""

from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.models.spec import FrontEnd, ModelSpec
from planner.setup import TrainSetup


def encoder_output_bytes(model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy) -> int:
    """Bytes of the encoder's output, with its gradient where the backward goes into the encoder."""
    tokens = setup.micro_batch_seqs * (model.encoder_tokens or setup.seq_len_tokens)
    wide = SIZE_BYTES["fp32" if dtypes.autocast else dtypes.residual]
    return 2 * wide * tokens * model.hidden_size


def sound_bytes(front: FrontEnd, setup: TrainSetup) -> int:
    """Bytes of a micro-batch's sound, which stays until the step's end as pixels do."""
    narrow = setup.autocast_dtype is None and not setup.kbit_fp32_cast
    return setup.micro_batch_seqs * front.input_elements * SIZE_BYTES[setup.weight_dtype if narrow else "fp32"]


def convolutions_bytes(front: FrontEnd, model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy) -> int:
    """Bytes that the convolutions keep: the inputs of both GELUs, and of the second convolution.

    Beside adapters and checkpointing the first one's output is a leaf (`enable_input_require_grads`; `WhisperEncoder`
    names `conv1`), and what follows it is kept; beside adapters alone nothing is.

    Source: transformers 5.23 `WhisperEncoder.forward`.
    Shapes: [seqs, hidden, frames], [seqs, hidden, frames / 2].
    """
    if setup.method != "full" and not setup.checkpointing:
        return 0
    wide = setup.micro_batch_seqs * model.hidden_size * front.frames * SIZE_BYTES[dtypes.autocast or dtypes.table]
    return 2 * wide + wide // 2
