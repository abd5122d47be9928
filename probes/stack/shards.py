"""Real memory for a model that was sharded on meta: no GPU ever holds the whole model.

Source: PyTorch 2.13, FSDP2's documented order (fully_shard on meta, `to_empty`, initialise); Accelerate's
`cpu_ram_efficient_loading` shards on meta too.
"""

from typing import Any

import torch

from planner.setup import TrainSetup
from probes.stack.build import compute_buffers, fill_random
from probes.stack.step import inner_model


def shards_first(setup: TrainSetup) -> bool:
    """Whether a setup's weights are made after sharding. Quantized ones are not: they are packed from whole matrices,
    so they are whole on every GPU until they are cut (as in the trainer)."""
    return setup.parallel == "fsdp2" and not setup.quantized


def fill_shards(model: Any, device: torch.device, setup: TrainSetup, *, seed: int = 0) -> None:
    """Gives every rank its part of the weights on `device` (in the host's memory where parameters are offloaded),
    random as `materialize` makes them; buffers are whole on every rank and computed by the model itself."""
    home = torch.device("cpu") if setup.offload == "parameters" else device
    model.to_empty(device=home)
    inner = inner_model(model)
    inner.tie_weights()
    generator = torch.Generator(device=home).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            part = getattr(parameter, "_local_tensor", parameter)
            with torch.no_grad():
                fill_random(part, name, type(module).__name__, generator)
            parameter._is_hf_initialized = True
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)
    compute_buffers(inner)
