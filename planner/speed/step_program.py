"""`StepProgram`: what one structure of training step issues, its sizes left open: the dry run's program in closed form.

A structure is everything of a setup but micro-batch, length, rank, accumulation and optimizer
(`planner.memory.profiles.program_key`). Its operators' shapes are polynomials in those; which operators come in
which order does not depend on them, but for a loss that cuts its tokens into tiles. One compressed file a model, made
by `probes.tracing.programs`; operators, segments and steps that several structures share are written once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from planner.core.packed import read_packed, write_packed
from planner.core.shipped import DATA
from planner.memory.profiles import Form, config_digest, library_versions, profiled_kind, user_directory, user_path
from planner.models.spec import ModelSpec
from planner.models.structures import Resizer, sizes_of, structure_of
from planner.setup import TrainSetup

SCHEMA = 1
SHIPPED = DATA / "programs"
OF_OBJECTIVES = DATA / "objective_programs"
"""Files of their own: a plan of supervised training reads none of these."""
OBJECTIVES = ("dpo", "kto", "orpo", "reward", "classification")
"""Whose steps issue what their samples' sizes alone decide; a generation's length is none of them."""


class SizedLayout(NamedTuple):
    """A `planner.speed.operators.Layout` of any size.

    Attributes:
        shape: a form for each dimension.
        order: its dimensions, the one with the widest step first; () where they lie in order.
        dense: whether its elements lie without gaps.
        repeated: dimensions that are one element read again and again (step 0).
    """

    shape: tuple[Form, ...]
    order: tuple[int, ...]
    dense: bool
    repeated: tuple[int, ...]
    dtype: str


class SizedOperator(NamedTuple):
    """A `planner.speed.operators.Operator` of any size."""

    name: str
    inputs: tuple[SizedLayout, ...] = ()
    outputs: tuple[SizedLayout, ...] = ()
    numbers: tuple[float, ...] = ()
    listed: int = 0


ONCE, TILES = 0, -1


class Run(NamedTuple):
    """Calls (operator x len(ISSUERS) + issuer), once or in a loop.

    Attributes:
        per: ONCE, TILES (once a tile of the loss), or once for every so many tokens of a sequence.
        less: so many times fewer.
    """

    per: int
    less: int
    calls: tuple[int, ...]


class SizedSegment(NamedTuple):
    """A `planner.speed.operators.Segment` of any size."""

    phase: str
    runs: tuple[Run, ...]


Block = tuple[tuple[int, ...], int]
"""Segments one after another, and how many times."""
Blocks = tuple[Block, ...]
Counts = tuple[tuple[int, int], ...]
"""(call, how often)."""


class StepProgram(NamedTuple):
    """The program of one structure; calls and segments are places in `ModelPrograms`.

    Attributes:
        ahead, behind: a micro-batch's segments until its backward begins, and from then on.
        added: operators that add a later micro-batch's gradients to the first one's.
        steps: by optimizer, what clipping, optimizer and release issue.
        num_modules: of the model's module tree.
        checkpointed: whether the step recomputes.
    """

    forward: Blocks
    backward: Blocks
    added: Counts
    steps: Mapping[str, Counts]
    num_modules: int
    checkpointed: bool


class ModelPrograms:
    """The programs of one model by structure.

    Attributes:
        versions: of what was run.
        any_size: whether they are of a model's layers at sizes that were not run (`planner.models.structures`).
        operators, segments: what programs name by their places.
        worked_out: of them (`planner.speed.sized`).
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.versions: Mapping[str, str] = raw["versions"]
        self.any_size = bool(raw.get("sizes"))
        self.worked_out: dict[object, Any] = {}
        self._raw = raw
        self._found: dict[str, StepProgram] = {}
        self._spaced: dict[tuple[str, str, int], StepProgram | None] = {}
        self._known_blocks: dict[Block, Block] = {}
        self._shared_blocks: dict[Blocks, Blocks] = {}
        forms = [tuple([(index, float(factor)) for index, factor in form]) for form in raw["forms"]]
        layouts = [
            SizedLayout(tuple([forms[number] for number in shape]), tuple(order), bool(dense), tuple(repeated), dtype)
            for shape, order, dense, repeated, dtype in raw["layouts"]
        ]
        self.operators = [
            SizedOperator(
                raw["names"][name],
                tuple([layouts[number] for number in inputs]),
                tuple([layouts[number] for number in outputs]),
                tuple(numbers),
                listed,
            )
            for name, inputs, outputs, numbers, listed in raw["operators"]
        ]
        self.segments = [
            SizedSegment(phase, tuple([Run(per, less, tuple(calls)) for per, less, calls in runs]))
            for phase, runs in raw["stretches"]
        ]
        self._steps = [tuple([(call, times) for call, times in counts]) for counts in raw["steps"]]

    @property
    def keys(self) -> frozenset[str]:
        """The structures that have one."""
        return frozenset(self._raw["programs"])

    @cached_property
    def words(self) -> frozenset[str]:
        """All that their names say: what is in none has no program."""
        return frozenset(word for key in self._raw["programs"] for word in key.split(" "))

    def get(self, key: str) -> StepProgram | None:
        """The program of a structure."""
        program = self._found.get(key)
        if program is not None or key not in self._raw["programs"]:
            return program
        ahead, backward, added, steps, num_modules, checkpointed = self._raw["programs"][key]
        program = self._found[key] = StepProgram(
            forward=self._blocks(ahead),
            backward=self._blocks(backward),
            added=self._steps[added],
            steps={optimizer: self._steps[place] for optimizer, place in steps.items()},
            num_modules=num_modules,
            checkpointed=bool(checkpointed),
        )
        return program

    def spaced(self, keys: tuple[str, str], apart: int, num_layers: int) -> StepProgram | None:
        """The program with every so many layers checkpointed, of the structures with none and with every one."""
        key = *keys, apart
        if key not in self._spaced:
            none, every = map(self.get, keys)
            program = spaced(none, every, apart, num_layers) if none is not None and every is not None else None
            if program is not None:
                ahead, backward = (self._blocks(blocks) for blocks in (program.forward, program.backward))
                program = program._replace(forward=ahead, backward=backward)
            self._spaced[key] = program
        return self._spaced[key]

    def _blocks(self, values: Sequence[Any]) -> Blocks:
        """Equal ones are one object, each block too."""
        intern = self._known_blocks.setdefault
        blocks = tuple([intern(block, block) for block in [(tuple(places), times) for places, times in values]])
        return self._shared_blocks.setdefault(blocks, blocks)


