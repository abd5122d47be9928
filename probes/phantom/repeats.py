"""Micro-batches that repeat the one before: transformers' Trainer runs their forward and backward once.

Gradient accumulation runs the same program on one batch after another. Where two micro-batches of a step asked for
the same memory in the same order and kept nothing but their loss, another one with like inputs does so again. It is
not run: its large blocks would lie where those of the one before lay, and its small ones, whose places wander, are
asked of the allocator again. The first two of a step, the last one (gradients are synchronised, the optimizer steps)
and every one with other shapes, masks, positions or places without a label are run.

Source: transformers 5.23 trainer.py `Trainer.training_step`, which the trainers of TRL, Axolotl and LLaMA-Factory call.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import torch

from probes.allocator.blocks import SMALL_BYTES
from probes.allocator.events import Alloc, Event, Free
from probes.phantom.claims import truly_meta
from probes.phantom.imports import Patch
from probes.phantom.mode import Phantom

Requests = tuple[tuple[int, int], ...]
"""(which allocation, its bytes) and, given back, (its complement, 0), in order; the first allocation is number 0."""
_TOKENS = ("input_ids", "labels")
_NO_LABEL = -100


class _Repeats(BaseException):
    """The rest of this micro-batch is known. No `Exception`: nobody between here and there catches it."""


@dataclass
class _MicroBatch:
    """One that is run, from its inputs on the card to its return.

    Attributes:
        before: what was allocated before it, and where in the large pool.
        first_event, first_allocation: numbers of the next ones then.
        requests: what it asked for and gave back; None until then, and where it kept or freed other memory.
        loss: shape and type of what it returned, and which of its allocations holds that.
    """

    inputs: tuple[Any, ...]
    before: Any
    first_event: int
    first_allocation: int
    requests: Requests | None = None
    loss: tuple[Any, torch.dtype, int] | None = None

    def returned(self, phantom: Phantom, loss: torch.Tensor) -> None:
        number = phantom.number_of(loss)
        if number is not None:
            loss_allocation = number - self.first_allocation
            self.requests = _requests(phantom.memory.events[self.first_event :], self.first_allocation, loss_allocation)
            self.loss = loss.shape, loss.dtype, loss_allocation

    def replay(self, phantom: Phantom) -> torch.Tensor:
        """Its requests of small blocks once more, and a loss like its own."""
        assert self.requests is not None
        assert self.loss is not None
        shape, dtype, loss_allocation = self.loss
        blocks: dict[int, tuple[Any, int]] = {}
        loss = None
        for number, size in self.requests:
            if number == loss_allocation:
                loss = phantom.made(shape, dtype)
            elif 0 < size <= SMALL_BYTES:
                blocks[number] = phantom.memory.malloc(size, "small blocks of a micro-batch"), size
            elif ~number in blocks:
                phantom.memory.allocator.free(*blocks.pop(~number))
        assert loss is not None
        return loss


def _requests(events: list[Event], first: int, loss_allocation: int) -> Requests | None:
    """What a micro-batch asked for, None where it touched older memory or kept more than `loss_allocation`."""
    requests: list[tuple[int, int]] = []
    alive: set[int] = set()
    for event in events:
        if isinstance(event, Alloc):
            alive.add(event.id - first)
            requests.append((event.id - first, event.size_bytes))
        elif isinstance(event, Free) and event.id >= first:
            alive.remove(event.id - first)
            requests.append((~(event.id - first), 0))
        else:
            return None
    return tuple(requests) if alive == {loss_allocation} else None


def _begun(phantom: Phantom, ran: list[_MicroBatch], inputs: Any) -> _MicroBatch:
    """Another micro-batch after the last two that were run of its step.

    Raises:
        _Repeats: it would do what the one before did.
    """
    allocator, events = phantom.memory.allocator, phantom.memory.events
    now = _MicroBatch(
        tuple(_likeness(phantom, "", inputs)),
        (allocator.allocated_bytes, allocator.large.layout()),
        len(events),
        phantom.memory.num_allocations,
    )
    if len(ran) == 2:
        first, second = ran
        same = second.requests is not None and first.requests == second.requests
        if same and first.inputs == second.inputs == now.inputs and second.before == now.before:
            raise _Repeats
    return now


def _likeness(phantom: Phantom, name: str, value: Any) -> Iterator[Any]:
    """What of a trainer's inputs can decide what memory is asked for: shapes, and values but for tokens themselves."""
    if isinstance(value, torch.Tensor):
        yield name, value.dtype, tuple(value.shape), value.stride()
        values = phantom.values.real(value) if truly_meta(value) else value
        if values is not None and not values.dtype.is_floating_point:
            yield hash((values == _NO_LABEL if name.endswith(_TOKENS) else values).contiguous().numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _likeness(phantom, str(key), entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _likeness(phantom, name, entry)
    else:
        yield name, value if isinstance(value, (str, int, float, bool, type(None))) else object()


def repeated_once(phantom: Phantom, trainer: Any, patch: Patch) -> None:
    true = trainer.Trainer.training_step
    ran: list[_MicroBatch] = []

    @wraps(true)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        phantom.num_micro_batches += 1
        phantom.issued.micro_batch_begins()
        phantom.issued.trainer("micro-batch", self.model)
        if self.accelerator.sync_gradients or phantom.options.every_micro_batch:
            ran.clear()
            step_loss = true(self, *args, **kwargs)
            phantom.issued.micro_batch_ends()
            phantom.issued.trainer("step", self.model)
            return step_loss
        prepare = self._prepare_inputs

        def prepared(inputs: Any) -> Any:
            batch = prepare(inputs)
            ran[:] = [*ran[-1:], _begun(phantom, ran, batch)]
            return batch

        try:
            with mock.patch.object(self, "_prepare_inputs", prepared):
                loss = true(self, *args, **kwargs)
        except _Repeats:
            phantom.issued.micro_batch_repeats()
            phantom.num_repeated += 1
            return ran[-1].replay(phantom)
        phantom.issued.micro_batch_ends()
        ran[-1].returned(phantom, loss)
        return loss

    patch(trainer.Trainer, "training_step", training_step)
