"""Which cluster for a piece of work: what `plan` takes on every GPU of a list in every number, with time and cost, on
the formula level."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.hardware.cluster import Cluster
from planner.memory.workload import Workload
from planner.models.stored import plain_copy
from planner.planning.answer import plan_workload, quantizes_again
from planner.planning.decision.candidates import candidate
from planner.planning.decision.choosing import spaces
from planner.planning.decision.layouts import FIELDS
from planner.planning.decision.node import Node, node_of_setup
from planner.planning.groups import WalkCache
from planner.planning.plan import NoPlan
from planner.planning.space import dimension_values, micro_batches
from planner.planning.useful import cost_usd, job_s
from planner.planning.walk import walk
from planner.setup.outcome import Candidate


@dataclass(frozen=True, kw_only=True)
class ClusterOption:
    """One method (`node`) on one cluster: seconds for all tokens asked for, US dollars for all GPUs that long (None
    without a price), and whether it keeps deadline and budget."""

    cluster: Cluster
    workload: Workload
    node: Node
    candidate: Candidate
    duration_s: float
    cost_usd: float | None
    meets: bool


def counts(max_gpus: int) -> tuple[int, ...]:
    """Numbers of GPUs to try: powers of two up to the largest allowed."""
    return tuple(1 << power for power in range(max_gpus.bit_length()) if 1 << power <= max_gpus)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a job may take and what it may cost; None: no matter."""

    deadline_s: float | None = None
    budget_usd: float | None = None

    def keep(self, duration_s: float, cost: float | None) -> bool:
        """Whether a job of this time and cost keeps them; one without a price keeps no budget."""
        if self.deadline_s is not None and duration_s > self.deadline_s:
            return False
        return self.budget_usd is None or (cost is not None and cost <= self.budget_usd)

    def excess(self, duration_s: float, cost: float | None) -> tuple[float, float]:
        """By what shares of them it breaks them, together, and its seconds: less is nearer to being kept."""
        shares = 0.0
        if self.deadline_s is not None:
            shares += max(0.0, duration_s / self.deadline_s - 1)
        if self.budget_usd is not None:
            shares += math.inf if cost is None else max(0.0, cost / self.budget_usd - 1)
        return shares, duration_s


@dataclass(frozen=True, kw_only=True)
class Job:
    """One method on one cluster, before it is planned. The size of the workload's data is known, its method fixed; with
    one GPU it has no cluster, and the job still has."""

    workload: Workload
    cluster: Cluster

    def option(self, limits: Limits, cache: WalkCache) -> ClusterOption | None:
        """What `plan` takes; None where nothing fits. UsageError: no setup can be."""
        answer = plan_workload(self.workload, cache=cache, num_ranked=1, helped=False, explained=False)
        duration_s = job_s(answer.workload, answer.subject)
        if isinstance(answer, NoPlan) or duration_s is None:
            return None
        cost = cost_usd(self.workload, duration_s)
        return ClusterOption(
            cluster=self.cluster,
            node=node_of_setup(answer.chosen.setup),
            candidate=answer.chosen,
            workload=self.workload,
            duration_s=duration_s,
            cost_usd=cost,
            meets=limits.keep(duration_s, cost),
        )

    def ideal_s(self, cache: WalkCache) -> float:
        """Seconds that no plan of it beats: every GPU at the pace of one alone that has memory for the largest
        micro-batches, recomputes nothing and sends nothing. 0 where that is no setup: it is not known."""
        fixed = {name: values for name, values in self.workload.fixed.items() if name not in FIELDS}
        alone, best = replace(self.workload, cluster=None, fixed=fixed), math.inf
        if quantizes_again(alone):
            alone = replace(alone, model=plain_copy(alone.model) or alone.model)
        with suppress(UsageError):
            for request, values in spaces(alone, dimension_values(alone)):
                unchecked = {"checkpointing": values["checkpointing"][:1], "activation_offload": (False,)}
                batches = values.get("micro_batch_seqs") or micro_batches(alone.global_batch_seqs)[-2:]
                points = walk(request, {**values, **unchecked, "micro_batch_seqs": batches}, cache=cache)
                point = max(points, key=lambda point: point.tokens_per_s, default=None)
                if point is not None:
                    best = min(best, job_s(alone, candidate(alone, point.setup, padding=False)) or best)
        return best / self.cluster.num_gpus if math.isfinite(best) else 0.0


Outcome = ClusterOption | UsageError | None
"""Of a job: what `plan` takes, why no setup can be, or None where nothing fits."""


