"""`--json`: any command's document in at most MAX_BYTES, for readers that pay for each token; `--json=full` is all.

The answers of `plan`, `estimate`, `check`, `which-gpu` and `oom` are dataclasses, and `plan --json-schema` is made of
them; of every other document it is the head: long lists are cut, and what was left out is counted. Nothing is computed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import product
from typing import Any, Literal

from planner.core.records import dataclass
from planner.planning.failures.diagnosis import Cause
from planner.planning.failures.snapshot import Holder
from planner.planning.plan import Plan
from planner.setup import TrainSetup
from planner.setup.interchange import SCHEMA_VERSION, request_form, to_jsonable
from planner.setup.outcome import Band, Candidate, Prediction, sides_of, speed_level, speed_sides
from reports.extras import extras_from_dict
from reports.plain import clean
from reports.plan_json import candidate_from_dict, plan_from_dict
from reports.rows import compared, notes_of
from reports.setup_text import short_setup_words
from reports.terminal import why_not
from reports.text import nothing_sentence, short_verdict

MAX_BYTES = 8_000
MAX_TEXT = 300
LENGTHS = (24, 12, 8, 5, 3, 1, 0)
"""How many entries of each list are kept: the first that is short enough."""
DEPTHS = (99, 4, 3, 2, 1)
"""How deep a document is told: all of it, else what lies deeper is counted; the first at which a length is enough."""
HEAVY = frozenset(
    {"terms", "term_list", "candidate", "walk", "ranked", "space", "time_parts_s", "phase_peaks_bytes", "bands"}
    | {"note_places", "rank_peaks", "timeline", "unsourced", "origins", "setups"}
)
"""Parts of a document that the whole one (`--json=full`) is for."""
LEFT_OUT = "left_out"


def brief(document: Any, *, max_bytes: int = MAX_BYTES, indent: int | None = None, heavy: bool = False) -> Any:
    """The document cut to `max_bytes` of text, under the names of the whole one; of BRIEF's kinds the short answer.

    Args:
        indent: spaces by which the text is indented.
        heavy: the HEAVY parts too, cut as all others.
    """
    document = _answer(document)
    without: frozenset[str] = frozenset() if heavy else HEAVY
    lengths = LENGTHS if isinstance(document, Mapping) else LENGTHS[:-1]  # of a list of answers one is left
    for depth, length in product(DEPTHS, lengths):
        short = _cut(document, length, without, depth)
        if len(json.dumps(short, ensure_ascii=False, indent=indent).encode(errors="replace")) <= max_bytes:
            return short
    return short


@dataclass(frozen=True, kw_only=True)
class BriefMemory:
    """Peak on the device, the level that says so, and how far it may be off: the wider side, and each; the verdict is
    by what it may be above."""

    peak_device_bytes: int
    level: str
    band_fraction: float | None
    band_below_fraction: float | None
    band_above_fraction: float | None
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class BriefSpeed:
    """Tokens/s and seconds per optimizer step: the step lies within x or / (1 + `band_fraction`), the tokens/s within
    the two sides."""

    tokens_per_s: float | None
    step_time_s: float | None
    level: str
    band_fraction: float | None
    band_below_fraction: float | None
    band_above_fraction: float | None


@dataclass(frozen=True, kw_only=True)
class BriefInstead:
    label: str
    peak_device_bytes: int
    tokens_per_s: float | None
    why_not: str


@dataclass(frozen=True, kw_only=True)
class BriefLaunch:
    """The files written for one target, what starts them in the plan's directory (`command`), what installs and starts
    them from here (`run`), and what is predicted of them, or why there are none."""

    target: str
    run: str
    command: str
    files: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BriefPlan:
    """A plan's short answer: the verdict, the setup, its figures with level and band, what was not chosen and why, or
    (no_plan) what would fit, and what was written."""

    schema_version: int
    kind: Literal["plan", "no_plan"]
    model: str
    num_params: int
    gpu: str
    num_gpus: int
    answer: str
    verdict: str
    setup: TrainSetup
    memory: BriefMemory
    speed: BriefSpeed
    instead: tuple[BriefInstead, ...] = ()
    would_fit: tuple[str, ...] = ()
    launch: tuple[BriefLaunch, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BriefEstimate:
    """One setup's figures: the bytes of each category at the peak, and memory over varying lengths."""

    schema_version: int
    kind: Literal["estimate"]
    model: str
    gpu: str
    fits: bool
    verdict: str
    setup: TrainSetup
    memory: BriefMemory
    speed: BriefSpeed
    terms_bytes: Mapping[str, int]
    peak_phase: str | None
    cluster: Mapping[str, Any] | None
    over_lengths: Mapping[str, Any] | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BriefChange:
    label: str
    verdict: str
    peak_device_bytes: int
    tokens_per_s: float | None
    changes_training: bool


