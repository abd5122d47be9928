"""The kinds of adapters side by side (trained parameters, memory, speed, what was published of their quality), and the
launch targets: what each would run for one request, how fast, in how much memory."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from planner.core.records import dataclass
from planner.core.units import count, gib
from planner.memory.workload import Workload
from planner.options.adapters import REFUSED
from planner.planning.decision.policy import KindChoice
from planner.planning.targets import TargetChoice, as_fast, tokens_per_s
from planner.setup import TrainSetup
from reports.markdown import bullets, document, escape
from reports.markdown import table as markdown_table
from reports.page import Page, Sheet
from reports.plain import clean
from reports.plan_json import candidate_to_dict
from reports.setup_text import setup_words

NOTHING_CITED = "nothing is cited here"
HEADER = ("adapter", "size", "trained", "memory", "tokens/s", "band", "merges")
RIGHT = ("size", "trained", "memory", "tokens/s", "band")


@dataclass(frozen=True)
class AdaptersSheet(Sheet):
    """The kinds, each in the place of `lora`, and what was published of their quality, as Markdown with the sources."""

    rows: Sequence[KindChoice]
    workload: Workload
    lora: TrainSetup

    def render(self, console: Console) -> None:
        page = Page(console)
        page.line(_title(self.workload), style="bold")
        page.line(self._intro())
        page.line()
        page.whole(HEADER, map(_cells, self.rows), right=RIGHT, fixed=("adapter",))
        for sentence in _sentences(self.rows):
            page.line(sentence, style="dim")
        page.head("What was published of their quality")
        for row in self.rows:
            page.line(f"{row.kind.name}: {row.kind.quality or NOTHING_CITED}")

    def markdown(self) -> str:
        quality = [(row.kind.name, row.kind.quality or NOTHING_CITED, row.kind.source) for row in self.rows]
        return document(
            _title(self.workload),
            escape(self._intro()),
            markdown_table(HEADER, map(_cells, self.rows), RIGHT),
            bullets(_sentences(self.rows)),
            markdown_table(("adapter", "published quality", "source"), quality),
        )

    def document(self) -> list[dict[str, Any]]:
        return [_as_json(row, self.workload) for row in self.rows]

    def _intro(self) -> str:
        return f"Each in the place of LoRA in what is planned: {setup_words(self.lora)}."


def _title(workload: Workload) -> str:
    """The first line: model, card and length."""
    model, gpu = clean(workload.model.model_id), clean(workload.gpu.name)
    return f"Adapters for {model} on {gpu} · {workload.seq_len_tokens:,} tokens"


def _as_json(row: KindChoice, workload: Workload) -> dict[str, Any]:
    """One kind as data: parameters, bytes, tokens/s."""
    candidate = row.candidate
    return {
        "adapter": row.kind.name,
        "num_trained_params": row.num_trained,
        "refused": row.refused,
        "changed": list(row.changed),
        "fits": candidate is not None and candidate.fits,
        "predicted_peak_device_bytes": candidate.formula.peak_device_bytes if candidate else None,
        "tokens_per_s": candidate.formula.tokens_per_s if candidate else None,
        "time_band_fraction": candidate.formula.time_band_fraction if candidate else None,
        "merges": row.kind.merges,
        "quality": row.kind.quality,
        "source": row.kind.source,
        "candidate": candidate_to_dict(candidate, workload.model.model_id, workload.gpu.key) if candidate else None,
    }


def _cells(row: KindChoice) -> tuple[str, ...]:
    candidate = row.candidate
    if candidate is None:
        return row.kind.name, "", "", "refused", "", "", ""
    band = candidate.formula.time_band_fraction
    return (
        row.kind.name,
        str(candidate.setup.lora_rank) if row.kind.size else "-",
        count(row.num_trained),
        gib(candidate.formula.peak_device_bytes) + ("" if candidate.fits else " !"),
        f"{candidate.formula.tokens_per_s:,.0f}" if candidate.formula.tokens_per_s else "-",
        f"±{band:.0%}" if band is not None else "-",
        "yes" if row.kind.merges else "no",
    )


def _sentences(rows: Sequence[KindChoice]) -> list[str]:
    """What the table leaves out."""
    sentences = [f"{row.kind.name}: {row.refused}." for row in rows if row.refused]
    sentences += [f"{row.kind.name}: {', '.join(row.changed)}." for row in rows if row.changed]
    if any(row.candidate is not None and not row.candidate.fits for row in rows):
        sentences.append("!: does not fit as LoRA is planned; plan --adapter KIND looks for a setup of its own.")
    sentences.append(
        "Formula. The step of rsLoRA, PiSSA and LoftQ is LoRA's. No run with any other kind has been compared: what it "
        "costs in time is counted from peft's code, and its band is wider by all of it."
    )
    sentences += [f"Not planned: {name} ({reason})." for name, reason in REFUSED.items()]
    return sentences


TARGETS_HEADER = ("target", "program", "tokens/s", "band", "memory", "setup")
TARGETS_RIGHT = ("tokens/s", "band", "memory")


@dataclass(frozen=True)
class TargetsSheet(Sheet):
    """The targets, fastest first, and what to make of them."""

    rows: Sequence[TargetChoice]
    workload: Workload

    def render(self, console: Console) -> None:
        page = Page(console)
        page.line(_targets_title(self.workload), style="bold")
        page.line()
        page.whole(TARGETS_HEADER, _targets(self.rows), right=TARGETS_RIGHT, fixed=("target", "tokens/s", "memory"))
        for sentence in _target_sentences(self.rows):
            page.line(sentence)

    def markdown(self) -> str:
        table = markdown_table(TARGETS_HEADER, _targets(self.rows), TARGETS_RIGHT)
        return document(_targets_title(self.workload), table, bullets(_target_sentences(self.rows)))

    def document(self) -> list[dict[str, Any]]:
        return [_target_json(row, self.workload) for row in self.rows]


def _targets_title(workload: Workload) -> str:
    """The first line: model, card and length."""
    cards = f"{workload.num_gpus} x " if workload.num_gpus > 1 else ""
    model, gpu = clean(workload.model.model_id), clean(workload.gpu.name)
    return f"Targets for {model} on {cards}{gpu} · {workload.seq_len_tokens:,} tokens"


def _target_json(row: TargetChoice, workload: Workload) -> dict[str, Any]:
    """One target as data; `candidate` as in plan.json."""
    candidate = row.candidate
    return {
        "target": row.target,
        "title": row.title,
        "refused": row.refused,
        "tokens_per_s": tokens_per_s(row),
        "time_band_fraction": candidate.formula.time_band_fraction if candidate else None,
        "predicted_peak_device_bytes": candidate.formula.peak_device_bytes if candidate else None,
        "candidate": candidate_to_dict(candidate, workload.model.model_id, workload.gpu.key) if candidate else None,
    }


def _target_sentences(rows: Sequence[TargetChoice]) -> list[str]:
    """Which is fastest, which may be, and why the others are not in the table."""
    sentences = []
    if rows[0].candidate is not None:
        sentences.append(
            f"Fastest: {rows[0].title}. --target {rows[0].target} --out DIR plans for it and writes its files."
        )
        if near := as_fast(rows):
            sentences.append(f"Not surely slower (within its band): {', '.join(row.title for row in near)}.")
        sentences.append(
            "Formula, each target's own fastest plan; no run has compared the programs with each other here."
        )
    return [*sentences, *(f"{row.title}: {row.refused}." for row in rows if row.refused)]


def _targets(rows: Sequence[TargetChoice]) -> list[tuple[str, ...]]:
    return [_target_cells(row) for row in rows if row.candidate is not None]


def _target_cells(row: TargetChoice) -> tuple[str, ...]:
    assert row.candidate is not None
    formula = row.candidate.formula
    band = formula.time_band_fraction
    return (
        row.target,
        row.title,
        f"{formula.tokens_per_s:,.0f}" if formula.tokens_per_s else "-",
        f"±{band:.0%}" if band is not None else "-",
        gib(formula.peak_device_bytes),
        setup_words(row.candidate.setup),
    )
