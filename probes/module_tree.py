"""The formula's `ModelSpec` of any decoder that transformers builds, read off its module tree on meta tensors; what
sees images or sound lies idle in it.

    python -P -m probes.module_tree < config.json > spec.json

Matrices, norms and tables are what the tree holds, to the element. What a tree does not say is taken from the
configuration (heads, windows, activation) or from what modules are called (which matrix is the query's). Nothing of
`modeling_*.py` that a model brings along is run.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.interchange import to_jsonable
from planner.models.adapters.parts import seeing_ahead
from planner.models.spec import AttentionSpec, EmbeddingSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec, Role
from probes.stack.build import bare_model
from probes.stack.configs import layers_of, load_config

MAX_LAYERS = 1000
_ATTENTION = re.compile(r"att|mixer", re.IGNORECASE)
_IDLE = re.compile(r"vision|visual|audio|image|multi_modal|embed_vision|connector")
SEES_AHEAD = frozenset({"paligemma"})
"""Types whose prompts and pictures are seen both ways, which takes a mask."""
_BESIDE = re.compile(r"altup|laurel|per_layer")
"""Gemma 3n's matrices beside attention and MLP."""
_ROLES: tuple[tuple[Role, str], ...] = (
    ("qkv", r"qkv|qkv_proj|query_key_value|c_attn|in_proj|wqkv|Wqkv|qkv_layer|attn_qkv"),
    ("q", r"q|q_proj|query|q_lin|wq|query_proj"),
    ("k", r"k|k_proj|key|k_lin|wk|key_proj"),
    ("v", r"v|v_proj|value|v_lin|wv|value_proj"),
    ("o", r"o|o_proj|out_proj|dense|c_proj|out_lin|wo|Wo|linear_attn|attention_output|proj"),
)
_GATE = re.compile(r"gate|gate_proj|w1|wi_0|linear_v|c_fc_0")


def spec_of_tree(raw_config: Mapping[str, Any], *, model_id: str, source: str) -> ModelSpec:
    """The module inventory of the model that transformers builds of a raw configuration.

    Raises:
        ValueError: an encoder-decoder, no list of layers, or layers without attention of a kind the formula knows.
    """
    config = load_config(raw_config)
    if config.is_encoder_decoder:
        raise ValueError("encoder-decoders need an adapter of their own")
    text = config.get_text_config()
    model = bare_model(config, torch.bfloat16, "eager")
    layers, path = _stack(model)
    rotary = any("rotary" in name or "rope" in name for name, _ in model.named_modules())
    kinds, order, unseen = _kinds(config.model_type, layers, text, path, rotary)
    if all(layer.attention is None for layer in kinds):
        raise ValueError("no layer has attention: the formula needs an adapter for it")
    head, table = _ends(model)
    inside = {id(one) for layer in layers for one in layer.parameters()}
    inside |= {id(one) for one in head.parameters(recurse=False)}
    positions = getattr(text, "max_position_embeddings", None)
    return ModelSpec(
        model_id=model_id,
        model_type=str(raw_config["model_type"]),
        built_class=type(model).__name__,
        hidden_size=int(text.hidden_size),
        vocab_size=table.num_embeddings,
        max_position_embeddings=positions if isinstance(positions, int) else None,
        layer_kinds=kinds,
        layer_order=order,
        head=_linear("lm_head", head, "other"),
        tied=head.weight is table.weight,
        **_outside(model, inside, path, unseen),
        logit_softcap=bool(getattr(text, "final_logit_softcapping", None)),
        attentions=_attentions(model, text),
        config=dict(raw_config),
        config_source=source,
        from_tree=True,
    )


def _stack(model: nn.Module) -> tuple[list[Any], str]:
    """The layers, and the name of the list that holds them.

    Raises:
        ValueError: no such list, or more than MAX_LAYERS of them.
    """
    layers = layers_of(model)
    if len(layers) > MAX_LAYERS:
        raise ValueError(f"{len(layers)} layers, more than {MAX_LAYERS}")
    lists = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one))
    return layers, next(name for name, one in lists if one[0] is layers[0])


