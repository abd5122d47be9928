"""`plan check`: an existing training config, or all below a folder, against a GPU; GitHub's annotations for CI."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.cli import options
from finetune_planner.cli.checking import CheckRequest, as_document, as_long, checked, command_of, dry_run_of
from finetune_planner.cli.options import Memory
from finetune_planner.cli.output import console, print_json, print_lines, write_text
from finetune_planner.cli.request_options import DataOptions
from finetune_planner.cli.setup_flags import takes_options
from finetune_planner.improvement import Improved, Verify, improve
from planner.core.errors import (
    ConfigError,
    LayoutAlone,
    NotATraining,
    NotPlanned,
    PlannerError,
    Undetermined,
    UsageError,
)
from planner.core.records import dataclass
from planner.frameworks.exporters.install import packages_added
from planner.frameworks.readers import FileContext, ReadConfig, canonical, read_text
from planner.frameworks.readers.evaluating import setting_of
from planner.frameworks.readers.loading import MAX_FILE_BYTES, read_bounded
from planner.frameworks.readers.read import MAKEFILES, SUFFIXES, pinned, roots_of
from planner.frameworks.readers.rewrite import rewrite
from planner.frameworks.readers.types import overrides
from planner.frameworks.tools import PROGRAMS, tool_of
from planner.frameworks.tools.field import changed_fields
from planner.frameworks.tools.transformers import HANDED
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models.spec import ModelSpec
from planner.planning.check import CheckResult, Verdict, summary
from planner.planning.option_values import positive
from planner.planning.predict import cannot_run
from planner.planning.single_changes import Predict
from planner.setup import TrainSetup
from planner.setup.interchange import SCHEMA_VERSION
from planner.setup.outcome import Prediction
from reports.check import render_check
from reports.text import LEVEL_WORDS


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What the command line says that the file leaves open."""

    accelerate: Annotated[Path | None, typer.Option(help="Accelerate config that the run is launched with.")] = None
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting that the file leaves open; repeatable."),
    ] = None
    arguments: Annotated[
        str | None, typer.Option("--args", help="The words behind the script on its command line, as one text.")
    ] = None
    assume: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE==VERSION", help="Version whose defaults hold; repeatable.")
    ] = None
    like: Annotated[str | None, typer.Option(help="llama or mixture: of a model_type that nobody knows.")] = None
    strict: Annotated[bool, typer.Option("--strict", help="Settings that the tool does not know are errors.")] = False

    def request(self, model: str | None, gpus: int | None) -> CheckRequest:
        """With the model and the number of GPUs.

        Raises:
            UsageError: one that makes no sense.
        """
        num_gpus = positive("gpus", gpus)
        return CheckRequest.of(**vars(self), model=model, num_gpus=num_gpus or 1, says_gpus=num_gpus is not None)


