"""How the engine sums gradients: the tracker, under which PyTorch never adds in place, against PyTorch without it."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from probes.allocator.events import Alloc, Event, Free  # noqa: E402
from probes.dryrun.tracker import Tracker  # noqa: E402

ROWS, WIDTH = 96, 64
Loss = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))


def _block(hidden: torch.Tensor, square: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return hidden + F.linear(F.silu(F.linear(_norm(hidden, norm), square)), square)


def _tied(parameters: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    table = parameters[0]
    return F.linear(F.embedding(ids, table).tanh(), table).tanh().sum()


def _residual(parameters: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    table, square, norm = parameters
    hidden = F.embedding(ids, table)
    for _ in range(3):
        hidden = _block(hidden, square, norm)
    return F.linear(hidden, table).tanh().sum()


def _checkpointed(parameters: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    table, square, norm = parameters
    hidden = F.embedding(ids, table)
    for _ in range(2):
        hidden = checkpoint(_block, hidden, square, norm, use_reentrant=False)
    return F.linear(hidden, table).tanh().sum()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):  # type: ignore[no-untyped-def]
        return hidden * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * 1 + gradient  # a person's own sum, which stays out of place


def _own_function(parameters: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    hidden = F.embedding(ids, parameters[0])
    return (_Doubled.apply(hidden).tanh() + hidden.tanh() + hidden.sin()).sum()


def _inputs(device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    shapes = ((320, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    parameters = [torch.ones(shape, device=device).requires_grad_() for shape in shapes]
    return parameters, torch.zeros((2, ROWS), dtype=torch.long, device=device)


def _sums_without_mode(loss: Loss) -> list[tuple[bool, tuple[int, ...]]]:
    """(in place, shape) of every sum of gradients, as PyTorch does it alone."""
    parameters, ids = _inputs("cpu")
    value = loss(parameters, ids)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recording:
        value.backward()
    events = sorted(recording.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    names = {"aten::add": False, "aten::add_": True}
    return [(names[event.name()], tuple(event.shapes()[0])) for event in events if event.name() in names]


def _backward(loss: Loss, device: str) -> tuple[list[tuple[bool, tuple[int, ...]]], list[Event]]:
    """The same as the tracker leaves it, and what it recorded."""
    sums: list[tuple[bool, tuple[int, ...]]] = []
    parameters, ids = _inputs(device)
    tracker = Tracker(device)

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        """Sees what the tracker's own operators are."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and in_backward:
                sums.append((func is torch.ops.aten.add_.Tensor, tuple(args[0].shape)))
            return func(*args, **(kwargs or {}))

    in_backward = False
    with Spy(), tracker:
        value = loss(parameters, ids)
        in_backward = True
        value.backward()
        in_backward = False
    tracker.close()
    return sums, tracker.events


def _alive(events: list[Event]) -> list[int]:
    total, sizes, alive_bytes = 0, {}, []
    for event in events:
        if isinstance(event, Alloc):
            sizes[event.id] = event.size_bytes
            total += event.size_bytes
        elif isinstance(event, Free):
            total -= sizes.pop(event.id)
        alive_bytes.append(total)
    return alive_bytes


@pytest.mark.parametrize("loss", [_tied, _residual, _own_function], ids=["tied", "residual", "own function"])
def test_gradient_sums_are_in_place_where_pytorch_adds_in_place(loss: Loss) -> None:
    without = _sums_without_mode(loss)
    tracked, _ = _backward(loss, "cpu")
    assert without, "the graph must hold sums, or nothing is compared"
    assert tracked == without


@pytest.mark.parametrize("loss", [_tied, _residual, _checkpointed, _own_function])
def test_gradient_sums_on_meta_are_those_of_real_tensors(loss: Loss) -> None:
    _, real = _backward(loss, "cpu")
    _, dry = _backward(loss, "meta")
    assert _alive(dry) == _alive(real)


def test_a_tied_embedding_makes_a_third_gradient_and_a_residual_none() -> None:
    """The transposed gradient of the head holds its storage twice, so PyTorch cannot add into it."""
    assert _sums_without_mode(_tied) == [(False, (320, WIDTH))]
    assert (True, (2, ROWS, WIDTH)) in _sums_without_mode(_residual)
