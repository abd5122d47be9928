"""What pipeline stages hold of micro-batches beside the one that they compute."""

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.micro_batch import step_dtype_policy
from planner.memory.rank_part import RankPart
from planner.memory.state import RankState
from planner.setup import TrainSetup


def in_flight_losses_bytes(part: RankPart, setup: TrainSetup, logits: int, tokens: int, flight: int) -> int:
    """What a last pipeline stage holds beside one micro-batch's loss chain: this micro-batch's logits, which the stage
    keeps to its backward's end, and under GPipe those and the fp32 log-probabilities of the micro-batches in flight.

    The largest moment is the second backward, when gradients are there and one micro-batch is done.

    Args:
        logits: bytes of one micro-batch's logits; `tokens`: its tokens.

    Source: PyTorch 2.13 `distributed/pipelining/stage.py` (backward_one_chunk's stage_output), `schedules.py`
    ScheduleGPipe. Measured: docs/accuracy/spread-stages.md.
    """
    if setup.pipeline_degree == 1:
        return 0
    wide = SIZE_BYTES["fp32"] * tokens * part.model.vocab_size
    return logits + max(0, flight - 2) * (logits + wide)


def in_flight_bytes(state: RankState, setup: TrainSetup, kept: int, flight: int, micro_batches: int) -> int:
    """Activations of further micro-batches in flight, less what they never meet.

    Where every forward comes before the first backward (GPipe; 1F1B with no more micro-batches than in flight), whole
    gradients are there when one micro-batch's activations are gone. FSDP2's weights are all gathered at a backward's
    end, when its activations are gone, and freed by the next forward.

    Args:
        kept: activation bytes of one micro-batch in flight.
    """
    if flight < 2:
        return 0
    apart = 0
    for one in state.held:
        if "gather" in one.moments and not one.resident:
            gradients = one.category == "gradients" and micro_batches <= flight
            weights = one.category == "weights" and setup.reshard_after_forward
            apart += one.size_bytes * (gradients or weights)
    return (flight - 1) * kept - min(kept, apart)


def boundary_bytes(part: RankPart, setup: TrainSetup, inner: TrainSetup, *, micro_batches: int, flight: int) -> int:
    """What a pipeline stage holds at its boundaries all along: a receive buffer for every micro-batch's input
    and for every micro-batch's gradient, and the sent outputs of those in flight.

    A checkpointed first layer keeps its input, which is that very buffer: it is not counted twice.

    Source: PyTorch 2.13 `distributed/pipelining/stage.py` (_setup_forward_recv_info and _setup_backward_recv_info make
    one buffer per chunk, fwd_cache keeps outputs until their backward).
    Shapes: [seqs, tokens, hidden] in the residual's type.
    Not counted: the last stage's output chunks (`save_forward_output` off).
    """
    if setup.pipeline_degree == 1:
        return 0
    one = (
        SIZE_BYTES[step_dtype_policy(part.model, inner).residual]
        * part.model.hidden_size
        * inner.tokens_per_micro_batch
    )
    total = micro_batches * one * (int(not part.first) + int(not part.last))
    total += 0 if part.last else flight * one
    if not part.first and setup.checkpointing:
        total -= flight * one
    return total
