"""Our sampler: the formula is the prior mean, a Gaussian process learns its errors, the next probe promises most.

`Posterior` holds what is known about every candidate; `propose` asks it which one to probe: expected improvement
over the best that fits, times the probability of fitting, times the probability of running at all.

A probe that crashes, or is far slower or larger than any error of the formula explains (a fallback kernel, a missing
library), has one cause: a value of some field, or two values together. Every suspect that a good run shares is cleared.
The rest share the blame in proportion to how often such a cause is seen, and a candidate loses as much of its chance as
the suspects it shares hold of the blame.
"""

import copy
from collections.abc import Sequence
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from planner.setup.outcome import Evidence, FailureKind, Measurement, Prediction, ProbeFailure
from search.problem import Observation, Problem, Result
from search.residual import SURPRISE, Encoding, ErrorKernel, Floats, Residual, cdf, encode, parts_of, pdf, share_matrix

UNSUSPECTED = 0.01  # chance left to a candidate that shares every suspect with a failure
CLEARED = 0.05  # chance that a failure whose every suspect has run elsewhere repeats on a setup that shares all of them
NAMED = 100.0  # how much more a value is suspected that the failure's message names
PAIR_BLAME = 0.02  # of any two values, relative to the product of their fields' blame
KNOWN_PAIRS = {
    frozenset(("attention", "precision")),  # SDPA's math kernel for fp32 hidden states (torch 2.13)
    frozenset(("attention", "kbit_fp32_cast")),
    frozenset(("attention", "packing")),
    frozenset(("compile", "quantization")),
    frozenset(("compile", "checkpointing")),
    frozenset(("precision", "optimizer")),
}
KNOWN_PAIR_BLAME = 0.5
WORDS = {"compile": ("compil", "dynamo", "inductor"), "quantization": ("quantiz", "4bit", "8bit", "bitsandbytes")}
"""Words by which messages name a field, whatever its value; a field that is off is not named."""
OFF = ("none", "False", "0")


class FailureAttribution:
    """All incidents and all good runs so far."""

    def __init__(self, encoding: Encoding, num: int) -> None:
        self._encoding = encoding
        self._levels = encoding.levels[:num]
        self._failures: list[tuple[int, str, bool]] = []
        self._good: list[int] = []
        self._chance: Floats | None = None
        names = [dimension.name for dimension in encoding.dimensions]
        single = np.array([dimension.attribution for dimension in encoding.dimensions])
        pair = PAIR_BLAME * np.sqrt(np.outer(single, single))
        for i, first in enumerate(names):
            for j, second in enumerate(names):
                if frozenset((first, second)) in KNOWN_PAIRS:
                    pair[i, j] = KNOWN_PAIR_BLAME * np.sqrt(single[i] * single[j])
        self._single, self._pair = single, np.triu(pair, k=1)

    def succeeded(self, row: int) -> None:
        """A run without surprise clears its values and pairs."""
        self._good.append(row)
        self._chance = None

    def failed(self, row: int, message: str = "", *, pairs_only: bool = False) -> None:
        """A candidate failed (or crawled), with the message it left.

        Args:
            pairs_only: it did run, so single values are little to blame: most of them have an own error in the
                formula's error model already.
        """
        self._failures.append((row, message, pairs_only))
        self._chance = None

    def chance(self) -> Floats:
        """Per candidate, the probability that no known cause of trouble strikes it. Not to be changed in place."""
        if self._chance is not None:
            return self._chance
        chance = np.ones(len(self._levels))
        for row, message, pairs_only in self._failures:
            single, pair = self._weights(row, message, pairs_only)
            total = single.sum() + pair.sum()
            shared = (self._levels == self._encoding.levels[row]).astype(np.float64)
            if total > 0:
                share = (shared @ single + ((shared @ pair) * shared).sum(axis=1)) / total
                chance *= np.maximum(1.0 - share, UNSUSPECTED)
            else:
                chance *= 1.0 - CLEARED * shared.mean(axis=1)
        self._chance = chance
        return chance

    def _weights(self, failed: int, message: str, pairs_only: bool) -> tuple[Floats, Floats]:
        levels = self._encoding.levels
        cleared = np.zeros(len(self._single), dtype=bool)
        cleared_pair = np.zeros_like(self._pair, dtype=bool)
        for row in self._good:
            same = levels[row] == levels[failed]
            cleared |= same
            cleared_pair |= np.outer(same, same)
        named = self._named(failed, message)
        single = np.where(cleared, 0.0, self._single * named)
        if pairs_only:
            single = single * 0.3
        # A message that names both accuses the two together: torch.compile may fail on quantized weights only.
        both = np.where(np.outer(named > 1, named > 1), NAMED**2, 1.0)
        return single, np.where(cleared_pair, 0.0, self._pair * both)

    def _named(self, row: int, message: str) -> Floats:
        text = _letters(message)
        factors = np.ones(len(self._single))
        for position, dimension in enumerate(self._encoding.dimensions):
            value = str(self._encoding.values[position][self._encoding.levels[row, position]])
            if value in OFF:
                continue
            words = (dimension.name if value in ("True", "1") else value, *WORDS.get(dimension.name, ()))
            if any(len(word) > 2 and _letters(word) in text for word in words):
                factors[position] = NAMED
        return factors


