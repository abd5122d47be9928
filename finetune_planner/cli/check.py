"""`plan check`: an existing training config, or all below a folder, against a GPU; annotations for CI (GitHub's lines,
SARIF)."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from finetune_planner.cli import options
from finetune_planner.cli.checking import CheckRequest, as_document, checked, command_of, dry_run_of
from finetune_planner.cli.fixing import Fixed, by_hand, fixed_files, fixed_path
from finetune_planner.cli.options import Memory
from finetune_planner.cli.output import console, print_json, print_lines, write_text
from finetune_planner.cli.setup_flags import takes_options
from finetune_planner.improvement import Verify, improve
from planner.core.errors import ConfigError, NotATraining, NotPlanned, PlannerError, Undetermined, UsageError
from planner.core.records import dataclass
from planner.core.units import gib, percent
from planner.frameworks.exporters.install import packages_added
from planner.frameworks.readers.loading import read_bounded
from planner.frameworks.readers.read import MAKEFILES, SUFFIXES
from planner.hardware.gpus import find_gpu
from planner.models.spec import ModelSpec
from planner.planning.check import CheckResult, Verdict, summary
from planner.planning.option_values import positive
from planner.planning.single_changes import Predict
from planner.setup import TrainSetup
from planner.setup.interchange import SCHEMA_VERSION
from planner.setup.outcome import Prediction
from reports.check import render_check
from reports.plain import clean


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
        """Where the improved file goes, None where none is asked for."""
        return (self.out or fixed_path(file)) if self.fix else None


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """The level of the answer, and its form."""

    no_dry_run: options.NoDryRun = False
    as_json: options.Json = False
    annotations: Annotated[
        str | None, typer.Option(help="For CI: github or sarif, formula level.", show_default=False)
    ] = None

    def __post_init__(self) -> None:
        if (given := self.annotations) not in (None, "github", "sarif"):
            raise UsageError(f"--annotations must be github or sarif, got {given!r}", hint="--annotations github")
        if given == "github" and self.as_json:
            raise UsageError("--annotations github is no JSON", hint="--json alone, or --annotations sarif")


@takes_options
def check(
    file: Annotated[Path, typer.Argument(help="Training config, script, notebook or launch script; or a folder.")],
    gpu: options.Gpu,
    model: Annotated[str | None, typer.Option(help="Model, where the config does not name it.")] = None,
    *,
    cluster: options.JobGpus,
    check_options: CheckOptions,
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
        if fix.fix:
            raise UsageError("--fix changes one file at a time", hint="give the file")
        # A folder's trainings, or one file, as lines, JSON or annotations; the worst file's exit code.
        find_gpu(gpu)  # an unknown card is said once
        file_findings = findings(file, gpu, request, limits)
        if answer.annotations == "sarif":
            print_json(sarif(file_findings), whole=True)
        elif answer.as_json:
            print_json([finding.document or _not_checked(finding) for finding in file_findings])
        else:
            print_lines(github_lines(file_findings) if answer.annotations else text_lines(file_findings, file))
        return exit_code(file_findings)

    result, spec, predict = checked(
        file,
        gpu,
        request,
        **vars(limits),
        cluster=lambda card, num_gpus: replace(cluster, gpus=num_gpus).of(card),
        dry_run=not answer.no_dry_run,
    )
    verify = _by_dry_run(result, spec, predict, limits) if not answer.no_dry_run else None
    fixed = _fixed(file, target, result, spec, predict, request, limits, verify) if target else None
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
    improved = improve(result, spec, predict) if result.verdict is not Verdict.FITS else None
    if improved is None or improved.verdict is not Verdict.FITS or len(improved.labels) < 2:
        return None
    return {
        "changes": list(improved.labels),
        "in_place": not improved.needs_new_file,
        "peak_device_bytes": improved.after.peak_device_bytes,
        "tokens_per_s": improved.after.tokens_per_s,
    }


def _by_dry_run(result: CheckResult, spec: ModelSpec, predict: Predict, limits: options.Memory) -> Verify:
    """A setup's memory by its own dry run, with its speed as changed setups are compared by."""
    memory, _ = limits.of(result.gpu)

    def verify(setup: TrainSetup) -> Prediction | None:
        plain, dry = predict(setup), dry_run_of(setup, predict, spec, result.gpu, memory)
        return dry and replace(dry, step_time_s=plain.step_time_s, tokens_per_s=plain.tokens_per_s)

    return verify


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
    """What --fix writes and how it ends; where the file's form does not take it, what a person would write."""
    config, improved = result.config, improve(result, spec, predict, verify)
    fixed, refused = Fixed({}), ""
    helps = bool(improved.labels) and improved.verdict is not Verdict.DOES_NOT_FIT
    try:
        if helps and not improved.needs_new_file:
            start_file, words = config.through or (file, request.arguments)
            fixed = fixed_files(
                start_file, config, improved, spec, card=result.gpu, request=replace(request, arguments=words)
            )
    except ConfigError as error:
        refused = error.message
    targets = {
        of: target if of == file else fixed_path(of) for of in sorted(fixed.texts, key=lambda path: path != file)
    }
    places = {place.resolve() for place in targets.values()}
    if len(places) < len(targets) or places & {of.resolve() for of in fixed.read}:
        raise UsageError("a fixed copy would stand over a file that was read", hint="give another name: --out")
    for of, place in targets.items():
        write_text(place, fixed.texts[of], keep=True)
    written = [str(place) for place in targets.values()]
    return {
        "changes": list(improved.labels),
        "diff": [line for of, place in targets.items() for line in _difference(of, place, fixed.texts[of])],
        "path": written[0] if written else None,
        "beside": written[1:],
        "said": list(fixed.notes),
        "needs": packages_added(config.setup, improved.setup) if written else [],
        "refused": refused,
        "by_hand": by_hand(config, improved) if refused else [],
        "command": command_of(config, improved.setup, result.gpu, vars(limits))
        if improved.needs_new_file and helps
        else "",
        "verdict": improved.verdict.value,
        "peak_device_bytes": improved.after.peak_device_bytes,
        "tokens_per_s": improved.after.tokens_per_s,
    }


