"""Invariants of the allocator model under random traces."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.units import MIB, MIN_BLOCK_BYTES
from probes.allocator.blocks import SMALL_BYTES, Block, Pool
from probes.allocator.caching import CachingAllocator, OutOfDeviceMemory
from probes.allocator.events import Alloc, EmptyCache, Event, Free, Phase
from probes.allocator.replay import replay

# Sizes around every threshold of the rules, and anything in between.
SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 64 * MIB),
    st.sampled_from([512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 11 * MIB, 20 * MIB, 21 * MIB]),
)
# ("alloc", size), ("free", which of the live ones), ("empty", 0), ("phase", number)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), SIZES),
        st.tuples(st.just("alloc"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("phase"), st.integers(0, 3)),
    ),
    max_size=60,
)
LIMITS = st.one_of(st.none(), st.integers(2 * MIB, 256 * MIB))


def as_events(steps: list[tuple[str, int]]) -> list[Event]:
    events: list[Event] = []
    live: list[int] = []
    for number, (kind, value) in enumerate(steps):
        if kind == "alloc":
            events.append(Alloc(number, value))
            live.append(number)
        elif kind == "free" and live:
            events.append(Free(live.pop(value % len(live))))
        elif kind == "empty":
            events.append(EmptyCache())
        elif kind == "phase":
            events.append(Phase(f"phase {value}"))
    return events


def chain(block: Block) -> list[Block]:
    """All blocks of a block's segment, in order."""
    while block.prev is not None:
        block = block.prev
    blocks = [block]
    while block.next is not None:
        assert block.next.prev is block
        block = block.next
        blocks.append(block)
    return blocks


def check(allocator: CachingAllocator, live: list[tuple[Block, int]]) -> None:
    """Every byte belongs to exactly one block; free neighbours are merged; the counters are true sums."""
    tracked: list[Block] = [block for block, _ in live]
    pools: tuple[Pool, ...] = (allocator.small, allocator.large)
    for pool in pools:
        tracked += pool.free_blocks() + pool.unmapped
    segments = {id(chain(block)[0]): chain(block) for block in tracked}
    everything = [block for blocks in segments.values() for block in blocks]
    assert {id(block) for block in everything} == {id(block) for block in tracked}
    assert len(everything) == len(tracked)
    for blocks in segments.values():
        for current, following in pairwise(blocks):
            assert current.address + current.size == following.address
            both_free = not current.allocated and not following.allocated
            assert not (both_free and current.mapped == following.mapped)
    spans = sorted((blocks[0].address, blocks[-1].address + blocks[-1].size) for blocks in segments.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert allocator.allocated_bytes == sum(block.size for block, _ in live)
    assert allocator.reserved_bytes == sum(block.size for block in everything if block.mapped)
    for block, size in live:
        assert block.allocated
        assert block.mapped
        assert block.size >= size
        assert block.size % MIN_BLOCK_BYTES == 0
        # A remainder kept in the block is never more than the rules allow.
        slack = block.size - size
        small = size <= SMALL_BYTES or allocator.expandable_segments
        assert slack < 512 if small else slack < SMALL_BYTES + MIN_BLOCK_BYTES


@given(steps=STEPS, expandable=st.booleans(), limit=LIMITS)
@settings(max_examples=150, deadline=None)
def test_allocator_invariants_hold_after_every_step(
    steps: list[tuple[str, int]], expandable: bool, limit: int | None
) -> None:
    allocator = CachingAllocator(expandable_segments=expandable, limit_bytes=limit)
    live: list[tuple[Block, int]] = []
    for kind, value in steps:
        if kind == "alloc":
            try:
                live.append((allocator.malloc(value), value))
            except OutOfDeviceMemory:
                assert limit is not None
        elif kind == "free" and live:
            allocator.free(*live.pop(value % len(live)))
        elif kind == "empty":
            allocator.empty_cache()
        check(allocator, live)
        assert limit is None or allocator.reserved_bytes <= limit
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for block, size in live:
        allocator.free(block, size)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0  # nothing is lost


@given(steps=STEPS, expandable=st.booleans())
@settings(max_examples=100, deadline=None)
def test_replay_peaks_are_ordered_and_bounded(steps: list[tuple[str, int]], expandable: bool) -> None:
    events = as_events(steps)
    result = replay(events, expandable_segments=expandable)
    live: dict[int, int] = {}
    asked_peak = 0
    for event in events:
        if isinstance(event, Alloc):
            live[event.id] = event.size_bytes
        elif isinstance(event, Free):
            del live[event.id]
        asked_peak = max(asked_peak, sum(live.values()))
    assert asked_peak <= result.peak_allocated_bytes <= result.peak_reserved_bytes
    assert result.peak_reserved_bytes % (2 * MIB) == 0
    assert result.num_retries == 0


@given(steps=STEPS, expandable=st.booleans())
@settings(max_examples=50, deadline=None)
def test_replay_of_a_prefix_never_peaks_higher(steps: list[tuple[str, int]], expandable: bool) -> None:
    events = as_events(steps)
    whole = replay(events, expandable_segments=expandable)
    part = replay(events[: len(events) // 2], expandable_segments=expandable)
    assert part.peak_allocated_bytes <= whole.peak_allocated_bytes
    assert part.peak_reserved_bytes <= whole.peak_reserved_bytes


@given(steps=STEPS, expandable=st.booleans())
@settings(max_examples=80, deadline=None)
def test_replay_within_its_own_peak_changes_nothing(steps: list[tuple[str, int]], expandable: bool) -> None:
    events = as_events(steps)
    free = replay(events, expandable_segments=expandable)
    bound = replay(events, expandable_segments=expandable, limit_bytes=free.peak_reserved_bytes)
    assert bound == free


@given(steps=STEPS, expandable=st.booleans(), limit=st.integers(2 * MIB, 128 * MIB))
@settings(max_examples=100, deadline=None)
def test_replay_under_a_limit_stays_below_it_or_says_so(
    steps: list[tuple[str, int]], expandable: bool, limit: int
) -> None:
    events = as_events(steps)
    result = replay(events, expandable_segments=expandable, limit_bytes=limit)
    assert result.peak_reserved_bytes <= limit
    free = replay(events, expandable_segments=expandable)
    if free.peak_reserved_bytes > limit:
        assert result.num_retries > 0
    assert result.fits or result.num_retries > 0
