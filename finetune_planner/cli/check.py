"""`plan check`: an existing training config against a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.app.progress import say
from finetune_planner.cli import check_folder, options
from finetune_planner.cli.checking import (
    CheckRequest,
    as_document,
    checked,
    command_of,
    dry_run_of,
)
from finetune_planner.cli.fixing import Fixed, beside, by_hand, fixed_files
from finetune_planner.cli.output import console, print_json, print_lines, write_text
from finetune_planner.cli.setup_flags import takes_options
from finetune_planner.improvement import Verify, improve
from planner.core.errors import ConfigError, UsageError
from planner.core.records import dataclass
from planner.core.units import gib, percent
from planner.frameworks.exporters.install import packages_added
from planner.frameworks.readers.loading import read_bounded
from planner.hardware.gpus import find_gpu
from planner.models.spec import ModelSpec
from planner.planning.check import CheckResult, Verdict
from planner.planning.option_values import positive
from planner.planning.single_changes import Predict
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction
from reports.check import render_check
from reports.plain import clean


@dataclass(frozen=True, kw_only=True)
class AskedOptions:
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

    def asked(self, model: str | None, gpus: int | None) -> CheckRequest:
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
        return (self.out or beside(file)) if self.fix else None


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """The rung of the answer, and its form."""

    no_dry_run: options.NoDryRun = False
    as_json: options.Json = False
    annotations: Annotated[
        str | None, typer.Option(help="For CI: github or sarif, formula rung.", show_default=False)
    ] = None

    def __post_init__(self) -> None:
        if (given := self.annotations) not in (None, "github", "sarif"):
            raise UsageError(f"--annotations must be github or sarif, got {given!r}", hint="--annotations github")


@takes_options
def check(
    file: Annotated[Path, typer.Argument(help="Training config, script, notebook or launch script; or a folder.")],
    gpu: options.Gpu,
    model: Annotated[str | None, typer.Option(help="Model, where the config does not name it.")] = None,
    *,
    cluster: options.Gathering,
    asked: AskedOptions,
    fix: FixOptions,
    limits: options.Memory,
    answer: AnswerOptions,
) -> int:
    """Does an existing config fit, how fast should it run, and which single changes help?

    Exit codes: 0 fits, 1 does not fit, 2 cannot be read, 3 uncertain (the error band straddles the limit) or not
    determined by the file.
    """
    request = asked.asked(model, cluster.gpus)
    target = fix.target(file)
    if target is not None and target.resolve() == file.resolve():
        raise UsageError(f"--out names {file} itself", hint="give another name")
    if file.is_dir() or answer.annotations is not None:
        if fix.fix:
            raise UsageError("--fix changes one file at a time", hint="give the file")
        return _many(file, gpu, request, limits, answer)

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
    if answer.as_json:
        print_json(as_document(result, fixed))
    else:
        render_check(result, fixed, console())
    return result.exit_code


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
    asked: CheckRequest,
    limits: options.Memory,
    verify: Verify | None,
) -> dict[str, Any]:
    """What --fix writes and how it ends; where the file's form does not take it, what a person would write."""
    config, found = result.config, improve(result, spec, predict, verify)
    fixed, refused = Fixed({}), ""
    helps = bool(found.labels) and found.verdict is not Verdict.DOES_NOT_FIT
    try:
        if helps and not found.elsewhere:
            home, words = config.through or (file, asked.arguments)
            fixed = fixed_files(home, config, found, spec, card=result.gpu, asked=replace(asked, arguments=words))
    except ConfigError as error:
        refused = error.message
    targets = {of: target if of == file else beside(of) for of in sorted(fixed.texts, key=lambda one: one != file)}
    places = {place.resolve() for place in targets.values()}
    if len(places) < len(targets) or places & {of.resolve() for of in fixed.read}:
        raise UsageError("a fixed copy would stand over a file that was read", hint="give another name: --out")
    for of, place in targets.items():
        if place.exists():
            say(f"replaces {place}, which was there")
        write_text(place, fixed.texts[of])
    written = [str(place) for place in targets.values()]
    return {
        "changes": list(found.labels),
        "diff": [line for of, place in targets.items() for line in _difference(of, place, fixed.texts[of])],
        "path": written[0] if written else None,
        "beside": written[1:],
        "said": list(fixed.said),
        "needs": packages_added(config.setup, found.setup) if written else [],
        "refused": refused,
        "by_hand": by_hand(config, found) if refused else [],
        "command": command_of(config, found.setup, result.gpu, vars(limits)) if found.elsewhere and helps else "",
        "verdict": found.verdict.value,
        "peak_device_bytes": found.after.peak_device_bytes,
        "tokens_per_s": found.after.tokens_per_s,
    }


def _difference(file: Path, target: Path, text: str) -> list[str]:
    """The lines that --fix changes, as a unified diff."""
    from difflib import unified_diff

    before = read_bounded(file).splitlines()
    return [line.rstrip("\n") for line in unified_diff(before, text.splitlines(), file.name, target.name, n=1)]


def _many(place: Path, gpu: str, asked: CheckRequest, limits: options.Memory, answer: AnswerOptions) -> int:
    """A folder's trainings, or one file, as lines, JSON or annotations; the worst file's exit code."""
    find_gpu(gpu)  # an unknown card is said once
    found = check_folder.findings(place, gpu, asked, limits)
    if answer.annotations == "sarif":
        print_json(check_folder.sarif(found), whole=True)
    elif answer.as_json:
        print_json(
            [one.document or {"file": str(one.path), "verdict": one.outcome, "message": one.message} for one in found]
        )
    else:
        print_lines(check_folder.github_lines(found) if answer.annotations else check_folder.text_lines(found, place))
    return check_folder.exit_code(found)


def compare_configs(
    files: Sequence[Path], gpu: str, *, model: str | None = None, memory_gib: float | None = None, as_json: bool = False
) -> int:
    """Several configs side by side on one GPU, formula rung; the exit code of the worst (1, then 3, then 0)."""
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

    bands = [one.band_fraction for one in results]
    widths = " to ".join(dict.fromkeys(percent(width) for width in (min(bands), max(bands))))
    title = f"{results[0].gpu.name}, formula rung (memory +-{widths})"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("config", "verdict", "peak", "spare", "tokens/s", "method", "batch", "saves memory by"):
        number = name in ("peak", "spare", "tokens/s")
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    order = {"fits": 0, "uncertain": 1, "does_not_fit": 2}
    for one in sorted(results, key=lambda one: (order[one.verdict.value], -(one.prediction.tokens_per_s or 0.0))):
        setup, prediction = one.config.setup, one.prediction
        saving = [f"checkpointing {setup.checkpointing}"] * bool(setup.checkpointing)
        saving += [f"{setup.loss} loss"] * (setup.loss != "full") + [setup.quantization] * setup.quantized
        table.add_row(
            clean(one.config.path),
            one.verdict.value.replace("_", " "),
            gib(prediction.peak_device_bytes),
            gib(one.margin_bytes),
            f"{prediction.tokens_per_s:,.0f}" if prediction.tokens_per_s else "?",
            setup.method
            + (f" {setup.adapter}" if setup.adapter != "lora" else "")
            + (f" r{setup.lora_rank}" if setup.lora_rank else ""),
            f"{setup.micro_batch_seqs} x {setup.accumulation_steps} x {setup.num_gpus} of {setup.seq_len_tokens}",
            ", ".join(saving) or "-",
        )
    return table
