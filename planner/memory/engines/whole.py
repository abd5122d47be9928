"""Engines that keep everything whole on every rank: one GPU, DDP, DP in one process, a device map."""

from dataclasses import replace
from typing import final

from planner.memory.engines.base import Engine
from planner.memory.rank_part import RankPart
from planner.memory.states import (
    Allocation,
    RankState,
    gradient_allocation,
    heeds_loss,
    part_trained,
    whole_gradients,
    whole_weights,
)
from planner.memory.trained import Trained, unused_bytes
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


def _whole(
    part: RankPart, inner: TrainSetup, setup: TrainSetup, trained: Trained, reached: Trained, accumulated: bool
) -> list[Allocation]:
    """Weights, adapters, gradients of what is `reached`, as one GPU holds them; of a tensor split this rank's part."""
    allocations = [
        *whole_weights(part.model, inner, trained),
        *whole_gradients(part.model, inner, reached, accumulated),
    ]
    if setup.tensor_degree > 1:
        from planner.memory.engines.splits import gathered_head, split_tables  # one GPU never needs it

        allocations += split_tables(part, setup, trained, accumulated)
        allocations += gathered_head(part.model, setup, inner.weight_dtype)
    return allocations


class _Whole(Engine):
    """Everything whole, and nothing beside it but a Reducer's `buckets`."""

    buckets = False

    def state(self, part: RankPart, setup: TrainSetup, *, accumulated: bool) -> RankState:
        inner = self.computes(setup)
        trained = part_trained(part.model, inner)
        reached = trained.reached
        allocations = _whole(part, inner, setup, trained, reached, accumulated)
        if self.buckets:
            # distributed experts are left out of them
            expert_weights = part.model.num_expert_parallel_weights if setup.method == "full" else 0
            in_buckets = trained.size_bytes - expert_weights * trained.outer_bytes
            if setup.method == "full":  # adapters that get no gradient are among those trained
                in_buckets += unused_bytes(part.model, inner)
            allocations.append(gradient_allocation("DDP's buckets", in_buckets))
        stepped = reached.largest if inner.trainer.steps_in_backward else None
        return RankState(
            part=part, setup=inner, trained=reached, local=reached, allocations=tuple(allocations), stepped=stepped
        )

    def equivalent_loss(self, model: ModelSpec, setup: TrainSetup, loss: str) -> str:
        return loss if heeds_loss(model, setup) else "full"


@final
class SingleGpu(_Whole):
    """One copy of the model: on one GPU, or cut by tensor and pipeline parallelism alone."""

    name = ""
    tie_break = 0

    def computes(self, setup: TrainSetup) -> TrainSetup:
        return setup if setup.num_gpus == 1 else super().computes(setup)


@final
class Ddp(_Whole):
    """DistributedDataParallel: one process per GPU, gradients averaged.

    Its Reducer allocates one flat buffer per bucket at construction and keeps it: as many bytes as the trained
    parameters, beside the gradients themselves (gradient_as_bucket_view is off by default).

    Source: PyTorch 2.13 `csrc/distributed/c10d/reducer.cpp` initialize_buckets; accelerate 1.15
    `DistributedDataParallelKwargs`.
    """

    name = "DDP"
    tie_break = 1
    sends = "only gradients are sent, once per step"
    buckets = True


@final
class DeviceMap(_Whole):
    """One copy spread over the GPUs by layers, one GPU at work at a time."""

    name = "device map"
    tie_break = 6

    def refuses(self, model: ModelSpec, setup: TrainSetup) -> str:
        if setup.num_gpus > model.num_layers:
            return f"{model.num_layers} layers cannot be spread over {setup.num_gpus} GPUs (accelerate device_map)"
        return ""


@final
class OneProcess(Engine):
    """nn.DataParallel: one process copies the weights to every GPU for one step and adds all gradients up on GPU 0,
    which also runs the optimizer.

    Source: PyTorch 2.13 `nn/parallel/replicate.py`, `_functions.py` ReduceAddCoalesced, `scatter_gather.py` gather.
    """

    name = "DP"
    tie_break = 7

    def state(self, part: RankPart, setup: TrainSetup, *, accumulated: bool) -> RankState:
        inner = self.computes(setup)
        trained = part_trained(part.model, inner)
        # the backward of its broadcast gives zeros where no gradient is: all are reached
        allocations = _whole(part, inner, setup, trained, trained, accumulated and not part.follower)
        local = replace(trained, num=0, edge_sum=0, largest=0, wide=0) if part.follower else trained
        if not part.follower:
            name = "sum of all GPUs' gradients"
            allocations.append(gradient_allocation(name, trained.size_bytes, "last", "end"))
        return RankState(part=part, setup=inner, trained=trained, local=local, allocations=tuple(allocations))

    def refuses(self, model: ModelSpec, setup: TrainSetup) -> str:
        if setup.quantized:
            return (
                "nn.DataParallel cannot replicate bitsandbytes' quantized weights: the Trainer leaves such models on "
                "one GPU (transformers 5.23 Trainer._wrap_model)"
            )
        return ""
