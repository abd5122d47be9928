"""The inventory of `ModelSpec` against the module tree that transformers builds on meta, module by module."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from meta_models import build_on_meta, of_causal_types

from planner.models import catalogue
from planner.models.families import spec_from_config
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec, NormSpec
from tests.whole import these

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# What configurations can switch on and off, one or more per family that knows the switch.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("HuggingFaceTB/SmolLM2-135M", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("HuggingFaceTB/SmolLM2-135M", {"num_key_value_heads": None, "tie_word_embeddings": False}),
    ("Qwen/Qwen2.5-0.5B", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 5}),
    ("Qwen/Qwen3-0.6B", {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 64}),
    ("microsoft/Phi-3-mini-4k-instruct", {"sliding_window": None, "tie_word_embeddings": True}),
    ("mistralai/Mistral-7B-v0.1", {"sliding_window": None, "head_dim": 64}),
    ("microsoft/Phi-3-mini-4k-instruct", {"partial_rotary_factor": 0.5}),
    ("google/gemma-2-2b", {"layer_types": ["full_attention"] * 26, "final_logit_softcapping": None}),
    ("google/gemma-3-1b-it", {"sliding_window_pattern": 2, "attention_bias": True}),
    ("google-t5/t5-small", {"num_decoder_layers": 3, "d_kv": 32, "relative_attention_num_buckets": 16}),
]

FIRST = {entry.model_type: entry for entry in reversed(of_causal_types())}
CASES = [
    *(pytest.param(entry.config, id=entry.model_id) for entry in these(FIRST.values(), of_causal_types())),
    *(
        pytest.param({**entry.config, **changes}, id=f"{name}-{'-'.join(changes)}")
        for name, changes in VARIANTS
        if (entry := catalogue.find(name)) is not None
    ),
]


def _rotates(layer: LayerSpec) -> bool:
    return layer.attention is not None and layer.attention.kind == "softmax" and layer.attention.rotary


def _placed(spec: ModelSpec, model: "torch.nn.Module") -> Iterator[tuple[str, LayerSpec]]:
    """Every layer with its full dotted prefix, idle parts included."""
    counts: dict[str, int] = {}
    for index in spec.layer_order:
        layer = spec.layer_kinds[index]
        number = counts.get(layer.path, 0)
        counts[layer.path] = number + 1
        yield f"{layer.path}.{number}.", layer
    for layer, repeats in spec.idle_layers:
        is_list = isinstance(model.get_submodule(layer.path), torch.nn.ModuleList)
        for number in range(repeats):
            yield (f"{layer.path}.{number}." if is_list else f"{layer.path}."), layer


Parameters = dict[str, "torch.Tensor"]


def _check_linear(model: "torch.nn.Module", prefix: str, linear: LinearSpec, parameters: Parameters) -> None:
    """The module's class, shape and bias; takes its parameters out of `parameters`."""
    name = prefix + linear.name
    if linear.module == "parameter":
        key = name if name in parameters else f"{name}.weight"
        bias = f"{name}_bias" if key == name else f"{name}.bias"
        assert parameters.pop(key).numel() == linear.num_weights, name
        assert not isinstance(model.get_submodule(key.rpartition(".")[0]), torch.nn.Linear), name
    else:
        module = model.get_submodule(name)
        conv1d = linear.module == "conv1d"
        assert isinstance(module, transformers.pytorch_utils.Conv1D if conv1d else torch.nn.Linear), name
        shape = (linear.in_features, linear.out_features) if conv1d else (linear.out_features, linear.in_features)
        assert tuple(parameters.pop(f"{name}.weight").shape) == shape, name
        bias = f"{name}.bias"
        if linear.role != "router" and type(module).__name__ != "NonDynamicallyQuantizableLinear":  # small
            assert linear.quantizes == (conv1d or type(module) is torch.nn.Linear), name  # what bitsandbytes replaces
    if linear.bias:
        assert parameters.pop(bias).numel() == linear.num_bias, name
    else:
        assert bias not in parameters, name


def _check_norms(model: "torch.nn.Module", prefix: str, norms: tuple[NormSpec, ...], parameters: Parameters) -> None:
    for norm in norms:
        module = model
        if norm.name != "router.norm":
            module = model.get_submodule(prefix + norm.name)
            assert "Norm" in type(module).__name__, prefix + norm.name
            rms = re.search("RMS|T5LayerNorm|L2Norm", type(module).__name__) is not None
            assert rms == (norm.kind == "rms")
        for key, present in (("weight", norm.weight), ("bias", norm.bias)):
            full = f"{prefix}{norm.name}.{key}"
            if present:
                assert parameters.pop(full).numel() == norm.size, full
            else:
                assert full not in parameters, full


