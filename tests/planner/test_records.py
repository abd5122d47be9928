"""`planner.core.records.dataclass` does what the standard library's does."""

import dataclasses
import pickle
from dataclasses import field
from typing import Any

import pytest

from planner.core.records import dataclass
from planner.setup import TrainSetup


def _classes(make: Any) -> list[Any]:
    @make(frozen=True, kw_only=True)
    class Plain:
        size_bytes: int
        names: tuple[str, ...] = ()
        found: dict[str, int] = field(default_factory=dict, compare=False)

    @make(frozen=True, slots=True, kw_only=True)
    class Slots:
        size_bytes: int
        config: dict[str, int] = field(repr=False, compare=False, default_factory=dict)

    @make(kw_only=True)
    class Mutable:
        size_bytes: int
        names: list[str] = field(default_factory=list)

    @make(frozen=True, kw_only=True, repr=False, eq=False)
    class Alone:
        size_bytes: int

    @make(frozen=True, kw_only=True)
    class Own(Plain):
        width: int = 3

        def __hash__(self) -> int:
            return 7

    return [Plain, Slots, Mutable, Alone, Own]


def _behaviour(kind: Any) -> list[Any]:
    made, equal = kind(size_bytes=2), kind(size_bytes=2)
    other = dataclasses.replace(made, size_bytes=5)
    with pytest.raises(TypeError) as missing:
        kind()
    said = "" if "object at" in repr(made) else repr(made)
    hashed = None if kind.__hash__ is None else hash(made) == hash(equal)
    fields = [each.name for each in dataclasses.fields(kind)]
    return [
        said, made == equal, made == other, made == 3, hashed, dataclasses.asdict(other), fields, kind.__match_args__,
        str(missing.value), hasattr(made, "__dict__"),
    ]  # fmt: skip


def test_objects_behave_as_those_of_the_standard_library() -> None:
    for ours, theirs in zip(_classes(dataclass), _classes(dataclasses.dataclass), strict=True):
        assert _behaviour(ours) == _behaviour(theirs)


@dataclass(frozen=True, slots=True)
class Kept:
    """A class that pickle finds by its name."""

    size_bytes: int
    names: tuple[str, ...] = ()


def test_objects_with_slots_are_pickled_and_found() -> None:
    instance = Kept(3, ("a",))
    copy = pickle.loads(pickle.dumps(instance))
    assert copy == instance
    assert {instance: 1}[copy] == 1
    assert Kept(4) not in {instance}


def test_a_setup_is_frozen_at_run_time_too() -> None:
    setup = TrainSetup()
    with pytest.raises(dataclasses.FrozenInstanceError, match="micro_batch_seqs"):
        setup.micro_batch_seqs = 99  # type: ignore[misc]
    assert setup.replace(micro_batch_seqs=2).micro_batch_seqs == 2
    assert {setup: 1}[TrainSetup()] == 1