def _letters(text: str) -> str:
    """Without what one spells with a hyphen and another with an underscore or nothing."""
    return text.lower().replace("-", "").replace("_", "")


NOMINAL_MEMORY_BAND = 0.08
NOMINAL_TIME_BAND = 0.30
MIN_SCALE = 0.3  # bands narrower than a third of the nominal ones are not believed
SPEED_NOISE_SD = 0.006  # repeats of one setup on one machine (2.4 % is what software versions differ by)
MEMORY_NOISE_SD = 0.003  # caching-allocator rounding
DRY_RUN_NOISE_SD = 0.01
MIN_PROBABILITY = 1e-9
WORTH = 0.01  # an improvement counts from this share on: else near copies of the best are probed one after another


class Posterior:
    """What formula and results together say about every candidate.

    Results are told in order with `tell`; the same order gives the same posterior.
    """

    def __init__(self, problem: Problem, transfer: Sequence[Observation] = ()) -> None:
        self.problem = problem
        candidates = problem.candidates
        self.num = len(candidates)
        setups = [candidate.setup for candidate in candidates] + [item.setup for item in transfer]
        groups = [0] * self.num + [item.group for item in transfer]
        self.encoding: Encoding = encode(setups, groups)
        formulas = [candidate.formula for candidate in candidates]
        self.log_speed = np.log([float(formula.tokens_per_s or 1.0) for formula in formulas])
        self.log_memory = np.log([float(formula.peak_device_bytes) for formula in formulas])
        self.log_budget = log(problem.budget_bytes)
        self.log_gpus = np.log([float(candidate.setup.num_gpus) for candidate in candidates])
        memory_band = float(np.median([formula.memory_band_fraction for formula in formulas]))
        time_bands = [formula.time_band_fraction for formula in formulas if formula.time_band_fraction]
        time_band = float(np.median(time_bands)) if time_bands else NOMINAL_TIME_BAND
        parts = [(c.setup, c.formula) for c in candidates] + [(item.setup, item.formula) for item in transfer]
        shares, scale = share_matrix([parts_of(*pair, "speed") for pair in parts]), time_band / NOMINAL_TIME_BAND
        self.speed = Residual(ErrorKernel(self.encoding, "speed", shares, scale=max(scale, MIN_SCALE)))
        shares, scale = share_matrix([parts_of(*pair, "memory") for pair in parts]), memory_band / NOMINAL_MEMORY_BAND
        self.memory = Residual(ErrorKernel(self.encoding, "memory", shares, scale=max(scale, MIN_SCALE)))
        self.open = np.array([not problem.exclusion(candidate) for candidate in candidates])
        """Candidates not excluded and not yet answered."""
        self.best: Result | None = None
        self.best_score = -np.inf
        self.results: list[Result] = []
        self._blame = FailureAttribution(self.encoding, self.num)
        for position, item in enumerate(transfer):
            if item.speed_error is not None:
                self.speed.observe(self.num + position, item.speed_error, SPEED_NOISE_SD)
            self.memory.observe(self.num + position, item.memory_error, MEMORY_NOISE_SD)

    def tell(self, result: Result) -> None:
        index, evidence = result.index, result.evidence
        self.open[index] = False
        self.results.append(result)
        if isinstance(evidence, ProbeFailure):
            self._tell_failure(index, evidence)
            return
        noise = DRY_RUN_NOISE_SD if isinstance(evidence, Prediction) else MEMORY_NOISE_SD
        memory_error = log(evidence.peak_device_bytes) - self.log_memory[index]
        surprise = self.memory.observe_robustly(index, memory_error, noise) > SURPRISE
        if evidence.tokens_per_s is not None:
            speed_error = log(evidence.tokens_per_s) - self.log_speed[index]
            surprise |= self.speed.observe_robustly(index, speed_error, SPEED_NOISE_SD) < -SURPRISE
        if surprise:
            self._blame.failed(index, pairs_only=True)
        else:
            self._blame.succeeded(index)
        candidate = self.problem.candidates[index]
        if self.problem.feasible(candidate.setup, evidence):
            score = self.problem.score(candidate, evidence)
            if score > self.best_score:
                self.best, self.best_score = result, score

    def tell_excluded(self, index: int, evidence: Evidence, *, close: bool = True) -> None:
        """The dry run found that this candidate does not fit: knowledge about memory, no probe."""
        if close:
            self.open[index] = False
        if isinstance(evidence, (Prediction, Measurement)):
            self.memory.observe(index, log(evidence.peak_device_bytes) - self.log_memory[index], DRY_RUN_NOISE_SD)

    def free(self, running: Sequence[int]) -> NDArray[np.bool_]:
        free = self.open.copy()
        free[list(running)] = False
        return free

    def _tell_failure(self, index: int, failure: ProbeFailure) -> None:
        if failure.kind is not FailureKind.OUT_OF_MEMORY:
            self._blame.failed(index, failure.message)
            return
        limit = log(max(self.problem.memory_bytes, self.problem.budget_bytes))
        if self.memory.observe_censored(index, limit - self.log_memory[index]) > SURPRISE:
            # Nothing that grows with the setup: a kernel that keeps what no other does. The rest of them still fits.
            self._blame.failed(index, pairs_only=True)
        # What differs from a setup that ran out of memory only by a larger micro-batch (or rank) runs out too.
        code = self.encoding
        worse = np.ones(self.num, dtype=bool)
        for position, dimension in enumerate(code.dimensions):
            column = code.levels[: self.num, position]
            level = code.levels[index, position]
            growing = dimension.name in ("micro_batch_seqs", "lora_rank")
            worse &= (column >= level) if growing else (column == level)
        self.open &= ~worse

    def score_moments(self) -> tuple[Floats, Floats]:
        if self.problem.objective == "memory":
            return -(self.log_memory + self.memory.mean[: self.num]), np.sqrt(self.memory.variance[: self.num])
        offset = self.log_gpus if self.problem.objective == "cost" else 0.0
        mean = self.log_speed + self.speed.mean[: self.num] - offset
        return mean, np.sqrt(self.speed.variance[: self.num])

    def probability_fits(self) -> Floats:
        """Probability that the device peak stays within the budget, per candidate."""
        mean = self.log_memory + self.memory.mean[: self.num]
        return cdf((self.log_budget - mean) / np.sqrt(self.memory.variance[: self.num]))

    def probability_runs(self) -> Floats:
        """Probability that no known cause of failure or of a crawl strikes a candidate."""
        return self._blame.chance()


