"""A second micro-batch and a second training step from the first one's events.

The second micro-batch of a step finds the gradients of the first. Where those are the tensors that the backward made
(autograd takes them over where nothing else holds them), and nothing else of the first is alive but its loss, the
second makes the same tensors and releases each gradient once it is added to the first one's.

Where the first step leaves nothing behind but the optimizer's states (and cuBLAS's workspaces, which are made once),
the second allocates and releases what the first did. Its events are copied; the optimizer then runs for real on
gradients that lie in memory as the first step's did.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from probes.allocator.events import Alloc, Event, Free
from probes.dryrun.kernels import KernelLog
from probes.dryrun.tracker import STORAGE_USES, WORKSPACE, Tracker
from probes.stack.step import Mark, Trainer, step_optimizer


class _Gradient(NamedTuple):
    """What the optimizer was given for a parameter, and how it lies in its storage (`number`)."""

    parameter: torch.nn.Parameter
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int


class Replay:
    """The last step once more, where it would be the same; made as a step begins."""

    def __init__(self, tracker: Tracker, model: Any, log: KernelLog) -> None:
        self._tracker, self._log = tracker, log
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._first = len(tracker.events)
        self._passes: list[Event] | None = None  # forwards and backwards
        self._gradients: list[_Gradient] = []
        self._kernels: Counter[str] = Counter()
        self._micro_batch: int | None = None  # the event with which the first one begins
        self._added: list[tuple[int, int | None]] = []
        """Event after which a parameter's gradient was there, its storage."""

    @contextmanager
    def watching_gradients(self) -> Iterator[None]:
        """Within it each gradient is noted as autograd hands it to its parameter."""

        def note(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            number = self._tracker.identity(parameter.grad)
            alone = torch._C._storage_Use_Count(parameter.grad.untyped_storage()._cdata) == STORAGE_USES
            taken_over = number is not None and alone and self._tracker.origins[number].op not in _COPIES
            self._added.append((len(self._tracker.events), number if taken_over else None))

        with ExitStack() as stack:
            for parameter in self._parameters:
                stack.enter_context(parameter.register_post_accumulate_grad_hook(note))
            yield

    def micro_batch(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """The loss of the second micro-batch of the first step where the first one's events are its own; then it is
        done."""
        tracker, first = self._tracker, self._micro_batch
        if first is None or loss is None:
            self._micro_batch = len(tracker.events) if first is None else -1
            self._kernels = Counter(self._log.chosen)
            return None
        if first < 0:
            return None
        self._micro_batch = -1
        lost, storages = tracker.identity(loss), {number for _, number in self._added}
        if lost is None or None in storages or len(storages) < len(self._added):
            return None  # autograd copied a gradient, two lie in one storage, or one comes twice
        events: list[Event] = []
        for index, number in self._added:  # each gradient ends once it is added up
            events += [*tracker.events[first:index], Free(number or 0)]
            first = index
        events += tracker.events[first:]
        if _left(tracker, events) != {lost}:
            return None
        with _disable_current_modes():
            second_loss = torch.empty_like(loss)
        tracker.adopt(second_loss, tracker.copy(events)[lost])
        self._log.chosen.update(self._log.chosen - self._kernels)
        return second_loss

    def watching(self, mark: Mark) -> Mark:
        """`mark`, which also notes what the first step has done as its optimizer's phase begins."""

        def noted(phase: str, layer: int | None) -> None:
            if phase == "step" and self._passes is None:
                self._passes = self._tracker.events[self._first :]
                for parameter in self._parameters:
                    grad = parameter.grad
                    if grad is not None and (number := self._tracker.identity(grad)) is not None:
                        nbytes = grad.untyped_storage().nbytes()
                        given = _Gradient(parameter, number, grad.size(), grad.stride(), grad.dtype, nbytes)
                        self._gradients.append(given)
                self._kernels = Counter(self._log.chosen)
            mark(phase, layer)

        return noted

    def step(self, trainer: Trainer, mark: Mark) -> bool:
        """Whether the step could be made of the first one's events; if so it is done."""
        if self._passes is None:
            return False
        step = self._tracker.events[self._first + len(self._passes) :]
        later = _released_last(self._tracker, self._passes, self._gradients, step)
        if later is None or (copies := self._copied(self._passes)) is None:
            return False
        self._log.chosen.update(self._kernels)
        step_optimizer(trainer, mark)
        for number in later:
            self._tracker.release(copies[number])
        return True

    def _copied(self, passes: list[Event]) -> dict[int, int] | None:
        """The passes' events again and new gradients; None (and nothing done) where one cannot lie as it did."""
        fresh: dict[int, torch.Tensor] = {}
        with _disable_current_modes():
            for gradient in self._gradients:
                tensor = torch.empty_strided(gradient.size, gradient.stride, dtype=gradient.dtype, device="meta")
                if tensor.untyped_storage().nbytes() != gradient.storage_bytes:
                    return None
                fresh[gradient.number] = tensor
        copies = self._tracker.copy(passes)
        for gradient in self._gradients:
            self._tracker.adopt(fresh[gradient.number], copies[gradient.number])
            gradient.parameter.grad = fresh[gradient.number]
        return copies


def _left(tracker: Tracker, events: list[Event]) -> set[int] | None:
    """What `events` make and do not release, without workspaces; None where they release what is older."""
    made = {event.id for event in events if isinstance(event, Alloc)}
    released = {event.id for event in events if isinstance(event, Free)}
    if not released <= made:
        return None
    return {number for number in made - released if not tracker.origins[number].op.startswith(WORKSPACE)}


_COPIES = frozenset({"aten.clone.default", "aten.new_empty_strided.default"})
"""How autograd copies a gradient that it cannot take over.

Source: PyTorch 2.13 torch/csrc/autograd/utils/grad_layout_contract.h `clone_obey_contract`."""


def _released_last(
    tracker: Tracker, passes: list[Event], gradients: list[_Gradient], step: list[Event]
) -> list[int] | None:
    """What the passes made and is released at the very end of the step, in order; None where something else outlives
    the passes than that, the gradients and the workspaces, or something older ended in them."""
    made = {event.id for event in passes if isinstance(event, Alloc)}
    released = {event.id for event in passes if isinstance(event, Free)}
    given = {gradient.number for gradient in gradients}
    if not released <= made or not given <= made - released or len(given) < len(gradients):
        return None
    left = made - released - given
    later: list[int] = []
    for event in step:
        if isinstance(event, Free) and event.id in left:
            later.append(event.id)
        elif later:  # something follows: its place among the optimizer's events matters
            return None
    if any(not tracker.origins[number].op.startswith(WORKSPACE) for number in left.difference(later)):
        return None
    return later
