"""The short answer: what to train with, where the memory goes, what stands beside it, what to type next, the verdict
last. At most MAX_LINES at 80 columns; the tree, every term and every note are asked for."""

from collections.abc import Sequence
from io import StringIO

from rich.console import Console

from planner.outcome import Candidate
from planner.plan import Plan
from planner.units import gib
from reports.page import Page
from reports.rows import MIN_SHOWN_BYTES, best_terms, breakdown, compared
from reports.text import (
    clean,
    epoch_sentence,
    memory_mark,
    memory_sentence,
    plural,
    speed_sentence,
    spread_sentence,
    verdict_sentence,
    workload_words,
)

MAX_LINES = 25
NUM_BESIDE = 3
GROUPS = (
    ("weights", ("weights", "dequantization")),
    ("trained: adapters, gradients, states", ("adapters", "gradients", "optimizer")),
    ("activations", ("activations",)),
    ("loss", ("loss",)),
    ("workspace, gaps, CUDA context", ("workspace", "other", "residue", "gap", "context")),
)
"""Every category of memory in one of five groups; what is free and kept free follows."""
BAR_CELLS = 24
FREE = "free"


def group_bytes(candidate: Candidate, memory_bytes: int) -> dict[str, int]:
    """The five groups of memory at the peak, and what is free of the card (negative: what is missing)."""
    rows = breakdown(candidate, memory_bytes).rows
    groups = (*GROUPS, (FREE, ("free", "headroom")))
    return {label: sum(row.size_bytes for row in rows if row.category in kinds) for label, kinds in groups}


def render_brief(plan: Plan, console: Console, *, next_command: str, launches: Sequence[str] = ()) -> None:
    """The answer in MAX_LINES: notes and alternatives as far as there is room for them, else their number."""
    notes = list(dict.fromkeys(clean(note) for note in (*plan.chosen.notes, *plan.notes) if note))

    def write(page: Page, shown: int, beside: int) -> None:
        _brief(page, plan, notes[:shown], len(notes) - shown, beside, next_command, launches)

    def height(shown: int, beside: int) -> int:
        text = StringIO()
        write(Page(Console(file=text, width=console.width)), shown, beside)
        return text.getvalue().count("\n")

    rooms = [(shown, NUM_BESIDE) for shown in range(len(notes), -1, -1)]
    rooms += [(0, beside) for beside in range(NUM_BESIDE - 1, -1, -1)]
    write(Page(console), *next((room for room in rooms if height(*room) <= MAX_LINES), rooms[-1]))


def _brief(
    page: Page, plan: Plan, notes: list[str], left: int, beside: int, command: str, launches: Sequence[str]
) -> None:
    chosen = plan.chosen
    page.line(workload_words(plan.workload), style="bold")
    page.line(verdict_sentence(plan))
    for sentence in (spread_sentence(chosen), epoch_sentence(plan.workload, chosen)):
        if sentence:
            page.line(sentence)
    page.line()
    _groups(page, plan)
    _beside(page, plan, beside)
    if notes or left:
        page.line()
    for note in notes:
        page.line(f"· {note}")
    if left:
        page.line(f"· {left} more {plural(left, 'note')}: --all", style="dim")
    page.line()
    page.line("Next (--why: the decision tree, --memory: every term, --all: everything)", style="dim")
    page.command(command)
    for sentence in launches:
        page.line(clean(sentence), style="bold red" if "PREDICTED" in sentence else "")
    verdict = " ".join(one for one in (memory_sentence(chosen), speed_sentence(chosen)) if one)
    page.line(verdict, style="bold green" if chosen.fits else "bold red")


def _groups(page: Page, plan: Plan) -> None:
    """Five groups of memory as bars against the card."""
    memory_bytes = plan.workload.memory_bytes
    sizes = group_bytes(plan.chosen, memory_bytes)
    kept_free = sum(row.size_bytes for row in breakdown(plan.chosen, memory_bytes).rows if row.category == "headroom")
    table = page.table("memory", "size", "bar", right=("size",), fixed=("bar",), header=False)
    for label, size in sizes.items():
        cells = min(BAR_CELLS, max(1, round(BAR_CELLS * size / memory_bytes)))
        if size >= MIN_SHOWN_BYTES:
            words = f"free, {gib(kept_free)} of it kept free" if label == FREE else label
            page.row(table, words, gib(size), ("░" if label == FREE else "█") * cells)
    page.console.print(table)
    mark = memory_mark(best_terms(plan.chosen))
    page.line(f"of {gib(memory_bytes)} at the peak [{mark}]", style="dim")


def _beside(page: Page, plan: Plan, number: int) -> None:
    """A few alternatives with what they cost or buy."""
    rows = compared(plan)[1 : number + 1]
    if not rows:
        return
    page.line()
    table = page.table("instead", "tokens/s", "peak", "costs or buys", right=("tokens/s", "peak"), header=False)
    for row in rows:
        speed = f"{row.speed.tokens_per_s:,.0f} tokens/s" if row.speed.tokens_per_s else "-"
        page.row(table, clean(row.label), speed, gib(row.peak.peak_device_bytes), clean(row.trade))
    page.console.print(table)
