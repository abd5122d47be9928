"""Which GPU for a model (every card's plan side by side, smallest that fits first), and which model for a GPU (the
catalogue by what can be trained on it, to what length and how fast); kinds of adapters and launch targets side by
side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from planner.core.records import dataclass
from planner.core.units import GIB, count, gib, seconds
from planner.hardware.gpu import GpuSpec
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.options.adapters import REFUSED
from planner.planning.answer import best_by_method
from planner.planning.decision.node import node_of_setup
from planner.planning.decision.policy import KindChoice
from planner.planning.plan import NoPlan, Plan
from planner.planning.targets import TargetChoice, as_fast
from planner.planning.useful import cost_usd, job_s, useful_tokens_per_s
from planner.setup import TrainSetup
from planner.setup.interchange import SCHEMA_VERSION
from planner.setup.outcome import Candidate
from reports.markdown import bullets, document, escape
from reports.markdown import table as markdown_table
from reports.page import Page, Sheet
from reports.plain import clean, joined, plural
from reports.plan_json import candidate_to_dict
from reports.setup_text import adapters_note, objective_words, setup_words, short_setup_words, step_words
from reports.text import (
    cost_per_million,
    dollars,
    fit_word,
    host_bytes,
    host_words,
    job_words,
    memory_marks,
    price_date,
    price_dates,
    samples_speed_words,
    speed_band,
    speed_mark,
    speed_marks,
)

SORTS = ("size", "speed", "cost")
METHOD_SHORT = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
TIGHT_MARK = "?"
BY_METHOD_COLUMNS = 136
"""Width of a terminal from which on the three methods' speeds stand in columns; from SETUP_COLUMNS on the setup too."""
SETUP_COLUMNS = 170


@dataclass(frozen=True, kw_only=True)
class GpuChoice:
    """One card with its answer and its places, 1 the best; None where it does not fit or has no price."""

    gpu: GpuSpec
    answer: Plan | NoPlan
    speed_place: int | None = None
    cost_place: int | None = None

    @property
    def fits(self) -> bool:
        return isinstance(self.answer, Plan)

    @property
    def duration_s(self) -> float | None:
        """Seconds of the whole job, None where it does not fit or nobody said how much is trained on."""
        return job_s(self.answer.workload, self.answer.chosen) if isinstance(self.answer, Plan) else None

    @property
    def cost_usd(self) -> float | None:
        """US dollars of the whole job, else of a million tokens; None without a plan or a price."""
        duration_s = self.duration_s
        return cost_per_million(self.answer) if duration_s is None else cost_usd(self.answer.workload, duration_s)


def rank_gpus(answers: Sequence[Plan | NoPlan], *, sort: str = "size") -> tuple[GpuChoice, ...]:
    """The answers, cards that fit first; `sort` "size": smallest memory first, "speed", or "cost" of the job, else of a
    million tokens."""
    choices = [GpuChoice(gpu=answer.workload.gpu, answer=answer) for answer in answers]

    def seconds_each(choice: GpuChoice) -> float:
        return choice.duration_s or 1.0 / choice.answer.subject.tokens_per_s

    by_speed = sorted((choice for choice in choices if choice.fits), key=seconds_each)
    by_cost = sorted(
        (choice for choice in choices if choice.cost_usd is not None), key=lambda choice: choice.cost_usd or 0.0
    )
    speed = {choice.gpu.key: place for place, choice in enumerate(by_speed, 1)}
    cost = {choice.gpu.key: place for place, choice in enumerate(by_cost, 1)}
    choices = [
        replace(choice, speed_place=speed.get(choice.gpu.key), cost_place=cost.get(choice.gpu.key))
        for choice in choices
    ]
    keys: dict[str, Callable[[GpuChoice], Any]] = {
        "size": lambda choice: choice.answer.workload.memory_bytes,
        "speed": lambda choice: choice.speed_place or 0,
        "cost": lambda choice: choice.cost_place or len(choices),
    }
    return tuple(
        sorted(
            choices, key=lambda choice: (not choice.fits, keys[sort](choice), choice.gpu.memory_bytes, choice.gpu.key)
        )
    )


