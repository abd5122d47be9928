"""The kinds of adapters side by side: trained parameters, memory, speed, and what was published of their quality."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from planner.choices.adapters import REFUSED
from planner.decision.kinds import KindChoice
from planner.records import dataclass
from planner.setup import TrainSetup
from planner.units import count, gib
from planner.workload import Workload
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
        page.line(self._instead())
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
            escape(self._instead()),
            markdown_table(HEADER, map(_cells, self.rows), RIGHT),
            bullets(_sentences(self.rows)),
            markdown_table(("adapter", "published quality", "source"), quality),
        )

    def document(self) -> list[dict[str, Any]]:
        return [_as_json(row, self.workload) for row in self.rows]

    def _instead(self) -> str:
        return f"Each in the place of LoRA in what is planned: {setup_words(self.lora)}."


def _title(wish: Workload) -> str:
    """The first line: model, card and length."""
    return f"Adapters for {clean(wish.model.model_id)} on {clean(wish.gpu.name)} · {wish.seq_len_tokens:,} tokens"


def _as_json(row: KindChoice, wish: Workload) -> dict[str, Any]:
    """One kind as data: parameters, bytes, tokens/s."""
    one = row.candidate
    return {
        "adapter": row.kind.name,
        "num_trained_params": row.num_trained,
        "refused": row.refused,
        "changed": list(row.changed),
        "fits": one is not None and one.fits,
        "predicted_peak_device_bytes": one.formula.peak_device_bytes if one else None,
        "tokens_per_s": one.formula.tokens_per_s if one else None,
        "time_band_fraction": one.formula.time_band_fraction if one else None,
        "merges": row.kind.merges,
        "quality": row.kind.quality,
        "source": row.kind.source,
        "candidate": candidate_to_dict(one, wish.model.model_id, wish.gpu.key) if one else None,
    }


def _cells(row: KindChoice) -> tuple[str, ...]:
    one = row.candidate
    if one is None:
        return row.kind.name, "", "", "refused", "", "", ""
    band = one.formula.time_band_fraction
    return (
        row.kind.name,
        str(one.setup.lora_rank) if row.kind.size else "-",
        count(row.num_trained),
        gib(one.formula.peak_device_bytes) + ("" if one.fits else " !"),
        f"{one.formula.tokens_per_s:,.0f}" if one.formula.tokens_per_s else "-",
        f"±{band:.0%}" if band is not None else "-",
        "yes" if row.kind.merges else "no",
    )


def _sentences(rows: Sequence[KindChoice]) -> list[str]:
    """What the table leaves out."""
    found = [f"{row.kind.name}: {row.refused}." for row in rows if row.refused]
    found += [f"{row.kind.name}: {', '.join(row.changed)}." for row in rows if row.changed]
    if any(row.candidate is not None and not row.candidate.fits for row in rows):
        found.append("!: does not fit as LoRA is planned; plan --adapter KIND looks for a setup of its own.")
    found.append(
        "Formula. The step of rsLoRA, PiSSA and LoftQ is LoRA's. No run with any other kind has been compared: what it "
        "costs in time is counted from peft's code, and its band is wider by all of it."
    )
    found += [f"Not planned: {name} ({reason})." for name, reason in REFUSED.items()]
    return found
