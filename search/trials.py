"""What a study's trials say, read as what others wrote: a foreign program, an older version, a damaged file.

The one reader of a trial's attributes. `record_of` takes every attribute by its type and its bounds; what
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

MAX_TEXT = 4 << 20
"""Characters of an attribute; the evidence of a large model takes some thousands."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial of the study in the project's own types.

    Attributes:
        origin: "plan", "ranked" (enqueued), a sampler's name, or "excluded" (before any probe).
        probed: whether it cost a probe.
        excluded: why it was left out without one; empty otherwise.
        evidence: None while it runs, and for those that the formula excluded.
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


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """The trial in our terms; None where it is none of ours (a foreign program's, a damaged attribute)."""
    attrs = trial.user_attrs
    origin, excluded = (_text(attrs.get(name, ""), MAX_TEXT) for name in ("origin", "excluded"))
    text, duration_s = attrs.get("evidence"), _time(attrs.get("duration_s", 0.0))
    if origin is None or excluded is None or duration_s is None:
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
    )


def _text(value: Any, most: int) -> str | None:
    """Text of at most so many characters that a file name may hold."""
    return value if isinstance(value, str) and len(value) <= most and "\0" not in value else None


def _time(value: Any) -> float | None:
    try:
        return number(value, "a time", least=0.0)
    except ValueError:
        return None
