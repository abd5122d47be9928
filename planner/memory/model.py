"""The memory of every distinct rank of a setup: by its step profile, or by closed forms. One GPU is a layout of one."""

from dataclasses import replace
from typing import Any

from planner.hardware.gpu import GpuSpec
from planner.memory.engines import engine_of
from planner.memory.profiles import ProfiledStep, profiled_breakdown, profiled_step
from planner.memory.rank_part import followers, rank_parts
from planner.memory.step import breakdown
from planner.models.spec import ModelSpec
from planner.options.layouts import SHARDED
from planner.options.stacks import DEFAULT
from planner.setup import DEFAULTS, OF_OTHERS, TrainSetup
from planner.setup.memory_terms import PHASES, MemoryBreakdown, MemoryTerm, RankMemory


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
    if (other := _profiled_equivalent(setup)) != setup:
        return _with_difference(model, gpu, setup, other)
    step = step_profile_of(model, gpu, setup)
    if step is None:
        return rank_memories(model, gpu, setup)
    (part,) = rank_parts(model, setup)
    state = engine_of(setup).state(part, setup, accumulated=setup.adds_gradients)
    breakdown_of = profiled_breakdown
    if setup.parallel in SHARDED:
        from planner.memory.ranks import rank_breakdown as breakdown_of
    return (RankMemory(name=part.name, num_ranks=part.num_ranks, breakdown=breakdown_of(step, gpu, setup, state)),)


def _profiled_equivalent(setup: TrainSetup) -> TrainSetup:
    """The setup that runs tell of, beside which closed forms say what padding, earlier packages, or a loss in pieces of
    so many tokens take; the same where nothing is to be said."""
    changed: dict[str, Any] = {"uneven": False} if setup.pads else {}
    if setup.parallel not in SHARDED and setup.uses_older_code_paths:
        changed |= {name: DEFAULTS[name] for name in OF_OTHERS}
    if setup.parallel not in SHARDED and setup.loss == "full" and setup.trainer.loss_chunk_tokens:
        changed["stack"] = DEFAULT
    return setup.replace_trusted(**changed) if changed else setup


def _with_difference(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, other: TrainSetup) -> tuple[RankMemory, ...]:
    """What another setup takes by its profile, and beside it what this one takes more, or less, by closed forms."""
    closed_forms, (profiled, *_) = rank_memories(model, gpu, setup), memory_of(model, gpu, other)
    if not profiled.breakdown.profiled:
        return closed_forms
    after, before = closed_forms[0].breakdown, predict_memory(model, gpu, other)
    terms = list(profiled.breakdown.terms)
    for phase in PHASES:
        if not (more := after.phase_bytes[phase] - before.phase_bytes[phase]):
            continue
        difference = MemoryTerm(category="activations", name=_DIFFERENCE, size_bytes=more, phases=(phase,))
        if more < 0:
            largest = max((term for term in terms if phase in term.phases), key=lambda term: term.size_bytes)
            elsewhere = tuple(other_phase for other_phase in largest.phases if other_phase != phase)
            terms.remove(largest)
            terms += [replace(largest, phases=elsewhere)] if elsewhere else []
            difference = replace(largest, size_bytes=max(0, largest.size_bytes + more), phases=(phase,))
        terms.append(difference)
    gap = after.allocator_gap_bytes  # of another loss: its holes are none of what was run
    if setup.pads:
        gap = profiled.breakdown.allocator_gap_bytes + max(0, gap - before.allocator_gap_bytes)
    breakdown = replace(profiled.breakdown, terms=tuple(terms), allocator_gap_bytes=gap)
    return (replace(profiled, breakdown=breakdown),)


_DIFFERENCE = "padding, a loss in pieces, earlier packages"


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
