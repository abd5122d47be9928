"""Rows from candidates: what the terminal, Markdown and HTML reports all draw, as plain data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from planner.core.notes import Note, place_of
from planner.core.records import dataclass
from planner.core.units import gib, percent, seconds
from planner.planning.decision.candidates import WhenAsked
from planner.planning.plan import NoPlan, Plan, on_one_level
from planner.setup.memory_terms import MemoryTerm
from planner.setup.outcome import Candidate, Measurement, Prediction, ProbeFailure
from reports.extras import Extras
from reports.plain import clean
from reports.setup_text import setup_difference
from reports.text import (
    LEVEL_WORDS,
    failure_words,
    fit_word,
    memory_band_text,
    memory_mark,
    rate,
    speed_band,
    speed_mark,
)

CATEGORY_WORDS = {
    "weights": "weights",
    "adapters": "LoRA adapters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "loss": "loss (logits)",
    "dequantization": "dequantization",
    "workspace": "workspace",
    "other": "other",
    "gap": "allocator gap",
    "context": "CUDA context",
    "headroom": "headroom, kept free",
    "free": "free",
    "residue": "not attributed",
}
"""Categories of memory in the order they are stacked, with the words for people."""
MIN_TERM_BYTES = 1024**2
"""Smaller terms are summed in one row: nobody decides anything by them."""
MIN_SHOWN_BYTES = 52_429
"""A row that would read "0.0 MiB" is left out."""


def notes_of(answer: Plan | NoPlan) -> list[Note]:
    """The notes of the answer and of its setup, once each, what a person must know first at the head."""
    setup = answer.subject
    notes = dict.fromkeys(Note(clean(note), place_of(note)) for note in (*setup.notes, *answer.notes) if note)
    return sorted(notes, key=place_of)


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One slice of the card: `size_bytes` from `start_bytes`; category is a key of CATEGORY_WORDS."""

    category: str
    label: str
    size_bytes: int
    start_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.size_bytes


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The memory of one candidate at its peak, laid against the card.

    Attributes:
        rows: slices from 0 up to the device peak, then headroom and what is free; they add up to the card's memory
            when the candidate fits.
        terms_evidence: the level that names the terms; the peaks may come from a higher one.
    """

    rows: tuple[MemoryRow, ...]
    terms_evidence: Prediction
    peak_evidence: Prediction | Measurement


def best_terms(candidate: Candidate) -> Prediction:
    """The highest level that names the terms of memory."""
    dry_run = candidate.dry_run
    if dry_run is not None and not isinstance(dry_run, ProbeFailure) and dry_run.terms:
        return dry_run
    return candidate.formula


def category_bytes(terms: Iterable[MemoryTerm]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for term in terms:
        totals[term.category] = totals.get(term.category, 0) + term.size_bytes
    return {name: totals[name] for name in CATEGORY_WORDS if totals.get(name)}


def _label(term: MemoryTerm) -> str:
    """The term's name; one that says nothing of its category (the dry run's "layers") is led by it."""
    name = clean(term.name)
    words = f"{term.category}: {name}"
    descriptive = " " in name or name.startswith(term.category) or term.category in ("workspace", "other")
    return name if descriptive else words


def breakdown(candidate: Candidate, memory_bytes: int, *, max_terms: int | None = None) -> Breakdown:
    """The slices of the card that this candidate fills at its peak.

    With `max_terms`, terms are listed one by one, largest first, the rest summed; without, they are summed by category.
    A higher level's peak beside a lower level's terms leaves a difference: it is its own row, "not attributed", so that
    nothing is hidden in another term. The row is negative where the terms promise more than the peak.
    """
    named, peak = best_terms(candidate), candidate.memory_evidence
    slices: list[tuple[str, str, int]] = []
    if max_terms is None:
        slices = [(name, CATEGORY_WORDS[name], size) for name, size in category_bytes(named.terms).items()]
    else:
        terms = sorted((term for term in named.terms if term.size_bytes), key=lambda term: -term.size_bytes)
        worth = [term for term in terms if term.size_bytes >= MIN_TERM_BYTES]
        whole = len(worth) == len(terms) and len(terms) <= max_terms
        shown = terms if whole else worth[: max_terms - 1]
        slices = [(term.category, _label(term), term.size_bytes) for term in shown]
        if rest := terms[len(shown) :]:
            words = f"{len(rest)} smaller {'term' if len(rest) == 1 else 'terms'}"
            slices.append(("other", words, sum(term.size_bytes for term in rest)))
    residue = peak.peak_allocated_bytes - sum(size for _, _, size in slices)
    slices.append(("residue", CATEGORY_WORDS["residue"] if residue > 0 else "terms overshoot", residue))
    slices.append(("gap", CATEGORY_WORDS["gap"], peak.peak_reserved_bytes - peak.peak_allocated_bytes))
    slices.append(("context", CATEGORY_WORDS["context"], peak.peak_device_bytes - peak.peak_reserved_bytes))
    headroom = max(0, memory_bytes - candidate.budget_bytes)
    slices.append(("free", CATEGORY_WORDS["free"], candidate.budget_bytes - peak.peak_device_bytes))
    slices.append(("headroom", CATEGORY_WORDS["headroom"], headroom))
    rows, start = [], 0
    for category, label, size in slices:
        if category == "free" and size < 0:
            continue
        if abs(size) >= MIN_SHOWN_BYTES:
            rows.append(MemoryRow(category=category, label=label, size_bytes=size, start_bytes=start))
        start += size
    if peak.peak_device_bytes > candidate.budget_bytes:
        rows = [row for row in rows if row.category != "headroom"]
    return Breakdown(rows=tuple(rows), terms_evidence=named, peak_evidence=peak)


_LEVEL_FIGURES: tuple[tuple[str, Callable[[Prediction | Measurement], str]], ...] = (
    ("allocated peak", lambda evidence: gib(evidence.peak_allocated_bytes)),
    ("reserved peak", lambda evidence: gib(evidence.peak_reserved_bytes)),
    ("device peak", lambda evidence: gib(evidence.peak_device_bytes)),
    ("  error band", memory_band_text),
    ("peak in phase", lambda evidence: evidence.peak_phase if isinstance(evidence, Prediction) else "-"),
    ("step time", lambda evidence: "-" if evidence.step_time_s is None else seconds(evidence.step_time_s)),
    ("speed", lambda evidence: "-" if evidence.tokens_per_s is None else rate(evidence.tokens_per_s)),
    ("  error band", lambda evidence: speed_band(evidence) or "-"),
    ("share of peak FLOP/s", lambda evidence: "-" if evidence.mfu_fraction is None else percent(evidence.mfu_fraction)),
)
"""Label -> the figure of a level that knows it, in words."""


def level_table(candidate: Candidate) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the levels that were asked side by side, lowest first; one that failed says so in the first
    row."""
    rows = []
    for number, (label, words_of) in enumerate(_LEVEL_FIGURES):
        none = "-" if number else "failed"
        cells = (none if isinstance(evidence, ProbeFailure) else words_of(evidence) for _, evidence in candidate.levels)
        rows.append((label, *cells))
    return ("", *(LEVEL_WORDS[level] for level, _ in candidate.levels)), rows


