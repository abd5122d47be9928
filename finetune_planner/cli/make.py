"""`plan MODEL --gpu GPU`: the main job."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.app.levels import answered, chosen_timeline, dry_runs_ahead
from finetune_planner.app.progress import say
from finetune_planner.cli import options
from finetune_planner.cli.answer import HERE, workload_for
from finetune_planner.cli.output import console, print_json
from finetune_planner.cli.request_options import DataOptions, RequestOptions
from finetune_planner.cli.setup_flags import takes_options
from planner.core.errors import EXIT_NOTHING_FITS, EnvironmentProblem, PlannerError, UnknownGpuError, UsageError
from planner.core.notes import Place, place_of, risk
from planner.core.records import dataclass
from planner.frameworks.exporters import Launch
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.models.families import spec_from_sizes
from planner.models.spec import ModelSpec
from planner.planning.plan import NoPlan, Plan
from planner.setup.interchange import to_jsonable
from reports.terminal import render_plan

MAX_CARDS = 6
"""Cards that an inexact name may mean and that are all answered for."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    out: Annotated[Path | None, typer.Option(help="Directory for plan.json, report.md, launch files.")] = None
    target: Annotated[
        list[str] | None, typer.Option(help="Plan what this target can run; repeatable. Default: files for all.")
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Write launch files that are predicted to run out of memory too.")
    ] = False
    verify: Annotated[
        list[str] | None,
        typer.Option(help="Trace this target's launch file with its own tool; repeatable. Needs --out."),
    ] = None
    job: Annotated[
        list[str] | None,
        typer.Option(help="Also a job file: slurm, skypilot, dstack, kubernetes or hf-jobs; repeatable. Needs --out."),
    ] = None

    def check_job(self, gpu: str, request: RequestOptions) -> None:
        """Refuses, before the data are read and anything is planned, a scheduler that does not have the GPUs.

        Raises:
            UsageError: the reason.
        """
        if not self.job:
            return
        from planner.frameworks.exporters.jobs import check

        if self.out is None:
            raise UsageError("--job writes a file", hint="add --out DIR")
        card = find_gpu(gpu)
        cluster = request.cluster(card)
        check(self.job, card, request.gpus or 1, cluster.num_nodes if cluster is not None else 1)

    def targets(self, gpus: int | None) -> tuple[str, ...]:
        """The targets to plan for; refuses, before anything is planned, what writing and tracing would refuse after it.

        Raises:
            PlannerError: what the options contradict, or name and is not there.
        """
        if self.out is None and not (self.target or self.verify):
            return ()
        from finetune_planner.cli.writing import check_launch_words, known_targets

        check_launch_words(self.target, self.out)
        if self.verify:
            traced = known_targets(self.verify)
            if self.out is None or gpus not in (None, 1):
                raise UsageError("--verify traces a launch file of one GPU", hint="add --out DIR, leave --gpus out")
            from finetune_planner.cli.trace import check_tools

            check_tools(traced)
        return known_targets(self.target) if self.target else ()


def _print_schema(wanted: bool) -> None:
    if wanted:
        from reports.json_schema import answer_schema  # late: few ask

        print_json(answer_schema(), whole=True)
        raise typer.Exit


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    why: Annotated[bool, typer.Option("--why", help="Show the decision tree with the bytes that decided.")] = False
    memory: Annotated[bool, typer.Option("--memory", help="Show every term of memory.")] = False
    everything: Annotated[bool, typer.Option("--all", help="Show everything: tree, terms, notes.")] = False
    json_schema: Annotated[
        bool,
        typer.Option("--json-schema", is_eager=True, callback=_print_schema, help="JSON Schema of --json, and end."),
    ] = False

    @property
    def names(self) -> frozenset[str]:
        wanted = {"why": self.why, "memory": self.memory, "all": self.everything}
        return frozenset(name for name, on in wanted.items() if on)


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions:
    no_dry_run: options.NoDryRun = False
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Leave out what was measured on this GPU before.")
    ] = False
    no_probe: Annotated[bool, typer.Option("--no-probe", help="No GPU probes, even with --gpu local.")] = False

    def answer(self, workload: Workload, *, local: bool) -> Plan | NoPlan:
        """The plan from the formula, the dry run, earlier measurements and, where the GPU is here, probes."""
        plan = answered(workload, dry_run=not self.no_dry_run, history=not self.no_history)
        if isinstance(plan, Plan) and local and not self.no_probe:
            from finetune_planner.app.tuning import refine_by_probe

            plan = refine_by_probe(plan)
        return plan


