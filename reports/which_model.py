"""Which model for a GPU: the catalogue by what can be trained on it, to what length and how fast."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from planner.models.spec import ModelSpec
from planner.plan import NoPlan, Plan
from planner.records import dataclass
from planner.units import count
from planner.workload import Workload
from reports.markdown import bullets, document
from reports.markdown import table as markdown_table
from reports.page import Page, Sheet
from reports.plain import clean, plural
from reports.plan_json import candidate_to_dict
from reports.text import memory_marks, speed_marks
from reports.which_gpu import METHOD_SHORT


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """One model on the card.

    Attributes:
        longest_tokens: method -> longest sequence that fits alone, 0 where none does.
        answer: the plan at the length asked for; None where no method reaches it.
    """

    model: ModelSpec
    longest_tokens: Mapping[str, int]
    answer: Plan | NoPlan | None

    @property
    def fits(self) -> bool:
        """Whether there is a plan at the length asked for."""
        return isinstance(self.answer, Plan)


@dataclass(frozen=True)
class ModelsSheet(Sheet):
    """The models, largest first; on a terminal those that fit, with `every` the others too."""

    rows: Sequence[ModelChoice]
    workload: Workload
    every: bool = False

    def render(self, console: Console) -> None:
        page, wish = Page(console), self.workload
        page.line(_title(wish), style="bold")
        for sentence in _sentences(self.rows):
            page.line(sentence)
        page.line()
        header, cells, right = _table(self.rows if self.every else [one for one in self.rows if one.fits])
        page.whole(header, cells, right=right, fixed=("plan",))
        page.line(
            "full, LoRA, QLoRA: longest sequence that fits alone, every layer checkpointed (formula). plan, tokens/s: "
            f"what plan MODEL --gpu {wish.gpu.key} takes at {wish.seq_len_tokens:,} tokens{_marks(self.rows)}.",
            style="dim",
        )

    def markdown(self) -> str:
        return document(_title(self.workload), bullets(_sentences(self.rows)), markdown_table(*_table(self.rows)))

    def document(self) -> list[dict[str, Any]]:
        return list(map(_as_json, self.rows))


def _title(wish: Workload) -> str:
    """The first line: the card and what a step must look like."""
    return (
        f"What {clean(wish.gpu.name)} can fine-tune · {wish.seq_len_tokens:,} tokens · "
        f"{wish.global_batch_seqs:,} sequences per step"
    )


def _sentences(rows: Sequence[ModelChoice]) -> list[str]:
    """What to take away: how many, and the largest model of each method."""
    sentences = [f"{sum(one.fits for one in rows)} of {len(rows)} {plural(len(rows), 'model')} can be fine-tuned."]
    for method in METHOD_SHORT:
        reach = [
            one
            for one in rows
            if isinstance(one.answer, Plan) and one.longest_tokens.get(method, 0) >= one.answer.workload.seq_len_tokens
        ]
        if reach:
            largest = max(reach, key=lambda one: one.model.num_params)
            size = count(largest.model.num_params)
            sentences.append(f"Largest with {METHOD_SHORT[method]}: {clean(largest.model.model_id)} ({size}).")
    return sentences


def _as_json(one: ModelChoice) -> dict[str, Any]:
    """One model as data: tokens, bytes, tokens/s."""
    answer = one.answer
    chosen = answer.chosen if isinstance(answer, Plan) else None
    return {
        "model": one.model.model_id,
        "num_params": one.model.num_params,
        "longest_tokens": dict(one.longest_tokens),
        "fits": one.fits,
        "tokens_per_s": chosen.tokens_per_s if chosen else None,
        "candidate": candidate_to_dict(chosen, one.model.model_id, answer.workload.gpu.key)
        if chosen and answer
        else None,
    }


def _marks(rows: Sequence[ModelChoice]) -> str:
    plans = [one.answer.chosen for one in rows if isinstance(one.answer, Plan)]
    memory, speed = (one.memory_evidence for one in plans), (one.speed_evidence for one in plans)
    return f" (memory: {memory_marks(memory)}; speed: {speed_marks(speed)})" if plans else ""


def _table(rows: Sequence[ModelChoice]) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    header = ("model", "size", "full", "LoRA", "QLoRA", "plan", "tokens/s")
    cells = []
    for one in rows:
        chosen = one.answer.chosen if isinstance(one.answer, Plan) else None
        cells.append(
            (
                clean(one.model.model_id),
                count(one.model.num_params),
                *(_length(one.longest_tokens.get(method)) for method in METHOD_SHORT),
                METHOD_SHORT[chosen.setup.method] if chosen else "-",
                f"{chosen.tokens_per_s:,.0f}" if chosen else "-",
            )
        )
    return header, cells, ("size", "full", "LoRA", "QLoRA", "tokens/s")


def _length(tokens: int | None) -> str:
    return f"{tokens:,}" if tokens else "-"
