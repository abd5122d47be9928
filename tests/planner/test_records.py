"""`planner.core.records.dataclass` does what the standard library's does, case by case."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from planner.core.records import dataclass


def _keyword(make: Callable[..., Any]) -> Any:
    @make(frozen=True, kw_only=True)
    class Case:
        size_bytes: int
        names: tuple[str, ...] = ()
        found: dict[str, int] = field(default_factory=dict, compare=False)
        name: ClassVar[str] = "case"

    return Case


def _slots(make: Callable[..., Any]) -> Any:
    @make(frozen=True, slots=True)
    class Case:
        size_bytes: int
        names: tuple[str, ...] = ()
        config: dict[str, int] = field(repr=False, hash=False, default_factory=dict)

    return Case


def _checked(make: Callable[..., Any]) -> Any:
    @make(frozen=True, kw_only=True)
    class Base:
        size_bytes: int = 1

        def __post_init__(self) -> None:
            if self.size_bytes < 0:
                raise ValueError(self.size_bytes)
            object.__setattr__(self, "kept", self.size_bytes + 1)

        def __hash__(self) -> int:
            return 7

    @make(frozen=True, kw_only=True)
    class Case(Base):
        names: tuple[str, ...] = ("a",)
        kept: int = field(init=False, compare=False)

    return Case


def _mutable(make: Callable[..., Any]) -> Any:
    @make(slots=True)
    class Case:
        size_bytes: int
        names: list[str] = field(default_factory=list)
        width: int = field(init=False, default=3)

    return Case


def _plain(make: Callable[..., Any]) -> Any:
    @make(frozen=True, repr=False, eq=False)
    class Case:
        size_bytes: int
        names: Any

    return Case


CASES = (_keyword, _slots, _checked, _mutable, _plain)
CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((), {"size_bytes": 2}), ((), {"size_bytes": 2, "names": ("b",)}), ((2,), {}), ((2, ("b",)), {}), ((), {}),
    ((), {"size_bytes": -1}), ((), {"size_bytes": 1, "unknown": 3}), ((1,), {"size_bytes": 1}),
)  # fmt: skip


def _said(act: Callable[[], Any]) -> Any:
    """What an act gives, or how it fails."""
    try:
        return act()
    except (TypeError, ValueError, AttributeError) as error:
        return type(error), str(error)


def _parameters(kind: Any) -> list[Any]:
    return [(parameter.name, parameter.kind) for parameter in inspect.signature(kind).parameters.values()]


def _behaviour(kind: Any, arguments: tuple[Any, ...], values: dict[str, Any]) -> list[Any]:
    """What can be seen of an object of `kind`."""
    made = _said(lambda: kind(*arguments, **values))  # first: the signature is that of the compiled method
    if not isinstance(made, kind):
        return [made, *_parameters(kind)]
    equal, other = kind(*arguments, **values), dataclasses.replace(made, size_bytes=5)
    attributes = [attribute.name for attribute in dataclasses.fields(kind)]
    return [
        *(dataclasses.asdict(instance) for instance in (made, other, copy.copy(made), copy.deepcopy(made))),
        repr(made) if "object at" not in repr(made) else None,
        made == equal, made == other, made == 3, made in {equal: 0} if kind.__hash__ else _said(lambda: hash(made)),
        [_said(lambda name=name: setattr(made, name, 4)) for name in attributes],
        hasattr(made, "__dict__") and _said(lambda: setattr(made, "unknown", 4)),  # slots: the library's own fault
        _said(lambda: delattr(made, "size_bytes")),
        hash(made) == hash(tuple(getattr(made, attribute) for attribute in attributes[:2])) if kind.__hash__ else None,
        kind.__match_args__, hasattr(made, "__dict__"), *_parameters(kind),
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("arguments", "values"), CALLS)
def test_objects_behave_as_those_of_the_standard_library(
    case: Any, arguments: tuple[Any, ...], values: dict[str, Any]
) -> None:
    ours, theirs = case(dataclass), case(dataclasses.dataclass)
    assert _behaviour(ours, arguments, values) == _behaviour(theirs, arguments, values)


@dataclass(frozen=True, slots=True)
class Kept:
    """A class that pickle finds by its name."""

    size_bytes: int
    names: tuple[str, ...] = ()


def test_frozen_objects_with_slots_are_pickled() -> None:
    instance = Kept(3, ("a",))
    assert pickle.loads(pickle.dumps(instance)) == instance


def test_an_init_that_is_called_often_is_compiled() -> None:
    case = _checked(dataclass)
    seldom = vars(case)["__init__"]
    objects = [case(size_bytes=size) for size in (3, *[4] * 100, 3)]
    assert vars(case)["__init__"] is not seldom
    assert objects[0] == objects[-1] != objects[1]
    assert objects[0].kept == objects[-1].kept == 4
