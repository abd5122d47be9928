"""The bands of speeds: how far published runs lie from each level, the base of each kind, and how many runs it holds
with every source left out in turn.

    python -m benchmarks.speed_bands               # formula and step programs anew, dry runs as recorded
    python -m benchmarks.speed_bands --dry-runs    # dry runs anew too (20 minutes)

Writes `benchmarks/data/speed_errors.jsonl` (every comparison), the speeds' cells of `planner/data/bands.json` and
`docs/accuracy/speed-bands.md`. A source is a repository, or a paper: a campaign on its own machines. Runs of one GPU
that the formula was fitted on fit no band of it, and none of those that `benchmarks.gathered` keeps out does.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import exp, hypot, log, sqrt
from statistics import median
from typing import Any, NamedTuple

from benchmarks import gathered
from benchmarks.band_fit import COVERAGE, passed_at
from benchmarks.measured import MeasuredRow
from benchmarks.multi_gpu_points import load_points
from benchmarks.operator_speed import program_of
from benchmarks.shared import DATA, DOCS, rows_so_far, write_rows
from benchmarks.speed_accuracy import NOT_FITTED
from benchmarks.speed_points import load_points as load_points_of_one
from benchmarks.stack_bands import BANDS, comparable_rows
from planner.core.errors import PlannerError
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.planning.evidence.followed import why_no_dry_run
from planner.planning.run_speed import rank_speed, rank_uncertainty, run_speed
from planner.setup import TrainSetup
from planner.speed import cluster_of, speed_profile
from planner.speed.roofline import Conditions, conditions_of, load_calibration, throughput_profile
from planner.speed.roofline.bands import SCALED, Base, Uncertainty
from planner.speed.several_gpus.speed import layout_step_time
from planner.speed.sized import run_uncertainty

ERRORS, PAGE = DATA / "speed_errors.jsonl", DOCS / "accuracy" / "speed-bands.md"
OWN_CODE = frozenset({"llm_foundry", "tinyllama"})
"""Sources whose model is none of transformers'."""
FEW_SOURCES, BY_FEW = 9, 0.95
"""Where fewer sources say it, a base holds more of them, to hold `COVERAGE` of the next one's."""
Error = dict[str, Any]


class Run(NamedTuple):
    """A published run whose speed is said: by whom, and with how sure a setup."""

    key: str
    source: str
    model: ModelSpec
    gpu: GpuSpec
    setup: TrainSetup
    cluster: Cluster | None
    conditions: Conditions
    tokens_per_s: float
    kept: bool = False
    otherwise: bool = False
    sure: bool = True
    untimed: tuple[str, ...] = ()


def runs() -> Iterator[Run]:
    """All whose setup a level can price; tokens/s are of one GPU."""
    fresh = set(gathered.rows())
    points = [point for point in load_points_of_one() if point.labels["num_gpus"] == "1"]
    layouts = [point for point in load_points() if point.tokens_per_s is not None]
    told = {point.group for point in points} | {point.source for point in layouts} | NOT_FITTED
    for row in comparable_rows():
        said = row.comparable("tokens_per_s") and row.tokens_per_s and row.speed_setup is not None
        if said and row.speed_setup and (row in fresh or row.group not in told):
            yield _run_of(row, row.speed_setup, kept=row in fresh and gathered.kept_out(row))
    for point in points:
        if point.group not in NOT_FITTED:
            yield Run(
                point.key, point.group, point.model, point.gpu, point.setup, None, point.conditions, point.tokens_per_s
            )
    for point in layouts:
        yield Run(
            point.key, point.source, point.model, point.gpu, point.speed_setup, point.cluster, point.conditions,
            point.tokens_per_s or 0.0, sure=not point.loose_speed,
        )  # fmt: skip


def _run_of(row: MeasuredRow, setup: TrainSetup, *, kept: bool) -> Run:
    model, gpu = row.model_and_gpu()
    cluster = None if setup.single_gpu else cluster_of(gpu, setup, None)
    return Run(
        row.id, row.group, model, gpu, setup, cluster, conditions_of(setup), row.tokens_per_s or 0.0, kept,
        gathered.otherwise(row, "tokens_per_s"), row.speed_confidence in ("A", "B"), row.untimed,
    )  # fmt: skip


