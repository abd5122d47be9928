"""Published runs gathered after the models were built, against the formula: the first look at each, and today.

    python -m benchmarks.gathered            # the page docs/accuracy/gathered.md, from the formula of today
    python -m benchmarks.gathered --first    # also records the first look at rows that have none
    python -m benchmarks.gathered --dry-runs # also dry-runs what is not recorded (one GPU, uncompiled; minutes)
    python -m benchmarks.gathered --list dlrover mistral_finetune  # these sources run by run, nothing written

Rows are `benchmarks/data/gathered.jsonl`, in the form of `benchmarks.measured`, each with its source
(repository@commit:path). Half of each source, by the checksum of its configuration, is *kept out*: no constant and no
band is ever fitted on it. The first look (`benchmarks/data/gathered_first.json`) is what the formula said before
anybody here had seen the row's error; it is written once and never again.
"""

import argparse
import json
import statistics
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from benchmarks.measured import MeasuredRow, Quantity, predicted_figure, row_of
from benchmarks.shared import DATA, DOCS, rows_of
from planner.core.errors import PlannerError
from planner.core.units import gib
from planner.planning.predict import predict
from planner.setup.outcome import Prediction

FIRST, DRY_RUNS = DATA / "gathered_first.json", DATA / "gathered_dry_runs.json"
PAGE = DOCS / "accuracy" / "gathered.md"
METRICS: tuple[Quantity, ...] = ("allocated", "reserved", "device", "tokens_per_s")
NAMES = {"tokens_per_s": "tokens/s"}
SMALL = 500_000_000

Looks = Mapping[str, Mapping[str, float]]
"""Row -> figure -> predicted over measured."""


def otherwise(row: MeasuredRow, what: Quantity) -> bool:
    """Whether a figure holds what no setup says, so that no fit may learn from it."""
    head = "tokens/s:" if what == "tokens_per_s" else "memory:"
    return any(difference.startswith(head) for difference in row.differs)


@lru_cache(maxsize=1)
def rows() -> tuple[MeasuredRow, ...]:
    return tuple(map(row_of, rows_of(DATA / "gathered.jsonl")))


def kept_out(row: MeasuredRow) -> bool:
    """Whether the row stays out of every fit: half of each source, repeats of a configuration together."""
    return zlib.crc32(f"{row.group}|{row.config_id}".encode()) % 2 == 1


def look(row: MeasuredRow) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """(predicted over measured, the stated band below and above) of each figure; tokens/s a GPU's."""
    ratios: dict[str, float] = {}
    bands: dict[str, tuple[float, float]] = {}
    model, gpu = row.model_and_gpu()
    for what in METRICS:
        measured = row.measured(what)
        setup = row.setup_for(what)
        if measured is None or setup is None or not row.comparable(what):
            continue
        prediction = predict(model, gpu, setup)
        predicted = predicted_figure(prediction, what, row.untimed)
        if predicted is None:
            continue
        ratios[what] = predicted / (setup.num_gpus if what == "tokens_per_s" else 1) / measured
        below, above = prediction.bands[what]
        if what == "tokens_per_s":
            below = max(below, 1 - 1 / (1 + (prediction.time_band_fraction or 0.0)))
            above = max(above, prediction.time_band_fraction or 0.0)
        bands[what] = (below, above)
    return ratios, bands


