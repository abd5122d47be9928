"""Decoders shaped like Llama: norm, attention, norm, gated MLP; each family is a row of knobs.

Source: the modelling and configuration code of transformers 5.23, one class per `model_type`; defaults of absent keys
are the defaults of its configuration classes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from planner.models.adapters.fields import Fields
from planner.models.adapters.parts import PRE, SANDWICH, Decoder, gated, gated_mlp, linear, norm, plain, plain_mlp
from planner.models.spec import LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormKind, NormSpec
from planner.records import dataclass

_LAYER_TYPES = ("full_attention", "sliding_attention")

_ALL = ("eager", "sdpa", "flash-attention-2")

Windows = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """What sets one family apart from Llama.

    Attributes:
        kv_heads, head_dim: the class default of an absent key; None: as many as heads, hidden / heads.
        bias, o_bias, mlp_bias, head_bias: fixed, or the name of the config field that decides; `bias` is that of q,
            k, v, and of o where `o_bias` is None.
        bias_default: of that field when absent.
        norms: names of the norms that stand in a layer; their kind, with bias or not, with weight or not.
        qk_norm: "head" (one of head size), "full" (over all heads), "per-head" (one for each head), or None.
        qk_norm_field: the config field that switches it on.
        rotary_fraction: the class default of `partial_rotary_factor`; None where the family does not know it.
        windows: the sliding window of every layer.
        rope: whether each layer applies rotary embeddings.
    """

    built: str
    tied: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool | str = False
    o_bias: bool | str | None = None
    mlp_bias: bool | str = False
    head_bias: bool = False
    bias_default: bool = False
    norm_kind: NormKind = "rms"
    norm_bias: bool = False
    norm_weight: bool = True
    norms: tuple[str, ...] = PRE
    final_norm: str = "norm"
    qk_norm: Literal["head", "full", "per-head"] | None = None
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_field: str = ""
    qk_norm_bias: bool = False
    mlp: Literal["gated", "fused", "plain"] = "gated"
    mlp_names: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    fused_qkv: bool = False
    o_name: str = "o_proj"
    parallel: bool | str = False
    rotary_fraction: float | None = None
    windows: Callable[[Fields, int], Windows] | None = None
    rope: Callable[[Fields, int], tuple[bool, ...]] | None = None
    activation: tuple[str, ...] = ("hidden_act",)
    activation_default: str = "silu"
    attentions: tuple[str, ...] = _ALL


def window_everywhere(fields: Fields, num_layers: int, absent: int | None = None) -> Windows:
    """`sliding_window` in every layer, null for none; `absent` is the class default."""
    window = fields.optional_count("sliding_window", kind="window")
    if window is None and not fields.has("sliding_window"):
        window = absent
    return (window,) * num_layers


def window_by_layer_types(
    fields: Fields, num_layers: int, is_full: Callable[[int], bool], default_window: int
) -> Windows:
    """`layer_types` where the config gives them, else the family's pattern."""
    full = fields.layers_of("full_attention", _LAYER_TYPES, num_layers, is_full)
    if all(full):
        return (None,) * num_layers
    window = fields.count("sliding_window", kind="window", default=default_window)
    return tuple(None if one else window for one in full)


def window_every_nth_full(fields: Fields, num_layers: int, default_period: int) -> Windows:
    """Sliding except every n-th layer (Gemma 3, Olmo 3)."""
    period = fields.count("sliding_window_pattern", kind="layers", default=default_period)
    return window_by_layer_types(fields, num_layers, lambda index: (index + 1) % period == 0, 4096)


def window_qwen(fields: Fields, num_layers: int) -> Windows:
    """Qwen 2 and 3: off unless `use_sliding_window`, then from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    first = fields.count("max_window_layers", kind="layers", default=28, at_least=0)
    return window_by_layer_types(fields, num_layers, lambda index: index < first, 4096)


def _rope_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3: `no_rope_layers` holds 1 where rotary embeddings ARE applied, else every n-th layer has none."""
    given = fields.bits("no_rope_layers", num_layers)
    if given is not None:
        return given
    interval = fields.count("no_rope_layer_interval", kind="layers", default=4)
    return tuple((index + 1) % interval != 0 for index in range(num_layers))


def _window_smollm3(fields: Fields, num_layers: int) -> Windows:
    window = fields.optional_count("sliding_window", kind="window")
    if window is None or not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    rope = _rope_layers(fields, num_layers)
    return window_by_layer_types(fields, num_layers, lambda index: rope[index], window)


