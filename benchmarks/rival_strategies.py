"""What others do, behind the same seam: baselines for the benchmark of search strategies.

Each is a `Sampler`: it sees the results so far and names the next candidate, or None when its procedure ends.
"""

from collections.abc import Sequence

import numpy as np

from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, ProbeFailure
from search.residual import Floats
from search.sampler import Posterior

DEFAULTS = {
    "method": "lora",
    "quantization": "none",
    "precision": "bf16-autocast",
    "attention": "sdpa",
    "checkpointing": 1,
    "loss": "full",
    "compile": False,
}
"""What a user of a trainer starts from: LoRA in bf16 with SDPA and gradient checkpointing."""

DEEPSPEED_EARLY_STOP = 5
DEEPSPEED_EXPLORATION = 0.2


class RankedSampler:
    """The candidates in the formula's order, the fastest that it says fits first: prediction without learning."""

    name = "ranked"

    def propose(self, posterior: Posterior, running: Sequence[int], seed: int) -> int | None:
        """The best-ranked open candidate; beyond those that fit by formula, the smallest."""
        open_ = posterior.free(running)
        if not open_.any():
            return None
        fits = open_ & (posterior.log_memory <= posterior.log_budget)
        if fits.any():
            return int(np.argmax(np.where(fits, posterior.log_speed, -np.inf)))
        return int(np.argmin(np.where(open_, posterior.log_memory, np.inf)))


class DoublingSampler:
    """A trainer's automatic batch finder: the user's setup, its micro-batch doubled until it runs out of memory.

    Source: Lightning's `BatchSizeFinder` in mode "power"; accelerate's `find_executable_batch_size` halves from above.
    Where the user's setup does not fit even at micro-batch 1, the user turns to QLoRA (NF4) by hand.
    """

    name = "doubling"

    def propose(self, posterior: Posterior, running: Sequence[int], seed: int) -> int | None:
        """The next doubling, None after the first that failed."""
        for quantization, method in (("none", "lora"), ("nf4-double", "qlora")):
            wanted = {**DEFAULTS, "quantization": quantization, "method": method}
            ladder = _ladder(posterior, wanted)
            tried = {result.index: result.evidence for result in posterior.results}
            done = [index for index in ladder if index in tried]
            if any(_failed(posterior, index) for index in done):
                if done and done[0] == ladder[0] and _failed(posterior, ladder[0]):
                    continue  # not even one sequence: the next recipe
                return None
            rest = [index for index in ladder if index not in tried]
            return rest[0] if rest else None
        return None


class DeepSpeedSampler:
    """A tuner in the manner of DeepSpeed's autotuner, with methods in the place of ZeRO stages.

    Stage by stage, from the one that saves no memory: the micro-batch grows by doubling while throughput grows; a stage
    whose best is below the last stage's best ends the stages. Then the best stage's other settings are tuned by a
    cost model that is fitted to the results (here ridge regression; there XGBoost), 20 % at random, until five
    experiments in a row bring nothing.

    Source: DeepSpeed `deepspeed/autotuning/autotuner.py` and its README (fast mode off, tuner_type "model_based",
    tuner_early_stopping 5); nothing of its code is used.
    """

    name = "deepspeed"

    def propose(self, posterior: Posterior, running: Sequence[int], seed: int) -> int | None:
        """The next experiment of the procedure, None at its end."""
        if not posterior.open.any():
            return None
        stages = [("full", "none"), ("lora", "none"), ("qlora", "nf4"), ("qlora", "nf4-double")]
        speeds = {result.index: _speed(posterior, result.index) for result in posterior.results}
        best_stage, best_speed = None, 0.0
        for method, quantization in stages:
            ladder = _ladder(posterior, {**DEFAULTS, "method": method, "quantization": quantization})
            # Like DeepSpeed's own estimate of what one sequence needs: a stage that cannot fit is not tried.
            if not ladder or posterior.log_memory[ladder[0]] > posterior.log_budget:
                continue
            stage_best = 0.0
            for index in ladder:
                if index not in speeds:
                    if not posterior.open[index]:
                        break  # does not fit by the formula, or a smaller one ran out of memory
                    return index
                if speeds[index] <= stage_best:
                    break
                stage_best = speeds[index]
            if stage_best > best_speed:
                best_stage, best_speed = (method, quantization), stage_best
            elif best_stage is not None:
                break
        if best_stage is None:
            return None
        return self._tune(posterior, best_stage, speeds, seed)

    def _tune(self, posterior: Posterior, stage: tuple[str, str], speeds: dict[int, float], seed: int) -> int | None:
        order = [speeds[result.index] for result in posterior.results]
        since_best = len(order) - 1 - int(np.argmax(order))
        if since_best >= DEEPSPEED_EARLY_STOP:
            return None
        inside = np.array(
            [
                open_ and (c.setup.method, c.setup.quantization) == stage
                for open_, c in zip(posterior.open, posterior.problem.candidates, strict=True)
            ]
        )
        if not inside.any():
            return None
        random = np.random.default_rng([seed, len(order)])
        if random.random() < DEEPSPEED_EXPLORATION:
            return int(random.choice(np.flatnonzero(inside)))
        features = _one_hot(posterior)
        rows = [result.index for result in posterior.results]
        x, y = features[rows], np.array(order)
        scale = float(y.max()) or 1.0
        weights = np.linalg.solve(x.T @ x + 1.0 * np.eye(x.shape[1]), x.T @ (y / scale))
        noise = 1e-6 * random.random(len(features))  # equal predictions: any of them
        return int(np.argmax(np.where(inside, features @ weights + noise, -np.inf)))


def _matches(setup: TrainSetup, wanted: dict[str, object]) -> bool:
    return all(getattr(setup, name) == value for name, value in wanted.items())


def _ladder(posterior: Posterior, wanted: dict[str, object]) -> list[int]:
    """Candidates with these settings, by rising micro-batch (one per size, the first).

    A default that no candidate has (a recorded grid knows one attention kernel only) is not asked for.
    """
    setups = [candidate.setup for candidate in posterior.problem.candidates]
    recipe = ("method", "quantization")
    wanted = {
        name: value
        for name, value in wanted.items()
        if name in recipe or any(getattr(setup, name) == value for setup in setups)
    }
    found: dict[int, int] = {}
    for index, candidate in enumerate(posterior.problem.candidates):
        if _matches(candidate.setup, wanted):
            found.setdefault(candidate.setup.micro_batch_seqs, index)
    return [found[size] for size in sorted(found)]


def _failed(posterior: Posterior, index: int) -> bool:
    evidence = next(result.evidence for result in posterior.results if result.index == index)
    if isinstance(evidence, ProbeFailure):
        return evidence.kind is FailureKind.OUT_OF_MEMORY
    return not posterior.problem.feasible(posterior.problem.candidates[index].setup, evidence)


def _speed(posterior: Posterior, index: int) -> float:
    evidence = next(result.evidence for result in posterior.results if result.index == index)
    if not posterior.problem.feasible(posterior.problem.candidates[index].setup, evidence):
        return 0.0
    assert not isinstance(evidence, ProbeFailure)
    return evidence.tokens_per_s or 0.0


def _one_hot(posterior: Posterior) -> Floats:
    code = posterior.encoding
    columns = [np.ones((posterior.num, 1))]
    for position, values in enumerate(code.values):
        columns.append(np.eye(len(values))[code.levels[: posterior.num, position]])
    return np.concatenate(columns, axis=1)
