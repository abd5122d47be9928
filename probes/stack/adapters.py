"""Adapters through peft, with the data type that the trainer would give them."""

import re
import warnings
from typing import Any
from unittest import mock

import torch
from torch import nn

from planner.memory.trained import layer_numbers, of_tokens, scaled_inputs
from planner.models.encoders import with_vision
from planner.models.families import has_family, spec_from_config
from planner.models.spec import ModelSpec
from planner.models.targets import Targets, peft_target_modules
from planner.setup import TrainSetup
from probes.stack.configs import has_audio, num_layers
from probes.stack.dtypes import DTYPES
from probes.stack.tree import spec_of_model, unadaptable_modules


def target_modules(model: Any, targets: Targets, *, seeing: bool = False) -> str | list[str]:
    """PEFT's `target_modules` for a model of any depth: what the planner counts and writes."""
    if targets != "attention":  # words and names need no inventory
        return targets if isinstance(targets, str) else list(targets)
    spec = spec_of(model)
    return peft_target_modules(with_vision(spec) if seeing else spec, targets)


def spec_of(model: Any) -> ModelSpec:
    """The inventory of a model of transformers, its weights packed or not: of a type that an adapter knows from its
    configuration, as the planner has it.

    Sizes of single layers (`per_layer_config`, which keeps the layers that a truncated copy no longer has) say nothing
    about names.
    """
    raw = model.config.to_dict()
    raw.get("text_config", raw).pop("per_layer_config", None)
    names = {"model_id": model.config.model_type, "source": "built model"}
    if has_family(model.config.model_type):
        return spec_from_config(raw, **names)
    if model.get_output_embeddings() is not None:
        return spec_of_model(model, raw, **names)
    table = model.get_input_embeddings()  # of scores and vectors: with a head, as the planner has it
    head = nn.Linear(table.embedding_dim, table.num_embeddings, device="meta")
    with mock.patch.multiple(model, create=True, lm_head=head, get_output_embeddings=lambda: head):
        return spec_of_model(model, raw, **names)


_RANK_ARGUMENTS = {
    "shared": "r",
    "rotations": "oft_block_size",
    "prompt": "num_virtual_tokens",
    "prefix": "num_virtual_tokens",
}
"""Form of an adapter -> peft's name of its size."""


def peft_config(model: Any, setup: TrainSetup) -> Any:
    """The configuration of the setup's adapter.

    Source: peft 0.21 `tuners/*/config.py`.
    """
    import peft

    row = setup.kind
    settings = dict(row.arguments)
    if row.start_only:  # what a step needs is LoRA's; its start values need real weights
        settings = {name: value for name, value in settings.items() if name != "init_lora_weights"}
    settings["task_type"] = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    if setup.objective_spec.head != "vocabulary":  # of a score peft trains the head beside the adapters
        settings["task_type"] = "SEQ_CLS" if setup.objective_spec.head == "score" else "FEATURE_EXTRACTION"
    elif has_audio(model.config):
        settings["task_type"] = None  # whose forward takes sound: peft's own of that task names input_ids
    if row.adapts_matrices:
        settings["target_modules"] = target_modules(model, setup.lora_targets, seeing=setup.builds_encoders)
        settings["modules_to_save"] = list(setup.modules_to_save) or None
        if setup.trained_layers:
            settings["layers_to_transform"] = _trained_layers(model, setup)
            if isinstance(settings["target_modules"], str):  # which peft refuses beside the layers' numbers
                linears = [linear for kind in spec_of(model).layer_kinds for linear in kind.linears]
                settings["target_modules"] = sorted({linear.name.rpartition(".")[2] for linear in linears})
        if refused := sorted(unadaptable_modules(model)):
            settings["exclude_modules"] = refused
    if row.form == "low-rank":
        size = {"init_r": setup.lora_rank} if row.name == "adalora" else {"r": setup.lora_rank}
        settings |= {**size, "lora_alpha": 2 * setup.lora_rank, "lora_dropout": setup.lora_dropout, "bias": "none"}
    elif row.form in _RANK_ARGUMENTS:
        settings[_RANK_ARGUMENTS[row.form]] = setup.lora_rank
    elif row.form == "scales":
        settings["feedforward_modules"] = scaled_inputs(spec_of(model), settings["target_modules"])
    elif row.form == "norms":
        settings["target_modules"] = _norm_modules(model)
    elif row.form == "rows":
        settings["token_indices"] = list(range(setup.lora_rank))
    return getattr(peft, row.config)(**settings)


def _trained_layers(model: Any, setup: TrainSetup) -> list[int]:
    return list(layer_numbers(setup.trained_layers, num_layers(model.config)))


def freeze_others(model: Any, setup: TrainSetup) -> None:
    """Freezes whatever is no trained layer's (LLaMA-Factory 0.9 `_setup_freeze_tuning`)."""
    named = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
    trained = set(_trained_layers(model, setup))
    for name, parameter in model.named_parameters():
        match = named.search(f".{name}")
        parameter.requires_grad_(match is not None and int(match[1]) in trained)
        if parameter.requires_grad and setup.widens_trained:
            parameter.data = parameter.data.to(torch.float32)
    if not (setup.checkpointing and setup.trainer.checkpoints_trained):
        return
    # the trained layers alone are checkpointed, and their input, not the embeddings, asks for gradients (LLaMA-Factory
    # 0.9.5 `get_custom_gradient_checkpointing_func`)
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.disable_input_require_grads()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.gradient_checkpointing = any(parameter.requires_grad for parameter in module.parameters())
            if module.gradient_checkpointing:
                module.register_forward_pre_hook(_ask)


def _ask(_: Any, inputs: tuple[Any, ...]) -> None:
    inputs[0].requires_grad_(True)


def _norm_modules(model: Any) -> list[str]:
    """Full names of the norms that LN-tuning trains."""
    spec = spec_of(model)
    inside = {norm.name for layer in spec.layer_kinds for norm in layer.norms if of_tokens(norm)}
    names = [name for name, _ in model.named_modules()]
    layers = [name for name in names if any(name.endswith(f".{norm_name}") for norm_name in inside)]
    last = spec.outer_norms[-1].name if spec.outer_norms else ""
    return [*layers, *(name for name in names if last and (name == last or name.endswith(f".{last}")))]


def add_adapters(model: Any, setup: TrainSetup) -> Any:
    """`model` wrapped by peft, frozen base, adapters in `setup.resolved_adapter_dtype`.

    Source: peft 0.21 `get_peft_model`; TRL 1.16 `SFTTrainer.__init__` casts a quantized base's adapters to bf16.
    """
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, peft_config(model, setup))
    dtype = DTYPES[setup.resolved_adapter_dtype]
    every = setup.quantized and setup.stack == "trl"  # TRL casts whatever is trained
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and parameter.dtype is not dtype and (every or "modules_to_save" not in name):
            parameter.data = parameter.data.to(dtype)
    return wrapped