@dataclass(frozen=True, kw_only=True)
class BriefCheck:
    """The verdict on a file, the setup that it means, its figures, what single changes and several `together` would
    give, and the file that `--fix` wrote."""

    schema_version: int
    kind: Literal["check"]
    file: str
    format: str
    model: str
    gpu: str
    verdict: str
    setup: TrainSetup
    memory: BriefMemory
    speed: BriefSpeed
    changes: tuple[BriefChange, ...]
    together: Mapping[str, Any] | None
    fix: Mapping[str, Any] | None
    unknown_keys: tuple[str, ...]
    assumptions: tuple[str, ...]
    approximations: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BriefNotChecked:
    """A file of a folder that has no verdict: "not_planned", "undetermined" or "unreadable", and why."""

    schema_version: int
    kind: Literal["not_checked"]
    file: str
    verdict: str
    message: str


@dataclass(frozen=True, kw_only=True)
class BriefCard:
    """One card: what is chosen on it in words, and what it costs; where nothing fits, what is missing. Of a job,
    `samples_tokens_per_s` counts no padding, which `tokens_per_s` does."""

    gpu: str
    fits: bool
    verdict: str
    memory_bytes: int
    missing_bytes: int
    peak_device_bytes: int
    host_bytes: int
    tokens_per_s: float | None
    usd_per_hour: float | None
    usd_per_million_tokens: float | None
    duration_s: float | None
    samples_tokens_per_s: float | None
    cost_usd: float | None
    setup: str


@dataclass(frozen=True, kw_only=True)
class BriefWhichGpu:
    """Cards for a model in the order asked for, those that fit first."""

    schema_version: int
    kind: Literal["which_gpu"]
    model: str
    num_gpus: int
    seq_len_tokens: int
    global_batch_seqs: int
    answer: str
    cards: tuple[BriefCard, ...]


@dataclass(frozen=True, kw_only=True)
class BriefOom:
    """Why a run ran out of memory, what held the rest, what helps, and what its config says."""

    schema_version: int
    kind: Literal["oom"]
    phase: str | None
    where: str
    tried_bytes: int | None
    allocated_bytes: int | None
    total_bytes: int | None
    causes: tuple[Cause, ...]
    holders: tuple[Holder, ...]
    cards: tuple[str, ...]
    config: str | None
    check: BriefCheck | None
    not_checked: str
    unknown: tuple[str, ...]


def _plan(document: Mapping[str, Any]) -> dict[str, Any]:
    answer = plan_from_dict(document)
    subject, workload = answer.subject, answer.workload
    instead: tuple[BriefInstead, ...] = ()
    would_fit: tuple[str, ...] = ()
    if isinstance(answer, Plan):
        chosen, *others = compared(answer)
        instead = tuple(
            BriefInstead(
                label=clean(row.label),
                peak_device_bytes=row.peak.peak_device_bytes,
                tokens_per_s=row.speed.tokens_per_s,
                why_not=why_not(chosen, row),
            )
            for row in others
        )
    else:
        would_fit = tuple(clean(suggestion.action) for suggestion in answer.suggestions if suggestion.fits)
    extras = extras_from_dict(document)
    short = BriefPlan(
        schema_version=SCHEMA_VERSION,
        kind=answer.kind,
        model=workload.model.model_id,
        num_params=workload.model.num_params,
        gpu=workload.gpu.key,
        num_gpus=workload.num_gpus,
        answer=short_verdict(answer) if isinstance(answer, Plan) else nothing_sentence(answer),
        verdict=subject.verdict,
        setup=subject.setup,
        **_figures(subject),
        instead=instead,
        would_fit=would_fit,
        launch=tuple(
            BriefLaunch(
                target=launch.target,
                run=extras.run.get(launch.target, ""),
                command=launch.command,
                files=tuple(file.path for file in launch.files),
                notes=launch.notes,
            )
            for launch in extras.launch
        ),
        notes=tuple(clean(note) for note in notes_of(answer)),
    )
    return vars(short) | {"setup": request_form(subject.setup)}


def _estimate(document: Mapping[str, Any]) -> dict[str, Any]:
    subject = candidate_from_dict(document)
    best = document.get(subject.memory_evidence.level.value) or document["formula"]  # where a profile stands
    overrides = {
        "model": document["setup"]["model"],
        "gpu": document["setup"]["gpu"],
        "verdict": subject.verdict,
        "setup": request_form(subject.setup),
        **_figures(subject),
        "terms_bytes": best["terms"],
        "peak_phase": best["peak_phase"],
        "notes": [clean(note) for note in subject.notes],
    }
    return _of(BriefEstimate, {"cluster": None, "over_lengths": None, **document, **overrides})