@dataclass(frozen=True, kw_only=True)
class FixOptions:
    """The improved file. `--out` without `--fix` is a mistake."""

    fix: Annotated[bool, typer.Option("--fix", help="Write an improved file; comments and order stay.")] = False
    out: Annotated[Path | None, typer.Option(help="Where --fix writes. Default: NAME.fixed.EXT beside the file.")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.out is not None and not self.fix:
            raise UsageError("--out says where --fix writes", hint="add --fix")

    def target(self, file: Path) -> Path | None:
        return (self.out or fixed_path(file)) if self.fix else None


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """The level of the answer, and its form."""

    no_dry_run: options.NoDryRun = False
    as_json: options.Json = False
    annotations: Annotated[str | None, typer.Option(help="For CI: github, formula level.", show_default=False)] = None

    def __post_init__(self) -> None:
        if (given := self.annotations) not in (None, "github"):
            raise UsageError(f"--annotations must be github, got {given!r}", hint="--annotations github")
        if given is not None and self.as_json:
            raise UsageError("--annotations github is no JSON", hint="--json alone")


@takes_options
def check(
    file: Annotated[Path, typer.Argument(help="Training config, script, notebook or launch script; or a folder.")],
    gpu: options.Gpu,
    model: Annotated[str | None, typer.Option(help="Model, where the config does not name it.")] = None,
    *,
    cluster: options.JobGpus,
    check_options: CheckOptions,
    data: DataOptions,
    fix: FixOptions,
    limits: options.Memory,
    answer: AnswerOptions,
) -> int:
    """Does an existing config fit, how fast should it run, and which single changes help?

    Exit codes: 0 fits, 1 does not fit or cannot run, 2 cannot be read, 3 uncertain (the error band straddles the limit)
    or not determined by the file.
    """
    request = check_options.request(model, cluster.gpus)
    target = fix.target(file)
    if target is not None and target.resolve() == file.resolve():
        raise UsageError(f"--out names {file} itself", hint="give another name")
    if file.is_dir() or answer.annotations is not None:
        if fix.fix or data.words:
            what = "--fix changes" if fix.fix else f"{data.words[0]} is of"
            raise UsageError(f"{what} one file at a time", hint="give the file")
        # A folder's trainings, or one file, as lines, JSON or annotations; the worst file's exit code.
        find_gpu(gpu)  # an unknown card is said once
        file_findings = findings(file, gpu, request, limits, cluster)
        if answer.as_json:
            head: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "not_checked"}
            print_json(
                [
                    row.document or {**head, "file": str(row.path), "verdict": row.outcome, "message": row.message}
                    for row in file_findings
                ]
            )
        else:
            print_lines(github_lines(file_findings) if answer.annotations else text_lines(file_findings, file))
        return exit_code(file_findings)

    result, spec, predict = checked(
        file,
        gpu,
        request,
        **vars(limits),
        cluster=cluster.of_file,
        data=data.checked(),
        dry_run=not answer.no_dry_run,
    )

    def verify(setup: TrainSetup) -> Prediction | None:
        """A setup's memory by its own dry run, with its speed as changed setups are compared by."""
        memory_bytes, planned = limits.of(result.gpu)[0], result.config.planned
        plain, setup = predict(setup), as_long(setup, result.longest_tokens)
        dry = dry_run_of(setup, predict, spec, result.gpu, memory_bytes, planned=planned)
        return dry and replace(dry, step_time_s=plain.step_time_s, tokens_per_s=plain.tokens_per_s)

    by = None if answer.no_dry_run else verify
    fixed = _fixed(file, target, result, spec, predict, request, limits, by) if target else None
    together = None if target else _together(result, spec, predict)
    if answer.as_json:
        print_json(as_document(result, fixed, together))
    else:
        render_check(result, fixed, console(), together)
    return result.exit_code


def _together(result: CheckResult, spec: ModelSpec, predict: Predict) -> dict[str, Any] | None:
    """Several changes after which a config fits that no single one makes fit as it trains; what --fix would write, and
    prove by a dry run."""
    if any(change.verdict is Verdict.FITS and not change.changes_training for change in result.changes):
        return None
    improved = None
    if result.verdict is not Verdict.FITS and not result.config.refusals:
        improved = improve(result, spec, predict)
    if improved is None or improved.verdict is not Verdict.FITS or len(improved.labels) < 2:
        return None
    return {
        "changes": list(improved.labels),
        "in_place": not improved.needs_new_file,
        "peak_device_bytes": improved.after.peak_device_bytes,
        "tokens_per_s": improved.after.tokens_per_s,
    }


def _fixed(
    file: Path,
    target: Path,
    result: CheckResult,
    spec: ModelSpec,
    predict: Predict,
    request: CheckRequest,
    limits: options.Memory,
    verify: Verify | None,
) -> dict[str, Any]:
    from difflib import unified_diff

    config, improved = result.config, improve(result, spec, predict, verify)
    text, refused = "", ""
    helps = bool(improved.labels) and improved.verdict is not Verdict.DOES_NOT_FIT
    try:
        if helps and not improved.needs_new_file:
            text = fixed_text(file, config, improved, spec, card=result.gpu, request=request)
            write_text(target, text, keep=True)
    except ConfigError as error:
        refused = error.message
    lines = unified_diff(read_bounded(file).splitlines(), text.splitlines(), file.name, target.name, n=1)
    runs = not refused or result.verdict is not Verdict.CANNOT_RUN
    return {
        "changes": list(improved.labels) if runs else [],
        "diff": [line.rstrip("\n") for line in lines] if text else [],
        "path": str(target) if text else None,
        "needs": packages_added(config.setup, improved.setup) if text else [],
        "refused": refused,
        "by_hand": by_hand(config, improved) if refused and runs else [],
        "command": command_of(spec.model_id, improved.setup, result.gpu, vars(limits))
        if improved.needs_new_file and helps
        else "",
        "verdict": improved.verdict.value,
        "peak_device_bytes": improved.after.peak_device_bytes,
        "tokens_per_s": improved.after.tokens_per_s,
    }


