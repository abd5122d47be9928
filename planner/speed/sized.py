"""The speed of a setup by its structure's step program: the dry run's prices and timelines without a dry run.

What setups share is worked out once: prices of operators at one micro-batch, length and rank on one card, clock maps of
segments, and of whole micro-batches.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.memory.profiles import MONOMIALS, program_key, respaced
from planner.models.spec import ModelSpec
from planner.options.adapters import ADAPTERS
from planner.options.losses import LOSSES
from planner.options.optimizers import OPTIMIZERS
from planner.options.stacks import DEFAULT
from planner.setup import TrainSetup
from planner.speed.host import host_of
from planner.speed.operators import ISSUERS, Layout, Operator
from planner.speed.prices import Price, launches, price
from planner.speed.rates import CardRates, setup_rates
from planner.speed.roofline import StepTime, ThroughputProfile, conditions_of, load_calibration, throughput_profile
from planner.speed.roofline.bands import Uncertainty
from planner.speed.step_program import (
    ONCE,
    TILES,
    Block,
    Blocks,
    Counts,
    ModelPrograms,
    Run,
    SizedLayout,
    SizedOperator,
    StepProgram,
    programmed_kind,
    programs_of,
)
from planner.speed.timeline import (
    IDLE,
    ClockMap,
    Issue,
    Issued,
    Loop,
    RunTime,
    Stage,
    Timeline,
    add_parts,
    between_s,
    clock_map_of,
    compose,
    done_s,
    host_notes,
    issue_of,
    loop_of,
    price_with_gaps_s,
    timed,
)

_NUM = len(ISSUERS)
_LARGE = 1 << 26
"""Tokens by which a loss whose tiles grow is told from one whose tiles do not."""
_MAX_SIZES = 256


class Tiles(NamedTuple):
    """How a loss cuts a micro-batch: tokens of a whole tile, how many turns its loop takes, and which share of as many
    whole tiles they are."""

    tokens: int
    turns: int
    filled: float


UNCUT = Tiles(0, 1, 1.0)


def _axes(operator: SizedOperator) -> int:
    """What of an operator's size is no constant of the model and the length: 1 the micro-batch, 2 the rank, 3 both."""
    indices = {index for side in operator[1:3] for layout in side for form in layout.shape for index, _ in form}
    return (not _OF_MICRO_BATCH.isdisjoint(indices)) + 2 * (not _OF_RANK.isdisjoint(indices))


_OF_MICRO_BATCH = {index for index, (batch, _, _, tile) in enumerate(MONOMIALS) if batch or tile}
_OF_RANK = {index for index, powers in enumerate(MONOMIALS) if powers[2]}


class _Issues:
    """A model's calls as hosts issue them, which is the same at every size.

    Attributes:
        axes: of each operator, see `_axes`.
        tiled: segments that come by tiles of the loss.
    """

    def __init__(self, programs: ModelPrograms) -> None:
        self._operators = programs.operators
        self.axes = [*map(_axes, programs.operators)]
        self.tiled = {
            place for place, segment in enumerate(programs.segments) if any(r.per == TILES for r in segment.runs)
        }
        self._issued: dict[bool, Issued] = {}
        self._known: dict[tuple[tuple[int, ...], bool, float], list[Issue]] = {}

    def of(self, calls: tuple[int, ...], checkpointed: bool, scale: float) -> list[Issue]:
        """Calls as a host of this scale issues them."""
        key = calls, checkpointed, scale
        issues = self._known.get(key)
        if issues is None:
            issued = self._issued.get(checkpointed)
            if issued is None:
                runs = [
                    launches(operator.name, sized=bool(operator.inputs or operator.outputs))
                    for operator in self._operators
                ]
                issued = self._issued[checkpointed] = Issued(self._operators, runs, checkpointed=checkpointed)
            issues = self._known[key] = issue_of(map(issued.__getitem__, calls), scale)
        return issues


Prices = dict[tuple[int, int], Price]
"""By operator and tokens of a tile."""
Shared = dict[tuple[int, int], Prices]
"""By micro-batch and rank, 0 where they do not matter."""


