"""Names that look like one that nobody knows: for hints, never taken unasked."""

from collections.abc import Iterable
from difflib import get_close_matches


def close_names(wanted: str, names: Iterable[str], *, num: int = 3, cutoff: float = 0.6) -> list[str]:
    """The `num` names most like `wanted`, best first; `cutoff`: share of letters in common, in order, from 0 to 1."""
    try:
        from rapidfuzz import fuzz, process  # late: 8 ms, and a name that is known needs neither
    except ImportError:  # in the environment of a program that is traced
        return get_close_matches(wanted[:100], list(names), n=num, cutoff=cutoff)
    matches = process.extract(wanted[:100], list(names), scorer=fuzz.ratio, limit=num, score_cutoff=100 * cutoff)
    return [name for name, _, _ in matches]
