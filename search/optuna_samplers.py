"""Optuna's own samplers behind the same seam: TPE, Gaussian process, random, brute force over the grid.

They know nothing of predictions, only of what was measured. Each proposal rebuilds a study in memory from the results
so far, so a resumed search continues as an undisturbed one. A suggestion that names no open candidate is told back as
infeasible, at no probe cost, and the sampler is asked again; after some of them any open candidate is taken.
"""

from collections.abc import Callable, Sequence

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial

from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.install import packages_command
from planner.setup.outcome import ProbeFailure
from search.dimensions import value_of
from search.problem import Problem, Result, memory_excess
from search.sampler import Posterior, ResidualSampler, Sampler

MAX_ASKS = 3
"""Suggestions per proposal."""


class OptunaSampler:
    """One of Optuna's samplers over the values that the candidates take."""

    def __init__(self, name: str, make: Callable[[int], optuna.samplers.BaseSampler]) -> None:
        self.name = name
        self._make = make

    def propose(self, posterior: Posterior, running: Sequence[int], seed: int) -> int | None:
        """Index of the next candidate, None when none is left."""
        open_ = posterior.free(running)
        if not open_.any():
            return None
        problem = posterior.problem
        space = _space(posterior)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="maximize", sampler=self._make(seed + len(posterior.results)))
        for result in posterior.results:
            study.add_trial(_as_trial(problem, result, space))
        index = {
            tuple(value_of(c.setup, name) for name in space): position for position, c in enumerate(problem.candidates)
        }
        for _ in range(MAX_ASKS):
            trial = study.ask(space)
            position = index.get(tuple(trial.params[name] for name in space))
            if position is not None and open_[position]:
                return position
            trial.set_constraint("possible", 1.0)
            study.tell(trial, state=TrialState.PRUNED)
        random = np.random.default_rng([seed, len(posterior.results), len(running)])
        return int(random.choice(np.flatnonzero(open_)))


def _space(posterior: Posterior) -> dict[str, BaseDistribution]:
    """The varying dimensions with their values, as categories (ordered where they are numbers)."""
    code = posterior.encoding
    return {
        dimension.name: CategoricalDistribution(values)  # type: ignore[arg-type]
        for dimension, values in zip(code.dimensions, code.values, strict=True)
    }


def _as_trial(problem: Problem, result: Result, space: dict[str, BaseDistribution]) -> optuna.trial.FrozenTrial:
    candidate = problem.candidates[result.index]
    params = {name: value_of(candidate.setup, name) for name in space}
    excess = memory_excess(problem, candidate, result.evidence)
    feasible = problem.feasible(candidate.setup, result.evidence)
    constraints = {"memory": excess, "runs": 0.0 if feasible or excess > 0 else 1.0}
    if not isinstance(result.evidence, ProbeFailure):
        value = problem.score(candidate, result.evidence)
        return create_trial(value=value, params=params, distributions=space, constraints=constraints)
    return create_trial(state=TrialState.PRUNED, params=params, distributions=space, constraints=constraints)


def _gp(seed: int) -> optuna.samplers.BaseSampler:
    try:
        import scipy  # noqa: F401

        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=4, deterministic_objective=True)
    except ImportError as error:
        raise EnvironmentProblem(
            f"Optuna's GP sampler needs torch and scipy: {error}",
            hint=f"{packages_command('scipy', 'torch')}, or --sampler residual",
        ) from error


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "residual": ResidualSampler,
    "tpe": lambda: OptunaSampler("tpe", lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)),
    "gp": lambda: OptunaSampler("gp", _gp),
    "random": lambda: OptunaSampler("random", lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    "grid": lambda: OptunaSampler("grid", lambda seed: optuna.samplers.BruteForceSampler(seed=seed)),
}
"""All samplers that `--sampler` offers; "residual" is ours and the default."""


def make_sampler(name: str) -> Sampler:
    """The sampler of that name.

    Raises:
        UsageError: no such sampler.
    """
    if name not in SAMPLERS:
        raise UsageError(f"sampler must be one of {', '.join(SAMPLERS)}; got {name!r}", hint="use --sampler residual")
    return SAMPLERS[name]()
