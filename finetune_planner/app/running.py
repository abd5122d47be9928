"""The last level: a plan's own launch file, run by its tool for some steps, held against what the plan promised;
and a person's own training file, run as it was written (`plan race --run`)."""

import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_planner.app import machine
from finetune_planner.app.folders import write_files
from finetune_planner.app.progress import ProgressLine
from finetune_planner.app.time_left import TimeIsUp, until
from planner.core.children import ended_by_scheduler, python_argv
from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.inputs import read_text
from planner.core.records import dataclass
from planner.frameworks.exporters.prepare import NAME as PREPARE
from planner.frameworks.exporters.types import PLACEHOLDER_DATASET
from planner.frameworks.readers import ReadConfig, canonical
from planner.frameworks.readers.loading import read_bounded
from planner.frameworks.readers.read import read_config
from planner.memory.workload import Workload
from planner.models.hub import weights_in_cache
from planner.models.resolve import model_beside, resolve_model
from planner.options.stacks import TARGET_ROWS
from planner.planning.decision.candidates import candidate
from planner.planning.expressed import as_run
from planner.planning.plan import NoPlan, Plan
from planner.setup.outcome import Candidate, FailureKind, Fidelity, ProbeFailure
from reports.extras import Extras, LaunchTarget
from reports.html import entry_of, plan_files

if TYPE_CHECKING:
    from planner.hardware.gpu import GpuSpec
    from planner.models.spec import ModelSpec
    from planner.setup import TrainSetup
    from planner.setup.codec import Outcome
    from probes.confirm import Confirmation
    from probes.launched.run import LaunchedFile

RUN_BY_A_TRAINER = ("trl", "hf", "axolotl", "llamafactory", "unsloth")
"""Targets whose files train with transformers' Trainer in one process: those that can be watched."""
WEIGHTS = ("*.safetensors", "*.bin")
GRACE_S = 2.0
"""In which a run that reached its limit says what it printed last."""
MAX_FILE_BYTES = 16 << 20
"""Of a launch file."""
STAND_IN = "model-with-random-weights"
"""Stands for a local folder's model that has no weights."""


@dataclass(frozen=True, kw_only=True)
class HowToRun:
    """How a file is run.

    Attributes:
        limit_s: after which nothing of it runs any more, what it waits for and what is made for it included.
        device: None: this machine's first GPU.
        store: file of measurements; None: the user's.
    """

    num_steps: int
    limit_s: float
    device: str | None = None
    store: Path | None = None


def run_target(folder: Path, document: Mapping[str, object], target: str, how: HowToRun) -> "tuple[Confirmation, Plan]":
    """Runs the launch file of `target` in a plan's folder; what came of it beside the promise, and the plan with it.

    Raises:
        UsageError: the folder has no such file, or one that cannot be watched.
        EnvironmentProblem: this machine cannot run it.
    """
    from probes.confirm import compare, promise_of

    entry = entry_of(document)
    plan = entry.plan
    if isinstance(plan, NoPlan):
        raise UsageError("this directory holds a refusal: nothing fits", hint="plan again with a larger GPU")
    launch = launch_of(entry.extras, target)
    workload, chosen = plan.workload, plan.chosen
    setup = as_run(target, chosen.setup, workload)
    if isinstance(setup, str):  # its file is of the best that it runs itself
        setup = launched_setup(folder, launch, workload.model, chosen.setup)
    planned = chosen if setup == chosen.setup else candidate(workload, setup)
    file = launched_file(folder, launch, workload.model.model_id, setup.objective)
    outcome, card, device = run_file(file, setup, workload.model, how, sibling=folder)
    promise = promise_of(planned.memory_evidence, planned.speed_evidence, plan.workload.gpu)
    confirmation = on_card(compare(setup, promise, outcome, budget_bytes=chosen.budget_bytes), card, workload)
    if setup == chosen.setup and device != "cpu":
        plan = with_run(plan, replace(chosen, run=outcome))
        _write(folder, plan, entry.extras)
    return confirmation, plan


def on_card(confirmation: "Confirmation", card: "GpuSpec | None", workload: Workload) -> "Confirmation":
    """With a word on a card that is another than the plan's."""
    if card is None or card.key == workload.gpu.key:
        return confirmation
    reason = f"this is a {card.name}, the plan was made for a {workload.gpu.name}"
    return replace(confirmation, reasons=(*confirmation.reasons, reason))


