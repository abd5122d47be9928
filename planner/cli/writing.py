"""`--out DIR`: plan.json, the reports and the launch files of a plan."""

import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from planner import __version__
from planner.cli.output import write_text
from planner.errors import ConfigError, EnvironmentProblem, UsageError
from planner.plan import NoPlan, Plan
from planner.units import gib

if TYPE_CHECKING:
    from planner.exporters import DatasetChoice, Launch
    from reports.extras import Extras, Timeline

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "trl", "accelerate", "optuna")


def write_out(
    plan: Plan | NoPlan,
    folder: Path,
    *,
    targets: Sequence[str] | None,
    dataset: str | None,
    command: Sequence[str],
    timeline: "Timeline | None" = None,
) -> None:
    """Write the directory of a plan; each file is written beside and renamed.

    Raises:
        EnvironmentProblem: the directory cannot be written.
        UsageError: an unknown launch target.
    """
    from reports.write import plan_files

    launches = launch_files(plan, targets, dataset, folder) if isinstance(plan, Plan) else ()
    for launch in launches:
        for file in launch.files:
            write_text(folder / "launch" / file.path, file.text, inside=folder)
    written = {Path(file.path).parts[0] for launch in launches for file in launch.files}
    earlier = sorted(one.name for one in (folder / "launch").glob("*") if one.is_dir() and one.name not in written)
    if earlier:
        where = ", ".join(f"launch/{name}" for name in earlier)
        print(f"not of this plan, and left as it was: {where} in {folder}", file=sys.stderr)
    extras = _extras(plan, launches, command, timeline)
    try:
        texts = plan_files(plan, extras)
    except EnvironmentProblem as error:
        print(f"no report.html: {error.message}", file=sys.stderr)
        texts = plan_files(plan, extras, html=False)
    for name, text in texts.items():
        write_text(folder / name, text)


def check_launch_words(targets: Sequence[str] | None, dataset: str | None, folder: Path | None) -> None:
    """Refuses, before anything is planned, what `write_out` would refuse after it, and targets that nobody writes.

    Raises:
        UsageError: an unknown launch target, or one without a directory to write it to.
        ConfigError: a data set's path that is not there.
        EnvironmentProblem: a file where the directory should be.
    """
    if folder is not None and folder.exists() and not folder.is_dir():
        raise EnvironmentProblem(f"{folder} is a file, not a directory", hint="choose another --out directory")
    if targets and folder is None:
        raise UsageError("--target says which launch files --out writes", hint="add --out DIR")
    if targets:
        known_targets(targets)
    if dataset is not None:
        dataset_choice(dataset, folder or Path())


def known_targets(targets: Sequence[str] | None) -> tuple[str, ...]:
    """The targets asked for, each once; all where none is.

    Raises:
        UsageError: an unknown one.
    """
    from planner.exporters import EXPORTERS

    names = tuple(dict.fromkeys(targets or EXPORTERS))
    for name in names:
        if name not in EXPORTERS:
            known = ", ".join(EXPORTERS)
            raise UsageError(
                f"--target must be one of {known}; got {name!r}", hint=f"for example --target {next(iter(EXPORTERS))}"
            )
    return names


def launch_files(plan: Plan, targets: Sequence[str] | None, dataset: str | None, folder: Path) -> "tuple[Launch, ...]":
    """The launch of every wanted target (all by default), refused ones included with their reason.

    Local paths are written relative to `folder`, from where the launch commands run: no machine path is written.
    """
    from planner.exporters import EXPORTERS, ExportRequest
    from planner.hyperparameters import choose
    from reports.text import gpus_words

    names = known_targets(targets)
    workload, chosen = plan.workload, plan.chosen
    evidence = chosen.memory_evidence
    request = ExportRequest(
        model_id=_from_folder(workload.model.model_id, folder),
        model=workload.model,
        setup=chosen.setup,
        gpu=workload.gpu,
        hyper=choose(chosen.setup, num_params=workload.model.num_params, dataset_tokens=workload.dataset_tokens),
        dataset=dataset_choice(dataset, folder),
        num_nodes=workload.cluster.num_nodes if workload.cluster is not None else 1,
        about=(
            f"planned for {gpus_words(workload)}: peak {gib(evidence.peak_device_bytes)} "
            f"of {gib(workload.memory_bytes)} ({evidence.rung.value.replace('_', ' ')})",
        ),
    )
    return tuple(EXPORTERS[name](request) for name in names)


def _from_folder(name: str, folder: Path) -> str:
    """A local path seen from `folder`; any other name as it is."""
    return os.path.relpath(name, folder) if Path(name).exists() else name


def dataset_choice(dataset: str | None, folder: Path) -> "DatasetChoice | None":
    """A hub id as it is; a local file or directory by its path and with its columns.

    Raises:
        ConfigError: something that looks like a path and is not there.
    """
    if dataset is None:
        return None
    from planner.exporters import DatasetChoice

    path = Path(dataset)
    if path.exists():
        from planner.dataset import sample_columns

        return DatasetChoice(path=_from_folder(dataset, folder), columns=sample_columns(path), local=True)
    if path.suffix in (".json", ".jsonl", ".parquet", ".csv") or dataset.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"no data set at {dataset}", hint="give a hub id, or a file that exists")
    return DatasetChoice(path=dataset)


def _extras(
    plan: Plan | NoPlan, launches: "Sequence[Launch]", command: Sequence[str], timeline: "Timeline | None"
) -> "Extras":
    from reports.extras import Extras, LaunchFile, LaunchTarget, SensitivityPoint
    from reports.sensitivity import sensitivity

    moved: tuple[SensitivityPoint, ...] = ()
    if isinstance(plan, Plan):
        from planner.planning import candidate

        moved = sensitivity(plan.chosen, lambda setup: candidate(plan.workload, setup))
    return Extras(
        planner_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["plan", *command]),
        environment=_environment(),
        launch=tuple(
            LaunchTarget(
                target=launch.target,
                command=launch.command,
                files=tuple(LaunchFile(path=f"launch/{file.path}", text=file.text) for file in launch.files),
                notes=(*launch.unsupported, *launch.notes),
            )
            for launch in launches
        ),
        timeline=timeline,
        sensitivity=moved,
    )


def _environment() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
