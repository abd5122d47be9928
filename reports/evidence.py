"""Evidence of the dry run and the search in the form that plan.json keeps and the reports draw.

Plain values come in, because reports know neither probes nor search.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planner.interchange import setup_to_dict
from planner.outcome import Evidence, ProbeFailure
from planner.setup import TrainSetup
from planner.units import gib
from reports.extras import PeakTensor, Timeline
from reports.plain import clean
from reports.text import failure_words

if TYPE_CHECKING:
    from planner.samples.lengths import OverLengths

MAX_TENSORS = 12


def timeline_of(
    points: Sequence[tuple[int, int]], groups: Mapping[tuple[str, str], int], depth: str = ""
) -> Timeline | None:
    """A dry run's memory over one step, None where it kept none.

    Args:
        points: (event number, allocated bytes), in order.
        groups: (category, name) -> bytes alive at the peak.
        depth: what was traced where it was not the whole model ("4 of 28 layers").
    """
    if not points:
        return None
    peak_event, peak_bytes = max(points, key=lambda point: point[1])
    largest = sorted(groups.items(), key=lambda item: -item[1])[:MAX_TENSORS]
    return Timeline(
        points=tuple((int(event), int(size)) for event, size in points),
        peak_event=int(peak_event),
        peak_bytes=int(peak_bytes),
        tensors=tuple(
            PeakTensor(name=name, category=category, size_bytes=int(size)) for (category, name), size in largest if size
        ),
        depth=depth,
    )


def search_values(
    trials: Iterable[tuple[TrainSetup, str, Evidence | None, str]], stop_reason: str, budget_bytes: int
) -> dict[str, Any]:
    """`Plan.search` from the trials of a search, in order.

    Args:
        trials: (setup, origin, evidence, why it was left out without a probe or "").
        stop_reason: why the search stopped.
        budget_bytes: what the device peak may reach.
    """
    rows = []
    for number, (setup, origin, evidence, excluded) in enumerate(trials):
        failure = failure_words(evidence) if isinstance(evidence, ProbeFailure) else ""
        known = None if evidence is None or isinstance(evidence, ProbeFailure) else evidence
        fits = known is not None and not excluded and known.peak_device_bytes <= budget_bytes
        rows.append(
            {
                "number": number,
                "origin": origin,
                "setup": setup_to_dict(setup),
                "rung": "formula" if evidence is None else evidence.rung.value,
                "tokens_per_s": None if known is None else known.tokens_per_s,
                "peak_device_bytes": None if known is None else known.peak_device_bytes,
                "feasible": fits,
                "reason": excluded or failure or ("" if fits else "does not fit"),
            }
        )
    return {"trials": rows, "stop_reason": stop_reason}


def lengths_sentence(over: "OverLengths") -> str:
    """Memory over varying lengths beside that of constant ones, and what the card's limit makes of it."""
    rounded = ", lengths rounded up to a few" if over.rounded else ""
    words = (
        f"Over {over.num_micro_batches} shuffled micro-batches of {over.shortest_tokens:,} to "
        f"{over.longest_tokens:,} tokens ({clean(over.source)}; seed {over.seed}{rounded}): "
        f"{gib(over.peak_reserved_bytes)} reserved, {gib(over.peak_allocated_bytes)} allocated; "
        f"all of them at {over.longest_tokens:,}: {gib(over.constant_reserved_bytes)} reserved."
    )
    if over.num_retries is None:
        return f"{words} The card cannot hold that: it runs out of memory."
    if over.num_retries:
        return f"{words} Above the card's limit, so PyTorch gives cached memory back {over.num_retries} times."
    return words