def expected_improvement(mean: Floats, sd: Floats, best: float) -> Floats:
    """Expected gain over `best` of a normal score; with no best yet (-inf): the score itself, shifted to be positive.

    Source: Mockus, 1978; Jones, Schonlau and Welch, 1998, Efficient global optimization.
    """
    if best == -np.inf:
        result: Floats = np.exp(mean - mean.max())
        return result
    z = (mean - best) / sd
    gain: Floats = sd * (z * cdf(z) + pdf(z))
    return np.maximum(gain, 0.0)


def propose(posterior: Posterior, running: Sequence[int]) -> int | None:
    """Index of the candidate with the largest expected improvement times probability of fitting and running; None when
    none is left. The same posterior gives the same choice, so a search can resume.
    """
    free = posterior.free(running)
    if not free.any():
        return None
    if running:  # as if these probes had already returned what is expected of them
        posterior = copy.copy(posterior)
        posterior.speed, posterior.memory = posterior.speed.copy(), posterior.memory.copy()
        for index in running:
            posterior.speed.fantasize(index, SPEED_NOISE_SD)
            posterior.memory.fantasize(index, MEMORY_NOISE_SD)
    return int(np.argmax(acquisition(posterior, free)))


def acquisition(posterior: Posterior, open_: NDArray[np.bool_]) -> Floats:
    mean, sd = posterior.score_moments()
    chance = np.maximum(posterior.probability_fits() * posterior.probability_runs(), MIN_PROBABILITY)
    if posterior.best_score == -np.inf:
        # Nothing fits yet: the value of a probe is what it would earn, so certainty of fitting weighs most.
        gain = np.exp(mean - mean[open_].max())
    else:
        gain = expected_improvement(mean, sd, posterior.best_score + WORTH)
    # Where all gains vanish, the most probable improvement still decides.
    tie_break = 1e-12 * cdf((mean - max(posterior.best_score, -1e300)) / sqrt(float(np.median(sd**2))))
    return np.where(open_, gain * chance + tie_break, -1.0)