def flat(blocks: Blocks) -> list[int]:
    """Segments one after another."""
    return [place for places, times in blocks for _ in range(times) for place in places]


def spaced(none: StepProgram, every: StepProgram, apart: int, num_layers: int) -> StepProgram | None:
    """The program that checkpoints the first of every `apart` layers, of those that checkpoint none and every one; None
    where their layers do not stand side by side."""
    ahead, backward = (
        _spaced(none.forward, every.forward, apart, num_layers),
        _spaced(none.backward, every.backward, apart, num_layers, backward=True),
    )
    return every._replace(forward=ahead, backward=backward) if ahead and backward else None


def _spaced(none: Blocks, every: Blocks, apart: int, num_layers: int, *, backward: bool = False) -> Blocks:
    plain, checkpointed = flat(none), flat(every)
    differ = [at for at, (left, two) in enumerate(zip(plain, checkpointed, strict=False)) if left != two]
    if len(plain) != len(checkpointed) or len(differ) != num_layers or differ[-1] - differ[0] != num_layers - 1:
        return ()
    first, end = differ[0], differ[-1] + 1
    start = first + (num_layers - 1) % apart if backward else first
    plain[start:end:apart] = checkpointed[start:end:apart]
    turns = (num_layers - 2) // apart  # what the first and the last layer do is their own
    period, rest = plain[first + 1 : first + 1 + apart], first + 1 + turns * apart
    if turns < 2 or plain[first + 1 : rest] != period * turns:
        return ((tuple(plain), 1),)
    return (tuple(plain[: first + 1]), 1), (tuple(period), turns), (tuple(plain[rest:]), 1)


class Tables:
    """What the programs of one model share, each thing once, as it is collected."""

    def __init__(self) -> None:
        self.operators: dict[SizedOperator, int] = {}
        self.segments: dict[SizedSegment, int] = {}

    def operator(self, operator: SizedOperator) -> int:
        """Its place."""
        return self.operators.setdefault(operator, len(self.operators))

    def segment(self, segment: SizedSegment) -> int:
        """Its place."""
        return self.segments.setdefault(segment, len(self.segments))


