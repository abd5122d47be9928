"""`plan tune`: search with GPU probes for the fastest setup that fits."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from finetune_planner.app.history import outcomes, with_known_context
from finetune_planner.app.machine import needs_search
from finetune_planner.app.progress import ProgressLine
from finetune_planner.app.tuning import DEFAULT_PROBES, Tuning, on_this_machine, tune_plan
from finetune_planner.cli import options
from finetune_planner.cli.output import console, print_json
from finetune_planner.cli.probe import confirmed_plan
from finetune_planner.cli.request_options import RequestOptions
from finetune_planner.cli.setup_flags import takes_options
from finetune_planner.cli.writing import launch_sentences, next_command, write_out
from planner.core.errors import EXIT_NOTHING_FITS, EnvironmentProblem, UsageError
from planner.core.records import dataclass
from planner.frameworks.exporters import Launch
from planner.hardware.gpus import find_gpu
from planner.planning.answer import plan_workload
from planner.planning.option_values import duration_s, positive
from planner.planning.plan import NoPlan, Plan
from planner.setup.packages import absent_packages
from reports.command import request_words
from reports.plan_json import plan_to_dict
from reports.terminal import render_plan

RUN_FRACTION = 1 / 3
"""Of the budget, kept from the search for the launch file's run (--confirm-run); what the search leaves is the run's
too. Judgement."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    goal: Annotated[str, typer.Option(help="What is best: tokens, cost or memory.")] = "tokens"
    budget: Annotated[str, typer.Option(help="End after this long, a probe or a run too: 5m, 90s, 1.5h.")] = "5m"
    max_probes: Annotated[int, typer.Option(help="Stop after this many probes.")] = DEFAULT_PROBES
    storage: Annotated[str | None, typer.Option(help="Study: a directory, or sqlite://, postgresql://, mysql://.")] = (
        None
    )
    study: Annotated[
        str | None, typer.Option(help="Name of the study: workers that share it work together. Default: plan.")
    ] = None
    slurm: options.Slurm = None
    partition: options.Partition = None

    def tuning(self, *, out: Path | None, store: Path | None, device: str | None, dry_run: bool) -> Tuning:
        """How the search goes; its study lies beside the plan where nothing else is said."""
        from search.stopping import Budget

        return Tuning(
            budget=Budget(
                max_probes=positive("max-probes", self.max_probes), seconds=duration_s("budget", self.budget, unit="s")
            ),
            dry_run=dry_run,
            storage=self.storage if self.storage is not None else out,
            study=self.study,
            store=store,
            device=device,
            slurm=self.slurm,
            partition=self.partition,
        )


@takes_options
def tune(
    model: options.Model,
    *,
    request: RequestOptions,
    gpu: Annotated[str, typer.Option(help="Table row of this machine's GPU, or 'local'.")] = "local",
    how: SearchOptions,
    out: Annotated[Path | None, typer.Option(help="Directory for the study and the plan's files.")] = None,
    confirm_run: Annotated[
        bool, typer.Option("--confirm-run", help="At the end run the launch file itself, as `plan confirm --run`.")
    ] = False,
    no_dry_run: options.NoDryRun = False,
    device: options.Device = None,
    store: options.StorePath = None,
    lookup: options.Lookup,
    as_json: options.Json = False,
) -> None:
    """Search with GPU probes for the fastest setup that fits, on one GPU of this machine or on several (--gpus), or as
    jobs of a cluster (--slurm).

    Call it again to go on where it stopped.
    """
    needs_search()

    request.fixed()  # what the flags alone contradict is said before anything is looked up
    if confirm_run and out is None:
        raise UsageError("--confirm-run runs a launch file", hint="add --out DIR")
    options.no_partition_alone(how.slurm, how.partition)
    if how.slurm is not None and gpu == "local":
        raise UsageError("--slurm probes on a card that is not here", hint="name it: --gpu NAME")
    tuning = how.tuning(out=out, store=store, device=device, dry_run=not no_dry_run)
    ends_at = tuning.ends_at
    if confirm_run and tuning.budget is not None and tuning.budget.seconds is not None:
        search_s = (1 - RUN_FRACTION) * tuning.budget.seconds
        tuning = replace(tuning, budget=replace(tuning.budget, seconds=search_s))
    line = ProgressLine()
    line.say(f"planning {model} by the formula")
    spec, card = options.announced(lookup.model(model)), options.announced(find_gpu(gpu))
    request = request.on_links_of(gpu, card)
    wanted = replace(request.request(), goal=how.goal).probed(absent_packages())
    workload = wanted.workload(spec, card, request.cluster(card))
    on_this_machine(workload)
    workload = with_known_context(workload, outcomes(store))
    plan = plan_workload(workload)
    line.close()
    if isinstance(plan, Plan):
        plan = tune_plan(plan, tuning)
    launches, problem = _written(plan, out, how.goal) if out is not None else ((), None)
    if confirm_run and out is not None and isinstance(plan, Plan) and problem is None:
        plan = confirmed_plan(plan, out, device, store, ends_at=ends_at)
    if as_json:
        print_json(plan_to_dict(plan))
    else:
        following = next_command(launches, out) if out is not None and launches else ""
        render_plan(plan, console(), next_command=following, launches=launch_sentences(launches, named=False))
    if problem is not None:
        raise problem
    if isinstance(plan, NoPlan):
        raise typer.Exit(EXIT_NOTHING_FITS)


def _written(plan: Plan | NoPlan, folder: Path, goal: str) -> tuple[tuple[Launch, ...], EnvironmentProblem | None]:
    """The plan's files, or why there are none: a full disk must not cost what was measured."""
    command = ["tune", *request_words(plan.workload), *(["--goal", goal] if goal != "tokens" else [])]
    try:
        return write_out(plan, folder, targets=None, command=command), None
    except EnvironmentProblem as problem:
        return (), problem
