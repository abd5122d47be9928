"""How a built model becomes one rank's part of a multi-GPU job: DDP and FSDP2 as Accelerate 1.15 does it, tensor
parallelism (alone or inside FSDP2) as transformers 5.23 does it.

One place for the dry run (fake process group, meta tensors), its check on CPU and the real `torchrun` probe. The
default process group exists before; ranks and sizes are read from it. DeepSpeed's engine needs CUDA, so its ZeRO stages
are not wrapped here (the dry run models them, the probe calls DeepSpeed).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from planner.frameworks.exporters.several_gpus import distributed_config, tensor_refusal
from planner.memory.trained import unused_bytes
from planner.setup import TrainSetup
from probes.stack.adapters import spec_of
from probes.stack.batch import Batch
from probes.stack.build import compute_buffers, fill_random
from probes.stack.configs import layers_of
from probes.stack.dtypes import DTYPES
from probes.stack.quantize import is_nf4, random_nf4
from probes.stack.step import Mark, inner_model


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One rank's model.

    Attributes:
        module: what the step calls.
        autocast: whether the forward stays under autocast. FSDP2's mixed precision replaces it: Accelerate does not
            wrap the forward of a model that it prepares for FSDP2 (`Accelerator._prepare_fsdp2`).
        no_sync: entered around every micro-batch before the last, as `transformers.Trainer` does under DDP
            (`Accelerator.no_sync`), and under FSDP2 unless `sync_each_batch` is set.
        run: takes the place of a step's micro-batches (a pipeline's schedule): called with the batches and what tells
            the phases.
    """

    module: Any
    autocast: bool = True
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    run: Callable[[list[Batch], Mark], None] | None = None


def layout_model(model: Any, setup: TrainSetup, *, device: torch.device) -> Layout:
    """`model` (on `device`, under FSDP2 also on meta) wrapped as `setup.parallel` says; FSDP2 changes it in place,
    parameters become DTensors.

    Raises:
        ValueError: a strategy that is not wrapped here.
    """
    if setup.sharded_at_loading:
        return _at_loading(model, setup, device)
    if setup.parallel == "ddp":
        # As accelerate 1.15 `Accelerator.prepare_model`: its defaults (buckets of 25 MiB apart from the gradients), and
        # a search for unused parameters where launch files ask it. Rank 0's weights are not sent to the others while it
        # is built: all have the same already, and the copies for it (at most 2 x 250 MiB, gone before the first step)
        # may or may not outlive the making of the buckets.
        ids = [device.index] if device.type == "cuda" else None
        unused = hasattr(model, "config") and unused_bytes(spec_of(inner_model(model)), setup) > 0
        module = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=ids, init_sync=False, find_unused_parameters=unused
        )
        return Layout(module=module, no_sync=module.no_sync)
    if setup.parallel == "fsdp2":
        return _fsdp2(model, setup, device)
    raise ValueError(f"parallel {setup.parallel!r} has no wrapper of PyTorch's own")


def _fsdp2(model: Any, setup: TrainSetup, device: torch.device) -> Layout:
    """Runs Accelerate's own `fsdp2_prepare_model`, with plain objects in place of its accelerator and plugin, which
    could only be made with a launcher's environment."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plugin = SimpleNamespace(
        auto_wrap_policy=transformer_auto_wrap_policy,
        transformer_cls_names_to_wrap=sorted({type(layer).__name__ for layer in layers_of(inner_model(model))}),
        min_num_params=0,
        set_auto_wrap_policy=lambda _: None,
        reshard_after_forward=setup.reshard_after_forward,
        cpu_offload=CPUOffloadPolicy() if setup.offload == "parameters" else OffloadPolicy(),
        mixed_precision_policy=_policy(setup),
        ignored_modules=None,
        cpu_ram_efficient_loading=False,
    )
    if setup.trainer.one_root:  # Axolotl's own function in the place of Accelerate's
        for part in (*layers_of(inner_model(model)), model):
            fully_shard(
                part,
                mesh=data_mesh(setup, device),
                reshard_after_forward=plugin.reshard_after_forward,
                mp_policy=plugin.mixed_precision_policy,
                offload_policy=plugin.cpu_offload,
            )
        return Layout(module=model, autocast=False, no_sync=_deferred(model, setup))
    mesh = data_mesh(setup, device)
    names = mesh.mesh_dim_names
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={names: mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=names),
        mixed_precision=setup.autocast_dtype or "no",
        is_main_process=False,
        device=device,
    )
    # the state dict is taken and not used where every rank loads by itself; bitsandbytes cannot give one on meta
    on_meta = next(model.parameters()).device.type == "meta"
    with mock.patch.object(model, "state_dict", dict) if on_meta else nullcontext():
        module = fsdp2_prepare_model(accelerator, model)

    return Layout(module=module, autocast=False, no_sync=_deferred(module, setup))


def share_reference(reference: Any, setup: TrainSetup, *, device: torch.device) -> None:
    """Cuts the frozen copy that an objective asks, in place, as TRL does under FSDP2: one group for the whole model, so
    that its forward gathers all weights at once; in the type that it was loaded in.

    Source: trl 1.16 `models/utils.py` prepare_fsdp.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    fully_shard(
        reference,
        mesh=data_mesh(setup, device),
        reshard_after_forward=setup.reshard_after_forward,
        mp_policy=_policy(setup),
        offload_policy=CPUOffloadPolicy() if setup.offload == "parameters" else OffloadPolicy(),
    )


