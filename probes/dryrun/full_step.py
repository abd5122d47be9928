"""The optimizer's step on the full model's trained parameters, of which a run has some layers only."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from planner.core.records import dataclass
from planner.setup import TrainSetup
from probes.allocator.events import Event
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.metaops import quick_checks
from probes.dryrun.trace import Trace, Trainable, claim_optimizer_state
from probes.dryrun.tracker import Origin, Tracker
from probes.dryrun.workspaces import temporaries
from probes.stack.optimizers import make_optimizer
from probes.stack.step import make_scaler, optimizer_phase


class Shards(Protocol):
    """What a rank of several GPUs holds of a parameter, and how it steps."""

    tracker: type[Tracker]

    def stepping(self) -> AbstractContextManager[Any]:
        """Entered around the optimizer's run on the full model's parameters."""

    def parameter(self, trainable: Trainable) -> torch.nn.Parameter:
        """This rank's part of the parameter, on meta."""


class Whole:
    """One GPU holds everything."""

    tracker = Tracker

    def stepping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def parameter(self, trainable: Trainable) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(trainable.shape, dtype=trainable.dtype, device="meta"))


@dataclass
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
            (layer, trainable, shards.parameter(trainable))
            for trainable, layer in layers.unrolled(trace.trainables, lambda trainable: trainable.layer)
        ]

    def _gradients(self) -> dict[tuple[str, int | None], torch.Tensor]:
        """Gives every parameter its gradient; one tensor for each storage, by the name that the run knows it by."""
        members: dict[tuple[str, int | None], list[torch.nn.Parameter]] = {}
        gradients = {}
        for layer, trainable, parameter in self.parameters:
            if trainable.has_gradient and trainable.gradient is None:
                members.setdefault((trainable.gradient_of, layer), []).append(parameter)
            elif trainable.gradient is not None:
                from torch.distributed.tensor import DTensor

                shape, placements = trainable.gradient
                storage = torch.empty(shape, dtype=trainable.dtype, device="meta")
                parameter.grad = DTensor.from_local(
                    storage,
                    trainable.mesh,
                    placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                gradients[trainable.gradient_of, layer] = storage
        for key, parameters in members.items():
            flat = torch.empty(sum(member.numel() for member in parameters), dtype=parameters[0].dtype, device="meta")
            offset = 0
            for member in parameters:
                member.grad = flat[offset : offset + member.numel()].view(member.shape)
                offset += member.numel()
            gradients[key] = flat
        return gradients

    def steps(self, count: int) -> list[StepEvents]:
        """Events of each of `count` optimizer steps; numbers are shared between the steps."""
        holder = torch.nn.Module()
        holder.list = torch.nn.ParameterList([entry[-1] for entry in self.parameters])
        wide = [parameter for _, trainable, parameter in self.parameters if trainable.wide]
        optimizer: Any = make_optimizer(self.setup.optimizer, holder.parameters(), wide=wide)
        scaler = make_scaler(self.setup, "meta")
        tracker = self.shards.tracker("meta", temporaries=temporaries())
        steps: list[StepEvents] = []
        numbers: dict[int, int] = {}
        owners: dict[int, tuple[str, str]] = {}
        for parameter in holder.parameters():
            tracker.track(parameter, "load")
        for _ in range(count):
            gradients = {tracker.seen(storage): key for key, storage in self._gradients().items()}
            tracker.mark("step", None)
            first = len(tracker.events)
            tracker.log = self.operators if self.operators is not None and len(steps) == count - 1 else None
            if tracker.log is not None:
                tracker.log.begin_full_step(self.layers)
            with self.shards.stepping(), quick_checks(), tracker:
                optimizer_phase(holder, optimizer, scaler, "meta", clips=self.setup.trainer.clips_gradients)
            claim_optimizer_state(tracker, optimizer, owners)
            steps.append(StepEvents(tracker.events[first:], tracker.origins, owners, gradients, numbers))
        tracker.close()
        return steps
