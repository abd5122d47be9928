"""ZeRO-3's memory put into the events of a full model's step: partitions, gathers, the reduce bucket and the step.

Source: DeepSpeed 0.19.8 runtime/zero/stage3.py, partition_parameters.py.
"""

from collections import Counter
from dataclasses import replace

import torch

from planner.parallel.zero import (
    NORM_CHUNK_ELEMENTS,
    ZERO3_LIVE_ELEMENTS,
    ZERO3_PREFETCH_ELEMENTS,
    ZERO3_REUSE_ELEMENTS,
    ZERO3_SUB_GROUP_ELEMENTS,
    zero_bucket_elements,
)
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, EmptyCache, Phase
from probes.dryrun.splice import Block
from probes.dryrun.trace import STEPS, Trace
from probes.dryrun.zero3_hooks import MARK
from probes.dryrun.zero3_modules import Modules, Parameter, deeper
from probes.dryrun.zero_events import (
    BUCKET,
    GRADIENTS,
    NORM_BYTES,
    EventWriter,
    MicroBatches,
    OptimizerStep,
    optimizer_steps,
)
from probes.dryrun.zero_gather import Limits

GATHERED, GATHERING, SCATTERING = "gathered weights", "all-gather buffer", "reduce-scatter buffer"
ON_ITS_WAY = "ZeRO gradient on its way to the host"
LIMITS = Limits(prefetch=ZERO3_PREFETCH_ELEMENTS, reuse=ZERO3_REUSE_ELEMENTS, live=ZERO3_LIVE_ELEMENTS)
_TRAINED = "trained"