def save_programs(
    path: Path,
    tables: Tables,
    programs: Mapping[str, StepProgram],
    versions: Mapping[str, str],
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Writes the programs of a model; the same ones give the same bytes.

    Args:
        sizes: of a model that stands for all of its structure (`planner.models.structures`).
    """
    shared: dict[str, dict[Any, int]] = {"names": {}, "forms": {}, "layouts": {}, "steps": {}}

    def number(table: str, value: Any) -> int:
        return shared[table].setdefault(value, len(shared[table]))

    def layout(sized: SizedLayout) -> int:
        shape = tuple(number("forms", form) for form in sized.shape)
        return number("layouts", (shape, sized.order, int(sized.dense), sized.repeated, sized.dtype))

    operators = [
        (
            number("names", operator.name),
            [*map(layout, operator.inputs)],
            [*map(layout, operator.outputs)],
            operator.numbers,
            operator.listed,
        )
        for operator in tables.operators
    ]
    segments = [(segment.phase, segment.runs) for segment in tables.segments]
    packed = {
        key: (
            program.forward,
            program.backward,
            number("steps", program.added),
            {optimizer: number("steps", counts) for optimizer, counts in sorted(program.steps.items())},
            program.num_modules,
            int(program.checkpointed),
        )
        for key, program in sorted(programs.items())
    }
    raw = {
        "schema": SCHEMA, "versions": dict(versions), "sizes": dict(sizes or {}), "operators": operators,
        "stretches": segments,
        **{name: [*table] for name, table in shared.items()}, "programs": packed,
    }  # fmt: skip
    write_packed(path, raw)


def programmed_kind(setup: TrainSetup) -> bool:
    """Whether programs are made of such setups: of what profiles are made of, and of more objectives, whose loss may be
    cut into tiles: a program says what one tile issues."""
    alike = setup.replace_trusted(objective="sft") if setup.objective in OBJECTIVES else setup
    return profiled_kind(alike)


def programs_of(model: ModelSpec, objective: str = "sft") -> ModelPrograms | None:
    """The programs of a model for supervised training, or those of its other objectives: those that the user made with
    the libraries that are installed, else shipped ones."""
    if objective not in OBJECTIVES:
        return model.once("programs", _read_programs)
    return model.once(("programs", objective), lambda spec: _read_programs(spec, objective))


def user_programs(model: ModelSpec) -> Path:
    """The file of a model's programs for the libraries that are installed."""
    return user_path(model).with_name(f"programs-{user_path(model).name}")


def _read_programs(model: ModelSpec, objective: str = "") -> ModelPrograms | None:
    digest, directory = config_digest(model.config), OF_OBJECTIVES if objective else SHIPPED
    for path in user_directory().glob(f"programs-{digest}-*.json.gz"):
        programs = load_programs(path)
        if (
            programs is not None
            and {name: programs.versions.get(name) for name in library_versions()} == library_versions()
            and (not objective or f"objective={objective}" in programs.words)
        ):
            return programs
    shipped = load_programs(directory / f"{digest}.json.gz")
    if shipped is None and (raw := resized_programs(model, directory)) is not None:
        return ModelPrograms(raw)
    return shipped


@lru_cache(maxsize=8)
def load_programs(path: Path) -> ModelPrograms | None:
    """The programs of a file; None where there is none that can be read."""
    raw = read_packed(path, SCHEMA, shipped=path.parent in (SHIPPED, OF_OBJECTIVES))
    return ModelPrograms(raw) if raw and raw["programs"] else None


# The programs of a structure of layers (`planner.models.structures`), for a model of any size that has it.


def resized(raw: Mapping[str, Any], other: Mapping[str, int]) -> dict[str, Any]:
    """The tables of a model's programs (`planner.speed.step_program`) as those of one with other sizes."""
    to = Resizer(raw["sizes"], other)
    forms: dict[Any, int] = {}
    layouts: dict[Any, int] = {}
    sizes: dict[tuple[float, int], float] = {}
    places: dict[tuple[int, int], int] = {}

    def size(factor: float, listed: int) -> float:
        cached = sizes.get((factor, listed))
        if cached is None:
            cached = sizes[factor, listed] = _listed(factor, listed, to)
        return cached

    def layout(number: int, listed: int) -> int:
        position = places.get((number, listed))
        if position is None:
            shape, *rest = raw["layouts"][number]
            dimensions = []
            for form_number in shape:
                form = tuple([(index, size(factor, listed)) for index, factor in raw["forms"][form_number]])
                dimensions.append(forms.setdefault(form, len(forms)))
            row = tuple(dimensions), *(tuple(value) if isinstance(value, list) else value for value in rest)
            position = places[number, listed] = layouts.setdefault(row, len(layouts))
        return position

    operators = []
    for name, inputs, outputs, numbers, listed in raw["operators"]:
        sides = [[layout(layout_number, listed) for layout_number in side] for side in (inputs, outputs)]
        if raw["names"][name].startswith("trainer."):
            numbers = [to.count(number) for number in numbers]
        operators.append((name, *sides, numbers, to.count(listed) if listed else 0))

    def counts(pairs: Any, count: Callable[[int], int]) -> Any:
        return [(number, count(times)) for number, times in pairs]

    programs = {
        key: (counts(ahead, to.count), counts(backward, to.count), added, steps, to.count(modules), checkpointed)
        for key, (ahead, backward, added, steps, modules, checkpointed) in raw["programs"].items()
    }
    return {
        **raw, "forms": [*forms], "layouts": [*layouts], "operators": operators, "programs": programs,
        "steps": [counts(step, to.count) for step in raw["steps"]],
    }  # fmt: skip


def _listed(factor: float, listed: int, to: Resizer) -> float:
    """A factor of an operator over so many tensors in lists."""
    for lists in range(1, 6):
        if listed and factor * lists == listed:
            return float(to.count(int(factor)))
    return to.size(factor)


def resized_programs(model: ModelSpec, directory: Path) -> dict[str, Any] | None:
    """The tables of a model whose structure was run at other sizes; None where it was not."""
    structure = structure_of(model)
    raw = read_packed(directory / f"{structure}.json.gz", SCHEMA, shipped=True) if structure else None
    return resized(raw, sizes_of(model)) if raw else None
