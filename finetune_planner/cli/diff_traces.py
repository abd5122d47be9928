"""`plan diff --trace`: the program run on a phantom GPU in an environment of each side, and how its memory differs."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from finetune_planner.app.environments import environment
from finetune_planner.cli.trace import TRAINERS, FollowOptions, StandIns, ask, speed_of, traced
from planner.core.errors import UsageError
from planner.core.units import signed_gib
from planner.hardware.gpu import GpuSpec
from planner.planning.trace_result import Holding, TraceResult
from reports.plain import clean
from reports.trace import RESERVED_WORDS

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
    return document(results[0], results[1], card)


def _imported(file: Path, pins: Sequence[str]) -> list[str]:
    """The packages that a program imports, as far as they are known here, beside those whose version is said.

    Raises:
        UsageError: no program.
    """
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


def document(before: TraceResult, after: TraceResult, card: GpuSpec) -> dict[str, Any]:
    """What two traces differ in: at the peak by kind, module and operator, and each phase's peak."""
    phases = {name: (before.phase_peaks_bytes.get(name, 0), size) for name, size in after.phase_peaks_bytes.items()}
    return {
        "before": _side(before, card),
        "after": _side(after, card),
        "added_bytes": after.peak_device_bytes - before.peak_device_bytes,
        "added_allocated_bytes": after.peak_allocated_bytes - before.peak_allocated_bytes,
        "by_phase": {name: now - was for name, (was, now) in phases.items()},
        **{name: _differing(getattr(before, name), getattr(after, name)) for name in GROUPS},
        "kernels": [sorted(before.kernels), sorted(after.kernels)],
    }


def _side(trace: TraceResult, card: GpuSpec) -> dict[str, Any]:
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


def lines(comparison: Mapping[str, Any]) -> Iterator[str]:
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