_OLMO2 = Knobs(
    built="Olmo2ForCausalLM",
    bias="attention_bias",
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    qk_norm="full",
)
_GLM = Knobs(
    built="GlmForCausalLM",
    kv_heads=2,
    head_dim=128,
    bias="attention_bias",
    o_bias=False,
    bias_default=True,
    rotary_fraction=0.5,
    mlp="fused",
)
_GEMMA2 = Knobs(
    built="Gemma2ForCausalLM",
    tied=True,
    kv_heads=4,
    head_dim=256,
    bias="attention_bias",
    norms=SANDWICH,
    windows=lambda fields, num_layers: window_by_layer_types(fields, num_layers, lambda index: index % 2 == 1, 4096),
    activation=("hidden_activation",),
    activation_default="gelu_pytorch_tanh",
    attentions=("eager", "flash-attention-2"),  # SDPA cannot soft-cap
)
FAMILIES: dict[str, Knobs] = {
    "llama": Knobs(built="LlamaForCausalLM", bias="attention_bias", mlp_bias="mlp_bias"),
    # Remote code on the hub; its maths is Llama's (transformers builds it from a converted LlamaConfig).
    "internlm3": Knobs(built="LlamaForCausalLM", bias="attention_bias"),
    "mistral": Knobs(
        built="MistralForCausalLM",
        kv_heads=8,
        windows=lambda fields, num_layers: window_everywhere(fields, num_layers, absent=4096),
    ),
    "qwen2": Knobs(built="Qwen2ForCausalLM", kv_heads=32, bias=True, o_bias=False, windows=window_qwen),
    "qwen3": Knobs(
        built="Qwen3ForCausalLM", kv_heads=32, head_dim=128, bias="attention_bias", qk_norm="head", windows=window_qwen
    ),
    "smollm3": Knobs(
        built="SmolLM3ForCausalLM",
        tied=True,
        kv_heads=4,
        bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=_window_smollm3,
        rope=_rope_layers,
    ),
    "granite": Knobs(built="GraniteForCausalLM", bias="attention_bias", mlp_bias="mlp_bias"),
    "ernie4_5": Knobs(
        built="Ernie4_5ForCausalLM", tied=True, kv_heads=2, head_dim=128, bias="use_bias", mlp_bias="use_bias"
    ),
    "olmo": Knobs(built="OlmoForCausalLM", bias="attention_bias", norm_kind="layer", norm_weight=False),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        built="Olmo3ForCausalLM",
        windows=lambda fields, num_layers: window_every_nth_full(fields, num_layers, 4),
    ),
    "cohere": Knobs(
        built="CohereForCausalLM",
        tied=True,
        bias="attention_bias",
        norm_kind="layer",
        norms=("input_layernorm",),
        qk_norm="per-head",
        qk_norm_field="use_qk_norm",
        parallel=True,
    ),
    "stablelm": Knobs(
        built="StableLmForCausalLM",
        kv_heads=32,
        bias="use_qkv_bias",
        o_bias=False,
        norm_kind="layer",
        norm_bias=True,
        qk_norm="per-head",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        qk_norm_field="qk_layernorm",
        parallel="use_parallel_residual",
        rotary_fraction=0.25,
    ),
    "starcoder2": Knobs(
        built="Starcoder2ForCausalLM",
        tied=True,
        kv_heads=2,
        bias="use_bias",
        mlp_bias="use_bias",
        bias_default=True,
        norm_kind="layer",
        norm_bias=True,
        mlp="plain",
        mlp_names=("mlp.c_fc", "mlp.c_proj"),
        windows=window_everywhere,
        activation_default="gelu_pytorch_tanh",
    ),
    "phi": Knobs(
        built="PhiForCausalLM",
        bias=True,
        mlp_bias=True,
        head_bias=True,
        norm_kind="layer",
        norm_bias=True,
        norms=("input_layernorm",),
        final_norm="final_layernorm",
        qk_norm="head",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        qk_norm_field="qk_layernorm",
        qk_norm_bias=True,
        rotary_fraction=0.5,
        mlp="plain",
        o_name="dense",
        parallel=True,
        activation_default="gelu_new",
    ),
    "phi3": Knobs(built="Phi3ForCausalLM", mlp="fused", rotary_fraction=1.0, fused_qkv=True, windows=window_everywhere),
    "glm": _GLM,
    "glm4": replace(_GLM, built="Glm4ForCausalLM", norms=(*PRE, "post_self_attn_layernorm", "post_mlp_layernorm")),
    "gemma": Knobs(
        built="GemmaForCausalLM",
        tied=True,
        kv_heads=16,
        head_dim=256,
        bias="attention_bias",
        activation_default="gelu_pytorch_tanh",
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        built="Gemma3ForCausalLM",
        qk_norm="head",
        windows=lambda fields, num_layers: window_every_nth_full(fields, num_layers, 6),
        attentions=_ALL,
    ),
}


