"""Search strategies compared: probes until a setup within 2 % of the true optimum is known.

    python -m benchmarks.search_strategies --seeds 102 --out benchmarks/data/search_strategies.json

Machines: the synthetic GPU of `benchmarks.synthetic_gpu` (six scenarios, the seed moves its constants), two to eight
of them ("spread": six scenarios, where the way of spreading the job is searched as well), and replay of recorded
grids (`benchmarks.recorded_grids`, IBM fms_acceleration on A100-80GB), at the card's memory and at smaller ones; there
the seed decides which of the recorded repeats, under different software versions, each setup answers with.

A strategy's probes are counted until its best measured setup that fits reaches 98 % of the best of all setups (in
truth, also of those that the formula excludes). `MAX_PROBES` without reaching it counts as not reached. What each
strategy knows:

    residual        formula, its errors learned (the planner's own); probes its plan first
    ranked          formula, probed in its order without learning
    tpe-warm, gp-warm   what the formula excludes is out at no cost; plan and the three next ranked are probed first
    tpe, gp, random, grid   no formula at all
    no-formula      the planner's own sampler without a formula (ablation)
    doubling        a trainer's batch finder on default settings
    deepspeed       stages, doubling, cost model; knows which stage's weights cannot fit
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from math import exp, inf
from pathlib import Path
from typing import Any

import optuna

from benchmarks.recorded_grids import recorded_grids
from benchmarks.rival_strategies import DeepSpeedSampler, DoublingSampler, RankedSampler
from benchmarks.synthetic_gpu import LAYOUT_SCENARIOS, SCENARIOS, Scenario, SyntheticGpu
from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.evidence.measured import load_rows
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Evidence, Fidelity, Prediction
from search.optuna_samplers import make_sampler
from search.problem import Problem, Result
from search.sampler import Posterior, Sampler
from search.stopping import converged

MAX_PROBES = 24
GOAL = 0.98
HEADROOM = 0.97
RECORDED_MEMORY_GIB = {"Mistral-7B": (79.15, 40.0, 24.0, 16.0), "Llama-2-70b": (79.15,)}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A sampler with what it is allowed to know."""

    make: Callable[[], Sampler]
    formula: bool
    num_first: int = 0


STRATEGIES: dict[str, Strategy] = {
    "residual": Strategy(make=lambda: make_sampler("residual"), formula=True, num_first=1),
    "ranked": Strategy(make=RankedSampler, formula=True),
    "tpe-warm": Strategy(make=lambda: make_sampler("tpe"), formula=True, num_first=4),
    "gp-warm": Strategy(make=lambda: make_sampler("gp"), formula=True, num_first=4),
    "tpe": Strategy(make=lambda: make_sampler("tpe"), formula=False),
    "gp": Strategy(make=lambda: make_sampler("gp"), formula=False),
    "random": Strategy(make=lambda: make_sampler("random"), formula=False),
    "grid": Strategy(make=lambda: make_sampler("grid"), formula=False),
    "no-formula": Strategy(make=lambda: make_sampler("residual"), formula=False),
    "doubling": Strategy(make=DoublingSampler, formula=False),
    "deepspeed": Strategy(make=DeepSpeedSampler, formula=True),
}

