"""Which GPU for a model (every card's plan side by side, smallest that fits first), and which model for a GPU (the
catalogue by what can be trained on it, to what length and how fast)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from planner.decision.node import Node
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.outcome import Candidate
from planner.plan import NoPlan, Plan
from planner.records import dataclass
from planner.units import count, gib
from planner.workload import Workload
from reports.markdown import bullets, document
from reports.markdown import table as markdown_table
from reports.page import Page, Sheet
from reports.plain import clean, plural
from reports.plan_json import candidate_to_dict
from reports.setup_text import short_setup_words
from reports.text import cost_per_million, fit_word, memory_marks, speed_mark, speed_marks

SORTS = ("size", "speed", "cost")
METHOD_SHORT = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
BY_METHOD_COLUMNS = 105
"""Width of a terminal from which on the three methods' speeds stand in columns; from SETUP_COLUMNS on the setup too."""
SETUP_COLUMNS = 150


@dataclass(frozen=True, kw_only=True)
class GpuChoice:
    """One card with its answer and its places, 1 the best; None where it does not fit or has no price."""

    gpu: GpuSpec
    answer: Plan | NoPlan
    speed_place: int | None = None
    cost_place: int | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan for this card."""
        return isinstance(self.answer, Plan)


def rank_gpus(answers: Sequence[Plan | NoPlan], *, sort: str = "size") -> tuple[GpuChoice, ...]:
    """The answers, cards that fit first; `sort` "size": smallest memory first, "speed", or "cost" per million tokens.

    Raises:
        ValueError: an unknown `sort`.
    """
    if sort not in SORTS:
        raise ValueError(f"sort must be one of {', '.join(SORTS)}; got {sort!r}")
    plans = [plan for plan in answers if isinstance(plan, Plan)]
    by_speed = sorted(plans, key=lambda plan: -plan.chosen.tokens_per_s)
    by_cost = sorted(
        (plan for plan in plans if cost_per_million(plan) is not None), key=lambda p: cost_per_million(p) or 0
    )
    speed = {plan.workload.gpu.key: place for place, plan in enumerate(by_speed, 1)}
    cost = {plan.workload.gpu.key: place for place, plan in enumerate(by_cost, 1)}
    choices = [
        GpuChoice(
            gpu=answer.workload.gpu,
            answer=answer,
            speed_place=speed.get(answer.workload.gpu.key),
            cost_place=cost.get(answer.workload.gpu.key),
        )
        for answer in answers
    ]
    keys: dict[str, Callable[[GpuChoice], Any]] = {
        "size": lambda one: one.answer.workload.memory_bytes,
        "speed": lambda one: one.speed_place or 0,
        "cost": lambda one: one.cost_place or len(choices),
    }
    return tuple(sorted(choices, key=lambda one: (not one.fits, keys[sort](one), one.gpu.memory_bytes, one.gpu.key)))


def best_by_method(answer: Plan | NoPlan) -> dict[str, Candidate]:
    """Method -> its fastest setup that fits, of those that the plan compared: the chosen one and the other classes."""
    if isinstance(answer, NoPlan):
        return {}
    classes = [one.candidate for one in answer.alternatives if one.label in {node.words for node in Node}]
    found: dict[str, Candidate] = {}
    for one in sorted((answer.chosen, *classes), key=lambda one: -one.tokens_per_s):
        if one.fits:
            found.setdefault(one.setup.method, one)
    return found


def which_gpu_sentences(choices: Sequence[GpuChoice]) -> list[str]:
    """What to take away: the smallest, the fastest, the cheapest card."""
    fitting = [one for one in choices if isinstance(one.answer, Plan)]
    if not fitting:
        nearest = min(
            (one.answer for one in choices if isinstance(one.answer, NoPlan)), key=lambda no: no.missing_bytes
        )
        return [f"No card fits. Nearest: {nearest.workload.gpu.name}, {gib(nearest.missing_bytes)} missing."]
    smallest = min(fitting, key=lambda one: (one.answer.workload.memory_bytes, one.speed_place or 0))
    fastest = next(one for one in fitting if one.speed_place == 1)
    sentences = [
        f"{len(fitting)} of {len(choices)} cards fit.",
        f"Smallest: {_words(smallest)}.",
        f"Fastest: {_words(fastest)}.",
    ]
    cheapest = next((one for one in fitting if one.cost_place == 1), None)
    if cheapest is not None:
        sentences.append(f"Cheapest for the work: {_words(cheapest)}.")
    return sentences


def _words(one: GpuChoice) -> str:
    assert isinstance(one.answer, Plan)
    chosen = one.answer.chosen
    cost = cost_per_million(one.answer)
    price = "" if cost is None else f", ${cost:,.3f} per million tokens"
    speed = f"{chosen.tokens_per_s:,.0f} tokens/s ({speed_mark(chosen.speed_evidence)})"
    return f"{clean(one.gpu.name)} ({gib(one.answer.workload.memory_bytes)}), {speed}{price}"


def which_gpu_title(wish: Workload) -> str:
    """The first line: the model and what a step must look like."""
    several = f" · {wish.num_gpus} of each" if wish.num_gpus > 1 else ""
    return (
        f"Which GPU for {clean(wish.model.model_id)} ({count(wish.model.num_params)} parameters){several} · "
        f"{wish.seq_len_tokens:,} tokens · {wish.global_batch_seqs:,} sequences per step"
    )


@dataclass(frozen=True)
class GpusSheet(Sheet):
    """The ranking; on a terminal `only_fitting` leaves out rows of cards that do not fit, unless none does."""

    choices: Sequence[GpuChoice]
    only_fitting: bool = False

    def render(self, console: Console) -> None:
        page, choices = Page(console), self.choices
        page.line(which_gpu_title(choices[0].answer.workload), style="bold")
        for sentence in which_gpu_sentences(choices):
            page.line(sentence)
        page.line()
        if self.only_fitting and any(one.fits for one in choices):
            choices = [one for one in choices if one.fits]
        by_method, setups = console.width >= BY_METHOD_COLUMNS, console.width >= SETUP_COLUMNS
        header, rows, right = _gpus_table(choices, by_method=by_method, setups=setups)
        page.whole(header, rows, right=right, fixed=("--gpu", "method"))
        marks = memory_marks(one.answer.chosen.memory_evidence for one in choices if isinstance(one.answer, Plan))
        words = f"#: place by tokens/s and by cost. $/M: US dollars per million tokens. Peaks: {marks or '-'}."
        if by_method:
            words += " full, LoRA, QLoRA: tokens/s of the method's fastest setup that fits."
        if not setups and not all(one.fits for one in choices):
            words += " +: memory that is missing."
        page.line(words, style="dim")
        missing = [one for one in choices if isinstance(one.answer, Plan) and one.cost_place is None]
        if missing:
            page.line(f"{len(missing)} {plural(len(missing), 'card')} without a known price.", style="dim")
        if any(one.cost_place for one in choices):
            page.line("Prices are dated and indicative; plan MODEL --gpu GPU --price sets your own.", style="dim")

    def markdown(self) -> str:
        table = markdown_table(*_gpus_table(self.choices, by_method=True, setups=True))
        title = which_gpu_title(self.choices[0].answer.workload)
        return document(title, bullets(which_gpu_sentences(self.choices)), table)

    def document(self) -> list[dict[str, Any]]:
        return list(map(_gpu_json, self.choices))


def _gpu_json(one: GpuChoice) -> dict[str, Any]:
    """One card as data; `candidate` as in plan.json."""
    answer, chosen = one.answer, one.answer.subject
    return {
        "gpu": one.gpu.key,
        "num_gpus": answer.workload.num_gpus,
        "memory_bytes": answer.workload.memory_bytes,
        "fits": one.fits,
        "missing_bytes": 0 if isinstance(answer, Plan) else answer.missing_bytes,
        "tokens_per_s": chosen.tokens_per_s if one.fits else None,
        "speed_place": one.speed_place,
        "usd_per_hour": answer.workload.price_per_hour,
        "usd_per_million_tokens": cost_per_million(answer),
        "cost_place": one.cost_place,
        "candidate": candidate_to_dict(chosen, answer.workload.model.model_id, one.gpu.key),
    }


def _gpus_table(
    choices: Sequence[GpuChoice], *, by_method: bool, setups: bool
) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """Header, rows and the columns of numbers; `by_method`: a column of speeds per method; `setups`: in full words."""
    methods = tuple(METHOD_SHORT) if by_method else ()
    speeds = tuple(METHOD_SHORT[method] for method in methods)
    header = ("--gpu", "memory", "fits", "tokens/s", "#", "$/M", "# ", *speeds, "setup" if setups else "method")
    rows: list[tuple[str, ...]] = []
    for one in choices:
        memory = gib(one.answer.workload.memory_bytes)
        if isinstance(one.answer, NoPlan):
            missing = f"{gib(one.answer.missing_bytes)} missing" if setups else f"+{gib(one.answer.missing_bytes)}"
            rows.append((one.gpu.key, memory, "no", *("-",) * (4 + len(methods)), missing))
            continue
        chosen = one.answer.chosen
        cost = cost_per_million(one.answer)
        best = best_by_method(one.answer)
        rows.append(
            (
                one.gpu.key,
                memory,
                fit_word(chosen),
                f"{chosen.tokens_per_s:,.0f}",
                str(one.speed_place or "-"),
                "-" if cost is None else f"{cost:,.3f}",
                str(one.cost_place or "-"),
                *(f"{best[method].tokens_per_s:,.0f}" if method in best else "-" for method in methods),
                short_setup_words(chosen.setup) if setups else METHOD_SHORT[chosen.setup.method],
            )
        )
    return header, rows, ("memory", "tokens/s", "#", "$/M", "# ", *speeds)


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
        page.line(self._title(), style="bold")
        for sentence in self._sentences():
            page.line(sentence)
        page.line()
        header, cells, right = _models_table(self.rows if self.every else [one for one in self.rows if one.fits])
        page.whole(header, cells, right=right, fixed=("plan",))
        page.line(
            "full, LoRA, QLoRA: longest sequence that fits alone, every layer checkpointed (formula). plan, tokens/s: "
            f"what plan MODEL --gpu {wish.gpu.key} takes at {wish.seq_len_tokens:,} tokens{self._marks()}.",
            style="dim",
        )

    def markdown(self) -> str:
        return document(self._title(), bullets(self._sentences()), markdown_table(*_models_table(self.rows)))

    def document(self) -> list[dict[str, Any]]:
        return list(map(_model_json, self.rows))

    def _title(self) -> str:
        """The first line: the card and what a step must look like."""
        wish = self.workload
        return (
            f"What {clean(wish.gpu.name)} can fine-tune · {wish.seq_len_tokens:,} tokens · "
            f"{wish.global_batch_seqs:,} sequences per step"
        )

    def _sentences(self) -> list[str]:
        """What to take away: how many, and the largest model of each method."""
        rows = self.rows
        sentences = [f"{sum(one.fits for one in rows)} of {len(rows)} {plural(len(rows), 'model')} can be fine-tuned."]
        for method in METHOD_SHORT:
            planned = [(one, one.answer.workload) for one in rows if isinstance(one.answer, Plan)]
            reach = [one for one, wish in planned if one.longest_tokens.get(method, 0) >= wish.seq_len_tokens]
            if reach:
                largest = max(reach, key=lambda one: one.model.num_params)
                size = count(largest.model.num_params)
                sentences.append(f"Largest with {METHOD_SHORT[method]}: {clean(largest.model.model_id)} ({size}).")
        return sentences

    def _marks(self) -> str:
        plans = [one.answer.chosen for one in self.rows if isinstance(one.answer, Plan)]
        memory, speed = (one.memory_evidence for one in plans), (one.speed_evidence for one in plans)
        return f" (memory: {memory_marks(memory)}; speed: {speed_marks(speed)})" if plans else ""


def _model_json(one: ModelChoice) -> dict[str, Any]:
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


def _models_table(rows: Sequence[ModelChoice]) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
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
