"""The memory of every distinct rank of a setup: by its step profile, or by closed forms. One GPU is a layout of one."""

from dataclasses import replace

from planner.hardware.gpu import GpuSpec
from planner.memory.engines import engine_of
from planner.memory.profiles import ProfiledStep, profiled_breakdown, profiled_step
from planner.memory.rank_part import followers, rank_parts
from planner.memory.step import StepTerms, breakdown
from planner.models.spec import ModelSpec
from planner.options.layouts import SHARDED
from planner.setup import TrainSetup
from planner.setup.memory_terms import PHASES, MemoryBreakdown, RankMemory


def step_profile_of(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ProfiledStep | None:
    """The step profile that answers for a setup: of one GPU, which a rank of DDP does too, or of FSDP2's and ZeRO's
    ranks; None where closed forms do."""
    if setup.parallel not in SHARDED:
        return profiled_step(model, gpu, setup)
    from planner.memory.ranks import rank_step  # late: one GPU needs none of it

    return rank_step(model, gpu, setup)


def memory_of(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[RankMemory, ...]:
    """The memory of every distinct rank, the largest device peak first: of one GPU, of DDP, FSDP2 and ZeRO by the
    structure's step profile where there is one (`MemoryBreakdown.profiled`), else by closed forms (`rank_memories`)."""
    if setup.pads:
        return _padded(model, gpu, setup)
    step = step_profile_of(model, gpu, setup)
    if step is None:
        return rank_memories(model, gpu, setup)
    (part,) = rank_parts(model, setup)
    state = engine_of(setup).state(part, setup, accumulated=setup.adds_gradients)
    breakdown_of = profiled_breakdown
    if setup.parallel in SHARDED:
        from planner.memory.ranks import rank_breakdown as breakdown_of
    return (RankMemory(name=part.name, num_ranks=part.num_ranks, breakdown=breakdown_of(step, gpu, setup, state)),)


def _padded(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[RankMemory, ...]:
    """What a full micro-batch takes by its profile, and beside it what one with padding takes more by closed forms."""
    full = setup.replace_trusted(uneven=False)
    padded, (profiled, *_) = rank_memories(model, gpu, setup), memory_of(model, gpu, full)
    if not profiled.breakdown.profiled:
        return padded
    after, before, terms = padded[0].breakdown, predict_memory(model, gpu, full), StepTerms()
    for phase in PHASES:
        more = after.phase_bytes[phase] - before.phase_bytes[phase]
        terms.add((phase,), [("activations", "padding: its mask, keys and values of all heads", more)])
    of_padding = terms.breakdown(gpu, setup, max(0, after.allocator_gap_bytes - before.allocator_gap_bytes))
    breakdown = replace(
        profiled.breakdown,
        terms=(*profiled.breakdown.terms, *of_padding.terms),
        allocator_gap_bytes=profiled.breakdown.allocator_gap_bytes + of_padding.allocator_gap_bytes,
    )
    return (replace(profiled, breakdown=breakdown),)


def predict_memory(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> MemoryBreakdown:
    """All memory terms of one setup on its fullest GPU by closed forms, with the phases in which each is alive."""
    return rank_memories(model, gpu, setup)[0].breakdown


def rank_memories(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[RankMemory, ...]:
    """The memory of every distinct rank, the largest device peak first.

    Source: `planner.memory.engines` for what each engine holds, `planner.memory` for activations and the loss.
    Not counted: host memory (`planner.memory.engines.host`), paged optimizer states, the data loader.
    """
    engine, accumulated = engine_of(setup), setup.adds_gradients
    memories = [
        RankMemory(
            name=part.name,
            num_ranks=part.num_ranks,
            breakdown=breakdown(part, gpu, setup, engine.state(part, setup, accumulated=accumulated)),
        )
        for part in (*rank_parts(model, setup), *followers(model, setup))
    ]
    return tuple(sorted(memories, key=lambda rank: -rank.breakdown.peak_device_bytes))