def run_file(
    file: "LaunchedFile", setup: "TrainSetup", model: "ModelSpec", how: HowToRun, *, sibling: Path, stored: bool = True
) -> "tuple[Outcome, GpuSpec | None, str]":
    """What came of a file's run, the card's row and the device that it ran on.

    Args:
        sibling: the run's folder is made beside this one.
        stored: whether the outcome is a fact about the setup, for the store.

    Raises:
        EnvironmentProblem: this machine cannot run it.
    """
    from probes.gpu.evaluate import Prober
    from probes.launched.run import FileExecutor

    parent = sibling.resolve().parent  # from where relative paths lead to the same
    device = machine.job_devices(how.device, 1)[0]
    card = machine.gpu_of(None, device)
    line = ProgressLine()
    executor = FileExecutor(
        file,
        model_bytes=2 * model.num_params,
        num_steps=how.num_steps,
        limit_s=how.limit_s,
        work_dir=parent if os.access(parent, os.W_OK) else None,
        on_progress=line.event,
    )
    prober = Prober(
        model=resolve_model(
            model_beside(model.model_id, sibling)
        ),  # with its configuration, which plan.json does not hold
        gpu=card,
        executor=executor,
        store=machine.open_store(how.store) if stored else None,
        device=device,
        depths=(0,),
        level=Fidelity.RUN,
    )
    outcome: Outcome
    try:
        with until(time.monotonic() + how.limit_s + GRACE_S), ended_by_scheduler():
            outcome = prober.finish(setup, prober.submit(setup))
    except TimeIsUp:
        message = f"what it needs was not made within {how.limit_s:g} s, or the device was not free"
        outcome = ProbeFailure(level=Fidelity.RUN, kind=FailureKind.TIMEOUT, message=message)
    line.close()
    return outcome, card, device


def with_run(plan: Plan, chosen: Candidate) -> Plan:
    """The plan whose chosen setup was run, or traced."""
    ranked = tuple(chosen if candidate.setup == chosen.setup else candidate for candidate in plan.ranked)
    return replace(plan, chosen=chosen, ranked=ranked)


def launch_of(extras: Extras, target: str, *, watched: bool = True) -> LaunchTarget:
    """What a plan's folder holds for a target.

    Raises:
        UsageError: nothing, or what cannot be `watched`.
    """
    if watched and target not in RUN_BY_A_TRAINER:
        target_names = ", ".join(RUN_BY_A_TRAINER)
        raise UsageError(
            f"--run {target}: only files that train with transformers' Trainer are watched",
            hint=f"one of {target_names}",
        )
    launch = next((entry for entry in extras.launch if entry.target == target and entry.files), None)
    if launch is None or not launch.command:
        written = ", ".join(entry.target for entry in extras.launch if entry.command) or "none"
        raise UsageError(f"{target}: this plan has no launch file for it", hint=f"written: {written}")
    return launch


def launched_setup(folder: Path, launch: LaunchTarget, model: "ModelSpec", planned: "TrainSetup") -> "TrainSetup":
    """The setup of a target's first file, which names the others, as it lies in a plan's folder now: the planned one
    where it runs the same."""
    file = folder / launch.files[0].path
    setup = read_config(file, model=model, base=planned, num_gpus=planned.num_gpus).setup
    return planned if canonical(setup) == canonical(planned) else setup


