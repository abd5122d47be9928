"""The Pareto front of speed against memory."""

from collections.abc import Iterable

from planner.outcome import Candidate


def pareto_front(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both speed and memory, smallest memory first.

    Of candidates that tie in both, the first one given stays.
    """
    front: list[Candidate] = []
    fastest = 0.0
    for one in sorted(candidates, key=lambda one: (one.memory_evidence.peak_device_bytes, -one.tokens_per_s)):
        if one.tokens_per_s > fastest:
            front.append(one)
            fastest = one.tokens_per_s
    return tuple(front)
