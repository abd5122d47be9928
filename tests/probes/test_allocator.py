"""The allocator model: traces computed by hand from the rules of c10/cuda/CUDACachingAllocator.cpp."""

import pytest

from planner.core.units import GIB, MIB
from probes.allocator import Alloc, EmptyCache, Event, Free, Phase, replay, segment_size


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


def test_small_requests_share_a_segment() -> None:
    # 4096 blocks of 512 bytes fill 2 MiB exactly; one more opens the second segment.
    assert replay(filled(*[512] * 4096)).peak_reserved_bytes == 2 * MIB
    assert replay(filled(*[512] * 4097)).peak_reserved_bytes == 4 * MIB


def test_middle_requests_share_a_segment() -> None:
    # Four of 4.5 MiB in 20 MiB leave 2 MiB; the fifth does not fit.
    assert replay(filled(*[4 * MIB + MIB // 2] * 4)).peak_reserved_bytes == 20 * MIB
    assert replay(filled(*[4 * MIB + MIB // 2] * 5)).peak_reserved_bytes == 40 * MIB


def test_best_fit_takes_the_smallest_block_that_serves() -> None:
    events = [*filled(40 * MIB, 20 * MIB, 30 * MIB), Free(0), Free(1), Free(2), Alloc(3, 21 * MIB), Alloc(4, 40 * MIB)]
    # 21 goes into the 30 MiB segment (9 MiB split off), so 40 MiB stays whole for the next.
    result = replay(events)
    assert result.end_reserved_bytes == 90 * MIB
    assert result.end_allocated_bytes == 61 * MIB


def test_free_neighbours_become_one_block() -> None:
    # Three 6 MiB blocks of one 20 MiB segment (2 remain): freed in any order, 20 MiB are whole again.
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 2, 1)):
        events = [*filled(*[6 * MIB] * 3), *(Free(index) for index in order), Alloc(9, 20 * MIB)]
        assert replay(events).peak_reserved_bytes == 20 * MIB


def test_pieces_kept_apart_by_a_live_block_cannot_serve_a_larger_request() -> None:
    events = [*filled(*[6 * MIB] * 3), Free(0), Free(2), Alloc(9, 12 * MIB)]
    result = replay(events)
    # 6 + 8 MiB are free around the live block: 12 MiB need a segment of their own.
    assert result.peak_reserved_bytes == 32 * MIB
    assert result.peak_allocated_bytes == 18 * MIB


def test_what_is_cached_serves_the_next() -> None:
    events = [Phase("load"), Alloc(0, 10 * MIB), Phase("forward"), Alloc(1, 30 * MIB), Free(1)]
    events += [Phase("step"), Alloc(2, 10 * MIB), Phase("forward"), Alloc(3, 40 * MIB)]
    result = replay(events)
    # The step's 10 MiB come out of the cached 30.
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (60 * MIB, 80 * MIB)


def test_cached_memory_is_given_back_before_giving_up() -> None:
    events = [Alloc(0, 30 * MIB), Free(0), Alloc(1, 32 * MIB)]
    assert replay(events).peak_reserved_bytes == 62 * MIB
    result = replay(events, limit_bytes=40 * MIB)
    assert result.fits
    assert (result.num_retries, result.peak_reserved_bytes, result.end_reserved_bytes) == (1, 32 * MIB, 32 * MIB)


def test_a_replay_ends_where_memory_does() -> None:
    events = [*filled(30 * MIB, 12 * MIB), Phase("loss"), Free(0), Alloc(2, 14 * MIB), Alloc(3, 17 * MIB)]
    result = replay(events, limit_bytes=50 * MIB)
    # 14 MiB sit in the old 30 MiB segment: 16 MiB are free behind them, 8 never reserved; 17 in one piece nowhere.
    assert not result.fits
    assert (result.end_allocated_bytes, result.end_reserved_bytes) == (26 * MIB, 42 * MIB)
    assert result.num_retries == 1


def test_expandable_segments_end_that_fragmentation() -> None:
    events = [*filled(30 * MIB, 12 * MIB), Phase("loss"), Free(0), Alloc(2, 14 * MIB), Alloc(3, 17 * MIB)]
    result = replay(events, limit_bytes=60 * MIB, expandable_segments=True)
    # 30 + 12 in 60 MiB of pages; 14 into the freed 30; 17 into the 18 MiB at the end: nothing more is mapped.
    assert result.fits
    assert result.peak_reserved_bytes == 60 * MIB


@pytest.mark.parametrize(("num", "pages"), [(1, 2), (2, 3), (3, 4), (20, 21), (100, 105)])
def test_expandable_segments_grow_in_20_mib_pages(num: int, pages: int) -> None:
    # 21 MiB each, end to end: ceil(21 num / 20) pages.
    result = replay(filled(*[21 * MIB] * num), expandable_segments=True)
    assert result.peak_reserved_bytes == pages * 20 * MIB
    assert result.peak_allocated_bytes == num * 21 * MIB


def test_expandable_small_pool_grows_in_2_mib_pages() -> None:
    assert replay(filled(512), expandable_segments=True).peak_reserved_bytes == 2 * MIB
    assert replay(filled(*[MIB] * 3), expandable_segments=True).peak_reserved_bytes == 4 * MIB


def test_expandable_segments_split_every_remainder() -> None:
    # 11.25 MiB would keep a 12 MiB segment; here the rest of the 20 MiB page stays usable.
    assert replay(filled(11 * MIB + MIB // 4), expandable_segments=True).peak_allocated_bytes == 11 * MIB + MIB // 4


def test_expandable_retry_gives_whole_pages_back() -> None:
    # The freed first block covers pages 0 and 1 whole and 10 MiB of page 2, which the second block shares.
    events = [*filled(50 * MIB, 30 * MIB), Free(0), EmptyCache()]
    result = replay(events, expandable_segments=True)
    assert result.peak_reserved_bytes == 80 * MIB
    assert result.end_reserved_bytes == 40 * MIB
    # Growing again starts in the gap, the lowest address with room: 10 MiB of page 2 are there, one page is mapped.
    regrown = replay([*events, Alloc(5, 25 * MIB)], expandable_segments=True)
    assert regrown.end_reserved_bytes == 80 * MIB


def test_a_hole_of_exactly_the_size_asked_for_is_filled() -> None:
    # Pages 0, 1, 2; the middle one is given back and mapped again, so that the first two are whole for 40 MiB.
    page = 20 * MIB
    events = [*filled(page, page, page), Free(1), EmptyCache(), Alloc(3, page), Free(0), Free(3), Alloc(4, 2 * page)]
    assert replay(events, expandable_segments=True).peak_reserved_bytes == 3 * page


def test_of_equal_free_blocks_the_lowest_serves() -> None:
    # Four of 5 MiB fill a page. The first place is taken again, so the last two are whole for 10 MiB.
    piece = 5 * MIB
    events = [*filled(*[piece] * 4), Free(0), Free(2), Alloc(4, piece), Free(3), Alloc(5, 2 * piece)]
    assert replay(events, expandable_segments=True).peak_reserved_bytes == 20 * MIB


def test_empty_cache_releases_only_whole_segments() -> None:
    events = [*filled(6 * MIB, 6 * MIB, 30 * MIB), Free(1), Free(2), EmptyCache()]
    result = replay(events)
    assert result.peak_reserved_bytes == 50 * MIB
    assert result.end_reserved_bytes == 20 * MIB  # the 20 MiB segment still holds a live block


@pytest.mark.parametrize(
    "events", [[Alloc(0, 1), Alloc(0, 1)], [Free(0)], [Alloc(0, 1), Free(0), Free(0)], [Alloc(0, -1)]]
)
def test_impossible_events_are_refused(events: list[Event]) -> None:
    with pytest.raises(ValueError, match="storage "):
        replay(events)


def test_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes"):
        replay([], limit_bytes=-1)


def test_no_events_is_nothing() -> None:
    result = replay([])
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (0, 0)


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
