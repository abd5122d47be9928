"""Pipeline schedules: the papers' bubble fractions, unequal stages."""

import pytest

from planner.speed.several_gpus.collectives import pipeline_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (4, 4), (4, 16), (8, 32)])
def test_equal_stages_lose_the_papers_bubble(schedule: str, stages: int, micro_batches: int) -> None:
    """GPipe section 2.3 and PipeDream-flush: (p - 1) / (m + p - 1) of the step is idle."""
    forward, backward = 1.0, 2.0
    step = pipeline_s(schedule, [forward] * stages, [backward] * stages, micro_batches)
    busy = micro_batches * (forward + backward)
    assert 1.0 - busy / step == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_the_slowest_stage_sets_the_pace() -> None:
    even = pipeline_s("1f1b", [1.0] * 4, [2.0] * 4, 64)
    uneven = pipeline_s("1f1b", [1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0], 64)
    assert uneven / even == pytest.approx(1.5, rel=0.02)
    assert uneven == pytest.approx(3 * 3.0 + 4.5 + 63 * 4.5)


def test_unequal_stages_wait_longer_under_gpipe_when_the_slow_stages_differ() -> None:
    forward, backward = [2.0, 1.0], [1.0, 3.0]
    assert pipeline_s("gpipe", forward, backward, 8) == pytest.approx(3 + 7 * 2 + 4 + 7 * 3)
    assert pipeline_s("1f1b", forward, backward, 8) == pytest.approx(7 + 7 * 4)
