"""What PyTorch's caching allocator holds beyond live tensors, as a closed form; the dry run replays it exactly."""

from planner.units import MIB

GAP_OF_LOSS, GAP_OF_LAYER = 0.18, 0.12
"""Shares of what is made and freed again within a phase that stay behind as holes: of the loss chain, and of one
layer's temporaries. What is kept from forward to backward lies block after block and leaves none.
Measured: reserved peak against the dry run's replay with expandable segments, 273 random points of one GPU (27 November
2026): median error 0.9 %, 95th percentile 5.8 % (8 % of all that changes gave 2.7 and 7.2 %); against 15 runs on an
H200 median 0.5 %, worst 1.2 % (0.9 and 7.1 %)."""
GAP_FLOOR_BYTES = 24 * MIB
"""A small pool's segment and a large pool's segment are never full."""


OF_LOSS, OF_FORWARD, OF_MIXED = 0.16, 0.12, 0.54
"""Shares of what fixed segments leave as holes: of the loss chain beside the activations kept, of one layer's forward
temporaries, and of whichever is smaller, the activations kept or one layer's backward: blocks of the one lie between
blocks of the other. Fitted to 112 replays by the dry run and 39 measured peaks (T4, RTX 4080), weighed by the peak:
median error of the peak 1.4 %, 90th percentile 5.7 %; each of seven sources left out 2.6 and 8.7 % (November 2026)."""


def fixed_segments_gap_bytes(*, kept: int, forward: int, loss: int, backward: int) -> int:
    """Reserved minus allocated at the peak where segments do not expand (PyTorch's default), estimated from the phases.

    A block that is freed stays in its segment, and only a request that fits into it takes it again.

    Args:
        kept: activations from forward to backward; `forward`, `loss`, `backward`: the largest moment of each phase,
            those activations included, resident memory not.

    Source: PyTorch `c10/cuda/CUDACachingAllocator.cpp`.
    """
    mixed = min(kept, max(0, backward - kept))
    holes = OF_LOSS * max(0, loss - kept) + OF_FORWARD * max(0, forward - kept) + OF_MIXED * mixed
    return GAP_FLOOR_BYTES + int(holes)


def allocator_gap_bytes(*, loss: int, layer: int) -> int:
    """Reserved minus allocated at the peak with expandable segments, estimated from what comes and goes.

    Weights are allocated once, and activations that wait for the backward one after another: both are packed. A loss
    chain and a layer's temporaries are freed in another order than they were made, and leave holes. With
    `expandable_segments:True`, which every launch file sets, holes are whole pages.

    Args:
        loss, layer: the largest moment of the loss, and of a layer's forward or backward, beyond the activations kept.

    Source: PyTorch `c10/cuda/CUDACachingAllocator.cpp` (segment sizes 2 and 20 MiB, rounding of larger ones to 2 MiB).
    """
    return GAP_FLOOR_BYTES + int(max(GAP_OF_LOSS * loss, GAP_OF_LAYER * layer, 0))