Built = tuple[ModelSpec, "torch.nn.Module"]


@pytest.fixture(scope="module", params=CASES)
def built(request: pytest.FixtureRequest) -> Built:
    """The planner's model and transformers' own, of one configuration; both tests follow on each other."""
    config: Mapping[str, Any] = request.param
    return spec_from_config(config, model_id="test", source="test"), build_on_meta(config)


@pytest.mark.slow
def test_inventory_equals_the_module_tree(built: Built) -> None:
    """Nothing is left over on either side: every matrix, norm, table and expert stack, layer by layer."""
    spec, model = built
    assert type(model).__name__ == spec.built_class
    parameters = dict(model.named_parameters())  # a tied head appears once, under its first name
    num_linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    seen_linears = 0

    for prefix, layer in _placed(spec, model):
        for linear in layer.linears:
            _check_linear(model, prefix, linear, parameters)
            seen_linears += linear.module == "linear"
        _check_norms(model, prefix, layer.norms, parameters)
        rest = {key: value for key, value in parameters.items() if key.startswith(prefix)}
        if layer.kind != "idle-part":
            assert sum(value.numel() for value in rest.values()) == layer.num_other_params, (prefix, list(rest))
            for key in rest:
                del parameters[key]

    for table in spec.embeddings:
        key = next(key for key in parameters if f".{key}".endswith(f".{table.name}.weight"))
        assert tuple(parameters.pop(key).shape) == (table.num_rows, table.dim)
    for outer_linear in spec.outer_linears:
        key = next(key for key in parameters if f".{key}".endswith(f".{outer_linear.name}.weight"))
        _check_linear(model, key.removesuffix(f"{outer_linear.name}.weight"), outer_linear, parameters)
        seen_linears += 1
    for norm in spec.outer_norms:
        names = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{norm.name}")]
        outer = [name for name in names if not any(name.startswith(layer.path + ".") for layer in spec.layer_kinds)]
        outer = [name for name in outer if "vision" not in name and "audio" not in name]
        assert len(outer) == 1, outer
        _check_norms(model, outer[0].removesuffix(norm.name), (norm,), parameters)
    head = model.get_output_embeddings()
    assert tuple(head.weight.shape) == (spec.head.out_features, spec.head.in_features)
    assert (head.bias is not None) == spec.head.bias
    for key in ("lm_head.weight", "lm_head.bias"):
        parameters.pop(key, None)
    assert sum(value.numel() for value in parameters.values()) == (
        spec.num_idle_other_params + spec.num_outer_other_params
    ), list(parameters)
    assert seen_linears == num_linears - 1  # all but the head


@pytest.mark.slow
def test_attention_kinds_equal_the_configuration_of_transformers(built: Built) -> None:
    """Windows, linear layers, and which attention implementations the class supports."""
    spec, model = built
    supported = ["eager"]
    supported += ["sdpa"] * bool(model._supports_sdpa) + ["flash-attention-2"] * bool(model._supports_flash_attn)
    assert list(spec.attentions) == supported
    if spec.is_encoder_decoder:
        return
    text = model.config.get_text_config()
    types = getattr(text, "layer_types", None)
    if types is None:
        whole = getattr(text, "sliding_window", None)
        if spec.model_type == "gpt_neo":
            types = ["sliding_attention" if kind == "local" else "full_attention" for kind in text.attention_layers]
        else:
            types = ["sliding_attention" if whole else "full_attention"] * spec.num_layers
    for index, expected in zip(spec.layer_order, types, strict=True):
        attention = spec.layer_kinds[index].attention
        assert (attention.kind == "linear") == (expected == "linear_attention")
        assert (attention.window_tokens is not None) == (expected in ("sliding_attention", "chunked_attention"))
        if expected == "sliding_attention" and spec.model_type != "gpt_neo":
            assert attention.window_tokens == text.sliding_window
    assert bool(getattr(text, "final_logit_softcapping", None)) == spec.logit_softcap
    if spec.model_type not in ("gemma4", "deepseek_v2", "deepseek_v3", "gptj"):  # rotate another way
        part = (getattr(text, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        assert all(layer.attention.rotary_fraction == part for layer in spec.layer_kinds if _rotates(layer))
    heads = getattr(text, "num_attention_heads", None)
    softmax = [layer.attention for layer in spec.layer_kinds if layer.attention and layer.attention.kind == "softmax"]
    assert all(attention_spec.num_heads == heads for attention_spec in softmax)
