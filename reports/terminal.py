"""The answers on the terminal: readable at 80 columns, without colour, in a pipe and in a log file.

Meaning never rests on colour. Everything from outside (model names, messages) is printed as plain text, never as
markup, with control characters replaced.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from planner.core.units import count, gib, percent, seconds
from planner.hardware.gpu import GpuSpec
from planner.memory.around import occasions
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.planning.plan import Answer, NoPlan, Plan
from planner.setup.outcome import Candidate, Evidence, Fidelity, Measurement, Prediction, ProbeFailure
from reports import text
from reports.brief import render_brief
from reports.command import default_next_command
from reports.page import Page
from reports.plain import clean, plural
from reports.rows import MemoryRow, best_terms, breakdown, compared, evidence_columns, notes_of
from reports.setup_text import setup_difference, setup_words, workload_words

if TYPE_CHECKING:
    from planner.samples.lengths import OverLengths

MAX_TERMS = 12
BAR_MIN, BAR_MAX = 16, 48
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
        if answer.remedies:
            page.whole(text.REMEDY_HEADER, text.remedy_rows(answer), right=("saves",))
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
        _next(page, answer, next_command, replan_command)


def _next(page: Page, plan: Plan, command: str, replan_command: str) -> None:
    page.head("Next")
    if not plan.chosen.fits:
        page.line("Plan again with a larger reserve, so that a smaller setup is chosen:", indent=2)
    page.command(command if command and plan.chosen.fits else replan_command)


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
    present = evidence_columns(candidate)
    levels = tuple(name for name, _ in present)
    page.whole(("", *levels), _level_rows(present), right=levels)
    for _, evidence in present:
        if isinstance(evidence, ProbeFailure):
            page.line(text.failure_words(evidence), indent=2)
    _memory(page, candidate, memory_bytes or gpu.memory_bytes)
    _notes(page, (*notes, *candidate.notes))


_LEVEL_FIGURES: tuple[tuple[str, Callable[[Prediction | Measurement], str]], ...] = (
    ("allocated peak", lambda evidence: gib(evidence.peak_allocated_bytes)),
    ("reserved peak", lambda evidence: gib(evidence.peak_reserved_bytes)),
    ("device peak", lambda evidence: gib(evidence.peak_device_bytes)),
    ("  error band", text.memory_band_text),
    ("peak in phase", lambda evidence: evidence.peak_phase if isinstance(evidence, Prediction) else "-"),
    ("step time", lambda evidence: "-" if evidence.step_time_s is None else seconds(evidence.step_time_s)),
    ("speed", lambda evidence: "-" if evidence.tokens_per_s is None else text.rate(evidence.tokens_per_s)),
    ("  error band", lambda evidence: text.speed_band(evidence) or "-"),
    ("share of peak FLOP/s", lambda evidence: "-" if evidence.mfu_fraction is None else percent(evidence.mfu_fraction)),
)
"""Label -> the figure of a level that knows it, in words."""


def _level_rows(present: Sequence[tuple[str, Evidence]]) -> Iterable[tuple[str, ...]]:
    """The figures of all levels, one line per figure; a level that failed says so in the first."""
    for number, (label, words) in enumerate(_LEVEL_FIGURES):
        none = "-" if number else "failed"
        yield label, *(none if isinstance(evidence, ProbeFailure) else words(evidence) for _, evidence in present)


def _memory(page: Page, candidate: Candidate, memory_bytes: int) -> None:
    """The breakdown as a waterfall against the card: each term starts where the one above it ends."""
    parts = breakdown(candidate, memory_bytes, max_terms=MAX_TERMS)
    peak, named = parts.peak_evidence, best_terms(candidate)
    card = "card" if candidate.setup.num_gpus == 1 else "card, the fullest GPU"
    page.head(f"Memory at the peak ({named.peak_phase}) of a {gib(memory_bytes)} {card}", text.memory_mark(peak))
    scale_bytes = max(memory_bytes, peak.peak_device_bytes)
    longest = max(len(row.label) for row in parts.rows)
    term_width = 2 + max(len("peak on the device"), min(MAX_TERM_WIDTH, longest))
    width = max(BAR_MIN, min(BAR_MAX, page.console.width - term_width - 2 - len("139.80 GiB") - 2 - 1))
    table = page.table("  term", "size", "bar", right=("size",), fixed=("bar",), header=False)
    table.columns[0].max_width = term_width
    for row in parts.rows:
        filled = "░" if row.category in ("free", "headroom") else "█"
        page.row(
            table,
            text.hanging(row.label, term_width),
            gib(row.size_bytes),
            _bar(row, scale_bytes, memory_bytes, width, filled),
        )
    whole = MemoryRow(category="other", label="", size_bytes=peak.peak_device_bytes, start_bytes=0)
    page.row(
        table,
        "  peak on the device",
        gib(peak.peak_device_bytes),
        _bar(whole, scale_bytes, memory_bytes, width, "█"),
        style="bold",
    )
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
    wide = page.console.width >= 110
    columns = (
        "",
        "tokens/s",
        "peak",
        "rank",
        "fits",
        *(("from", "difference") if wide else ()),
        "what it costs or buys",
    )
    table = page.table(*columns, right=("tokens/s", "peak", "rank"))
    rows = compared(plan)
    for label, candidate, peak, speed, trade in rows:
        setup = candidate.setup
        words = setup_difference(plan.chosen.setup, setup)
        extra = (text.speed_mark(speed), words) if wide else ()
        page.row(
            table,
            clean(label),
            f"{speed.tokens_per_s:,.0f}" if speed.tokens_per_s else "-",
            gib(peak.peak_device_bytes),
            str(setup.lora_rank) if setup.lora_rank else "-",
            text.fit_word(candidate),
            *extra,
            clean(trade),
            style="bold" if candidate is plan.chosen else "",
        )
    page.show(table)
    peaks = _marks([text.memory_mark(row.peak) for row in rows])
    speeds = _marks([text.speed_mark(row.speed) for row in rows])
    words = f"Peaks: {peaks}. Speeds: {speeds}."
    mine = plan.chosen.memory_evidence
    if mine is not rows[0].peak:
        mark = text.memory_mark(mine)
        words += f" One level for all rows, in the chosen setup's family corrected by its own peak ({mark})."
    page.line(words, style="dim", indent=2)


def _marks(marks: Sequence[str]) -> str:
    """The levels of a column: one word where all rows share it, else the chosen row's and the others'."""
    first, others = marks[0], list(dict.fromkeys(marks[1:]))
    return first if others in ([], [first]) else f"{first} (chosen), {', '.join(others)} (others)"


def _notes(page: Page, notes: Iterable[str]) -> None:
    unique = list(dict.fromkeys(clean(note) for note in notes if note))
    if not unique:
        return
    page.head("Notes")
    for note in unique:
        page.line(f"· {note}", indent=2)