def step_of(run: Run) -> tuple[float, Mapping[str, float], Uncertainty]:
    """(seconds of a step, its parts, how far off they may be) as told without a dry run."""
    if run.cluster is not None:
        step = layout_step_time(run.model, run.gpu, run.setup, run.cluster, conditions=run.conditions)
    elif run.conditions == conditions_of(run.setup):
        step = speed_profile(run.model, run.gpu, run.setup).step_time(run.setup)
    else:
        step = throughput_profile(run.model, run.gpu, run.setup, conditions=run.conditions).step_time(run.setup)
    return step.step_time_s, step.parts_s, step.uncertainty


def dry_step_of(run: Run) -> tuple[float, Mapping[str, float], Uncertainty] | None:
    """The same by a dry run of today's form of the setup; None where it says no speed, or where the run's own code is
    another: its model's (`OWN_CODE`), older kernels, experts in a loop, padded batches."""
    setup, conditions, exchanges = run.setup, run.conditions, ("none", "ddp", "fsdp2")
    beyond = setup.parallel not in exchanges or setup.offload != "none" or setup.activation_offload
    beyond = beyond or setup.trainer.single_operations or run.source in OWN_CODE or conditions.masked_attention
    old = conditions != conditions_of(setup) and conditions.fused_parts
    looped = conditions.loop_experts and any(
        linear.num > 1 for kind in run.model.layer_kinds for linear in kind.linears
    )
    if why_no_dry_run(setup) or beyond or old or looped or conditions.optimizer_part != 1:
        return None
    program = program_of(run.model, run.gpu, setup)
    if program is None:
        return None
    if run.cluster is not None:
        time = rank_speed(program, run.model, run.gpu, setup, run.cluster)
        return time.step_s, time.parts_s, rank_uncertainty(time, program, run.model, run.gpu, setup, run.cluster)
    time = run_speed(program, run.model, run.gpu, setup)
    formula = throughput_profile(run.model, run.gpu, setup, conditions=run.conditions)
    return time.step_s, time.parts_s, run_uncertainty(time, formula, setup)


def error_of(run: Run, level: str, said: tuple[float, Mapping[str, float], Uncertainty]) -> Error:
    """One comparison.

    Returns: "ratio": measured over predicted tokens/s; "needed": the half-width of the base that would just hold it.
    """
    step_s, parts, uncertainty = said
    timed_s = step_s - sum(parts.get(part, 0.0) for part in run.untimed)
    ratio = run.tokens_per_s * timed_s * run.setup.num_gpus / run.setup.tokens_per_step
    return {
        "id": run.key, "level": level, "kinds": list(uncertainty.base.kinds), "source": run.source, "gpu": run.gpu.key,
        "stack": run.setup.stack, "ratio": round(ratio, 5), "needed": round(exp(uncertainty.needed_base(ratio)) - 1, 5),
        "slower": [round(each, 4) for each in uncertainty.slower], "unmeasured": round(uncertainty.unmeasured, 4),
        "faster": [round(each, 4) for each in uncertainty.faster], "judged": uncertainty.judged,
        "waits": round(parts.get("host", 0.0) / step_s, 3),
        **{name: True for name in ("kept", "otherwise") if getattr(run, name)},
        **({} if run.sure else {"unsure": True}), **({"compiled": True} if run.setup.compiled else {}),
    }  # fmt: skip


def errors_of(runs: Iterable[Run], *, dry_runs: bool) -> Iterator[Error]:
    """Every comparison; of cards but NVIDIA's none, whose band is judgement (`AMD_TIME_BAND`)."""
    for run in runs:
        if run.gpu.vendor != "NVIDIA":
            continue
        with suppress(PlannerError):
            yield error_of(run, "told", step_of(run))
        said = dry_step_of(run) if dry_runs else None
        if said is not None:
            yield error_of(run, "dry_run", said)


# What of these a base is fitted on, and what it holds


def usable(error: Error) -> bool:
    """Whether a figure is the setup's, and its setup sure."""
    return not error.get("otherwise") and not error.get("unsure")


