"""`plan race`: existing training files, or what tools publish, against the plan for the same work."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.app import machine
from finetune_planner.app.folders import write_files
from finetune_planner.app.levels import answered, dry_run_possible, dry_runs_ahead
from finetune_planner.app.progress import ProgressLine, say
from finetune_planner.app.running import HowToRun, launch_of, run_file, run_target, training_file
from finetune_planner.cli import options
from finetune_planner.cli.check import CheckOptions
from finetune_planner.cli.checking import dry_run_of, load, predictor
from finetune_planner.cli.output import show_table
from finetune_planner.cli.probe import LIMIT_S, NUM_STEPS, enough_steps, exit_code
from finetune_planner.cli.report import write_html
from finetune_planner.cli.setup_flags import takes_options
from finetune_planner.cli.writing import known_targets, write_out
from planner.core.errors import EXIT_ENVIRONMENT, EXIT_NOTHING_FITS, EnvironmentProblem, UsageError
from planner.core.records import dataclass
from planner.core.shipped import DATA
from planner.frameworks.readers import ReadConfig
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.memory.workload import Workload
from planner.models.earlier import built_by_transformers_4
from planner.models.spec import ModelSpec
from planner.planning.check import band_of, with_extras
from planner.planning.option_values import length, named
from planner.planning.plan import NoPlan, Plan
from planner.planning.plan_request import DEFAULT_SEQ_LEN, PlanRequest
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Measurement, Prediction, ProbeFailure
from planner.setup.packages import absent_packages
from reports.html import comparison_html, entry_of
from reports.plan_json import read_plan_json
from reports.race import PLAN, Heat, Lane, RaceSheet

SAME = ("method", "adapter", "objective", "packing", "images", "rollout", "frozen_encoder", "hard_negatives")
"""What the plan shares with the files that it races against, beside model, length and sequences per step."""
ADAPTER = ("lora_rank", "lora_targets")
"""What it shares too with --same-adapter."""
OWN_DATA = "it read its own data: its tokens/s are counted as if every sequence were full"
RUN_AS = "trl"
"""The target whose file of the plan is run, where none is named."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One project's published defaults.

    Attributes:
        title: for people; `file`: its name, by which its reader knows it.
        source: repository, commit and files.
    """

    title: str
    file: str
    source: str
    form: str

    def text(self, model: str, seq_len_tokens: int) -> str:
        """The file for a model and a length."""
        return self.form.format(model=model, seq_len=seq_len_tokens)


_ROW = re.compile(r"^#: (\S+)\n# (.+)\n# (.+)\n# (.+)\n((?:(?!#).*\n)+)", re.MULTILINE)
PUBLISHED = {
    name: Published(title=title, file=file, source=source, form=form)
    for name, title, file, source, form in _ROW.findall((DATA / "published.yaml.txt").read_text("utf-8"))
}
"""Name -> what a project publishes: an example with what it leaves to the tool (`planner/data/published.yaml.txt`)."""


@dataclass(frozen=True, kw_only=True)
class DefaultsOptions:
    """Published defaults that the plan races against, beside the files."""

    defaults: Annotated[
        list[str] | None, typer.Option(help="Published defaults: trl, axolotl, llamafactory, unsloth, ...; repeatable.")
    ] = None
    model: Annotated[str | None, typer.Option(help="Model of --defaults, and of files that name none.")] = None
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", parser=named("seq-len", length), help="Tokens per sequence of --defaults."),
    ] = None
    same_adapter: Annotated[
        bool, typer.Option("--same-adapter", help="The plan keeps each file's LoRA rank and matrices.")
    ] = False

    @property
    def same(self) -> tuple[str, ...]:
        return (*SAME, *ADAPTER) if self.same_adapter else SAME


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    run: Annotated[
        bool, typer.Option("--run", help="Run every file, and the plan's, by its own tool for some steps.")
    ] = False
    target: Annotated[str | None, typer.Option(help="Plan what this target can run. With --run: trl.")] = None
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run, the first two not counted.")] = NUM_STEPS
    limit: Annotated[float, typer.Option(help="Longest time of one run, in seconds.")] = LIMIT_S
    device: options.Device = None
    store: options.StorePath = None

    def how(self) -> HowToRun | None:
        """How files are run, None where none is.

        Raises:
            UsageError: options of a run without one, or too few steps.
            EnvironmentProblem: no device.
        """
        if not self.run:
            if self.device is not None or self.store is not None:
                raise UsageError("--device and --store are of a run", hint="add --run: the files are executed")
            return None
        machine.pick_devices(self.device)
        return HowToRun(num_steps=enough_steps(self.steps), limit_s=self.limit, device=self.device, store=self.store)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    path: Path
    label: str
    config: ReadConfig
    model: ModelSpec
    arguments: tuple[str, ...] = ()
    source: str = ""

    def work(self, same: Sequence[str]) -> tuple[Any, ...]:
        """What files share that race in one heat."""
        setup = self.config.setup
        return (
            self.model.model_id,
            setup.seq_len_tokens,
            setup.global_batch_seqs,
            setup.num_gpus,
            *(getattr(setup, name) for name in same),
        )


@takes_options
def race(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Training configs or scripts, as plan check reads.", show_default=False)
    ] = None,
    *,
    gpu: options.Gpu,
    cluster: options.JobGpus,
    of_tools: DefaultsOptions,
    check_options: CheckOptions,
    limits: options.Memory,
    runs: RunOptions,
    no_dry_run: options.NoDryRun = False,
    out: Annotated[Path | None, typer.Option(help="Directory for report.md and report.html.")] = None,
    as_json: options.Json = False,
) -> int:
    """Existing training files, or tools' published defaults, against the plan for the same model, length and tokens
    per step, side by side.

    Predicted by the dry run; nothing is run without --run, which executes the files, each for a few steps.
    """
    how, target = runs.how(), runs.target or (RUN_AS if runs.run else None)
    if target is not None:
        known_targets([target])
    if not no_dry_run:
        dry_runs_ahead(1)
    with tempfile.TemporaryDirectory(prefix="plan-race-") as folder:
        entries = list(_entries(files or (), of_tools, check_options, gpu, cluster.gpus, Path(folder)))
        card = options.announced(entries[0][1])
        racers = [entry for entry, _ in entries]
        several = next((racer for racer in racers if racer.config.setup.num_gpus > 1), None)
        if several is not None and how is not None:
            raise UsageError(
                f"{several.label} is for {several.config.setup.num_gpus} GPUs: --run is on one",
                hint="leave --run out: the race is predicted",
            )
        by_work: dict[tuple[Any, ...], list[_Entry]] = {}
        for racer in racers:
            by_work.setdefault(racer.work(of_tools.same), []).append(racer)
        heats = [
            _heat(
                same,
                of_tools.same,
                card,
                replace(cluster, gpus=same[0].config.setup.num_gpus).of(card),
                limits,
                target,
                how,
                dry_run=not no_dry_run,
            )
            for same in by_work.values()
        ]
    sheet = RaceSheet(heats, _level(heats, how, dry_run=not no_dry_run))
    if out is not None:
        write_html(out, lambda: comparison_html(sheet.view()))
    show_table(out, as_json, sheet)
    return max(map(_code, heats))


def _entries(
    files: Sequence[Path],
    of_tools: DefaultsOptions,
    check_options: CheckOptions,
    gpu: str,
    num_gpus: int | None,
    folder: Path,
) -> Iterator[tuple[_Entry, GpuSpec]]:
    """Everything that races against the plan, with the card."""
    names = list(dict.fromkeys(of_tools.defaults or ()))
    if not files and not names:
        raise UsageError(
            "nothing races against the plan", hint="plan race FILE --gpu GPU, or --defaults trl --model MODEL"
        )
    if names and of_tools.model is None:
        raise UsageError("--defaults are of a model", hint="add --model MODEL")
    if of_tools.seq_len is not None and not names:
        raise UsageError("--seq-len is the length of --defaults: a file says its own", hint="leave --seq-len out")
    sources = [(path, path.name, "") for path in files]
    if len({path.name for path in files}) < len(files):
        sources = [(path, str(path), "") for path in files]
    for name in names:
        if name not in PUBLISHED:
            raise UsageError(f"--defaults {name}: no such published defaults", hint=f"one of {', '.join(PUBLISHED)}")
        defaults = PUBLISHED[name]
        path = Path(name, defaults.file)
        write_files(folder, {path.as_posix(): defaults.text(str(of_tools.model), of_tools.seq_len or DEFAULT_SEQ_LEN)})
        sources.append((folder / path, f"{defaults.title}'s defaults", defaults.source))
    for path, label, source in sources:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", hint="name the files that race")
        request = check_options.request(None if source else of_tools.model, num_gpus)
        config, model, card = load(path, gpu, request)
        words = request.arguments or ()
        yield _Entry(path=path, label=label, config=config, model=model, arguments=words, source=source), card


def _heat(
    entries: Sequence[_Entry],
    same: Sequence[str],
    card: GpuSpec,
    cluster: Cluster | None,
    limits: options.Memory,
    target: str | None,
    how: HowToRun | None,
    *,
    dry_run: bool,
) -> Heat:
    first, setup, plain = entries[0], entries[0].config.setup, TrainSetup()
    decided = {"method", "packing", *(ADAPTER if setup.method != "full" else ())}
    request = PlanRequest(
        fixed={
            name: (getattr(setup, name),)
            for name in same
            if name in decided or (name not in ADAPTER and getattr(setup, name) != getattr(plain, name))
        },
        seq_len=setup.seq_len_tokens,
        global_batch=setup.global_batch_seqs,
        memory_gib=limits.memory_gib,
        headroom_gib=limits.headroom,
        targets=() if target is None else (target,),
        absent_packages=absent_packages() if how is not None else (),
    )
    workload = request.workload(first.model, card, cluster)
    lanes = [_lane(entry, workload, dry_run=dry_run) for entry in entries]
    # what was measured here before corrects the plan alone: both sides are predicted alike
    plan = answered(workload, dry_run=dry_run, history=False)
    if isinstance(plan, NoPlan):
        free = {name: values for name, values in workload.fixed.items() if name not in ("method", "adapter", *ADAPTER)}
        plan = answered(replace(workload, fixed=free), dry_run=dry_run, history=False)  # by another method, if any
    planned = Lane(label=PLAN, candidate=plan.chosen) if isinstance(plan, Plan) else None
    if how is not None:
        lanes = [_run(lane, entry, how) for lane, entry in zip(lanes, entries, strict=True)]
        if planned is not None and isinstance(plan, Plan) and target is not None:
            planned = _run_plan(planned, plan, target, how)
    return Heat(workload=workload, plan=plan, planned=planned, lanes=tuple(lanes))


def _lane(entry: _Entry, workload: Workload, *, dry_run: bool) -> Lane:
    """A file as predicted: its evaluation and whatever else it holds are in the peak, what is not followed in the
    band."""
    config, model, card = entry.config, entry.model, workload.gpu

    def whole(prediction: Prediction) -> Prediction:
        adjusted = with_extras(lambda setup: prediction, config, model, card)(config.setup)
        band = band_of(adjusted, config)
        return replace(adjusted, memory_band_fraction=band.widest, bands={**adjusted.bands, "needed": band})

    formula = predictor(model, card, workload.cluster, planned=config.planned)
    candidate: Candidate = Candidate(
        setup=config.setup, budget_bytes=workload.budget_bytes, formula=whole(formula(config.setup))
    )
    if dry_run and not dry_run_possible() and not built_by_transformers_4(model):
        line = ProgressLine()
        line.say(f"dry run of {entry.label}")
        run_options: dict[str, Any] = {"planned": config.planned, "cluster": workload.cluster}
        dry = dry_run_of(config.setup, formula, model, card, workload.memory_bytes, **run_options)
        line.close()
        candidate = replace(candidate, dry_run=dry and whole(dry))
    return Lane(label=entry.label, candidate=candidate, form=config.format, source=entry.source)


def _run(lane: Lane, entry: _Entry, how: HowToRun) -> Lane:
    say(f"running {lane.label}")
    try:
        file = training_file(entry.path, entry.config, entry.arguments)
        stored = not file.data_here  # of a person's own data nobody says that they fill every sequence
        lane = lane if stored else replace(lane, remark=OWN_DATA)
        outcome, _, device = run_file(
            file, entry.config.setup, entry.model, how, sibling=Path(entry.path), stored=stored
        )
    except (EnvironmentProblem, UsageError) as error:
        return replace(lane, not_run=f"{error.message}" + (f" ({error.hint})" if error.hint else ""))
    return _with_outcome(lane, outcome, device)


def _run_plan(lane: Lane, plan: Plan, target: str, how: HowToRun) -> Lane:
    say(f"running {PLAN} ({target})")
    try:
        with tempfile.TemporaryDirectory(prefix="plan-race-") as parent:
            folder = Path(parent) / "plan"
            write_out(plan, folder, targets=[target], command=["race"])
            launch_of(entry_of(read_plan_json(folder)).extras, target)
            confirmation, _ = run_target(folder, read_plan_json(folder), target, how)
    except (EnvironmentProblem, UsageError) as error:
        return replace(lane, not_run=f"{error.message}" + (f" ({error.hint})" if error.hint else ""))
    return _with_outcome(lane, confirmation.outcome, machine.job_devices(how.device, 1)[0])


def _with_outcome(lane: Lane, outcome: Measurement | ProbeFailure, device: str) -> Lane:
    if isinstance(outcome, ProbeFailure) and outcome.log_tail:
        say("\n".join(f"  | {line}" for line in outcome.log_tail.splitlines()[-12:]))
    if device == "cpu":
        return replace(lane, rehearsal=outcome)
    return replace(lane, candidate=replace(lane.candidate, run=outcome))


def _level(heats: Sequence[Heat], how: HowToRun | None, *, dry_run: bool) -> str:
    dry = [isinstance(lane.candidate.dry_run, Prediction) for heat in heats for lane in heat.all]
    words = "level formula"
    if any(dry):
        words = "level dry run (the real step on meta tensors, its operators priced by the card's rates)"
        words += "" if all(dry) else ", formula of what none follows"
    elif dry_run and (missing := dry_run_possible()):
        words += f" (no dry run: {missing} not installed)"
    if how is None:
        return f"Nothing was run: {words}. --run runs the files on a GPU."
    if how.device == "cpu":
        return f"Rehearsed on this CPU, which says nothing of the card: {words}."
    return f"Run by its own tool, {how.num_steps} steps each; what was not run: {words}."


def _code(heat: Heat) -> int:
    if heat.planned is None:
        return EXIT_NOTHING_FITS
    outcomes = [outcome for lane in heat.all if (outcome := lane.rehearsal or lane.candidate.run) is not None]
    return max([EXIT_ENVIRONMENT * any(lane.not_run != "" for lane in heat.all), *map(exit_code, outcomes)])
