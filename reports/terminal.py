"""The answers on the terminal: readable at 80 columns, without colour, in a pipe and in a log file.

The short answer has the verdict, what to train with, where the memory goes, what was not chosen and why (or what would
make it fit), what to type next, at most MAX_LINES at 80 columns; the tree, every term and every note are asked for.

Meaning never rests on colour. Everything from outside (model names, messages) is printed as plain text, never as
markup, with control characters replaced.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console

from planner.core.notes import Place
from planner.core.units import TERA, count, gib
from planner.hardware.gpu import GpuSpec
from planner.memory.around import occasions
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.planning.plan import Answer, NoPlan, Plan
from planner.setup.outcome import Candidate, Fidelity
from reports import text
from reports.command import default_next_command
from reports.page import Page
from reports.plain import clean, plural
from reports.rows import (
    COMPARED_RIGHT,
    MIN_SHOWN_BYTES,
    MemoryRow,
    Row,
    best_terms,
    breakdown,
    compared,
    compared_cells,
    compared_words,
    failures,
    level_table,
    notes_of,
)
from reports.setup_text import setup_words, workload_words

if TYPE_CHECKING:
    from planner.samples.lengths import OverLengths

MAX_TERMS = 12
BAR_MIN, BAR_MAX = 16, 48
NARROW = 56
"""Columns of a terminal below which words are worth more than bars and further figures."""
MAX_TERM_WIDTH = 34
NUM_ENOUGH = 4
EVERYTHING = frozenset({"all"})


def render_plan(
    answer: Plan | NoPlan,
    console: Console,
    *,
    next_command: str = "",
    launches: Sequence[str] = (),
    show: Collection[str] = EVERYTHING,
    also: Sequence[str] = (),
) -> None:
    """The answer as a story: verdict, memory, the walk of the decision tree, what is beside it, notes, what to type.

    Without "all" in `show` the short answer, before it the tree ("why") and every term ("memory") where they are named.
    `also`: words of a command that plans again.
    """
    page, workload = Page(console), answer.workload
    replan_command = default_next_command(answer, also) if isinstance(answer, Plan) else ""
    if "all" not in show:
        if "why" in show:
            _tree(page, answer.tree)
            page.line(text.space_sentence(answer))
        if "memory" in show:
            _memory(page, answer.subject, answer.workload.memory_bytes)
            _around(page, answer.workload, answer.subject)
        if show:
            page.line()
        command = next_command or replan_command if isinstance(answer, Plan) else ""
        render_brief(answer, console, next_command=command, launches=launches)
        return
    page.line(workload_words(workload), style="bold")
    page.line()
    # What to do, and what to know of the launch files; else how much is missing, and which changes are enough.
    if isinstance(answer, Plan):
        page.line(text.verdict_sentence(answer), style=text.verdict_style(answer.chosen))
        for sentence in text.plan_sentences(answer):
            page.line(sentence)
    else:
        page.line(text.nothing_sentence(answer), style="bold red")
        page.line(text.nearest_sentence(answer))
    for sentence in launches:
        page.line(clean(sentence), style=text.sentence_style(sentence))
    if isinstance(answer, NoPlan):
        page.head("What would make it fit, smallest change first")
        if answer.suggestions:
            page.whole(text.SUGGESTION_HEADER, text.suggestion_rows(answer), right=("saves",))
        else:
            page.line("No single change is enough.", indent=2)
    _memory(page, answer.subject, workload.memory_bytes)
    if isinstance(answer, Plan):
        _around(page, workload, answer.chosen)
    _tree(page, answer.tree)
    if isinstance(answer, Plan):
        _alternatives(page, answer)
    page.line()
    page.line(text.space_sentence(answer))
    _notes(page, notes_of(answer))
    if isinstance(answer, Plan):
        page.head("Next")
        fits = answer.chosen.fits
        if not fits:
            page.line("Plan again with a larger reserve, so that a smaller setup is chosen:", indent=2)
        page.command(next_command if next_command and fits else replan_command)


def render_estimate(
    candidate: Candidate,
    model: ModelSpec,
    gpu: GpuSpec,
    console: Console,
    *,
    memory_bytes: int | None = None,
    notes: Sequence[str] = (),
    enough: Sequence[str] | None = None,
    over: "OverLengths | None" = None,
) -> None:
    """One setup: does it fit, else what is `enough` alone (empty: nothing is), the levels side by side, and where the
    memory goes; `notes` beside those of the level."""
    page = Page(console)
    card = clean(gpu.name) if candidate.setup.num_gpus == 1 else f"{candidate.setup.num_gpus} × {clean(gpu.name)}"
    page.line(f"{clean(model.model_id)} ({count(model.num_params)} parameters) on {card}", style="bold")
    page.line(f"{setup_words(candidate.setup)}.")
    page.line()
    page.line(text.memory_sentence(candidate), style=text.verdict_style(candidate))
    for words in (text.speed_sentence(candidate), text.layout_sentence(candidate)):
        if words:
            page.line(words)
    if over is not None:
        page.line(text.lengths_sentence(over))
    if enough:
        page.line(f"One change should be enough: {', or '.join(enough[:NUM_ENOUGH])}.")
    elif enough is not None:
        page.line("No single change is enough: plan MODEL --gpu GPU looks for a setup that fits.")
    page.head("Every level")
    header, rows = level_table(candidate)
    page.whole(header, rows, right=header[1:])
    for words in failures(candidate):
        page.line(words, indent=2)
    _memory(page, candidate, memory_bytes or gpu.memory_bytes)
    _notes(page, (*notes, *candidate.notes))


def _memory(page: Page, candidate: Candidate, memory_bytes: int) -> None:
    """The breakdown as a waterfall against the card: each term starts where the one above it ends."""
    parts = breakdown(candidate, memory_bytes, max_terms=MAX_TERMS)
    peak, named = parts.peak_evidence, best_terms(candidate)
    card = "card" if candidate.setup.num_gpus == 1 else "card, the fullest GPU"
    page.head(f"Memory at the peak ({named.peak_phase}) of a {gib(memory_bytes)} {card}", text.memory_mark(peak))
    scale_bytes = max(memory_bytes, peak.peak_device_bytes)
    longest = max(len(row.label) for row in parts.rows)
    whole = MemoryRow(category="other", label="peak on the device", size_bytes=peak.peak_device_bytes, start_bytes=0)
    term_width = 2 + max(len(whole.label), min(MAX_TERM_WIDTH, longest))
    width = max(BAR_MIN, min(BAR_MAX, page.console.width - term_width - 2 - len("139.80 GiB") - 2 - 1))
    columns = ("  term", "size", "bar")[: 2 if page.console.width < NARROW else 3]
    table = page.table(*columns, right=("size",), fixed=("bar",), header=False)
    table.columns[0].max_width = term_width
    for row in (*parts.rows, whole):
        filled = "░" if row.category in ("free", "headroom") else "█"
        bar = [_bar(row, scale_bytes, memory_bytes, width, filled)] * (len(columns) > 2)
        style = "bold" if row is whole else ""
        page.row(table, text.hanging(row.label, term_width), gib(row.size_bytes), *bar, style=style)
    page.show(table)
    for name, number, size, share in text.rank_peaks_rows(candidate):
        page.line(f"{name}, {number} {plural(int(number), 'GPU')}: {size} ({share} of the fullest)", indent=2)
    allocated, reserved = gib(peak.peak_allocated_bytes), gib(peak.peak_reserved_bytes)
    page.line(f"PyTorch would report {allocated} allocated, {reserved} reserved.", style="dim", indent=2)
    if named is not peak:
        page.line(f"The terms are from: {text.memory_mark(named)}.", style="dim", indent=2)


def _bar(row: MemoryRow, scale_bytes: int, memory_bytes: int, width: int, filled: str) -> str:
    """A slice as text; every slice that is not empty shows at least one cell, "│" marks the end of the card."""
    start = min(width - 1, max(0, row.start_bytes * width // scale_bytes))
    end = min(width, max(start + 1, -(-row.end_bytes * width // scale_bytes)))
    end = max(start + 1, min(end, round(row.end_bytes * width / scale_bytes)))
    limit = min(width, memory_bytes * width // scale_bytes)
    cells = [" "] * start + [filled] * (end - start) + [" "] * (width - end)
    return "".join([*cells[:limit], "│", *cells[limit:]]).rstrip()


def _around(page: Page, workload: Workload, chosen: Candidate) -> None:
    """What evaluating, saving and merging take, with the setting that keeps it so; one GPU."""
    if chosen.setup.num_gpus > 1:
        return
    page.head("Around the steps, at most", text.LEVEL_WORDS[Fidelity.FORMULA])
    rows = []
    for occasion in occasions(workload.model, workload.gpu, chosen.setup):
        device, host = (gib(size) if size else "-" for size in (occasion.device_bytes, occasion.host_bytes))
        over = "does not fit; " if occasion.device_bytes > workload.memory_bytes else ""
        rows.append((f"  {occasion.name}", device, host, over + occasion.setting))
    page.whole(("  what", "device", "host", "kept so by"), rows, right=("device", "host"))


def _tree(page: Page, walk: Sequence[Answer]) -> None:
    if not walk:
        return
    page.head("Why: the decision tree, question by question")
    for number, answer in enumerate(walk, 1):
        page.line(f"{number}. {clean(answer.question)} → {clean(answer.choice)}", indent=1)
        page.line(clean(answer.reason), indent=4)
        if words := text.needs_words(answer.needed_bytes, answer.budget_bytes):
            page.line(words, indent=4, style="dim")
        for cut in answer.cuts:
            page.line(f"✗ {text.cut_words(cut, answer)}", indent=6)


def _alternatives(page: Page, plan: Plan) -> None:
    if not plan.alternatives:
        return
    page.head("Beside it")
    more = [] if page.console.width < NARROW else ["what it costs or buys"]
    columns = ["", "tokens/s", "peak", *(["rank"] if more else ()), "fits"]
    columns += (["from", "difference"] if page.console.width >= 110 else []) + more
    table = page.table(*columns, right=COMPARED_RIGHT)
    rows = compared(plan)
    for row in rows:
        cells = compared_cells(plan, row)
        page.row(table, *(cells[column] for column in columns), style="bold" if row.candidate is plan.chosen else "")
    page.show(table)
    page.line(compared_words(plan, rows), style="dim", indent=2)


def _notes(page: Page, notes: Iterable[str]) -> None:
    unique = list(dict.fromkeys(clean(note) for note in notes if note))
    if not unique:
        return
    page.head("Notes")
    for note in unique:
        page.line(f"· {note}", indent=2)


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
    """The answer in MAX_LINES (a line or two more, where the first risk has no room else): risks before alternatives,
    other notes as far as there is room for them, else their number."""
    notes = notes_of(answer)

    def write(page: Page, shown: int, num_alternatives: int) -> None:
        for part in parts(shown, num_alternatives):
            part(page)

    def parts(shown: int, num_alternatives: int) -> Iterator[Part]:
        yield head
        yield besides[num_alternatives]
        yield partial(_brief_notes, notes=notes[:shown])
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
        partial(_alternatives_or_suggestions, answer=answer, number=number) for number in range(NUM_ALTERNATIVES + 1)
    ]

    # a refusal says what works; the risks are of a setup that nobody runs
    urgent = sum(note.place <= Place.RISK for note in notes) if isinstance(answer, Plan) else 0
    whole = range(len(notes), urgent - 1, -1)
    first_fit = bisect_left(
        whole, True, key=lambda shown: height(shown, NUM_ALTERNATIVES) <= MAX_LINES
    )  # fewer are never higher
    if first_fit < len(whole):
        write(Page(console), whole[first_fit], NUM_ALTERNATIVES)
        return
    rooms = [
        (shown, num_alternatives)
        for shown in range(urgent, min(urgent, 1) - 1, -1)
        for num_alternatives in range(NUM_ALTERNATIVES, -1, -1)
    ]
    write(Page(console), *next((room for room in rooms if height(*room) <= MAX_LINES), rooms[-1]))


def _head(page: Page, answer: Plan | NoPlan) -> None:
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


def _alternatives_or_suggestions(page: Page, answer: Plan | NoPlan, number: int) -> None:
    if isinstance(answer, NoPlan) and answer.suggestions and number:
        page.line()
        page.line("What would make it fit, smallest change first", style="bold")
        for suggestion in [change for change in answer.suggestions if change.fits][:number]:
            page.line(f"→ {clean(suggestion.action)}")
    if isinstance(answer, NoPlan):
        return
    chosen, *rows = compared(answer, number)
    if not rows:
        return
    page.line()
    table = page.table("instead", "tokens/s", "peak", "why not", right=("tokens/s", "peak"), header=False)
    for row in rows:
        speed = f"{row.speed.tokens_per_s:,.0f} tokens/s" if row.speed.tokens_per_s else "-"
        page.row(table, clean(row.label), speed, gib(row.peak.peak_device_bytes), why_not(chosen, row))
    page.show(table)


def _brief_notes(page: Page, notes: Sequence[str]) -> None:
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
    sizes = group_bytes(candidate, memory_bytes)
    shown = {label: size for label, size in sizes.items() if size >= MIN_SHOWN_BYTES}
    whole = max(memory_bytes, sum(shown.values()))
    width = min(BAR_CELLS, page.console.width - 1)
    ends, total = [], 0
    for size in shown.values():
        total += size
        ends.append(round(width * total / whole))
    cells = [max(1, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
    bar = "".join(MARKS[label] * number for label, number in zip(shown, cells, strict=True))
    of_card = f" of {gib(memory_bytes)}"
    if whole > memory_bytes:  # where the card ends
        end = round(width * memory_bytes / whole)
        bar, of_card = f"{bar[:end]}│{bar[end + 1 :]}", f"  │ card {gib(memory_bytes)}"
    page.line(bar)
    words = "  ".join(f"{MARKS[label]} {label} {gib(size)}" for label, size in shown.items())
    page.line(words + of_card, style="dim")


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


def render_gpus(rows: Iterable[GpuSpec], console: Console) -> None:
    """The GPU table: what `--gpu` takes, smallest memory first; without marketing names where they would cut keys."""
    page = Page(console)
    names, rate = (("name",), "bf16 TFLOP/s") if console.width >= 70 else ((), "TFLOP/s")
    table = page.table("--gpu", *names, "memory", rate, "GB/s", right=("memory", rate, "GB/s"))
    for gpu in sorted(rows, key=lambda row: (row.memory_bytes, row.key)):
        flops = f"{gpu.bf16_flops_per_s / TERA:.0f}" if gpu.bf16_flops_per_s else "no bf16" if names else "-"
        bandwidth = f"{gpu.memory_bandwidth_bytes_per_s / 1e9:,.0f}"
        name = [clean(gpu.name)] if names else []
        page.row(table, gpu.key, *name, gib(gpu.memory_bytes), flops, bandwidth)
    page.show(table)
    page.line("Memory is what torch reports as usable; TFLOP/s dense with fp32 accumulation.", style="dim")


def render_models(rows: Iterable[ModelSpec], console: Console) -> None:
    """The built-in catalogue: model names that need no network."""
    page = Page(console)
    table = page.table("model", "type", "parameters", "context", right=("parameters", "context"))
    for row in rows:
        context = f"{row.max_position_embeddings:,}" if row.max_position_embeddings else "-"
        page.row(table, clean(row.model_id), clean(row.model_type), count(row.num_params), context)
    page.show(table)