BLIND = Prediction(
    rung=Fidelity.FORMULA,
    peak_allocated_bytes=GIB,
    peak_reserved_bytes=GIB,
    peak_device_bytes=GIB,
    peak_phase="",
    phase_peaks_bytes={},
    terms=(),
    memory_band_fraction=0.4,
    tokens_per_s=1000.0,
    time_band_fraction=1.0,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One machine with its candidates and the truth about all of them."""

    name: str
    seed: int
    candidates: tuple[Candidate, ...]
    evaluate: Callable[[TrainSetup], Evidence]
    best_tokens_per_s: float


def best_of(candidates: tuple[Candidate, ...], evaluate: Callable[[TrainSetup], Evidence]) -> float:
    """The true optimum: every candidate asked."""
    problem = Problem(candidates=candidates)
    speeds = [0.0]
    for candidate in candidates:
        if candidate.formula.peak_device_bytes > 4 * candidate.budget_bytes:
            continue  # four times the budget by formula: not within any deviation of these machines
        evidence = evaluate(candidate.setup)
        if problem.feasible(candidate.setup, evidence):
            speeds.append(evidence.tokens_per_s)  # type: ignore[union-attr, arg-type]
    return max(speeds)


def synthetic_cases(seeds: range, scenarios: Sequence[Scenario] = SCENARIOS) -> Iterator[Case]:
    """One machine for each seed, dealt to the six scenarios in turn."""
    known = [Space(scenario.candidates()) for scenario in scenarios]
    for seed in seeds:
        number = seed % len(scenarios)
        gpu = SyntheticGpu.of(scenarios[number], seed)
        name = f"synthetic {scenarios[number].name}"
        best = best_of(known[number], gpu)
        if best > 0:
            yield Case(name=name, seed=seed, candidates=known[number], evaluate=gpu, best_tokens_per_s=best)


def layout_cases(seeds: range) -> Iterator[Case]:
    """As `synthetic_cases`, of several GPUs."""
    return synthetic_cases(seeds, LAYOUT_SCENARIOS)


def recorded_cases(seeds: range) -> Iterator[Case]:
    """Every recorded grid at every memory size, for each seed a draw of the recorded repeats."""
    for grid in recorded_grids(load_rows()):
        sizes = next(sizes for word, sizes in RECORDED_MEMORY_GIB.items() if word in grid.name)
        model, gpu = catalogue.load(grid.model), find_gpu(grid.gpu)
        predictions = {setup: predict(model, gpu, setup) for setup in grid.rows}
        for size in sizes:
            candidates = Space(grid.candidates(int(HEADROOM * size * GIB), predictions.__getitem__))
            for seed in seeds:
                evaluate = grid.evaluator(seed)
                best = best_of(candidates, evaluate)
                if best > 0:
                    name = f"recorded {grid.name.split('/')[1].split(' on ')[0]} {size:g} GiB"
                    yield Case(name=name, seed=seed, candidates=candidates, evaluate=evaluate, best_tokens_per_s=best)


@cache
def untouched(candidates: tuple[Candidate, ...], formula: bool) -> Posterior:
    """The posterior before any probe, made once for all seeds of a space."""
    if not formula:
        candidates = tuple(replace(candidate, formula=BLIND) for candidate in candidates)
    card_bytes = int(candidates[0].budget_bytes / HEADROOM)
    return Posterior(Problem(candidates=candidates, memory_bytes=card_bytes))


class Space(tuple[Candidate, ...]):
    """Candidates that are the same space only when they are the same object (hashing thousands takes long)."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


def run(case: Case, strategy: Strategy) -> dict[str, Any]:
    """One strategy on one case."""
    sampler = strategy.make()
    first_posterior = untouched(case.candidates, strategy.formula)
    problem = first_posterior.problem
    candidates = problem.candidates
    posterior = deepcopy(first_posterior, {id(part): part for part in (problem, first_posterior.encoding)})
    first: list[int] = []
    ranked = RankedSampler()
    for _ in range(strategy.num_first):
        index = ranked.propose(posterior, first, 0)
        if index is not None:
            first.append(index)
    reached = stopped = None
    at_stop = 0.0
    overhead_s = 0.0
    for num in range(1, MAX_PROBES + 1):
        started = time.perf_counter()
        index = first.pop(0) if first else sampler.propose(posterior, (), case.seed)
        overhead_s += time.perf_counter() - started
        if index is None:
            break
        posterior.tell(Result(index=index, evidence=case.evaluate(candidates[index].setup)))
        share = exp(posterior.best_score) / case.best_tokens_per_s if posterior.best else 0.0
        if reached is None and share >= GOAL:
            reached = num
        if sampler.name == "residual" and strategy.formula and stopped is None and converged(problem, posterior):
            stopped, at_stop = num, share
        if reached is not None and (stopped is not None or sampler.name != "residual" or not strategy.formula):
            break
    unfit = 0
    if posterior.best is not None:
        evidence = case.evaluate(candidates[posterior.best.index].setup)
        unfit = int(not problem.feasible(candidates[posterior.best.index].setup, evidence))
    return {
        "case": case.name,
        "seed": case.seed,
        "reached": reached,
        "stopped": stopped,
        "share_at_stop": at_stop,
        "unfit": unfit,
        "overhead_ms": 1000 * overhead_s / max(num, 1),
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed; infinite where not reached."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * share // 1).__int__() - 1))]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, 95th percentile and share reached of one strategy's rows."""
    reached = [row["reached"] if row["reached"] is not None else inf for row in rows]
    stops = [row for row in rows if row["stopped"] is not None]
    result = {
        "runs": len(rows),
        "median": percentile(reached, 0.5),
        "p95": percentile(reached, 0.95),
        "reached_fraction": sum(value < inf for value in reached) / len(rows),
        "unfit": sum(row["unfit"] for row in rows),
        "overhead_ms": round(statistics.median(row["overhead_ms"] for row in rows), 2),
    }
    if stops:
        result["stop_median"] = statistics.median(row["stopped"] for row in stops)
        result["stop_p95"] = percentile([row["stopped"] for row in stops], 0.95)
        result["share_at_stop_p05"] = percentile([row["share_at_stop"] for row in stops], 0.05)
        result["stopped_below_goal"] = sum(row["share_at_stop"] < GOAL for row in stops)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=102, help="synthetic machines, and draws of each recorded grid")
    parser.add_argument(
        "--first-seed", type=int, default=9000, help="those below 2000 were used while choosing the sampler's priors"
    )
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=["synthetic", "recorded", "spread"])
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    families = {"synthetic": synthetic_cases, "recorded": recorded_cases, "spread": layout_cases}
    table: dict[str, dict[str, Any]] = {}
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for family, make in families.items():
        if arguments.only not in (None, family):
            continue
        cases = list(make(range(arguments.first_seed, arguments.first_seed + arguments.seeds)))
        for name in arguments.strategies.split(","):
            started = time.perf_counter()
            results = [run(case, STRATEGIES[name]) for case in cases]
            rows.setdefault(family, {})[name] = results
            table.setdefault(family, {})[name] = summary(results)
            print(family, name, json.dumps(table[family][name]), f"{time.perf_counter() - started:.0f} s", flush=True)
    if arguments.out:
        save(arguments.out, arguments.first_seed, table)


def save(path: Path, first_seed: int, table: dict[str, dict[str, Any]]) -> None:
    """Writes the table; rows of other strategies from the same first machine on stay ("runs": how many machines)."""
    about = {"goal": GOAL, "max_probes": MAX_PROBES, "first_seed": first_seed}
    old = json.loads(path.read_text()) if path.exists() else {}
    known = old["summary"] if {name: old.get(name) for name in about} == about else {}
    merged: dict[str, dict[str, Any]] = {}
    for family in dict.fromkeys([*known, *table]):
        rows = {**known.get(family, {}), **table.get(family, {})}
        merged[family] = {
            name: {key: None if value == inf else value for key, value in rows[name].items()}
            for name in STRATEGIES
            if name in rows
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "not_reached": None, "summary": merged}, indent=1) + "\n")


if __name__ == "__main__":
    main()
