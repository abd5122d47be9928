"""A rank of an FSDP2 job, traced: PyTorch's own `fully_shard` as Accelerate wraps the model."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from planner.setup import TrainSetup
from probes.dryrun.full_step import Shards
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.layout_tracker import LayoutTracker, untracked_trials
from probes.dryrun.splice import splice
from probes.dryrun.trace import Owners, Trace, Trainable, load_all
from probes.dryrun.tracker import Tracker
from probes.stack.parallelize import Layout, data_mesh, layout_model, share_reference


class FsdpWorld:
    """A job of FSDP2 ranks. The default process group must exist: fake for a dry run, gloo for its check."""

    tracker = LayoutTracker

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup
        self._mesh: Any = None

    @contextmanager
    def prepared(self, tracker: LayoutTracker, model: Any, reference: Any) -> Iterator[tuple[Layout, Owners]]:
        """See `probes.dryrun.trace.World`. Loading is the shards, and then once more the largest weight, which ranks
        receive whole before they keep their part; a second part of it where the state dict names it twice, as tied
        weights are, or where the part is about to go to the host (accelerate 1.15 `fsdp2_load_full_state_dict`)."""
        setup, device = self._setup, next(model.parameters()).device
        with tracker.following_shards():
            layout = layout_model(model, setup, device=device)
            if reference is not None:
                share_reference(reference, setup, device=device)
            if setup.offload == "parameters" and device.type == "meta":
                tracker.keep_all_on_host((*model.parameters(), *(() if reference is None else reference.parameters())))
            owners = load_all(tracker, model, reference)
            weight = max(model.parameters(), key=lambda one: one.numel() * one.element_size())
            largest = weight.numel() * weight.element_size()
            twice = sum(one is weight for _, one in model.named_parameters(remove_duplicate=False)) > 1
            if twice or setup.offload == "parameters":
                largest += -(-weight.shape[0] // setup.shards) * (largest // weight.shape[0])
            tracker.release(tracker.allocate(largest, "load"))
            yield layout, owners

    def splice(self, trace: Trace, layers: LayerMap) -> Trace:
        """See `probes.dryrun.trace.World`."""
        return splice(trace, layers, self._setup, OnHost(self) if self._setup.offload == "parameters" else self)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `full_step.Shards`: the norm of all gradients is summed up over the ranks as DTensor does it,
        from one stack of the parts' norms."""
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor._ops._math_ops import _NormPartial
        from torch.nn.utils import clip_grad

        if self._mesh is None:
            self._mesh = data_mesh(self._setup, torch.device("meta"))
        placements = [Replicate()] * (self._mesh.ndim - 1) + [_NormPartial(2.0)]

        def total_norm(tensors: Any, norm_type: float = 2.0, *_: Any) -> Any:
            norms = torch._foreach_norm(list(tensors), norm_type)
            stacked = DTensor.from_local(torch.stack(norms), self._mesh, placements, run_check=False)
            return torch.linalg.vector_norm(stacked, norm_type)

        with mock.patch.object(clip_grad, "_get_total_norm", total_norm), untracked_trials():
            yield

    def parameter(self, one: Trainable) -> torch.nn.Parameter:
        """See `full_step.Shards`: rank 0's rows of the parameter. A plain tensor, as the step's kernels see
        it: DTensor's own rules take seconds for the lists of a deep model."""
        rows = -(-one.shape[0] // self._setup.shards)
        return torch.nn.Parameter(torch.empty((rows, *one.shape[1:]), dtype=one.dtype, device="meta"))


class OnHost:
    """See `full_step.Shards`: the step happens in the host's memory, its trained parameters have no gradient
    on the device."""

    tracker = Tracker
    stepping = staticmethod(nullcontext)

    def __init__(self, world: Shards) -> None:
        self.parameter = world.parameter
