"""The formula's `ModelSpec` of any decoder or encoder-decoder, read off the module tree that transformers built; what
sees images, or sound beside text, lies idle in it.

Matrices, norms and tables are what the tree holds, to the element. What a tree does not say is taken from the
configuration (heads, windows, activation) or from what modules are called (which matrix is the query's).
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from planner.core.shipped import model_types
from planner.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    FrontEnd,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    Role,
)
from probes.stack.configs import layers_of
from probes.stack.traits import norm_kind, traits_of_model

MAX_LAYERS = 1000
_ATTENTION = re.compile(r"att|mixer", re.IGNORECASE)
_SOFTMAX = re.compile(r"(?<!Delta)(?<!Linear)Attention")
"""Classes that are taken to score every pair of tokens."""
_MLP = re.compile(r"mlp|ff|feed_?forward|moe|expert|intermediate|output|DenseReluDense", re.IGNORECASE)
"""Names of what mixes no tokens; a matrix below another name, and not directly in its layer, belongs to a mixer."""
_IDLE = re.compile(r"vision|visual|audio|image|multi_modal|embed_vision|connector")
SEES_AHEAD = model_types("seen_both_ways")
"""Types whose prompts or pictures are seen both ways, which takes a mask; in Gemma 4's layers with a window its
configuration says so."""
_CROSS_ATTENTION = re.compile(r"(^|\.)(encoder_attn|crossattention|EncDecAttention)")
_SIDE_BRANCHES = re.compile(r"altup|laurel|per_layer")
"""Gemma 3n's matrices beside attention and MLP."""
_ROLES: tuple[tuple[Role, str], ...] = (
    ("qkv", r"qkv|qkv_proj|query_key_value|c_attn|wqkv|Wqkv|qkv_layer|attn_qkv"),
    ("q", r"q|q_proj|query|q_lin|wq|query_proj"),
    ("k", r"k|k_proj|key|k_lin|wk|key_proj"),
    ("v", r"v|v_proj|value|v_lin|wv|value_proj"),
    ("o", r"o|o_proj|out_proj|dense|c_proj|out_lin|wo|Wo|linear_attn|attention_output|proj"),
)
_GATE = re.compile(r"gate|gate_proj|w1|wi_0|linear_v|c_fc_0")


def spec_of_model(model: Any, raw_config: Mapping[str, Any], *, model_id: str, source: str) -> ModelSpec:
    """The module inventory of a model of transformers, which was built of `raw_config`: of an encoder-decoder the
    encoder's layers, then the decoder's.

    Raises:
        ValueError: no list of layers, layers that are left out by chance, or no linear head over a table of tokens.
    """
    config = model.config
    if any(getattr(config, f"{half}_layerdrop", 0) for half in ("encoder", "decoder")):
        raise ValueError("layerdrop is not supported: set it to 0 in both halves")
    text = config.get_text_config()
    stacks, halves = _stacks(model), bool(config.is_encoder_decoder)
    rotary = any("rotary" in name or "rope" in name for name, _ in model.named_modules()) or _first(text, "rotary_dim")
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(table, nn.Embedding):
        raise ValueError("no token embedding and linear head")
    hidden = int(_first(text, "hidden_size") or table.embedding_dim)
    kinds, order, unseen = _kinds(config, stacks, text, hidden, bool(rotary))
    front_end = _front_end(model.get_encoder(), stacks[0][0]) if halves else None
    if halves:
        kinds = tuple(_half_layer(kind, stacks[0][0], front_end) for kind in kinds)
    inside = {id(parameter) for _, layers in stacks for layer in layers for parameter in layer.parameters()}
    inside |= {id(parameter) for parameter in head.parameters(recurse=False)}
    norms = [(norm, _size(norm) or hidden) for norm in stacks[0][1][0].modules() if _is_norm(norm)]
    refused = unadaptable_modules(model)
    kinds = tuple(_without_refused(kind, refused) for kind in kinds)
    return ModelSpec(
        model_id=model_id,
        model_type=str(raw_config["model_type"]),
        built_class=type(model).__name__,
        hidden_size=hidden,
        vocab_size=table.num_embeddings,
        max_position_embeddings=_positions(model, text),
        layer_kinds=kinds,
        layer_order=order,
        head=_linear(_name_of(model, head) if halves else "lm_head", head, "other"),
        tied=any(head.weight is module.weight for module in model.modules() if isinstance(module, nn.Embedding)),
        **_outside(model, inside, [path for path, _ in stacks], hidden, unseen),
        is_encoder_decoder=halves,
        front_end=front_end,
        traits=traits_of_model(model, [layer for _, layers in stacks for layer in layers], norms, text, front_end),
        logit_softcap=bool(_first(text, "final_logit_softcapping")),
        attentions=_attentions(model, text),
        lacks=tuple(_lacking(model, head, hidden)),
        moved_targets=_moved_targets(config.model_type),
        config=dict(raw_config),
        config_source=source,
        from_tree=True,
    )


