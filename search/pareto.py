"""The Pareto set: candidates that nothing else beats in tokens/s, device peak and LoRA rank at once."""

from collections.abc import Sequence

from planner.outcome import Candidate


def pareto_set(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that fit and are dominated by no other that fits, fastest first.

    One dominates another when it is at least as fast, needs at most as much memory, has at least the rank, and is
    better in one of the three. Full fine-tuning (rank 0) adapts every weight: it counts as the highest rank.
    Each candidate speaks from its own highest rung.
    """
    ranked = sorted(
        (candidate for candidate in candidates if candidate.fits),
        key=lambda c: (-c.tokens_per_s, c.memory_evidence.peak_device_bytes, -_rank(c)),
    )
    kept: list[Candidate] = []
    for candidate in ranked:
        memory, rank = candidate.memory_evidence.peak_device_bytes, _rank(candidate)
        # All kept ones are at least as fast: one that is also as small and as high in rank dominates (or equals) this.
        if not any(k.memory_evidence.peak_device_bytes <= memory and _rank(k) >= rank for k in kept):
            kept.append(candidate)
    return tuple(kept)


def _rank(candidate: Candidate) -> float:
    return float("inf") if candidate.setup.method == "full" else float(candidate.setup.lora_rank)