def which_gpu_sentences(choices: Sequence[GpuChoice]) -> list[str]:
    """What to take away: the smallest, the fastest, the cheapest card."""
    fitting = [choice for choice in choices if isinstance(choice.answer, Plan)]
    if not fitting:
        nearest = min(
            (choice.answer for choice in choices if isinstance(choice.answer, NoPlan)), key=lambda no: no.missing_bytes
        )
        return [f"No card fits. Nearest: {nearest.workload.gpu.name}, {gib(nearest.missing_bytes)} missing."]
    sure = [choice for choice in fitting if choice.answer.subject.verdict == "fits"]
    tight = f", {len(fitting) - len(sure)} of them may run out of memory" if len(sure) < len(fitting) else ""
    named = sure or fitting  # as a plan takes what surely fits before what only may
    smallest = min(named, key=lambda choice: (choice.answer.workload.memory_bytes, choice.speed_place or 0))
    fastest = min(named, key=lambda choice: choice.speed_place or 0)
    sentences = [
        f"{len(fitting)} of {len(choices)} cards fit{tight}.",
        f"Smallest: {_words(smallest)}.",
        f"Fastest: {_words(fastest)}.",
    ]
    priced = [choice for choice in named if choice.cost_place is not None]
    cheapest = min(priced, key=lambda choice: choice.cost_place or 0, default=None)
    if cheapest is not None:
        sentences.append(f"Cheapest for the work: {_words(cheapest)}.")
    plans = [choice.answer for choice in fitting if isinstance(choice.answer, Plan)]
    if sizes := [size for plan in plans if (size := host_bytes(plan.workload, plan.chosen))]:
        least, most = gib(min(sizes)), gib(max(sizes))
        between = least if least == most else f"{least} to {most}"
        sentences.append(f"{len(sizes)} of them need {between} of every node's host memory too (--json: host_bytes).")
    if note := adapters_note(plan.chosen.setup for plan in plans):
        sentences.append(note)
    return sentences


def _words(choice: GpuChoice) -> str:
    assert isinstance(choice.answer, Plan)
    chosen, workload, duration_s = choice.answer.chosen, choice.answer.workload, choice.duration_s
    speed = f"{chosen.tokens_per_s:,.0f} tokens/s ({speed_mark(chosen.speed_evidence)})"
    words = [f"{clean(choice.gpu.name)} ({gib(workload.memory_bytes)})", host_words(workload, chosen), speed]
    words += ["may run out of memory"] if chosen.verdict != "fits" else []
    if duration_s is None:
        words += [] if choice.cost_usd is None else [f"${choice.cost_usd:,.3f} per million tokens"]
        return joined(words)
    words.append(seconds(duration_s))
    if choice.cost_usd is None or workload.price_per_hour is None:
        return joined((*words, "no price known"))
    per_hour = f"{dollars(workload.price_per_hour)} per GPU hour, {clean(workload.price_source)}"
    return joined((*words, f"{dollars(choice.cost_usd)} ({per_hour})"))