class Sized:
    """The operators of a model's programs at one micro-batch, length and rank on one card.

    Args:
        shared: what is known at this length.
    """

    def __init__(
        self, programs: ModelPrograms, rates: CardRates, seqs: int, tokens: int, rank: int, shared: Shared
    ) -> None:
        self._programs, self._rates = programs, rates
        if "issues" not in programs.worked_out:
            programs.worked_out["issues"] = _Issues(programs)
        self._issues: _Issues = programs.worked_out["issues"]
        base, self._tokens = (seqs, tokens, max(1, rank)), tokens
        self._values = [b ** powers[0] * s ** powers[1] * r ** powers[2] for powers in MONOMIALS for b, s, r in (base,)]
        self._tile = MONOMIALS.index((0, 0, 0, 1))
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._prices = [shared.setdefault((seqs * (axes & 1), rank * (axes >> 1)), {}) for axes in range(4)]
        self._device: dict[int, _Device] = {}
        self._clock_maps: dict[tuple[bool, Tiles, float], _ClockMaps] = {}
        self._counted: dict[tuple[int, float], ClockMap] = {}
        self._parts: dict[tuple[int, Tiles], tuple[dict[str, float], int]] = {}

    def _layout(self, layout: SizedLayout, tile: int) -> Layout:
        key = id(layout), tile
        cached = self._layouts.get(key)
        if cached is None:
            values, shape = self._values, list[int]()
            values[self._tile] = tile
            for form in layout.shape:
                size = 0.0
                for index, factor in form:
                    size += factor * values[index]
                shape.append(max(1, round(size)))
            strides, step = [0] * len(shape), 1 if layout.dense else 2
            for place in reversed(layout.order or range(len(shape))):
                if place not in layout.repeated:
                    strides[place] = step
                    step *= shape[place]
            cached = self._layouts[key] = Layout(tuple(shape), tuple(strides), layout.dtype)
        return cached

    def operator(self, number: int, tile: int = 0) -> Operator:
        """An operator at these sizes."""
        sized: SizedOperator = self._programs.operators[number]
        inputs, outputs = [tuple([self._layout(each, tile) for each in side]) for side in sized[1:3]]
        return Operator(sized.name, inputs, outputs, sized.numbers, sized.listed)

    def price(self, number: int, tile: int = 0) -> Price:
        """What an operator costs the device."""
        prices = self._prices[self._issues.axes[number]]
        cached = prices.get((number, tile))
        if cached is None:
            cached = prices[number, tile] = price(self.operator(number, tile), self._rates)
        return cached

    def device(self, tile: int) -> "_Device":
        """Seconds of the device by operator, where tiles have so many tokens."""
        device = self._device.get(tile)
        if device is None:
            device = self._device[tile] = _Device(self, tile)
        return device

    def loop(self, run: Run, tiles: Tiles) -> Tiles:
        """How often a run comes, and at which tile."""
        if run.per == ONCE:
            return Tiles(tiles.tokens, 1, 1.0)
        if run.per == TILES:
            turns = tiles.turns - run.less
            filled = (tiles.turns * tiles.filled - run.less) / turns if turns > 0 else 0.0
            return Tiles(tiles.tokens, max(0, turns), filled)
        return Tiles(0, max(0, -(-self._tokens // run.per) - run.less), 1.0)

    def blocks(self, blocks: Blocks, checkpointed: bool, tiles: Tiles, scale: float) -> ClockMap:
        """The clock map of segments."""
        key = checkpointed, tiles, scale
        clock_maps = self._clock_maps.get(key) or self._clock_maps.setdefault(key, _ClockMaps(*key))
        clock_map = clock_maps.whole.get(id(blocks))
        if clock_map is None:
            clock_map = clock_maps.whole[id(blocks)] = compose([self._block(block, clock_maps) for block in blocks])
        return clock_map

    def _block(self, block: Block, clock_maps: "_ClockMaps") -> ClockMap:
        """The clock map of segments one after another; those that no tile cuts are the same whatever the tiles."""
        clock_map = clock_maps.blocks.get(id(block))
        if clock_map is not None:
            return clock_map
        places, times = block
        key, tiled, pieces = (clock_maps.checkpointed, UNCUT, clock_maps.scale), self._issues.tiled, list[ClockMap]()
        uncut = self._clock_maps.get(key) or self._clock_maps.setdefault(key, _ClockMaps(*key))
        if uncut is not clock_maps and tiled.isdisjoint(places):
            clock_map = clock_maps.blocks[id(block)] = self._block(block, uncut)
            return clock_map
        for place in places:
            cut = clock_maps if place in tiled else uncut
            piece = cut.segments.get(place)
            if piece is None:
                for run in self._programs.segments[place].runs:
                    tile, turns, filled = self.loop(run, cut.tiles)
                    issue = self._issues.of(run.calls, cut.checkpointed, cut.scale)
                    of_run = clock_map_of(issue, self.device(tile), filled)
                    of_run = of_run if turns == 1 else of_run.times(turns)
                    piece = of_run if piece is None else piece.then(of_run)
                piece = cut.segments[place] = piece or IDLE
            pieces.append(piece)
        clock_map = compose(pieces) if len(pieces) > 1 else pieces[0]
        clock_map = clock_maps.blocks[id(block)] = clock_map if times == 1 else clock_map.times(times)
        return clock_map

    def counted(self, counts: Counts, scale: float) -> ClockMap:
        """The clock map of calls whose order does not matter."""
        key = id(counts), scale  # `ModelPrograms` has each once
        clock_map = self._counted.get(key)
        if clock_map is None:
            clock_map = IDLE
            for call, times in counts:
                issue = self._issues.of((call,), False, scale)
                clock_map = clock_map.then(clock_map_of(issue, self.device(0)).times(times))
            self._counted[key] = clock_map
        return clock_map

    def parts(self, program: StepProgram, tiles: Tiles) -> tuple[dict[str, float], int]:
        """The device's seconds of a micro-batch by part, and how many calls it is."""
        parts: dict[str, float] = defaultdict(float)
        times: Counter[int] = Counter()
        for places, repeats in (*program.forward, *program.backward):
            for place in places:
                times[place] += repeats
        num_calls = 0
        for place, repeats in times.items():
            by_part, calls = self._segment_parts(place, tiles)
            num_calls += repeats * calls
            for name, seconds in by_part.items():
                parts[name] += repeats * seconds
        return parts, num_calls

    def _segment_parts(self, place: int, tiles: Tiles) -> tuple[dict[str, float], int]:
        """The device's seconds of a segment by part, and how many calls it is."""
        runs, tiles = self._programs.segments[place].runs, tiles if place in self._issues.tiled else UNCUT
        cached = self._parts.get((place, tiles))
        if cached is None:
            parts: dict[str, float] = defaultdict(float)
            num_calls = 0
            for run in runs:
                tile, turns, filled = self.loop(run, tiles)
                num_calls += turns * len(run.calls)
                for number, count in Counter(call // _NUM for call in run.calls).items():
                    phase = self._programs.segments[place].phase
                    add_parts(parts, phase, self.price(number, tile), turns * count * filled)
            cached = self._parts[place, tiles] = parts, num_calls
        return cached


class _ClockMaps:
    """Clock maps of segments, of blocks of them and of several blocks (by identity: `ModelPrograms` has each once),
    where the loss is so cut and the host so fast."""

    def __init__(self, checkpointed: bool, tiles: Tiles, scale: float) -> None:
        self.checkpointed, self.tiles, self.scale = checkpointed, tiles, scale
        self.segments: dict[int, ClockMap] = {}
        self.blocks: dict[int, ClockMap] = {}
        self.whole: dict[int, ClockMap] = {}


class _Device(dict[int, float]):
    """Seconds of the device by operator, each when first asked for."""

    def __init__(self, sized: Sized, tile: int) -> None:
        super().__init__()
        self._sized, self._tile = sized, tile

    def __missing__(self, number: int) -> float:
        seconds = self[number] = price_with_gaps_s(self._sized.price(number, self._tile))
        return seconds


class _Steps(NamedTuple):
    """What setups of one program, trainer, length, rank and card share: seconds by optimizer, micro-batch and
    accumulation, a first and a later micro-batch, and what follows the last backward by optimizer."""

    seconds: dict[tuple[str, int, int], float]
    micro: dict[int, tuple[ClockMap, ClockMap, Timeline]]
    ends: dict[str, ClockMap]


class ProgramSpeed:
    """Step times of all setups that differ only in optimizer, micro-batch and accumulation, by the structure's step
    program."""

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, programs: ModelPrograms, program: StepProgram
    ) -> None:
        self._model, self._gpu, self._setup = model, gpu, setup
        self._programs, self._program = programs, program
        self._hooks = program.checkpointed and not setup.reentrant_checkpointing
        card = gpu.key, gpu.bf16_flops_per_s, gpu.fp16_flops_per_s, gpu.memory_bandwidth_bytes_per_s, gpu.sm_count
        self._card = card, id(load_calibration()), setup.attention, setup.packing, setup.stack
        self._one = setup.replace_trusted(micro_batch_seqs=1, accumulation_steps=1).tokens_per_micro_batch
        self._loop, self._host = loop_of(setup), host_of(gpu)
        around = self._loop.waits, self._loop.trainer, self._hooks, setup.seq_len_tokens, setup.lora_rank
        steps: _Steps = programs.worked_out.setdefault((self._card, around, id(program)), _Steps({}, {}, {}))
        self._seconds, self._micro, self._ends = steps

    @cached_property
    def formula(self) -> ThroughputProfile:
        """The formula's: it has what no operator shows (needed products, what pages move, what is said of a card)."""
        return throughput_profile(self._model, self._gpu, self._setup, conditions=conditions_of(self._setup))

    def _sized(self, seqs: int) -> Sized:
        setup, sizes = self._setup, (seqs, self._setup.seq_len_tokens, self._setup.lora_rank)
        key = self._card, sizes
        by_size: dict[object, Sized] = self._programs.worked_out.setdefault("sized", {})
        sized = by_size.get(key)
        if sized is None:
            if len(by_size) >= _MAX_SIZES:
                self._programs.worked_out.clear()
                by_size = self._programs.worked_out["sized"] = {}
            rates = setup_rates(self._model, self._gpu, setup)
            shared = self._programs.worked_out.setdefault((self._card, setup.seq_len_tokens), {})
            sized = by_size[key] = Sized(self._programs, rates, *sizes, shared)
        return sized

    def seconds_at(self, setup: TrainSetup, scale: float, *, trainer: bool = True) -> float:
        """Seconds of a setup's step where the host takes so many times as long as the measured one.

        Args:
            trainer: whether its trainer goes around the operators, or a bare loop.
        """
        seqs, loop = setup.micro_batch_seqs, self._loop_of(setup.micro_batch_seqs, setup.accumulation_steps)
        if not trainer:
            loop = replace(loop, waits=False, trainer=False)
        timeline, step = self.timeline(setup.optimizer, seqs, scale)
        return timeline.seconds(loop, step) + self._paging_s(setup.optimizer) + between_s(loop, loop.tokens)

    def _tiles(self, seqs: int) -> Tiles:
        tokens, vocabulary = seqs * self._one, (self._model.vocab_size, self._model.hidden_size)
        tiling = LOSSES[self._setup.loss].tiling
        largest = tiling(_LARGE, *vocabulary).tokens
        whole = largest if largest == tiling(_LARGE // 2, *vocabulary).tokens else tiling(tokens, *vocabulary).tokens
        turns = -(-tokens // whole)
        return Tiles(whole, turns, tokens / whole / turns)

    def timeline(self, optimizer: str, seqs: int, scale: float) -> tuple[Timeline, list[ClockMap]]:
        """A step's micro-batches, and its optimizer's part."""
        program, sized, tiles = self._program, self._sized(seqs), self._tiles(seqs)
        key = self._hooks, tiles, scale
        timeline = Timeline(
            forward=(Stage("forward", sized.blocks(program.forward, *key)),),
            backward=(Stage("backward", sized.blocks(program.backward, *key)),),
            added=sized.counted(program.added, scale),
            num_modules=program.num_modules,
            scale=scale,
        )
        return timeline, [self._step(optimizer, sized, scale)]

    def _clock_maps(self, seqs: int) -> tuple[ClockMap, ClockMap, Timeline]:
        """Of a first and of a later micro-batch."""
        clock_maps = self._micro.get(seqs)
        if clock_maps is None:
            timeline, _ = self.timeline(self._setup.optimizer, seqs, self._host.scale)
            clock_maps = self._micro[seqs] = (*timeline.micro_batches(self._loop), timeline)
        return clock_maps

    def ratio_to_formula(self, seqs: int) -> float:
        """How many times as long as by the formula a micro-batch takes."""
        family, busy = self.formula.family, sum(self.formula.micro_parts(seqs).values())
        wall = (busy**family.work.power + family.host_s**family.work.power) ** (1 / family.work.power)
        return max(self._clock_maps(seqs)[0].apply(0.0, 0.0)) / float(wall + family.trainer_micro_s)

    def _end(self, optimizer: str, seqs: int) -> ClockMap:
        """Of what follows the last backward, whatever the micro-batch."""
        end = self._ends.get(optimizer)
        if end is None:
            timeline = self._clock_maps(seqs)[2]
            step = self._step(optimizer, self._sized(seqs), timeline.scale)
            end = self._ends[optimizer] = timeline.end(self._loop, [step])
        return end

    def _step(self, optimizer: str, sized: Sized, scale: float) -> ClockMap:
        """Of clipping, optimizer and release; the formula's for an optimizer that was not there when the program was
        made."""
        counts = self._program.steps.get(optimizer)
        if counts is not None:
            return sized.counted(counts, scale)
        device, host = self._formulas_step_s(optimizer)
        return ClockMap(scale * host, float("-inf"), device, device)

    def _formulas_step_s(self, optimizer: str) -> tuple[float, float]:
        """Seconds of the device and of the host of an optimizer's step by the formula, pages apart."""
        family = self.formula.family
        trained = family.trained_params, family.trained_bytes
        device, host = self.formula.speed.optimizer_s(optimizer, *trained, family.trained_tensors)
        return device - self._paging_s(optimizer), host

    def _loop_of(self, seqs: int, accumulation: int) -> Loop:
        return replace(self._loop, accumulation=accumulation, tokens=seqs * self._one * accumulation)

    def _paging_s(self, optimizer: str) -> float:
        if not OPTIMIZERS[optimizer].paged:
            return 0.0
        family = self.formula.family
        return self.formula.speed.paging_s(optimizer, family.trained_params, family.trained_bytes)

    def _step_s(self, optimizer: str, seqs: int, accumulation: int) -> float:
        key = optimizer, seqs, accumulation
        seconds = self._seconds.get(key)
        if seconds is None:
            first, later, _ = self._clock_maps(seqs)
            seconds = done_s(first, later, accumulation, self._end(optimizer, seqs)) + self._paging_s(optimizer)
            seconds += between_s(self._loop, seqs * self._one * accumulation)
            self._seconds[key] = seconds
        return seconds

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds and tokens/s of one GPU."""
        step = self._step_s(self._setup.optimizer, micro_batch_seqs, accumulation_steps)
        return step, micro_batch_seqs * self._one * accumulation_steps / step

    def tokens_per_s(self, optimizer: str, pairs: Sequence[tuple[int, int]], /) -> list[float]:
        """Tokens/s of one GPU at every (micro-batch, accumulation), with an optimizer that may be another one."""
        return [micro * self._one * steps / self._step_s(optimizer, micro, steps) for micro, steps in pairs]

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup of this program."""
        seqs, accumulation, optimizer = setup.micro_batch_seqs, setup.accumulation_steps, setup.optimizer
        sized, tiles, program = self._sized(seqs), self._tiles(seqs), self._program
        micro, num_calls = sized.parts(program, tiles)
        parts: dict[str, float] = defaultdict(float, {name: accumulation * seconds for name, seconds in micro.items()})
        for call, count in program.added:
            parts["optimizer"] += (accumulation - 1) * count * price_with_gaps_s(sized.price(call // _NUM))
        for call, count in program.steps.get(optimizer, ()):
            parts["optimizer"] += count * price_with_gaps_s(sized.price(call // _NUM))
        if optimizer not in program.steps:
            parts["optimizer"] += self._formulas_step_s(optimizer)[0]
        run = timed(
            partial(self.timeline, optimizer, seqs), parts, self._loop_of(seqs, accumulation), num_calls, self._host
        )
        paging = {"paging": paging_s} if (paging_s := self._paging_s(optimizer)) else {}
        step_s = run.step_s + sum(paging.values())
        flops = self.formula.flops(seqs, accumulation)
        return StepTime(
            step_time_s=step_s,
            parts_s={**run.parts_s, **paging},
            flops=flops,
            mfu_fraction=self.formula.mfu_fraction(flops, step_s),
            tokens_per_s=setup.tokens_per_step / step_s,
            uncertainty=run_uncertainty(run, self.formula, setup),
            notes=(*self.formula.notes(), *host_notes(run)),
        )


def run_uncertainty(run: RunTime, formula: ThroughputProfile, setup: TrainSetup) -> Uncertainty:
    """How far off a step of one GPU may be whose operators were priced."""
    parts, (slower, faster) = formula.step_time(setup).parts_s, run.host_sides
    return formula.uncertainty("operators", setup, parts, slower=slower, faster=faster)


class ScaledSpeed:
    """A formula's speeds where a structure has no program, and another that differs little has: so many times as fast
    as that one's program is beside its formula."""

    def __init__(self, profile: ThroughputProfile, like: ProgramSpeed) -> None:
        self._formula_profile, self._similar_program = profile, like

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds and tokens/s of one GPU."""
        pair = micro_batch_seqs, accumulation_steps
        seconds, tokens_per_s = self._formula_profile.at(*pair)
        longer = self._similar_program.at(*pair)[0] / self._similar_program.formula.at(*pair)[0]
        return seconds * longer, tokens_per_s / longer

    def ratio_to_formula(self, seqs: int) -> float:
        """See `ProgramSpeed.ratio_to_formula`."""
        return self._similar_program.ratio_to_formula(seqs)

    def tokens_per_s(self, optimizer: str, pairs: Sequence[tuple[int, int]], /) -> list[float]:
        """Tokens/s of one GPU at every (micro-batch, accumulation), with an optimizer that may be another one."""
        speeds = [
            speed.tokens_per_s(optimizer, pairs)
            for speed in (self._formula_profile, self._similar_program, self._similar_program.formula)
        ]
        return [target * program / formula for target, program, formula in zip(*speeds, strict=True)]

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup."""
        answer, other = self._formula_profile.step_time(setup), self._similar_program.step_time(setup)
        longer = self.at(setup.micro_batch_seqs, setup.accumulation_steps)[0] / answer.step_time_s
        uncertainty, host = answer.uncertainty, other.uncertainty
        sides = (*host.slower[:1], *uncertainty.slower[1:]), (*host.faster[:1], *uncertainty.faster[1:])
        return replace(
            answer,
            uncertainty=replace(uncertainty, slower=sides[0], faster=sides[1]),
            step_time_s=answer.step_time_s * longer,
            parts_s={name: seconds * longer for name, seconds in answer.parts_s.items()},
            mfu_fraction=answer.mfu_fraction / longer,
            tokens_per_s=answer.tokens_per_s / longer,
        )


class PaddedSpeed:
    """The speeds of full micro-batches by a program, and beside them what padding takes more by closed forms."""

    def __init__(self, full: ProgramSpeed | ScaledSpeed, padded: ThroughputProfile, without: ThroughputProfile) -> None:
        self._full, self._padded, self._without = full, padded, without

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds and tokens/s of one GPU."""
        pair = micro_batch_seqs, accumulation_steps
        seconds, tokens_per_s = self._full.at(*pair)
        longer = 1 + (self._padded.at(*pair)[0] - self._without.at(*pair)[0]) / seconds
        return seconds * longer, tokens_per_s / longer

    def tokens_per_s(self, optimizer: str, pairs: Sequence[tuple[int, int]], /) -> list[float]:
        """Tokens/s of one GPU at every (micro-batch, accumulation), with an optimizer that may be another one."""
        speeds = [speed.tokens_per_s(optimizer, pairs) for speed in (self._full, self._padded, self._without)]
        return [1 / (1 / full + 1 / padded - 1 / without) for full, padded, without in zip(*speeds, strict=True)]

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup."""
        answer, padded, without = (each.step_time(setup) for each in (self._full, self._padded, self._without))
        more = padded.step_time_s - without.step_time_s
        longer = 1 + more / answer.step_time_s
        return replace(
            answer,
            step_time_s=answer.step_time_s + more,
            parts_s={**answer.parts_s, "attention": answer.parts_s.get("attention", 0.0) + more},
            mfu_fraction=answer.mfu_fraction / longer,
            tokens_per_s=answer.tokens_per_s / longer,
        )


def speed_by_program(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ProgramSpeed | ScaledSpeed | None:
    """`program_speed`; where there is none, the formula's beside a structure that differs in its trainer, in where
    checkpoints lie, in which matrices are adapted, in what peft casts, in its kernels (attention's too), or in being
    compiled: what a plan compares errs alike."""
    speed = program_speed(model, gpu, setup)
    if speed is not None or programs_of(model, setup.objective) is None:
        return speed
    changed: dict[str, Any] = {
        "activation_offload": False,
        "compile": False,
        "kbit_fp32_cast": False,
        "precomputed_reference": False,
        "quantize_experts": False,
        "selective_checkpointing": False,
    }
    if setup.trainer.trainer_overhead and setup.trainer.traces_masks:  # around transformers' own models
        changed |= {"stack": DEFAULT, "adapter_dtype": "auto"}
    if setup.method != "full":
        changed |= {"lora_targets": "all-linear", "lora_dropout": 0.0, "adapter": "lora"}
        if (setup.lora_targets, setup.adapter) != ("all-linear", "lora"):
            # what a rank adds to other matrices is not what it adds to these
            changed["lora_rank"] = ADAPTERS["lora"].usual_size
    tried = product(dict.fromkeys((setup.attention, "sdpa")), dict.fromkeys((setup.kernels, "liger", "eager")))
    for attention, kernels in tried:
        changed |= {"attention": attention, "kernels": kernels}
        own_type = {"adapter_dtype": "fp32"} if kernels == "fused" else {}  # as its programs were run
        like = program_speed(model, gpu, setup.replace_trusted(**changed | own_type))
        if like is not None:
            profile = throughput_profile(model, gpu, setup, conditions=conditions_of(setup))
            return ScaledSpeed(profile, like)
    return None


def program_speed(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ProgramSpeed | None:
    """The speeds of a setup by its structure's program; None where it has none, or where what it moves to the host is
    no operator. Reentrant checkpoints are those of programs without their hooks (`HOOK_S`): -4 to +2 % of six dry
    runs' tokens/s, of which their forward without a graph, which is not counted, makes the most."""
    if not programmed_kind(setup) or setup.activation_offload or gpu.vendor != "NVIDIA":
        return None
    programs = programs_of(model, setup.objective)
    if programs is None or setup.kernels not in programs.words or (programs.any_size and _beyond_window(model, setup)):
        return None
    issued = setup.replace_trusted(reentrant_checkpointing=False) if setup.reentrant_checkpointing else setup
    if setup.stack != DEFAULT and setup.trainer.runs_trainer and setup.stack not in programs.words:
        issued = issued.replace_trusted(stack=DEFAULT, adapter_dtype=setup.resolved_adapter_dtype)
    key, apart = program_key(model, gpu, issued), setup.checkpointing
    program = programs.get(key)
    if program is None and apart > 1:
        program = programs.spaced((respaced(key, 0), respaced(key, 1)), apart, model.num_layers)
    return ProgramSpeed(model, gpu, setup, programs, program) if program is not None else None


def _beyond_window(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether a sequence is longer than what a token sees, of layers that are all alike."""
    attention = model.layer_kinds[0].attention
    return attention is not None and setup.seq_len_tokens > (attention.window_tokens or setup.seq_len_tokens)