def fitted_before(error: Error) -> bool:
    """Whether the formula's own constants were fitted on the run's source."""
    points = load_calibration().points
    known = {*points["sources"], *points["spread"]["sources"]}
    return error["kinds"][0].startswith("formula") and error["source"] in known


def base(errors: Sequence[Error], beside: Sequence[float], *, few: bool = True) -> float:
    """The half-width, as a logarithm, that holds `COVERAGE` of what errors need beside others, a source of n rows
    counting sqrt(n)."""
    sizes: dict[str, int] = defaultdict(int)
    for error in errors:
        sizes[error["source"]] += 1
    needs = (
        (sqrt(max(0.0, log(1 + error["needed"]) ** 2 - known**2)), 1 / sqrt(sizes[error["source"]]))
        for error, known in zip(errors, beside, strict=True)
    )
    return passed_at(sorted(needs), BY_FEW if few and len(sizes) < FEW_SOURCES else COVERAGE)


def fitted(errors: Iterable[Error]) -> dict[str, float]:
    """Half-widths, as logarithms, by kind: of each level on measured cards, and what a scaled card adds.

    Runs of several GPUs that the formula was fitted on count: a dozen constants, of 484 of them. Those of one do not.
    """
    open_runs = [error for error in errors if usable(error) and not error.get("kept")]
    open_runs = [error for error in open_runs if not (fitted_before(error) and error["kinds"][0] == "formula, one")]
    by_kinds: dict[tuple[str, ...], list[Error]] = defaultdict(list)
    for error in open_runs:
        by_kinds[tuple(error["kinds"])].append(error)
    widths = {kinds[0]: base(mine, [0.0] * len(mine)) for kinds, mine in by_kinds.items() if len(kinds) == 1}
    scaled = [error for error in open_runs if SCALED in error["kinds"]]
    return widths | {SCALED: base(scaled, [widths[error["kinds"][0]] for error in scaled], few=False)}


def sides(error: Error, widths: Mapping[str, float]) -> tuple[float, float]:
    """The band of tokens/s, below and above."""
    width = hypot(*(widths[kind] for kind in error["kinds"]))
    uncertainty = Uncertainty(
        base=Base((), width), slower=tuple(error["slower"]), faster=tuple(error["faster"]),
        unmeasured=error["unmeasured"], judged=error["judged"],
    )  # fmt: skip
    return 1 - 1 / (1 + uncertainty.slower_fraction), uncertainty.faster_fraction


class Judged(NamedTuple):
    """A comparison held against the band that all other sources give; `width`: half of the shipped band's."""

    error: Error
    inside: bool
    width: float


def judged(errors: Sequence[Error]) -> list[Judged]:
    """Every usable comparison, its source left out."""
    shipped, verdicts = fitted(errors), list[Judged]()
    for source in sorted({error["source"] for error in errors}):
        widths = shipped | fitted(error for error in errors if error["source"] != source)
        for error in errors:
            if error["source"] == source and usable(error):
                below, above = sides(error, widths)
                inside = 1 - below <= error["ratio"] <= 1 + above
                verdicts.append(Judged(error, inside, sum(sides(error, shipped)) / 2))
    return verdicts


PAGE_HEAD = """# Error bands of speeds

Written by `python -m benchmarks.speed_bands`; do not edit by hand. A band says: in 9 of 10 runs like this the measured
tokens/s lie within it. It is made of what decides it, each part independent of the others:

- a *base* by the level that priced the step: its own operators (step program, dry run), or the formula's counts;
- on cards whose matrix rate nobody measured what their family's share of the data sheet is off by;
- under torch.compile the step as long as without it, and as much shorter again;
- the host: the step with a CPU twice as slow, and twice as fast, as counted. It moves what waits for it alone;
- links within a node over PCIe and between nodes, as slow and as fast as they were seen
  (`planner.speed.several_gpus.collectives`);
- what nobody has measured in a run of its kind (an encoder, generation, an objective's loss), added whole.

Every run needs some base to lie inside; the base is what 90 % of the runs need (95 % of fewer than {few} sources), a
source of n runs counting sqrt(n) (normalized split conformal prediction: Lei et al. 2018, section 5.2). *Left out*:
share of the runs inside the band that all other sources give. *Told*: without a dry run, as `plan estimate` and
`plan check` say. Runs that the formula was fitted on stand apart; the kept half of the gathered runs
([gathered](gathered.md)) fits nothing.

"""


