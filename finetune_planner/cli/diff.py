"""`plan diff`: two configs, or one under two versions of what runs it: what changes in memory and speed, and which
setting is responsible. Nothing is executed, but with --trace the program, in an environment of each side."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.app.progress import say
from finetune_planner.cli import options
from finetune_planner.cli.checking import CheckRequest, checked
from finetune_planner.cli.output import tell
from finetune_planner.cli.setup_flags import takes_options
from finetune_planner.cli.trace import TRAINERS, FollowOptions, StandIns, ask, speed_of, traced
from planner.core.errors import EnvironmentProblem, PlannerError, SetupError, UsageError
from planner.core.records import dataclass
from planner.core.units import gib, signed_gib
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.planning.check import CheckResult
from planner.planning.single_changes import Predict
from planner.planning.trace_result import Holding, TraceResult
from planner.setup import TrainSetup
from planner.setup.interchange import to_jsonable
from planner.setup.outcome import Prediction
from reports.check import NAMES, value_words
from reports.plain import clean
from reports.text import LEVEL_WORDS
from reports.trace import RESERVED_WORDS

# An environment of other versions, made by uv.


NO_TORCH = 'torch ; python_version < "0"\n'
"""An override that no Python satisfies: uv then installs no torch, whoever asks for it."""


def environment(requirements: Sequence[str]) -> Path:
    """The Python of an environment with these, made by uv where none is kept.

    It sees this environment's torch, and what that needs, behind its own packages, unless a torch is among the
    requirements: a build of PyTorch is gigabytes. Told before it starts.

    Raises:
        EnvironmentProblem: no uv, or it finds no such packages.
    """
    words = sorted(dict.fromkeys(requirements))
    own_torch = any(_name(requirement) == "torch" for requirement in words)
    borrowed = "" if own_torch else _version("torch")
    key = hashlib.sha256(json.dumps([words, sys.version, sys.prefix, borrowed]).encode()).hexdigest()[:16]
    from platformdirs import user_cache_path  # late: few make one

    folder = user_cache_path("finetune-planner") / "environments" / key
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    torch_note = "" if own_torch else f", beside torch {borrowed} of this one"
    say(f"plan diff: uv makes an environment of {', '.join(words)}{torch_note}: {folder} (kept)")
    shutil.rmtree(folder, ignore_errors=True)
    _uv("venv", "--quiet", "--python", sys.executable, str(folder))
    override = []
    if not own_torch:
        (folder / "override.txt").write_text(NO_TORCH)
        override = ["--override", str(folder / "override.txt")]
    _uv("pip", "install", "--quiet", "--python", str(python), *override, *words)
    if not own_torch:
        link(folder / "torch" / "site-packages", ["torch"])  # so named, its lines are a library's
        site = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
        Path(site, "zz_torch.pth").write_text(str(folder / "torch" / "site-packages"))
        file = python.with_name("torchrun")  # a command that a package which is only seen would have brought
        file.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
        file.chmod(0o755)
    ready.touch()
    return python


def _uv(*words: str) -> None:
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if uv is None:
        raise EnvironmentProblem(
            "plan diff --trace makes two environments by uv, which is not here", hint="pip install uv"
        )
    done = subprocess.run([uv, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblem(
            f"uv made no environment: {done.stderr.strip()}",
            hint="--with 'PACKAGE<VERSION' holds what it needs besides",
        )


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement.strip())[0].lower().replace("_", "-")


def _version(name: str) -> str:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        raise EnvironmentProblem(f"{name} is not installed here", hint=f"pip install {name}") from None


def closure(names: Sequence[str]) -> set[str]:
    """These distributions and what they require, as far as it is installed here."""
    distributions: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in distributions:
            continue
        with suppress(PackageNotFoundError):  # for another system
            wanted = [line.partition(";") for line in distribution(name).requires or []]
            distributions.add(name)
            left += [_name(line) for line, _, marker in wanted if "extra" not in marker]
    return distributions


def link(folder: Path, names: Sequence[str]) -> None:
    """Links the top of everything that these, and what they need, installed beside their own descriptions: an
    environment that has the folder on its path finds them installed."""
    shutil.rmtree(folder, ignore_errors=True)  # links only, perhaps of another version
    folder.mkdir(parents=True)
    for name in sorted(closure(names)):
        files = distribution(name).files
        if files is None:
            raise PackageNotFoundError(name)
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))


NUM_TERMS = 5


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """What one setting's change alone does to the first run.

    Attributes:
        names: fields of the setup; several where they only change together.
        before, after: their values; origin: why the second run has its own: a place in the file, or whose default.
        added_bytes: of the device peak; speedup: tokens/s after over before, None where unknown.
    """

    names: tuple[str, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    origin: str
    added_bytes: int
    speedup: float | None


@takes_options
def diff(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Training config, script, notebook or launch script.")],
    other: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The other one.")] = None,
    *,
    gpu: options.Gpu = "",
    cluster: options.JobGpus,
    before: Annotated[
        list[str] | None, typer.Option("--from", metavar="PACKAGE==VERSION", help="Ran it before; repeatable.")
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option("--to", metavar="[PACKAGE==]VERSION", help="Runs it now; repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, where the config does not name it.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="What the files leave open; repeatable.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run it too, on a phantom GPU, in an environment of each side made by uv.")
    ] = False,
    requirements: Annotated[
        list[str] | None, typer.Option("--with", metavar="REQUIREMENT", help="In both environments; repeatable.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Run the program without asking.")] = False,
    as_json: options.Json = False,
) -> int:
    """What changes in memory and speed between two configs, or from one version of its tools to another.

    With --trace it executes the program, on the CPU alone and without weights; what it writes is a private copy.

    Exit codes: 0, or 1 where the second does not fit and the first is not known not to; 2 it cannot be read.
    """
    if not gpu:
        raise UsageError("plan diff needs --gpu", hint="plan diff old.yaml new.yaml --gpu rtx-4090")
    old, new = list(before or ()), _versions(before or (), after or ())
    if other is None and not (old or new):
        raise UsageError(
            "one file is compared under two versions", hint="--from trl==0.25 --to 1.16, or name two files"
        )
    if trace and cluster.gpus not in (None, 1):
        raise UsageError("--trace runs one process on one GPU", hint="leave --trace out")
    files, versions = (file, other or file), (old, new)
    settings: tuple[dict[str, Any], Sequence[str], int] | None = None
    try:
        settings = _by_setting(files, versions, gpu, cluster, sets, model, traced=trace)
    except PlannerError as error:
        if not trace:
            raise
        say(f"plan diff: not by setting: {error.message}")
    runs: dict[str, Any] = {}
    try:
        if trace:
            runs = trace_both(files, versions, requirements or (), options.announced(find_gpu(gpu)), yes)
    finally:  # what the settings say is worth telling also where the program cannot be run
        if settings or runs:
            document, texts, _ = settings or ({"kind": "diff"}, (), 0)
            shown = {**document, **({"trace": runs} if runs else {})}
            tell(shown, [*texts, *(trace_lines(runs) if runs else ())], as_json=as_json)
    return settings[2] if settings else 0


def _by_setting(
    files: tuple[Path, Path],
    versions: tuple[Sequence[str], Sequence[str]],
    gpu: str,
    cluster: options.JobGpus,
    sets: Sequence[str] | None,
    model: str | None,
    *,
    traced: bool,
) -> tuple[dict[str, Any], Sequence[str], int]:
    """Both sides as they are read and each differing setting, the largest first: the document, its lines, and 1 where
    the second does not fit and the first may."""

    def side(path: Path, packages: Sequence[str]) -> tuple[CheckResult, Predict]:
        request = CheckRequest.of(
            assume=packages, sets=sets, model=model, num_gpus=cluster.gpus or 1, says_gpus=cluster.gpus is not None
        )
        result, _, predict = checked(path, gpu, request, cluster=cluster.of_file)
        return result, predict

    (file, other), (old, new) = files, versions
    (first, predicted), (second, _) = side(file, old), side(other, new)
    changes = sorted(setting_changes(first, second, predicted), key=lambda change: -abs(change.added_bytes))
    document = {
        "kind": "diff",
        "before": _side(first, file, old),
        "after": _side(second, other, new),
        "added_bytes": second.prediction.peak_device_bytes - first.prediction.peak_device_bytes,
        "changes": to_jsonable(changes),
        "terms": [{"term": name, "added_bytes": size} for name, size in _terms(first.prediction, second.prediction)],
    }
    refused = int(second.exit_code == 1 and first.exit_code != 1)
    return document, list(_lines(first, second, changes, traced)), refused


def setting_changes(first: CheckResult, second: CheckResult, predicted: Predict) -> Iterator[SettingChange]:
    """Every setting that differs, with what its change alone does to the first run; those that make no setup by
    themselves (a method and its quantization) are changed together."""
    first_setup, second_setup = first.config.setup, second.config.setup
    differing = [
        field.name
        for field in fields(TrainSetup)
        if getattr(first_setup, field.name) != getattr(second_setup, field.name)
    ]
    together: list[str] = []
    for name in differing:
        try:
            yield _change_of((name,), first_setup, second_setup, second, predicted)
        except SetupError:
            together.append(name)
    if together:
        yield _change_of(tuple(together), first_setup, second_setup, second, predicted)


def _change_of(
    names: tuple[str, ...], first_setup: TrainSetup, second_setup: TrainSetup, second: CheckResult, predicted: Predict
) -> SettingChange:
    after = {name: getattr(second_setup, name) for name in names}
    try:
        changed = first_setup.replace(**after)
    except SetupError:
        if len(names) == 1:
            raise
        changed = second_setup
    was, is_now = predicted(first_setup), predicted(changed)
    speedup = is_now.tokens_per_s / was.tokens_per_s if is_now.tokens_per_s and was.tokens_per_s else None
    origins = (second.config.origins.get(name, "") for name in names)
    return SettingChange(
        names=names,
        before=tuple(getattr(first_setup, name) for name in names),
        after=tuple(after.values()),
        origin=next((words for words in origins if words), ""),
        added_bytes=is_now.peak_device_bytes - was.peak_device_bytes,
        speedup=speedup,
    )


def _versions(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """`--to`, a bare version being of the only package of `--from`; what is not said anew stays."""
    packages = [pair.partition("==")[0] for pair in before]
    versions = []
    for words in after:
        if "==" not in words and len(packages) != 1:
            raise UsageError(f"--to {words}: of which package?", hint="--to PACKAGE==VERSION")
        versions.append(words if "==" in words else f"{packages[0]}=={words}")
    renewed = {pair.partition("==")[0] for pair in versions}
    return versions + [pair for pair in before if pair.partition("==")[0] not in renewed]


def _side(result: CheckResult, file: Path, versions: Sequence[str]) -> dict[str, Any]:
    return {
        "file": str(file),
        "versions": list(versions),
        "verdict": result.verdict.value,
        "predicted_peak_device_bytes": result.prediction.peak_device_bytes,
        "memory_band_fraction": result.band_fraction,
        "tokens_per_s": result.prediction.tokens_per_s,
    }


def _terms(before: Prediction, after: Prediction) -> list[tuple[str, int]]:
    sizes: dict[str, int] = {}
    for sign, prediction in ((-1, before), (1, after)):
        for term in prediction.terms:
            name = f"{term.category}: {term.name}"
            sizes[name] = sizes.get(name, 0) + sign * term.size_bytes
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda row: -abs(row[1]))[:NUM_TERMS]


def _lines(first: CheckResult, second: CheckResult, changes: Sequence[SettingChange], traced: bool) -> Iterator[str]:
    added = second.prediction.peak_device_bytes - first.prediction.peak_device_bytes
    verdicts = " -> ".join(result.verdict.value.replace("_", " ") for result in (first, second))
    peaks = " -> ".join(gib(result.prediction.peak_device_bytes) for result in (first, second))
    levels = " -> ".join(dict.fromkeys(LEVEL_WORDS[result.prediction.level] for result in (first, second)))
    yield f"{peaks} ({signed_gib(added)})"
    yield f"of the {gib(first.budget_bytes)} of {first.gpu.name}: {verdicts}  [{levels}]"
    if first.prediction.tokens_per_s and second.prediction.tokens_per_s:
        yield f"{first.prediction.tokens_per_s:,.0f} -> {second.prediction.tokens_per_s:,.0f} tokens/s"
    if not changes:
        yield "No setting differs."
        if not traced:
            yield "What the tools' own code does otherwise between versions is not in the settings: --trace runs it in"
            yield "two environments, on a GPU that computes nothing."
        return
    yield "Each setting's change alone:"
    for change in changes:
        before, after = first.config.setup, second.config.setup
        words = ", ".join(
            f"{NAMES.get(name, name.replace('_', ' '))} {value_words(before, name)} -> {value_words(after, name)}"
            for name in change.names
        )
        speed = f", speed x {change.speedup:.2f}" if change.speedup is not None else ""
        yield f"  {signed_gib(change.added_bytes):>12}{speed}  {words}" + (
            f"  [{change.origin}]" if change.origin else ""
        )
    for name, size in _terms(first.prediction, second.prediction):
        yield f"  {signed_gib(size):>12}  {name}"


NUM_ROWS = 4
GROUPS = {"by_category": "by kind", "by_module": "by module", "by_code": "by function", "by_op": "by operator"}
"""What is alive at the peak, by what it is, whose it is and what made it."""


def trace_both(
    files: tuple[Path, Path],
    versions: tuple[Sequence[str], Sequence[str]],
    requirements: Sequence[str],
    card: GpuSpec,
    yes: bool,
) -> dict[str, Any]:
    """What the two runs differ in, as `--json` prints it.

    Args:
        versions: PACKAGE==VERSION of each side; requirements: of both environments.

    Raises:
        EnvironmentProblem: no such environment, or the program cannot be followed there.
        UsageError: the program's own error; a file that is no program.
    """
    from probes.phantom.runner import program, protection

    results = []
    for file, pins in zip(files, versions, strict=True):
        python = environment([*pins, *requirements, *_imported(file, pins)])
        environ = {"PATH": f"{python.parent}:/usr/bin:/bin", "VIRTUAL_ENV": str(python.parent.parent)}
        command = ("bash", str(file)) if file.suffix == ".sh" else (str(python), str(file))
        order = FollowOptions().order(command, card, StandIns(), card.memory_bytes)
        order = replace(order, options=replace(order.options, limited=False), environment=environ)
        ask(order, program(command), protection(order).kind, yes)
        results.append(traced(order))
    return trace_document(results[0], results[1], card)


def _imported(file: Path, pins: Sequence[str]) -> list[str]:
    """The packages that a program imports, as far as they are known here, beside those whose version is said."""
    if file.suffix == ".sh":
        return []
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(
            f"plan diff --trace runs Python programs and shell scripts; {file} is none: {error}",
            hint="plan trace -- COMMAND, in an environment of each version, runs what trains from it",
        ) from error
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    distributions = packages_distributions()
    packages = {
        distributions[name][0].lower() if name in distributions else name
        for name in names
        if name in distributions or name in TRAINERS
    }
    if "transformers" in packages:
        packages.add("accelerate")  # its Trainer's
    return sorted(packages - {pair.partition("==")[0] for pair in pins} - {"torch"})


def trace_document(before: TraceResult, after: TraceResult, card: GpuSpec) -> dict[str, Any]:
    """What two traces differ in: at the peak by kind, module and operator, and each phase's peak."""
    phases = {name: (before.phase_peaks_bytes.get(name, 0), size) for name, size in after.phase_peaks_bytes.items()}
    return {
        "before": _traced_side(before, card),
        "after": _traced_side(after, card),
        "added_bytes": after.peak_device_bytes - before.peak_device_bytes,
        "added_allocated_bytes": after.peak_allocated_bytes - before.peak_allocated_bytes,
        "by_phase": {name: now - was for name, (was, now) in phases.items()},
        **{name: _differing(getattr(before, name), getattr(after, name)) for name in GROUPS},
        "kernels": [sorted(before.kernels), sorted(after.kernels)],
    }


