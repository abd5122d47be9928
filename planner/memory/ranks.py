"""The memory of a rank that keeps a part of the states: what computing holds at each moment by its structure's profile
of ranks, and beside it what its engine holds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.memory.engines import engine_of
from planner.memory.micro_batch import ReferenceForward
from planner.memory.profiles import (
    FIRST,
    GRADIENTS,
    HEAD,
    LAST,
    LOSS_BEGINS,
    TURN,
    ModelProfiles,
    ProfiledStep,
    ProfileMoment,
    StepProfile,
    as_terms,
    profiled_kind,
    rank_profiles_of,
    reserved_peak,
    step_of,
    structure_key,
)
from planner.memory.states import ONE_GRADIENT, RankState, halves_stay_apart
from planner.memory.step import (
    LossMoment,
    StepTerms,
    allocator_gap_bytes,
    fixed_segments_gap_bytes,
    formula_loss_gap_share,
    loss_parts,
)
from planner.models.spec import ModelSpec
from planner.options.layouts import SHARDED
from planner.options.losses import LossChain
from planner.setup import TrainSetup
from planner.setup.memory_terms import PHASES, MemoryBreakdown, Phase, total_bytes

_MOMENTS: Mapping[Phase, tuple[tuple[str, str], ...]] = {
    "forward": (("forward", "forward"), (LOSS_BEGINS, "gather"), ("step", "start")),
    "loss": (("loss", "loss"),),
    "backward": ((HEAD, "head"), (FIRST, "first"), (TURN, "turn"), (LAST, "last"), ("step", "end")),
    "step": (("step", "step"),),
}
"""(of the profile, of the engine) by phase; as the step begins, samples are left alone."""
_NAMES = tuple(mine for moments in _MOMENTS.values() for mine, _ in moments)
_OF_LAYERS = (HEAD, FIRST, TURN, LAST)


def rank_step(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ProfiledStep | None:
    """The profile of a rank's structure at its length and rank; None where there is none, or the engine does what no
    profile shows: a part of the model, offloading, a reference, transformers' own sharding, FSDP version 1."""
    if setup.parallel not in SHARDED or setup.is_split or setup.offload != "none" or setup.objective != "sft":
        return None
    if setup.sharded_at_loading or setup.fsdp_version == 1 or gpu.vendor == "Apple":
        return None
    engine = engine_of(setup)
    inner = as_profiled(engine.computes(setup))
    profiles = rank_profiles_of(model) if profiled_kind(inner) else None
    if profiles is None:
        return None
    profile = profiles.get(structure_key(model, gpu, inner), inner.checkpointing)
    if profile is None:
        return None
    if not engine.reduces_layers:
        profile = _without_gradients(profiles, profile)
    return step_of(profile, model, inner)


def as_profiled(inner: TrainSetup) -> TrainSetup:
    """The setup whose profile a rank's is: plain scales, which are states, make a little less for a moment."""
    return inner.replace_trusted(quantization="nf4-double") if inner.quantization == "nf4" else inner


def _without_gradients(profiles: ModelProfiles, profile: StepProfile) -> StepProfile:
    """The profile without gradients but the head's in the loss: an engine takes each as it comes."""

    def stripped(moment: ProfileMoment) -> ProfileMoment:
        if moment.phase == "loss":
            return moment
        return moment._replace(groups=tuple(pair for pair in moment.groups if pair[0][0] != GRADIENTS))

    cache = profiles.without_gradients
    if id(profile) not in cache:
        pieces = (replace(piece, moments=tuple(map(stripped, piece.moments))) for piece in profile.pieces)
        cache[id(profile)] = StepProfile(pieces=tuple(pieces))
    return cache[id(profile)]


class RankMoment(NamedTuple):
    """One moment of a rank: its name in the profile and to the engine, bytes of what computing holds, and all that
    changes within a step."""

    of_profile: str
    of_engine: str
    computing: int
    size_bytes: int


