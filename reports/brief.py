"""The short answer: what to train with, where the memory goes, what stands beside it or would make it fit, what to type
next, the verdict last. At most MAX_LINES at 80 columns; the tree, every term and every note are asked for."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from io import StringIO

from rich.console import Console

from planner.notes import Place
from planner.outcome import Candidate
from planner.plan import NoPlan, Plan
from planner.units import gib
from reports import text
from reports.page import Page
from reports.plain import clean, plural
from reports.rows import MIN_SHOWN_BYTES, best_terms, breakdown, compared, notes_of
from reports.setup_text import workload_words

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
MORE = "--why: the decision tree, --memory: every term, --all: the rest"
FREE = "free"
Part = Callable[[Page], None]


def group_bytes(candidate: Candidate, memory_bytes: int) -> dict[str, int]:
    """The five groups of memory at the peak, and what is free of the card (negative: what is missing)."""
    rows = breakdown(candidate, memory_bytes).rows
    groups = (*GROUPS, (FREE, ("free", "headroom")))
    return {label: sum(row.size_bytes for row in rows if row.category in kinds) for label, kinds in groups}


def render_brief(
    answer: Plan | NoPlan, console: Console, *, next_command: str = "", launches: Sequence[str] = ()
) -> None:
    """The answer in MAX_LINES: risks before alternatives, other notes as far as there is room for them, else their
    number."""
    notes = notes_of(answer)

    def write(page: Page, shown: int, beside: int) -> None:
        for part in parts(shown, beside):
            part(page)

    def parts(shown: int, beside: int) -> Iterator[Part]:
        yield head
        yield besides[beside]
        yield partial(_notes, notes=notes[:shown])
        yield partial(_end, answer=answer, left=len(notes) - shown, command=next_command, launches=launches)

    @cache
    def lines(part: Part) -> int:
        file = StringIO()
        # a size and no terminal: it would look for both at each line
        part(Page(Console(file=file, width=console.width, height=MAX_LINES, force_terminal=False)))
        return sum(max(1, -(-len(line) // console.width)) for line in file.getvalue().splitlines())

    def height(shown: int, beside: int) -> int:
        return sum(lines(part) for part in parts(shown, beside))

    head: Part = partial(_head, answer=answer)
    besides: list[Part] = [partial(_instead, answer=answer, number=number) for number in range(NUM_BESIDE + 1)]

    urgent = sum(note.place <= Place.RISK for note in notes)
    whole = range(len(notes), urgent - 1, -1)
    found = bisect_left(whole, True, key=lambda shown: height(shown, NUM_BESIDE) <= MAX_LINES)  # fewer are never higher
    if found < len(whole):
        write(Page(console), whole[found], NUM_BESIDE)
        return
    rooms = [(shown, beside) for shown in range(urgent, 0, -1) for beside in (NUM_BESIDE, NUM_BESIDE - 1)]
    rooms += [(0, beside) for beside in range(NUM_BESIDE, -1, -1)]
    write(Page(console), *next((room for room in rooms if height(*room) <= MAX_LINES), rooms[-1]))


def _head(page: Page, answer: Plan | NoPlan) -> None:
    """What to train with, and where the memory goes."""
    chosen = answer.subject
    page.line(workload_words(answer.workload), style="bold")
    page.line(text.verdict_sentence(answer) if isinstance(answer, Plan) else text.nearest_sentence(answer))
    workload = answer.workload
    for sentence in (
        text.spread_sentence(chosen),
        text.epoch_sentence(workload, chosen),
        text.data_sentence(workload),
    ):
        if sentence and isinstance(answer, Plan):
            page.line(sentence)
    page.line()
    _groups(page, chosen, answer.workload.memory_bytes)


def _instead(page: Page, answer: Plan | NoPlan, number: int) -> None:
    """A few alternatives, or what would make it fit."""
    if isinstance(answer, Plan):
        _beside(page, answer, number)
    elif answer.remedies and number:
        page.line()
        page.line("What would make it fit, smallest change first", style="bold")
        _remedies(page, answer, number)


def _notes(page: Page, notes: Sequence[str]) -> None:
    if notes:
        page.line()
    for note in notes:
        page.line(f"· {note}")


def _end(page: Page, answer: Plan | NoPlan, left: int, command: str, launches: Sequence[str]) -> None:
    """What to type next, and the verdict; `left`: notes that are not shown."""
    page.line()
    more = f"{MORE}, {left} {plural(left, 'note')}" if left else MORE
    page.line(f"Next ({more})" if command else more, style="dim")
    if command:
        page.command(command)
    for sentence in launches:
        page.line(clean(sentence), style=text.sentence_style(sentence))
    if isinstance(answer, Plan):
        verdict = " ".join(
            one for one in (text.memory_sentence(answer.chosen), text.speed_sentence(answer.chosen)) if one
        )
    else:
        verdict = text.nothing_sentence(answer)
    page.line(verdict, style=text.verdict_style(answer.subject))


def _groups(page: Page, candidate: Candidate, memory_bytes: int) -> None:
    """Five groups of memory as bars against the card."""
    sizes = group_bytes(candidate, memory_bytes)
    kept_free = sum(row.size_bytes for row in breakdown(candidate, memory_bytes).rows if row.category == "headroom")
    table = page.table("memory", "size", "bar", right=("size",), fixed=("bar",), header=False)
    for label, size in sizes.items():
        cells = min(BAR_CELLS, max(1, round(BAR_CELLS * size / memory_bytes)))
        if size >= MIN_SHOWN_BYTES:
            words = f"free, {gib(kept_free)} of it kept free" if label == FREE else label
            page.row(table, words, gib(size), ("░" if label == FREE else "█") * cells)
    page.show(table)
    mark = text.memory_mark(best_terms(candidate))
    page.line(f"of {gib(memory_bytes)} at the peak [{mark}]", style="dim")


def _beside(page: Page, plan: Plan, number: int) -> None:
    """A few alternatives with what they cost or buy."""
    rows = [row for row in compared(plan)[1:] if row.candidate.fits][:number]
    if not rows:
        return
    page.line()
    table = page.table("instead", "tokens/s", "peak", "costs or buys", right=("tokens/s", "peak"), header=False)
    for row in rows:
        speed = f"{row.speed.tokens_per_s:,.0f} tokens/s" if row.speed.tokens_per_s else "-"
        page.row(table, clean(row.label), speed, gib(row.peak.peak_device_bytes), clean(row.trade))
    page.show(table)


def _remedies(page: Page, no_plan: NoPlan, number: int) -> None:
    """A few changes that would make it fit, smallest change first."""
    for remedy in [one for one in no_plan.remedies if one.fits][:number]:
        page.line(f"→ {clean(remedy.action)}")
