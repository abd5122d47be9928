"""Decoders shaped like Llama: norm, attention, norm, gated MLP; each family is a row of options.

Source: the modelling and configuration code of transformers 5.23, one class per `model_type`; defaults of absent keys
are the defaults of its configuration classes.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.core.records import dataclass
from planner.models.families.fields import Fields
from planner.models.families.parts import PRE, SANDWICH, Decoder, gated, gated_mlp, linear, norm
from planner.models.spec import LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormStyle

_LAYER_TYPES = ("full_attention", "sliding_attention")

_ALL = ("eager", "sdpa", "flash-attention-2")

Windows = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureOptions:
    """What sets one family apart from Llama.

    Attributes:
        kv_heads, head_dim: the class default of an absent key; None: as many as heads, hidden / heads.
        bias, o_bias, mlp_bias: fixed, or the name of the config field that decides (False where it is absent); `bias`
            is that of q, k, v, and of o where `o_bias` is None.
        norms: names of the norms that stand in a layer.
        qk_norm: whether queries and keys are normalised, a head at a time.
        fused: whether q, k and v are one matrix, and gate and up another; part of each head may be rotated.
        windows: the sliding window of every layer.
    """

    built: str
    tied: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool | str = False
    o_bias: bool | None = None
    mlp_bias: bool | str = False
    norms: tuple[str, ...] = PRE
    qk_norm: bool = False
    fused: bool = False
    windows: Callable[[Fields, int], Windows] | None = None
    activation: tuple[str, ...] = ("hidden_act",)
    activation_default: str = "silu"
    attentions: tuple[str, ...] = _ALL
    norm_style: NormStyle = "rms"
    scales_logits: bool = False


def window_everywhere(fields: Fields, num_layers: int, absent: int | None = None) -> Windows:
    """`sliding_window` in every layer, null for none; `absent` is the class default."""
    window = fields.optional_count("sliding_window", kind="window")
    if window is None and not fields.has("sliding_window"):
        window = absent
    return (window,) * num_layers


def window_by_layer_types(fields: Fields, num_layers: int, is_full: Callable[[int], bool]) -> Windows:
    """`layer_types` where the config gives them, else the family's pattern."""
    full = fields.layers_of("full_attention", _LAYER_TYPES, num_layers, is_full)
    if all(full):
        return (None,) * num_layers
    window = fields.count("sliding_window", kind="window", default=4096)
    return tuple(None if full_attention else window for full_attention in full)


def window_every_nth_full(fields: Fields, num_layers: int) -> Windows:
    """Sliding except every n-th layer (Gemma 3)."""
    period = fields.count("sliding_window_pattern", kind="layers", default=6)
    return window_by_layer_types(fields, num_layers, lambda index: (index + 1) % period == 0)