def launched_file(folder: Path, launch: LaunchTarget, model_id: str, objective: str) -> "LaunchedFile":
    """A plan's launch file as it lies in its folder now, with what it names and this machine lacks."""
    from probes.launched.run import LaunchedFile

    made = folder / "launch" / "data"  # what was made of the data is not among the files
    texts = {
        str(path.relative_to(folder)): read_text(path, max_bytes=MAX_FILE_BYTES)
        for path in sorted((folder / "launch").rglob("*"))
        if path.is_file() and made not in path.parents
    }
    target_texts = [text for path, text in texts.items() if path.startswith(f"launch/{launch.target}/")]
    form = next((match[1] for text in target_texts if (match := _MADE.search(text))), "")
    ready = bool(form) and (made / form).is_dir()
    reads = [texts.get(f"launch/{PREPARE}", "")] if form else target_texts
    placed = not ready and any(PLACEHOLDER_DATASET in text for text in reads)
    name = os.path.relpath(model_id, folder) if Path(model_id).exists() else model_id
    here = weights_here(model_id)
    if not here and name != model_id:  # a folder with a configuration alone: its name leads out of the run's folder
        texts = {path: text.replace(name, STAND_IN) for path, text in texts.items()}
        name = STAND_IN
    return LaunchedFile(
        target=launch.target,
        command=launch.command,
        prepare=f"python launch/{PREPARE} {form}" if form and not ready else "",
        files=texts,
        links={"launch/data": made.resolve()} if ready else {},
        model_name=name,
        dataset_names=(PLACEHOLDER_DATASET,) if placed else (),
        columns=columns_of(objective),
        program_folder=program_folder(folder, launch.target),
        model_here=here,
        data_here=not placed,
    )


_MADE = re.compile(r"launch/data/(\w+)")
"""What a target's file reads of what `prepare_data.py` makes."""


def columns_of(objective: str) -> str:
    """What rows stand for a data set that nobody named."""
    return {"sft": "messages", "pretrain": "text"}.get(objective, "preference")


def weights_here(model_id: str) -> bool:
    """Whether a model's weights are on this machine: in the folder of that name, or in the hub's cache."""
    folder = Path(model_id)
    if folder.is_dir():
        return any(next(folder.glob(pattern), None) for pattern in WEIGHTS)
    return weights_in_cache(model_id)


def program_folder(folder: Path, target: str) -> str:
    """Where the tool is looked for first: what `run.sh install` made, else this Python's own environment unless the
    shell has another one active."""
    made = folder.resolve() / f".venv-{target}" / "bin"
    if made.is_dir():
        return str(made)
    active = "VIRTUAL_ENV" in os.environ or "CONDA_PREFIX" in os.environ
    return "" if active else str(Path(python_argv()[0]).parent)


def _write(folder: Path, plan: Plan, extras: Extras) -> None:
    try:
        texts = plan_files(plan, extras)
    except EnvironmentProblem:  # no jinja2
        texts = plan_files(plan, extras, html=False)
    try:
        write_files(folder, texts)
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"the run is in the store, but: {error.message}") from error


def installed_targets(folder: Path, extras: Extras) -> tuple[str, ...]:
    """Of the targets with a file that can be watched those whose tool is here."""
    import importlib.util
    import shutil

    installed = []
    for launch in extras.launch:
        if launch.target not in RUN_BY_A_TRAINER or not launch.files:
            continue
        program = TARGET_ROWS[launch.target].program
        path = os.pathsep.join(filter(None, (program_folder(folder, launch.target), os.environ.get("PATH", ""))))
        module = {"trl": "trl", "unsloth": "unsloth", "hf": "transformers"}.get(launch.target)
        here = shutil.which(program, path=path) if program not in ("", "python", "trl") else None
        if here or (module is not None and importlib.util.find_spec(module) is not None):
            installed.append(launch.target)
    return tuple(installed)


PROGRAMS = {
    "trl": "python -m trl.scripts.{command} --config {file}",
    "axolotl": "axolotl train {file} --launcher python",
    "llamafactory": "llamafactory-cli train {file}",
    "hf-script": "python {file}",
}
"""Format -> what starts such a file."""
BESIDE = (".py", ".yaml", ".yml", ".json", ".jinja")
MAX_BESIDE, MAX_BESIDE_BYTES = 100, 1 << 18
"""Files beside it that are copied with it: its imports, templates, DeepSpeed configs."""
AXOLOTL_TYPES = {"alpaca": "alpaca", "chat_template": "messages", "completion": "text"}


@dataclass(frozen=True, kw_only=True)
class _Data:
    names: tuple[str, ...] = ()
    columns: str = ""
    splits: tuple[str, ...] = ("train",)
    files: Mapping[str, str]


