"""One rank's step of a multi-GPU job, traced: PyTorch's own DDP, FSDP2 or transformers' tensor parallelism around the
same model and step as on one GPU.

Rank 0 is traced: it holds the largest shards (FSDP2 pads the last ranks); of a ring of ranks that share a sequence one
in the middle (`traced_rank`). What collectives write to are tensors and counted; NCCL's own buffers are outside
PyTorch's allocator.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from planner.planning.evidence.followed import traced_rank, why_not_traced
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase, flat
from probes.dryrun.fakeworld import fake_world
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.layout_tracker import LayoutTracker, untracked_trials
from probes.dryrun.repeat_layers import ONE_GPU, Shards, repeat_layers
from probes.dryrun.trace import Owners, Trace, Trainable, load, load_all
from probes.dryrun.tracker import Origin, Tracker, local
from probes.stack import step
from probes.stack.parallelize import Layout, data_mesh, layout_model, share_reference

BUCKETS = "DDP buckets"


class _State(NamedTuple):
    """A parameter or buffer of the module that DDP wraps."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    trained: bool


class JobWorld:
    """A rank of a job on several GPUs, as that rank meets it. The default process group must exist: fake for a
    dry run, gloo for its check."""

    tracker: type[Tracker] = LayoutTracker

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup

    def prepared(self, tracker: Tracker, model: Any, reference: Any) -> AbstractContextManager[tuple[Layout, Owners]]:
        """The model wrapped for the job and loaded, and the frozen copy that its objective asks, with the owners of
        what was loaded; followed until its end."""
        raise NotImplementedError

    def repeat_layers(self, trace: Trace, layers: LayerMap) -> Trace:
        """As `probes.dryrun.repeat_layers.repeat_layers`, with what grows otherwise than by layers."""
        return repeat_layers(trace, layers, self._setup, self._shards())

    def _shards(self) -> Shards:
        return ONE_GPU


class DdpWorld(JobWorld):
    """A job of DDP ranks."""

    @contextmanager
    def prepared(self, tracker: LayoutTracker, model: Any, reference: Any) -> Iterator[tuple[Layout, Owners]]:
        self._states = [
            _State(name, tensor.shape, tensor.dtype, tensor.requires_grad)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ]
        order: dict[str, None] = {}  # of the gradients
        owners = load_all(tracker, model, reference)
        with tracker, tracker.labelled(BUCKETS):
            layout = layout_model(model, self._setup, device=next(model.parameters()).device)
        self._keeps_buckets = layout.module.find_unused_parameters  # reducer.cpp should_rebuild_buckets
        plain = layout.module._pre_forward

        def pre_forward(*args: Any, **kwargs: Any) -> Any:
            with tracker.labelled(BUCKETS):  # the buckets are made anew once, in the order of the gradients
                return plain(*args, **kwargs)

        layout.module._pre_forward = pre_forward
        with ExitStack() as stack:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:

                    def note(gradient_of: torch.Tensor, name: str = name) -> None:
                        order.setdefault(name)
                        if tracker.log is not None and tracker.log.exchanges is not None:
                            tracker.log.exchanges.gradient(gradient_of)

                    stack.enter_context(parameter.register_post_accumulate_grad_hook(note))
            yield layout, owners
        self._order = [*order]

    def repeat_layers(self, trace: Trace, layers: LayerMap) -> Trace:
        """The buckets are those of the full model's parameters."""
        buckets = {number for number, origin in trace.origins.items() if origin.op == BUCKETS}
        others = [
            event
            for event in flat(trace.events)
            if isinstance(event, Phase) or getattr(event, "id", None) not in buckets
        ]
        full = repeat_layers(replace(trace, events=others), layers, self._setup).flat()
        states = _repeated(self._states, trace, layers)
        holder = torch.nn.Module()
        holder.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(state.shape, dtype=state.dtype, device="meta"), requires_grad=state.trained)
            for state in states
        )
        made = LayoutTracker("meta")
        for part in holder.parts:
            made.seen(part)
        made.events.clear()
        with made, made.labelled(BUCKETS):
            wrapped = layout_model(holder, self._setup, device=torch.device("meta")).module
        by_name = {state.name: state for state in self._states}
        order = _repeated([by_name[name] for name in self._order], trace, layers)
        first = list(made.events)
        made.events.clear()
        del wrapped
        freed = list(made.events)
        made.close()
        if self._keeps_buckets:
            return _with_buckets(full, first, [])
        return _with_buckets(full, first, [*freed, *_rebuilt(order, len(made.origins))])


