"""Optimizer states, and what the optimizer step needs beyond them: what `planner.choices.optimizers` says of each."""

from planner.choices.optimizers import OPTIMIZERS
from planner.memory.dtypes import SIZE_BYTES

UNPAGED = 100_000
"""Elements of a tensor from which on a paged optimizer pages its states; the scales of 8-bit states it never does.
Source: bitsandbytes 0.50 `optim/optimizer.py` get_state_buffer, `Optimizer2State.init_state` (absmax1, absmax2)."""


def state_bytes(
    num_trained: int, dtype: str, optimizer: str, *, matrix_edge_sum: int = 0, wide: int = 0, small: int = 0
) -> int:
    """Bytes of optimizer state on the GPU for `num_trained` parameters of `dtype`.

    Paged forms keep most of theirs in managed memory that PyTorch does not count: see `paged_bytes`.

    Args:
        matrix_edge_sum: rows + columns over the trained matrices.
        wide: those of them whose 8-bit states are kept in 32 bits.
        small: those of them in tensors below UNPAGED elements.
    """
    row = OPTIMIZERS[optimizer]
    if row.paged:
        return row.scale_bytes(num_trained - wide) + (row.states.eight_bit + 4 * row.states.fp32) * min(
            small, num_trained
        )
    states = row.all_state_bytes(num_trained, SIZE_BYTES[dtype], matrix_edge_sum=matrix_edge_sum)
    return states + row.wide_state_bytes(wide)


def paged_bytes(num_trained: int, optimizer: str, *, wide: int = 0) -> int:
    """Bytes in CUDA managed memory: outside PyTorch's count, evicted to the host under pressure."""
    row = OPTIMIZERS[optimizer]
    if not row.paged:
        return 0
    states = row.all_state_bytes(num_trained, SIZE_BYTES["fp32"], matrix_edge_sum=0) + row.wide_state_bytes(wide)
    return states - row.scale_bytes(num_trained - wide)


def step_bytes(num_trained: int, dtype: str, optimizer: str, *, largest_tensor: int) -> int:
    """Temporary bytes of one optimizer step."""
    return OPTIMIZERS[optimizer].step_bytes(num_trained, SIZE_BYTES[dtype], largest_tensor=largest_tensor)
