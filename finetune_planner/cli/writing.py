"""`--out DIR`: plan.json, the reports and the launch files of a plan."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from finetune_planner.app.folders import write_files
from finetune_planner.app.levels import dry_run_setup
from finetune_planner.app.progress import say
from finetune_planner.cli.trace import sentence
from planner import __version__
from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.notes import Note, Place, risk
from planner.core.redaction import without_secrets, without_secrets_in_words
from planner.core.units import gib
from planner.frameworks.exporters import EXPORTERS, DatasetChoice, Difference, ExportRequest, Launch
from planner.frameworks.exporters.chat import lacks_template
from planner.frameworks.exporters.folder import folder_files, start_command
from planner.frameworks.exporters.trl import REWARDS, STAND_IN
from planner.frameworks.hyperparameters import choose
from planner.memory.workload import Data, Workload
from planner.options.absent import known_unplanned
from planner.planning.decision.candidates import candidate
from planner.planning.expressed import as_run, run_otherwise
from planner.planning.plan import NoPlan, Plan
from planner.planning.targets import own_choice
from planner.samples.dataset import first_row, kind_of_data, path_of
from planner.samples.rows import files_of
from planner.samples.steps import steps_between_logs, steps_of_run
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Prediction, ProbeFailure
from planner.setup.packages import PACKAGED, rules_packages_out
from reports.extras import Extras, LaunchFile, LaunchTarget, SensitivityPoint, Timeline, sensitivity
from reports.html import plan_files
from reports.setup_text import gpus_words

FOLDER = "launch"
"""What stands for the files beside all targets', README.md and run.sh."""
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "trl", "accelerate", "optuna")


def write_out(
    plan: Plan | NoPlan,
    folder: Path,
    *,
    targets: Sequence[str] | None,
    command: Sequence[str],
    data: Data | None = None,
    timeline: Timeline | None = None,
    force: bool = False,
    traces: Mapping[str, Prediction | ProbeFailure] = MappingProxyType({}),
    jobs: Sequence[str] = (),
) -> tuple[Launch, ...]:
    """Write the directory of a plan; what a person changed in it is kept beside. Returns the targets asked for, written
    or not; nothing is launched without a plan, but by `force`. `traces`: of the files as they were written before;
    `data`: others than those that were planned for; `jobs`: schedulers that a job file is written for.

    Raises:
        EnvironmentProblem: the directory cannot be written.
        UsageError: an unknown launch target.
    """
    launches: tuple[Launch, ...] = ()
    if isinstance(plan, Plan) or force:
        launches = launch_files(plan, targets, folder, data=data, force=force, traces=traces, jobs=jobs)
    moved: tuple[SensitivityPoint, ...] = ()
    if isinstance(plan, Plan):
        moved = sensitivity(plan.chosen, lambda setup: candidate(plan.workload, setup))
    extras = Extras(
        planner_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["plan", *without_secrets_in_words(command)]),
        environment=_environment(),
        launch=launch_targets(launches),
        timeline=timeline,
        sensitivity=moved,
    )
    try:
        texts = plan_files(plan, extras)
    except EnvironmentProblem as error:
        say(f"no report.html: {error.message}")
        texts = plan_files(plan, extras, html=False)
    files = {f"launch/{file.path}": file for launch in launches for file in launch.files}
    executable = {name for name, file in files.items() if file.executable}
    write_files(folder, {name: file.text for name, file in files.items()} | texts, executable=executable)
    written = {Path(name).parts[1] for name in files}
    earlier = sorted(
        entry.name for entry in (folder / "launch").glob("*") if entry.is_dir() and entry.name not in written
    )
    if earlier and not traces:  # with them it is the second time for one plan, and was said
        where = ", ".join(f"launch/{name}" for name in earlier)
        say(f"not of this plan, and left as it was: {where} in {folder}")
    return tuple(launch for launch in launches if launch.target != FOLDER)