def _repeated(states: list[_State], trace: Trace, layers: LayerMap) -> list[_State]:
    return [state for state, _ in layers.unrolled(states, lambda state: trace.layer_of(state.name))]


def _rebuilt(order: list[_State], number: int) -> list[Event]:
    """The buckets that DDP makes after its first backward, in the order in which the gradients came; numbers from
    `number` on.

    Source: PyTorch 2.13 torch/csrc/distributed/c10d/reducer.cpp `rebuild_buckets`.
    """
    import torch.distributed as dist

    tensors = [torch.empty(state.shape, dtype=state.dtype, device="meta") for state in order]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 1024**2]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    sizes = [sum(tensors[index].numel() * tensors[index].element_size() for index in bucket) for bucket in buckets]
    return [Alloc(number + index, size) for index, size in enumerate(sizes)]


def _with_buckets(trace: Trace, first: list[Event], rebuilt: list[Event]) -> Trace:
    """`trace` with the buckets' events `first` after the weights are loaded and `rebuilt` as the second step begins."""
    origins = dict(trace.origins)
    events: list[Event] = []
    numbers: dict[int, int] = {}
    phase = "load"

    def insert(bucket_events: list[Event]) -> None:
        for event in bucket_events:
            if isinstance(event, Alloc):
                numbers[event.id] = len(origins)
                origins[len(origins)] = Origin(phase, None, BUCKETS, event.size_bytes)
                events.append(Alloc(numbers[event.id], event.size_bytes))
            elif isinstance(event, Free):
                events.append(Free(numbers.pop(event.id)))

    for event in flat(trace.events):
        if isinstance(event, Phase):
            before, phase = phase, event.name.partition("/")[0]
            events.append(event)
            if phase == "forward" and before == "step":
                insert(rebuilt)
                rebuilt = []
        else:
            if phase == "load" and isinstance(event, Alloc) and event.id not in trace.owners:
                insert(first)  # after the weights, before the batches
                first = []
            events.append(event)
    return replace(trace, events=events, origins=origins)


