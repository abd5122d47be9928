"""Real memory for a model that was sharded on meta: no GPU ever holds the whole model.

Source: PyTorch 2.13, FSDP2's documented order (fully_shard on meta, `to_empty`, initialise); Accelerate's
`cpu_ram_efficient_loading` shards on meta too.
"""

from typing import Any

import torch

from planner.setup import TrainSetup
from probes.stack.build import compute_buffers, fill_random
from probes.stack.quantize import is_nf4, random_nf4
from probes.stack.step import inner_model


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