def every_outcome(jobs: Iterable[Job], limits: Limits) -> list[Outcome]:
    """What becomes of each job of one method."""
    return [*map(_Plans(limits).of, jobs)]


def deciding_outcomes(jobs: Sequence[Job], limits: Limits) -> list[Outcome]:
    """What becomes of the jobs of one method among which the smallest, the cheapest and the fastest are.

    They are planned in the order of what they could be at best (`Job.ideal_s`) until no other could be better; the
    smallest by bisection, as of clusters of one number of GPUs that of more memory fits what one of less does.
    """
    plans, cache = _Plans(limits), WalkCache()
    pace: dict[str, float] = {}  # by card: seconds on one
    ideal_s: dict[int, float] = {}
    for job in jobs:
        card, num = job.workload.gpu.key, job.cluster.num_gpus
        if card not in pace:
            pace[card] = job.ideal_s(cache) * num
        ideal_s[id(job)] = pace[card] / num
    costs = {id(job): cost_usd(job.workload, ideal_s[id(job)]) for job in jobs}
    could = [job for job in jobs if limits.keep(ideal_s[id(job)], costs[id(job)])]
    priced = [(cost, job) for job in could if (cost := costs[id(job)]) is not None]
    for cost, job in sorted(priced, key=lambda entry: (entry[0], entry[1].cluster.num_gpus)):
        best = cheapest(plans.options)
        if best is not None and (best.cost_usd or 0.0) <= cost:
            break
        plans.of(job)
    for job in sorted(could, key=lambda job: ideal_s[id(job)]):
        best = fastest(plans.options)
        if best is not None and best.duration_s <= ideal_s[id(job)]:
            break
        plans.of(job)
    if fastest(plans.options) is None:  # then the nearest counts
        excess = {key: limits.excess(duration_s, costs[key]) for key, duration_s in ideal_s.items()}
        for job in sorted(jobs, key=lambda job: excess[id(job)]):
            best = nearest(plans.options, limits)
            if best is not None and limits.excess(best.duration_s, best.cost_usd) <= excess[id(job)]:
                break
            plans.of(job)
    size = attrgetter("cluster.num_gpus", "workload.memory_bytes")
    for _, of_number in groupby(sorted(could, key=size), lambda job: job.cluster.num_gpus):
        sizes = [[*of_size] for _, of_size in groupby(of_number, size)]
        first = bisect_left(sizes, True, key=lambda of_size: bool(plans.fitting(of_size)))
        if any(option.meets for of_size in sizes[first:] for option in plans.fitting(of_size)):
            break
    return [*plans.outcomes.values()]


class _Plans:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._caches: dict[int, WalkCache] = {}
        self.outcomes: dict[int, Outcome] = {}

    @property
    def options(self) -> list[ClusterOption]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, ClusterOption)]

    def fitting(self, jobs: Iterable[Job]) -> list[ClusterOption]:
        return [outcome for job in jobs if isinstance(outcome := self.of(job), ClusterOption)]

    def of(self, job: Job) -> Outcome:
        if id(job) not in self.outcomes:
            cache = self._caches.setdefault(job.cluster.num_gpus, WalkCache())
            try:
                self.outcomes[id(job)] = job.option(self._limits, cache)
            except UsageError as error:
                self.outcomes[id(job)] = error
        return self.outcomes[id(job)]


def smallest(options: Iterable[ClusterOption]) -> ClusterOption | None:
    """The fewest GPUs that keep deadline and budget; of those the least memory, then the fastest."""
    return _least(options, "cluster.num_gpus", "workload.memory_bytes", "duration_s")


def cheapest(options: Iterable[ClusterOption]) -> ClusterOption | None:
    """The least cost that keeps deadline and budget; of equals the fewer GPUs."""
    return _least([option for option in options if option.cost_usd is not None], "cost_usd", "cluster.num_gpus")


def fastest(options: Iterable[ClusterOption]) -> ClusterOption | None:
    """The shortest time that keeps deadline and budget; of equals the fewer GPUs."""
    return _least(options, "duration_s", "cluster.num_gpus")


def _least(options: Iterable[ClusterOption], *names: str) -> ClusterOption | None:
    return min((option for option in options if option.meets), key=attrgetter(*names), default=None)


def nearest(options: Iterable[ClusterOption], limits: Limits) -> ClusterOption | None:
    """Where nothing keeps the limits: what fits and breaks them least."""
    return min(options, key=lambda option: limits.excess(option.duration_s, option.cost_usd), default=None)
