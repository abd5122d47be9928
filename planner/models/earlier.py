"""Mixtures as transformers 4 builds them: every expert is a module of `nn.Linear`s, where version 5 stacks them in bare
parameters.

Source: transformers 4.57.1 `models/*/modeling_*.py`, classes `MixtralSparseMoeBlock`, `PhimoeSparseMoeBlock`,
`Qwen2MoeSparseMoeBlock`, `Qwen3MoeSparseMoeBlock`, `Qwen3NextSparseMoeBlock`, `OlmoeSparseMoeBlock`, `DeepseekV2Moe`,
`DeepseekV3MoE`, `Glm4MoeMoE`. AFMoE's experts were an `nn.ModuleList` too when it came (`modular_afmoe.py`), LFM2-MoE's
are in its checkpoint (5.23 `conversion_mapping.py`: `feed_forward.experts.*.w1`), as its 4.58 of October 2025 built
them. gpt-oss, Llama 4, Qwen3-VL, Granite and DBRX had stacks there already.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from planner.core.shipped import by_model_type, model_types
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec, Role

_NAMES = by_model_type("expert_modules")
"""Model type -> (the block's name in a layer, an expert's first gate, its up and its down projection)."""
_COMPOSED_GELUS = ("gelu_new", "gelu_fast", "quick_gelu")
_BARE_ROUTERS = model_types("bare_routers")
"""Types whose router held a bare weight in transformers 4 too."""


@lru_cache(maxsize=64)
def of_transformers_4(model: ModelSpec) -> ModelSpec:
    """The model with its experts as modules, which bitsandbytes quantizes and PEFT adapts; itself where nothing
    differs."""
    if model.model_type not in _NAMES:
        return model
    kinds = tuple(
        replace(
            layer, linears=tuple(module for linear in layer.linears for module in _modules(linear, model.model_type))
        )
        for layer in model.layer_kinds
    )
    return replace(model, layer_kinds=kinds)


@lru_cache(maxsize=64)
def with_one_kernel_gelu(model: ModelSpec) -> ModelSpec:
    """The model whose GELU is one kernel, where transformers' `NewGELUActivation` and its like are several."""
    mlps = [(layer, layer.mlp) for layer in model.layer_kinds]
    kinds = tuple(
        replace(layer, mlp=replace(mlp, activation="gelu_pytorch_tanh"))
        if mlp is not None and mlp.activation in _COMPOSED_GELUS
        else layer
        for layer, mlp in mlps
    )
    return model if kinds == model.layer_kinds else replace(model, layer_kinds=kinds)


def has_expert_modules(layer: LayerSpec) -> bool:
    """Whether the layer's experts are modules of their own."""
    return any(linear.is_expert and not linear.is_stack for linear in layer.linears)


def built_by_transformers_4(model: ModelSpec) -> bool:
    """Whether the model is one that `of_transformers_4` changed: today's libraries cannot build it."""
    return any(map(has_expert_modules, model.layer_kinds))


def _modules(linear: LinearSpec, model_type: str) -> Iterator[LinearSpec]:
    """The modules that stand for one matrix or stack of version 5."""
    block, *leaves = _NAMES[model_type]
    if linear.is_stack:
        gate_up: tuple[tuple[str, Role], ...] = ((leaves[0], "gate"), (leaves[1], "up"))
        halves = gate_up if linear.role == "gate_up" else ((leaves[2], linear.role),)
        width = linear.out_features // len(halves)
        for leaf, role in halves:
            yield replace(linear, name=f"{block}.experts.{leaf}", role=role, out_features=width, module="linear")
    elif (
        linear.role == "router"
        and linear.name in ("mlp.gate", "mlp.router", "feed_forward.gate")
        and model_type not in _BARE_ROUTERS
    ):
        yield replace(linear, name=f"{block}.gate", module="linear", refused=False)
    else:
        yield linear
