"""The allocator model: traces computed by hand from the rules of c10/cuda/CUDACachingAllocator.cpp."""

from typing import Any

import pytest

from planner.core.units import GIB, MIB
from probes.allocator.caching import segment_size
from probes.allocator.events import Alloc, EmptyCache, Event, Free, Phase
from probes.allocator.replay import replay


def filled(*sizes_bytes: int) -> list[Event]:
    return [Alloc(index, size) for index, size in enumerate(sizes_bytes)]


@pytest.mark.parametrize(
    ("size_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # 12 MiB segment, 1.5 MiB remain: split off. 0.75 MiB remain: kept, and counted as allocated.
        (10 * MIB + MIB // 2, 10 * MIB + MIB // 2, 12 * MIB),
        (11 * MIB + MIB // 4, 12 * MIB, 12 * MIB),
        # Exactly 1 MiB remains: "more than 1 MiB" is asked for, so it is kept too.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),
    ],
)
def test_one_request(size_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
    result = replay(filled(size_bytes))
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (allocated_bytes, reserved_bytes)


def test_segment_size_follows_the_three_classes() -> None:
    assert segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB
    assert segment_size(10 * MIB + 512) == 12 * MIB


THREE = filled(*[6 * MIB] * 3)
CACHED = [Alloc(0, 30 * MIB), Free(0), Alloc(1, 32 * MIB)]
ENDING = [*filled(30 * MIB, 12 * MIB), Phase("loss"), Free(0), Alloc(2, 14 * MIB), Alloc(3, 17 * MIB)]
PAGES = [*filled(50 * MIB, 30 * MIB), Free(0), EmptyCache()]
PAGE, PIECE = 20 * MIB, 5 * MIB
GROWS: dict[str, Any] = {"expandable_segments": True}
SCENES: dict[str, tuple[list[Event], dict[str, Any], dict[str, float]]] = {
    "4,096 blocks of 512 bytes fill a small segment": (filled(*[512] * 4096), {}, {"peak_reserved": 2}),
    "one more opens the second": (filled(*[512] * 4097), {}, {"peak_reserved": 4}),
    "four of 4.5 MiB in 20 MiB leave 2 MiB": (filled(*[4 * MIB + MIB // 2] * 4), {}, {"peak_reserved": 20}),
    "the fifth does not fit": (filled(*[4 * MIB + MIB // 2] * 5), {}, {"peak_reserved": 40}),
    # 21 goes into the 30 MiB segment (9 MiB split off), so 40 MiB stays whole for the next
    "best fit takes the smallest block that serves": (
        [*filled(40 * MIB, 20 * MIB, 30 * MIB), Free(0), Free(1), Free(2), Alloc(3, 21 * MIB), Alloc(4, 40 * MIB)],
        {},
        {"end_reserved": 90, "end_allocated": 61},
    ),
    # three 6 MiB blocks of one 20 MiB segment (2 remain): freed in any order, 20 MiB are whole again
    **{
        f"free neighbours become one block {order}": (
            [*THREE, *(Free(index) for index in order), Alloc(9, 20 * MIB)],
            {},
            {"peak_reserved": 20},
        )
        for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 2, 1))
    },
    # 6 + 8 MiB are free around the live block: 12 MiB need a segment of their own
    "pieces apart serve no larger request": (
        [*THREE, Free(0), Free(2), Alloc(9, 12 * MIB)],
        {},
        {"peak_reserved": 32, "peak_allocated": 18},
    ),
    # the step's 10 MiB come out of the cached 30
    "what is cached serves the next": (
        [Alloc(0, 10 * MIB), Phase("forward"), Alloc(1, 30 * MIB), Free(1), Alloc(2, 10 * MIB), Alloc(3, 40 * MIB)],
        {},
        {"peak_allocated": 60, "peak_reserved": 80},
    ),
    "cached memory is kept without a limit": (CACHED, {}, {"peak_reserved": 62}),
    "cached memory is given back before giving up": (
        CACHED,
        {"limit_bytes": 40 * MIB},
        {"fits": True, "num_retries": 1, "peak_reserved": 32, "end_reserved": 32},
    ),
    # 14 MiB sit in the old 30 MiB segment: 16 MiB are free behind them, 8 never reserved; 17 in one piece nowhere
    "a replay ends where memory does": (
        ENDING,
        {"limit_bytes": 50 * MIB},
        {"fits": False, "end_allocated": 26, "end_reserved": 42, "num_retries": 1},
    ),
    # 30 + 12 in 60 MiB of pages; 14 into the freed 30; 17 into the 18 MiB at the end: nothing more is mapped
    "expandable segments end that fragmentation": (
        ENDING,
        {"limit_bytes": 60 * MIB, **GROWS},
        {"fits": True, "peak_reserved": 60},
    ),
    # 21 MiB each, end to end: ceil(21 num / 20) pages
    **{
        f"expandable segments grow in pages of 20 MiB, {num}": (
            filled(*[21 * MIB] * num),
            GROWS,
            {"peak_reserved": pages * 20, "peak_allocated": num * 21},
        )
        for num, pages in ((1, 2), (2, 3), (3, 4), (20, 21), (100, 105))
    },
    "the small pool grows in pages of 2 MiB": (filled(512), GROWS, {"peak_reserved": 2}),
    "and again": (filled(*[MIB] * 3), GROWS, {"peak_reserved": 4}),
    # 11.25 MiB would keep a 12 MiB segment; here the rest of the 20 MiB page stays usable
    "every remainder is split": (filled(11 * MIB + MIB // 4), GROWS, {"peak_allocated": 11.25}),
    # the freed first block covers pages 0 and 1 whole and 10 MiB of page 2, which the second block shares
    "whole pages are given back": (PAGES, GROWS, {"peak_reserved": 80, "end_reserved": 40}),
    # in the gap, the lowest address with room: 10 MiB of page 2 are there, one page is mapped
    "growing starts again in the gap": ([*PAGES, Alloc(5, 25 * MIB)], GROWS, {"end_reserved": 80}),
    # pages 0, 1, 2; the middle one is given back and mapped again, so that the first two are whole for 40 MiB
    "a hole of exactly the size asked for is filled": (
        [*filled(PAGE, PAGE, PAGE), Free(1), EmptyCache(), Alloc(3, PAGE), Free(0), Free(3), Alloc(4, 2 * PAGE)],
        GROWS,
        {"peak_reserved": 60},
    ),
    # four of 5 MiB fill a page; the first place is taken again, so the last two are whole for 10 MiB
    "of equal free blocks the lowest serves": (
        [*filled(*[PIECE] * 4), Free(0), Free(2), Alloc(4, PIECE), Free(3), Alloc(5, 2 * PIECE)],
        GROWS,
        {"peak_reserved": 20},
    ),
    # the 20 MiB segment still holds a live block
    "an emptied cache releases whole segments only": (
        [*filled(6 * MIB, 6 * MIB, 30 * MIB), Free(1), Free(2), EmptyCache()],
        {},
        {"peak_reserved": 50, "end_reserved": 20},
    ),
    "no events are nothing": ([], {}, {"peak_reserved": 0, "peak_allocated": 0}),
}
"""Events, options, and what comes out, in MiB."""


@pytest.mark.parametrize("name", SCENES)
def test_scene(name: str) -> None:
    events, options, expected = SCENES[name]
    result = replay(events, **options)
    for key, value in expected.items():
        assert (
            getattr(result, key) == value if hasattr(result, key) else getattr(result, f"{key}_bytes") == value * MIB
        ), (key, result)


@pytest.mark.parametrize(
    "events", [[Alloc(0, 1), Alloc(0, 1)], [Free(0)], [Alloc(0, 1), Free(0), Free(0)], [Alloc(0, -1)]]
)
def test_impossible_events_are_refused(events: list[Event]) -> None:
    with pytest.raises(ValueError, match="storage "):
        replay(events)


def test_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes"):
        replay([], limit_bytes=-1)


def test_full_fine_tuning_states_of_a_small_model() -> None:
    """Four equal sets of tensors (weights, gradients, two moments) reserve what hand counting gives.

    One layer: 2 x 16 MiB (own segments, 16 MiB each) and a 4 KiB norm (packed). 8 layers, 4 sets.
    """
    sizes = [size for _ in range(4 * 8) for size in (16 * MIB, 16 * MIB, 4096)]
    result = replay(filled(*sizes))
    assert result.peak_allocated_bytes == 4 * 8 * (32 * MIB + 4096)
    assert result.peak_reserved_bytes == 4 * 8 * 32 * MIB + 2 * MIB
    assert result.peak_reserved_bytes < 2 * GIB


def steps_of(lengths: list[int]) -> list[Event]:
    """One step per length: four tensors that grow with it, dead at its end."""
    events: list[Event] = []
    for step, length in enumerate(lengths):
        numbers = range(4 * step, 4 * step + 4)
        events += [Alloc(number, length * (1 + number % 4) * MIB) for number in numbers]
        events += [Free(number) for number in numbers]
    return events


def test_rising_lengths_fragment_and_falling_ones_do_not() -> None:
    """Why varying lengths reserve far more than the longest one alone, and what avoids it.

    Lengths 20, 22, ... 30: each longer step needs four new segments, the old ones are too small for it and stay cached.
    """
    lengths = list(range(20, 31, 2))
    alone = replay(steps_of([30])).peak_reserved_bytes
    assert alone == 10 * 30 * MIB
    rising = replay(steps_of(lengths)).peak_reserved_bytes
    assert rising > 1.5 * alone
    assert replay(steps_of(lengths[::-1])).peak_reserved_bytes == alone
    assert replay(steps_of(lengths), expandable_segments=True).peak_reserved_bytes <= alone + 20 * MIB
    # A card with room for the longest step and 20 MiB to spare runs out all the same: cached memory is given back, but
    # pieces of split segments stay. With expandable segments it runs.
    limit = alone + 20 * MIB
    assert not replay(steps_of(lengths), limit_bytes=limit).fits
    assert replay(steps_of(lengths), limit_bytes=limit, expandable_segments=True).fits
