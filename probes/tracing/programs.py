"""The step programs of a model: what each structure issues, from one run whose sizes are told apart by their factors.

A structure is run once, at a micro-batch, length and rank that are primes which divide no number of the model. Every
dimension of every operator is then read as its constant times those primes.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from planner.core.errors import UsageError
from planner.hardware.gpu import GpuSpec
from planner.memory.profiles import MONOMIALS, Form, program_key
from planner.models.spec import ModelSpec
from planner.options.losses import LOSSES
from planner.options.optimizers import OPTIMIZERS
from planner.planning.plan_request import PlanRequest
from planner.setup import TrainSetup
from planner.speed.operators import ISSUERS, TRAINER, Layout, Operator, Program, Segment
from planner.speed.step_program import (
    OBJECTIVES,
    ONCE,
    TILES,
    Blocks,
    Counts,
    Run,
    SizedLayout,
    SizedOperator,
    SizedSegment,
    StepProgram,
    Tables,
    flat,
    programmed_kind,
)
from probes.dryrun.depths import DepthPlan, plan_depth
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.operators import OperatorLog, full_program
from probes.dryrun.repeat_layers import optimizer_steps
from probes.dryrun.startup import collection_paused, load_libraries
from probes.dryrun.trace import Trace, trace_run
from probes.stack.configs import load_config
from probes.tracing.profile_builder import CARDS, NOT_PROFILED, planned_structures, with_fused_adapters

_SEQS = (23, 29, 31, 37, 43, 47)
_TOKENS = (1307, 1319, 1367, 1187, 467, 383, 359, 347, 227, 179)
"""Twice a prime and one: a length and the length less one both have a large prime factor. The short ones are for models
of so many positions."""
_CHUNK, _CHUNKED = 64, (1187, 1823, 2579, 2963)
"""Tokens that a linear attention in plain PyTorch takes at once, and lengths of a prime number of such chunks.

