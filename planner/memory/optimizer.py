"""Optimizer states, and what the optimizer step needs beyond them."""

from planner.memory.dtypes import SIZE_BYTES

BLOCK_8BIT = 256
"""Elements per scale of an 8-bit state. Source: bitsandbytes 0.50 `Optimizer2State` (block-wise, 256)."""


def state_bytes(
    num_trained: int, dtype: str, optimizer: str, *, num_matrices: int = 0, matrix_edge_sum: int = 0
) -> int:
    """Bytes of optimizer state on the GPU for `num_trained` parameters of `dtype`.

    AdamW keeps two moments in the parameters' own type (8 bytes per fp32 parameter, 4 per bf16 one). 8-bit AdamW keeps
    two bytes and two fp32 scales per 256 elements; 8-bit Lion half of it. Paged forms keep the same in managed memory
    that PyTorch does not count: see `paged_bytes`. Adafactor keeps one fp32 row and one column per matrix
    (`matrix_edge_sum`: sum of rows + columns over the trained matrices). SGD without momentum keeps nothing.

    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101; Dettmers et al. 2022, 8-bit Optimizers,
    https://arxiv.org/abs/2110.02861; Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235.
    Not counted: vectors below 4,096 elements, which bitsandbytes keeps in fp32 (under 0.01 % of a model).
    """
    if optimizer in ("adamw", "adamw-fused"):
        return 2 * SIZE_BYTES[dtype] * num_trained
    if optimizer == "adamw-8bit":
        return 2 * (num_trained + 4 * (num_trained // BLOCK_8BIT))
    if optimizer == "lion-8bit":
        return num_trained + 4 * (num_trained // BLOCK_8BIT)
    if optimizer == "adafactor":
        return 4 * matrix_edge_sum
    return 0


def paged_bytes(num_trained: int, optimizer: str) -> int:
    """Bytes in CUDA managed memory: outside PyTorch's count, evicted to the host under pressure.

    Source: bitsandbytes 0.50 `GlobalPageManager`, `get_paged`.
    """
    if optimizer == "paged-adamw-8bit":
        return 2 * (num_trained + 4 * (num_trained // BLOCK_8BIT))
    if optimizer == "paged-adamw-32bit":
        return 8 * num_trained
    return 0


def step_bytes(num_trained: int, dtype: str, optimizer: str, *, largest_tensor: int) -> int:
    """Temporary bytes of one optimizer step.

    PyTorch's default AdamW (foreach) makes one temporary the size of all trained parameters (the square root of the
    second moments); the fused form and bitsandbytes work in place. transformers' Adafactor works tensor by tensor in
    fp32 with two temporaries of the largest (the gradient's square, the update), and casts of the gradient and of the
    parameter where those are 16-bit.

    Source: PyTorch 2.13 `torch/optim/adamw.py` `_multi_tensor_adamw`; transformers 5.23 `optimization.py` Adafactor.
    Measured: Mistral-7B full fine-tuning in bf16 peaks at 5.00 copies of the weights (fms_acceleration, A100).
    """
    if optimizer == "adamw":
        return SIZE_BYTES[dtype] * num_trained
    if optimizer == "adafactor":
        return (2 + 2 * int(dtype != "fp32")) * 4 * largest_tensor
    return 0