def launch_sentences(launches: Sequence[Launch], *, named: bool) -> tuple[str, ...]:
    """Files that are predicted to run out of memory, written or not; where targets were named also why one has none."""
    forced = [
        risk(f"launch/{launch.target}, written with --force: {'; '.join(launch.about)}.")
        for launch in launches
        if launch.files and len(launch.about) > 1
    ]
    refused = [launch for launch in launches if launch.refused and (named or launch.about)]
    # of why there are no files what is predicted of a run must be known first
    refusals = (
        Note(f"Not written for {launch.target}: {launch.refused}.", Place.RISK if launch.about else Place.PLAIN)
        for launch in refused
    )
    stand_in = [risk(f"{STAND_IN}.") for launch in launches for file in launch.files if file.path == REWARDS]
    return (*forced, *refusals, *stand_in)


def next_command(launches: Sequence[Launch], folder: Path) -> str:
    """The first target's of `run_commands`."""
    return next(iter(run_commands(launches, folder).values()), f"open {shlex.quote(str(folder))}/report.html")


def run_commands(launches: Sequence[Launch], folder: Path) -> dict[str, str]:
    """What installs and starts, on a bare machine, each target whose files were written and that can run."""
    return {
        launch.target: f"cd {shlex.quote(str(folder))} && {words}" for launch in launches if (words := _run(launch))
    }


def _run(launch: Launch) -> str:
    can_run = launch.files and launch.complete and len(launch.about) == 1
    return f"bash launch/run.sh install {launch.target} && {start_command(launch)}" if can_run else ""


def check_launch_words(targets: Sequence[str] | None, folder: Path | None) -> None:
    """Refuses, before anything is planned, what `write_out` would refuse after it, and targets that nobody writes.

    Raises:
        UsageError: an unknown launch target.
        EnvironmentProblem: a file where the directory should be.
    """
    if folder is not None and folder.exists() and not folder.is_dir():
        raise EnvironmentProblem(f"{folder} is a file, not a directory", hint="choose another --out directory")
    if targets:
        known_targets(targets)


def known_targets(targets: Sequence[str] | None) -> tuple[str, ...]:
    """The targets asked for, each once; all where none is.

    Raises:
        UsageError: an unknown one.
    """
    names = tuple(dict.fromkeys(targets or EXPORTERS))
    for name in names:
        if name not in EXPORTERS:
            if absent := known_unplanned("--target", name):
                raise UsageError(absent[0], hint=absent[1])
            target_names = ", ".join(EXPORTERS)
            raise UsageError(
                f"--target must be one of {target_names}; got {name!r}",
                hint=f"for example --target {next(iter(EXPORTERS))}",
            )
    return names