def failures(candidate: Candidate) -> list[str]:
    return [failure_words(evidence) for _, evidence in candidate.levels if isinstance(evidence, ProbeFailure)]


class Row(NamedTuple):
    """One line of the alternatives: a candidate with the figures that it is compared by."""

    label: str
    candidate: Candidate
    peak: Prediction | Measurement
    speed: Prediction | Measurement
    trade: str


def compared(plan: Plan, num_fitting: int | None = None) -> list[Row]:
    """The chosen setup and its alternatives, each figure of all of them from one level; speeds are corrected by what a
    higher one says of the chosen setup, so that its speed is the same here as everywhere.

    Args:
        num_fitting: only the first so many alternatives that fit; all: None.
    """
    every = chosen_and_alternatives(plan)
    # of what nobody has looked at the formula alone speaks: the others cannot be on another level
    alone = num_fitting is not None and isinstance(plan.alternatives, WhenAsked)
    rows = [next(every), *islice(filter(_fits, every), num_fitting)] if alone else list(every)
    figures = on_one_level([candidate for _, candidate, _ in rows])
    chosen_tokens_per_s, common = plan.chosen.speed_evidence.tokens_per_s, figures[0][1].tokens_per_s
    ratio = chosen_tokens_per_s / common if chosen_tokens_per_s and common else 1.0

    def corrected(speed: Prediction | Measurement) -> Prediction | Measurement:
        if ratio == 1.0 or not speed.tokens_per_s or not speed.step_time_s:
            return speed
        changes: dict[str, Any] = {"tokens_per_s": speed.tokens_per_s * ratio, "step_time_s": speed.step_time_s / ratio}
        return replace(speed, **changes)

    chosen, *others = [
        Row(label, candidate, peak, corrected(speed), trade)
        for (label, candidate, trade), (peak, speed) in zip(rows, figures, strict=True)
    ]
    return [chosen, *others] if num_fitting is None else [chosen, *islice(filter(_fits, others), num_fitting)]


