"""A rank of a DeepSpeed ZeRO-1 or ZeRO-2 job: the real step on meta tensors, with the engine's buffers modelled.

DeepSpeed's engine runs on no meta tensors. Forward, backward and the optimizer on the rank's flat fp32 partition are
the real ones; what the engine does in between (bucket, copies, partitions) is written down here after its source and
put into the events at the places where gradients arrive. Four tiny cases of the engine itself on two CPU ranks agree
(benchmarks/zero_dry_run_check.py).

Source: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py (`setup_buckets`, `reduce_independent_p_g_buckets_and_remove_
grads`, `average_tensor`, `allreduce_bucket`, `copy_grads_in_partition`, `independent_gradient_partition_epilogue`,
`step`), with the settings that the launch files write: contiguous gradients, no overlap of communication, a bucket no
larger than what is trained.

Left out: the second copy of the trained weights while they are flattened at the start (done on the CPU where it does
not fit); the Trainer's second parameter group (norms and biases), whose partition is a few kilobytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from planner.parallel.zero import zero_bucket_elements
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.dryrun.splice import Block, splice
from probes.dryrun.trace import Trace, load, own_optimizer_state
from probes.dryrun.tracker import Origin, Tracker
from probes.stack import make_optimizer
from probes.stack.spread import Spread

FIRST = "first gradient"
BUCKET = "ZeRO reduce bucket"
BUCKET_COPY = "ZeRO bucket copy"
GRADIENTS = "ZeRO gradient partition"
MASTERS = "ZeRO fp32 masters"
STEP_COPIES = "ZeRO gradients of the step"
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ZeroWorld:
    """A job of ZeRO-1 or ZeRO-2 ranks."""

    tracker = Tracker

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup

    @contextmanager
    def prepared(
        self, tracker: Tracker, model: Any, setup: TrainSetup
    ) -> Iterator[tuple[Spread, dict[int, tuple[str, str]]]]:
        """See `probes.dryrun.trace.World`. Every floating parameter is cast to 16 bit (`_configure_distributed_model`).
        Gradients are dropped where the engine has taken them over: as they arrive (stage 2), or before the step."""
        half = _HALF.get(setup.compute_dtype)
        for parameter in model.parameters():
            if half is not None and parameter.is_floating_point() and parameter.dtype is not half:
                parameter.data = parameter.data.to(half)
        owners = load(tracker, model)
        trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]

        waiting = True

        def take(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                number = tracker.identity(parameter.grad)
                if number is not None:
                    owners[number] = ("gradients", name)
                parameter.grad = None

        def take_all() -> None:
            nonlocal waiting
            waiting = True
            for name, one in trained:
                take(name, one)

        def arrives(name: str, parameter: torch.Tensor) -> None:
            nonlocal waiting
            if waiting:
                waiting = False
                tracker.release(tracker.allocate(0, FIRST))
            if setup.parallel == "zero2":
                take(name, parameter)

        hooks = [one.register_post_accumulate_grad_hook(partial(arrives, name)) for name, one in trained]
        try:
            yield Spread(module=model, autocast=False, before_step=take_all), owners
        finally:
            for hook in hooks:
                hook.remove()

    def splice(self, trace: Trace, block: Block, setup: TrainSetup) -> Trace:
        """See `probes.dryrun.trace.World`."""
        return splice(trace, block, setup)

    def finish(self, trace: Trace, block: Block | None) -> Trace:
        """The full model's trace with the engine's allocations."""
        return _Engine(trace, block, self._setup).run()


class _Engine:
    def __init__(self, trace: Trace, block: Block | None, setup: TrainSetup) -> None:
        self.trace, self.setup = trace, setup
        sizes = _trained_elements(trace, block)
        self.size = 4 if setup.compute_dtype == "fp32" else 2
        self.total = sum(sizes)
        ranks = setup.data_degree
        self.partition = -(-self.total // (2 * ranks)) * 2  # aligned to 4 bytes of 16-bit values
        inside = 0
        self.own, self.own_largest = 0, 0  # elements of the parameters that rank 0's partition touches
        for one in sizes:
            if inside >= self.partition:
                break
            inside += one
            self.own += one
            self.own_largest = max(self.own_largest, min(one, self.partition))
        self.bucket_elements = zero_bucket_elements(self.total)
        self.events: list[Event] = []
        self.origins: dict[int, Origin] = dict(trace.origins)
        self.owners = dict(trace.owners)
        self.phase = "load"
        self.in_bucket = 0
        self.arrived = 0
        self.held: dict[str, int] = {}
        self.large: list[int] = []
        self.steps = iter(_optimizer_steps(setup, self.partition, count=2))
        self.numbers: dict[int, int] = {}

    def run(self) -> Trace:
        self._check()
        loaded = False
        for event in self.trace.events:
            if isinstance(event, Alloc) and not loaded and event.id not in self.trace.owners:
                loaded = True
                self._hold(MASTERS, 4 * self.partition, ("optimizer", "fp32 masters"))
            if isinstance(event, Alloc) and self.trace.origins[event.id].op == FIRST:
                self._hold(BUCKET, self.size * self.bucket_elements)  # `setup_buckets`
            if isinstance(event, Phase):
                name = event.name.partition("/")[0]
                if name in ("forward", "step") and self.phase == "backward":
                    self._end_of_backward(boundary=name == "step")
                self.phase = name
                self.events.append(event)
                if name == "step":
                    self._step()
                continue
            if isinstance(event, Free) and self._is_gradient(event.id):
                self._arrives(self.trace.origins[event.id].size_bytes // self.size)
            self.events.append(event)
        return replace(self.trace, events=self.events, origins=self.origins, owners=self.owners)

    def _check(self) -> None:
        if not self.total:
            raise ValueError("nothing is trained")

    # Allocations

    def _allocate(self, label: str, size_bytes: int, owner: tuple[str, str] | None = None) -> int:
        number = len(self.origins)
        self.origins[number] = Origin(self.phase, None, label, size_bytes, len(self.events))
        if owner is not None:
            self.owners[number] = owner
        self.events.append(Alloc(number, size_bytes))
        return number

    def _hold(self, label: str, size_bytes: int, owner: tuple[str, str] | None = None) -> None:
        if label not in self.held:
            self.held[label] = self._allocate(label, size_bytes, owner)

    def _drop(self, label: str) -> None:
        number = self.held.pop(label, None)
        if number is not None:
            self.events.append(Free(number))

    # The engine

    def _is_gradient(self, number: int) -> bool:
        return self.trace.owners.get(number, ("", ""))[0] == "gradients"

    def _arrives(self, elements: int) -> None:
        """A gradient goes into the bucket; its own storage dies with the event that follows."""
        self._hold(BUCKET, self.size * self.bucket_elements)
        if self.in_bucket and self.in_bucket + elements > self.bucket_elements:
            self._reduce()
        if elements > self.bucket_elements:  # reduced by itself, and kept until then
            self.large.append(self._allocate("ZeRO large gradient", self.size * elements))
        self.in_bucket += elements
        self.arrived += elements

    def _reduce(self) -> None:
        """The bucket's slices are flattened into one tensor, which is reduced and copied back; then this rank's part
        goes to the gradient partition."""
        copy = self._allocate(BUCKET_COPY, self.size * self.in_bucket)
        self.events.append(Free(copy))
        owns = self.arrived > self.total - self.own if self.setup.parallel == "zero2" else True
        if owns:
            self._hold(GRADIENTS, self.size * self.own)
        while self.large:
            self.events.append(Free(self.large.pop()))
        self.in_bucket = 0

    def _end_of_backward(self, *, boundary: bool) -> None:
        if self.setup.parallel == "zero1" and not boundary:
            return
        if self.in_bucket:
            self._reduce()
        self.arrived = 0
        self._drop(BUCKET)
        if not boundary:  # the parts of this micro-batch stay until the step; the next one's are added to them
            number = self.held.pop(GRADIENTS)
            if "kept" in self.held:
                self.events.append(Free(number))
            else:
                self.held["kept"] = number
        elif "kept" in self.held:
            self._drop(GRADIENTS)
            self.held[GRADIENTS] = self.held.pop("kept")

    def _step(self) -> None:
        """Norms one by one, the partition's gradients flat and then in fp32, and the optimizer on them."""
        norm = self._allocate(STEP_COPIES, 4 * self.own_largest)
        self.events.append(Free(norm))
        flat = self._allocate(STEP_COPIES, self.size * self.partition)
        gradient = flat
        if self.size != 4:
            gradient = self._allocate(STEP_COPIES, 4 * self.partition)
            self.events.append(Free(flat))
        self._drop(GRADIENTS)
        run = next(self.steps)
        for event in run.events:
            if isinstance(event, Alloc):
                label = run.origins[event.id].op
                self.numbers[event.id] = self._allocate(label, event.size_bytes, run.owners.get(event.id))
            elif isinstance(event, Free) and event.id in self.numbers:
                self.events.append(Free(self.numbers.pop(event.id)))
        self.events.append(Free(gradient))


def _trained_elements(trace: Trace, block: Block | None) -> list[int]:
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


class _Step:
    """Events of one optimizer step on the flat partition."""

    def __init__(self, events: list[Event], origins: dict[int, Origin], owners: dict[int, tuple[str, str]]) -> None:
        self.events, self.origins, self.owners = events, origins, owners


def _optimizer_steps(setup: TrainSetup, elements: int, *, count: int) -> list[_Step]:
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
        found.append(_Step(tracker.events[first:], tracker.origins, owners))
        parameter.grad = None
    tracker.close()
    return found