def listing(groups: Collection[str]) -> str:
    """Every figure of some sources' runs with its prediction and band; then, by kind and half, of those whose mapping
    is sure: how many lie inside, the median error, and how many of the others were predicted too low."""
    lines, sure = [], defaultdict(list)
    for row in rows():
        if row.group not in groups or row.setup is None or row.unmapped:
            continue
        ratios, bands = look(row)
        half = "kept out" if kept_out(row) else ""
        for what, ratio in ratios.items():
            speed = what == "tokens_per_s"
            measured, (below, above) = row.measured(what) or 0, bands[what]
            miss = "too low" if 1 / ratio > 1 + above else "too high" if 1 / ratio < 1 - below else ""
            confidence = row.speed_confidence if speed else row.memory_confidence
            is_sure = confidence in ("A", "B") and not otherwise(row, what)
            if is_sure:
                kind = f"{'speed' if speed else 'memory'}, {'one GPU' if row.num_gpus == 1 else 'several GPUs'}"
                sure[kind, half].append((ratio, miss))
            predicted, meant = (f"{v:,.0f}" if speed else gib(v) for v in (ratio * measured, measured))
            lines.append(
                f"{row.id:24} {half:8} {'' if is_sure else 'unsure':6} {row.num_gpus:3} {NAMES.get(what, what):9} "
                f"{predicted:>9} (-{below:.0%} to +{above:.0%}), measured {meant:>9}: {ratio - 1:+.1%} {miss}"
            )
    for (kind, half), outcomes in sorted(sure.items()):
        misses = [miss for _, miss in outcomes if miss]
        error = statistics.median(abs(ratio - 1) for ratio, _ in outcomes)
        low = sum(ratio < 1 for ratio, _ in outcomes)
        lines.append(
            f"{kind}, {half or 'open'}: {len(outcomes) - len(misses)} of {len(outcomes)} inside their bands, median "
            f"{error:.1%}, {low} too low; {misses.count('too low')} of {len(misses)} misses too low"
        )
    return "\n".join(lines) + "\n"


def looks() -> tuple[dict[str, dict[str, float]], dict[str, dict[str, bool]], dict[str, str]]:
    """Ratios and coverage of every row that a setup expresses, and why the others are none."""
    ratios, inside, refused = {}, {}, {}
    for row in rows():
        if row.unmapped or row.setup is None:
            refused[row.id] = row.unmapped
            continue
        try:
            ratios[row.id], bands = look(row)
            inside[row.id] = {
                what: 1 - bands[what][0] <= 1 / ratio <= 1 + bands[what][1] for what, ratio in ratios[row.id].items()
            }
        except PlannerError as problem:
            refused[row.id] = problem.message
    return ratios, inside, refused


def dry_run_looks(recorded: Looks) -> dict[str, dict[str, float]]:
    """Predicted over measured of memory figures by the dry run; rows of one setup share one run."""
    from probes.dryrun import dry_run

    answers, by_row = {}, {name: dict(look) for name, look in recorded.items()}
    for row in rows():
        wanted = [what for what in METRICS[:3] if row.comparable(what) and row.measured(what)]
        if row.id in by_row or not wanted or row.setup is None or row.setup.compile or row.num_gpus > 1:
            continue
        model, gpu = row.model_and_gpu()
        key = (model.model_id, gpu.key, row.setup)
        if key not in answers:
            answers[key] = dry_run(model, gpu, row.setup)
        answer = answers[key]
        if isinstance(answer, Prediction):
            ratios = {what: (predicted_figure(answer, what) or 0.0) / (row.measured(what) or 1.0) for what in wanted}
            by_row[row.id] = {what: round(ratio, 4) for what, ratio in ratios.items()}
    return by_row


def _share(values: Sequence[float]) -> str:
    errors = [abs(value - 1) for value in values]
    return f"{statistics.median(errors):.1%} / {max(errors):.1%}" if errors else ""


def _configs(runs: Iterable[MeasuredRow], ratios: Looks, what: str) -> list[float]:
    """One ratio per configuration, the median of its runs."""
    each: dict[str, list[float]] = defaultdict(list)
    for row in runs:
        if what in ratios.get(row.id, {}):
            each[row.config_id].append(ratios[row.id][what])
    return [statistics.median(values) for values in each.values()]