def which_gpu_title(workload: Workload) -> str:
    """The first line: the model, what a step must look like, and how much is trained on."""
    several = f"{workload.num_gpus} of each" if workload.num_gpus > 1 else ""
    model = f"Which GPU for {clean(workload.model.model_id)} ({count(workload.model.num_params)} parameters)"
    step = (objective_words(workload), f"{workload.seq_len_tokens:,} tokens", step_words(workload))
    return joined((model, several, *step, job_words(workload)), " · ")


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
        if self.only_fitting and any(choice.fits for choice in choices):
            choices = [choice for choice in choices if choice.fits]
        by_method, setups = console.width >= BY_METHOD_COLUMNS, console.width >= SETUP_COLUMNS
        header, rows, right = _gpus_table(choices, by_method=by_method, setups=setups)
        page.whole(header, rows, right=right, fixed=("--gpu", "method", "method ", "priced on"))
        marks = memory_marks(
            choice.answer.chosen.memory_evidence for choice in choices if isinstance(choice.answer, Plan)
        )
        job = any(choice.duration_s is not None for choice in choices)
        what = "#: place by time and by cost of the whole job. " if job else "#: place by tokens/s and by cost. "
        words = (
            f"{what if by_method else ''}{'' if job else '$/M: US dollars per million tokens. '}Peaks: {marks or '-'}."
        )
        if by_method:
            words += " full, LoRA, QLoRA (base or experts of 4 bits): tokens/s of the fastest that the plan compared"
            several = choices[0].answer.workload.num_gpus > 1
            words += "; of several GPUs --method plans one that it did not need." if several else "."
        elif any(isinstance(choice.answer, Plan) and choice.answer.chosen.verdict != "fits" for choice in choices):
            words += f" {TIGHT_MARK}: may run out of memory."
        if not setups and not all(choice.fits for choice in choices):
            words += " +: memory that is missing."
        page.line(words, style="dim")
        if note := self._samples_speed():
            page.line(note, style="dim")
        missing = [choice for choice in choices if isinstance(choice.answer, Plan) and choice.cost_place is None]
        if missing:
            page.line(f"{len(missing)} {plural(len(missing), 'card')} without a known price.", style="dim")
        if any(choice.cost_place for choice in choices):
            dates = price_dates(choice.answer.workload for choice in choices)
            prices = joined(("Prices", dates, "are indicative"), " ")
            page.line(f"{prices}; plan MODEL --gpu GPU --price sets your own.", style="dim")

    def markdown(self) -> str:
        table = markdown_table(*_gpus_table(self.choices, by_method=True, setups=True))
        title = which_gpu_title(self.choices[0].answer.workload)
        return document(title, bullets(which_gpu_sentences(self.choices)), table, escape(self._samples_speed()))

    def document(self) -> dict[str, Any]:
        workload = self.choices[0].answer.workload
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "which_gpu",
            "model": workload.model.model_id,
            "num_gpus": workload.num_gpus,
            "seq_len_tokens": workload.seq_len_tokens,
            "global_batch_seqs": workload.global_batch_seqs,
            "answer": " ".join(which_gpu_sentences(self.choices)),
            "cards": list(map(_gpu_json, self.choices)),
        }

    def _samples_speed(self) -> str:
        plans = (choice.answer for choice in self.choices if isinstance(choice.answer, Plan))
        return samples_speed_words((plan.workload, plan.chosen) for plan in plans)


def _gpu_json(choice: GpuChoice) -> dict[str, Any]:
    answer, chosen = choice.answer, choice.answer.subject
    return {
        "gpu": choice.gpu.key,
        "memory_bytes": answer.workload.memory_bytes,
        "fits": choice.fits,
        "verdict": chosen.verdict,
        "host_bytes": host_bytes(answer.workload, chosen) if choice.fits else 0,
        "missing_bytes": 0 if isinstance(answer, Plan) else answer.missing_bytes,
        "tokens_per_s": chosen.tokens_per_s if choice.fits else None,
        "speed_place": choice.speed_place,
        "usd_per_hour": answer.workload.price_per_hour,
        "price_source": answer.workload.price_source or None,
        "price_date": price_date(answer.workload) or None,
        "usd_per_million_tokens": cost_per_million(answer),
        "duration_s": choice.duration_s,
        "samples_tokens_per_s": useful_tokens_per_s(answer.workload, chosen) if choice.duration_s else None,
        "cost_usd": None if choice.duration_s is None else choice.cost_usd,
        "cost_place": choice.cost_place,
        "candidate": candidate_to_dict(chosen, answer.workload.model.model_id, choice.gpu.key),
    }


RIGHT = ("memory", "host", "GiB", "tokens/s", "time", "#", "cost", "$/M", "# ", "$/hour", *METHOD_SHORT.values())
"""Columns of numbers."""


