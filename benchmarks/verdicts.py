"""What `plan check` says of every published run: of those that went through, and of those that ran out of memory.

    python -m benchmarks.verdicts            # the page docs/accuracy/verdicts.md, from the formula of today

An out-of-memory is *stated* where its source says so, *inferred* where a table leaves the run's figures empty.
"""

import sys
from collections import Counter, defaultdict

from benchmarks import gathered
from benchmarks.measured import MeasuredRow, load_rows
from benchmarks.shared import DOCS
from planner.core.errors import PlannerError
from planner.planning.check import Verdict, band_of, judge
from planner.planning.predict import predict

KINDS = ("went through", "out of memory, stated", "out of memory, inferred")


def kind_of(row: MeasuredRow) -> str:
    if row.status == "ok":
        return KINDS[0]
    return KINDS[2] if row.inferred else KINDS[1]


def verdicts() -> dict[tuple[str, Verdict], list[tuple[str, float]]]:
    """(kind, verdict) -> rows, each with its predicted device peak as a share of the card."""
    by_verdict = defaultdict(list)
    for row in (*load_rows(), *load_rows("multi"), *gathered.rows()):
        known = row.gpu is not None and (row.model is not None or row.config is not None)
        if row.setup is None or not known or row.unmapped or row.unmapped_memory:
            continue
        try:
            model, gpu = row.model_and_gpu()
            answer = predict(model, gpu, row.setup)
        except PlannerError:
            continue
        verdict = judge(answer, gpu.memory_bytes, band_of(answer))
        by_verdict[kind_of(row), verdict].append((row.id, answer.peak_device_bytes / gpu.memory_bytes))
    return by_verdict


def page() -> str:
    by_verdict = verdicts()
    lines = [
        "# Verdicts on published runs",
        "",
        "Written by `python -m benchmarks.verdicts`; do not edit by hand. What `plan check` says, by the formula, of",
        "the whole card: *uncertain* where the error band straddles it. An out-of-memory is inferred where a table",
        "leaves a run's figures empty. The last column counts by the peak alone, without its band.",
        "",
        "| runs | rows | fits | uncertain | does not fit | predicted peak below the card |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        counts = Counter({verdict: len(by_verdict[kind, verdict]) for verdict in Verdict})
        shares = [share for verdict in Verdict for _, share in by_verdict[kind, verdict]]
        cells = [str(counts[verdict]) for verdict in (Verdict.FITS, Verdict.UNCERTAIN, Verdict.DOES_NOT_FIT)]
        lines.append(f"| {kind} | {len(shares)} | {' | '.join(cells)} | {sum(share <= 1 for share in shares)} |")
    above = sorted(name for verdict in Verdict for name, share in by_verdict[KINDS[0], verdict] if share > 1)
    below = sorted(name for kind in KINDS[1:] for v in Verdict for name, share in by_verdict[kind, v] if share <= 1)
    lines += ["", f"Went through above the card by the peak alone: {', '.join(above) or 'none'}."]
    lines += ["", f"Out of memory below it: {', '.join(below) or 'none'}.", ""]
    return "\n".join(lines)


def main() -> None:
    text = page()
    (DOCS / "accuracy" / "verdicts.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