Source: transformers 5.23 `torch_chunk_gated_delta_rule`."""
_UNLIKE = 4
"""Chunks, at the ends of a sequence, that may do otherwise than the others."""
_RANKS = (53, 59, 61, 67)
_ENGINE, _NUM = ISSUERS.index("engine"), len(ISSUERS)
_KEEP_NUMBERS = ("aten._scaled_dot_product", TRAINER)
"""Operators whose plain numbers decide their price."""
_VIEW = "aten.view"
"""Stands for every view: they cost the host alike."""
_ALIGNED = (8, 16, 32, 64, 128)
"""Some kernels lengthen a row to a multiple of these."""


class NoProgram(ValueError):
    """A structure issues what is no polynomial in its sizes."""


class Primes:
    """A micro-batch, length and rank whose factors tell dimensions apart for a model of such numbers.

    Args:
        longest: the longest sequence that the model takes; 0: any.
        chunked: some layers walk through their tokens in chunks.
        alike: whether of so many tokens a tile of some loss has the size of something else.

    Attributes:
        chunks: of a sequence; 0 where no layer walks.
    """

    def __init__(
        self,
        numbers: Iterable[int],
        *,
        longest: int = 0,
        chunked: bool = False,
        alike: Callable[[int], bool] = lambda _: False,
    ) -> None:
        constants = [number for number in numbers if number > 1]

        def first(candidates: Sequence[int], factor: Any) -> int:
            return next(
                candidate for candidate in candidates if all(number % factor(candidate) for number in constants)
            )

        self.tokens = next(
            tokens
            for tokens in (_CHUNKED if chunked else _TOKENS)
            if tokens <= (longest or tokens)
            and not {-(-tokens // to) * to for to in _ALIGNED} & {*constants}
            and all(number % tokens and number % ((tokens - 1) // 2) for number in constants)
            and not (chunked and any(number % -(-tokens // _CHUNK) == 0 for number in constants))
        )
        self.seqs = first([seqs for seqs in _SEQS if not alike(seqs * self.tokens)], lambda seqs: seqs)
        self.chunks = -(-self.tokens // _CHUNK) if chunked else 0
        self.rank = first(_RANKS, lambda rank: rank)

    def form(self, size: int, tile: int = 0) -> Form:
        """What a dimension of this size is.

        Args:
            tile: tokens of a tile that depends on the sizes; 0 where none does.

        Raises:
            NoProgram: none of MONOMIALS.
        """
        if size == 0:
            return ()
        if tile and size == tile:
            return ((MONOMIALS.index((0, 0, 0, 1)), 1.0),)
        if (size + 1) % (self.seqs * self.tokens) == 0:
            return (*self.form(size + 1), (0, -1.0))
        for row in (self.tokens, self.seqs * self.tokens):
            if size in {-(-row // to) * to for to in _ALIGNED}:
                return self.form(row)
        rest, powers, less = size, [0, 0, 0], 0
        for axis, prime in enumerate((self.seqs, self.tokens, self.rank)):
            while rest % prime == 0:
                rest, powers[axis] = rest // prime, powers[axis] + 1
        if rest % ((self.tokens - 1) // 2) == 0:
            rest, less = rest // ((self.tokens - 1) // 2), 1
        factor = float(rest)
        if self.chunks and rest % self.chunks == 0:
            powers[1], factor = powers[1] + 1, rest / self.chunks / _CHUNK
        key = (powers[0], powers[1] + less, powers[2], 0)
        if key not in MONOMIALS:
            raise NoProgram(f"{size} is micro-batch^{key[0]} x length^{key[1]} x rank^{key[2]} x {factor:g}")
        if not less:
            return ((MONOMIALS.index(key), factor),)
        below = MONOMIALS.index((powers[0], powers[1], powers[2], 0))
        return (below, -factor / 2.0), (MONOMIALS.index(key), factor / 2.0)


def numbers_of(config: Any) -> Iterator[int]:
    """All whole numbers of a configuration."""
    if isinstance(config, Mapping):
        config = [*config.values()]
    if isinstance(config, (list, tuple)):
        for value in config:
            yield from numbers_of(value)
    elif isinstance(config, int) and not isinstance(config, bool) and config > 8:
        yield config


def objective_structures(
    model: ModelSpec, objectives: Sequence[str] = OBJECTIVES
) -> dict[str, tuple[TrainSetup, GpuSpec]]:
    """What plans of other objectives walk, and the same with all logits at once, as older trainers have them."""
    by_key: dict[str, tuple[TrainSetup, GpuSpec]] = {}
    for objective in ("classification",) if model.reads_both_ways else objectives:
        request = PlanRequest(fixed={"objective": (objective,)})
        try:
            structures = planned_structures(model, CARDS, request, programmed_kind)
        except UsageError:  # of a type that transformers gives no such head
            continue
        for setup, gpu in _run_alone(structures):
            for each in (setup, setup.replace(loss="full")):
                by_key.setdefault(program_key(model, gpu, each), (each, gpu))
    return by_key


def _run_alone(structures: Mapping[str, tuple[TrainSetup, GpuSpec]]) -> list[tuple[TrainSetup, GpuSpec]]:
    """Those that programs are made of: with all layers checkpointed or none, on the card."""
    return [
        (setup, gpu) for setup, gpu in structures.values() if not setup.activation_offload and setup.checkpointing < 2
    ]


def program_structures(model: ModelSpec, cards: Sequence[str] = CARDS) -> dict[str, tuple[TrainSetup, GpuSpec]]:
    """What plans of this model walk, and what people's own files ask (eager kernels, full fine-tuning all in 16 bits),
    with all layers checkpointed or none: of which any other spacing is put together."""
    by_key: dict[str, tuple[TrainSetup, GpuSpec]] = {}
    structures = _run_alone(planned_structures(model, cards))
    structures += [
        (setup.replace_trusted(precision="bf16-pure"), gpu)
        for setup, gpu in structures
        if setup.method == "full" and setup.precision == "bf16-mixed"
    ]
    eager = [(setup.replace_trusted(kernels="eager"), gpu) for setup, gpu in structures]
    for setup, gpu in (*structures, *eager, *with_fused_adapters(model, structures)):
        by_key.setdefault(program_key(model, gpu, setup), (setup, gpu))
    return by_key


class ProgramBuilder:
    """Builds the programs of one model; `tables`: what they share, `failures`: by key, why a structure has none."""

    def __init__(self, model: ModelSpec, optimizers: Sequence[str] = tuple(OPTIMIZERS)) -> None:
        load_libraries()
        self._model, self._names, self.tables = model, optimizers, Tables()
        mixers = {kind.attention.kind for kind in model.layer_kinds if kind.attention is not None}
        self._primes = Primes(
            numbers_of(dict(model.config)),
            longest=model.learned_positions or 0,
            chunked="linear" in mixers,
            alike=self._alike,
        )
        self._steps: dict[Any, Mapping[str, Counts]] = {}
        self.failures: dict[str, str] = {}

    def _alike(self, tokens: int) -> bool:
        """Liger's tile of 32,000 to 32,768 rows of logits over 4,096 features is 4,096 tokens of some 30,000."""
        vocabulary = self._model.vocab_size, self._model.hidden_size
        tiles = {(loss.tiling(tokens, *vocabulary).tokens, loss.tiling(4 * tokens, *vocabulary).tokens)
                 for loss in LOSSES.values()}  # fmt: skip
        return any(tile in vocabulary and tile != larger for tile, larger in tiles)

    def all(self, structures: Mapping[str, tuple[TrainSetup, GpuSpec]]) -> dict[str, StepProgram]:
        """The programs of many structures; those that have none are in `failures`. A loss with a further checkpointing
        is put together of two runs where one structure showed that this gives the same."""
        programs: dict[str, StepProgram] = {}
        families: dict[Any, dict[tuple[str, int], StepProgram | None]] = {}
        trusted: dict[str, bool] = {}
        for key, (setup, gpu) in structures.items():
            family = families.setdefault((setup.replace_trusted(loss="full", checkpointing=0), gpu.key), {})
            loss, every = setup.loss, setup.checkpointing
            program = self._with_loss(family, loss, every) if trusted.get(loss, True) else None
            if program is None or loss not in trusted:
                try:
                    ran = self.program(setup, gpu)
                except NOT_PROFILED as error:
                    self.failures[key], ran = f"{type(error).__name__}: {error}", None
                if program is not None and ran is not None:
                    trusted[loss] = program == ran
                program = ran
            family[loss, every] = program
            if program is not None:
                programs[key] = program
        return programs

    def _with_loss(
        self, family: Mapping[tuple[str, int], StepProgram | None], loss: str, every: int
    ) -> StepProgram | None:
        """The program that another loss has with this checkpointing, with the segments of its own; None where it is
        not known which they are."""
        first = next(iter(family), (loss, 0))[0]
        source, base, like = family.get((loss, 0)), family.get((first, 0)), family.get((first, every))
        if source is None or base is None or like is None or loss == first:
            return None
        swaps: dict[int, int] = {}
        flat_base, flat_own, flat_like = (
            flat((*program.forward, *program.backward)) for program in (base, source, like)
        )
        for mine, others in zip(flat_base, flat_own, strict=False):
            if swaps.setdefault(mine, others) != others:
                return None
        segments = [*self.tables.segments]
        changed = {place for place, other in swaps.items() if place != other}
        if len(flat_base) != len(flat_own) or any(
            segments[place].phase == "loss" and place not in swaps for place in flat_like
        ):
            return None
        if any(segments[place].phase != "loss" and place not in flat_like for place in changed):
            return None

        def swapped(blocks: Blocks) -> Blocks:
            return tuple((tuple(swaps.get(place, place) for place in places), times) for places, times in blocks)

        return like._replace(forward=swapped(like.forward), backward=swapped(like.backward))

    def program(self, setup: TrainSetup, gpu: GpuSpec) -> StepProgram:
        """The program of one structure.

        Raises:
            one of NOT_PROFILED.
        """
        primes = self._primes
        made = setup.replace(
            micro_batch_seqs=primes.seqs,
            seq_len_tokens=primes.tokens,
            lora_rank=primes.rank if setup.method != "full" else 0,
            accumulation_steps=1,
            optimizer="sgd",
        )
        with collection_paused():
            plan = plan_depth(load_config(self._model.config), checkpointing=made.checkpointing, full_depth=False)
            trace = trace_run(
                copy.deepcopy(plan.config), made, capability=gpu.compute_capability or (8, 0), steps=1,
                workspaces=False, num_layers=plan.depth,
            )  # fmt: skip
            assert trace.operators is not None
            trace.operators.layers = plan.layers
            program = full_program(trace.operators, trace.trainables)
            assert program is not None
            return self._sized(program, made, self._optimizers(trace, plan, made))

    # Sizes

    def _sized(self, program: Program, setup: TrainSetup, steps: Mapping[str, Counts]) -> StepProgram:
        tile, num_tiles = self._tiles(setup)
        sized = _Sized(program, self._primes, self.tables, tile)
        places: dict[int, list[int]] = {}
        ahead: list[int] = []
        order: list[int] = []
        for place in program.micro_batch:
            if place not in places:
                segment = program.segments[place]
                parts = [segment]
                if not ahead and segment.phase != "forward":
                    first = next((at for at, call in enumerate(segment.calls) if call % _NUM == _ENGINE), None)
                    if first is not None:
                        ends = replace(segment, calls=segment.calls[:first])
                        ahead = [*order, self.tables.segment(sized.segment(ends, num_tiles))]
                        order, parts = [], [replace(segment, calls=segment.calls[first:])]
                places[place] = [self.tables.segment(sized.segment(part, num_tiles)) for part in parts]
            order += places[place]
        looped = {run.per for index in (*ahead, *order) for run in [*self.tables.segments][index].runs}
        if num_tiles > 2 and TILES not in looped:
            raise NoProgram("the loop over the loss's tiles was not found")
        calls = [call for segment in program.segments for call in segment.calls]
        return StepProgram(
            forward=_repeated(ahead),
            backward=_repeated(order),
            added=tuple((sized.call(number * _NUM + _ENGINE), times) for number, times in program.added.items()),
            steps=steps,
            num_modules=program.num_modules,
            checkpointed=any(call % _NUM == ISSUERS.index("recompute") for call in calls),
        )

    def _tiles(self, setup: TrainSetup) -> tuple[int, int]:
        """Tokens of a tile of the loss where they depend on the sizes (else 0), and how many tiles there are."""
        tokens, vocabulary = setup.tokens_per_micro_batch, (self._model.vocab_size, self._model.hidden_size)
        tiling = LOSSES[setup.loss].tiling
        tile = tiling(tokens, *vocabulary).tokens
        fixed = tile == tiling(4 * tokens, *vocabulary).tokens
        return 0 if fixed or tile == tokens else tile, -(-tokens // tile)

    def _optimizers(self, trace: Trace, plan: DepthPlan, setup: TrainSetup) -> Mapping[str, Counts]:
        """What each optimizer's step issues on the full model's trained parameters."""
        layers = plan.layers or LayerMap(tuple(range(plan.full)))
        trained = layers.unrolled(trace.trainables, lambda parameter: parameter.layer)
        key = (
            setup.precision,
            setup.stack,
            tuple((parameter.shape, parameter.dtype, parameter.has_gradient) for parameter, _ in trained),
        )
        if key not in self._steps:
            self._steps[key] = {
                name: self._step(trace, layers, setup.replace_trusted(optimizer=name)) for name in self._names
            }
        return self._steps[key]

    def _step(self, trace: Trace, layers: LayerMap, setup: TrainSetup) -> Counts:
        log = OperatorLog()
        optimizer_steps(replace(trace, operators=log), layers, setup, 2)
        program = Program(
            operators=log.operators, segments=[Segment(phase="step", calls=log.calls)], micro_batch=[], step=[0],
            added={}, num_modules=0,
        )  # fmt: skip
        sized = _Sized(program, self._primes, self.tables, 0, step=True, adapted=setup.method != "full")
        return tuple(sorted(Counter(map(sized.call, log.calls)).items()))


class _Sized:
    """A program's operators with their sizes left open."""

    def __init__(
        self, program: Program, primes: Primes, tables: Tables, tile: int, *, step: bool = False, adapted: bool = False
    ) -> None:
        self._program, self._primes, self._tables, self._tile = program, primes, tables, tile
        self._step, self._adapted = step, adapted
        self._operator_numbers: dict[tuple[int, bool], int] = {}

    def call(self, call: int, *, tiled: bool = False) -> int:
        number, issuer = divmod(call, _NUM)
        key = number, tiled
        if key not in self._operator_numbers:
            operator = self._program.operators[number]
            self._operator_numbers[key] = self._tables.operator(self._operator(operator, self._tile if tiled else 0))
        return self._operator_numbers[key] * _NUM + issuer

    def _operator(self, operator: Operator, tile: int) -> SizedOperator:
        if (name := self._name(operator)) != operator.name:
            return SizedOperator(name)
        return SizedOperator(
            name=operator.name,
            inputs=tuple(self._layout(each, tile) for each in operator.inputs),
            outputs=tuple(self._layout(each, tile) for each in operator.outputs),
            numbers=operator.numbers if operator.name.startswith(_KEEP_NUMBERS) else (),
            listed=operator.listed,
        )

    @staticmethod
    def _name(operator: Operator) -> str:
        view = (
            not (operator.inputs or operator.outputs)
            and operator.name.startswith("aten.")
            and "empty" not in operator.name
        )
        return _VIEW if view and not operator.name.startswith("aten.detach") else operator.name

    def _layout(self, layout: Layout, tile: int) -> SizedLayout:
        order = sorted(range(len(layout.shape)), key=lambda place: (-layout.stride[place], place))
        repeated = tuple(
            place
            for place, (size, step) in enumerate(zip(layout.shape, layout.stride, strict=True))
            if not step and size > 1
        )
        if order == [*range(len(layout.shape))]:
            order = []
        shape = tuple(self._form(size, tile) for size in layout.shape)
        return SizedLayout(shape, tuple(order), layout.dense, repeated, layout.dtype)

    def _form(self, size: int, tile: int) -> Form:
        if not self._step:
            return self._primes.form(size, tile)
        rank = self._primes.rank  # sums over all parameters: the rank of adapters alone is a variable
        if self._adapted and size and size % rank == 0:
            return ((MONOMIALS.index((0, 0, 1, 0)), size / rank),)
        return ((0, float(size)),) if size else ()

    def segment(self, segment: Segment, num_tiles: int) -> SizedSegment:
        """A segment with its loops told apart: over tiles of the loss, and over chunks of a sequence."""
        calls = [call for call in segment.calls if not self._aligns(call)]
        runs = self._tiled(calls, num_tiles) if segment.phase == "loss" else self._chunked([*map(self.call, calls)])
        return SizedSegment(segment.phase, tuple(run for run in runs if run.calls))

    def _tiled(self, calls: Sequence[int], num_tiles: int) -> list[Run]:
        """Calls with their loops over tiles told apart; a first tile that does more is none of the loop's."""
        sized = tuple(self.call(call, tiled=True) for call in calls)
        loop = self._loop(calls, num_tiles) if num_tiles > 2 else None
        if loop is None:
            return [Run(ONCE, 0, sized)]
        first, period, turns, end = loop
        body = Run(TILES, num_tiles - turns, sized[first : first + period])
        return [Run(ONCE, 0, sized[:first]), body, *self._tiled(calls[end:], num_tiles)]

    def _chunked(self, calls: Sequence[int]) -> list[Run]:
        """Calls of the tables with their loops over chunks told apart."""
        chunks, best = self._primes.chunks, (0, 0, 0)
        for period in range(2, len(calls) // (chunks - _UNLIKE) + 1) if chunks else ():
            for start, end in _periodic(calls, period):
                turns = (end - start) // period
                if chunks - _UNLIKE <= turns <= chunks and turns * period > best[1] * best[2]:
                    best = start, period, turns
        first, period, turns = best
        if not period:
            return [Run(ONCE, 0, tuple(calls))]
        before, after = self._chunked(calls[:first]), self._chunked(calls[first + period * turns :])
        return [*before, Run(_CHUNK, chunks - turns, tuple(calls[first : first + period])), *after]

    def _aligns(self, call: int) -> bool:
        """Whether it lengthens a mask's rows to a multiple of 8, which lengths that people choose are."""
        operator, primes = self._program.operators[call // _NUM], self._primes
        rows = primes.tokens, primes.seqs * primes.tokens
        return operator.name.startswith("aten.constant_pad_nd") and operator.inputs[0].shape[-1:] in {
            (row,) for row in rows
        }

    def _loop(self, calls: Sequence[int], num_tiles: int) -> tuple[int, int, int, int] | None:
        """(begin, period, turns, end) of the longest loop that turns once a tile, or but for the first one; the last
        differs in size and views alone."""
        best = None
        names = [(self._name(self._program.operators[call // _NUM]), call % _NUM) for call in calls]
        for period in range(2, len(calls) // (num_tiles - 1) + 1):
            for start, end in _periodic(calls, period):
                whole = (end - start) // period
                if num_tiles - whole not in (1, 2):
                    continue
                for first in range(end - whole * period, start - 1, -1):
                    after = _after(names, names[first : first + period], first + whole * period)
                    if after:
                        best = first, period, whole + 1, after
                        break
        return best


def _periodic(calls: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    import numpy as np

    array = np.asarray(calls)
    same = array[period:] == array[:-period]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield start, end + period


def _after(names: Sequence[tuple[str, int]], body: Sequence[tuple[str, int]], begin: int) -> int:
    """Where what `body` does ends that begins there, views aside; 0 where something else is done."""
    at = begin
    for name in body:
        if name[0] == _VIEW:
            continue
        while at < len(names) and names[at][0] == _VIEW:
            at += 1
        if at == len(names) or names[at] != name:
            return 0
        at += 1
    return at


def _repeated(order: Sequence[int]) -> Blocks:
    blocks: list[tuple[tuple[int, ...], int]] = []
    at = 0
    while at < len(order):
        best: tuple[tuple[int, ...], int] = (order[at],), 1
        for period in range(1, 13):
            part = tuple(order[at : at + period])
            times = next(
                repeats
                for repeats in count(1)
                if tuple(order[at + repeats * period : at + (repeats + 1) * period]) != part
            )
            if len(part) == period and times > 1 and times * period > len(best[0]) * best[1]:
                best = part, times
        blocks.append(best)
        at += len(best[0]) * best[1]
    return tuple(blocks)