def page(first: Looks, dry_runs: Looks) -> str:
    ratios, inside, refused = looks()
    groups: dict[str, list[MeasuredRow]] = defaultdict(list)
    for row in rows():
        groups[row.group].append(row)
    lines = [
        "# Runs gathered afterwards",
        "",
        "Written by `python -m benchmarks.gathered`; do not edit by hand. Errors of the formula on published runs that "
        "were gathered after it was built: median / worst over configurations. *First look*: before anybody here had "
        "seen the error. *Kept out*: the half of the source that no constant and no band is fitted on. *Inside*: share "
        "of runs inside the band that the prediction carries. *Dry run*: as recorded, where it can run the setup.",
        "",
        "| source | figure | runs | configurations | first look | today | today, kept out | inside | dry run |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group, members in sorted(groups.items()):
        for what in METRICS:
            today = _configs(members, ratios, what)
            if not today:
                continue
            held_out = _configs([row for row in members if kept_out(row)], ratios, what)
            flags = [inside[row.id][what] for row in members if what in inside.get(row.id, {})]
            lines.append(
                f"| {group} | {NAMES.get(what, what)} | {len(flags)} | {len(today)} | "
                f"{_share(_configs(members, first, what))} | {_share(today)} | {_share(held_out)} | "
                f"{sum(flags) / len(flags):.0%} | {_share(_configs(members, dry_runs, what))} |"
            )
    lines += ["", *_kinds(ratios)]
    lines += [
        "",
        f"{len(rows())} rows, {len(rows()) - len(refused)} expressed as a setup, "
        f"{sum(map(kept_out, rows()))} kept out.",
        "",
        "| not expressed | rows |",
        "|---|---:|",
        *(f"| {why} | {number} |" for why, number in Counter(refused.values()).most_common()),
        "",
    ]
    return "\n".join(lines)


def small_and_eager(row: MeasuredRow) -> bool:
    """Whether a run of a model below half a billion parameters trains it whole, compiles nothing, and is timed by
    steps alone."""
    if row.setup is None or row.setup.compile or row.setup.method != "full" or row.tokens_per_s is None:
        return False
    return row.comparable("tokens_per_s") and row.model_and_gpu()[0].num_params < SMALL


def _kinds(ratios: Looks) -> list[str]:
    """What the issue's kinds of runs err by, sources taken together, but for figures that hold what no setup says."""
    lines = []
    small = [row for row in rows() if small_and_eager(row)]
    compiled = [row for row in rows() if row.setup is not None and row.setup.compile]
    several = [row for row in compiled if row.num_gpus > 1]
    for name, members, metrics in (
        ("Models below 0.5 B parameters, eager, steps timed alone", small, METRICS[3:]),
        ("torch.compile, one GPU", [row for row in compiled if row.num_gpus == 1], METRICS),
        ("torch.compile, several GPUs over links of unknown speed", several, METRICS[3:]),
    ):
        for what in metrics:
            same = [row for row in members if not otherwise(row, what)]
            config_ratios = _configs(same, ratios, what)
            held_out = _configs([row for row in same if kept_out(row)], ratios, what)
            if config_ratios:
                number = f"{len(config_ratios)} configurations, kept out {_share(held_out)} of {len(held_out)}"
                lines.append(f"- {name}, {NAMES.get(what, what)}: {_share(config_ratios)} of {number}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", action="store_true", help="record the first look at rows that have none")
    parser.add_argument("--dry-runs", action="store_true", help="dry-run what is not recorded")
    parser.add_argument("--list", nargs="+", default=(), metavar="SOURCE", help="these sources, run by run")
    args = parser.parse_args()
    if args.list:
        sys.stdout.write(listing(args.list))
        return
    first = json.loads(FIRST.read_text())
    dry_runs = json.loads(DRY_RUNS.read_text()) if DRY_RUNS.exists() else {}
    if args.first:
        new = {name: {what: round(ratio, 4) for what, ratio in look.items()} for name, look in looks()[0].items()}
        first = new | first
        _write(FIRST, first)
    if args.dry_runs:
        dry_runs = dry_run_looks(dry_runs)
        _write(DRY_RUNS, dry_runs)
    text = page(first, dry_runs)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def _write(path: Path, ratios: Looks) -> None:
    path.write_text(json.dumps(ratios, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