def _gpus_table(
    choices: Sequence[GpuChoice], *, by_method: bool, setups: bool
) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """Header, rows and the columns of numbers; `by_method`: with the places, every method's speed and the price with
    its date; `setups`: in full words. Without either a row fits 80 columns."""
    job = any(choice.duration_s is not None for choice in choices)
    costs = ("time", "cost") if job else ("$/M",)
    cells = [_gpu_cells(choice) for choice in choices]
    header: tuple[str, ...] = ("--gpu", "GiB", "tokens/s", *costs, "method ")
    if by_method:
        places = ("time", "#", "cost", "# ") if job else ("#", "$/M", "# ")
        details = ("$/hour", "priced on", *METHOD_SHORT.values(), "setup" if setups else "method")
        header = (
            "--gpu",
            "memory",
            *["host"] * any("host" in row for row in cells),
            "fits",
            "tokens/s",
            *places,
            *details,
        )
    return header, [tuple(row.get(name, "-") for name in header) for row in cells], RIGHT


def _gpu_cells(choice: GpuChoice) -> dict[str, str]:
    workload = choice.answer.workload
    cells = {"--gpu": choice.gpu.key, "memory": gib(workload.memory_bytes), "GiB": f"{workload.memory_bytes / GIB:.2f}"}
    if workload.price_per_hour is not None:
        cells["$/hour"] = dollars(workload.price_per_hour)
    cells["priced on"] = "not known" if workload.price_per_hour is None else price_date(workload)
    if isinstance(choice.answer, NoPlan):
        missing = gib(choice.answer.missing_bytes)
        return cells | {"fits": "no", "setup": f"{missing} missing", "method": f"+{missing}", "method ": f"+{missing}"}
    chosen = choice.answer.chosen
    method = METHOD_SHORT[node_of_setup(chosen.setup).method]
    cells |= {
        "fits": fit_word(chosen),
        "tokens/s": f"{chosen.tokens_per_s:,.0f}",
        "#": str(choice.speed_place or "-"),
        "# ": str(choice.cost_place or "-"),
        "setup": short_setup_words(chosen.setup),
        "method": method,
        "method ": method if chosen.verdict == "fits" else f"{method} {TIGHT_MARK}",
    }
    if size := host_bytes(workload, chosen):
        cells["host"] = gib(size)
    if choice.duration_s is not None:
        cells["time"] = seconds(choice.duration_s)
    if choice.cost_usd is not None:
        cells |= {"cost": dollars(choice.cost_usd), "$/M": f"{choice.cost_usd:,.3f}"}
    best = best_by_method(choice.answer)
    return cells | {METHOD_SHORT[name]: f"{best[name].tokens_per_s:,.0f}" for name in METHOD_SHORT if name in best}


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """One model on the card.

    Attributes:
        longest_tokens: method -> longest sequence that fits alone, 0 where none does.
        answer: of the length asked for; None where the options leave the model none.
    """

    model: ModelSpec
    longest_tokens: Mapping[str, int]
    answer: Plan | NoPlan | None

    @property
    def fits(self) -> bool:
        return isinstance(self.answer, Plan)


