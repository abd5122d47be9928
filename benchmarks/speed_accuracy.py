"""How well the speed model predicts throughputs that it was not fitted on: docs/speed-accuracy.md and its JSON.

    python -m benchmarks.speed_accuracy                        (about five minutes; needs scipy and scikit-learn)
    python -m benchmarks.speed_accuracy --write-calibration    (also writes planner/data/calibration.json)

Splits: a whole source is held out; within a source a whole GPU or a whole model. Never a random row. Beside each error
the noise floor: how far repeats of one configuration under other software versions lie from their median.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from math import exp, log, sqrt
from statistics import median
from typing import Any

from benchmarks.constants_fit import UNCERTAINTY, fit_constants
from benchmarks.shared import DATA, DOCS, marked, percentile
from benchmarks.speed_points import load_points
from benchmarks.speed_ratios import RATIOS, ratio_errors
from planner.speed.roofline.calibration import DATA_FILE, Calibration, load_calibration
from planner.speed.roofline.points import Point, log_errors

JSON_FILE = DATA / "speed_accuracy.json"
SPLITS = {
    "source": "A whole source held out",
    "gpu": "A whole GPU held out within its source",
    "model": "A whole model held out within its source",
}
HEAD = (
    "| source | n | median | 90th pct. | rank corr. (worst) | noise floor median / 90th | 6ND over MFU | boosted trees "
    "|\n|---|--:|--:|--:|--:|--:|--:|--:|\n"
)
NOT_FITTED = frozenset({"llamafactory_wiki", "ms_swift_benchmark"})
"""Sources whose sample lengths are not known: shown, never fitted on."""
SET_APART = ("compile_bytes", "compile_host")
"""Constants of torch.compile, set on compiled runs gathered since (docs/kernels.md): few of these points are compiled,
so a fit on them keeps both as they ship."""
FITTED = tuple(name for name in UNCERTAINTY if name not in SET_APART)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation (ties share their mean rank)."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]

    a, b = ranks(first), ranks(second)
    mean = (len(a) - 1) / 2
    above = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    below = sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return above / below if below else 0.0


# Two simple predictors of tokens/s on the same splits: 6 N D over a constant MFU, and gradient-boosted regression


def peak(point: Point) -> float:
    """Data-sheet rate for the setup's compute type."""
    gpu = point.gpu
    half = gpu.bf16_flops_per_s or gpu.fp16_flops_per_s or gpu.fp32_flops_per_s or 1.0
    return half if point.setup.compute_dtype != "fp32" else gpu.fp32_flops_per_s or half


def constant_mfu(train: Sequence[Point], holdout: Sequence[Point]) -> list[float]:
    """tokens/s = MFU x peak / (6 x active parameters), the MFU that fits the training points best (median)."""
    mfu = median(p.tokens_per_s * 6 * p.model.num_active_params / peak(p) for p in train)
    return [mfu * peak(p) / (6 * p.model.num_active_params) for p in holdout]


def features(point: Point) -> list[float]:
    """What a regression can know of a point: sizes, rates and switches."""
    setup, gpu, model, conditions = point.setup, point.gpu, point.model, point.conditions
    return [
        log(model.num_params), log(model.num_active_params), float(model.num_layers), float(model.hidden_size),
        log(model.vocab_size), log(peak(point)), log(gpu.memory_bandwidth_bytes_per_s), float(gpu.sm_count or 0),
        log(setup.micro_batch_seqs), log(setup.accumulation_steps), log(setup.seq_len_tokens),
        log(setup.tokens_per_micro_batch), float(setup.method == "full"), float(setup.method == "qlora"),
        float(setup.lora_rank), float(setup.lora_targets == "all-linear"), float(setup.checkpointing),
        float(setup.kbit_fp32_cast), float(setup.autocast_dtype is not None), float(setup.compute_dtype == "fp16"),
        float(setup.attention == "eager"), float(setup.attention == "flash-attention-2"), float(setup.loss == "liger"),
        float(setup.compile), float(conditions.fused_norm_rope), float(conditions.fused_lora),
        float(conditions.masked_attention), float(conditions.optimizer_part), float(point.labels["num_gpus"]),
    ]  # fmt: skip