def _traced_side(trace: TraceResult, card: GpuSpec) -> dict[str, Any]:
    speed = speed_of(trace, card)
    return {
        "libraries": dict(trace.libraries),
        "peak_device_bytes": trace.peak_device_bytes,
        "peak_allocated_bytes": trace.peak_allocated_bytes,
        "peak_phase": trace.peak_phase,
        "tokens_per_s": speed.tokens_per_s if speed else None,
    }


def _differing(before: Sequence[Holding], after: Sequence[Holding]) -> list[dict[str, Any]]:
    was = {holding.name: holding.size_bytes for holding in before}
    now = {holding.name: holding.size_bytes for holding in after}
    added = {name: now.get(name, 0) - was.get(name, 0) for name in {**was, **now}}
    return [
        {"name": name, "before_bytes": was.get(name, 0), "added_bytes": added[name]}
        for name in sorted(added, key=lambda name: -abs(added[name]))
        if added[name]
    ]


def trace_lines(comparison: Mapping[str, Any]) -> Iterator[str]:
    """The same for a terminal."""
    before, after = comparison["before"], comparison["after"]
    versions = before["libraries"], after["libraries"]
    changed = [
        f"{name} {versions[0].get(name, '-')} -> {versions[1].get(name, '-')}"
        for name in sorted({*versions[0], *versions[1]})
        if versions[0].get(name) != versions[1].get(name)
    ]
    allocated = signed_gib(comparison["added_allocated_bytes"])
    yield f"Run in both: {signed_gib(comparison['added_bytes'])} on the device, {allocated} allocated  [trace]"
    yield f"  {', '.join(changed) or 'the same libraries'}"
    if before["tokens_per_s"] and after["tokens_per_s"]:
        yield f"  {before['tokens_per_s']:,.0f} -> {after['tokens_per_s']:,.0f} tokens/s"
    phases = (
        f"{RESERVED_WORDS.get(name, name)} {signed_gib(size)}" for name, size in comparison["by_phase"].items() if size
    )
    yield f"  peaks: {', '.join(phases) or 'the same in every phase'}"
    for name, title in GROUPS.items():
        if rows := comparison[name][:NUM_ROWS]:
            yield f"  {title}:"
            for row in rows:
                is_new = "" if row["before_bytes"] else "  (not there before)"
                yield f"  {signed_gib(row['added_bytes']):>12}  {clean(row['name'])}{is_new}"