def _difference(file: Path, target: Path, text: str) -> list[str]:
    """The lines that --fix changes, as a unified diff."""
    from difflib import unified_diff

    before = read_bounded(file).splitlines()
    return [line.rstrip("\n") for line in unified_diff(before, text.splitlines(), file.name, target.name, n=1)]


def compare_configs(
    files: Sequence[Path], gpu: str, *, model: str | None = None, memory_gib: float | None = None, as_json: bool = False
) -> int:
    """Several configs side by side on one GPU, formula level; the exit code of the worst (1, then 3, then 0)."""
    results = [checked(file, gpu, CheckRequest(model=model), memory_gib=memory_gib)[0] for file in files]
    if as_json:
        print_json([as_document(result, None) for result in results])
    else:
        console().print(comparison_table(results))
    codes = {result.exit_code for result in results}
    return next(code for code in (1, 3, 0) if code in codes)


def comparison_table(results: Sequence[CheckResult]) -> Any:
    """A rich table, one row a config, fastest that fits first; figures are never cut, words wrap."""
    from rich.table import Table

    bands = [result.band_fraction for result in results]
    widths = " to ".join(dict.fromkeys(percent(width) for width in (min(bands), max(bands))))
    title = f"{results[0].gpu.name}, formula level (memory +-{widths})"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("config", "verdict", "peak", "spare", "tokens/s", "method", "batch", "saves memory by"):
        number = name in ("peak", "spare", "tokens/s")
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    order = {"fits": 0, "uncertain": 1, "does_not_fit": 2, "cannot_run": 3}
    for result in sorted(
        results, key=lambda result: (order[result.verdict.value], -(result.prediction.tokens_per_s or 0.0))
    ):
        setup, prediction = result.config.setup, result.prediction
        saving = [f"checkpointing {setup.checkpointing}"] * bool(setup.checkpointing)
        saving += [f"{setup.loss} loss"] * (setup.loss != "full") + [setup.quantization] * setup.quantized
        table.add_row(
            clean(result.config.path),
            result.verdict.value.replace("_", " "),
            gib(prediction.peak_device_bytes),
            gib(result.margin_bytes),
            f"{prediction.tokens_per_s:,.0f}" if prediction.tokens_per_s else "?",
            setup.method
            + (f" {setup.adapter}" if setup.adapter != "lora" else "")
            + (f" r{setup.lora_rank}" if setup.lora_rank else ""),
            f"{setup.micro_batch_seqs} x {setup.accumulation_steps} x {setup.num_gpus} of {setup.seq_len_tokens}",
            ", ".join(saving) or "-",
        )
    return table