SETTINGS = (".yaml", ".yml", ".json", ".toml")
SKIPPED_FILES = ("__init__.py",)
"""What nobody starts."""
SKIPPED_FOLDERS = ("node_modules", "__pycache__", "site-packages", "venv", "build", "dist")
MAX_FILES = 5_000
OUTCOMES = {
    "cannot_run": ("error", 1),
    "does_not_fit": ("error", 1),
    "unreadable": ("error", 2),
    "undetermined": ("warning", 3),
    "uncertain": ("warning", 3),
    "fits": ("note", 0),
    "not_planned": ("note", 0),
}
"""Worst first: what each is for CI, and the exit code of `plan check` of that file alone; what is not planned fails no
CI."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One file's answer.

    Attributes:
        outcome: a verdict, or "undetermined", "not_planned", "unreadable".
        document: the JSON form of the whole answer, None where there is no verdict.
        started: files that this one's launch starts, or names.
    """

    path: Path
    outcome: str
    message: str
    line: int = 1
    document: dict[str, Any] | None = None
    started: frozenset[Path] = frozenset()

    @property
    def level(self) -> str:
        """ "error", "warning" or "note", for CI."""
        return OUTCOMES[self.outcome][0]

    def of_started(self, path: Path) -> "Finding":
        """The answer for a file that this one starts: as it is started."""
        document = self.document and self.document | {"file": str(path)}
        message = f"as {os.path.relpath(self.path, path.parent)} starts it: {self.message}"
        return replace(self, path=path, message=message, line=1, document=document, started=frozenset())


def candidates(folder: Path) -> Iterator[Path]:
    """Files of a folder that may hold a training, sorted; hidden folders, installed packages, and files of settings
    that are larger than those of any training (data, a plan) are left out."""
    seen = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            folder_name
            for folder_name in folders
            if not folder_name.startswith(".") and folder_name not in SKIPPED_FOLDERS
        )
        for name in sorted(names):
            path = Path(place) / name
            if path.suffix in SETTINGS and path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
                continue
            if (name.endswith(SUFFIXES) or name in MAKEFILES) and name not in SKIPPED_FILES:
                seen += 1
                if seen > MAX_FILES:
                    return
                yield path


def finding(path: Path, gpu: str, request: CheckRequest, limits: Memory, cluster: options.JobGpus) -> Finding | None:
    """The answer for one file on the formula level; None where nothing in it trains."""
    try:
        result, _, _ = checked(path, gpu, request, **vars(limits), cluster=cluster.of_file)
    except NotATraining:
        return None
    except NotPlanned as error:
        return Finding(path=path, outcome="not_planned", message=error.message)
    except PlannerError as error:
        outcome = "undetermined" if isinstance(error, Undetermined) else "unreadable"
        outcome = "not_planned" if isinstance(error, LayoutAlone) else outcome
        return Finding(path=path, outcome=outcome, message=f"{error.message}; {error.hint}")
    verdict, config = result.verdict.value, result.config
    place, _, line = config.origins.get("micro_batch_seqs", "").rpartition(":")
    return Finding(
        path=path,
        outcome=verdict,
        message=f"{config.model_id} on {result.gpu.name}: {summary(result)} [{LEVEL_WORDS[result.prediction.level]}]",
        line=config.call_line or (int(line) if place == path.name and line.isdigit() else 1),
        document=as_document(result, None) | {"file": str(path)},
        started=config.started,
    )


