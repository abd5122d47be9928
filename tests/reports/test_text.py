"""Words of reports: the bands of what was measured."""

from dataclasses import replace

from reports.text import memory_mark, speed_mark
from tests.planner.test_codec import MEASUREMENT


def test_a_probes_band_is_never_zero_and_knows_its_trainer() -> None:
    """On the H200 "probe ±0 %" stood beside a speed that the trainer missed by 6.4 %."""
    still = replace(MEASUREMENT, step_times_s=(1.0,) * 9, extrapolation_error_fraction=0.0, trainer_band_fraction=0.0)
    assert (memory_mark(still), speed_mark(still)) == ("probe, measured", "probe ±1 %")
    assert speed_mark(replace(still, trainer_band_fraction=0.019)) == "probe ±2.9 %"
    assert memory_mark(replace(still, extrapolation_error_fraction=-0.004)) == "probe ±0.4 %"