@dataclass(frozen=True)
class ModelsSheet(Sheet):
    """The models, largest first; on a terminal those that fit, with `every` the others too."""

    rows: Sequence[ModelChoice]
    workload: Workload
    every: bool = False

    def render(self, console: Console) -> None:
        page, workload = Page(console), self.workload
        page.line(self._title(), style="bold")
        for sentence in self._sentences():
            page.line(sentence)
        page.line()
        header, cells, right = _models_table(self.rows if self.every else [row for row in self.rows if row.fits])
        page.whole(header, cells, right=right, fixed=("plan",))
        page.line(
            "full, LoRA, QLoRA: longest sequence that fits alone, every layer checkpointed (formula). plan, tokens/s: "
            f"what plan MODEL --gpu {workload.gpu.key} takes at {workload.seq_len_tokens:,} tokens{self._marks()}.",
            style="dim",
        )

    def markdown(self) -> str:
        return document(self._title(), bullets(self._sentences()), markdown_table(*_models_table(self.rows)))

    def document(self) -> list[dict[str, Any]]:
        plans = [row.answer if isinstance(row.answer, Plan) else None for row in self.rows]
        return [
            {
                "model": row.model.model_id,
                "num_params": row.model.num_params,
                "longest_tokens": dict(row.longest_tokens),
                "fits": row.fits,
                "tokens_per_s": plan and plan.chosen.tokens_per_s,
                "candidate": plan and candidate_to_dict(plan.chosen, row.model.model_id, plan.workload.gpu.key),
            }
            for row, plan in zip(self.rows, plans, strict=True)
        ]

    def _title(self) -> str:
        workload = self.workload
        card, tokens = f"What {clean(workload.gpu.name)} can fine-tune", f"{workload.seq_len_tokens:,} tokens"
        return joined((card, objective_words(workload), tokens, step_words(workload)), " · ")

    def _sentences(self) -> list[str]:
        rows = self.rows
        sentences = [f"{sum(row.fits for row in rows)} of {len(rows)} {plural(len(rows), 'model')} can be fine-tuned."]
        for method in METHOD_SHORT:
            planned = [(row, row.answer.workload) for row in rows if isinstance(row.answer, Plan)]
            reach = [row for row, workload in planned if row.longest_tokens.get(method, 0) >= workload.seq_len_tokens]
            if reach:
                largest = max(reach, key=lambda row: row.model.num_params)
                size = count(largest.model.num_params)
                sentences.append(f"Largest with {METHOD_SHORT[method]}: {clean(largest.model.model_id)} ({size}).")
        return sentences

    def _marks(self) -> str:
        plans = [row.answer.chosen for row in self.rows if isinstance(row.answer, Plan)]
        memory = (candidate.memory_evidence for candidate in plans)
        speed = (candidate.speed_evidence for candidate in plans)
        return f" (memory: {memory_marks(memory)}; speed: {speed_marks(speed)})" if plans else ""


def _models_table(rows: Sequence[ModelChoice]) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    header = ("model", "size", "full", "LoRA", "QLoRA", "plan", "tokens/s")
    cells = []
    for row in rows:
        chosen = row.answer.chosen if isinstance(row.answer, Plan) else None
        cells.append(
            (
                clean(row.model.model_id),
                count(row.model.num_params),
                *(f"{tokens:,}" if (tokens := row.longest_tokens.get(method)) else "-" for method in METHOD_SHORT),
                METHOD_SHORT[node_of_setup(chosen.setup).method] if chosen else "-",
                f"{chosen.tokens_per_s:,.0f}" if chosen else "-",
            )
        )
    return header, cells, ("size", "full", "LoRA", "QLoRA", "tokens/s")


NOTHING_CITED = "nothing is cited here"
ADAPTERS_HEADER = ("adapter", "size", "trained", "memory", "tokens/s", "band", "merges")
ADAPTERS_RIGHT = ("size", "trained", "memory", "tokens/s", "band")


