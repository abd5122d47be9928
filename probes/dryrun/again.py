"""A second training step from the first one's events.

What the optimizer keeps is no part of a forward or a backward, so where the first step leaves nothing behind but those
states (and cuBLAS's workspaces, which are made once), the second allocates and releases what the first did. Its events
are copied; the optimizer then runs for real on gradients that lie in memory as the first step's did.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from probes.allocator.events import Alloc, Event, Free
from probes.dryrun.kernels import KernelLog
from probes.dryrun.tracker import WORKSPACE, Tracker
from probes.stack.step import Mark, Trainer, optimizer_phase


class _Gradient(NamedTuple):
    """What the optimizer was given for a parameter, and how it lies in its storage (`number`)."""

    parameter: torch.nn.Parameter
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int


class Again:
    """The last step once more, where it would be the same; made as a step begins."""

    def __init__(self, tracker: Tracker, model: Any, log: KernelLog) -> None:
        self._tracker, self._log = tracker, log
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._first = len(tracker.events)
        self._passes: list[Event] | None = None  # forwards and backwards
        self._gradients: list[_Gradient] = []
        self._kernels: Counter[str] = Counter()

    def watching(self, mark: Mark) -> Mark:
        """`mark`, which also notes what the first step has done as its optimizer's phase begins."""

        def noted(phase: str, layer: int | None) -> None:
            if phase == "step" and self._passes is None:
                self._passes = self._tracker.events[self._first :]
                self._gradients = [*self._given()]
                self._kernels = Counter(self._log.chosen)
            mark(phase, layer)

        return noted

    def step(self, trainer: Trainer, mark: Mark) -> bool:
        """Whether the step could be made of the first one's events; if so it is done."""
        if self._passes is None:
            return False
        step = self._tracker.events[self._first + len(self._passes) :]
        later = _released_last(self._tracker, self._passes, self._gradients, step)
        copies = None if later is None else self._copied(self._passes)
        if later is None or copies is None:
            return False
        self._log.chosen.update(self._kernels)
        mark("step", None)
        clips = trainer.setup.by.clips_gradients
        optimizer_phase(trainer.model, trainer.optimizer, trainer.scaler, "meta", clips=clips)
        for number in later:
            self._tracker.release(copies[number])
        return True

    def _given(self) -> Any:
        for one in self._parameters:
            grad = one.grad
            number = None if grad is None else self._tracker.identity(grad)
            if number is not None:
                held = grad.untyped_storage().nbytes()
                yield _Gradient(one, number, grad.size(), grad.stride(), grad.dtype, held)

    def _copied(self, passes: list[Event]) -> dict[int, int] | None:
        """The passes' events again and new gradients; None (and nothing done) where one cannot lie as it did."""
        fresh: dict[int, torch.Tensor] = {}
        with _disable_current_modes():
            for one in self._gradients:
                tensor = torch.empty_strided(one.size, one.stride, dtype=one.dtype, device="meta")
                if tensor.untyped_storage().nbytes() != one.storage_bytes:
                    return None
                fresh[one.number] = tensor
        copies = self._tracker.copy(passes)
        for one in self._gradients:
            self._tracker.adopt(fresh[one.number], copies[one.number])
            one.parameter.grad = fresh[one.number]
        return copies


def _released_last(
    tracker: Tracker, passes: list[Event], gradients: list[_Gradient], step: list[Event]
) -> list[int] | None:
    """What the passes made and is released at the very end of the step, in order; None where something else outlives
    the passes than that, the gradients and the workspaces, or something older ended in them."""
    made = {event.id for event in passes if isinstance(event, Alloc)}
    released = {event.id for event in passes if isinstance(event, Free)}
    given = {one.number for one in gradients}
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