def training_file(path: Path, config: ReadConfig, arguments: Sequence[str] = ()) -> "LaunchedFile":
    """A training file that was read; `arguments`: words behind it on its command line.

    Raises:
        UsageError: what starts it is not known or cannot be watched, or what its data look like.
    """
    from probes.launched.run import LaunchedFile

    if config.format not in PROGRAMS:
        hint = f"--run takes {', '.join(PROGRAMS)}; without --run every file is predicted"
        raise UsageError(f"{path.name}: a {config.format} file is not run", hint=hint)
    text, model, here = read_bounded(path), config.model_id or "", weights_here(config.model_id or "")
    if model not in text:
        raise UsageError(
            f"{path.name} does not name {model or 'its model'}",
            hint="write the model into the file: it is run as it is",
        )
    stands_for = _DATA.get(config.format)  # a program reads what it reads
    data = stands_for(path.name, config) if stands_for else _Data(files={})
    texts = {path.name: text, **dict(_siblings(path)), **data.files}
    if Path(model).exists():  # a folder: the run stands elsewhere
        name = str(Path(model).resolve()) if here else STAND_IN
        texts, model = {**texts, path.name: text.replace(model, name)}, name
    command = PROGRAMS[config.format].format(
        command=config.setup.objective_spec.targets.get("trl", "sft"), file=shlex.quote(path.name)
    )
    return LaunchedFile(
        target={"hf-script": "hf"}.get(config.format, config.format),
        command=shlex.join([*shlex.split(command), *arguments]),
        files=texts,
        model_name=model,
        dataset_names=data.names,
        columns=data.columns,
        splits=data.splits,
        program_folder=program_folder(path.parent, config.format),
        model_here=here,
        data_here=not data.names,
    )


def _siblings(path: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(path.parent.iterdir())[: 10 * MAX_BESIDE]:
        if file.suffix in BESIDE and file.is_file() and file.stat().st_size <= MAX_BESIDE_BYTES and file != path:
            try:
                yield file.name, file.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def _of_trl(name: str, config: ReadConfig) -> _Data:
    mixed = config.values.get("datasets") or ()
    names = [config.dataset] if config.dataset else [entry.get("path") for entry in _mappings(mixed)]
    splits = [config.values.get("dataset_train_split", "train")]
    if config.values.get("eval_strategy", "no") != "no":
        splits.append(config.values.get("dataset_test_split", "test"))
    columns = columns_of(config.setup.objective)
    return _Data(names=_named(name, names), columns=columns, splits=tuple(map(str, splits)), files={})


def _of_axolotl(name: str, config: ReadConfig) -> _Data:
    listed = list(_mappings(config.values.get("datasets") or ()))
    kinds = {str(entry.get("type")) for entry in listed}
    column_kinds = (
        {AXOLOTL_TYPES.get(kind.partition(".")[0]) for kind in kinds} if config.setup.objective == "sft" else {None}
    )
    columns = column_kinds.pop()
    if columns is None or column_kinds:
        raise UsageError(
            f"{name}: no rows can stand in for data sets of type {', '.join(sorted(kinds)) or 'none'}",
            hint=f"--run makes rows of one type: {', '.join(AXOLOTL_TYPES)}",
        )
    return _Data(names=_named(name, [entry.get("path") for entry in listed]), columns=columns, files={})


def _of_llamafactory(name: str, config: ReadConfig) -> _Data:
    folder = str(config.values.get("dataset_dir", "data"))
    names = _named(name, [part.strip() for part in str(config.dataset or "").split(",")])
    columns, more = "alpaca", dict[str, Any]()
    if config.setup.objective == "pretrain":
        columns, more = "text", {"columns": {"prompt": "text"}}
    elif config.setup.objective != "sft":
        columns = "preference"
        more = {"ranking": True, "columns": {column: column for column in ("prompt", "chosen", "rejected")}}
    info = json.dumps({dataset: {"file_name": dataset, **more} for dataset in names})
    described = {f"{folder}/dataset_info.json": info}
    return _Data(names=tuple(f"{folder}/{dataset}" for dataset in names), columns=columns, files=described)


def _mappings(listed: Any) -> Iterator[Mapping[str, Any]]:
    return (entry for entry in listed if isinstance(entry, dict))


def _named(file: str, names: list[Any]) -> tuple[str, ...]:
    datasets = tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name))
    if not datasets or any("://" in name for name in datasets):
        raise UsageError(f"{file} names no data set that rows could stand in for", hint="name a hub id or a local path")
    return datasets


_DATA = {"trl": _of_trl, "axolotl": _of_axolotl, "llamafactory": _of_llamafactory}
