"""When to stop: nothing left can plausibly beat the best by more than the margin, or the budget is spent."""

from dataclasses import dataclass
from math import log1p
from statistics import median

import numpy as np

from search.problem import Problem
from search.residual import Floats, cdf
from search.sampler import Posterior

MARGIN = 0.01
PLAUSIBLE = 0.05
"""Stop when the probability that anything left is more than `margin` better falls below this."""
JOINT_SETUPS = 128
NUM_SAMPLES = 400


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much may be spent: probes over the whole study, seconds of this call. None: no limit.

    Attributes:
        since_s: of `time.monotonic`, when the seconds begin to count; None: with the search.
    """

    max_probes: int | None = None
    seconds: float | None = None
    since_s: float | None = None

    def spent(self, *, num_probes: int, elapsed_s: float, durations_s: list[float]) -> str:
        """Why no further probe may start; empty when one may.

        No probe starts that would, at the median duration so far, end after the time limit.
        """
        if self.max_probes is not None and num_probes >= self.max_probes:
            return f"the budget of {self.max_probes} probes is spent"
        if self.seconds is not None:
            expected = median(durations_s) if durations_s else 0.0
            if elapsed_s >= self.seconds:
                return f"the budget of {self.seconds:g} s is spent"
            if num_probes and elapsed_s + expected > self.seconds:
                return f"the next probe would end after the budget of {self.seconds:g} s"
        return ""


def probability_of_better(posterior: Posterior, *, margin: float = MARGIN) -> float:
    """Probability that some open candidate runs, fits and beats the best by more than `margin`.

    Joint, not candidate by candidate: the errors of similar setups are alike, so a thousand of them are one doubt, not
    a thousand. Sampled from the joint posterior of the most promising ones with a fixed seed.
    """
    if posterior.best_score == -np.inf:
        return 1.0 if bool(posterior.open.any()) else 0.0
    target = posterior.best_score + log1p(margin)
    mean, sd = posterior.score_moments()
    chance = np.where(posterior.open, cdf((mean - target) / sd), 0.0) * posterior.probability_runs()
    chance = chance * posterior.probability_fits()
    rows = np.argsort(-chance, kind="stable")[:JOINT_SETUPS]
    rows = rows[chance[rows] > 1e-6]
    if len(rows) == 0:
        return 0.0
    random = np.random.default_rng(20261121)
    memory_noise = random.standard_normal((NUM_SAMPLES, len(rows)))
    memory_mean = posterior.log_memory[rows] + posterior.memory.mean[rows]
    memory = memory_mean + _correlated(memory_noise, posterior.memory.covariance(rows))
    runs = random.random((NUM_SAMPLES, len(rows))) < posterior.probability_runs()[rows]
    if posterior.problem.objective == "memory":
        score = -memory
    else:
        score_noise = random.standard_normal((NUM_SAMPLES, len(rows)))
        score = mean[rows] + _correlated(score_noise, posterior.speed.covariance(rows))
    better = (score > target) & (memory <= posterior.log_budget) & runs
    return float(better.any(axis=1).mean())


def _correlated(noise: Floats, covariance: Floats) -> Floats:
    """Independent standard normals [samples, setups] given a covariance, which may be singular."""
    jitter = 1e-9 + 1e-7 * float(np.trace(covariance)) / len(covariance)
    root = np.linalg.cholesky(covariance + jitter * np.eye(len(covariance)))
    # einsum, not @: see `Residual`.
    result: Floats = np.einsum("sj,ij->si", noise, root)
    return result


def converged(problem: Problem, posterior: Posterior, *, margin: float = MARGIN) -> str:
    """Why nothing left is worth a probe; empty while something is."""
    if not posterior.open.any():
        return f"all {len(problem.candidates)} candidates are answered or excluded"
    probability = probability_of_better(posterior, margin=margin)
    if probability < PLAUSIBLE:
        return (
            f"nothing left can plausibly beat the best by more than {100 * margin:g} % "
            f"(probability {100 * probability:.1f} %)"
        )
    return ""