SKIPPED_FOLDERS = ("node_modules", "__pycache__", "site-packages", "venv", "build", "dist")
MAX_FILES = 5_000
LEVELS = {"fits": "note", "does_not_fit": "error", "cannot_run": "error", "uncertain": "warning"}
EXIT_OF = {
    "fits": 0, "not_planned": 0, "does_not_fit": 1, "cannot_run": 1, "unreadable": 2, "uncertain": 3, "undetermined": 3,
}  # fmt: skip
"""As `plan check` of that file alone; what is not planned fails no CI."""
WORST_FIRST = ("cannot_run", "does_not_fit", "unreadable", "undetermined", "uncertain", "fits", "not_planned")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One file's answer.

    Attributes:
        outcome: a verdict, or "undetermined", "not_planned", "unreadable".
        level: "error", "warning" or "note", for CI.
        document: the JSON form of the whole answer, None where there is no verdict.
        started: files that this one's launch starts, or names.
    """

    path: Path
    outcome: str
    level: str
    message: str
    line: int = 1
    document: dict[str, Any] | None = None
    started: frozenset[Path] = frozenset()

    def of_started(self, path: Path) -> "Finding":
        """The answer for a file that this one starts: as it is started."""
        document = self.document and self.document | {"file": str(path)}
        message = f"as {os.path.relpath(self.path, path.parent)} starts it: {self.message}"
        return replace(self, path=path, message=message, line=1, document=document, started=frozenset())


def candidates(folder: Path) -> Iterator[Path]:
    """Files of a folder that may hold a training, sorted; hidden folders and installed packages are left out."""
    seen = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            folder_name
            for folder_name in folders
            if not folder_name.startswith(".") and folder_name not in SKIPPED_FOLDERS
        )
        for name in sorted(names):
            if name.endswith(SUFFIXES) or name in MAKEFILES:
                seen += 1
                if seen > MAX_FILES:
                    return
                yield Path(place) / name


def finding(path: Path, gpu: str, request: CheckRequest, limits: Memory) -> Finding | None:
    """The answer for one file on the formula level; None where nothing in it trains."""
    try:
        result, _, _ = checked(path, gpu, request, **vars(limits))
    except NotATraining:
        return None
    except NotPlanned as error:
        return Finding(path=path, outcome="not_planned", level="note", message=error.message)
    except Undetermined as error:
        return Finding(path=path, outcome="undetermined", level="warning", message=f"{error.message}; {error.hint}")
    except PlannerError as error:
        return Finding(path=path, outcome="unreadable", level="error", message=f"{error.message}; {error.hint}")
    verdict, config = result.verdict.value, result.config
    return Finding(
        path=path,
        outcome=verdict,
        level=LEVELS[verdict],
        message=f"{config.model_id} on {result.gpu.name}: {summary(result)} [formula]",
        line=config.call_line or _line(path.name, config.origins.get("micro_batch_seqs", "")),
        document=as_document(result, None) | {"file": str(path)},
        started=config.started,
    )


def _not_checked(finding: Finding) -> dict[str, Any]:
    from reports.brief_json import BriefNotChecked

    head: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "not_checked"}
    return vars(BriefNotChecked(**head, file=str(finding.path), verdict=finding.outcome, message=finding.message))


def _line(name: str, place: str) -> int:
    """The line of a place "file:line" in the file itself, else its first."""
    file, _, line = place.rpartition(":")
    return int(line) if file == name and line.isdigit() else 1


def findings(place: Path, gpu: str, request: CheckRequest, limits: Memory) -> list[Finding]:
    """The answers for every training in a folder, or in one file, worst first; a file that a launch script of the
    folder starts is answered for as it is started there."""
    paths = candidates(place) if place.is_dir() else [place]
    answers = [answer for path in paths if (answer := finding(path, gpu, request, limits)) is not None]
    starts = {path: answer for answer in answers for path in answer.started}
    answers = [
        answer if answer.started or not (by := starts.get(answer.path.absolute())) else by.of_started(answer.path)
        for answer in answers
    ]
    return sorted(answers, key=lambda entry: (WORST_FIRST.index(entry.outcome), str(entry.path)))


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where anything does not fit, then 2 (unreadable), 3 (open or uncertain), 0."""
    codes = {EXIT_OF[finding.outcome] for finding in findings}
    return next((code for code in (1, 2, 3) if code in codes), 0)


def text_lines(findings: Sequence[Finding], folder: Path) -> list[str]:
    """One line a file, for people."""
    if not findings:
        return [f"{folder}: no training found in its files"]
    width = max(len(finding.outcome) for finding in findings)
    lines = [f"{finding.outcome.replace('_', ' '):<{width}}  {finding.path}: {finding.message}" for finding in findings]
    counts = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in WORST_FIRST}
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


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """A SARIF 2.1.0 log.

    Source: OASIS, Static Analysis Results Interchange Format 2.1.0, section 3.
    """
    outcomes = list(dict.fromkeys(finding.outcome for finding in findings))
    return {
        "version": "2.1.0",
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "runs": [
            {
                "tool": {"driver": {"name": "plan check", "rules": [{"id": outcome} for outcome in outcomes]}},
                "results": [
                    {
                        "ruleId": finding.outcome,
                        "level": finding.level,
                        "message": {"text": finding.message},
                        "locations": [
                            {
                                "physicalLocation": {
                                    "artifactLocation": {"uri": quote(os.fsencode(finding.path.as_posix()))},
                                    "region": {"startLine": finding.line},
                                }
                            }
                        ],
                    }
                    for finding in findings
                ],
            }
        ],
    }
