"""From raw tokens/s to what a user's data gets: padding, packing and the average length."""

from collections.abc import Sequence


def effective_tokens_per_s(
    tokens_per_s: float,
    *,
    seq_len: int,
    packing: bool,
    lengths: Sequence[int] | None = None,
    average: float | None = None,
    micro_batch_seqs: int = 1,
) -> float:
    """Useful (not padding) tokens per second, given the raw rate that counts every position.

    Packed: every position is useful except the tail of each pack; greedy packing (best fit decreasing) leaves a tail
    of at most a few percent, taken from the lengths themselves where they are given. Padded: each micro-batch is as
    long as its longest sample; with known lengths the waste is the mean over shuffled micro-batches, computed exactly
    from the order statistics; with only an average it is average / seq_len, the worst case of padding to `seq_len`.

    Source: Krell et al. 2021, Efficient sequence packing without cross-contamination, section 3,
    https://arxiv.org/abs/2107.02027.
    Not counted: that attention is cheaper for short samples, and that small batches run less efficiently.

    Raises:
        ValueError: neither lengths nor an average, or lengths below 1.
    """
    if lengths is not None:
        return tokens_per_s * useful_fraction(
            lengths, seq_len=seq_len, packing=packing, micro_batch_seqs=micro_batch_seqs
        )
    if average is None:
        raise ValueError("give lengths or an average length")
    if average <= 0:
        raise ValueError(f"average length must be above 0, got {average}")
    return tokens_per_s * (1.0 if packing else min(average / seq_len, 1.0))


def useful_fraction(lengths: Sequence[int], *, seq_len: int, packing: bool, micro_batch_seqs: int = 1) -> float:
    """Share of positions that hold a sample's token, for samples cut at `seq_len`.

    Padded micro-batches of b samples drawn at random: the expected longest is the mean of the largest of b, which the
    sorted lengths give exactly: sum_i x_(i) ((i/n)^b - ((i-1)/n)^b).

    Raises:
        ValueError: no lengths, or one below 1.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must be at least 1, and there must be one")
    cut = sorted(min(length, seq_len) for length in lengths)
    total = sum(cut)
    if packing:
        return total / (_num_packs(cut, seq_len) * seq_len)
    num = len(cut)
    longest = 0.0
    before = 0.0
    for index, length in enumerate(cut, start=1):
        now = (index / num) ** micro_batch_seqs
        longest += length * (now - before)
        before = now
    return total / num / longest


def _num_packs(ascending: Sequence[int], seq_len: int) -> int:
    """Packs that best-fit-decreasing needs; free space is counted by size, so the cost is lengths x distinct sizes."""
    free = [0] * (seq_len + 1)
    packs = 0
    for length in reversed(ascending):
        room = next((size for size in range(length, seq_len + 1) if free[size]), None)
        if room is None:
            packs += 1
            room = seq_len
        else:
            free[room] -= 1
        free[room - length] += 1
    return packs