def _check(document: Mapping[str, Any]) -> dict[str, Any]:
    prediction = document["prediction"]
    peak, budget = prediction["peak_device_bytes"], document["budget_bytes"]
    memory = _memory(peak, document["level"], Band(*document["memory_band"]), budget)
    time_band = prediction["time_band_fraction"]
    speed = BriefSpeed(
        tokens_per_s=prediction["tokens_per_s"],
        step_time_s=prediction["step_time_s"],
        level=document["speed_level"],
        **_speed_band(time_band, speed_sides(time_band, prediction["bands"])),
    )
    changes = [_of(BriefChange, change) for change in document["changes"]]
    return _of(BriefCheck, {**document, "memory": memory, "speed": speed, "changes": changes})


def _which_gpu(document: Mapping[str, Any]) -> dict[str, Any]:
    cards = []
    for card in document["cards"]:
        chosen = candidate_from_dict(card["candidate"])
        overrides = {
            "peak_device_bytes": chosen.memory_evidence.peak_device_bytes,
            "setup": short_setup_words(chosen.setup),
        }
        cards.append(_of(BriefCard, card | overrides))
    return _of(BriefWhichGpu, {**document, "cards": cards})


def _oom(document: Mapping[str, Any]) -> dict[str, Any]:
    checked, phase = document["check"], document["phase"]
    overrides = {"check": checked and _check(checked), "phase": phase and phase["name"]}
    return _of(BriefOom, {**document["message"], **document, **overrides})


BRIEF: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "plan": _plan,
    "no_plan": _plan,
    "estimate": _estimate,
    "check": _check,
    "which_gpu": _which_gpu,
    "oom": _oom,
}
"""Kind of a document -> what writes its short answer."""
TYPES = (BriefPlan, BriefEstimate, BriefCheck, BriefWhichGpu, BriefOom)
"""What the short answers hold."""
OF_FOLDER = (BriefCheck, BriefNotChecked)
"""What the list of a folder's files holds."""


def _answer(document: Any) -> Any:
    """The short answer of a document, or of each in a list, as JSON values; another document as it is."""
    if isinstance(document, list):
        return list(map(_answer, document))
    write = BRIEF.get(str(document.get("kind"))) if isinstance(document, Mapping) else None
    return document if write is None else to_jsonable(write(json.loads(json.dumps(document))))


def _of(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(kind)}


def _figures(subject: Candidate) -> dict[str, Any]:
    memory, speed = subject.memory_evidence, subject.speed_evidence
    band = memory.memory_band if isinstance(memory, Prediction) else None
    return {
        "memory": _memory(memory.peak_device_bytes, memory.level.value, band, subject.budget_bytes),
        "speed": BriefSpeed(
            tokens_per_s=speed.tokens_per_s,
            step_time_s=speed.step_time_s,
            level=speed_level(speed).value,
            **_speed_band(speed.time_band_fraction, sides_of(speed)),
        ),
    }


def _memory(peak_device_bytes: int, level: str, band: Band | None, budget_bytes: int) -> BriefMemory:
    return BriefMemory(
        peak_device_bytes=peak_device_bytes,
        level=level,
        band_fraction=band and band.widest,
        band_below_fraction=band and band.below,
        band_above_fraction=band and band.above,
        budget_bytes=budget_bytes,
    )


def _speed_band(fraction: float | None, sides: Band | None) -> dict[str, float | None]:
    below, above = sides or (None, None)
    return {"band_fraction": fraction, "band_below_fraction": below, "band_above_fraction": above}


def _cut(value: Any, length: int, without: frozenset[str], depth: int) -> Any:
    """Without these parts, empty ones and nulls; lists and texts at their length, what is too deep as the number of its
    entries, numbers at 6 digits."""
    if isinstance(value, (Mapping, list, tuple)) and not depth:
        return {LEFT_OUT: len(value)}
    if isinstance(value, Mapping):
        kept = {key: entry for key, entry in value.items() if key not in without and entry not in (None, [], {})}
        return {key: _cut(entry, length, without, depth - 1) for key, entry in kept.items()}
    if isinstance(value, (list, tuple)):
        head = [_cut(element, length, without, depth - 1) for element in value[:length]]
        return [*head, {LEFT_OUT: len(value) - length}] if len(value) > length else head
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}..."
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value
