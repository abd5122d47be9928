"""Names that look like one that nobody knows: for hints, never taken unasked."""

from collections.abc import Iterable


def close_names(wanted: str, names: Iterable[str], *, num: int = 3, cutoff: float = 0.6) -> list[str]:
    """The `num` names most like `wanted`, best first; `cutoff`: share of letters in common, in order, from 0 to 1."""
    from rapidfuzz import fuzz, process  # late: 8 ms, and a name that is known needs neither

    found = process.extract(wanted[:100], list(names), scorer=fuzz.ratio, limit=num, score_cutoff=100 * cutoff)
    return [name for name, _, _ in found]