def launch_files(
    plan: Plan | NoPlan,
    targets: Sequence[str] | None,
    folder: Path,
    *,
    data: Data | None = None,
    force: bool = False,
    traces: Mapping[str, Prediction | ProbeFailure] = MappingProxyType({}),
    jobs: Sequence[str] = (),
) -> tuple[Launch, ...]:
    """The launch of every wanted target (all by default); one without files says why.

    A target that runs the setup otherwise than planned is predicted as it runs, on the plan's level. Files that would
    run out of memory are left out, or say so in their first lines (`force`). Local paths are written relative to
    `folder`, from where the launch commands run: no machine path is written. `traces`: what a trace of a target's file
    said; its figure stands above the plan's level.
    """
    chosen = plan.subject
    data = plan.workload.data if data is None else data
    request = request_of(plan.workload, chosen, data, folder)
    launches = []
    evaluated = {chosen.setup: chosen}
    names = known_targets(targets)
    as_planned = {name: as_run(name, chosen.setup, plan.workload) for name in names}

    def place(name: str) -> tuple[bool, bool]:
        runs = as_planned[name]
        return isinstance(runs, str) or bool(run_otherwise(chosen.setup, runs)), name != chosen.setup.stack

    for name in sorted(names, key=place):  # those that do what is planned first, the planned program's own before
        given, runs = chosen.setup, as_planned[name]
        # without further packages: full logits, where it would run the plan's loss with one (transformers and
        # LLaMA-Factory have no chunked loss but Liger's)
        whole = rules_packages_out(plan.workload.fixed) and "full" in given.objective_spec.losses
        if whole and not isinstance(runs, str) and runs.loss in PACKAGED["loss"]:
            given = given.replace(loss="full")
            runs = as_run(name, given, plan.workload)
        if not isinstance(runs, str) and runs not in evaluated:
            evaluated[runs] = _evaluate(plan, chosen, runs)
        unfit = isinstance(runs, str) or not evaluated[runs].fits
        if unfit and not (plan.workload.targets or force) and chosen.fits:
            choice = own_choice(plan.workload, chosen.setup, name)
            if choice is not None:
                given = runs = choice.setup
                evaluated.setdefault(runs, _evaluate(plan, chosen, runs))
        if isinstance(runs, str):
            launches.append(Launch(target=name, refused=runs))
            continue
        target_request = replace(request, setup=given, **_counted(plan.workload, chosen.setup, data, runs))
        launches.append(_launch(name, target_request, chosen, evaluated[runs], plan.workload, force, traces.get(name)))
    folder_texts = folder_files(launches, request, jobs=jobs)
    if folder_texts:
        launches.append(Launch(target=FOLDER, files=folder_texts, complete=False))
    return tuple(launches)


def request_of(workload: Workload, chosen: Candidate, data: Data, folder: Path) -> ExportRequest:
    """What the launch files of every target are made of."""
    return ExportRequest(
        model_id=_from_folder(workload.model.model_id, folder),
        model=workload.model,
        setup=chosen.setup,
        gpu=workload.gpu,
        dataset=dataset_choice(data, chosen.setup.objective_spec.data, folder),
        step_s=chosen.formula.step_time_s or 0.0,
        loss_on=data.loss_on or "answers",
        held_out=data.held_out,
        lacks_template=lacks_template(workload.model.model_id),
        num_nodes=workload.cluster.num_nodes if workload.cluster is not None else 1,
        **_counted(workload, chosen.setup, data, chosen.setup),
    )


def _counted(workload: Workload, planned: TrainSetup, data: Data, runs: TrainSetup) -> dict[str, Any]:
    """What of a request follows from the rows of an epoch: of `data` as they were planned, filled or not as a target
    `runs` them (a row of it then has no token free: torchtitan and Loggetta cut samples where a row ends)."""
    rows, samples_per_row, num_steps = data.epoch_seqs, data.samples_per_seq, None
    if rows is not None and runs.packing != planned.packing:
        samples = rows * samples_per_row
        rows = ceil((data.epoch_tokens or 0) / runs.seq_len_tokens) if runs.packing else round(samples)
        samples_per_row = samples / max(1, rows)
    if rows is not None:
        num_steps = steps_of_run(rows, workload.global_batch_seqs, workload.epochs)
    hyper = choose(
        runs,
        num_params=workload.model.num_params,
        dataset_tokens=data.epoch_tokens,
        samples_per_seq=samples_per_row,
        num_epochs=workload.epochs,
        learning_rate=workload.learning_rate,
    )
    return {"hyper": hyper, "num_steps": num_steps, "logging_steps": steps_between_logs(num_steps)}


def _launch(
    name: str,
    request: ExportRequest,
    chosen: Candidate,
    really: Candidate,
    workload: Workload,
    force: bool,
    traced: Prediction | ProbeFailure | None,
) -> Launch:
    notes: tuple[str, ...] = ()
    if traced:
        notes = (sentence(name, traced, replace(really, trace=None).memory_evidence),)
        really = replace(really, trace=traced)
    about = _about(workload, chosen, really, name)
    if really.fits or force:
        evidence = really.memory_evidence
        launch = EXPORTERS[name](replace(request, about=about))
        differences = launch.differences
        if request.setup == chosen.setup.replace(loss=request.setup.loss) != chosen.setup:
            reason = "it has no other loss without a package, which --no-extra-packages rules out"
            differences += (Difference(field="loss", planned=chosen.setup.loss, runs_as="full", reason=reason),)
        return replace(
            launch,
            about=about,
            differences=differences,
            peak_device_bytes=evidence.peak_device_bytes,
            level=evidence.level.value,
            notes=(*launch.notes, *notes),
        )
    other = really.setup != chosen.setup
    hint = f"plan for it with --target {name}" if other else "plan with a larger --headroom"
    reason = f"{'; '.join(about)}: {hint}, or write it all the same (--force)"
    return Launch(target=name, about=about, refused=reason, notes=notes)


