"""Padding, packing and average length turn raw tokens/s into useful ones."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.throughput import effective_tokens_per_s, useful_fraction

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def test_effective_padding_by_average_is_the_share_of_the_cap() -> None:
    assert effective_tokens_per_s(1000.0, seq_len=2048, packing=False, average=512) == pytest.approx(250.0)
    assert effective_tokens_per_s(1000.0, seq_len=2048, packing=True, average=512) == pytest.approx(1000.0)
    assert effective_tokens_per_s(1000.0, seq_len=2048, packing=False, average=9999) == pytest.approx(1000.0)


def test_useful_fraction_pairs_by_hand() -> None:
    """Lengths 100 and 300 drawn in pairs: the longest is 100 once in four, else 300: mean 250, useful 200 / 250."""
    assert useful_fraction([100, 300], seq_len=512, packing=False, micro_batch_seqs=2) == pytest.approx(200 / 250)
    assert useful_fraction([100, 300], seq_len=512, packing=False, micro_batch_seqs=1) == pytest.approx(1.0)


def test_useful_fraction_packs_by_hand() -> None:
    """300 + 200, 250 + 250 fill two packs of 500; a further 10 opens a third."""
    assert useful_fraction([300, 250, 250, 200], seq_len=500, packing=True) == pytest.approx(1.0)
    assert useful_fraction([300, 250, 250, 200, 10], seq_len=500, packing=True) == pytest.approx(1010 / 1500)


def test_useful_fraction_padding_agrees_with_drawing_batches() -> None:
    source = random.Random(7)
    lengths = [source.randint(20, 900) for _ in range(400)]
    useful = whole = 0
    for _ in range(20_000):
        batch = source.choices(lengths, k=4)
        useful += sum(batch)
        whole += 4 * max(batch)
    assert useful_fraction(lengths, seq_len=2048, packing=False, micro_batch_seqs=4) == pytest.approx(
        useful / whole, rel=0.02
    )


@given(LENGTHS, st.integers(1, 8))
def test_useful_fraction_stays_between_0_and_1_and_falls_with_the_batch(lengths: list[int], size: int) -> None:
    one = useful_fraction(lengths, seq_len=256, packing=False, micro_batch_seqs=size)
    more = useful_fraction(lengths, seq_len=256, packing=False, micro_batch_seqs=size + 1)
    assert 0 < more <= one + 1e-12 <= 1 + 2e-12
    assert 0 < useful_fraction(lengths, seq_len=256, packing=True) <= 1


@pytest.mark.parametrize("bad", [{}, {"average": 0.0}, {"lengths": []}, {"lengths": [3, 0]}])
def test_effective_refuses_what_makes_no_sense(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="length"):
        effective_tokens_per_s(1.0, seq_len=8, packing=False, **bad)  # type: ignore[arg-type]
