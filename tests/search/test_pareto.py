"""The Pareto set against its definition."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import measurement, small_candidates

from planner.core.units import GIB
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate
from search.problem import pareto_set

points = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 12), st.sampled_from([0, 8, 16, 32])), min_size=0, max_size=12
)


def made(speed: int, memory_gib: int, rank: int) -> Candidate:
    setup = TrainSetup(method="full", lora_rank=0) if rank == 0 else TrainSetup(lora_rank=rank)
    base = replace(small_candidates()[0], setup=setup, budget_bytes=10 * GIB)
    return replace(base, probe=measurement(setup, 100.0 * speed, memory_gib * GIB))


def figures(candidate: Candidate) -> tuple[float, float, float]:
    """Larger is better in each."""
    rank = 1e9 if candidate.setup.method == "full" else candidate.setup.lora_rank
    return candidate.tokens_per_s, -candidate.memory_evidence.peak_device_bytes, rank


@settings(max_examples=100, deadline=None)
@given(points)
def test_pareto_set_is_what_nothing_dominates(values: list[tuple[int, int, int]]) -> None:
    candidates = [made(*value) for value in values]
    fitting = {figures(candidate) for candidate in candidates if candidate.fits}
    expected = {
        point
        for point in fitting
        if not any(other != point and all(b >= a for a, b in zip(point, other, strict=True)) for other in fitting)
    }
    front = [figures(candidate) for candidate in pareto_set(candidates)]
    assert set(front) == expected
    assert len(front) == len(expected)
    assert front == sorted(front, key=lambda point: -point[0])
