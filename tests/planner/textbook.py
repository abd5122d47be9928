"""The textbook's memory formulas, kept beside the real-stack terms: golden tests, and what people compare with.

Where they differ from the real stack, docs/memory-model.md says why. All sizes in bytes, `bytes_per_element` is N_b.
"""


def classic_activations_bytes(
    *, num_layers: int, seq_len: int, batch: int, hidden: int, num_heads: int, bytes_per_element: int = 2
) -> int:
    """Activations of a classic transformer without checkpointing: L((16 N_b + 2) s b h + (2 N_b + 1) a s^2 b).

    Source: Korthikanti et al. 2022, Reducing Activation Recomputation, equation 1, https://arxiv.org/abs/2205.05198
    (N_b = 2: s b h L (34 + 5 a s / h)).
    Not counted: embeddings and the loss chain.
    """
    n = bytes_per_element
    linear = (16 * n + 2) * seq_len * batch * hidden
    quadratic = (2 * n + 1) * num_heads * seq_len**2 * batch
    return num_layers * (linear + quadratic)


def checkpointed_activations_bytes(
    *, num_layers: int, seq_len: int, batch: int, hidden: int, bytes_per_element: int = 2
) -> int:
    """Stored layer inputs with full checkpointing: N_b s b h L (2 s b h L in 16 bit).

    Source: Korthikanti et al. 2022, section 5, https://arxiv.org/abs/2205.05198.
    Not counted: the one layer that is recomputed.
    """
    return bytes_per_element * num_layers * seq_len * batch * hidden


def zero_activations_bytes(
    *, num_layers: int, seq_len: int, batch: int, hidden: int, bytes_per_element: int = 2
) -> int:
    """Activations of a GPT-2-like transformer as ZeRO estimates them: 12 s b h L elements.

    Source: Rajbhandari et al. 2020, ZeRO, section 3.2, footnote, https://arxiv.org/abs/1910.02054.
    Not counted: the attention's s x s scores, which at 1,024 tokens are most of `classic_activations_bytes`.
    """
    return 12 * bytes_per_element * num_layers * seq_len * batch * hidden


def adam_states_bytes(num_params: int) -> int:
    """fp32 Adam: weights, gradients and two moments, 16 bytes per parameter.

    Source: Rajbhandari et al. 2020, ZeRO, section 3.1, https://arxiv.org/abs/1910.02054.
    """
    return 16 * num_params


def mixed_precision_states_bytes(num_params: int, *, gradient_bytes: int = 2) -> int:
    """16-bit weights (2), gradients (2, or 4 under autocast), fp32 weights and moments (12): 16 or 18 per parameter.

    Source: Rajbhandari et al. 2020, ZeRO, section 3.1, https://arxiv.org/abs/1910.02054.
    """
    return (2 + gradient_bytes + 12) * num_params


def lora_bytes(num_params: int, trained_fraction: float) -> float:
    """16-bit base (2 bytes) plus mixed-precision states (16 bytes) of the trained fraction.

    Source: Hu et al. 2021, LoRA, section 4.2, https://arxiv.org/abs/2106.09685, with ZeRO's 16 bytes per parameter.
    """
    return 2 * num_params + 16 * trained_fraction * num_params


def qlora_bytes(num_params: int, trained_fraction: float) -> float:
    """4-bit base (half a byte) plus mixed-precision states (16 bytes) of the trained fraction.

    Source: Dettmers et al. 2023, QLoRA, section 3, https://arxiv.org/abs/2305.14314.
    Not counted: block scales (0.127 bits per weight with double quantization).
    """
    return 0.5 * num_params + 16 * trained_fraction * num_params


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
