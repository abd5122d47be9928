"""Decoders shaped like Llama: norm, attention, norm, gated MLP; each family is a row of options.

`python -m tools.build_types` reads the rows off transformers' classes: of the catalogue's types those whose module
trees are nothing else.
"""

from planner.core.records import dataclass
from planner.core.shipped import MODEL_TYPES, by_model_type
from planner.models.families.fields import Fields
from planner.models.families.parts import PRE, Decoder, gated, gated_mlp, linear, norm
from planner.models.spec import LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormStyle
from planner.setup.codec import decode

_LAYER_TYPES = ("full_attention", "sliding_attention")


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
        slides: the layers with a sliding window: "" for none, "all", every one but each `period`-th ("some"), those
            from `max_window_layers` on where `use_sliding_window` is set ("last").
        window: the class default of its size.
        renamed: activations that its class makes others of (a first release's wrong name).
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
    slides: str = ""
    window: int | None = None
    period: int = 0
    activation: str = "hidden_act"
    activation_default: str = "silu"
    renamed: tuple[tuple[str, str], ...] = ()
    attentions: tuple[str, ...] = ("eager", "sdpa", "flash-attention-2")
    norm_style: NormStyle = "rms"
    scales_logits: bool = False


def _windows(fields: Fields, options: ArchitectureOptions, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of every layer; `layer_types` says where the configuration gives it."""
    if options.slides in ("", "all") or (options.slides == "last" and not fields.flag("use_sliding_window", False)):
        window = fields.optional_count("sliding_window", kind="window") if options.slides == "all" else None
        absent = options.slides == "all" and not fields.has("sliding_window")
        return (options.window if absent else window,) * num_layers
    if options.slides == "last":
        first = fields.count("max_window_layers", kind="layers", default=options.period, at_least=0)
        full = fields.layers_of("full_attention", _LAYER_TYPES, num_layers, lambda index: index < first)
    else:
        period = fields.count("sliding_window_pattern", kind="layers", default=options.period)
        full = fields.layers_of("full_attention", _LAYER_TYPES, num_layers, lambda index: (index + 1) % period == 0)
    if all(full):
        return (None,) * num_layers
    window = fields.count("sliding_window", kind="window", default=options.window)
    return tuple(None if full_attention else window for full_attention in full)


def build(fields: Fields, family: str = "") -> ModelSpec:
    """The spec of a Llama-like decoder; `family` is its `model_type` where the configuration says none or another."""
    row = by_model_type("decoders")[family or fields.text("model_type")]
    return built(fields, decode(ArchitectureOptions, row, MODEL_TYPES.name))


def built(fields: Fields, options: ArchitectureOptions) -> ModelSpec:
    base = Decoder(fields, kv_heads=options.kv_heads, head_dim=options.head_dim)
    linears = _attention_linears(base, options)
    mlp_linears, mlp = _mlp(base, options)
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
        )

    return base.spec(
        options.built,
        _windows(fields, options, base.num_layers),
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


def _mlp(base: Decoder, options: ArchitectureOptions) -> tuple[tuple[LinearSpec, ...], MlpSpec]:
    hidden, inner = base.hidden, base.fields.count("intermediate_size", kind="intermediate")
    activation = base.fields.activation(options.activation, default=options.activation_default)
    activation = dict(options.renamed).get(activation, activation)
    if not options.fused:
        return gated_mlp(hidden, inner, bias=_flag(base.fields, options.mlp_bias)), gated(inner, activation)
    fused = (linear("mlp.gate_up_proj", "gate_up", hidden, 2 * inner), linear("mlp.down_proj", "down", inner, hidden))
    return fused, gated(inner, activation)
