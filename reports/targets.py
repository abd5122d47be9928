"""The launch targets side by side: what each would run for one wish, how fast, in how much memory."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from planner.app.targets import TargetChoice, as_fast, tokens_per_s
from planner.records import dataclass
from planner.units import gib
from planner.workload import Workload
from reports.markdown import bullets, document
from reports.markdown import table as markdown_table
from reports.page import Page, Sheet
from reports.plain import clean
from reports.plan_json import candidate_to_dict
from reports.setup_text import setup_words

HEADER = ("target", "program", "tokens/s", "band", "memory", "setup")
RIGHT = ("tokens/s", "band", "memory")


@dataclass(frozen=True)
class TargetsSheet(Sheet):
    """The targets, fastest first, and what to make of them."""

    rows: Sequence[TargetChoice]
    workload: Workload

    def render(self, console: Console) -> None:
        page = Page(console)
        page.line(_title(self.workload), style="bold")
        page.line()
        page.whole(HEADER, _table(self.rows), right=RIGHT, fixed=("target", "tokens/s", "memory"))
        for sentence in sentences(self.rows):
            page.line(sentence)

    def markdown(self) -> str:
        table = markdown_table(HEADER, _table(self.rows), RIGHT)
        return document(_title(self.workload), table, bullets(sentences(self.rows)))

    def document(self) -> list[dict[str, Any]]:
        return [_as_json(row, self.workload) for row in self.rows]


def _title(wish: Workload) -> str:
    """The first line: model, card and length."""
    cards = f"{wish.num_gpus} x " if wish.num_gpus > 1 else ""
    return f"Targets for {clean(wish.model.model_id)} on {cards}{clean(wish.gpu.name)} · {wish.seq_len_tokens:,} tokens"


def _as_json(row: TargetChoice, wish: Workload) -> dict[str, Any]:
    """One target as data; `candidate` as in plan.json."""
    one = row.candidate
    return {
        "target": row.target,
        "title": row.title,
        "refused": row.refused,
        "tokens_per_s": tokens_per_s(row),
        "time_band_fraction": one.formula.time_band_fraction if one else None,
        "predicted_peak_device_bytes": one.formula.peak_device_bytes if one else None,
        "candidate": candidate_to_dict(one, wish.model.model_id, wish.gpu.key) if one else None,
    }


def sentences(rows: Sequence[TargetChoice]) -> list[str]:
    """Which is fastest, which may be, and why the others are not in the table."""
    found = []
    if rows[0].candidate is not None:
        found.append(
            f"Fastest: {rows[0].title}. --target {rows[0].target} --out DIR plans for it and writes its files."
        )
        if near := as_fast(rows):
            found.append(f"Not surely slower (within its band): {', '.join(row.title for row in near)}.")
        found.append("Formula, each target's own fastest plan; no run has compared the programs with each other here.")
    return [*found, *(f"{row.title}: {row.refused}." for row in rows if row.refused)]


def _table(rows: Sequence[TargetChoice]) -> list[tuple[str, ...]]:
    return [_cells(row) for row in rows if row.candidate is not None]


def _cells(row: TargetChoice) -> tuple[str, ...]:
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
