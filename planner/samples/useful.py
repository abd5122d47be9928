"""Tokens/s that are the samples' own: what a setup's speed leaves for data whose lengths are known.

A padded micro-batch is as long as its longest sample (with several GPUs: of all that are at work, since each waits for
the slowest), so that it computes padding, and shorter rows than the plan's length; a packed row is full. Memory stays
that of full rows: the worst batch decides whether a run survives.
"""

from collections.abc import Callable

from planner.outcome import Candidate
from planner.setup import TrainSetup
from planner.speed import Pairs, family_speeds
from planner.workload import Workload


def useful_speeds(workload: Workload, setup: TrainSetup) -> Callable[[str | None, Pairs], list[float]]:
    """`family_speeds` in tokens/s that are no padding; the same where the lengths are not known."""
    model, gpu, cluster = workload.model, workload.gpu, workload.cluster
    if not workload.data.real_fractions:
        return family_speeds(model, gpu, setup, cluster)
    by_length: dict[int, Callable[[str | None, Pairs], list[float]]] = {}

    def speeds(optimizer: str | None, pairs: Pairs) -> list[float]:
        found = []
        for pair in pairs:
            at_once = pair[0] * setup.data_degree
            length = workload.row_tokens(at_once)
            if length not in by_length:
                by_length[length] = family_speeds(model, gpu, setup.trusted_with(seq_len_tokens=length), cluster)
            found.append(workload.data.real_fraction(at_once) * by_length[length](optimizer, [pair])[0])
        return found

    return speeds


def useful_tokens_per_s(workload: Workload, candidate: Candidate) -> float:
    """Tokens/s of the samples' own: its rung's speed by what the formula says of padding and of shorter rows."""
    setup = candidate.setup
    pair = [(setup.micro_batch_seqs, setup.accumulation_steps)]
    whole = family_speeds(workload.model, workload.gpu, setup, workload.cluster)(setup.optimizer, pair)[0]
    return candidate.tokens_per_s * useful_speeds(workload, setup)(setup.optimizer, pair)[0] / whole
