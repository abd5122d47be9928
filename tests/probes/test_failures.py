"""What a child says of its end: where memory ran out is part of it."""

import pytest

from planner.outcome import FailureKind
from probes.failures import building, classify_exception


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()], ids=["cuda", "host"]
)
def test_memory_that_runs_out_while_building_says_that_nothing_was_trained(error: Exception) -> None:
    with pytest.raises(RuntimeError) as found, building("building 80 layers"):
        raise error
    kind, message = classify_exception(found.value)
    assert kind is FailureKind.OUT_OF_MEMORY
    assert "before any training step, building 80 layers" in message
    assert type(error).__name__ in message


def test_other_errors_while_building_are_left_alone() -> None:
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as found, building("building 2 layers"):
        raise illegal
    assert found.value is illegal
    assert classify_exception(found.value)[0] is FailureKind.CRASHED
    with pytest.raises(KeyError), building("building 2 layers"):
        raise KeyError("a bug of ours")