def _fits(row: Row | tuple[str, Candidate, str]) -> bool:
    return row[1].fits


COMPARED_RIGHT = ("tokens/s", "peak", "rank")
"""Columns of numbers of `compared_cells`."""


def compared_cells(plan: Plan, row: Row) -> dict[str, str]:
    """Column -> what it says of a row of `compared`; "from" is of the speed, "from " of the peak."""
    setup, speed = row.candidate.setup, row.speed.tokens_per_s
    return {
        "": clean(row.label),
        "tokens/s": f"{speed:,.0f}" if speed else "-",
        "from": speed_mark(row.speed),
        "peak": gib(row.peak.peak_device_bytes),
        "from ": memory_mark(row.peak),
        "rank": str(setup.lora_rank or "-"),
        "fits": fit_word(row.candidate),
        "difference": setup_difference(plan.chosen.setup, setup),
        "what it costs or buys": clean(row.trade),
    }


def compared_words(plan: Plan, rows: Sequence[Row]) -> str:
    """The levels that `compared` took its figures from, and that they are not the chosen setup's own where they are
    not."""
    peaks = _marks([memory_mark(row.peak) for row in rows])
    speeds = _marks([speed_mark(row.speed) for row in rows])
    words = f"Peaks: {peaks}. Speeds: {speeds}."
    mine = plan.chosen.memory_evidence
    if mine is not rows[0].peak:
        mark = memory_mark(mine)
        words += f" One level for all rows, in the chosen setup's family corrected by its own peak ({mark})."
    return words


def _marks(marks: Sequence[str]) -> str:
    """The levels of a column: one word where all rows share it, else the chosen row's and the others'."""
    first, others = marks[0], list(dict.fromkeys(marks[1:]))
    return first if others in ([], [first]) else f"{first} (chosen), {', '.join(others)} (others)"


def chosen_and_alternatives(plan: Plan) -> Iterator[tuple[str, Candidate, str]]:
    yield "chosen", plan.chosen, ""
    for alternative in plan.alternatives:
        yield alternative.label, alternative.candidate, alternative.trade


SOURCE_HEADER = ("what", "value")


def source_rows(answer: Plan | NoPlan, extras: Extras) -> list[tuple[str, str]]:
    """Where the answer comes from, under SOURCE_HEADER: facts, command, versions, and the machine of a probe."""
    workload = answer.workload
    chosen = answer.subject
    rows = [
        ("model configuration", workload.model.config_source),
        ("GPU facts", workload.gpu.source),
        ("usable memory", f"{gib(workload.memory_bytes)} ({workload.gpu.memory_basis})"),
        ("command", extras.command),
        ("finetune-planner", extras.planner_version),
        ("written", extras.created),
        *extras.environment.items(),
    ]
    if isinstance(chosen.probe, Measurement):
        where = chosen.probe.environment
        rows += [("probed on", where.gpu_name), ("driver", where.driver), ("CUDA", where.cuda)]
        rows += [(f"probe's {name}", version) for name, version in where.libraries.items()]
    return [(clean(name), clean(value)) for name, value in rows if value]
