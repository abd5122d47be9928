"""The textbook's memory formulas, kept beside the real-stack terms: golden tests, and what people compare with.

Where they differ from the real stack, docs/memory-model.md says why. All sizes in bytes, `bytes_per_element` is N_b.
"""


def zero_states_bytes(num_params: int, *, stage: int, num_ranks: int) -> float:
    """Model states of one rank in mixed-precision Adam: 2 (weights) + 2 (gradients) + 12 (fp32 weights and moments) per
    parameter, of which stage 1 cuts the 12 over the ranks, stage 2 also the gradients, stage 3 everything; 0 is DDP.

    Source: Rajbhandari et al. 2020, ZeRO, section 5 and figure 1, https://arxiv.org/abs/1910.02054.
    Not counted: buckets, gathered weights, activations.
    """
    bytes_by_stage = {0: 16.0, 1: 4 + 12 / num_ranks, 2: 2 + 14 / num_ranks, 3: 16 / num_ranks}
    return bytes_by_stage[stage] * num_params


def tensor_parallel_activations_bytes(
    *, seq_len: int, batch: int, hidden: int, num_heads: int, degree: int, sequence_parallel: bool = False
) -> float:
    """16-bit activations of one layer of a classic transformer under tensor parallelism, on one rank:
    s b h (10 + 24/t + 5 a s/(h t)); with sequence parallelism s b h/t (34 + 5 a s/h).

    The 10 is what every rank keeps whole without sequence parallelism: the norms' inputs (4), the inputs of the
    attention's and the MLP's first matrix (4) and two dropout masks (2).

    Source: Korthikanti et al. 2022, Reducing Activation Recomputation, equations 2 and 4,
    https://arxiv.org/abs/2205.05198.
    """
    rows = seq_len * batch * hidden
    scores = 5 * num_heads * seq_len / hidden
    if sequence_parallel:
        return rows / degree * (34 + scores)
    return rows * (10 + 24 / degree + scores / degree)
