"""Reserved memory of recorded runs with varying lengths: measured, all at the maximum, and over a shuffled epoch.

    python -m benchmarks.varying_lengths [--every 5] [--num 128] [--write]    # docs/accuracy/varying-lengths.md

ms-swift's runs (A100-80, fixed segments) state their data's lengths: 3,234.4 tokens with a standard deviation of
2,547.5, from 91 to 19,548; samples above the maximum length are left out (its default, `truncation_strategy: delete`).
The lengths here are drawn from a lognormal distribution of that mean and deviation; nothing is fitted to the memory
measured.
Source: modelscope/ms-swift docs/source_en/LLM/Benchmark.md at 4692215.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.measured import MeasuredRow, load_rows, newest_versions
from planner.core.units import gib
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.samples.lengths import OverLengths, micro_batches, stated_lengths

GROUP = "ms_swift_benchmark"
STATED = "3234.4:2547.5:91"
PAGE = Path(__file__).parent.parent / "docs" / "accuracy" / "varying-lengths.md"


def over(row: MeasuredRow, num: int) -> OverLengths:
    """One recorded row's memory over `num` micro-batches."""
    from probes.dryrun.varying import over_lengths

    assert row.setup is not None
    setup = row.setup.replace(expandable_segments=False)
    model = catalogue.load(row.model or "")
    assert model is not None
    lengths = stated_lengths(f"{STATED}:{setup.seq_len_tokens}")
    batches = micro_batches(
        lengths,
        micro_batch_seqs=setup.micro_batch_seqs,
        seq_len_tokens=setup.seq_len_tokens,
        num=num,
        seed=0,
    )
    return over_lengths(model, find_gpu(row.gpu or "a100-80gb"), setup, batches, source=STATED, seed=0)


def _page(lines: list[str], epoch: list[float], constant: list[float], command: str) -> str:
    def of(errors: list[float]) -> str:
        sizes = [abs(one) for one in errors]
        return (
            f"median {statistics.median(errors):+.1%} (absolute {statistics.median(sizes):.1%}), worst {max(sizes):.1%}"
        )

    return "\n".join(
        [
            "# Varying lengths",
            "",
            f"Written by `{command}`; do not edit by hand. Reserved memory of",
            "ms-swift's recorded runs on an A100-80 with fixed segments, whose data has 3,234 tokens in the mean",
            "(standard deviation 2,548, 91 to 19,548); samples above the maximum are left out. *Epoch*: a dry run's",
            "events replayed over shuffled micro-batches of a lognormal distribution of that mean and deviation.",
            "*At the maximum*: every micro-batch as long as the longest.",
            "",
            f"{len(lines)} runs. Epoch: {of(epoch)}. At the maximum: {of(constant)}.",
            "",
            "| model | method | batch | maximum | checkpointing | measured | epoch | error | at the maximum | error |",
            "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
            *lines,
            "",
        ]
    )


def main() -> None:
    """One line per row, then the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="every n-th row")
    parser.add_argument("--num", type=int, default=128, help="micro-batches")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = [row for row in load_rows() if row.group == GROUP and row.setup is not None and row.reserved_bytes]
    lines, epoch, constant = [], [], []
    for row in newest_versions(rows)[:: args.every]:
        assert row.setup is not None
        assert row.reserved_bytes is not None
        try:
            found = over(row, args.num)
        except Exception as error:  # a model that the libraries cannot trace: said, and the rest goes on
            print(f"{row.id}: {error}", flush=True)
            continue
        epoch.append(found.peak_reserved_bytes / row.reserved_bytes - 1)
        constant.append(found.constant_reserved_bytes / row.reserved_bytes - 1)
        one = row.setup
        lines.append(
            f"| {row.model} | {one.method} | {one.micro_batch_seqs} | {one.seq_len_tokens} | {one.checkpointing} "
            f"| {gib(row.reserved_bytes)} | {gib(found.peak_reserved_bytes)} | {epoch[-1]:+.1%} "
            f"| {gib(found.constant_reserved_bytes)} | {constant[-1]:+.1%} |"
        )
        print(lines[-1], flush=True)
    page = _page(lines, epoch, constant, f"python -m benchmarks.varying_lengths --write --every {args.every}")
    print(page.splitlines()[8])
    if args.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