def _positions(model: nn.Module, text: Any) -> int | None:
    """Tokens of the longest sequence; where positions are counted from behind the padding's (RoBERTa's, whose 514 rows
    are for 512 tokens), fewer than the table has rows."""
    positions = _count(text, "max_position_embeddings", "n_positions", "max_target_positions")
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            return min(positions or table.num_embeddings, int(table.num_embeddings - table.padding_idx - 1))
    return positions


def _stacks(model: nn.Module) -> list[tuple[str, list[Any]]]:
    """The list of layers with its name, or those of both halves."""
    layers = layers_of(model)
    if len(layers) > MAX_LAYERS:
        raise ValueError(f"{len(layers)} layers, more than {MAX_LAYERS}")
    lists = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not model.config.is_encoder_decoder:
        return [(next(name for name, layer_list in lists if layer_list[0] is layers[0]), layers)]
    layer_ids = {id(layer) for layer in layers}
    return [(name, [*layer_list]) for name, layer_list in lists if id(layer_list[0]) in layer_ids]


def _front_end(encoder: nn.Module, path: str) -> FrontEnd | None:
    """The convolutions in front of an encoder's layers, which hears clips as long as its table of positions; None where
    it reads text."""
    convolutions = [child for child in encoder.children() if isinstance(child, nn.Conv1d)]
    if not convolutions:
        return None
    tables = [child.num_embeddings for child in encoder.children() if isinstance(child, nn.Embedding)]
    frames = tables[0] * math.prod(convolution.stride[0] for convolution in convolutions)
    return FrontEnd(mel_bins=convolutions[0].in_channels, frames=frames, path=path.rpartition(".")[0])


def _half_layer(layer: LayerSpec, encoders: str, front_end: FrontEnd | None) -> LayerSpec:
    """A layer of the encoder, or one of the decoder, which looks at what the encoder gives."""
    clip = front_end.frames // 2 if front_end is not None else 0  # its second convolution steps by two
    assert layer.attention is not None
    if layer.path == encoders:
        attention = replace(layer.attention, causal=False)
        return replace(layer, kind="encoder", attention=attention, fixed_tokens=clip, parallel_residual=False)
    return replace(
        layer,
        kind="decoder",
        linears=tuple(
            replace(linear, of_encoder=linear.role in ("k", "v") and bool(_CROSS_ATTENTION.search(linear.name)))
            for linear in layer.linears
        ),
        cross_attention=replace(layer.attention, cross=True, causal=False, key_tokens=clip),
    )


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return str(next(name for name, submodule in model.named_modules() if submodule is module))


