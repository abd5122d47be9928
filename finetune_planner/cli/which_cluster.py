"""`plan which-cluster`: the smallest, the cheapest and the fastest set of GPUs for a piece of work."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.app.cores import on_cores
from finetune_planner.app.progress import say, steps
from finetune_planner.cli import options
from finetune_planner.cli.answer import request_for
from finetune_planner.cli.completion import complete_gpu
from finetune_planner.cli.output import show_table
from finetune_planner.cli.request_options import DataOptions, JobOptions, RequestOptions, SpaceOptions
from finetune_planner.cli.setup_flags import MAX_GPUS, takes_options
from planner.core.errors import EXIT_NOTHING_FITS, UsageError
from planner.core.records import dataclass
from planner.hardware.cluster import known_link, links, make_cluster, most_per_node
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import all_gpus, find_gpu
from planner.hardware.prices import cluster_offer, keys_on_demand
from planner.models.spec import ModelSpec
from planner.planning.clusters import (
    ClusterOption,
    Job,
    Limits,
    Outcome,
    counts,
    deciding_outcomes,
    every_outcome,
)
from planner.planning.option_values import duration_s, positive
from planner.planning.plan_request import PlanRequest
from planner.samples.steps import DEFAULT_GLOBAL_BATCH
from planner.setup.allowed import METHODS
from reports.plain import joined
from reports.setup_text import objective_words
from reports.text import job_words
from reports.which_cluster import ClustersSheet

DEFAULT_MAX_GPUS = 64


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    deadline: Annotated[str | None, typer.Option(help="Longest time the training may take: 90m, 24h, 3d.")] = None
    budget: Annotated[float | None, typer.Option(help="Most it may cost, in US dollars.")] = None

    def limits(self) -> dict[str, Any]:
        """Seconds and US dollars.

        Raises:
            UsageError: what cannot be meant.
        """
        if self.budget is not None and not (math.isfinite(self.budget) and self.budget > 0):
            raise UsageError(f"--budget must be US dollars above 0, got {self.budget}", hint="for example --budget 500")
        deadline_s = None if self.deadline is None else duration_s("deadline", self.deadline, unit="h")
        return {"deadline_s": deadline_s, "budget_usd": self.budget}


@dataclass(frozen=True, kw_only=True)
class ClustersOptions:
    """The sets of GPUs that are considered."""

    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="GPU to consider; repeatable. Default: those that a cloud rents on demand.",
            autocompletion=complete_gpu,
        ),
    ] = None
    max_gpus: Annotated[int, typer.Option(help="Largest number of GPUs to consider.")] = DEFAULT_MAX_GPUS
    interconnect: options.Interconnect = None

    def numbers(self) -> tuple[int, ...]:
        """How many of a card are considered.

        Raises:
            UsageError: a number or links that cannot be meant.
        """
        for part in self.interconnect.lower().split("+") if self.interconnect is not None else ():
            known_link(part.strip())
        return counts(positive("max-gpus", self.max_gpus, maximum=MAX_GPUS) or 1)


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """What is said of every card."""

    headroom: options.Headroom = None
    price: Annotated[float | None, typer.Option(help="US dollars per GPU hour, instead of the price table.")] = None
    spot: Annotated[bool, typer.Option("--spot", help="Spot prices, of machines that may be taken back.")] = False


EveryBatch = Annotated[
    int | None,
    typer.Option("--global-batch", "--batch-size", help="Sequences per optimizer step, the same on every cluster."),
]


@takes_options
def which_cluster(
    model: options.Model,
    *,
    job: JobOptions,
    data: DataOptions,
    limits: LimitOptions,
    clusters: ClustersOptions,
    seq_len: options.SeqLen = None,
    global_batch: EveryBatch = None,
    space: SpaceOptions,
    card: CardOptions,
    out: Annotated[Path | None, typer.Option(help="Write the whole answer to this directory.")] = None,
    lookup: options.Lookup,
    no_dry_run: options.FormulaAlone = False,
    as_json: options.Json = False,
) -> None:
    """The smallest, the cheapest and the fastest set of GPUs that keeps a deadline and a budget.

    Formula level: plan MODEL --gpu GPU --gpus N then looks closer at one of them.
    """
    request_options = RequestOptions(
        **vars(space), **vars(job), **vars(card), seq_len=seq_len, global_batch=global_batch
    )
    sheet = clusters_sheet(model, request_options, data, limits, clusters, lookup)
    show_table(out, as_json, sheet)
    if not any(option.meets for option in sheet.options):
        raise typer.Exit(EXIT_NOTHING_FITS)


def clusters_sheet(
    model: str,
    request_options: RequestOptions,
    data: DataOptions,
    limits: LimitOptions,
    clusters: ClustersOptions,
    lookup: options.Lookup,
) -> ClustersSheet:
    """Every set of GPUs with what the job takes there."""
    bounds, numbers = limits.limits(), clusters.numbers()
    named = (options.announced(find_gpu(name)) for name in clusters.gpu or ())
    cards = list({card.key: card for card in named}.values())
    cards = cards or [card for card in all_gpus() if card.key in keys_on_demand()]
    spec = options.announced(lookup.model(model))
    batch = positive("global-batch", request_options.global_batch) or max(DEFAULT_GLOBAL_BATCH, numbers[-1])
    request_options = replace(request_options, global_batch=batch)
    request = request_for(spec, request_options, data.checked())
    if not request.data.epoch_tokens and not request.data.num_samples:
        hint = "give --dataset FILE, --samples 50k or --dataset-tokens 100M"
        raise UsageError("how much work is it?", hint=hint)
    numbers = tuple(number for number in numbers if batch % number == 0)
    jobs = [job for card in cards for job in _jobs(spec, card, numbers, request, clusters.interconnect)]
    cluster_options = _options(jobs, Limits(**bounds), every=bool(clusters.gpu))
    asked_for = request.workload(spec, cards[0])
    tokens = round((asked_for.data.epoch_tokens or 0) * asked_for.epochs)
    job = joined((objective_words(asked_for), job_words(asked_for)), " · ")
    job_summary = {"job": job, "tokens": tokens, "global_batch_seqs": batch}
    return ClustersSheet(spec, cluster_options, {**bounds, **job_summary})


def _jobs(
    spec: ModelSpec, card: GpuSpec, numbers: Sequence[int], request: PlanRequest, interconnect: str | None
) -> Iterator[Job | UsageError]:
    """Every method on every number of a card, up to the first that contradicts the options."""
    for number in numbers:
        link = interconnect if number > 1 else None
        if number > most_per_node(card) and interconnect is None:
            offer = cluster_offer(card.key, spot=request.spot)
            if offer is None:  # nobody is known to rent several machines of it with a network between them
                return
            link = offer.network
        try:
            options.check_vendor(card, number)
            cluster = make_cluster(card, number, interconnect=_links(link, number, most_per_node(card)))
            for method in request.fixed.get("method", METHODS):
                of_method = replace(request, fixed={**request.fixed, "method": (method,)})
                yield Job(workload=of_method.workload(spec, card, cluster if number > 1 else None), cluster=cluster)
        except UsageError as error:
            say(f"left out {card.key} from here on: {error.message}")
            yield error
            return


def _options(jobs: Sequence[Job | UsageError], limits: Limits, *, every: bool) -> list[ClusterOption]:
    """Of every method on every cluster, or on those that could be the smallest, the cheapest or the fastest."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        if isinstance(job, Job):
            key = (job.workload.fixed["method"], job.workload.gpu.key if every else "")
            groups.setdefault(key, []).append(job)
    plan = every_outcome if every else deciding_outcomes
    outcomes: list[Outcome] = [job for job in jobs if isinstance(job, UsageError)]
    answered = on_cores(lambda key: (key, plan(groups[key], limits)), list(groups))
    by_group = dict(steps(answered, "planning", num=len(groups)))
    outcomes += chain.from_iterable(by_group[key] for key in groups)
    problems = [outcome for outcome in outcomes if isinstance(outcome, UsageError)]
    if problems and len(problems) == len(outcomes):
        raise problems[-1]
    return [outcome for outcome in outcomes if isinstance(outcome, ClusterOption)]


def _links(interconnect: str | None, number: int, most: int) -> str | None:
    """The links that a cluster of this size has: none between nodes where there is one node."""
    if interconnect is None or number > most:
        return interconnect
    network = {key for key, link in links().items() if link.kind == "network"}
    parts = [part for part in interconnect.lower().split("+") if part.strip() not in network]
    return "+".join(parts) or None
