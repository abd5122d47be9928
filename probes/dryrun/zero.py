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
from functools import partial
from typing import Any

import torch

from planner.parallel.zero import zero_bucket_elements
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Free, Phase
from probes.dryrun.splice import Block, splice
from probes.dryrun.trace import STEPS, Trace, load
from probes.dryrun.tracker import Tracker
from probes.dryrun.zero_events import (
    BUCKET,
    BUCKET_COPY,
    GRADIENTS,
    MASTERS,
    NORM_BYTES,
    EventWriter,
    MicroBatches,
    cast_to_half,
    optimizer_steps,
    trained_elements,
)
from probes.stack.spread import Spread

FIRST = "first gradient"
OFFLOAD_BUFFER = "ZeRO offload buffer"
OFFLOAD_COPY = "ZeRO gradient on its way to the host"


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
        cast_to_half(model, setup)
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


class _Engine(EventWriter):
    def __init__(self, trace: Trace, block: Block | None, setup: TrainSetup) -> None:
        super().__init__(trace)
        self.setup = setup
        sizes = trained_elements(trace, block)
        if not sizes:
            raise ValueError("nothing is trained")
        self.size = 4 if setup.compute_dtype == "fp32" else 2
        self.total = sum(sizes)
        self.largest = max(sizes)
        ranks = setup.data_degree
        self.partition = -(-self.total // (2 * ranks)) * 2  # aligned to 4 bytes of 16-bit values
        inside = 0
        self.owned: list[int] = []  # elements of the parameters that rank 0's partition touches
        for one in sizes:
            if inside >= self.partition:
                break
            inside += one
            self.owned.append(one)
        self.own = sum(self.owned)
        self.inside = [*self.owned[:-1], self.partition - self.own + self.owned[-1]]  # elements of them inside it
        self.bucket_elements = zero_bucket_elements(self.total)
        self.in_bucket = 0
        self.arrived = 0
        self.large: list[int] = []
        self.offloaded = setup.offload != "none"
        self.micro = MicroBatches(trace.events)
        self.steps = iter(() if self.offloaded else optimizer_steps(setup, self.partition, count=STEPS))

    def run(self) -> Trace:
        loaded = False
        for event in self.trace.events:
            if isinstance(event, Alloc) and not loaded and event.id not in self.trace.owners:
                loaded = True
                if self.offloaded:
                    self.hold(OFFLOAD_BUFFER, self.size * self.largest, ("gradients", "offload's gradient buffer"))
                else:
                    self.hold(MASTERS, 4 * self.partition, ("optimizer", "fp32 masters"))
            if isinstance(event, Alloc) and self.trace.origins[event.id].op == FIRST:
                self.hold(BUCKET, self.size * self.bucket_elements)  # `setup_buckets`
            if isinstance(event, Phase):
                name = event.name.partition("/")[0]
                if name in ("forward", "step") and self.phase == "backward":
                    self._end_of_backward(boundary=name == "step")
                self.micro.see(event)
                self.phase = name
                self.events.append(event)
                if name == "step":
                    self._step()
                continue
            if isinstance(event, Free) and self._is_gradient(event.id) and self._arrives(event.id):
                continue
            self.events.append(event)
        return self.written()

    def _is_gradient(self, number: int) -> bool:
        return self.trace.owners.get(number, ("", ""))[0] == "gradients"

    def _arrives(self, number: int) -> bool:
        """A gradient goes into the bucket, and its own storage dies. One that is larger than the bucket is reduced by
        itself: whether it stays until then."""
        elements = self.trace.origins[number].size_bytes // self.size
        self.hold(BUCKET, self.size * self.bucket_elements)
        if self.in_bucket and self.in_bucket + elements > self.bucket_elements:
            self._reduce()
        self.in_bucket += elements
        self.arrived += elements
        if elements <= self.bucket_elements:
            return False
        self.large.append(number)
        return True

    def _reduce(self) -> None:
        """The bucket's slices are flattened into one tensor, which is reduced and copied back; then this rank's part
        goes to the gradient partition, or parameter by parameter to the host."""
        self.pass_by(BUCKET_COPY, self.size * self.in_bucket)
        owns = self.arrived > self.total - self.own if self.setup.parallel == "zero2" else True
        if owns and not self.offloaded:
            self.hold(GRADIENTS, self.size * self.own)
        elif owns and self.micro.is_last:
            self.pass_by(OFFLOAD_COPY, NORM_BYTES * max(self.inside))
            self.pass_by(OFFLOAD_COPY, 4 * max(self.inside))
        while self.large:
            self.free(self.large.pop())
        self.in_bucket = 0

    def _end_of_backward(self, *, boundary: bool) -> None:
        if self.setup.parallel == "zero1" and not boundary:
            return
        if self.in_bucket:
            self._reduce()
        self.arrived = 0
        self.drop(BUCKET)
        if self.offloaded:
            return
        if not boundary:  # the parts of this micro-batch stay until the step; the next one's are added to them
            number = self.held.pop(GRADIENTS)
            if "kept" in self.held:
                self.free(number)
            else:
                self.held["kept"] = number
        elif "kept" in self.held:
            self.drop(GRADIENTS)
            self.held[GRADIENTS] = self.held.pop("kept")

    def _step(self) -> None:
        """Norms one by one, the partition's gradients flat and then in fp32, and the optimizer on them."""
        if self.offloaded:
            return  # all of it in the host's memory; the new 16-bit weights come back into their places
        self.norms(self.inside)
        gradient = self.flat_fp32(self.partition, self.size)
        self.drop(GRADIENTS)
        self.play(next(self.steps))
        self.free(gradient)