@dataclass(frozen=True)
class AdaptersSheet(Sheet):
    """The kinds, each in the place of `lora`, and what was published of their quality, as Markdown with the sources."""

    rows: Sequence[KindChoice]
    workload: Workload
    lora: TrainSetup

    def render(self, console: Console) -> None:
        page = Page(console)
        page.line(_title("Adapters", self.workload), style="bold")
        page.line(self._intro())
        page.line()
        page.whole(ADAPTERS_HEADER, map(_cells, self.rows), right=ADAPTERS_RIGHT, fixed=("adapter",))
        for sentence in _sentences(self.rows):
            page.line(sentence, style="dim")
        page.head("What was published of their quality")
        for row in self.rows:
            page.line(f"{row.kind.name}: {row.kind.quality or NOTHING_CITED}")

    def markdown(self) -> str:
        quality = [(row.kind.name, row.kind.quality or NOTHING_CITED, row.kind.source) for row in self.rows]
        return document(
            _title("Adapters", self.workload),
            escape(self._intro()),
            markdown_table(ADAPTERS_HEADER, map(_cells, self.rows), ADAPTERS_RIGHT),
            bullets(_sentences(self.rows)),
            markdown_table(("adapter", "published quality", "source"), quality),
        )

    def document(self) -> list[dict[str, Any]]:
        names = self.workload.model.model_id, self.workload.gpu.key
        return [
            {
                "adapter": row.kind.name,
                "num_trained_params": row.num_trained,
                "refused": row.refused,
                "changed": list(row.changed),
                "fits": row.candidate is not None and row.candidate.fits,
                "predicted_peak_device_bytes": row.candidate and row.candidate.formula.peak_device_bytes,
                "tokens_per_s": row.candidate and row.candidate.formula.tokens_per_s,
                "time_band_fraction": row.candidate and row.candidate.formula.time_band_fraction,
                "merges": row.kind.merges,
                "quality": row.kind.quality,
                "source": row.kind.source,
                "candidate": row.candidate and candidate_to_dict(row.candidate, *names),
            }
            for row in self.rows
        ]

    def _intro(self) -> str:
        return f"Each in the place of LoRA in what is planned: {setup_words(self.lora)}."


def _cells(row: KindChoice) -> tuple[str, ...]:
    candidate = row.candidate
    if candidate is None:
        return row.kind.name, "", "", "refused", "", "", ""
    return (
        row.kind.name,
        str(candidate.setup.lora_rank) if row.kind.size else "-",
        count(row.num_trained),
        gib(candidate.formula.peak_device_bytes) + ("" if candidate.fits else " !"),
        *_speed(candidate),
        "yes" if row.kind.merges else "no",
    )


def _sentences(rows: Sequence[KindChoice]) -> list[str]:
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
    rows: Sequence[TargetChoice]
    workload: Workload

    def render(self, console: Console) -> None:
        page = Page(console)
        page.line(_title("Targets", self.workload), style="bold")
        page.line()
        page.whole(TARGETS_HEADER, _targets(self.rows), right=TARGETS_RIGHT, fixed=("target", "tokens/s", "memory"))
        for sentence in _target_sentences(self.rows):
            page.line(sentence)

    def markdown(self) -> str:
        table = markdown_table(TARGETS_HEADER, _targets(self.rows), TARGETS_RIGHT)
        return document(_title("Targets", self.workload), table, bullets(_target_sentences(self.rows)))

    def document(self) -> list[dict[str, Any]]:
        names = self.workload.model.model_id, self.workload.gpu.key
        return [
            {
                "target": row.target,
                "title": row.title,
                "refused": row.refused,
                "tokens_per_s": row.tokens_per_s,
                "time_band_fraction": row.candidate and row.candidate.formula.time_band_fraction,
                "predicted_peak_device_bytes": row.candidate and row.candidate.formula.peak_device_bytes,
                "candidate": row.candidate and candidate_to_dict(row.candidate, *names),
            }
            for row in self.rows
        ]


def _title(what: str, workload: Workload) -> str:
    cards = f"{workload.num_gpus} x " if workload.num_gpus > 1 else ""
    model, gpu = clean(workload.model.model_id), clean(workload.gpu.name)
    tokens = f"{workload.seq_len_tokens:,} tokens"
    return joined((f"{what} for {model} on {cards}{gpu}", objective_words(workload), tokens), " · ")


def _target_sentences(rows: Sequence[TargetChoice]) -> list[str]:
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
    return [
        (
            row.target,
            row.title,
            *_speed(row.candidate),
            gib(row.candidate.formula.peak_device_bytes),
            setup_words(row.candidate.setup),
        )
        for row in rows
        if row.candidate is not None
    ]


def _speed(candidate: Candidate) -> tuple[str, str]:
    formula = candidate.formula
    return f"{formula.tokens_per_s:,.0f}" if formula.tokens_per_s else "-", speed_band(formula) or "-"