def _ends(model: Any) -> tuple[nn.Linear, nn.Embedding]:
    """The output head and the table of token embeddings.

    Raises:
        ValueError: either is something else.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(table, nn.Embedding):
        raise ValueError("no token embedding and linear head")
    return head, table


def _kinds(
    model_type: str, layers: list[Any], text: Any, path: str, rotary: bool
) -> tuple[tuple[LayerSpec, ...], tuple[int, ...], Counter[LayerSpec]]:
    """The kinds of layer that text sees, of each such layer the kind, and the others: Llama 3.2 Vision leaves layers
    out where there is no picture."""
    kinds: dict[LayerSpec, int] = {}
    unseen: Counter[LayerSpec] = Counter()
    order = []
    for index, layer in enumerate(layers):
        one = _layer(layer, index, text, path, rotary)
        if hasattr(layer, "cross_attn"):
            unseen[replace(one, kind="idle", attention=None, mlp=None)] += 1
            continue
        one = seeing_ahead(one) if model_type in SEES_AHEAD else one
        order.append(kinds.setdefault(one, len(kinds)))
    return tuple(kinds), tuple(order), unseen


def _attentions(model: Any, text: Any) -> tuple[str, ...]:
    """What the class supports, and the text's own inside it (PaliGemma 2's Gemma 2 has no SDPA)."""
    parts = (model, *(one for one in model.modules() if getattr(one, "config", None) is text))
    kinds = {"sdpa": "_supports_sdpa", "flash-attention-2": "_supports_flash_attn"}
    return ("eager", *(kind for kind, flag in kinds.items() if all(getattr(one, flag, True) for one in parts)))


def _outside(model: Any, inside: set[int], path: str, unseen: Counter[LayerSpec]) -> dict[str, Any]:
    """What stands before and after the layers (at `path`), as `ModelSpec` names it.

    Args:
        inside: ids of the parameters of the layers and the head; `unseen`: layers that text does not see.
    """
    sizes: Counter[str] = Counter()
    embeddings, linears, norms = [], [], []
    towers: dict[tuple[str, str], list[LinearSpec]] = {}
    seen = set(inside)
    for name, module in model.named_modules():
        if name.startswith(f"{path}."):
            continue
        leaf, idle = name.rpartition(".")[2], _IDLE.search(name)
        own = {key: one for key, one in module.named_parameters(recurse=False) if id(one) not in seen}
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) and weight is not None and not idle:
            # a tied head has been seen: its table is counted here
            if id(weight) not in seen or "weight" not in own:
                embeddings.append(EmbeddingSpec(name=leaf, num_rows=weight.shape[0], dim=weight.shape[1]))
                seen.add(id(weight))
            continue
        seen |= {id(one) for one in own.values()}
        size = sum(one.numel() for one in own.values())
        if isinstance(module, nn.Linear) and own and idle:
            place, number, inner = _numbered(name)
            towers.setdefault((place, number), []).append(_linear(inner, module, "other"))
        elif isinstance(module, nn.Linear) and own:
            linears.append(_linear(leaf, module, "other"))
        elif idle or not _is_norm(module):
            sizes["num_idle_other_params" if idle else "num_outer_other_params"] += size
        elif size or not list(module.parameters()):
            norms.append(_norm(leaf, module, 1))
    found = {"embeddings": tuple(embeddings), "outer_linears": tuple(linears), "outer_norms": tuple(norms)}
    return {**found, "idle_layers": (*_alike(towers), *unseen.items()), **sizes}


def _numbered(name: str) -> tuple[str, str, str]:
    """A module's name around its first number: ("visual.blocks", "3", "attn.qkv"); without one, ("", "", name)."""
    found = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", name)
    return (found[1], found[2], found[3]) if found else ("", "", name)


def _alike(towers: Mapping[tuple[str, str], list[LinearSpec]]) -> tuple[tuple[LayerSpec, int], ...]:
    """The matrices of layers that see no text token, alike layers of one list counted together."""
    counts: dict[LayerSpec, int] = {}
    for (place, _), linears in towers.items():
        layer = LayerSpec(kind="idle", linears=tuple(linears), norms=(), attention=None, mlp=None, path=place)
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(counts.items())


