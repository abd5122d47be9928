"""A measurement campaign: a list of setups, most valuable first, within a time budget, resumable, one file to commit.

Every outcome goes to the store as soon as it is there, so stopping at any moment loses at most the probes in flight;
starting again skips what the store knows. Chains (one setup at growing micro-batches) are walked by waves: a block's
chains at their first micro-batch, then all at their second, so that an early end still covers every model.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import field
from pathlib import Path
from typing import Any

from planner.codec import Outcome
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.outcome import FailureKind, Measurement, ProbeFailure
from planner.records import dataclass
from planner.setup import TrainSetup
from probes.campaign_spec import CampaignSpec, Chain
from probes.gpu.evaluate import ProbeEvent, Prober, out_of_memory
from probes.gpu.executors import Executor
from probes.store import Store

ResolveModel = Callable[[Chain], ModelSpec]
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Step(ProbeEvent):
    """One answered point of a campaign."""

    chain: Chain


@dataclass(kw_only=True)
class CampaignReport:
    """What a campaign came to.

    Attributes:
        finished: whether every chain was walked to its end (else the budget or Ctrl-C ended it).
        remaining: chains that still have micro-batches to try.
    """

    steps: list[Step] = field(default_factory=list)
    finished: bool = False
    remaining: int = 0
    seconds: float = 0.0

    @property
    def num_measured(self) -> int:
        """Measurements made in this run."""
        return sum(isinstance(step.outcome, Measurement) and not step.from_store for step in self.steps)

    @property
    def num_known(self) -> int:
        """Points that the store already had."""
        return sum(step.from_store for step in self.steps)

    def failures(self) -> dict[FailureKind, int]:
        """How often each failure came up, the store's included."""
        counts: dict[FailureKind, int] = {}
        for step in self.steps:
            if isinstance(step.outcome, ProbeFailure):
                counts[step.outcome.kind] = counts.get(step.outcome.kind, 0) + 1
        return counts


@dataclass(kw_only=True)
class _Walk:
    """Where one chain stands."""

    chain: Chain
    prober: Prober
    position: int = 0
    busy: bool = False
    done: bool = False

    def advance(self, outcome: Outcome) -> None:
        """The next micro-batch, or the end: a larger one would fail too, or in the same way."""
        self.position += 1
        if isinstance(outcome, ProbeFailure) or out_of_memory(outcome):
            self.done = True
        if self.position >= len(self.chain.micro_batches):
            self.done = True


def run_campaign(
    spec: CampaignSpec,
    *,
    executor: Executor,
    store: Store,
    resolve: ResolveModel,
    gpu: GpuSpec | None,
    device: str,
    budget_s: float | None = None,
    on_step: Callable[[Step, CampaignReport], None] = lambda step, report: None,
    clock: Clock = time.monotonic,
) -> CampaignReport:
    """Walks the chains until all are done or the budget is spent.

    No probe is started when less than half the longest probe so far is left. Ctrl-C (KeyboardInterrupt) passes through
    after the executor was told to stop by its owner; what was measured is in the store.
    """
    probers: dict[tuple[object, ...], Prober] = {}

    def prober(chain: Chain) -> Prober:
        limits = {"limits": chain.limits, "depths": chain.depths, "check_depth": chain.check_depth}
        key = (chain.model, *limits.values(), id(chain.config) if chain.config is not None else None)
        if key not in probers:
            of: dict[str, Any] = {"executor": executor, "store": store, "device": device, **limits}
            probers[key] = Prober(model=resolve(chain), gpu=gpu, **of)
        return probers[key]

    walks = [_Walk(chain=chain, prober=prober(chain)) for chain in spec.chains]
    return _Run(walks, executor.num_parallel, budget_s, on_step, clock).to_the_end()


@dataclass
class _Run:
    """A campaign under way."""

    walks: list[_Walk]
    num_parallel: int
    budget_s: float | None
    on_step: Callable[[Step, CampaignReport], None]
    clock: Clock
    waiting: dict[Future[Outcome], tuple[_Walk, TrainSetup, float]] = field(default_factory=dict)
    longest_s: float = 0.0
    report: CampaignReport = field(default_factory=CampaignReport)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def to_the_end(self) -> CampaignReport:
        """Until all chains are done or the budget is spent: what is in flight then is given up."""
        while True:
            self._submit()
            if not self.waiting or self._left_s() <= 0:
                break
            self._collect()
        report = self.report
        report.remaining = sum(not walk.done for walk in self.walks)
        report.finished = report.remaining == 0
        report.seconds = self.clock() - self.started
        return report

    def _left_s(self) -> float:
        return float("inf") if self.budget_s is None else self.budget_s - (self.clock() - self.started)

    def _submit(self) -> None:
        """As many probes as run at once; what the store knows costs none."""
        while len(self.waiting) < self.num_parallel and self._left_s() > self.longest_s / 2:
            walk = next(_next_walks(self.walks), None)
            if walk is None:
                break
            walk.busy = True
            setup = walk.chain.at(walk.position)
            known = walk.prober.stored(setup)
            if known is not None:
                self._tell(walk, setup, known, from_store=True)
                continue
            self.waiting[walk.prober.submit(setup)] = (walk, setup, self.clock())

    def _collect(self) -> None:
        timeout_s = min(1.0, max(self._left_s(), 0.01))
        done, _ = wait(self.waiting, timeout=timeout_s, return_when=FIRST_COMPLETED)
        for future in done:
            walk, setup, since = self.waiting.pop(future)
            self.longest_s = max(self.longest_s, (self.clock() - since) / self.num_parallel)
            self._tell(walk, setup, walk.prober.finish(setup, future), from_store=False)

    def _tell(self, walk: _Walk, setup: TrainSetup, outcome: Outcome, *, from_store: bool) -> None:
        step = Step(chain=walk.chain, setup=setup, outcome=outcome, from_store=from_store)
        self.report.steps.append(step)
        self.report.seconds = self.clock() - self.started
        walk.busy = False
        walk.advance(outcome)
        self.on_step(step, self.report)


def _next_walks(walks: list[_Walk]) -> Iterator[_Walk]:
    """Free chains in the order of value: by block, within a block the one that is least far, then as written."""
    blocks: dict[str, list[_Walk]] = {}
    for walk in walks:
        blocks.setdefault(walk.chain.block, []).append(walk)
    for members in blocks.values():
        free = [walk for walk in members if not walk.done and not walk.busy]
        yield from sorted(free, key=lambda walk: walk.position)


def export_for_commit(spec: CampaignSpec, store: Store, target: Path) -> int:
    """Writes the campaign's records (latest of each key, this spec's models only) as one file; returns how many."""
    models = {chain.model.lower() for chain in spec.chains}
    return store.export(target, keep=lambda record: record.model_id.lower() in models)
