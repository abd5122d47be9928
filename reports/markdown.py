"""report.md: the plan as Markdown that reads well as plain text too."""

import re
from collections.abc import Iterable, Sequence

from planner.core.units import gib, percent, seconds
from planner.planning.plan import NoPlan, Plan
from planner.setup.outcome import Candidate, ProbeFailure
from reports import text
from reports.extras import Extras
from reports.plain import clean
from reports.rows import SOURCE_HEADER, breakdown, compared, compared_words, evidence_columns, notes_of, source_rows
from reports.setup_text import setup_difference, setup_words, workload_words

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~#&])")


def plan_markdown(plan: Plan | NoPlan, extras: Extras | None = None) -> str:
    extras = extras or Extras()
    blocks: list[str] = []
    if isinstance(plan, Plan):
        chosen = plan.chosen
        blocks += [f"**{escape(text.verdict_sentence(plan))}**", bullets(text.plan_sentences(plan))]
    else:
        chosen = plan.nearest
        blocks += [
            f"**Nothing fits: {gib(plan.missing_bytes)} missing.**",
            f"The nearest setup is {escape(setup_words(chosen.setup))}. {escape(text.memory_sentence(chosen))}",
            "## What would make it fit, smallest change first",
            table(text.REMEDY_HEADER, text.remedy_rows(plan), right=("saves",))
            if plan.remedies
            else "No single change is enough.",
        ]
    blocks += _memory(chosen, plan.workload.memory_bytes)
    if isinstance(plan, Plan):
        blocks += _launch(extras)
    lines = []
    for number, answer in enumerate(plan.tree, 1):
        lines.append(f"{number}. {escape(answer.question)} **{escape(answer.choice)}**")
        lines.append(f"   {escape(answer.reason)}")
        if words := text.needs_words(answer.needed_bytes, answer.budget_bytes):
            lines.append(f"   ({words})")
        for cut in answer.cuts:
            lines.append(f"   - cut: {escape(text.cut_words(cut, answer))}")
    blocks += ["## Why: the decision tree", "\n".join(lines)] if lines else []
    if isinstance(plan, Plan):
        blocks += [*_alternatives(plan), *_sensitivity(extras)]
    present = evidence_columns(chosen)
    rows: list[tuple[str, ...]] = []
    for name, evidence in present:
        if isinstance(evidence, ProbeFailure):
            rows.append((name, *("-",) * 5, text.failure_words(evidence)))
        else:
            step = seconds(evidence.step_time_s) if evidence.step_time_s else "-"
            speed = text.rate(evidence.tokens_per_s) if evidence.tokens_per_s else "-"
            peaks = (evidence.peak_allocated_bytes, evidence.peak_reserved_bytes, evidence.peak_device_bytes)
            marks = text.memory_mark(evidence) + (f"; {text.speed_mark(evidence)}" if evidence.tokens_per_s else "")
            rows.append((name, *(*(gib(peak) for peak in peaks), step, speed, marks)))
    header = ("level", "allocated", "reserved", "device", "step", "speed", "error bands (memory; speed)")
    blocks += [
        escape(text.space_sentence(plan)),
        *[
            "## Every level of the chosen setup",
            table(header, rows, right=("allocated", "reserved", "device", "step", "speed")),
        ],
    ]
    notes = notes_of(plan)
    if notes:
        blocks += ["## Notes", bullets(notes)]
    blocks += ["## Where this comes from", table(SOURCE_HEADER, source_rows(plan, extras))]
    return document(workload_words(plan.workload), *blocks)


def escape(words: str) -> str:
    """Text from outside, so that Markdown shows it as it is."""
    return _SPECIAL.sub(r"\\\1", clean(words))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A Markdown table with aligned columns; its cells are plain text."""
    body = [list(header), *([escape(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(row[column]) for row in body)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(cells, widths, header, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = (
        ("-" * (width - 1) + ":") if name in right else "-" * width for width, name in zip(widths, header, strict=True)
    )
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *(line(row) for row in body[1:])])


def document(title: str, *blocks: str) -> str:
    return "\n\n".join([f"# {escape(title)}", *filter(None, blocks)]) + "\n"


def bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {escape(item)}" for item in items)


def fenced(code: str, language: str = "") -> str:
    """A code block that its own content cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"


def _launch(extras: Extras) -> list[str]:
    if not extras.launch:
        return []
    written = [launch for launch in extras.launch if launch.files]
    blocks = ["## Launch", "In the directory of this plan:" if written else ""]
    for launch in written:
        files = ", ".join(escape(file.path) for file in launch.files)
        start = fenced(clean(launch.run or launch.command), "sh") if launch.command else ""
        blocks += [f"**{escape(launch.target)}** ({files})", start, bullets(launch.notes)]
    refused = [f"{launch.target}: {'; '.join(launch.notes)}" for launch in extras.launch if not launch.files]
    return [*blocks, *(["Not written:", bullets(refused)] if refused else ())]


def _memory(candidate: Candidate, memory_bytes: int) -> list[str]:
    parts = breakdown(candidate, memory_bytes, max_terms=20)
    peak = parts.peak_evidence
    rows = [
        (row.label, gib(row.size_bytes), percent(row.size_bytes / memory_bytes, 1), gib(row.end_bytes))
        for row in parts.rows
    ]
    words = f"The peak falls in the {parts.terms_evidence.peak_phase} phase. Peak: {text.memory_mark(peak)}."
    if parts.terms_evidence is not peak:
        words += f" Terms: {text.memory_mark(parts.terms_evidence)}."
    ranks = text.rank_peaks_rows(candidate)
    header = ("GPUs", "number", "peak", "of the fullest")
    return [
        f"## Memory at the peak of a {gib(memory_bytes)} card",
        table(("term", "size", "of the card", "up to"), rows, right=("size", "of the card", "up to")),
        escape(words),
        table(header, ranks, right=header[1:]) if ranks else "",
    ]


def _alternatives(plan: Plan) -> list[str]:
    if not plan.alternatives:
        return []
    rows = []
    chosen, shown = plan.chosen, compared(plan)
    for label, candidate, peak, speed, trade in shown:
        rows.append(
            (
                label,
                setup_difference(chosen.setup, candidate.setup),
                f"{speed.tokens_per_s:,.0f}" if speed.tokens_per_s else "-",
                text.speed_mark(speed),
                gib(peak.peak_device_bytes),
                text.memory_mark(peak),
                str(candidate.setup.lora_rank or "-"),
                text.fit_word(candidate),
                trade,
            )
        )
    header = ("", "difference", "tokens/s", "from", "peak", "from ", "rank", "fits", "what it costs or buys")
    words = escape(compared_words(plan, shown))
    return ["## Beside it", table(header, rows, right=("tokens/s", "peak", "rank")), words]


def _sensitivity(extras: Extras) -> list[str]:
    if not extras.sensitivity:
        return []
    rows = [
        (
            text.parameter_words(point.parameter),
            f"{point.value:,}" + (" (planned)" if point.chosen else ""),
            f"{point.tokens_per_s:,.0f}" if point.tokens_per_s else "-",
            gib(point.peak_device_bytes),
            text.FIT_WORDS[point.verdict],
            point.level.replace("_", " "),
        )
        for point in extras.sensitivity
    ]
    header = ("what moves", "value", "tokens/s", "peak", "fits", "from")
    return ["## If one thing moved", table(header, rows, right=("value", "tokens/s", "peak"))]
