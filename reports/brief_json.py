"""`--json=brief`: any command's document in at most MAX_BYTES, for readers that pay for each token.

A plan keeps what the short answer on the terminal says, every other document its head: long lists are cut, and what was
left out is counted. Nothing here is computed anew.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from planner.interchange import SCHEMA_VERSION, asked_form, to_jsonable
from planner.outcome import Measurement, Prediction, speed_rung
from planner.plan import NoPlan, Plan
from planner.records import dataclass
from planner.setup import TrainSetup
from reports.brief import why_not
from reports.plain import clean
from reports.plan_json import plan_from_dict
from reports.rows import compared, notes_of
from reports.text import nothing_sentence, short_verdict

MAX_BYTES = 8_000
MAX_TEXT = 300
LENGTHS = (24, 12, 8, 5, 3, 1)
"""How many entries of each list are kept: the first that is short enough."""
HEAVY = frozenset(
    {"terms", "term_list", "candidate", "walk", "ranked", "space", "time_parts_s", "phase_peaks_bytes", "bands"}
    | {"note_places", "rank_peaks", "timeline", "unsourced", "origins", "setups"}
)
"""Parts of a document that the whole one (`--json`) is for."""
LEFT_OUT = "left_out"


def brief(document: Any, *, max_bytes: int = MAX_BYTES, heavy: bool = False) -> Any:
    """The document cut to `max_bytes`, under the names of the whole one; of a plan the short answer.

    Args:
        heavy: the HEAVY parts too, cut as all others.
    """
    if isinstance(document, Mapping) and document.get("kind") in {"plan", "no_plan"}:
        document = plan_brief(plan_from_dict(json.loads(json.dumps(document))))
    elif isinstance(document, Mapping) and document.get("kind") == "check":
        document = check_brief(document)
    without: frozenset[str] = frozenset() if heavy else HEAVY
    for length in LENGTHS:
        short = _cut(document, length, without)
        if len(json.dumps(short, ensure_ascii=False).encode(errors="replace")) <= max_bytes:
            return short
    return _outline(document)


@dataclass(frozen=True, kw_only=True)
class BriefMemory:
    """Peak on the device, the level that says so, and how far it may be off."""

    peak_device_bytes: int
    level: str
    band_fraction: float | None
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class BriefSpeed:
    """Tokens/s and seconds per optimizer step, likewise."""

    tokens_per_s: float | None
    step_time_s: float | None
    level: str
    band_fraction: float | None


@dataclass(frozen=True, kw_only=True)
class BriefInstead:
    """What was not chosen, and why."""

    label: str
    peak_device_bytes: int
    tokens_per_s: float | None
    why_not: str


@dataclass(frozen=True, kw_only=True)
class BriefPlan:
    """A plan's short answer: the verdict, the setup, its figures with level and band, what was not chosen and why, or
    (no_plan) what would fit. Its JSON Schema is made of these fields."""

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
    notes: tuple[str, ...] = ()


def plan_brief(answer: Plan | NoPlan) -> dict[str, Any]:
    """`BriefPlan` of an answer, as JSON values."""
    subject, workload = answer.subject, answer.workload
    memory, speed = memory_figures(subject.memory_evidence), speed_figures(subject.speed_evidence)
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
        would_fit = tuple(clean(one.action) for one in answer.remedies if one.fits)
    found = BriefPlan(
        schema_version=SCHEMA_VERSION,
        kind="plan" if isinstance(answer, Plan) else "no_plan",
        model=workload.model.model_id,
        num_params=workload.model.num_params,
        gpu=workload.gpu.key,
        num_gpus=workload.num_gpus,
        answer=short_verdict(answer) if isinstance(answer, Plan) else nothing_sentence(answer),
        verdict=subject.verdict,
        setup=subject.setup,
        memory=BriefMemory(**memory, budget_bytes=subject.budget_bytes),
        speed=BriefSpeed(**speed),
        instead=instead,
        would_fit=would_fit,
        notes=tuple(clean(note) for note in notes_of(answer)),
    )
    values: dict[str, Any] = to_jsonable(found)
    return values | {"setup": asked_form(subject.setup)}


def check_brief(document: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on a file, the setup that it means, its figures, and what single changes would give."""
    found, level = document["prediction"], document["rung"]
    names = ("kind", "file", "format", "model", "gpu", "verdict", "setup")
    figures = {
        "memory": {
            "peak_device_bytes": found["peak_device_bytes"],
            "level": level,
            "band_fraction": document["memory_band_fraction"],
            "budget_bytes": document["budget_bytes"],
        },
        "speed": {
            "tokens_per_s": found["tokens_per_s"],
            "step_time_s": found["step_time_s"],
            "level": found["rung"],
            "band_fraction": found["time_band_fraction"],
        },
    }
    wanted = ("label", "verdict", "peak_device_bytes", "tokens_per_s", "changes_training")
    changes = [{name: one[name] for name in wanted} for one in document["changes"]]
    rest = {name: document[name] for name in ("unknown_keys", "assumptions", "approximations", "notes")}
    return {name: document[name] for name in names} | figures | {"changes": changes} | rest


def memory_figures(evidence: Prediction | Measurement) -> dict[str, Any]:
    """Peak on the device, the level that says so, and how far it may be off."""
    band = evidence.memory_band_fraction if isinstance(evidence, Prediction) else None
    return {
        "peak_device_bytes": evidence.peak_device_bytes,
        "level": evidence.rung.value,
        "band_fraction": band,
    }


def speed_figures(evidence: Prediction | Measurement) -> dict[str, Any]:
    """Tokens/s and seconds per optimizer step, likewise."""
    return {
        "tokens_per_s": evidence.tokens_per_s,
        "step_time_s": evidence.step_time_s,
        "level": speed_rung(evidence).value,
        "band_fraction": evidence.time_band_fraction,
    }


def _cut(value: Any, length: int, without: frozenset[str]) -> Any:
    """Without these parts, empty ones and nulls; lists and texts at their length, numbers at 6 digits."""
    if isinstance(value, Mapping):
        kept = {key: one for key, one in value.items() if key not in without and one not in (None, [], {})}
        return {key: _cut(one, length, without) for key, one in kept.items()}
    if isinstance(value, (list, tuple)):
        head = [_cut(one, length, without) for one in value[:length]]
        return [*head, {LEFT_OUT: len(value) - length}] if len(value) > length else head
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}..."
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value


def _outline(value: Any) -> Any:
    """What stands there, each part that is no single value as the number of its entries."""
    if isinstance(value, Mapping):
        parts = {key: one for key, one in value.items() if one not in (None, [], {})}
        return {key: {LEFT_OUT: len(one)} if isinstance(one, (Mapping, list)) else one for key, one in parts.items()}
    return {LEFT_OUT: len(value)} if isinstance(value, (list, tuple)) else value
