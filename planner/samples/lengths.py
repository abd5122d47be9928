"""Sequence lengths of a shuffled epoch: from a data set or a stated distribution, as micro-batches."""

import math
import random
from collections.abc import Sequence

from planner.core.errors import UsageError
from planner.core.records import dataclass

PAD_TO = 8
"""Micro-batches are padded to a multiple of so many tokens, as transformers' collators do for tensor cores."""
STATED_SAMPLES = 1_000
"""Lengths that stand for a stated distribution."""


@dataclass(frozen=True, kw_only=True)
class OverLengths:
    """Memory over micro-batches of a shuffled epoch, each padded to its longest sample.

    Attributes:
        num_micro_batches: that were replayed, the epoch's longest among them.
        num_lengths: different padded lengths among them.
        rounded: whether lengths were rounded up to few, as the step's events do not follow from the length by formula.
        peak_reserved_bytes: without a limit, starting from an empty card.
        constant_reserved_bytes: where every micro-batch has the longest length.
        num_retries: how often PyTorch gives cached memory back within the card's limit; None where it runs out.
    """

    source: str
    seed: int
    num_micro_batches: int
    num_lengths: int
    shortest_tokens: int
    longest_tokens: int
    rounded: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    constant_reserved_bytes: int
    num_retries: int | None

    @property
    def fragmentation_fraction(self) -> float:
        """Share of the reserved peak beyond that of constant length."""
        return max(0.0, 1 - self.constant_reserved_bytes / self.peak_reserved_bytes)


def stated_lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens of "MEAN:SD" or "MEAN:SD:MIN:MAX": quantiles of the lognormal distribution of such a mean and
    standard deviation, without what lies outside MIN and MAX. Lengths of texts are skewed and never negative.

    Raises:
        UsageError: not two or four positive numbers, or nothing between MIN and MAX.
    """
    from statistics import NormalDist  # slow to import

    hint = "--lengths 900:400, or 900:400:50:4000 with the shortest and the longest"
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 4) or not all(0 < number < 1e9 for number in numbers):
        raise UsageError(f"--lengths takes MEAN:SD in tokens, got {text!r}", hint=hint)
    mean, deviation, least, most = (*numbers, 1.0, 1e9)[:4]
    variance = math.log(1 + (deviation / mean) ** 2)
    normal = NormalDist(math.log(mean) - variance / 2, math.sqrt(variance))
    every = (round(math.exp(normal.inv_cdf((index + 0.5) / STATED_SAMPLES))) for index in range(STATED_SAMPLES))
    kept = tuple(length for length in every if max(1, least) <= length <= most)
    if not kept:
        raise UsageError(f"--lengths {text}: no length lies between {least:g} and {most:g}", hint=hint)
    return kept


def micro_batches(
    lengths: Sequence[int], *, micro_batch_seqs: int, seq_len_tokens: int, num: int, seed: int
) -> tuple[int, ...]:
    """Padded lengths in tokens of the first `num` micro-batches of a shuffled epoch, longer samples cut at
    `seq_len_tokens`; where its longest is not among them it takes the last one's place."""
    samples = [min(length, seq_len_tokens) for length in lengths]
    random.Random(seed).shuffle(samples)
    while len(samples) < micro_batch_seqs:
        samples += samples
    whole = len(samples) // micro_batch_seqs * micro_batch_seqs
    starts = range(0, whole, micro_batch_seqs)
    longest = [max(samples[start : start + micro_batch_seqs]) for start in starts]
    epoch = [min(seq_len_tokens, -(-length // PAD_TO) * PAD_TO) for length in longest]
    drawn = epoch[:num]
    if max(epoch) not in drawn:
        drawn[-1] = max(epoch)
    return tuple(drawn)