class RankMoments:
    """What a rank holds at every moment, at any micro-batch.

    Args:
        step: `rank_step`; `state`: of the engine, with accumulation or without.
    """

    def __init__(self, step: ProfiledStep, state: RankState, *, accumulated: bool) -> None:
        self._step, self._state, self._accumulated = step, state, accumulated
        self._alone = replace(state, loss_forward_bytes=0, loss_backward_bytes=0, regathered_bytes=0)
        self._held = dict(state.moment_bytes)
        for allocation in state.allocations:
            if allocation.name == ONE_GRADIENT:
                for moment in allocation.moments:
                    self._held[moment] -= allocation.size_bytes
        trained = state.trained
        # a tied head's half is the engine's to say
        apart = halves_stay_apart(state.part.model, state.setup)
        self._half = trained.head * trained.outer_bytes if apart else 0

    def at(self, micro_batch_seqs: int, chain: LossChain) -> dict[Phase, list[RankMoment]]:
        """The moments of each phase, optimizer states and temporaries apart."""
        sizes = iter(self._step.bytes_at(micro_batch_seqs, *_NAMES, accumulated=self._accumulated))
        by_phase: dict[Phase, list[RankMoment]] = {}
        for phase, moments in _MOMENTS.items():
            by_phase[phase] = []
            for mine, engines in moments:
                size = next(sizes) - (self._half if mine in _OF_LAYERS else 0)
                engine_bytes = self._held[engines] + (self._beside_loss(chain) if mine == "loss" else 0)
                by_phase[phase].append(RankMoment(mine, engines, size, size + engine_bytes))
        return by_phase

    def _beside_loss(self, chain: LossChain) -> int:
        """What is gathered for the loss's forward or its backward alone, as far as it makes the loss's largest moment
        larger."""
        whole, alone = (LossMoment.of(state, chain, 0) for state in (self._state, self._alone))
        return whole.largest(0, ReferenceForward()) - alone.largest(0, ReferenceForward())


def before_step(moments: Mapping[Phase, Sequence[RankMoment]], of_loss: float, holes_bytes: int) -> tuple[int, int]:
    """Bytes of the highest moment before the optimizer's step, and what the allocator holds beyond it there, with
    expandable segments.

    Args:
        of_loss: `planner.memory.step.formula_loss_gap_share`.
        holes_bytes: see `RankState`.
    """
    before = [moment for phase in PHASES[1:-1] for moment in moments[phase]]
    computing = {moment.of_profile: moment.computing for moment in before}
    saved = computing[LOSS_BEGINS]
    layer = max(computing[name] for name in ("forward", FIRST, TURN)) - saved
    gap = allocator_gap_bytes(loss=computing["loss"] - saved, layer=layer, of_loss=of_loss)
    return max(moment.size_bytes for moment in before), gap + holes_bytes


def rank_breakdown(step: ProfiledStep, gpu: GpuSpec, setup: TrainSetup, state: RankState) -> MemoryBreakdown:
    """The terms of a rank, each with the phases in which it is alive; of a phase's moments the largest is shown."""
    micro, accumulated, terms = setup.micro_batch_seqs, setup.adds_gradients, StepTerms()
    states, temporaries = state.optimizer_bytes(setup.optimizer)
    chain = loss_parts(state.part.model, state.setup)
    moments = RankMoments(step, state, accumulated=accumulated).at(micro, chain)
    terms.add(PHASES, state.terms_at("resident"))
    terms.add_states(gpu, setup, states)
    largest = {phase: max(each, key=lambda candidate: candidate.size_bytes) for phase, each in moments.items()}
    for phase, moment in largest.items():
        groups = step.groups_at(moment.of_profile, micro, accumulated=accumulated)
        groups[max(groups, key=lambda group: groups[group])] += moment.computing - sum(groups.values())
        terms.add((phase,), as_terms(groups))
        held = [term for term in state.terms_at(moment.of_engine) if term[1] != ONE_GRADIENT]
        remaining = moment.size_bytes - moment.computing - total_bytes(held)
        terms.add((phase,), [*held, ("weights", "weights and buffers beside the loss", remaining)])
    terms.add(("step",), [("optimizer", f"temporaries of {setup.optimizer}", temporaries)])
    if setup.expandable_segments:
        before = before_step(moments, formula_loss_gap_share(setup.loss, setup.checkpointing), state.holes_bytes)
        at_end = largest["step"].size_bytes + temporaries
        gap = reserved_peak(before, at_end) - max(before[0], at_end)
    else:
        saved = next(candidate.computing for candidate in moments["forward"] if candidate.of_profile == LOSS_BEGINS)
        dynamic = {phase: largest[phase].size_bytes for phase in PHASES[1:-1]}
        gap = fixed_segments_gap_bytes(saved=saved, **dynamic) + state.holes_bytes
    return terms.breakdown(gpu, setup, gap, profiled=True)
