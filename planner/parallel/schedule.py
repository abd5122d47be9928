"""Pipeline schedules: how long one step takes, and how much of it is bubble. What is in flight: `rank.in_flight`.

Source: Huang et al. 2019, GPipe, section 2.3, arXiv:1811.06965 (bubble (p - 1) / (m + p - 1)); Narayanan et al. 2021,
Memory-efficient pipeline-parallel DNN training, arXiv:2006.09503 (1F1B, PipeDream-flush: the same bubble); Narayanan et
al. 2021, arXiv:2104.04473, section 2.2.
"""

from collections.abc import Sequence


def pipeline_s(schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """Seconds of one step over stages of unequal length: fill, then the slowest stage sets the pace, then drain.

    Each of m equal jobs passes all stages in order: sum + (m - 1) x longest. GPipe does so twice (all forwards, then
    all backwards), 1F1B once with forward and backward together. Equal stages give m (f + b) / (1 - bubble fraction).
    """
    if schedule == "gpipe":
        return _flow_s(forward_s, micro_batches) + _flow_s(backward_s, micro_batches)
    return _flow_s([one + other for one, other in zip(forward_s, backward_s, strict=True)], micro_batches)


def _flow_s(stage_s: Sequence[float], jobs: int) -> float:
    return sum(stage_s) + (jobs - 1) * max(stage_s)