def _flag(fields: Fields, knob: bool | str, default: bool) -> bool:
    return fields.flag(knob, default) if isinstance(knob, str) else knob


def build(fields: Fields, family: str = "", layer_path: str = "model.layers") -> ModelSpec:
    """The spec of a Llama-like decoder; `family` is its `model_type` where the configuration says none or another."""
    model_type = family or fields.text("model_type")
    knobs = FAMILIES[model_type]
    base = Decoder(fields, kv_heads=knobs.kv_heads, head_dim=knobs.head_dim)
    parallel = _flag(fields, knobs.parallel, False)
    linears = _attention_linears(base, knobs)
    mlp_linears, mlp = _mlp(base, knobs, model_type)
    names = knobs.norms[:1] if model_type == "stablelm" and parallel else knobs.norms
    norms = tuple(_norm(knobs, name, base.hidden) for name in names) + _qk_norms(base, knobs)
    softcap = fields.positive("attn_logit_softcapping")
    fraction = 1.0 if knobs.rotary_fraction is None else fields.rotary_fraction(knobs.rotary_fraction)
    base.final_norm = (_norm(knobs, knobs.final_norm, base.hidden),)

    def layer(key: tuple[int | None, bool]) -> LayerSpec:
        window, rope = key
        return LayerSpec(
            kind=layer_kind(window),
            linears=linears + mlp_linears,
            norms=norms,
            attention=base.softmax(window, rotary=rope, rotary_fraction=fraction, softcap=softcap),
            mlp=mlp,
            parallel_residual=parallel,
            path=layer_path,
        )

    windows = knobs.windows(fields, base.num_layers) if knobs.windows else (None,) * base.num_layers
    ropes = knobs.rope(fields, base.num_layers) if knobs.rope else (True,) * base.num_layers
    return base.spec(
        knobs.built,
        tuple(zip(windows, ropes, strict=True)),
        layer,
        tied=knobs.tied,
        head_bias=knobs.head_bias,
        logit_softcap=fields.positive("final_logit_softcapping"),
        attentions=knobs.attentions,
    )


def layer_kind(window: int | None) -> str:
    """A short name for a layer with softmax attention."""
    return "full" if window is None else f"sliding-{window}"


def _norm(knobs: Knobs, name: str, size: int) -> NormSpec:
    return NormSpec(name=name, kind=knobs.norm_kind, size=size, bias=knobs.norm_bias, weight=knobs.norm_weight)


def _attention_linears(base: Decoder, knobs: Knobs) -> tuple[LinearSpec, ...]:
    if knobs.fused_qkv:
        width = base.num_heads * base.head_dim
        return (
            linear("self_attn.o_proj", "o", width, base.hidden),
            linear("self_attn.qkv_proj", "qkv", base.hidden, width + 2 * base.num_kv * base.head_dim),
        )
    bias = _flag(base.fields, knobs.bias, knobs.bias_default)
    o_bias = bias if knobs.o_bias is None else _flag(base.fields, knobs.o_bias, knobs.bias_default)
    return base.attention(bias, o_bias, o_name=knobs.o_name)


def _mlp(base: Decoder, knobs: Knobs, model_type: str) -> tuple[tuple[LinearSpec, ...], MlpSpec]:
    hidden, inner = base.hidden, base.fields.count("intermediate_size", kind="intermediate")
    activation = base.fields.text(*knobs.activation, default=knobs.activation_default)
    if model_type == "gemma" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # what transformers makes of the first releases' wrong name
    bias = _flag(base.fields, knobs.mlp_bias, knobs.bias_default)
    if knobs.mlp == "plain":
        return plain_mlp(hidden, inner, knobs.mlp_names, bias), plain(inner, activation)
    if knobs.mlp == "gated":
        return gated_mlp(hidden, inner, bias=bias), gated(inner, activation)
    fused = (linear("mlp.gate_up_proj", "gate_up", hidden, 2 * inner), linear("mlp.down_proj", "down", inner, hidden))
    return fused, gated(inner, activation)


def _qk_norms(base: Decoder, knobs: Knobs) -> tuple[NormSpec, ...]:
    if knobs.qk_norm is None or (knobs.qk_norm_field and not base.fields.flag(knobs.qk_norm_field, False)):
        return ()
    each = knobs.qk_norm == "head"
    return tuple(
        norm(
            f"self_attn.{name}",
            base.head_dim * (1 if each else heads),
            knobs.norm_kind,
            bias=knobs.qk_norm_bias,
            rows=heads if each else 1,
        )
        for name, heads in zip(knobs.qk_norm_names, (base.num_heads, base.num_kv), strict=True)
    )