def _kinds(
    config: Any, stacks: Sequence[tuple[str, list[Any]]], text: Any, hidden: int, rotary: bool
) -> tuple[tuple[LayerSpec, ...], tuple[int, ...], Counter[LayerSpec]]:
    """The kinds of layer that text sees, of each such layer the kind, and what text does not see: Llama 3.2 Vision
    leaves layers out where there is no picture, a decoder alone (BART's) its attention to an encoder."""
    kinds: dict[LayerSpec, int] = {}
    unseen: Counter[LayerSpec] = Counter()
    order = []
    seen_ids: set[int] = set()
    in_windows = config is not text and _first(text, "use_bidirectional_attention") == "vision"
    for path, index, layer in ((path, index, module) for path, layers in stacks for index, module in enumerate(layers)):
        spec = _layer(layer, index, text, path, hidden, rotary, seen_ids)
        seen_ids |= {id(parameter) for parameter in layer.parameters()}
        if hasattr(layer, "cross_attn") and not hasattr(layer, "self_attn"):
            unseen[replace(spec, kind="idle", attention=None, mlp=None)] += 1
            continue
        if not config.is_encoder_decoder:
            spec, idle = _without_cross_attention(spec)
            unseen.update(idle)
        window = None if spec.attention is None else spec.attention.window_tokens
        if spec.attention is not None and (config.model_type in SEES_AHEAD or (in_windows and window)):
            spec = replace(spec, attention=replace(spec.attention, sees_ahead=True))
        order.append(kinds.setdefault(spec, len(kinds)))
    return tuple(kinds), tuple(order), unseen


def _without_cross_attention(layer: LayerSpec) -> tuple[LayerSpec, list[LayerSpec]]:
    """A layer without its attention to an encoder that is not there, and that attention as an idle layer."""
    linears = tuple(linear for linear in layer.linears if _CROSS_ATTENTION.search(linear.name))
    norms = tuple(norm for norm in layer.norms if _CROSS_ATTENTION.search(norm.name))
    if not linears:
        return layer, []
    idle = LayerSpec(kind="idle", linears=linears, norms=norms, attention=None, mlp=None, path=layer.path)
    rest = replace(
        layer,
        linears=tuple(linear for linear in layer.linears if linear not in linears),
        norms=tuple(norm for norm in layer.norms if norm not in norms),
    )
    return rest, [idle]


def _without_refused(layer: LayerSpec, refused: set[str]) -> LayerSpec:
    names = {re.sub(r"^\d+\.", "", name.removeprefix(f"{layer.path}.")) for name in refused}
    return replace(layer, linears=tuple(replace(linear, refused=linear.name in names) for linear in layer.linears))


def _lacking(model: Any, head: nn.Module, hidden: int) -> Iterator[str]:
    """What the class does not have, of `planner.models.spec.LACKING`."""
    if not model.supports_gradient_checkpointing:
        yield "checkpointing"
    around = model.get_submodule(_name_of(model, head).rpartition(".")[0])
    head_ids = {id(parameter) for parameter in head.parameters()}
    within = around is not model and any(id(parameter) not in head_ids for parameter in around.parameters())
    inner = (module for module in model.base_model.modules() if isinstance(module, nn.Linear))
    last = (hidden, head.in_features)  # OPT's
    projected = any((linear.in_features, linear.out_features) == last for linear in inner)
    if within or (head.in_features != hidden and not projected):
        yield "bare-head"
    if type(model.config).is_encoder_decoder and not model.config.is_encoder_decoder:
        yield "encoder"
    if type(model.config) not in AutoModelForCausalLM._model_mapping and not model.config.is_encoder_decoder:
        yield "causal"


def _moved_targets(model_type: str) -> tuple[tuple[str, str], ...]:
    """Names of an earlier version's modules that PEFT takes for this type's stacked parameters, each with their role.

    Source: peft 0.21 `utils/transformers_weight_conversion.py` _convert_peft_config_moe.
    """
    import peft.utils.transformers_weight_conversion as conversion

    roles = {"gate.weight": "router", "gate_up_proj": "gate_up", "down_proj": "down"}
    names = conversion._MOE_TARGET_MODULE_MAPPING.get(conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type, ""), {})
    return tuple((name, roles[of]) for name, of in names.items())