class FsdpWorld(JobWorld):
    """A job of FSDP2 ranks."""

    _mesh: Any = None

    @contextmanager
    def prepared(self, tracker: LayoutTracker, model: Any, reference: Any) -> Iterator[tuple[Layout, Owners]]:
        """Loading is the shards, and then once more the largest weight, which ranks
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
            weight = max(model.parameters(), key=lambda parameter: parameter.numel() * parameter.element_size())
            largest = weight.numel() * weight.element_size()
            twice = sum(parameter is weight for _, parameter in model.named_parameters(remove_duplicate=False)) > 1
            if twice or setup.offload == "parameters":
                largest += -(-weight.shape[0] // setup.shards) * (largest // weight.shape[0])
            tracker.release(tracker.allocate(largest, "load"))
            yield layout, owners

    def _shards(self) -> Shards:
        on_host = self._setup.offload == "parameters"
        return Shards(self._rows) if on_host else Shards(self._rows, self._stepping, LayoutTracker)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """The norm of all gradients is summed up over the ranks as DTensor does it,
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

    def _rows(self, trainable: Trainable) -> torch.nn.Parameter:
        """Rank 0's rows of the parameter: a plain tensor, as the step's kernels see
        it; DTensor's own rules take seconds for the lists of a deep model."""
        rows = -(-trainable.shape[0] // self._setup.shards)
        return torch.nn.Parameter(torch.empty((rows, *trainable.shape[1:]), dtype=trainable.dtype, device="meta"))


class TensorWorld(JobWorld):
    """A job of tensor-parallel ranks."""

    @contextmanager
    def prepared(self, tracker: LayoutTracker, model: Any, reference: Any) -> Iterator[tuple[Layout, Owners]]:
        """Every rank reads only its part of a weight from the files (transformers 5.23
        `core_model_loading`), so that loading holds nothing more."""
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
        from transformers.distributed import expert_parallel

        setup, device = self._setup, next(model.parameters()).device
        # what DTensor's caches hold of an earlier job in this process names its groups, which are gone
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        _clear_sharding_prop_cache()
        # transformers' own token dispatch, with as many (token, expert) pairs to every rank: how many go where is read
        # back to the host from counts that meta tensors have not. Source: transformers 5.23
        # `distributed/expert_parallel.py` AllToAllEP
        dispatch = mock.patch.object(expert_parallel, "torch", _BalancedTorch())
        balanced = dispatch if setup.expert_degree > 1 else nullcontext()
        with _strides_without_tensors(), balanced, tracker.following_shards():
            layout = layout_model(model, setup, device=device)
            if setup.offload == "parameters" and device.type == "meta":
                tracker.keep_all_on_host(model.parameters())
            yield layout, load(tracker, model)

    def _shards(self) -> Shards:
        on_host = self._setup.offload == "parameters"
        return Shards(_tensor_part) if on_host else Shards(_tensor_part, _summed_norms, _StepTracker)


@contextmanager
def _strides_without_tensors() -> Iterator[None]:
    """Within it, transformers' hooks compute a whole tensor's strides by arithmetic: they ask a tensor on meta, which
    a dry run would count."""
    from torch._prims_common import make_contiguous_strides_for
    from torch.distributed.tensor import DTensor, Shard
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    def from_local(part: torch.Tensor, mesh: Any, size: int) -> Any:
        shape = torch.Size((*part.shape[:-1], size))
        stride = make_contiguous_strides_for(shape)
        return DTensor.from_local(part, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)

    with mock.patch.object(TensorParallelLayer, "_from_local_last_dim_shard", staticmethod(from_local)):
        yield


class _BalancedTorch:
    """`torch` for that module: what counts nothing on meta is answered for balanced routing."""

    def __init__(self) -> None:
        self._pairs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def argsort(self, expert_ids: torch.Tensor) -> torch.Tensor:
        self._pairs = expert_ids.numel()
        return torch.argsort(expert_ids)

    def stack(self, counts: list[torch.Tensor]) -> Any:
        """Pairs sent and received by rank: made as on a GPU, read as equally many to every rank."""
        ranks = torch.stack(counts).shape[1]
        sizes = [self._pairs // ranks + (rank < self._pairs % ranks) for rank in range(ranks)]
        return SimpleNamespace(tolist=lambda: [list(sizes), list(sizes)])


class _StepTracker(LayoutTracker):
    """Runs every operator on lists on the local tensors, as some are plain tensors that stand for DTensors."""

    def takes_local(self, func: Any) -> bool:
        return bool(func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")))


@contextmanager
def _summed_norms() -> Iterator[None]:
    """Within it each mesh's norm is summed up over its ranks as DTensor does it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    def norm_of(parameters: list[Any]) -> torch.Tensor:
        norms = torch._foreach_norm([local(parameter.grad) for parameter in parameters])
        stacked = torch.stack(norms)
        mesh = getattr(parameters[0], "device_mesh", None)
        if mesh is None:
            return torch.linalg.vector_norm(stacked)
        parts = DTensor.from_local(stacked, mesh, [_NormPartial(2.0)] * mesh.ndim, run_check=False)
        whole: torch.Tensor = torch.linalg.vector_norm(parts).full_tensor()
        return whole

    with mock.patch.object(step, "norm_of", norm_of), untracked_trials():
        yield


def _tensor_part(trainable: Trainable) -> torch.nn.Parameter:
    """This rank's part, as a plain tensor that knows its mesh, or as a DTensor where the gradient is laid out
    otherwise."""
    part: Any = torch.empty(trainable.local_shape, dtype=trainable.dtype, device="meta")
    if trainable.gradient is not None:
        from torch.distributed.tensor import DTensor

        shape, stride = trainable.shape, torch.empty(trainable.shape, device="meta").stride()
        part = DTensor.from_local(
            part, trainable.mesh, trainable.placements, run_check=False, shape=shape, stride=stride
        )
    parameter = torch.nn.Parameter(part)
    if trainable.gradient is None and trainable.mesh is not None:
        parameter.device_mesh = trainable.mesh
    return parameter


@contextmanager
def fake_job(setup: TrainSetup) -> Iterator[JobWorld]:
    """One rank of the job of `setup`, on meta tensors in a fake process group.

    Raises:
        ValueError: a way to spread the job that is not traced, with the reason.
    """
    if refusal := why_not_traced(setup):
        raise ValueError(refusal)
    with fake_world(setup.num_gpus, rank=traced_rank(setup)):
        yield world_of(setup)


def world_of(setup: TrainSetup) -> JobWorld:
    """What follows a rank of the job of `setup`, whose default process group exists."""
    if setup.sharded_at_loading:
        return TensorWorld(setup)
    return FsdpWorld(setup) if setup.parallel == "fsdp2" else DdpWorld(setup)
