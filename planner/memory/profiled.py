"""The memory of a setup by its structure's step profile: what runs of the real step showed, and the optimizer's states.
One GPU, or a rank of DDP, whose buckets come beside.

The counterpart of `planner.memory.step`, which composes the same from closed forms where nobody made a profile.
"""

from collections.abc import Iterable, Mapping, Sequence

from planner.hardware.gpu import GpuSpec
from planner.memory.allocator import GAP_FLOOR_BYTES, fixed_segments_gap_bytes
from planner.memory.profile_store import find_profile
from planner.memory.state import Held, RankState
from planner.memory.step_profile import LOSS_BEGINS, ProfiledStep, StepProfile
from planner.memory.types import PHASES, Category, MemoryBreakdown, MemoryTerm, Phase
from planner.memory.workspace import communicator_bytes, context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

Stepping = Mapping[bool, tuple[int, int]]
Pairs = Sequence[tuple[int, int]]
"""(micro-batch, accumulation)."""


def profiled_step(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ProfiledStep | None:
    """A setup's structure at its length and rank; None where it has no profile, or none of such samples."""
    profile = find_profile(model, gpu, setup)
    return None if profile is None else step_of(profile, model, setup)


def step_of(profile: StepProfile, model: ModelSpec, setup: TrainSetup) -> ProfiledStep | None:
    """A profile at a setup's length and rank; None where such samples were not run."""
    step = ProfiledStep(profile, model, setup)
    return step if step.complete else None


def profiled_breakdown(step: ProfiledStep, gpu: GpuSpec, setup: TrainSetup, state: RankState) -> MemoryBreakdown:
    """The terms of one setup on one GPU, or on a rank of DDP.

    Args:
        state: what it holds, for the optimizer's states and temporaries and for DDP's buckets.
    """
    micro, accumulated = setup.micro_batch_seqs, setup.adds_gradients
    states, temporaries = state.optimizer_bytes(setup.optimizer)
    found: dict[tuple[Category, str, int], list[Phase]] = {}

    def add(category: str, name: str, size: int, *alive: Phase) -> None:
        if size > 0:
            found.setdefault((category, name, size), []).extend(alive)  # type: ignore[arg-type]

    sizes = {phase: step.bytes_at(phase, micro, accumulated=accumulated) for phase in PHASES}
    for phase in PHASES:
        for (category, name), size in step.groups_at(phase, micro, accumulated=accumulated).items():
            add(category, name, size, phase)
    for one in _buckets(state):
        add(one.category, one.name, one.size_bytes, *PHASES)
    add("workspace", "cuBLAS workspaces", cublas_workspace_bytes(gpu), *PHASES[1:])
    add("optimizer", f"states of {setup.optimizer}", states, *PHASES[1:])
    add("optimizer", f"temporaries of {setup.optimizer}", temporaries, "step")
    terms = tuple(
        MemoryTerm(category=category, name=name, size_bytes=size, phases=tuple(alive))
        for (category, name, size), alive in found.items()
    )
    gap = _gap_bytes(step, setup, sizes, temporaries)
    outside = context_bytes(gpu) + communicator_bytes(gpu, setup)
    return MemoryBreakdown(terms=terms, allocator_gap_bytes=gap, context_bytes=outside, profiled=True)


def _buckets(state: RankState) -> list[Held]:
    """DDP's, which are there all along and no part of what one GPU does."""
    return [one for one in state.held if one.resident and one.category == "gradients"]


def _gap_bytes(step: ProfiledStep, setup: TrainSetup, sizes: Mapping[str, int], temporaries: int) -> int:
    """What the allocator holds beyond live tensors at the peak."""
    load, micro = sizes["load"], setup.micro_batch_seqs
    largest, at_end = max(sizes["forward"], sizes["loss"], sizes["backward"]), sizes["step"] + temporaries
    if not setup.expandable_segments:
        kept = step.bytes_at(LOSS_BEGINS, micro, accumulated=setup.adds_gradients) - load
        dynamic = {phase: sizes[phase] - load for phase in ("forward", "loss", "backward")}
        return fixed_segments_gap_bytes(kept=max(0, kept), **dynamic)
    before = largest + step.gap_bytes(micro, largest - load)
    return max(before, at_end + GAP_FLOOR_BYTES) - max(largest, at_end)


def profiled_peaks(
    step: ProfiledStep, state: RankState, beside_bytes: int, pairs: Pairs, optimizers: Iterable[Stepping]
) -> list[list[int]]:
    """Per optimizer, the peak at every (micro-batch, accumulation), without the CUDA context.

    Args:
        state: for DDP's buckets.
        beside_bytes: workspaces and communicators.
        optimizers: of each, by whether gradients add up, bytes of its (states, temporaries).
    """
    beside = beside_bytes + sum(one.size_bytes for one in _buckets(state))
    stepping = [*optimizers]
    found: list[list[int]] = [[] for _ in stepping]
    for micro, steps in pairs:
        accumulated = steps > 1
        largest = step.largest(micro, accumulated=accumulated)
        before = largest + step.gap_bytes(micro, largest - step.bytes_at("load", micro, accumulated=accumulated))
        at_end = step.bytes_at("step", micro, accumulated=accumulated) + GAP_FLOOR_BYTES
        for own, by_kind in zip(found, stepping, strict=True):
            kept, temporaries = by_kind[accumulated]
            own.append(beside + kept + max(before, at_end + temporaries))
    return found
