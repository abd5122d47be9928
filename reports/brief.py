"""The short answer: the verdict, what to train with, where the memory goes, what was not chosen and why (or what would
make it fit), what to type next. At most MAX_LINES at 80 columns; the tree, every term and every note are asked for."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from io import StringIO

from rich.console import Console

from planner.core.notes import Place
from planner.core.units import gib
from planner.planning.plan import NoPlan, Plan
from planner.setup.outcome import Candidate
from reports import text
from reports.page import Page
from reports.plain import clean, plural
from reports.rows import MIN_SHOWN_BYTES, Row, breakdown, compared, notes_of
from reports.setup_text import workload_words

MAX_LINES = 18
NUM_ALTERNATIVES = 3
GROUPS = (
    ("weights", ("weights", "dequantization")),
    ("trained", ("adapters", "gradients", "optimizer")),
    ("activations", ("activations",)),
    ("loss", ("loss",)),
    ("rest", ("workspace", "other", "residue", "gap", "context")),
)
"""Every category of memory in one of five groups; what is free and kept free follows."""
BAR_CELLS = 64
MARKS = {"weights": "█", "trained": "▓", "activations": "▒", "loss": "▚", "rest": "▪", "free": "░"}
MORE = "more: --why, --memory, --all; plan explain WORD"
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

    def write(page: Page, shown: int, num_alternatives: int) -> None:
        for part in parts(shown, num_alternatives):
            part(page)

    def parts(shown: int, num_alternatives: int) -> Iterator[Part]:
        yield head
        yield besides[num_alternatives]
        yield partial(_notes, notes=notes[:shown])
        yield partial(_end, left=len(notes) - shown, command=next_command, launches=launches)

    @cache
    def lines(part: Part) -> int:
        file = StringIO()
        # a size and no terminal: it would look for both at each line
        part(Page(Console(file=file, width=console.width, height=MAX_LINES, force_terminal=False)))
        return sum(max(1, -(-len(line) // console.width)) for line in file.getvalue().splitlines())

    def height(shown: int, num_alternatives: int) -> int:
        return sum(lines(part) for part in parts(shown, num_alternatives))

    head: Part = partial(_head, answer=answer)
    besides: list[Part] = [
        partial(_alternatives_or_remedies, answer=answer, number=number) for number in range(NUM_ALTERNATIVES + 1)
    ]

    urgent = sum(note.place <= Place.RISK for note in notes)
    whole = range(len(notes), urgent - 1, -1)
    first_fit = bisect_left(
        whole, True, key=lambda shown: height(shown, NUM_ALTERNATIVES) <= MAX_LINES
    )  # fewer are never higher
    if first_fit < len(whole):
        write(Page(console), whole[first_fit], NUM_ALTERNATIVES)
        return
    least = int(isinstance(answer, NoPlan) and bool(answer.remedies))  # a refusal says what works
    rooms = [
        (shown, num_alternatives)
        for shown in range(urgent, 0, -1)
        for num_alternatives in range(NUM_ALTERNATIVES, least - 1, -1)
    ]
    rooms += [(0, num_alternatives) for num_alternatives in range(NUM_ALTERNATIVES, -1, -1)]
    write(Page(console), *next((room for room in rooms if height(*room) <= MAX_LINES), rooms[-1]))


def _head(page: Page, answer: Plan | NoPlan) -> None:
    """The verdict, what to train with, and where the memory goes."""
    chosen = answer.subject
    page.line(workload_words(answer.workload), style="bold")
    if isinstance(answer, Plan):
        page.line(text.short_verdict(answer), style=text.verdict_style(chosen))
        layout = text.layout_sentence(chosen, answer.workload)
        for sentence in (layout, text.epoch_sentence(answer.workload, chosen)):
            if sentence:
                page.line(sentence)
        page.line(text.verdict_sentence(answer))
    else:
        page.line(text.nothing_sentence(answer), style="bold red")
        page.line(text.nearest_sentence(answer))
    _groups(page, chosen, answer.workload.memory_bytes)


def _alternatives_or_remedies(page: Page, answer: Plan | NoPlan, number: int) -> None:
    """A few alternatives, or what would make it fit."""
    if isinstance(answer, Plan):
        _alternatives(page, answer, number)
    elif answer.remedies and number:
        page.line()
        page.line("What would make it fit, smallest change first", style="bold")
        for remedy in [change for change in answer.remedies if change.fits][:number]:
            page.line(f"→ {clean(remedy.action)}")


def _notes(page: Page, notes: Sequence[str]) -> None:
    for note in notes:
        page.line(f"· {note}")


def _end(page: Page, left: int, command: str, launches: Sequence[str]) -> None:
    """What to know of the launch files, and what to type next; `left`: notes that are not shown."""
    page.line()
    for sentence in launches:
        page.line(clean(sentence), style=text.sentence_style(sentence))
    more = f"{MORE}; {left} {plural(left, 'note')}" if left else MORE
    page.line(f"Next ({more})" if command else more, style="dim")
    if command:
        page.command(command)


def _groups(page: Page, candidate: Candidate, memory_bytes: int) -> None:
    """Where the memory goes: one bar of the whole card, and what each mark stands for."""
    sizes = group_bytes(candidate, memory_bytes)
    shown = {label: size for label, size in sizes.items() if size >= MIN_SHOWN_BYTES}
    whole = max(memory_bytes, sum(shown.values()))
    width = min(BAR_CELLS, page.console.width - 1)
    ends, total = [], 0
    for size in shown.values():
        total += size
        ends.append(round(width * total / whole))
    cells = [max(1, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
    page.line("".join(MARKS[label] * number for label, number in zip(shown, cells, strict=True)))
    words = "  ".join(f"{MARKS[label]} {label} {gib(size)}" for label, size in shown.items())
    page.line(f"{words} of {gib(memory_bytes)}", style="dim")


def _alternatives(page: Page, plan: Plan, number: int) -> None:
    """A few alternatives, each with the reason why it is not the choice."""
    chosen, *others = compared(plan)
    rows = [row for row in others if row.candidate.fits][:number]
    if not rows:
        return
    page.line()
    table = page.table("instead", "tokens/s", "peak", "why not", right=("tokens/s", "peak"), header=False)
    for row in rows:
        speed = f"{row.speed.tokens_per_s:,.0f} tokens/s" if row.speed.tokens_per_s else "-"
        page.row(table, clean(row.label), speed, gib(row.peak.peak_device_bytes), why_not(chosen, row))
    page.show(table)


def why_not(chosen: Row, other: Row) -> str:
    """Why another setup that fits is not the choice: it is slower, or what its speed would cost."""
    mine, setup = chosen.candidate.setup, other.candidate.setup
    before, after = chosen.speed.tokens_per_s, other.speed.tokens_per_s
    if other.candidate.verdict == "tight":
        return "may run out of memory"
    if not before or not after:
        return clean(other.trade)
    percent_faster = 100 * (after / before - 1)
    if percent_faster < 0.5:
        return f"{-percent_faster:.0f} % slower" if percent_faster <= -0.5 else "as fast, not simpler or smaller"
    faster = f"{percent_faster:.0f} % faster"
    if setup.quantized and not mine.quantized:
        bits = "8" if setup.quantization == "int8" else "4"
        return f"{faster}, but {bits} bits cost quality"
    if setup.method == "full" and mine.method != "full":
        return f"{faster}; only when asked: --method full"
    if setup.lora_rank < mine.lora_rank:
        return f"{faster}, but a smaller rank learns less"
    if setup.precision != mine.precision:
        return f"{faster}, but in {setup.precision}"
    if other.peak.peak_device_bytes > chosen.peak.peak_device_bytes:
        return f"{faster}, less memory to spare"
    return clean(other.trade)