def _layer(layer: nn.Module, index: int, text: Any, path: str, rotary: bool) -> LayerSpec:
    """One decoder layer as the formula sees it."""
    hidden = int(text.hidden_size)
    modules = dict(layer.named_modules())
    linears = list(_linears(modules, hidden, text))
    attention = _attention(linears, modules, index, text, rotary)
    norms = tuple(
        _norm(name, one, _rows(name, one, attention, hidden)) for name, one in modules.items() if _is_norm(one)
    )
    counted = sum(one.num_weights + one.num_bias for one in linears) + sum(one.num_params for one in norms)
    holders = {one: one.name.rpartition(".")[0].rpartition(".")[2] for one in norms}  # of a norm, the module around it
    whole = [one for one, holder in holders.items() if one.size == hidden and not _ATTENTION.search(holder)]
    parallel = getattr(text, "use_parallel_residual", getattr(text, "parallel_attn", None))
    one_norm = len(whole) == 1 and not any(  # ModernBERT's first layer has an identity for its first norm
        isinstance(one, nn.Identity) and "norm" in name for name, one in modules.items()
    )
    window = None if attention is None else attention.window_tokens
    kind = "full" if window is None else f"sliding-{window}"
    if attention is not None and attention.kind == "linear":
        kind = "linear-attention"
    mlp = _mlp(linears, modules, text)
    return LayerSpec(
        kind=f"{kind}+moe" if mlp is not None and mlp.kind == "moe" else kind,
        linears=tuple(linears),
        norms=norms,
        attention=attention,
        mlp=mlp,
        parallel_residual=one_norm if parallel is None else bool(parallel),
        num_other_params=sum(one.numel() for one in layer.parameters()) - counted,
        path=path,
    )


def _linears(modules: Mapping[str, nn.Module], hidden: int, text: Any) -> Iterator[LinearSpec]:
    """The matrices of a layer; stacks of experts are bare parameters."""
    active = _first(text, "num_experts_per_tok", "top_k_experts", "moe_topk", "top_k", "num_experts_per_token") or 1
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    for name, module in modules.items():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            one = _linear(name, module, "other")
            yield _linear(name, module, _role(one, modules, hidden, text))
            continue
        for key, value in module.named_parameters(recurse=False):
            if experts and tuple(value.shape) == (experts, hidden) and key == "weight":
                yield LinearSpec(
                    name=name,
                    role="router",
                    in_features=hidden,
                    out_features=experts,
                    bias=getattr(module, "bias", None) is not None,
                    module="parameter",
                )
                continue
            if value.dim() != 3 or value.shape[0] != experts or hidden not in value.shape[1:]:
                continue
            num = value.shape[0]
            up = "down" not in key and "w2" not in key
            wide, narrow = max(value.shape[1:]), min(value.shape[1:])
            other = wide if narrow == hidden else narrow
            yield LinearSpec(
                name=f"{name}.{key}",
                role="down" if not up else "gate_up" if "gate" in key else "up",
                in_features=hidden if up else other,
                out_features=other if up else hidden,
                bias=any(one == f"{key}_bias" for one, _ in module.named_parameters(recurse=False)),
                module="parameter",
                num=num,
                num_active=min(active, num),
            )


def _linear(name: str, module: Any, role: Role) -> LinearSpec:
    conv1d = not isinstance(module, nn.Linear)
    rows, columns = module.weight.shape if conv1d else reversed(module.weight.shape)
    return LinearSpec(
        name=name,
        role=role,
        in_features=rows,
        out_features=columns,
        bias=module.bias is not None,
        module="conv1d" if conv1d else "linear",
        kept=not conv1d and role != "router" and type(module) is not nn.Linear,
    )


def _role(one: LinearSpec, modules: Mapping[str, nn.Module], hidden: int, text: Any) -> Role:
    """What a matrix does, by its place, its name, and in an MLP its shape."""
    place = one.name.rpartition(".")[0]
    if _BESIDE.search(one.name):
        return "other"
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    if one.in_features == hidden and one.out_features in (1, experts):
        return "router"
    if _ATTENTION.search(place):
        for role, pattern in _ROLES:
            if re.fullmatch(pattern, one.leaf):
                return role
        return "mixer"
    if one.in_features == hidden and one.out_features != hidden:
        if "gate_up" in one.leaf or one.leaf in ("gate_and_up_proj", "wi", "Wi"):
            return "gate_up"
        return "gate" if _GATE.fullmatch(one.leaf) else "up"
    if one.out_features == hidden and one.in_features != hidden:
        return "down"
    return "other"


