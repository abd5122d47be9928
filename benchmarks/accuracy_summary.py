"""The short table of how far to trust a figure, in README.md and docs/accuracy/README.md, out of the tables there.

    python -m benchmarks.accuracy_summary --write

Every figure stands in a page that a command writes (`benchmarks.accuracy`, benchmarks of speed and of several GPUs).
Run it after them.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "accuracy"
PAGES = (ROOT / "README.md", FOLDER / "README.md")
START, END = "<!-- written by benchmarks/accuracy_summary.py -->\n", "<!-- end -->\n"
START_SENTENCES = "<!-- so is this -->\n"

ROWS = (
    ("peak allocated, runs that a setup expresses fully", "allocated", "expressed fully"),
    ("peak allocated, IBM fms_acceleration on A100", "allocated", "fms_acceleration"),
    ("peak allocated, plain loops on an RTX 4080", "allocated", "canifinetune"),
    ("peak allocated, plain loops on a T4, eager attention", "allocated", "fitcheck"),
    ("peak allocated, litgpt's own stack, 2023 and 2024", "allocated", "litgpt"),
    ("peak reserved, PEFT's loop on an L40S", "reserved", "peft_metamathqa"),
    ("device memory by nvidia-smi, IBM fms_acceleration", "device", "fms_acceleration"),
    ("tokens/s, runs that a setup expresses fully", "tokens", "expressed fully"),
    ("peak allocated, TRL's trainer on an H200", "allocated", "h200"),
    ("peak reserved, the same", "reserved", "h200"),
    ("device memory by NVML, the same", "device", "h200"),
    ("tokens/s, the same", "tokens", "h200"),
)
"""(what is said of it, word in the section's heading, row of the section's tables)."""

Cells = dict[str, str]


def summary() -> str:
    """The table in Markdown: per group of runs the median and 95th error of both levels, and the false fits."""
    formula, dry_run = (_tables(FOLDER / f"{name}.md") for name in ("formula", "dry-run"))
    lines = [
        "| measured runs (configurations) | formula: median / 95th | dry run: the same | versions alone |",
        "|---|---:|---:|---:|",
    ]
    for label, what, row in ROWS:
        ours, theirs = formula[what][row], dry_run.get(what, {}).get(row)
        lines.append(
            f"| {label} ({ours['configurations']}) | {_errors(ours)} | {_errors(theirs)} | {ours['noise median']} |"
        )
    false_fits = (_false_fits("formula"), _false_fits("dry-run"))
    lines.append(f"| out of memory in reality, predicted to fit | {' | '.join(false_fits)} | |")
    return "\n".join(lines) + "\n"


def sentences() -> str:
    """README's figures of speed and of several GPUs, each from the first table that has its row."""
    speed = _rows(ROOT / "docs" / "speed-accuracy.md")["**one GPU, complete configuration (A)**"]
    several = _rows(FOLDER / "multi-gpu.md")
    held_out, memory = several["tokens/s, source held out"], several["peak memory of the worst rank"]
    planned = several["the same without what FSDP 1 is known to keep"]
    num_several = re.search(r"\((\d+) configurations run by others", (FOLDER / "multi-gpu.md").read_text("utf-8"))
    assert num_several
    ranks = _rows(FOLDER / "spread-formula-vs-dry-run.md")["all points"]
    return f"""Speed, a whole source held out of the fit ({speed[0]} complete configurations on one GPU, [speed](docs/speed-accuracy.md)):
{speed[1]} median, {speed[2]} at the 90th percentile; runs that a setup expresses fully, above, hold small models and cards that
nothing was fitted on.

Several GPUs, against {num_several[1]} published configurations (nearly all FSDP 1; [table](docs/accuracy/multi-gpu.md)): tokens/s of a
held-out source {held_out[1]} / {held_out[2]} (median / 90th); memory {memory[1]} / {memory[2]} with what FSDP 1 keeps, {planned[1]} / {planned[2]} as
planned for FSDP2. The formula of one rank against its dry run: median {ranks[1]}, 95th {ranks[3]}, worst {ranks[4]}
([{ranks[0]} points](docs/accuracy/spread-formula-vs-dry-run.md)).
"""  # noqa: E501


def _rows(path: Path) -> dict[str, list[str]]:
    """First cell -> the others, of all tables of a page; the first of several rows of one name."""
    by_name: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            by_name.setdefault(name, cells)
    return by_name


def _errors(cells: Cells | None) -> str:
    return f"{cells['median']} / {cells['95th']}" if cells else ""


def _tables(path: Path) -> dict[str, dict[str, Cells]]:
    """Section by the quantity that its heading names -> row name -> cells by column."""
    tables: dict[str, dict[str, Cells]] = {}
    for section in path.read_text(encoding="utf-8").split("\n## ")[1:]:
        what = next(word for word in ("allocated", "reserved", "device", "tokens") if word in section.lower())
        lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line] for line in lines]
        columns = rows[0][1:]
        tables[what] = {
            row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows if len(row) == len(columns) + 1
        }
    return tables


def _false_fits(name: str) -> str:
    """Of the runs that went out of memory, those that were said to fit, as the first section counts them."""
    match = re.search(r"of (\d+) runs that went out of memory, (\d+) were", (FOLDER / f"{name}.md").read_text("utf-8"))
    assert match, name
    return f"{match[2]} of {match[1]}"


def written(page: Path) -> str:
    """A page with the table, and the sentences where it has them, of today."""
    text = page.read_text(encoding="utf-8")
    for start, today in ((START, summary), (START_SENTENCES, sentences)):
        head, marker, rest = text.partition(start)
        text = head + marker + today() + END + rest.partition(END)[2] if marker else text
    return text


if __name__ == "__main__":
    for one in PAGES if "--write" in sys.argv else ():
        one.write_text(written(one), encoding="utf-8")
    print(summary(), end="")