def window_qwen(fields: Fields, num_layers: int) -> Windows:
    """Qwen 2 and 3: off unless `use_sliding_window`, then from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    first = fields.count("max_window_layers", kind="layers", default=28, at_least=0)
    return window_by_layer_types(fields, num_layers, lambda index: index < first)


_GEMMA2 = ArchitectureOptions(
    built="Gemma2ForCausalLM",
    tied=True,
    kv_heads=4,
    head_dim=256,
    bias="attention_bias",
    norms=SANDWICH,
    windows=lambda fields, num_layers: window_by_layer_types(fields, num_layers, lambda index: index % 2 == 1),
    activation=("hidden_activation",),
    activation_default="gelu_pytorch_tanh",
    attentions=("eager", "flash-attention-2"),  # SDPA cannot soft-cap
    norm_style="rms-fp32",
)
FAMILIES: dict[str, ArchitectureOptions] = {
    "llama": ArchitectureOptions(built="LlamaForCausalLM", bias="attention_bias", mlp_bias="mlp_bias"),
    # Remote code on the hub; its maths is Llama's (transformers builds it from a converted LlamaConfig).
    "internlm3": ArchitectureOptions(built="LlamaForCausalLM", bias="attention_bias"),
    "mistral": ArchitectureOptions(
        built="MistralForCausalLM",
        kv_heads=8,
        windows=lambda fields, num_layers: window_everywhere(fields, num_layers, absent=4096),
    ),
    "qwen2": ArchitectureOptions(built="Qwen2ForCausalLM", kv_heads=32, bias=True, o_bias=False, windows=window_qwen),
    "qwen3": ArchitectureOptions(
        built="Qwen3ForCausalLM", kv_heads=32, head_dim=128, bias="attention_bias", qk_norm=True, windows=window_qwen
    ),
    "granite": ArchitectureOptions(
        built="GraniteForCausalLM", bias="attention_bias", mlp_bias="mlp_bias", scales_logits=True
    ),
    "phi3": ArchitectureOptions(built="Phi3ForCausalLM", fused=True, windows=window_everywhere),
    "gemma": ArchitectureOptions(
        built="GemmaForCausalLM",
        tied=True,
        kv_heads=16,
        head_dim=256,
        bias="attention_bias",
        activation_default="gelu_pytorch_tanh",
        norm_style="rms-fp32",
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        built="Gemma3ForCausalLM",
        qk_norm=True,
        windows=window_every_nth_full,
        attentions=_ALL,
    ),
}


def build(fields: Fields, family: str = "", layer_path: str = "model.layers") -> ModelSpec:
    """The spec of a Llama-like decoder; `family` is its `model_type` where the configuration says none or another."""
    model_type = family or fields.text("model_type")
    options = FAMILIES[model_type]
    base = Decoder(fields, kv_heads=options.kv_heads, head_dim=options.head_dim)
    linears = _attention_linears(base, options)
    mlp_linears, mlp = _mlp(base, options, model_type)
    norms = tuple(norm(name, base.hidden) for name in options.norms)
    if options.qk_norm:
        pairs = (("self_attn.q_norm", base.num_heads), ("self_attn.k_norm", base.num_kv))
        norms += tuple(norm(name, base.head_dim, rows=heads) for name, heads in pairs)
    softcap = fields.positive("attn_logit_softcapping")
    fraction = fields.rotary_fraction() if options.fused else 1.0

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            kind=layer_kind(window),
            linears=linears + mlp_linears,
            norms=norms,
            attention=base.softmax(window, rotary_fraction=fraction, softcap=softcap),
            mlp=mlp,
            path=layer_path,
        )

    return base.spec(
        options.built,
        options.windows(fields, base.num_layers) if options.windows else (None,) * base.num_layers,
        layer,
        tied=options.tied,
        logit_softcap=fields.positive("final_logit_softcapping"),
        attentions=options.attentions,
        norm_style=options.norm_style,
        joins_rotated=options.fused,
        scales_logits=options.scales_logits,
    )


def layer_kind(window: int | None) -> str:
    """A short name for a layer with softmax attention."""
    return "full" if window is None else f"sliding-{window}"


def _flag(fields: Fields, knob: bool | str) -> bool:
    return fields.flag(knob, False) if isinstance(knob, str) else knob


def _attention_linears(base: Decoder, options: ArchitectureOptions) -> tuple[LinearSpec, ...]:
    if options.fused:
        width = base.num_heads * base.head_dim
        return (
            linear("self_attn.o_proj", "o", width, base.hidden),
            linear("self_attn.qkv_proj", "qkv", base.hidden, width + 2 * base.num_kv * base.head_dim),
        )
    bias = _flag(base.fields, options.bias)
    return base.attention(bias, bias if options.o_bias is None else options.o_bias)


def _mlp(base: Decoder, options: ArchitectureOptions, model_type: str) -> tuple[tuple[LinearSpec, ...], MlpSpec]:
    hidden, inner = base.hidden, base.fields.count("intermediate_size", kind="intermediate")
    activation = base.fields.activation(*options.activation, default=options.activation_default)
    if model_type == "gemma" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # what transformers makes of the first releases' wrong name
    if not options.fused:
        return gated_mlp(hidden, inner, bias=_flag(base.fields, options.mlp_bias)), gated(inner, activation)
    fused = (linear("mlp.gate_up_proj", "gate_up", hidden, 2 * inner), linear("mlp.down_proj", "down", inner, hidden))
    return fused, gated(inner, activation)