def _attention(
    linears: list[LinearSpec], modules: Mapping[str, nn.Module], index: int, text: Any, rotary: bool
) -> AttentionSpec | None:
    roles = {one.role: one for one in linears}
    heads = _first(text, "num_attention_heads", "n_head")
    if not heads or not ({"q", "qkv"} & roles.keys()):
        if any(_ATTENTION.search(one.name.rpartition(".")[0]) for one in linears):
            raise ValueError("a mixer of tokens without queries, keys and values: the formula needs an adapter for it")
        return None
    place = roles["q" if "q" in roles else "qkv"].name.rpartition(".")[0]
    module = modules[place]
    out = roles["o"].in_features if "o" in roles else int(text.hidden_size)
    dim = getattr(module, "head_dim", None) or out // heads
    num_kv, value_dim = _keys_and_values(roles, module, text, heads, dim)
    rotated = getattr(text, "no_rope_layers", None)  # holds 1 where rotary embeddings ARE applied
    if rotated:
        rotary = rotary and bool(rotated[index])
    factor = (getattr(text, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=num_kv,
        head_dim=dim,
        value_head_dim=value_dim,
        window_tokens=_window(module, index, text),
        rotary=rotary,
        rotary_fraction=float(factor) if isinstance(factor, (int, float)) else 1.0,
        softcap=bool(getattr(text, "attn_logit_softcapping", None)),
        sinks=any("sinks" in name for name, _ in module.named_parameters(recurse=False)),
    )


def _keys_and_values(
    roles: Mapping[Any, LinearSpec], module: nn.Module, text: Any, heads: int, dim: int
) -> tuple[int, int]:
    """Number of key and value heads, and the size of a value head."""
    if "k" in roles:
        num_kv = roles["k"].out_features // dim
        return num_kv, roles["v"].out_features // num_kv if "v" in roles else dim
    if "qkv" in roles:
        return max(1, (roles["qkv"].out_features // dim - heads) // 2), dim
    if getattr(module, "is_kv_shared_layer", False):  # another layer's keys and values
        return int(text.num_key_value_heads), dim
    raise ValueError("queries without keys: latent attention needs an adapter")


def _window(module: nn.Module, index: int, text: Any) -> int | None:
    """Tokens that a layer sees, None for all."""
    types = getattr(text, "layer_types", None)
    slides = types[index] in ("sliding_attention", "chunked_attention") if types else True
    window = _first(module, "sliding_window", "window_size") or _first(text, "sliding_window", "attention_chunk_size")
    return window if getattr(text, "use_sliding_window", True) and slides and isinstance(window, int) else None


def _mlp(linears: list[LinearSpec], modules: Mapping[str, nn.Module], text: Any) -> MlpSpec | None:
    activation = str(_first(text, "hidden_activation", "hidden_act", "activation_function", "activation") or "gelu")
    stacks = [one for one in linears if one.module == "parameter"]
    dense = {one.role: one for one in linears if one.module != "parameter"}
    if stacks:
        up = next(one for one in stacks if one.role in ("gate_up", "up"))
        gated = up.role == "gate_up"
        shared = dense.get("down")
        return MlpSpec(
            kind="moe",
            intermediate_size=up.out_features // (2 if gated else 1),
            activation=activation,
            num_experts=up.num,
            num_active_experts=up.num_active,
            shared_intermediate_size=shared.in_features if shared is not None else 0,
            gated_experts=gated,
        )
    if "down" not in dense:
        return None
    if any(getattr(one, "activation_sparsity", 0) > 0 for one in modules.values()):
        activation = f"sparse-{activation}"
    kind = "gated" if {"gate", "gate_up"} & dense.keys() else "plain"
    return MlpSpec(kind=kind, intermediate_size=dense["down"].in_features, activation=activation)  # type: ignore[arg-type]


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def _norm(name: str, module: Any, rows: int) -> NormSpec:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    shape = weight.numel() if weight is not None else getattr(module, "normalized_shape", (0,))[0]
    rms = "RMS" in type(module).__name__ or not (
        isinstance(module, nn.LayerNorm) or "LayerNorm" in type(module).__name__
    )
    return NormSpec(
        name=name,
        kind="rms" if rms else "layer",
        size=int(shape),
        bias=bias is not None,
        weight=weight is not None,
        rows_per_token=rows,
    )


def _rows(name: str, module: Any, attention: AttentionSpec | None, hidden: int) -> int:
    """A norm of a head's size is applied to every head."""
    weight = getattr(module, "weight", None)
    if attention is None or weight is None or weight.numel() != attention.head_dim or hidden == attention.head_dim:
        return 1
    return attention.num_kv_heads if "k" in name.rpartition(".")[2].partition("_")[0] else attention.num_heads


def _first(holder: Any, *names: str) -> Any:
    for name in names:
        value = getattr(holder, name, None)
        if value is not None:
            return value
    return None


def main() -> int:
    """Reads a config.json on stdin; writes {"spec": ...} or {"failure": why} on stdout."""
    try:
        answer = {"spec": to_jsonable(spec_of_tree(json.load(sys.stdin), model_id="", source=""))}
    except Exception as error:  # whatever transformers makes of a stranger's configuration
        answer = {"failure": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
