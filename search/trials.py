"""What a study's trials say, read as what others wrote: a foreign program, an older version, a damaged file.

The one reader of a trial's attributes. `record_of` and `marks_of` take every attribute by its type and its bounds; what
is neither is as if it were not there, so that no attribute can stop a search.
"""

from typing import Any

from optuna.trial import FrozenTrial, TrialState

from planner.core.errors import SetupError
from planner.core.inputs import number
from planner.core.records import dataclass
from planner.setup import TrainSetup
from planner.setup.codec import evidence_from_text
from planner.setup.interchange import setup_from_dict
from planner.setup.outcome import Evidence

EXCLUDED = "excluded"
"""Origin of a trial that the formula excluded."""
LOST_ATTR = "lost"
RETRY_OF_ATTR = "retry_of"
ORDER_ATTR = "order"
"""Of a retry: the place in the order of claims, that of the first attempt. Else a trial's number is its place."""
GIVEN_UP_ATTR = "given_up"
WORKER_ATTR = "worker"
ALIVE_ATTR = "alive_at_s"
INTENT_ATTR = "intent:"
"""Prefix: who was about to take a waiting trial, written before it is taken, false once another was quicker. A worker
killed between taking a trial and signing it would else leave one that everybody believes to be running."""

MAX_TEXT = 4 << 20
"""Characters of an attribute; the evidence of a large model takes some thousands."""
MAX_NAME = 200
MAX_COUNT = 1 << 31


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial of the study in the project's own types.

    Attributes:
        origin: "plan", "ranked" (enqueued), a sampler's name, "excluded" (before any probe) or "retry".
        probed: whether it cost a probe.
        excluded: why it was left out without one; empty otherwise.
        evidence: None while it runs, and for those that the formula excluded.
        order: place in the order of claims; smaller goes first.
    """

    number: int
    setup: TrainSetup
    state: TrialState
    origin: str
    evidence: Evidence | None = None
    excluded: str = ""
    probed: bool = False
    duration_s: float = 0.0
    completed_at_s: float = 0.0
    retries: int = 0
    order: int = 0


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What workers wrote on a trial for one another.

    Attributes:
        key: of its setup; None where it has none.
        order: place in the order of claims.
        retry_of: number of the lost trial in whose place it is.
        worker: who took it.
        intents: who was about to take it.
        alive_at_s: when its worker was last heard, in seconds since 1970.
    """

    key: str | None
    order: int
    retry_of: int | None
    lost: bool
    given_up: bool
    worker: str | None
    intents: tuple[str, ...]
    alive_at_s: float | None


def marks_of(trial: FrozenTrial) -> Marks:
    """The marks of a trial, whoever wrote it."""
    attrs = trial.user_attrs
    order = _count(attrs.get(ORDER_ATTR))
    intents = [name for name, still in attrs.items() if name.startswith(INTENT_ATTR) and still is True]
    return Marks(
        key=_text(attrs.get("key"), MAX_TEXT),
        order=trial.number if order is None else order,
        retry_of=_count(attrs.get(RETRY_OF_ATTR)),
        lost=attrs.get(LOST_ATTR) is True,
        given_up=attrs.get(GIVEN_UP_ATTR) is True,
        worker=_text(attrs.get(WORKER_ATTR), MAX_NAME),
        intents=tuple(name for one in intents if (name := _text(one.removeprefix(INTENT_ATTR), MAX_NAME))),
        alive_at_s=_time(attrs.get(ALIVE_ATTR)),
    )


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """The trial in our terms; None where it is none of ours (a foreign program's, a damaged attribute)."""
    attrs = trial.user_attrs
    origin, excluded = (_text(attrs.get(name, ""), MAX_TEXT) for name in ("origin", "excluded"))
    text, duration_s = attrs.get("evidence"), _time(attrs.get("duration_s", 0.0))
    retries = attrs.get("retries", 0)
    if origin is None or excluded is None or duration_s is None or (retries != -1 and _count(retries) is None):
        return None
    if not isinstance(attrs.get("setup"), dict) or (text and _text(text, MAX_TEXT) is None):
        return None
    try:
        setup = setup_from_dict(attrs["setup"])
        evidence = evidence_from_text(text) if text else None
    except (SetupError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return None
    completed = trial.datetime_complete
    return TrialRecord(
        number=trial.number,
        setup=setup,
        state=trial.state,
        origin=origin,
        evidence=evidence,
        excluded=excluded,
        probed=evidence is not None and not excluded,
        duration_s=duration_s,
        completed_at_s=completed.timestamp() if completed else 0.0,
        retries=retries,
        order=marks_of(trial).order,
    )


def _text(value: Any, most: int) -> str | None:
    """Text of at most so many characters that a file name may hold."""
    return value if isinstance(value, str) and len(value) <= most and "\0" not in value else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def _time(value: Any) -> float | None:
    try:
        return number(value, "a time", least=0.0)
    except ValueError:
        return None