def boosted_regression(train: Sequence[Point], holdout: Sequence[Point]) -> list[float]:
    """Gradient-boosted trees on log(tokens/s): scikit-learn's histogram form, default depth, 300 rounds."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    machine = HistGradientBoostingRegressor(max_iter=300, learning_rate=0.08, min_samples_leaf=5, random_state=0)
    machine.fit([features(p) for p in train], [log(p.tokens_per_s) for p in train])
    return [exp(value) for value in machine.predict([features(p) for p in holdout])]


class Held:
    """One prediction of a point that was not fitted on: ours and the baselines'."""

    def __init__(self, point: Point, error: float, mfu: float, boosted: float) -> None:
        self.point, self.error = point, error
        self.mfu, self.boosted = log(mfu / point.tokens_per_s), log(boosted / point.tokens_per_s)


def splits(points: Sequence[Point]) -> Iterable[tuple[str, str, Callable[[Point], bool]]]:
    """(kind, source, which points are held out)."""
    for source in sorted({p.group for p in points}):
        yield "source", source, lambda p, s=source: p.group == s
    for source in sorted({p.group for p in points} - NOT_FITTED):
        mine = [p for p in points if p.group == source]
        gpus, models = sorted({p.gpu.key for p in mine}), sorted({p.labels["model"] for p in mine})
        for gpu in gpus if len(gpus) > 1 else ():
            yield "gpu", source, lambda p, s=source, g=gpu: p.group == s and p.gpu.key == g
        for model in models if len(models) > 1 else ():
            yield "model", source, lambda p, s=source, m=model: p.group == s and p.labels["model"] == m


def predict_held(points: Sequence[Point], start: Calibration) -> dict[str, list[Held]]:
    """Every held-out prediction by kind of split."""
    answers: dict[str, list[Held]] = defaultdict(list)
    for kind, source, held_out in splits(points):
        holdout = [p for p in points if held_out(p)]
        train = [p for p in points if not held_out(p) and p.group not in NOT_FITTED]
        fitted = fit_constants(train, start, names=FITTED)
        errors = log_errors(holdout, fitted)
        for point, error, mfu, boosted in zip(
            holdout, errors, constant_mfu(train, holdout), boosted_regression(train, holdout), strict=True
        ):
            answers[kind].append(Held(point, error, mfu, boosted))
        print(
            f"{kind:7s} {source:20s} held {len(holdout):4d}  median {_median(errors):.3f}", file=sys.stderr, flush=True
        )
    return answers


def _absolute(errors: Iterable[float]) -> list[float]:
    return [abs(exp(error) - 1.0) for error in errors]


def _median(errors: Iterable[float]) -> float:
    return median(_absolute(errors))


def noise(points: Sequence[Point]) -> list[float]:
    """Distances of repeats from their configuration's median."""
    return [abs(value / median(p.repeats) - 1.0) for p in points if len(p.repeats) > 1 for value in p.repeats]