def _attentions(model: Any, text: Any) -> tuple[str, ...]:
    """What the class supports, and the text's own inside it (PaliGemma 2's Gemma 2 has no SDPA). Flash attention is
    asked for by name, which a part without it refuses (Gemma 3n's class around timm)."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    text_parts = [part for part in parts if part is model or part.config is text]
    sdpa, flash = all(part._supports_sdpa for part in text_parts), all(part._supports_flash_attn for part in parts)
    return ("eager", *["sdpa"] * sdpa, *["flash-attention-2"] * flash)


def _outside(
    model: Any, inside: set[int], paths: Sequence[str], hidden: int, unseen: Counter[LayerSpec]
) -> dict[str, Any]:
    """What stands before and after the layers (at `paths`), as `ModelSpec` names it.

    Args:
        inside: ids of the parameters of the layers and the head; `unseen`: layers that text does not see.
    """
    sizes: Counter[str] = Counter()
    embeddings, linears, norms = [], [], []
    encoders: dict[tuple[str, str], tuple[list[LinearSpec], list[NormSpec]]] = defaultdict(lambda: ([], []))
    seen, tables, within = set(inside), set[int](), tuple(f"{path}." for path in paths)
    for name, module in model.named_modules():
        if name.startswith(within):
            continue
        leaf, idle = name.rpartition(".")[2], _IDLE.search(name)
        if name.endswith((f"encoder.{leaf}", f"decoder.{leaf}")) and model.config.is_encoder_decoder:
            leaf = name.removeprefix("model.")  # both halves have such a part
        parameters = {
            key: parameter for key, parameter in module.named_parameters(recurse=False) if id(parameter) not in seen
        }
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) and weight is not None and not idle:
            # a tied head has been seen: its table is counted here
            if id(weight) not in tables and (id(weight) not in seen or "weight" not in parameters):
                rows, dim = weight.shape
                embeddings.append(EmbeddingSpec(name=leaf, num_rows=rows, dim=dim, frozen=not weight.requires_grad))
                seen.add(id(weight))
                tables.add(id(weight))
            continue
        seen |= {id(parameter) for parameter in parameters.values()}
        size = sum(parameter.numel() for parameter in parameters.values())
        # around the first number: ("visual.blocks", "3", "attn.qkv"); without one ("embed_vision", "", its own name)
        match = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", name)
        place, number, inner = match.groups() if match else (name.rpartition(".")[0], "", name.rpartition(".")[2])
        if isinstance(module, nn.Linear) and parameters and idle:
            encoders[place, number][0].append(_linear(inner, module, "other"))
        elif idle and number and parameters and _is_norm(module):
            encoders[place, number][1].append(_norm(inner, module, (_size(module), 1)))
        elif isinstance(module, nn.Linear) and parameters:
            linears.append(_linear(leaf, module, "other"))
        elif idle or not _is_norm(module):
            sizes["num_idle_other_params" if idle else "num_outer_other_params"] += size
        elif size or not list(module.parameters()):
            width = _size(module)  # less than a token's: of each part of what a matrix beside it gives
            parts = [linear.out_features // width for linear in linears if width and linear.out_features % width == 0]
            norms.append(_norm(leaf, module, (width, parts[0] if parts and width != hidden else 1)))
    outer = {"embeddings": tuple(embeddings), "outer_linears": tuple(linears), "outer_norms": tuple(norms)}
    counts: Counter[LayerSpec] = Counter()  # alike layers of one list together
    for (place, number), (matrices, inner_norms) in encoders.items():
        kind = "idle" if number else "idle-part"
        counts[LayerSpec(kind=kind, linears=tuple(matrices), norms=tuple(inner_norms), path=place)] += 1
    return {**outer, "idle_layers": (*counts.items(), *unseen.items()), **sizes}


def _layer(
    layer: nn.Module, index: int, text: Any, path: str, hidden: int, rotary: bool, seen_ids: set[int]
) -> LayerSpec:
    """One decoder layer as the formula sees it; `seen_ids`: of the parameters of layers before it, some of which it may
    share (Zamba's attention)."""
    modules = dict(layer.named_modules())
    linears = list(_linears(modules, hidden, text, seen_ids))
    attention = _attention(linears, modules, index, text, rotary, hidden)
    own_first = sorted((name for name, module in modules.items() if _is_norm(module)), key=lambda name: "." in name)
    norms = tuple(
        _norm(name, modules[name], _of_rows(name, modules[name], attention, hidden), seen_ids) for name in own_first
    )
    counted = sum(linear.num_weights + linear.num_bias for linear in linears) + sum(norm.num_params for norm in norms)
    whole = {
        norm
        for norm in norms
        if norm.size == hidden and not _ATTENTION.search(norm.name.rpartition(".")[0].rpartition(".")[2])
    }
    parallel = _first(text, "use_parallel_residual", "parallel_attn")
    one_norm = len(whole) == 1 and not any(  # ModernBERT's first layer has an identity for its first norm
        isinstance(module, nn.Identity) and "norm" in name for name, module in modules.items()
    )
    window = None if attention is None else attention.window_tokens
    kind = "full" if window is None else f"sliding-{window}"
    if attention is not None and attention.kind == "linear":
        kind = "linear-attention"
    roles = {spec.role for spec in linears}  # neither keys nor mixers: another layer's keys (Gemma 3n's last layers)
    if attention is not None and kind == "full" and "mixer" in roles and not roles & {"k", "qkv"}:
        kind = "latent"
    mlp = _mlp(linears, modules, text)
    return LayerSpec(
        kind=f"{kind}+moe" if mlp is not None and mlp.kind == "moe" else kind,
        linears=tuple(linears),
        norms=norms,
        attention=attention,
        mlp=mlp,
        parallel_residual=one_norm if parallel is None else bool(parallel),
        num_other_params=sum(parameter.numel() for parameter in layer.parameters() if id(parameter) not in seen_ids)
        - counted,
        path=path,
    )


def _linears(modules: Mapping[str, nn.Module], hidden: int, text: Any, seen_ids: set[int]) -> Iterator[LinearSpec]:
    """The matrices of a layer; stacks of experts are bare parameters; what another layer holds is there without a
    weight of its own."""
    active = _first(text, "num_experts_per_tok", "top_k_experts", "moe_topk", "top_k", "num_experts_per_token") or 1
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    for name, module in modules.items():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            linear = _linear(name, module, _role(_linear(name, module, "other"), modules, hidden, text))
            yield replace(linear, num=0) if id(module.weight) in seen_ids else linear
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
            up = not re.search("down|w2|output", f"{name}.{key}")
            wide, narrow = max(value.shape[1:]), min(value.shape[1:])
            other = wide if narrow == hidden else narrow
            yield LinearSpec(
                name=f"{name}.{key}",
                role="down" if not up else "gate_up" if "gate" in key else "up",
                in_features=hidden if up else other,
                out_features=other if up else hidden,
                bias=any(sibling == f"{key}_bias" for sibling, _ in module.named_parameters(recurse=False)),
                module="parameter",
                num=num,
                num_active=min(active, num),
            )


def _linear(name: str, module: Any, role: Role) -> LinearSpec:
    conv1d = not isinstance(module, nn.Linear)  # whose weight may be packed
    rows, columns = module.weight.shape if conv1d else (module.in_features, module.out_features)
    return LinearSpec(
        name=name,
        role=role,
        in_features=int(rows),
        out_features=int(columns),  # some classes count in tensors
        bias=module.bias is not None,
        module="conv1d" if conv1d else "linear",
        kept=not conv1d and role != "router" and type(module) is not nn.Linear,
    )


def _role(linear: LinearSpec, modules: Mapping[str, nn.Module], hidden: int, text: Any) -> Role:
    place = linear.name.rpartition(".")[0]
    if _SIDE_BRANCHES.search(linear.name):
        return "other"
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    apart = not _ATTENTION.search(place) and "shared" not in place  # those may be as narrow
    if linear.in_features == hidden and (linear.out_features == 1 or (linear.out_features == experts and apart)):
        return "router"
    if _ATTENTION.search(place) or (place and not _MLP.search(place)):
        for role, pattern in _ROLES:
            if re.fullmatch(pattern, linear.leaf):
                return role
        heads = _count(modules[place], "num_v_heads") if place else None
        return "other" if heads and linear.out_features <= 2 * heads else "mixer"  # gates, a number or two a head
    if linear.in_features == hidden and linear.out_features != hidden:
        if "gate_up" in linear.leaf or linear.leaf in ("gate_and_up_proj", "Wi"):
            return "gate_up"
        return "gate" if _GATE.fullmatch(linear.leaf) else "up"
    if linear.out_features == hidden and linear.in_features != hidden:
        return "down"
    return "other"


def _attention(
    linears: list[LinearSpec], modules: Mapping[str, nn.Module], index: int, text: Any, rotary: bool, hidden: int
) -> AttentionSpec | None:
    """How a layer mixes tokens, None where it does not. Of a class that takes no softmax of scores (state spaces,
    delta rules, recurrences) the sizes are those that the module names."""
    roles = {linear.role: linear for linear in linears}
    mixing = next((roles[role] for role in ("q", "qkv", "o", "mixer") if role in roles), None)
    if mixing is None:
        return None
    module = modules[mixing.name.rpartition(".")[0]]
    out = roles["o"].in_features if "o" in roles else hidden
    softmax = isinstance(getattr(module, "is_causal", None), bool) or bool(_SOFTMAX.search(type(module).__name__))
    heads = _count(module, "num_heads", "num_attention_heads", "n_heads", "num_v_heads") if not softmax else None
    heads = heads or _count(text, "num_attention_heads", "n_head") or _count(module, "num_heads", "n_heads") or 1
    dim = _count(module, "qk_head_dim", "head_dim", "head_k_dim", "ssm_state_size") or max(1, out // heads)
    num_kv, value_dim = _keys_and_values(roles, module, text, heads, dim)
    if not softmax:
        return AttentionSpec(
            kind="linear",
            num_heads=heads,
            num_kv_heads=_count(module, "num_k_heads") or heads,
            head_dim=dim,
            value_head_dim=max(1, out // heads),
            rotary=False,
        )
    rotated = _first(text, "no_rope_layers")  # holds 1 where rotary embeddings ARE applied
    if rotated:
        rotary = rotary and bool(rotated[index])
    factor = (_first(text, "rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    if rotated_dim := _count(module, "qk_rope_head_dim", "rotary_dim"):
        factor = rotated_dim / dim
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=num_kv,
        head_dim=dim,
        value_head_dim=value_dim,
        window_tokens=_window(module, index, text),
        rotary=rotary,
        rotary_fraction=float(factor) if isinstance(factor, (int, float)) else 1.0,
        softcap=bool(_first(text, "attn_logit_softcapping")),
        sinks=any("sinks" in name for name, _ in module.named_parameters(recurse=False)),
    )


def _keys_and_values(
    roles: Mapping[Any, LinearSpec], module: nn.Module, text: Any, heads: int, dim: int
) -> tuple[int, int]:
    """Number of key and value heads, and the size of a value head."""
    if "k" in roles and roles["k"].out_features >= dim:
        num_kv = roles["k"].out_features // dim
        return num_kv, roles["v"].out_features // num_kv if "v" in roles else dim
    if "qkv" in roles:
        return max(1, (roles["qkv"].out_features // dim - heads) // 2), dim
    if getattr(module, "is_kv_shared_layer", False):  # another layer's keys and values
        return int(text.num_key_value_heads), dim
    return heads, _count(module, "v_head_dim") or dim  # latent: every head has its own


def _count(holder: Any, *names: str) -> int | None:
    values = (_first(holder, name) for name in names)
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _window(module: nn.Module, index: int, text: Any) -> int | None:
    types = _first(text, "layer_types", "attention_layers")
    slides = types[index] in ("sliding_attention", "chunked_attention", "local") if types else True
    named = _first(text, "sliding_window", "attention_chunk_size", "window_size")
    window = _first(module, "sliding_window", "window_size") or named
    return window if _first(text, "use_sliding_window") is not False and slides and isinstance(window, int) else None


def _mlp(linears: list[LinearSpec], modules: Mapping[str, nn.Module], text: Any) -> MlpSpec | None:
    named = _first(text, "hidden_activation", "hidden_act", "activation_function", "activation", "dense_act_fn")
    classes = (type(module).__name__ for module in modules.values())
    gelu = next((name for name in classes if name.endswith("Gelu")), "gelu")  # BloomGelu is bloom_gelu
    activation = str(named or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", gelu).lower())
    stacks = [linear for linear in linears if linear.module == "parameter"]
    dense = {linear.role: linear for linear in linears if linear.module != "parameter"}
    if stacks:
        up = next((stack for stack in stacks if stack.role in ("gate_up", "up")), stacks[0])
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
    if any(getattr(module, "activation_sparsity", 0) > 0 for module in modules.values()):
        activation = f"sparse-{activation}"
    fused = "up" in dense and dense["up"].out_features == 2 * dense["down"].in_features
    kind = "gated" if fused or {"gate", "gate_up"} & dense.keys() else "plain"
    return MlpSpec(kind=kind, intermediate_size=dense["down"].in_features, activation=activation)  # type: ignore[arg-type]


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def _norm(name: str, module: Any, rows: tuple[int, int], seen_ids: Set[int] = frozenset()) -> NormSpec:
    """A norm of (size, rows a token)."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return NormSpec(
        name=name,
        kind=norm_kind(module, rows[0]),
        size=rows[0],
        bias=bias is not None and id(bias) not in seen_ids,
        weight=weight is not None and id(weight) not in seen_ids,
        rows_per_token=rows[1],
    )


_OF_HEADS = re.compile(r"([qkv])_?(norm|layernorm)")


def _of_rows(name: str, module: Any, attention: AttentionSpec | None, hidden: int) -> tuple[int, int]:
    """(Size, rows a token) of a layer's norm: one of a head's size is applied to every head. One without a weight, and
    with no shape of its own, is a head's where it is called so, else a whole token's."""
    leaf, size = name.rpartition(".")[2], _size(module)
    of_heads = _OF_HEADS.fullmatch(leaf)
    if attention is None or (size == hidden and hidden == attention.head_dim):
        return size or hidden, 1
    if not size:
        size = attention.head_dim if of_heads or "qk" in leaf else hidden
    if size != attention.head_dim:
        return size, 1
    if "qk" in leaf:
        return size, attention.num_heads + attention.num_kv_heads
    of_keys = of_heads[1] != "q" if of_heads else "k" in leaf.partition("_")[0]
    return size, attention.num_kv_heads if of_keys else attention.num_heads


def _size(module: Any) -> int:
    """Elements that a norm takes at once; 0 where it does not say."""
    weight = getattr(module, "weight", None)
    return int(weight.numel() if weight is not None else getattr(module, "normalized_shape", (0,))[0])


def _first(holder: Any, *names: str) -> Any:
    for name in names:
        # what differs from layer to layer, a configuration does not tell
        with suppress(ValueError, AttributeError, RuntimeError):
            value = getattr(holder, name, None)
            if value is not None:
                return value
    return None


def unadaptable_modules(model: Any) -> set[str]:
    """Names of the matrices whose place no adapter can take: what their class does is no product (routers that pick the
    experts themselves, products by groups), or PEFT refuses their name in a model of this type, whose code takes their
    weight without calling them.

    Source: peft 0.21 `tuners_utils.py` _check_lora_target_modules_mamba.
    """
    import peft
    from peft.tuners import tuners_utils

    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    refused = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if not _is_product(module):
            refused.add(name)
        elif check is not None:
            try:
                check(peft.LoraConfig(), model, name.rpartition(".")[2])
            except ValueError:
                refused.add(name)
    return refused


def _is_product(linear: nn.Linear) -> bool:
    """Whether a matrix's class gives a row of its width for a row of its input's, tried on meta; bitsandbytes' do."""
    if not type(linear).__module__.startswith("transformers.models."):
        return True
    weights = {name: parameter.detach().to("meta") for name, parameter in linear.named_parameters()}
    row = torch.empty((1, 1, linear.in_features), dtype=linear.weight.dtype, device="meta")
    try:
        out = torch.func.functional_call(linear, weights, (row,))
    except Exception:  # whatever it stumbles over, it takes more than a row
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, 1, linear.out_features)
