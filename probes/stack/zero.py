"""ZeRO stages 1 to 3 as `transformers.Trainer` runs them: DeepSpeed's own engine around the model and its step.

DeepSpeed is optional and imported late. Its weights are 16-bit under 16-bit compute (no autocast), with fp32 masters in
the optimizer's partitions. Run on the CPU with gloo and DeepSpeed 0.19.8 (stages 1 to 3); not yet on a GPU.
"""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from planner.frameworks.exporters.deepspeed import engine_config
from planner.memory.engines.zero import own_buffers
from planner.setup import TrainSetup
from probes.stack.batch import Batch
from probes.stack.build import build_model, compute_buffers, random_parameter
from probes.stack.dtypes import DTYPES
from probes.stack.step import MAX_GRAD_NORM, Mark, Trainer, _marks, compute_loss, inner_model, make_trainer


@dataclass(frozen=True, kw_only=True)
class ZeroTrainer:
    """What one step needs: the engine, and the step's own trainer whose forward is the engine's."""

    engine: Any
    trainer: Trainer


def num_trained(config: Mapping[str, Any], setup: TrainSetup, attention: str | None) -> int:
    """Trained elements of the whole model: DeepSpeed's buffers are sized by it at any depth."""
    model = build_model(config, setup, device="meta", attention=attention)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def zero_config(setup: TrainSetup, trained: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the launch file's, for an optimizer that the probe makes itself."""
    settings = engine_config(setup, own_buffers(trained), max_grad_norm=MAX_GRAD_NORM)
    return {**settings, "zero_allow_untested_optimizer": True}


def partitions_first(setup: TrainSetup) -> bool:
    """Whether a setup's weights are cut as soon as each module's are made, as `from_pretrained` does under ZeRO-3.
    Quantized ones are not: transformers hands them over whole."""
    return setup.parallel == "zero3" and not setup.quantized


def fill_partitions(model: Any, device: torch.device, setup: TrainSetup, *, trained: int) -> None:
    """Gives a model on meta random weights of which this rank keeps its part: no GPU ever holds more than one module
    whole. In the engine's type, which it insists on for weights that are cut already; buffers are whole.

    Source: DeepSpeed 0.19 `zero.Init(module=...)`, which transformers 5.23 `from_pretrained` enters as a context.
    """
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    config = zero_config(setup, trained)
    dtype = next((DTYPES[name] for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), None)
    inner = inner_model(model)
    inner.tie_weights()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device.type == "meta":
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    compute_buffers(inner)
    generator = torch.Generator(device=device).manual_seed(0)
    done: dict[int, torch.nn.Parameter] = {}
    with _no_compilation() if device.type == "cpu" else nullcontext():
        deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
        for module in reversed(list(model.modules())):  # Init takes a module with its children: they are cut before it
            mine = list(module.named_parameters(recurse=False))
            for name, parameter in mine:
                if id(parameter) not in done:
                    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                    done[id(parameter)] = random_parameter(parameter, kind, name, module, generator)
                setattr(module, name, done[id(parameter)])
            if mine:
                deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=dtype)


def make_zero_trainer(model: Any, setup: TrainSetup, optimizer: Any, *, trained: int) -> ZeroTrainer:
    """The model under DeepSpeed's engine, which cuts optimizer states, gradients and (stage 3) weights.

    Source: accelerate 1.15 `Accelerator._prepare_deepspeed`.
    """
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    plain = make_trainer(model, setup, optimizer)
    if setup.offload != "none":
        from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

        optimizer = map_pytorch_optim_to_deepspeed(optimizer)
    with _no_compilation() if plain.device_type == "cpu" else nullcontext():
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_config(setup, trained))
    # without autocast: the engine has made the weights 16-bit
    return ZeroTrainer(engine=engine, trainer=replace(plain, forward=engine.__call__, scaler=None))


def _no_compilation() -> Any:
    """On the CPU DeepSpeed would compile collectives of its own over shared memory, for a minute."""
    import deepspeed.comm.torch  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

    return mock.patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", return_value=None)


def zero_step(job: ZeroTrainer, batches: list[Batch], mark: Mark | None = None) -> torch.Tensor:
    """`probes.stack.step.train_step` with the engine's backward and step; the same phases.

    Source: accelerate 1.15 `DeepSpeedEngineWrapper.backward`.
    """
    tell: Mark = mark or (lambda phase, layer: None)
    engine, trainer = job.engine, job.trainer
    loss = None
    with _marks(trainer, tell) if mark is not None else nullcontext():
        for index, batch in enumerate(batches):
            tell("forward", None)
            engine.set_gradient_accumulation_boundary(is_boundary=index == len(batches) - 1)
            loss = compute_loss(trainer, batch, batch.labels.ne(-100).sum(), tell)
            engine.backward(loss)
    tell("step", None)
    engine.step()
    assert loss is not None, f"no micro-batch for {trainer.setup}"
    return loss.detach()