def _policy(setup: TrainSetup) -> Any:
    """FSDP2's mixed precision. Source: accelerate 1.15 `FullyShardedDataParallelPlugin.set_mixed_precision`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = DTYPES.get(setup.autocast_dtype or "")
    return MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, dtype, dtype)


def _at_loading(model: Any, setup: TrainSetup, device: torch.device) -> Layout:
    """What `from_pretrained(distributed_config=...)` of the launch files does to a model on meta before its weights are
    read, and what the Trainer then adds: autocast, no wrapper of Accelerate's.

    Under FSDP2 whole gradients wait for the last micro-batch: the Trainer defers their reduction, and the launch files
    set no `sync_each_batch` here.

    Source: transformers 5.23 `DistributedMixin.maybe_distribute_model`, `initialize_distributed_mesh`,
    `Trainer._prepare_for_training` (is_distributed_loading_by_transformers), `_defer_fsdp_gradient_reduction`.

    Raises:
        ValueError: a strategy of the copies that transformers does not combine with it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    reason = tensor_refusal(setup, "transformers")
    if reason:
        raise ValueError(reason)
    config = DistributedConfig(**distributed_config(setup))

    def mesh(**sizes: int) -> Any:
        names = ("pp", "dp_replicate", *sizes)
        return init_device_mesh(device.type, (1, config.dp_replicate_size, *sizes.values()), mesh_dim_names=names)

    dense = mesh(fsdp=config.fsdp_size, tp=config.tp_size)
    experts = mesh(efsdp=config.efsdp_size, ep=config.ep_size)
    inner = inner_model(model)
    with _untied(inner):
        type(inner).maybe_distribute_model(inner, config, TransformersDeviceMesh(dense, experts))
    return Layout(module=model, no_sync=_deferred(inner, setup))


def _deferred(model: Any, setup: TrainSetup) -> Callable[[], AbstractContextManager[Any]]:
    return partial(_without_sync, model) if setup.defers_reduction else nullcontext


@contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def _untied(model: Any) -> Iterator[None]:
    """Within it a tied head has a parameter of its own, as `from_pretrained` makes models before it reads weights
    (`no_tie_weights`); tied again at the end."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is table.weight
    if tied:
        head.weight = torch.nn.Parameter(torch.empty_like(table.weight), requires_grad=table.weight.requires_grad)
    yield
    if tied:
        model.tie_weights(recompute_mapping=False)


def data_mesh(setup: TrainSetup, device: torch.device) -> Any:
    """The mesh of the ranks that hold alike, those of one sequence innermost: [shards], or [replicas, shards]."""
    from torch.distributed.device_mesh import init_device_mesh

    if setup.shards == setup.shardable_ranks:
        return init_device_mesh(device.type, (setup.shards,), mesh_dim_names=("dp_shard",))
    shape = setup.shardable_ranks // setup.shards, setup.shards
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def ring_group(setup: TrainSetup) -> Any:
    """The process group of the ranks that share this one's sequence."""
    import torch.distributed as dist

    first = dist.get_rank() // setup.context_degree * setup.context_degree
    return dist.new_group(list(range(first, first + setup.context_degree)))


# Real memory for a model that was sharded on meta: no GPU ever holds the whole model. Source: PyTorch 2.13, FSDP2's
# documented order (fully_shard on meta, `to_empty`, initialise); Accelerate's `cpu_ram_efficient_loading` does so too.


def shards_first(setup: TrainSetup) -> bool:
    """Whether a setup's weights are made after sharding, quantized ones matrix by matrix."""
    return setup.parallel == "fsdp2"


def fill_shards(model: Any, device: torch.device, setup: TrainSetup) -> None:
    """Gives every rank its part of the weights on `device` (in the host's memory where parameters are offloaded),
    random as `materialize` makes them; buffers are whole on every rank and computed by the model itself."""
    parameter_device = torch.device("cpu") if setup.offload == "parameters" else device
    model.to_empty(device=parameter_device)
    inner = inner_model(model)
    inner.tie_weights()
    generator = torch.Generator(device=parameter_device).manual_seed(0)
    for module in model.modules():
        if packed := is_nf4(module):
            _fill_packed(module, device, generator)
        for name, parameter in module.named_parameters(recurse=False):
            if not (packed and name == "weight"):
                part = getattr(parameter, "_local_tensor", parameter)
                with torch.no_grad():
                    fill_random(part, name, type(module).__name__, generator)
            parameter._is_hf_initialized = True
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)
    compute_buffers(inner)


def _fill_packed(module: Any, device: torch.device, generator: torch.Generator) -> None:
    """Quantizes one random matrix whole, keeps this rank's part of its codes, and its statistics whole, as the trainer
    does (the codes alone are a parameter that FSDP2 cuts). Every rank makes the same matrix."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    weight, state = module.weight, module.quant_state
    generator = generator if generator.device == device else torch.Generator(device=device).manual_seed(0)
    packed, module.quant_state = random_nf4(module, state, device, state.dtype, generator)
    part = getattr(weight, "_local_tensor", weight)
    with torch.no_grad():
        if part is weight:  # left whole by the engine
            part.copy_(packed)
        else:
            shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
            part.copy_(packed[offset[0] : offset[0] + shape[0]])


def whole_quantized_bytes(model: Any) -> int:
    """What the packed weights of a model on meta take before they are cut, which Accelerate 1.15 does after loading."""
    return sum(module.weight.numel() * module.weight.element_size() for module in model.modules() if is_nf4(module))
