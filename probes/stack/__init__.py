"""How a `TrainSetup` becomes a model, adapters, an optimizer, a batch and one training step.

Shared by the dry run (meta tensors), the CPU check and the GPU probe, so that all three run the same step.
"""

from probes.stack.batch import Batch, make_batch
from probes.stack.build import bare_model, build_from_config, build_model
from probes.stack.configs import (
    layer_signatures,
    layers_of,
    load_config,
    num_layers,
    period_of,
    truncated_config,
)
from probes.stack.optimizers import make_optimizer, optimizer_of, wide_parameters
from probes.stack.step import Trainer, inner_model, make_trainer, train_step

__all__ = [
    "Batch",
    "Trainer",
    "bare_model",
    "build_from_config",
    "build_model",
    "inner_model",
    "layer_signatures",
    "layers_of",
    "load_config",
    "make_batch",
    "make_optimizer",
    "make_trainer",
    "num_layers",
    "optimizer_of",
    "period_of",
    "train_step",
    "truncated_config",
    "wide_parameters",
]
