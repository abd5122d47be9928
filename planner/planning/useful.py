"""Tokens/s that are the samples' own: what a setup's speed leaves for data whose lengths are known.

A padded micro-batch is as long as its longest sample (with several GPUs: of all that are at work, since each waits for
the slowest), so that it computes padding, and shorter rows than the plan's length; a packed row is full. Memory stays
that of full rows: the worst batch decides whether a run survives.
"""

from planner.memory.workload import Workload
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate
from planner.speed import Pairs, Speeds, family_speeds


class _UsefulSpeeds:
    def __init__(self, workload: Workload, setup: TrainSetup) -> None:
        self._workload, self._setup = workload, setup
        self._by_length: dict[int, Speeds] = {}

    def tokens_per_s(self, optimizer: str, pairs: Pairs, /) -> list[float]:
        workload, setup, speeds = self._workload, self._setup, []
        for pair in pairs:
            at_once = pair[0] * setup.data_degree
            length = workload.row_tokens(at_once)
            if length not in self._by_length:
                row = setup.replace_trusted(seq_len_tokens=length)
                self._by_length[length] = family_speeds(workload.model, workload.gpu, row, workload.cluster)
            rows = self._by_length[length].tokens_per_s(optimizer, [pair])
            speeds.append(workload.data.real_fraction(at_once) * rows[0])
        return speeds


def useful_speeds(workload: Workload, setup: TrainSetup) -> Speeds:
    """The speeds of a setup in tokens/s that are the samples' own."""
    if workload.data.real_fractions:
        return _UsefulSpeeds(workload, setup)
    return family_speeds(workload.model, workload.gpu, setup, workload.cluster)


def useful_fraction(workload: Workload, setup: TrainSetup) -> float:
    """Tokens/s of the samples' own over those of full rows, by what the formula says of padding and of shorter rows."""
    pair = [(setup.micro_batch_seqs, setup.accumulation_steps)]
    whole = family_speeds(workload.model, workload.gpu, setup, workload.cluster).tokens_per_s(setup.optimizer, pair)[0]
    return useful_speeds(workload, setup).tokens_per_s(setup.optimizer, pair)[0] / whole


def useful_tokens_per_s(workload: Workload, candidate: Candidate) -> float:
    """Tokens/s of the samples' own, of a level's speed."""
    return candidate.tokens_per_s * useful_fraction(workload, candidate.setup)


def epoch_s(workload: Workload, candidate: Candidate) -> float:
    """Seconds of one pass over the data, padding included."""
    return (workload.data.epoch_tokens or 0) / useful_tokens_per_s(workload, candidate)


def job_s(workload: Workload, candidate: Candidate) -> float | None:
    """Seconds of all passes over the data, None where their size or the speed is not known."""
    if not workload.data.epoch_tokens or not candidate.tokens_per_s:
        return None
    return workload.epochs * epoch_s(workload, candidate)


def cost_usd(workload: Workload, duration_s: float) -> float | None:
    """US dollars for all GPUs that long, None where no price is known."""
    price = workload.price_per_hour
    return None if price is None else duration_s / 3600 * price * workload.num_paid_gpus
