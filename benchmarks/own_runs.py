"""docs/accuracy/own-runs.md: every run that this project measured on a GPU, case by case, against formula and dry run.

python -m benchmarks.own_runs --write        # after `python -m benchmarks.accuracy --out docs/accuracy` of both levels
python -m benchmarks.own_runs --judge        # predicts every run anew (torch, a minute) and holds it against AIMS
"""

import csv
import sys
from collections.abc import Iterable, Iterator
from statistics import median

from benchmarks.accuracy_summary import FOLDER
from benchmarks.measured import MeasuredRow, own_rows
from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.predict import predict
from planner.setup.outcome import Prediction

PAGE = FOLDER / "own-runs.md"
HEAD = """# The project's own runs on a GPU

Written by `python -m benchmarks.own_runs --write`. TRL's own trainer on random weights, every sequence full; device
memory is the driver's, less what it kept before. Measured tokens/s are of the median optimizer step after the first,
with the 3 to 14 ms that the trainer takes between two. Of a prediction its error is shown, of device memory the
difference. `--judge` shows the dry run's speed beside them and what misses its aim; operators.md has its seconds.

"""
AIMS = {
    ("dry run", "allocated"): 0.002,
    ("dry run", "reserved"): 0.015,
    ("dry run", "device"): 0.2,
    ("dry run", "speed"): 0.10,
    ("formula", "allocated"): 0.007,
    ("formula", "reserved"): 0.02,
    ("formula", "speed"): 0.10,
}
"""(level, figure) -> how far a run of TRL's on an H200 may be from what is predicted: fractions; device GiB."""
BOTH = "| formula | dry run "
COLUMNS = f"| case | allocated {BOTH}| reserved {BOTH}| device {BOTH}| tokens/s | formula |"


def page() -> str:
    """The page, from the tables of both levels beside it."""
    text = HEAD
    for group in sorted({row.group for row in own_rows()}):
        rows = [row for row in own_rows() if row.group == group]
        first = rows[0]
        stack = ", ".join(f"{name} {version}" for name, version in sorted(first.versions.items()))
        text += f"## {group}, {first.date}\n\n{len(rows)} runs on `{first.gpu}`: {stack}.\n\n"
        text += "\n".join(_table(rows)) + "\n"
        remarks = [(row.unmapped, row.config_id) for row in rows if row.unmapped]
        remarks += [(remark, row.config_id) for row in rows for remark in (*row.assumed, *row.differs)]
        cases: dict[str, list[str]] = {}
        for words, case in remarks:
            cases.setdefault(words, []).append(case)
        text += "\n" + "".join(f"- {', '.join(of)}: {words}.\n" for words, of in cases.items()) + "\n"
    return text.rstrip() + "\n"


def _table(rows: Iterable[MeasuredRow]) -> list[str]:
    errors = {
        (level, what): _predicted(level, what)
        for level in ("formula", "dry-run")
        for what in ("allocated", "reserved", "device", "tokens-per-s")
        if (level, what) != ("dry-run", "tokens-per-s")
    }
    lines, all_errors = [COLUMNS, "|---" + "|---:" * 11 + "|"], dict[tuple[str, str], list[float]]()
    for row in rows:
        cells = [row.config_id]
        for what, measured in (
            ("allocated", row.allocated_bytes),
            ("reserved", row.reserved_bytes),
            ("device", row.device_bytes),
        ):
            cells.append(f"{measured / GIB:.2f}" if measured else "")
            for level in ("formula", "dry-run"):
                cells.append(
                    _cell(errors[level, what].get(row.id), measured, what, all_errors.setdefault((level, what), []))
                )
        cells.append(f"{row.tokens_per_s or 0:,.0f}")
        speeds = all_errors.setdefault(("formula", "speed"), [])
        cells.append(_cell(errors["formula", "tokens-per-s"].get(row.id), row.tokens_per_s, "speed", speeds))
        lines.append(f"| {' | '.join(cells)} |")
    for name, of in (("median", median), ("worst", max)):
        summary = [name]
        for what in ("allocated", "reserved", "device"):
            summary += ["", *(_shown(of(all_errors[level, what]), what, "") for level in ("formula", "dry-run"))]
        lines.append(f"| {' | '.join([*summary, '', _shown(of(all_errors['formula', 'speed']), 'speed', '')])} |")
    return lines


def _predicted(level: str, what: str) -> dict[str, float]:
    with open(FOLDER / f"{level}-{what}.csv", newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["predicted"]) for row in csv.DictReader(file)}


def _cell(predicted: float | None, measured: float | None, what: str, seen: list[float]) -> str:
    if predicted is None or not measured:
        return ""
    error = (predicted - measured) / GIB if what == "device" else predicted / measured - 1
    seen.append(abs(error))
    return _shown(error, what, "+")


def _shown(error: float, what: str, sign: str) -> str:
    if what == "device":
        return f"{error:{sign}.2f} GiB"
    return f"{100 * error:{sign}.{1 if what == 'speed' else 2}f} %"


def judged() -> Iterator[tuple[str, dict[tuple[str, str], float]]]:
    """Every run that a setup can say, with the error of each figure of both levels, as they are predicted now."""
    from finetune_planner.app.levels import dry_run_setup

    for row in own_rows():
        model = catalogue.load(row.model or "")
        if row.setup is None or row.gpu is None or model is None:
            continue
        card, errors = find_gpu(row.gpu), dict[tuple[str, str], float]()
        levels = {"formula": predict(model, card, row.setup), "dry run": dry_run_setup(model, card, row.setup)}
        for level, prediction in levels.items():
            if not isinstance(prediction, Prediction):
                continue
            for what in ("allocated", "reserved"):
                measured = getattr(row, f"{what}_bytes")
                errors[level, what] = getattr(prediction, f"peak_{what}_bytes") / measured - 1
            if row.device_bytes:
                errors[level, "device"] = (prediction.peak_device_bytes - row.device_bytes) / GIB
            if prediction.tokens_per_s and row.tokens_per_s:
                errors[level, "speed"] = prediction.tokens_per_s / row.tokens_per_s - 1
        yield row.id, errors


def _judge() -> None:
    """Prints every figure and what misses its aim."""
    for case, errors in judged():
        shown = [f"{level} {what} {_shown(error, what, '+')}" for (level, what), error in errors.items()]
        missed = [
            f"{level} {what}" for (level, what), error in errors.items() if abs(error) > AIMS.get((level, what), 9e9)
        ]
        print(f"{case}: {', '.join(shown)}" + f" MISSED: {', '.join(missed)}" * bool(missed), flush=True)


if __name__ == "__main__":
    if "--judge" in sys.argv:
        _judge()
        sys.exit()
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    print(page(), end="")
