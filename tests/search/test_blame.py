"""What a failure costs other setups, by hand: two attentions and two precisions, no more."""

import numpy as np
import pytest

from planner.setup import TrainSetup
from search.residual import encode
from search.sampler import CLEARED, KNOWN_PAIR_BLAME, FailureAttribution

SETUPS = [
    TrainSetup(attention=attention, precision=precision)
    for attention in ("sdpa", "eager")
    for precision in ("bf16-autocast", "bf16-mixed")
]
ATTENTION, PRECISION = 10.0, 2.0
"""Their blame in `search.dimensions`; the pair of them is a known one."""
PAIR = KNOWN_PAIR_BLAME * float(np.sqrt(ATTENTION * PRECISION))


def attribution() -> FailureAttribution:
    return FailureAttribution(encode(SETUPS), len(SETUPS))


def test_a_failure_costs_others_the_share_of_the_blame_that_they_share() -> None:
    blame = attribution()
    blame.failed(0)
    total = ATTENTION + PRECISION + PAIR
    assert blame.chance()[1:] == pytest.approx([1 - ATTENTION / total, 1 - PRECISION / total, 1.0])


def test_what_ran_and_was_slow_blames_the_pair_more_than_its_values() -> None:
    blame = attribution()
    blame.failed(0, pairs_only=True)
    total = 0.3 * (ATTENTION + PRECISION) + PAIR
    assert blame.chance()[1:] == pytest.approx([1 - 0.3 * ATTENTION / total, 1 - 0.3 * PRECISION / total, 1.0])


def test_a_failure_whose_every_suspect_ran_elsewhere_costs_little() -> None:
    blame = attribution()
    blame.failed(0)
    blame.succeeded(0)
    assert blame.chance() == pytest.approx([1 - CLEARED, 1 - CLEARED / 2, 1 - CLEARED / 2, 1.0])