def row(predictions: Sequence[Held]) -> dict[str, Any]:
    errors = _absolute(prediction.error for prediction in predictions)
    cells: dict[tuple[str, str], list[Held]] = defaultdict(list)
    for prediction in predictions:
        cells[prediction.point.labels["model"], prediction.point.gpu.key].append(prediction)
    ranks = []
    for cell in (cell for cell in cells.values() if len(cell) >= 4):
        measured = [held.point.tokens_per_s for held in cell]
        predicted = [held.point.tokens_per_s * exp(held.error) for held in cell]
        ranks.append((spearman(measured, predicted), len(cell)))
    floor = noise([prediction.point for prediction in predictions])
    return {
        "n": len(predictions),
        "median": median(errors),
        "p90": percentile(errors, 0.9),
        "bias": median(prediction.error for prediction in predictions),
        "rank_mean": sum(rank * num for rank, num in ranks) / sum(num for _, num in ranks) if ranks else None,
        "rank_worst": min(rank for rank, _ in ranks) if ranks else None,
        "mfu_median": _median(prediction.mfu for prediction in predictions),
        "mfu_p90": percentile(_absolute(prediction.mfu for prediction in predictions), 0.9),
        "boosted_median": _median(prediction.boosted for prediction in predictions),
        "boosted_p90": percentile(_absolute(prediction.boosted for prediction in predictions), 0.9),
        "noise_median": median(floor) if floor else None,
        "noise_p90": percentile(floor, 0.9) if floor else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write-calibration", action="store_true")
    arguments = parser.parse_args()
    points = load_points()
    # held-out fits start from the stated values, never from constants that have seen these points
    shipped = load_calibration()
    apart = {name: shipped.constants[name] for name in SET_APART}
    start = replace(shipped, constants=apart, date="", points={})
    answers = predict_held(points, start)
    usable = {kind: [held for held in every if held.point.group not in NOT_FITTED] for kind, every in answers.items()}
    predicted = {held.point.key: held.point.tokens_per_s * exp(held.error) for held in answers["source"]}
    single = [held for held in usable["source"] if held.point.labels["num_gpus"] == "1"]
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "rows": {
            kind: {
                source: row([held for held in predictions if held.point.group == source])
                for source in sorted({held.point.group for held in predictions})
            }
            for kind, predictions in answers.items()
        },
        "single_gpu": row(single),
        "single_gpu_confidence_a": row([held for held in single if held.point.labels["confidence"] == "A"]),
        "ratios": {},
    }
    for name in RATIOS:
        errors = ratio_errors(points, predicted, name)
        if errors:
            report["ratios"][name] = {"pairs": len(errors), "median": median(errors), "p90": percentile(errors, 0.9)}
    fitted_on = [p for p in points if p.group not in NOT_FITTED]
    if arguments.write_calibration:
        write_calibration(fit_constants(fitted_on, start, names=FITTED), fitted_on, report)
    JSON_FILE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    marked(DOCS / "speed-accuracy.md", "speed_accuracy", tables(report))


def tables(report: Mapping[str, Any]) -> str:
    text = f"{report['date']}\n"
    unknown = {}
    for kind, title in SPLITS.items():
        rows = dict(report["rows"].get(kind, {}))
        if kind == "source":
            unknown = {name: rows.pop(name) for name in sorted(NOT_FITTED & set(rows))}
            rows["**one GPU, all sources**"] = report["single_gpu"]
            rows["**one GPU, complete configuration (A)**"] = report["single_gpu_confidence_a"]
        text += f"\n## {title}\n\n{HEAD}" + "".join(line(name, figures) for name, figures in rows.items())
    text += f"\n## Sample lengths not stated\n\n{HEAD}" + "".join(line(*entry) for entry in unknown.items())
    text += "\n## Ratios\n\n| ratio | pairs | median error | 90th pct. |\n|---|--:|--:|--:|\n"
    for name, summary in report["ratios"].items():
        text += f"| {name} | {summary['pairs']} | {percent(summary['median'])} | {percent(summary['p90'])} |\n"
    return text


def percent(*values: float | None) -> str:
    """Shares, nothing where they are not known."""
    return " / ".join(f"{100 * value:.1f} %" for value in values if value is not None)


def line(name: str, figures: Mapping[str, Any]) -> str:
    """A row of `HEAD`."""
    rank = "" if figures["rank_mean"] is None else f"{figures['rank_mean']:.2f} ({figures['rank_worst']:.2f})"
    pairs = (percent(figures[f"{what}_median"], figures[f"{what}_p90"]) for what in ("noise", "mfu", "boosted"))
    cells = [name, str(figures["n"]), percent(figures["median"]), percent(figures["p90"]), rank, *pairs]
    return f"| {' | '.join(cells)} |\n"


def write_calibration(fitted: Calibration, points: Sequence[Point], report: dict[str, Any]) -> None:
    """The calibration that ships with the planner: constants fitted on every usable point."""
    values = json.loads(DATA_FILE.read_text(encoding="utf-8"))
    sizes: dict[str, int] = defaultdict(int)
    for point in points:
        sizes[point.group] += 1
    values["date"] = report["date"]
    values["constants"] = {name: float(f"{value:.4g}") for name, value in fitted.constants.items()}
    values["points"] = {
        "spread": values["points"].get("spread", {}),  # fitted apart: benchmarks/multi_gpu_accuracy.py
        "sources": dict(sizes),
        "file": "benchmarks/data/speed_points.jsonl",
    }
    DATA_FILE.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
