"""What the modelled ZeRO engines share: events put into a trace, and the real optimizer on a flat partition."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.dryrun.splice import Block
from probes.dryrun.trace import Trace, own_optimizer_state
from probes.dryrun.tracker import Origin, Tracker
from probes.stack import make_optimizer

BUCKET = "ZeRO reduce bucket"
BUCKET_COPY = "ZeRO bucket copy"
GRADIENTS = "ZeRO gradient partition"
MASTERS = "ZeRO fp32 masters"
STEP_COPIES = "ZeRO gradients of the step"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
NORM_BYTES = 8
"""Norms are taken in fp64. Source: DeepSpeed 0.19.8 runtime/zero/utils.py `get_norm_dtype`."""


def cast_to_half(model: Any, setup: TrainSetup) -> None:
    """Every floating parameter in 16 bit, in place (DeepSpeed `_configure_distributed_model`)."""
    half = HALF.get(setup.compute_dtype)
    for parameter in model.parameters():
        if half is not None and parameter.is_floating_point() and parameter.dtype is not half:
            parameter.data = parameter.data.to(half)


class MicroBatches:
    """Which micro-batch of a step the events are in."""

    def __init__(self, events: list[Event]) -> None:
        phases = [event.name for event in events if isinstance(event, Phase)]
        self._in_step = phases[: phases.index("step")].count("forward")
        self.number = 0

    def see(self, event: Phase) -> None:
        """A phase begins."""
        if event.name == "forward":
            self.number += 1
        elif event.name == "step":
            self.number = 0

    @property
    def is_last(self) -> bool:
        """Whether gradients go to the optimizer after it."""
        return self.number == self._in_step


class EventWriter:
    """A trace's events, written anew with the engine's own among them."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events: list[Event] = []
        self.origins: dict[int, Origin] = dict(trace.origins)
        self.owners = dict(trace.owners)
        self.phase = "load"
        self.held: dict[str, int] = {}
        self._numbers: dict[int, int] = {}

    def written(self) -> Trace:
        """The trace with everything that was put in."""
        return replace(self.trace, events=self.events, origins=self.origins, owners=self.owners)

    def allocate(self, label: str, size_bytes: int, owner: tuple[str, str] | None = None) -> int:
        """An allocation; returns its number."""
        number = len(self.origins)
        self.origins[number] = Origin(self.phase, None, label, size_bytes, len(self.events))
        if owner is not None:
            self.owners[number] = owner
        self.events.append(Alloc(number, size_bytes))
        return number

    def free(self, number: int) -> None:
        """Its end."""
        self.events.append(Free(number))

    def pass_by(self, label: str, size_bytes: int) -> None:
        """An allocation that is gone at once."""
        self.free(self.allocate(label, size_bytes))

    def hold(self, label: str, size_bytes: int, owner: tuple[str, str] | None = None) -> None:
        """An allocation known by its label, once."""
        if label not in self.held:
            self.held[label] = self.allocate(label, size_bytes, owner)

    def drop(self, label: str) -> None:
        """Its end, where it is held."""
        number = self.held.pop(label, None)
        if number is not None:
            self.free(number)

    def norms(self, elements: Iterable[int]) -> None:
        """The norms of gradients of so many elements, each from an fp64 copy; they are summed up at the end."""
        scalars = []
        for num in elements:
            self.pass_by(STEP_COPIES, NORM_BYTES * num)
            scalars.append(self.allocate(STEP_COPIES, NORM_BYTES))
        for number in scalars:
            self.free(number)

    def flat_fp32(self, elements: int, size: int) -> int:
        """The flat gradients of a partition become the fp32 gradient that the optimizer is given; its number."""
        flat = self.allocate(STEP_COPIES, size * elements)
        if size == 4:
            return flat
        gradient = self.allocate(STEP_COPIES, 4 * elements)
        self.free(flat)
        return gradient

    def play(self, run: "OptimizerStep") -> None:
        """One optimizer step's events."""
        for event in run.events:
            if isinstance(event, Alloc):
                label = run.origins[event.id].op
                self._numbers[event.id] = self.allocate(label, event.size_bytes, run.owners.get(event.id))
            elif isinstance(event, Free) and event.id in self._numbers:
                self.free(self._numbers.pop(event.id))


def trained_elements(trace: Trace, block: Block | None) -> list[int]:
    """Elements of every trained parameter of the full model, in the model's order."""
    found: list[int] = []
    pending: list[int] = []
    for one in trace.trainables:
        if block is not None and one.layer is not None and block.start <= one.layer < block.end:
            pending.append(one.shape.numel())
            continue
        if pending and block is not None:
            found += pending * (block.copies + 1)
            pending = []
        found.append(one.shape.numel())
    if pending and block is not None:
        found += pending * (block.copies + 1)
    return found


class OptimizerStep:
    """Events of one optimizer step on the flat partition."""

    def __init__(self, events: list[Event], origins: dict[int, Origin], owners: dict[int, tuple[str, str]]) -> None:
        self.events, self.origins, self.owners = events, origins, owners


def optimizer_steps(setup: TrainSetup, elements: int, *, count: int) -> list[OptimizerStep]:
    """The real optimizer on one flat fp32 parameter of `elements`, on meta."""
    from probes.stack.step import multi_tensor_on_meta

    parameter = torch.nn.Parameter(torch.empty(elements, dtype=torch.float32, device="meta"))
    optimizer: Any = make_optimizer(setup.optimizer, [parameter], device_type="meta")
    tracker = Tracker("meta")
    tracker.seen(parameter)
    owners: dict[int, tuple[str, str]] = {}
    found = []
    for _ in range(count):
        parameter.grad = torch.empty_like(parameter)
        tracker.seen(parameter.grad)
        tracker.mark("step", None)
        first = len(tracker.events)
        with tracker, multi_tensor_on_meta():
            optimizer.step()
        own_optimizer_state(tracker, optimizer, owners)
        found.append(OptimizerStep(tracker.events[first:], tracker.origins, owners))
        parameter.grad = None
    tracker.close()
    return found