def findings(place: Path, gpu: str, request: CheckRequest, limits: Memory, cluster: options.JobGpus) -> list[Finding]:
    """The answers for every training in a folder, or in one file, worst first; a file that a launch script of the
    folder starts is answered for as it is started there, where several start it as the worst of them."""
    paths = candidates(place) if place.is_dir() else [place]
    answers = [answer for path in paths if (answer := finding(path, gpu, request, limits, cluster)) is not None]
    worst_first = [*OUTCOMES]
    starts: dict[str, Finding] = {}
    for answer in sorted(answers, key=lambda entry: worst_first.index(entry.outcome)):
        for path in answer.started:
            starts.setdefault(os.path.abspath(path), answer)
    answers = [
        answer if answer.started or not (by := starts.get(os.path.abspath(answer.path))) else by.of_started(answer.path)
        for answer in answers
    ]
    return sorted(answers, key=lambda entry: (worst_first.index(entry.outcome), str(entry.path)))


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where anything does not fit, then 2 (unreadable), 3 (open or uncertain), 0."""
    codes = {OUTCOMES[finding.outcome][1] for finding in findings}
    return next((code for code in (1, 2, 3) if code in codes), 0)


def text_lines(findings: Sequence[Finding], folder: Path) -> list[str]:
    """One line a file, for people."""
    if not findings:
        return [f"{folder}: no training found in its files"]
    width = max(len(finding.outcome) for finding in findings)
    lines = [f"{finding.outcome.replace('_', ' '):<{width}}  {finding.path}: {finding.message}" for finding in findings]
    counts = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in OUTCOMES}
    return [*lines, "", ", ".join(f"{num} {name.replace('_', ' ')}" for name, num in counts.items() if num)]


def github_lines(findings: Sequence[Finding]) -> list[str]:
    """Workflow commands that GitHub shows beside the files.

    Source: GitHub Docs, Workflow commands for GitHub Actions (2026): `%`, CR and LF are escaped, in properties `:` and
    `,` as well.
    """
    kinds = {"error": "error", "warning": "warning", "note": "notice"}

    def data(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(text: str) -> str:
        return data(text).replace(":", "%3A").replace(",", "%2C")

    return [
        f"::{kinds[row.level]} file={value(str(row.path))},line={row.line},title=plan check::{data(row.message)}"
        for row in findings
    ]


def fixed_path(file: Path) -> Path:
    """Where the fixed text of a file goes."""
    return file.with_name(f"{file.stem}.fixed{file.suffix}")


def fixed_text(
    file: Path,
    config: ReadConfig,
    improved: Improved,
    spec: ModelSpec,
    *,
    card: GpuSpec | None = None,
    request: CheckRequest | None = None,
) -> str:
    """The text of a file with the setup's changes written in, proven by reading it back.

    Raises:
        ConfigError: its form does not allow it, or the settings stand in another file.
    """
    if "loop" in config.setup.stack:
        raise ConfigError(f"{file.name} trains in a loop of its own, which has no settings to change")
    request, edits, text = request or CheckRequest(), edits_of(config, improved), read_bounded(file)
    named = {config.keys.get(field.of, field.key): field.of for field in tool_of(config.format).fields}
    places = {
        key: place for key, of in named.items() if key != HANDED and (place := config.origins.get(of))
    }  # what hands the weights' type on stands nowhere yet, autocast's switch does
    elsewhere = {place.rpartition(":")[0] for key, place in places.items() if key in edits and ":" in place} - {
        file.name
    }
    if others := sorted(name for name in elsewhere if not name.startswith(f"{file.name}:")):
        raise ConfigError(
            f"{file.name} takes settings from {', '.join(others)}, which --fix changes where that file is checked",
            hint="check the file that says them, or make the changes by hand",
        )
    program = config.format in PROGRAMS
    now = {key: value for key, value in config.values.items() if key in places} if program else {}
    text = rewrite(text, file.name, edits, call_line=config.call_line, places=places, now=now)
    around = FileContext(
        num_gpus=improved.setup.num_gpus,
        roots=roots_of(file),
        gpu=card,
        arguments=request.arguments,
        versions={**pinned(file), **request.versions},
        objective=request.sets.get("objective", ""),
    )
    launcher = read_bounded(request.accelerate) if request.accelerate is not None else None
    back = read_text(text, file.name, model=spec, base=improved.setup, around=around, launcher=launcher)
    back = overrides(back, request.sets)
    if still := (*back.refusals, *(cannot_run(spec, card, back.setup) if card is not None else ())):
        raise ConfigError(f"{file.name} cannot run so either: {still[0]}", hint="make it run first")
    if canonical(back.setup) != canonical(improved.setup) or (
        improved.eval_seqs and back.eval_seqs != improved.eval_seqs
    ):
        raise ConfigError(
            f"{file.name} is written in a form that --fix cannot change safely",
            hint="make the changes that plan check lists by hand",
        )
    return text


STEPS = "steps_per_generation"
"""Micro-batches that TRL generates at once: of smaller ones it takes more to generate as much."""


def edits_of(config: ReadConfig, improved: Improved) -> dict[str, Any]:
    """The settings (nested ones dotted) that make a file say what was found for it.

    Raises:
        ConfigError: a field that cannot be changed in place.
    """
    edits = tool_of(config.format).edits(config.keys, config.setup, improved.setup, config.path)
    edits = {key: value for key, value in edits.items() if key not in config.lacks}
    setup = improved.setup
    if config.values.get(STEPS) and setup.micro_batch_seqs != config.setup.micro_batch_seqs:  # counts micro-batches
        edits[STEPS] = setup.generation_seqs // (setup.micro_batch_seqs * setup.data_degree)
    return edits | ({setting_of(config): improved.eval_seqs} if improved.eval_seqs else {})


def by_hand(config: ReadConfig, improved: Improved) -> list[str]:
    """The settings that would make a file say a changed setup, with where each stands today: for a person to write."""
    tool = tool_of(config.format)
    places = {
        config.keys.get(of, field.key): config.origins[of]
        for of in changed_fields(config.setup, improved.setup)
        if (field := tool.field(of)) is not None and of in config.origins
    }
    edits = edits_of(config, improved)
    return [f"{key}: {value}" + (f" (now {places[key]})" if key in places else "") for key, value in edits.items()]