def page(errors: Sequence[Error]) -> str:
    widths, verdicts = fitted(errors), judged(errors)
    names = {SCALED: "more, on a card without measured rates"}
    lines = ["| base | half-width |", "|---|---:|"]
    lines += [
        f"| {names.get(kind, kind + ' GPU' + 's' * ('several' in kind))} | {exp(width) - 1:.1%} |"
        for kind, width in widths.items()
    ]
    fresh = [verdict for verdict in verdicts if not fitted_before(verdict.error)]
    known = [verdict for verdict in verdicts if fitted_before(verdict.error)]
    groups: dict[str, dict[str, list[Judged]]] = {
        "All": _grouped(fresh, lambda error: "kept out" if error.get("kept") else "open"),
        "Fitted on by the formula": _grouped(known, lambda error: "all"),
        "By what they are": _grouped(fresh, _kind),
        "By the share that waits for the host": _grouped(fresh, lambda error: _waits(error["waits"])),
        "By trainer": _grouped(fresh, lambda error: error["stack"]),
        "By card": _grouped(fresh, lambda error: error["gpu"]),
        "By source": _grouped(fresh, lambda error: error["source"]),
    }
    for title, rows in groups.items():
        lines += ["", f"## {title}", "", "| level | GPUs | | runs | sources | median error | half-width | left out |"]
        lines += ["|---|---|---|---:|---:|---:|---:|---:|", *(_row(name, mine) for name, mine in sorted(rows.items()))]
    return PAGE_HEAD.format(few=FEW_SOURCES) + "\n".join(lines) + "\n"


def _kind(error: Error) -> str:
    card = "scaled" if SCALED in error["kinds"] else "measured"
    return f"{error['kinds'][0].partition(',')[0]}, {card}{', compiled' * error.get('compiled', False)}"


def _waits(share: float) -> str:
    return next((f"below {limit:.0%}" for limit in (0.05, 0.2, 0.5) if share < limit), "above 50%")


def _grouped(verdicts: Iterable[Judged], name: Callable[[Error], str]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = defaultdict(list)
    for verdict in verdicts:
        error = verdict.error
        gpus = error["kinds"][0].partition(", ")[2]
        groups[f"{error['level'].replace('_', ' ')} | {gpus} | {name(error)}"].append(verdict)
    return groups


def _row(name: str, mine: Sequence[Judged]) -> str:
    off = median(abs(1 / verdict.error["ratio"] - 1) for verdict in mine)
    width, inside = median(verdict.width for verdict in mine), sum(verdict.inside for verdict in mine) / len(mine)
    sources = len({verdict.error["source"] for verdict in mine})
    return f"| {name} | {len(mine)} | {sources} | {off:.1%} | ±{width:.0%} | {inside:.0%} |"


def cells_of(errors: Sequence[Error]) -> list[dict[str, Any]]:
    """Rows of the data file."""
    cells = []
    for kind, width in fitted(errors).items():
        level, _, gpus = kind.partition(", ")
        mine = [error for error in errors if kind in error["kinds"] and usable(error) and not error.get("kept")]
        fraction, sources = exp(width) - 1, {error["source"] for error in mine}
        names = {"level": level, "gpus": gpus, "stack": ""} if gpus else {"level": "", "gpus": "", "stack": kind}
        cells.append(
            {"metric": "tokens_per_s", **names, "below": round(1 - 1 / (1 + fraction), 3), "above": round(fraction, 3)}
            | {"num_rows": len(mine), "num_sources": len(sources), "cards": []}
        )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-runs", action="store_true", help="dry-run every setup anew")
    args = parser.parse_args()
    errors = [*errors_of(runs(), dry_runs=args.dry_runs)]
    if not args.dry_runs:
        errors += [error for error in rows_so_far(ERRORS) if error["level"] == "dry_run"]
    write_rows(ERRORS, errors)
    memory = [cell for cell in json.loads(BANDS.read_text()) if cell["metric"] != "tokens_per_s"]
    BANDS.write_text(json.dumps(memory + cells_of(errors), indent=1) + "\n", encoding="utf-8")
    text = page(errors)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
