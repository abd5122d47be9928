"""Existing training files against the plan for the same work: on the terminal, as Markdown, as JSON, for the page."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from planner.core.records import dataclass
from planner.core.units import gib
from planner.memory.workload import Workload
from planner.planning.plan import NoPlan, Plan
from planner.setup.interchange import SCHEMA_VERSION, to_jsonable
from planner.setup.outcome import Candidate, Fidelity, Measurement, Prediction, ProbeFailure, sides_of, speed_level
from reports.charts import Chart, memory_bars
from reports.compare import bars
from reports.markdown import bullets, document, escape
from reports.markdown import table as markdown_table
from reports.page import Page, Sheet
from reports.plain import clean, joined
from reports.plan_json import candidate_to_dict
from reports.setup_text import setup_difference, setup_words, workload_words
from reports.text import LEVEL_WORDS, failure_words, fit_word, memory_band_text, rate, speed_band

SpeedEvidence = Prediction | Measurement
HEADER = ("", "fits", "peak", "tokens/s", "level", "the plan is")
RIGHT = ("peak", "tokens/s", "the plan is")
PLAN = "the plan"


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One file, or the plan.

    Attributes:
        candidate: its setup; its run on a GPU is the highest level of it.
        form: of the file; "" of the plan.
        rehearsal: of a run on the CPU, which says nothing of the card.
        not_run: why it was not run though it was asked for.
        source: where published defaults come from.
        remark: what else is to be known of its run.
    """

    label: str
    candidate: Candidate
    form: str = ""
    rehearsal: Measurement | ProbeFailure | None = None
    not_run: str = ""
    source: str = ""
    remark: str = ""

    @property
    def level(self) -> Fidelity:
        return speed_level(self.candidate.speed_evidence)

    @property
    def failure(self) -> str:
        """Why it has no run though one was asked for, "" where it has or none was."""
        outcome = self.rehearsal or self.candidate.run
        return self.not_run or (failure_words(outcome) if isinstance(outcome, ProbeFailure) else "")


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Files that do the same work (model, method, length, tokens per step), and the plan for it."""

    workload: Workload
    plan: Plan | NoPlan
    planned: Lane | None
    lanes: tuple[Lane, ...]

    @property
    def all(self) -> tuple[Lane, ...]:
        return (*self.lanes, *((self.planned,) if self.planned is not None else ()))

    def speeds(self, lane: Lane) -> tuple[SpeedEvidence, SpeedEvidence] | None:
        """What knows the plan's and a file's speed by one level: the formula's where their own differ. None where the
        file does not fit, a run that was asked for is missing, or one of them has no speed."""
        if self.planned is None or lane is self.planned or not lane.candidate.fits:
            return None
        mine, theirs = self.planned.candidate.speed_evidence, lane.candidate.speed_evidence
        if self.planned.level is not lane.level:
            if self.planned.failure or lane.failure:
                return None
            mine, theirs = self.planned.candidate.formula, lane.candidate.formula
        return (mine, theirs) if mine.tokens_per_s and theirs.tokens_per_s else None

    def ratio(self, lane: Lane) -> float | None:
        """The plan's tokens/s over a file's, by `speeds`."""
        if (evidence := self.speeds(lane)) is None:
            return None
        mine, theirs = (each.tokens_per_s or 0.0 for each in evidence)
        return mine / theirs

    def surely(self, lane: Lane) -> bool:
        """Whether the two speeds lie further apart than their bands reach."""
        mine, theirs = map(_ends, self.speeds(lane) or ())
        return mine[0] > theirs[1] or mine[1] < theirs[0]


def _ends(evidence: SpeedEvidence) -> tuple[float, float]:
    speed, (below, above) = evidence.tokens_per_s or 0.0, sides_of(evidence) or (0.0, 0.0)
    return speed * (1 - below), speed * (1 + above)


@dataclass(frozen=True)
class RaceSheet(Sheet):
    """Every heat; `level`: a sentence on where the figures come from."""

    heats: Sequence[Heat]
    level: str

    def render(self, console: Console) -> None:
        page = Page(console)
        page.line(self.level, style="bold")
        for heat in self.heats:
            page.head(workload_words(heat.workload))
            page.whole(HEADER, _rows(heat), right=RIGHT, fixed=("", "fits"))
            for label, value, words in _speeds(heat):
                most = max(speed for _, speed, _ in _speeds(heat))
                page.line(f"{'█' * max(1, round(30 * value / most)):30} {words:>9}  {label}")
            page.line()
            for sentence in _sentences(heat):
                page.line(sentence)

    def markdown(self) -> str:
        parts = [self.level]
        for heat in self.heats:
            parts += [f"## {escape(workload_words(heat.workload))}", markdown_table(HEADER, _rows(heat), RIGHT)]
            parts.append(bullets(_sentences(heat)))
        return document("Race", *parts)

    def document(self) -> dict[str, Any]:
        heats = [_heat_json(heat) for heat in self.heats]
        return {"schema_version": SCHEMA_VERSION, "kind": "race", "level": self.level, "heats": heats}

    def view(self) -> dict[str, Any]:
        rows, charts = list[dict[str, Any]](), list[Chart]()
        for number, heat in enumerate(self.heats, 1):
            work = f" · {heat.workload.global_batch_seqs} × {heat.workload.seq_len_tokens:,}" * (len(self.heats) > 1)
            rows += [{"target": "", "cells": (f"{label}{work}", *cells)} for label, *cells in _rows(heat)]
            labels, values, words = zip(*(_speeds(heat) or [("", 0.0, "")]), strict=True)
            charts.append(
                bars(f"speed-{number}", f"Speed: {workload_words(heat.workload)}", "tokens/s", labels, values, words)
            )
            of_memory = memory_bars(
                [(lane.label, lane.candidate) for lane in heat.all],
                heat.workload.memory_bytes,
                heat.workload.budget_bytes,
                limit=len(heat.all),
            )
            charts.append({**of_memory, "id": f"race-memory-{number}", "height": 160 + 34 * len(heat.all)})
        sentences = [self.level, *(sentence for heat in self.heats for sentence in _sentences(heat))]
        return {"title": "Race", "sentences": sentences, "table": {"header": HEADER}, "rows": rows, "charts": charts}


def _speeds(heat: Heat) -> list[tuple[str, float, str]]:
    """(label, tokens/s, the same in words) of every lane that fits and has a speed."""
    speeds = [(clean(lane.label), lane.candidate.tokens_per_s) for lane in heat.all if lane.candidate.fits]
    return [(label, speed, f"{speed:,.0f}") for label, speed in speeds if speed]


def _rows(heat: Heat) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for lane in heat.all:
        candidate, ratio = lane.candidate, heat.ratio(lane)
        memory, speed = candidate.memory_evidence, candidate.speed_evidence
        levels = dict.fromkeys(LEVEL_WORDS[level] for level in (memory.level, lane.level))
        row = (
            clean(lane.label),
            fit_word(candidate),
            joined((gib(memory.peak_device_bytes), memory_band_text(memory)), " "),
            joined((f"{candidate.tokens_per_s:,.0f}", speed_band(speed)), " ") if candidate.tokens_per_s else "-",
            ", ".join(levels),
            "" if ratio is None else f"{ratio:.2f} x" + ("" if heat.surely(lane) else " ?"),
        )
        rows.append(row)
    return rows


def _sentences(heat: Heat) -> list[str]:
    sentences = []
    for lane in heat.all:
        sentences.append(f"{clean(lane.label)}: {setup_words(lane.candidate.setup)}.")
        if heat.planned is not None and lane is not heat.planned:
            other = setup_difference(lane.candidate.setup, heat.planned.candidate.setup)
            sentences[-1] += f" The plan instead: {other}." if other else " It is the plan."
            ours, theirs = heat.planned.candidate.setup, lane.candidate.setup
            if theirs.method != "full" and (ours.lora_rank, ours.lora_targets) != (
                theirs.lora_rank,
                theirs.lora_targets,
            ):
                sentences[-1] += " It trains another adapter (--same-adapter: this one)."
        if lane.source:
            sentences[-1] += f" Published: {lane.source}."
    if isinstance(heat.plan, NoPlan):
        sentences.append(f"No plan: nothing fits, {gib(heat.plan.missing_bytes)} missing.")
    for lane in heat.all:
        if lane.remark:
            sentences.append(f"{clean(lane.label)}: {lane.remark}.")
        if lane.failure:
            sentences.append(f"{clean(lane.label)} was not run to its end: {clean(lane.failure)}.")
        if isinstance(lane.rehearsal, Measurement):
            steps = len(lane.rehearsal.step_times_s)
            speed = rate(lane.rehearsal.tokens_per_s)
            sentences.append(f"{clean(lane.label)}: {steps} steps rehearsed on this CPU, {speed} there.")
    raced = [lane for lane in heat.lanes if heat.ratio(lane) is not None]
    if any(lane.level is not heat.planned.level for lane in raced if heat.planned is not None):
        sentences.append("How much faster is by the formula of both: no dry run follows one of them.")
    if not all(map(heat.surely, raced)):
        sentences.append("?: the two speeds lie within their bands, so either may be the faster.")
    if any(not lane.source for lane in heat.lanes):
        sentences.append("What was read and assumed of a file: plan check FILE.")
    return sentences


def _heat_json(heat: Heat) -> dict[str, Any]:
    workload = heat.workload
    return {
        "model": workload.model.model_id,
        "gpu": workload.gpu.key,
        "num_gpus": workload.num_gpus,
        "seq_len_tokens": workload.seq_len_tokens,
        "tokens_per_step": workload.seq_len_tokens * workload.global_batch_seqs,
        "found": isinstance(heat.plan, Plan),
        "lanes": [
            {
                "label": lane.label,
                "kind": "file" if lane.form else "plan",
                "format": lane.form or None,
                "source": lane.source or None,
                "verdict": lane.candidate.verdict,
                "peak_device_bytes": lane.candidate.memory_evidence.peak_device_bytes,
                "memory_level": lane.candidate.memory_evidence.level.value,
                "tokens_per_s": lane.candidate.tokens_per_s or None,
                "speed_level": lane.level.value,
                "time_band_fraction": lane.candidate.speed_evidence.time_band_fraction,
                "plan_over_this": heat.ratio(lane),
                "beyond_bands": heat.surely(lane) if heat.ratio(lane) is not None else None,
                "not_run": lane.failure or None,
                "remark": lane.remark or None,
                "rehearsal": to_jsonable(lane.rehearsal) if lane.rehearsal is not None else None,
                "candidate": candidate_to_dict(lane.candidate, workload.model.model_id, workload.gpu.key),
            }
            for lane in heat.all
        ],
    }