class Engine(EventWriter):
    """Implements `probes.dryrun.zero_gather.Store` with the full model's bytes."""

    def __init__(self, trace: Trace, block: Block | None, setup: TrainSetup, found: Modules) -> None:
        super().__init__(trace)
        self.block, self.setup = block, setup
        full = found.repeated(trace, block)
        self.parameters = full.parameters
        self.ranks = setup.shards
        self.trained = [one for one in full.parameters.values() if one.trained]
        if not self.trained:
            raise ValueError("nothing is trained")
        self.size = 4 if setup.compute_dtype == "fp32" else 2
        self.own = sum(self._part(one) for one in self.trained)
        self.groups = self._sub_groups()
        self.bucket_elements = zero_bucket_elements(sum(one.num for one in self.trained))
        self.offloaded = setup.offload != "none"
        self.micro = MicroBatches(trace.events)
        self.coordinator = full.coordinator(self, LIMITS)
        self.gathered: dict[str, int] = {}  # the storage that a weight is whole in
        self.leaving: set[int] = set()  # released, but a view of it is still kept
        self.views: Counter[int] = Counter()
        self.uses: dict[int, int] = {}
        self.notes: set[int] = set()
        self.bucket: list[Parameter] = []
        self.in_bucket = 0
        self.large: list[int] = []
        self.steps: list[list[OptimizerStep]] = []
        if not self.offloaded:
            by_size = {num: optimizer_steps(setup, num, count=STEPS) for num in set(self.groups)}
            self.steps = [[by_size[num][step] for num in self.groups] for step in range(STEPS)]

    def run(self) -> Trace:
        loaded = False
        for event in self.trace.events:
            if isinstance(event, Phase):
                self._phase(event)
                continue
            if isinstance(event, EmptyCache):
                self.events.append(event)
                continue
            origin = self.trace.origins[event.id]
            if isinstance(event, Alloc):
                if not loaded and event.id not in self.trace.owners:
                    loaded = True
                    self._load()
                if origin.op.startswith(MARK):
                    self._noted(event.id, origin.op, origin.layer)
                    continue
            elif event.id in self.notes:
                continue
            elif event.id in self.uses:
                self._view_dies(self.uses.pop(event.id))
                continue
            else:
                owner = self.trace.owners.get(event.id, ("", ""))
                if owner[0] == "gradients" and self._arrives(event.id, self._by_run_name(owner[1])):
                    continue
            self.events.append(event)
        done = self.written()
        parameter_bytes = sum(
            self.origins[number].size_bytes
            for number, (category, name) in self.owners.items()
            if category in ("weights", "adapters") and (name in self.trace.parameter_names or name == _TRAINED)
        )
        return replace(done, parameter_bytes=parameter_bytes)

    # Sizes

    def _part(self, one: Parameter) -> int:
        return -(-one.num // self.ranks)

    def _whole_bytes(self, one: Parameter) -> int:
        return int(self._part(one) * self.ranks * one.dtype.itemsize)

    def _on_host(self, one: Parameter) -> bool:
        return self.setup.offload == "parameters" and (one.trained or not one.weight().persistent)

    def _sub_groups(self) -> list[int]:
        """Elements of every sub-group of the step: parameters one after another until a group is full."""
        groups, inside = [], 0
        for index, one in enumerate(self.trained):
            inside += self._part(one)
            if index == len(self.trained) - 1 or (
                self.own > ZERO3_SUB_GROUP_ELEMENTS and inside >= ZERO3_SUB_GROUP_ELEMENTS
            ):
                groups.append(inside)
                inside = 0
        return groups

    def _by_run_name(self, name: str) -> Parameter:
        """A parameter of the run by its name there: all its copies are alike."""
        if self.block is not None:
            (shift, *_) = self.block.shifts(self.trace.layer_of(name))
            name = deeper(self.trace, name, shift)
        return self.parameters[name]

    # The engine's buffers

    def _load(self) -> None:
        category = "weights" if self.setup.method == "full" else "adapters"
        if self.setup.offload != "parameters":
            self.hold(_TRAINED, self.size * self.own, (category, _TRAINED))
        if not self.offloaded:
            if self.size != 4:
                for index, num in enumerate(self.groups):
                    self.hold(f"masters {index}", 4 * num, ("optimizer", "fp32 masters"))
            self.pass_by("load", 4 * max(self.groups))  # `initialize_optimizer_states`
        self.hold(BUCKET, self.size * self.bucket_elements)
        if not self.offloaded:
            self.hold(GRADIENTS, self.size * self.own)

    def _phase(self, event: Phase) -> None:
        name = event.name.partition("/")[0]
        self.micro.see(event)
        self.phase = name
        self.events.append(event)
        if name == "step":
            self._step()

    def _arrives(self, number: int, one: Parameter) -> bool:
        """A gradient goes into the bucket, and its own storage dies. One that is larger than the bucket is reduced by
        itself: whether it stays until then."""
        if self.bucket and self.in_bucket + one.num > self.bucket_elements:
            self._reduce()
        self.bucket.append(one)
        self.in_bucket += one.num
        if one.num <= self.bucket_elements:
            return False
        self.large.append(number)
        return True

    def _reduce(self) -> None:
        """The ranks' parts of the gradients are laid side by side in a new tensor, which is reduced and cut; this
        rank's parts go to their places. A single gradient that needs no padding is reduced where it is."""
        copy = None
        if len(self.bucket) > 1 or (self.bucket and self.bucket[0].num % self.ranks):
            copy = self.allocate(SCATTERING, self.size * sum(self._part(one) * self.ranks for one in self.bucket))
        if self.offloaded:
            for one in self.bucket:
                here = self.allocate(ON_ITS_WAY, self.size * self._part(one))
                if self.micro.is_last:
                    self.pass_by(ON_ITS_WAY, NORM_BYTES * min(NORM_CHUNK_ELEMENTS, self._part(one)))
                    self.pass_by(ON_ITS_WAY, 4 * self._part(one))
                self.free(here)
        if copy is not None:
            self.free(copy)
        while self.large:
            self.free(self.large.pop())
        self.bucket.clear()
        self.in_bucket = 0

    def _step(self) -> None:
        """Everything in parts again; the norms one by one; the sub-groups one after another; and the weights that stay
        gathered are."""
        self.coordinator.release_all()
        if not self.offloaded:
            self.norms([self._part(one) for one in self.trained])
            for num, run in zip(self.groups, self.steps.pop(0), strict=True):
                gradient = self.flat_fp32(num, self.size)
                self.play(run)
                self.free(gradient)
        self.coordinator.hold(name for name, one in self.coordinator.weights.items() if one.persistent)

    # Notes of the hooks

    def _noted(self, number: int, op: str, layer: int | None) -> None:
        _, kind, run_layer, name, other = op.split("|")
        name, other = (self._full_name(one, run_layer, layer) for one in (name, other))
        if kind == "use":
            storage = self.gathered[name]
            self.uses[number] = storage
            self.views[storage] += 1
            return
        self.notes.add(number)
        coordinator = self.coordinator
        if kind == "start":
            coordinator.start()
        elif kind == "end":
            coordinator.end_backward()
            if self.bucket:
                self._reduce()
        elif kind == "adopt":
            coordinator.adopt(name, other)
        elif kind.startswith("release"):
            coordinator.release(name, forward=kind == "release")
        else:
            coordinator.fetch(name, forward=kind != "fetch-back", recomputed=kind == "recompute")

    def _full_name(self, name: str, run_layer: str, layer: int | None) -> str:
        """A name of the run, noted in a segment of the run's layer `run_layer` that stands for `layer`, in the full
        model."""
        own = self.trace.layer_of(name)
        if own is None or self.block is None:
            return name
        if layer is None:
            (shift,) = self.block.shifts(
                own
            )  # outside the layers' segments only the first and the last layers are told
        else:
            shift = layer - int(run_layer)
        return deeper(self.trace, name, shift)

    def _view_dies(self, storage: int) -> None:
        self.views[storage] -= 1
        if not self.views[storage] and storage in self.leaving:
            self.leaving.discard(storage)
            self.free(storage)

    # What a gather allocates

    def begin(self, names: list[str]) -> list[int]:
        parameters = [self.parameters[name] for name in names]
        if len(names) == 1:
            (one,) = parameters
            self.gathered[names[0]] = self.allocate(GATHERED, self._whole_bytes(one))
            return [self.allocate(GATHERING, self._part(one) * one.dtype.itemsize)] if self._on_host(one) else []
        buffers: dict[torch.dtype, int] = Counter()
        for one in parameters:
            buffers[one.dtype] += self._whole_bytes(one)
        token = []
        for dtype, size_bytes in buffers.items():
            token.append(self.allocate(GATHERING, size_bytes))
            copies = [
                self.allocate(GATHERING, self._part(one) * dtype.itemsize)
                for one in parameters
                if one.dtype is dtype and self._on_host(one)
            ]
            for copy in copies:
                self.free(copy)
        return token

    def finish(self, names: list[str], token: list[int]) -> None:
        if len(names) == 1:
            self.done(token)
            return
        for name in names:
            one = self.parameters[name]
            self.gathered[name] = self.allocate(GATHERED, one.num * one.dtype.itemsize)

    def done(self, token: list[int]) -> None:
        while token:
            self.free(token.pop())

    def release(self, name: str) -> None:
        storage = self.gathered.pop(name)
        if self.views[storage]:
            self.leaving.add(storage)
        else:
            self.free(storage)
