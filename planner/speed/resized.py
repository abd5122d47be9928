"""The step programs of a structure of layers (`planner.models.structures`), for a model of any size that has it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.core.packed import read_packed
from planner.models.spec import ModelSpec
from planner.models.structures import Resizer, sizes_of, structure_of


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


def resized_programs(model: ModelSpec, directory: Path, schema: int) -> dict[str, Any] | None:
    """The tables of a model whose structure was run at other sizes; None where it was not."""
    structure = structure_of(model)
    raw = read_packed(directory / f"{structure}.json.gz", schema, shipped=True) if structure else None
    return resized(raw, sizes_of(model)) if raw else None