@takes_options
def make(
    model: options.Model,
    gpu: options.Gpu,
    *,
    request: RequestOptions,
    data: DataOptions,
    files: FileOptions,
    levels: EvidenceOptions,
    lookup: options.Lookup,
    show: ShowOptions,
    as_json: options.Json = False,
) -> None:
    """Plan MODEL on a GPU, or on several: the fastest setup that fits, why, and what stands beside it."""
    request.fixed()  # what the flags alone contradict is said before anything is looked up
    names = files.targets(request.gpus)
    checked_data = data.checked()

    def asked_for(gpu: str, spec: ModelSpec | None = None, lookup: options.Lookup = HERE) -> Workload:
        return workload_for(model, gpu, request, data=checked_data, targets=names, lookup=lookup, spec=spec)

    if not levels.no_dry_run:
        dry_runs_ahead(
            request.gpus or 1, first=None if data.dataset else lambda config: say_first(config, partial(asked_for, gpu))
        )
    try:
        files.check_job(gpu, request)
        workload = asked_for(gpu, lookup=lookup)
    except UnknownGpuError as error:
        if 1 < len(error.could_be) <= MAX_CARDS and not as_json:
            from reports.compare import render_comparison

            answers = [(card, answered(asked_for(card), dry_run=False, history=False)) for card in error.could_be]
            render_comparison(answers, console(stderr=True))  # by the formula; the error asks which it is
        raise
    options.announced(workload.model)
    options.announced(workload.gpu)
    written = _Written(levels.answer(workload, local=gpu.lower() == "local"))
    if files.out is not None:
        words = sys.argv[1:]
        _write(written, files, files.out, words if model in words else [model, "--gpu", gpu])
        if lookup.revision is not None and any(launch.files for launch in written.launches):
            where = "model_revision in TRL's and LLaMA-Factory's, revision_of_model in Axolotl's, revision= in scripts"
            todo = f"write {lookup.revision} into them ({where}), or they train main."
            written.sentences += (risk(f"The launch files name no revision: {todo}"),)
    if as_json:
        from finetune_planner.cli.writing import launch_targets
        from reports.plan_json import plan_to_dict

        launch = to_jsonable(launch_targets(written.launches)) if written.launches else []
        print_json(plan_to_dict(written.plan, extras={"launch": launch, "run": dict(written.run)} if launch else {}))
        print("\n".join(written.sentences), end="\n" * bool(written.sentences), file=sys.stderr)
    else:
        following, sentences = written.following, written.sentences
        render_plan(
            written.plan, console(), next_command=following, launches=sentences, show=show.names, also=lookup.words
        )
    if written.problem is not None:
        raise written.problem
    missing = [launch.target for launch in written.launches if launch.refused]
    refuted = isinstance(written.plan, NoPlan) or not written.plan.chosen.fits
    if refuted or (missing and (files.target or len(missing) == len(written.launches))):
        raise typer.Exit(EXIT_NOTHING_FITS)


@dataclass
class _Written:
    """The answer, and what became of its files.

    Attributes:
        sentences: one for each launch file; run: target -> what installs and starts it; following: what to type next.
        problem: why the files could not be written: a full disk must not cost the answer.
    """

    plan: Plan | NoPlan
    launches: tuple[Launch, ...] = ()
    sentences: tuple[str, ...] = ()
    run: Mapping[str, str] = field(default_factory=dict)
    following: str = ""
    problem: EnvironmentProblem | None = None


def _write(written: _Written, files: FileOptions, folder: Path, command: list[str]) -> None:
    """The plan's directory; with `--verify` its launch files are traced and written anew with what came of it."""
    from finetune_planner.cli.trace import trace_files, with_trace, withdraw
    from finetune_planner.cli.writing import launch_sentences, next_command, run_commands, write_out

    timeline = chosen_timeline(written.plan)
    write = partial(
        write_out, folder=folder, targets=files.target, command=command, timeline=timeline,
        force=files.force, jobs=files.job or (),
    )  # fmt: skip
    verify = files.verify
    try:
        written.launches = write(written.plan)
        if verify and not isinstance(written.plan, NoPlan):
            traces, before = trace_files(written.plan, written.launches, folder, verify), written.launches
            written.plan = with_trace(written.plan, traces)
            written.launches = write(written.plan, traces=traces)
            withdraw(before, written.launches, folder)
        written.sentences = launch_sentences(written.launches, named=bool(files.target))
        written.run = run_commands(written.launches, folder)
        written.following = next_command(written.launches, folder)
        if verify:
            trace_notes = [
                note for launch in written.launches for note in launch.notes if place_of(note) is Place.FOUND
            ]
            written.sentences = (*written.sentences, *trace_notes)
    except EnvironmentProblem as problem:
        written.problem = problem


FOLLOWS = "what transformers' own layers and a dry run say follows in some ten seconds"


def say_first(config: Mapping[str, Any], workload: Callable[[ModelSpec], Workload]) -> None:
    """Says on stderr what the closed forms give for a configuration's sizes, with the band of a stranger, or that they
    tell too little; `workload`: what is asked for, of a model."""
    name = str(config.get("model_type"))
    plan = _by_sizes(config, workload)
    if plan is None:
        say(f"{name} is of no family known here and its sizes alone tell too little: {FOLLOWS}.")
        return
    from reports.text import nothing_sentence, short_verdict

    verdict = short_verdict(plan) if isinstance(plan, Plan) else nothing_sentence(plan)
    say(f"{name} is of no family known here. By the sizes in its config.json alone: {verdict}")
    say(f"{FOLLOWS[0].upper()}{FOLLOWS[1:]}.")


def _by_sizes(config: Mapping[str, Any], workload: Callable[[ModelSpec], Workload]) -> Plan | NoPlan | None:
    """The formula's plan; None where the sizes tell of no kind, or of what the whole reading has yet to refuse."""
    from planner.planning.answer import plan_workload

    try:
        spec = spec_from_sizes(config)
        return plan_workload(workload(spec)) if spec is not None else None
    except PlannerError:
        return None
