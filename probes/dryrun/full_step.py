"""The optimizer's step on the full model's trained parameters, of which a run has some layers only."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from planner.core.records import dataclass
from planner.setup import TrainSetup
from probes.allocator.events import Event
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.metaops import quick_checks
from probes.dryrun.trace import Trace, Trainable, own_optimizer_state
from probes.dryrun.tracker import Origin, Tracker
from probes.dryrun.workspaces import temporaries
from probes.stack.optimizers import make_optimizer
from probes.stack.step import make_scaler, optimizer_phase


class Shards(Protocol):
    """What a rank of several GPUs holds of a parameter, and how it steps."""

    tracker: type[Tracker]

    def stepping(self) -> AbstractContextManager[Any]:
        """Entered around the optimizer's run on the full model's parameters."""

    def parameter(self, one: Trainable) -> torch.nn.Parameter:
        """This rank's part of the parameter, on meta."""


class Whole:
    """One GPU holds everything."""

    tracker = Tracker

    def stepping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def parameter(self, one: Trainable) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"))


@dataclass(kw_only=True)
class StepEvents:
    """What one optimizer step does; `gradients` names the parameter and layer of each gradient's storage."""

    events: list[Event]
    origins: dict[int, Origin]
    owners: dict[int, tuple[str, str]]
    gradients: dict[int, tuple[str, int | None]]
    numbers: dict[int, int]


class OptimizerRun:
    """Clipping, optimizer and release of gradients on the full model's trained parameters."""

    def __init__(self, trace: Trace, layers: LayerMap, setup: TrainSetup, shards: Shards) -> None:
        self.setup = setup
        self.shards = shards
        self.operators, self.layers = trace.operators, layers
        self.parameters = [
            (one.name, layer, one, shards.parameter(one))
            for one, layer in layers.unrolled(trace.trainables, lambda one: one.layer)
        ]

    def _gradients(self) -> dict[tuple[str, int | None], torch.Tensor]:
        """Gives every parameter its gradient; one tensor for each storage, by the name that the run knows it by."""
        members: dict[tuple[str, int | None], list[torch.nn.Parameter]] = {}
        found = {}
        for _, layer, trainable, parameter in self.parameters:
            if trainable.has_gradient and trainable.gradient is None:
                members.setdefault((trainable.gradient_of, layer), []).append(parameter)
            elif trainable.gradient is not None:
                found[trainable.gradient_of, layer] = _laid_out_otherwise(trainable, parameter)
        for key, parameters in members.items():
            flat = torch.empty(sum(one.numel() for one in parameters), dtype=parameters[0].dtype, device="meta")
            offset = 0
            for one in parameters:
                one.grad = flat[offset : offset + one.numel()].view(one.shape)
                offset += one.numel()
            found[key] = flat
        return found

    def steps(self, count: int) -> list[StepEvents]:
        """Events of each of `count` optimizer steps; numbers are shared between the steps."""
        holder = torch.nn.Module()
        holder.list = torch.nn.ParameterList([one[-1] for one in self.parameters])
        wide = [parameter for _, _, one, parameter in self.parameters if one.wide]
        optimizer: Any = make_optimizer(self.setup.optimizer, holder.parameters(), wide=wide)
        scaler = make_scaler(self.setup, "meta")
        tracker = self.shards.tracker("meta", temporaries=temporaries())
        found: list[StepEvents] = []
        numbers: dict[int, int] = {}
        owners: dict[int, tuple[str, str]] = {}
        for parameter in holder.parameters():
            tracker.track(parameter, "load")
        for _ in range(count):
            gradients = {tracker.seen(storage): key for key, storage in self._gradients().items()}
            tracker.mark("step", None)
            first = len(tracker.events)
            tracker.log = self.operators if self.operators is not None and len(found) == count - 1 else None
            if tracker.log is not None:
                tracker.log.begin_full_step(self.layers)
            with self.shards.stepping(), quick_checks(), tracker:
                optimizer_phase(holder, optimizer, scaler, "meta", clips=self.setup.trainer.clips_gradients)
            own_optimizer_state(tracker, optimizer, owners)
            found.append(
                StepEvents(
                    events=tracker.events[first:],
                    origins=tracker.origins,
                    owners=owners,
                    gradients=gradients,
                    numbers=numbers,
                )
            )
        tracker.close()
        return found


def _laid_out_otherwise(one: Trainable, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Gives `parameter` (a DTensor) its gradient of another layout; returns the gradient's local tensor."""
    from torch.distributed.tensor import DTensor

    assert one.gradient is not None
    shape, placements = one.gradient
    storage = torch.empty(shape, dtype=one.dtype, device="meta")
    parameter.grad = DTensor.from_local(
        storage, one.mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return storage
