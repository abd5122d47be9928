"""The short table of how far to trust a figure, in README.md and docs/accuracy/README.md, out of the tables there.

    python -m benchmarks.accuracy_summary --write

Every cell is one of `docs/accuracy/formula.md` and `dry-run.md`, which `plan accuracy` writes. Run it after them.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "accuracy"
PAGES = (ROOT / "README.md", FOLDER / "README.md")
START, END = "<!-- written by benchmarks/accuracy_summary.py -->\n", "<!-- end -->\n"

ROWS = (
    ("peak allocated, runs that a setup expresses fully", "allocated", "expressed fully"),
    ("peak allocated, IBM fms_acceleration on A100", "allocated", "fms_acceleration"),
    ("peak allocated, plain loops on an RTX 4080", "allocated", "canifinetune"),
    ("peak allocated, plain loops on a T4, eager attention", "allocated", "fitcheck"),
    ("peak allocated, litgpt's own stack, 2023 and 2024", "allocated", "litgpt"),
    ("peak reserved, PEFT's loop on an L40S", "reserved", "peft_metamathqa"),
    ("device memory by nvidia-smi, IBM fms_acceleration", "device", "fms_acceleration"),
    ("tokens/s, runs that a setup expresses fully", "tokens", "expressed fully"),
)
"""(what is said of it, word in the section's heading, row of the section's tables)."""

Cells = dict[str, str]


def summary() -> str:
    """The table in Markdown: per group of runs the median and 95th error of both rungs, and the false fits."""
    formula, dry_run = (_tables(FOLDER / f"{name}.md") for name in ("formula", "dry-run"))
    lines = [
        "| measured runs of others (configurations) | formula: median / 95th | dry run: the same | versions alone |",
        "|---|---:|---:|---:|",
    ]
    for said, what, row in ROWS:
        ours, theirs = formula[what][row], dry_run.get(what, {}).get(row)
        lines.append(
            f"| {said} ({ours['configurations']}) | {_errors(ours)} | {_errors(theirs)} | {ours['noise median']} |"
        )
    false_fits = (_false_fits("formula"), _false_fits("dry-run"))
    lines.append(f"| out of memory in reality, predicted to fit | {' | '.join(false_fits)} | |")
    return "\n".join(lines) + "\n"


def _errors(cells: Cells | None) -> str:
    return f"{cells['median']} / {cells['95th']}" if cells else ""


def _tables(path: Path) -> dict[str, dict[str, Cells]]:
    """Section by the quantity that its heading names -> row name -> cells by column."""
    found: dict[str, dict[str, Cells]] = {}
    for section in path.read_text(encoding="utf-8").split("\n## ")[1:]:
        what = next(word for word in ("allocated", "reserved", "device", "tokens") if word in section.lower())
        lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line] for line in lines]
        columns = rows[0][1:]
        found[what] = {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows if len(row) == len(columns) + 1}
    return found


def _false_fits(name: str) -> str:
    """Of the runs that went out of memory, those that were said to fit, as the first section counts them."""
    found = re.search(r"of (\d+) runs that went out of memory, (\d+) were", (FOLDER / f"{name}.md").read_text("utf-8"))
    assert found, name
    return f"{found[2]} of {found[1]}"


def written(page: Path) -> str:
    """A page with the table of today."""
    head, _, rest = page.read_text(encoding="utf-8").partition(START)
    return head + START + summary() + END + rest.partition(END)[2]


if __name__ == "__main__":
    for one in PAGES if "--write" in sys.argv else ():
        one.write_text(written(one), encoding="utf-8")
    print(summary(), end="")
