"""Commands that answer with one table of plans by the formula: `plan which-gpu`, `plan which-model`,
`plan compare-adapters`, `plan compare-targets`."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from finetune_planner.app.cores import on_cores
from finetune_planner.app.progress import steps
from finetune_planner.cli import options
from finetune_planner.cli.answer import request_for, workload_for
from finetune_planner.cli.output import console, show_table
from finetune_planner.cli.report import Out as OutOf
from finetune_planner.cli.report import write_html
from finetune_planner.cli.request_options import DataOptions, JobOptions, RequestOptions, SpaceOptions
from finetune_planner.cli.setup_flags import takes_options
from planner.core.errors import EXIT_NOTHING_FITS, UsageError
from planner.core.records import dataclass
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import all_gpus, find_gpu
from planner.memory.workload import Workload
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.options.kernels import PLANNED_KERNELS
from planner.planning.answer import NUM_RANKED, Explained, plan_workload
from planner.planning.decision.alternatives import longest_tokens
from planner.planning.decision.node import node_of_setup
from planner.planning.decision.policy import compare_kinds
from planner.planning.groups import WalkCache
from planner.planning.plan import NoPlan, Plan
from planner.planning.plan_request import PlanRequest
from planner.planning.targets import compare_targets as choices_of_targets
from reports.html import MAX_FULL_PLANS, Entry, report_html
from reports.which import (
    BY_METHOD_COLUMNS,
    SORTS,
    AdaptersSheet,
    GpusSheet,
    ModelChoice,
    ModelsSheet,
    TargetsSheet,
    rank_gpus,
    which_gpu_sentences,
    which_gpu_title,
)

MAX_GROUP = 8
"""Cards that one process plans in a row: more share more, fewer end together."""
Out = Annotated[Path | None, typer.Option("--out", help="Write the table to this directory.")]


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    vendor: Annotated[str | None, typer.Option(help="Only cards of this maker.")] = None
    sort: Annotated[str, typer.Option(help="size (smallest that fits first), speed or cost.")] = "size"
    fitting: Annotated[bool, typer.Option("--fitting", help="Leave out cards that do not fit.")] = False
    built_in: Annotated[bool, typer.Option("--built-in", help="With laptops' chips and Jetson modules.")] = False

    def cards(self) -> list[GpuSpec]:
        """The cards.

        Raises:
            UsageError: no such order, or no such maker.
        """
        if self.sort not in SORTS:
            raise UsageError(f"--sort must be one of {', '.join(SORTS)}; got {self.sort!r}", hint="use --sort size")
        cards = [card for card in all_gpus() if self.vendor is None or card.vendor.lower() == self.vendor.lower()]
        cards = [card for card in cards if self.built_in or not card.is_built_in]
        if not cards:
            vendors = ", ".join(sorted({card.vendor for card in all_gpus()}))
            raise UsageError(f"no card of {self.vendor!r} in the GPU table", hint=f"makers: {vendors}")
        return cards


@takes_options
def which_gpu(
    model: options.Model,
    *,
    gathering: options.JobGpus,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    space: SpaceOptions,
    headroom: options.Headroom = None,
    job: JobOptions,
    data: DataOptions,
    table: TableOptions,
    out: OutOf = None,
    lookup: options.Lookup,
    no_dry_run: options.FormulaAlone = False,
    as_json: options.Json = False,
) -> None:
    """Rank the GPU table for MODEL by tokens/s and by cost per million tokens, smallest card that fits first; with
    --dataset, --samples or --tokens by the time and the cost of the whole job.

    Formula level, each card's row what plan takes there: plan MODEL --gpu GPU then looks closer at one. With --gpus
    every card stands for so many of them.
    """
    request_options = RequestOptions(
        **vars(space), **vars(job), seq_len=seq_len, global_batch=global_batch, headroom=headroom
    )
    wide = not as_json and console().width >= BY_METHOD_COLUMNS  # elsewhere nothing is shown of the other methods
    explained: Explained = out is not None or ("classes" if wide else False)
    sheet = gpus_sheet(model, request_options, data, table, gathering, lookup, explained)
    show_table(out, as_json, sheet)
    if out is not None:
        entries = [Entry(plan=choice.answer, name=choice.gpu.key) for choice in sheet.choices]
        title, sentences = which_gpu_title(entries[0].plan.workload), which_gpu_sentences(sheet.choices)
        write_html(out, lambda: report_html(entries, title=title, sentences=sentences))
    if not any(choice.fits for choice in sheet.choices):
        raise typer.Exit(EXIT_NOTHING_FITS)


def gpus_sheet(
    model: str,
    request_options: RequestOptions,
    data: DataOptions,
    table: TableOptions,
    gathering: options.JobGpus,
    lookup: options.Lookup,
    explained: Explained = "classes",
) -> GpusSheet:
    """The GPU table ranked for a model; `explained`: all of it where `report_html` draws it."""
    cards, spec = table.cards(), options.announced(lookup.model(model))
    request = request_for(spec, request_options, data.checked())
    answers = _plans(spec, cards, request, gathering.of, explained)
    return GpusSheet(rank_gpus(answers, sort=table.sort), table.fitting)


def _groups(cards: Sequence[GpuSpec]) -> list[list[GpuSpec]]:
    """Cards on which a setup takes the same memory stay together: the walk of the first serves them all."""
    by_kind: dict[tuple[str, tuple[int, int] | None], list[GpuSpec]] = {}
    for card in cards:
        by_kind.setdefault((card.vendor, card.compute_capability), []).append(card)
    return [kind[at : at + MAX_GROUP] for kind in by_kind.values() for at in range(0, len(kind), MAX_GROUP)]


def _plans(
    spec: ModelSpec,
    cards: list[GpuSpec],
    request: PlanRequest,
    cluster: Callable[[GpuSpec], Cluster | None],
    explained: Explained,
) -> list[Plan | NoPlan]:
    """One plan per card; a card on which the options contradict each other (no kernel for them) is left out.

    Args:
        explained: how much of each plan is shown; all where they are drawn, and where they are few with their
            runners-up and with what would help.
    """
    whole = explained is True and len(cards) <= MAX_FULL_PLANS
    num_ranked = NUM_RANKED if whole else 1
    plan = partial(plan_workload, cache=WalkCache(), num_ranked=num_ranked, helped=whole, explained=explained)

    def planned(card: GpuSpec) -> tuple[GpuSpec, Plan | NoPlan | UsageError]:
        try:
            return card, plan(request.workload(spec, card, cluster(card)))
        except UsageError as error:
            return card, error

    answered = chain.from_iterable(on_cores(lambda group: list(map(planned, group)), _groups(cards)))
    outcomes = list(steps(answered, "planning", num=len(cards)))
    outcomes.sort(key=lambda outcome: cards.index(outcome[0]))
    answers = [answer for _, answer in outcomes if not isinstance(answer, UsageError)]
    problems = [(card, answer) for card, answer in outcomes if isinstance(answer, UsageError)]
    if not answers:
        raise problems[-1][1]
    if problems:
        left_out = ", ".join(card.key for card, _ in problems)
        print(f"left out, where the options cannot be kept: {left_out}", file=sys.stderr)
    return answers


@takes_options
def which_model(
    gpu: options.Gpu,
    match: Annotated[str, typer.Argument(help="Only models whose names contain this.")] = "",
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    *,
    space: SpaceOptions,
    memory: options.Memory,
    every: Annotated[bool, typer.Option("--all", help="Show models that do not fit too.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the whole table to this directory.")] = None,
    no_dry_run: options.FormulaAlone = False,
    as_json: options.Json = False,
) -> None:
    """What can be fine-tuned on this card, to what length, and how fast: the catalogue, largest model first.

    Formula level: plan MODEL --gpu GPU then looks closer at one model.
    """
    options_of = RequestOptions(**vars(space), **vars(memory), seq_len=seq_len, global_batch=global_batch)
    rows, request = models_rows(options_of.request(), gpu, match)
    show_table(out, as_json, ModelsSheet(rows, request, every))
    if not any(row.fits for row in rows):
        raise typer.Exit(EXIT_NOTHING_FITS)


def models_rows(plan_request: PlanRequest, gpu: str, match: str) -> tuple[list[ModelChoice], Workload]:
    """A row for each model whose name contains `match`, largest first; and the request for the longest context of them,
    which is what was asked for: models of a shorter one differ.

    Raises:
        UsageError: there is none.
    """
    card, names = options.announced(find_gpu(gpu)), catalogue.names_with(match)
    if not names:
        raise UsageError(f"no model of the catalogue has {match!r} in its name", hint="`plan models` lists all")
    answers = on_cores(partial(_row, plan_request, card, named=bool(match)), names)
    pairs = [pair for pair in steps(answers, "planning", num=len(names)) if pair is not None]
    rows = [row for row, _ in pairs]
    rows.sort(key=lambda row: (-row.model.num_params, row.model.model_id))
    return rows, max(
        (request for _, request in pairs), key=lambda workload: (workload.seq_len_tokens, workload.model.model_id)
    )


def _row(plan_request: PlanRequest, card: GpuSpec, name: str, *, named: bool) -> tuple[ModelChoice, Workload] | None:
    """A model's row and request; None for one that hears, whose length is another thing, or whose positions end before
    the length: asked for by name."""
    spec = catalogue.load(name)
    assert spec is not None
    short = spec.learned_positions is not None and spec.learned_positions < (plan_request.seq_len or 1)
    if (spec.front_end is not None or short) and not named:
        return None
    request = plan_request.workload(spec, card)
    longest, answer = longest_tokens(request), None
    with suppress(UsageError):  # an encoder, say, has no such objective
        answer = plan_workload(request, num_ranked=1, helped=False, explained=False)
    if (
        isinstance(answer, Plan) and max(longest.values(), default=0) < request.seq_len_tokens
    ):  # in another form: experts in 4 bits
        method = node_of_setup(answer.chosen.setup).method
        longest[method] = max(longest_tokens(answer.workload).values())
    return ModelChoice(model=spec, longest_tokens=longest, answer=answer), request


@takes_options
def compare_adapters(
    model: options.Model,
    gpu: options.Gpu,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    *,
    space: SpaceOptions,
    memory: options.Memory,
    lookup: options.Lookup,
    out: Out = None,
    no_dry_run: options.FormulaAlone = False,
    as_json: options.Json = False,
) -> None:
    """Trained parameters, memory and speed of every kind of adapter, and what was published of their quality.

    Formula level: plan MODEL --gpu GPU --adapter KIND then plans one of them and dry-runs it.
    """
    card = options.announced(find_gpu(gpu))
    plan_request = RequestOptions(**vars(space), **vars(memory), seq_len=seq_len, global_batch=global_batch).request()
    if "adapter" in plan_request.fixed:
        raise UsageError("compare-adapters compares all of them, got --adapter", hint="leave --adapter out")
    if "full" in plan_request.fixed.get("method", ()):
        raise UsageError("compare-adapters compares adapters, got --method full", hint="use --method lora or qlora")
    fixed = {
        "method": ("lora", "qlora"),
        "kernels": PLANNED_KERNELS,
        **plan_request.fixed,
    }  # which every kind runs with
    plan_request = replace(plan_request, fixed=fixed)
    request = plan_request.workload(options.announced(lookup.model(model)), card)
    # The LoRA that a plan chooses; where none fits, it is said and the command ends.
    command = f"plan {model} --gpu {gpu}"
    plan = plan_workload(request)
    if isinstance(plan, NoPlan):
        typer.echo(f"no LoRA of {request.model.model_id} fits on {request.gpu.name}: {command} says why", err=True)
        raise typer.Exit(EXIT_NOTHING_FITS)
    lora = plan.chosen.setup
    rows = [*compare_kinds(request, lora)]
    show_table(out, as_json, AdaptersSheet(rows, request, lora))


@takes_options
def compare_targets(
    model: options.Model,
    gpu: options.Gpu,
    *,
    request: RequestOptions,
    lookup: options.Lookup,
    out: Out = None,
    no_dry_run: options.FormulaAlone = False,
    as_json: options.Json = False,
) -> None:
    """The fastest plan of every launch target: TRL, the Trainer, Axolotl, LLaMA-Factory, Unsloth, torchtitan.

    Formula level: plan MODEL --gpu GPU --target NAME --out DIR then plans one of them, dry-runs it, writes its files.
    """
    sheet = targets_sheet(model, gpu, request, lookup)
    show_table(out, as_json, sheet)
    if sheet.rows[0].candidate is None:
        raise typer.Exit(EXIT_NOTHING_FITS)


def targets_sheet(model: str, gpu: str, request: RequestOptions, lookup: options.Lookup) -> TargetsSheet:
    workload = workload_for(model, gpu, request, lookup=lookup)
    options.announced(workload.model)
    options.announced(workload.gpu)
    return TargetsSheet(choices_of_targets(workload), workload)