def _evaluate(plan: Plan | NoPlan, chosen: Candidate, setup: TrainSetup) -> Candidate:
    workload = plan.workload
    evaluated = candidate(workload, setup)
    if not isinstance(chosen.dry_run, Prediction):
        return evaluated
    model, gpu, memory, uneven = workload.model, workload.gpu, workload.memory_bytes, workload.uneven
    ran = dry_run_setup(model, gpu, setup, memory_bytes=memory, uneven=uneven, cluster=workload.cluster)
    return replace(evaluated, dry_run=ran)


def _about(workload: Workload, chosen: Candidate, really: Candidate, target: str) -> tuple[str, ...]:
    evidence = really.memory_evidence
    level = evidence.level.value.replace("_", " ")
    words = f"peak {gib(evidence.peak_device_bytes)} of {gib(workload.memory_bytes)} ({level})"
    where = f"planned for {gpus_words(workload)}: "
    if really.setup != chosen.setup:
        planned_peak = gib(chosen.memory_evidence.peak_device_bytes)
        where = f"planned for {gpus_words(workload)} with a peak of {planned_peak}; as {target} runs it: "
    if really.fits:
        return (where + words,)
    if really.cannot_run:
        return (f"{target} cannot run it: {really.cannot_run}",)
    over = gib(evidence.peak_device_bytes - really.budget_bytes)
    return (f"PREDICTED OUT OF MEMORY, {over} over the budget of {gib(really.budget_bytes)}", where + words)


def _from_folder(name: str, folder: Path) -> str:
    """A local path seen from `folder`; any other name as it is."""
    return os.path.relpath(name, folder) if Path(name).exists() else name


def dataset_choice(data: Data, kinds: Sequence[str], folder: Path) -> DatasetChoice | None:
    """What was planned for as launch files in `folder` name it, None where no data set was named.

    Args:
        kinds: of samples that are trained on.

    Raises:
        ConfigError: something that looks like a path and is not there.
    """
    if not data.file:
        return None
    place = path_of(data.file)
    kind = data.kind or (kind_of_data(place, kinds, data.names) if place is not None else "")
    fields = tuple(first_row(place, data.names)) if place is not None else ()
    if not Path(data.file).exists():
        return DatasetChoice(path=data.file, columns=kind, names=data.names, fields=fields)
    return DatasetChoice(
        path=_from_folder(data.file, folder),
        columns=kind,
        local=True,
        plain=all(file.suffix in (".json", ".jsonl", ".parquet") for file in files_of(Path(data.file))),
        names=data.names,
        fields=fields,
    )


def launch_targets(launches: Sequence[Launch]) -> tuple[LaunchTarget, ...]:
    """The launch files as plan.json holds them."""
    return tuple(
        LaunchTarget(
            target=launch.target,
            command=launch.command,
            run=_run(launch),
            files=tuple(
                LaunchFile(path=f"launch/{file.path}", text=without_secrets(file.text)) for file in launch.files
            ),
            notes=(*launch.about, *launch.unsupported, *launch.notes),
            peak_device_bytes=launch.peak_device_bytes,
            level=launch.level,
        )
        for launch in launches
        if launch.target != FOLDER
    )


def _environment() -> dict[str, str]:
    from importlib import metadata  # late: it costs a plan that writes nothing several milliseconds

    versions = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
