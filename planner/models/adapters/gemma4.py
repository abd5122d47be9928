"""Gemma 4: local and global layers of different head size, shared key/value layers, per-layer embeddings, experts
beside a dense MLP, and idle vision and audio encoders.

Source: transformers 5.23, models/gemma4.
"""

from dataclasses import replace

from planner.models.adapters.fields import Fields, shown
from planner.models.adapters.gemma4_encoders import audio_tower, vision_tower
from planner.models.adapters.parts import (
    SANDWICH,
    Decoder,
    Experts,
    expert_stack,
    gated,
    gated_mlp,
    linear,
    norm,
    seeing_ahead,
)
from planner.models.spec import AttentionSpec, EmbeddingSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec

_TEXT = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 262144,
}  # fmt: skip
"""Class defaults of transformers 5.23."""
_TYPES = ("sliding_attention", "full_attention")


def build(fields: Fields) -> ModelSpec:
    """The multimodal model (`gemma4`) or the text model alone (`gemma4_text`)."""
    if fields.text("model_type") == "gemma4_text":
        return _Text(fields, "model.layers").trunk()
    text = fields.sub("text_config", _TEXT)
    trunk = _Text(text, "model.language_model.layers").trunk()
    idle: list[tuple[LayerSpec, int]] = []
    other = 0
    for name, encoder in (("vision_config", vision_tower), ("audio_config", audio_tower)):
        given = fields.optional_sub(name)
        if given is not None:
            layers, count = encoder(given, trunk.hidden_size)
            idle += layers
            other += count
    kinds = trunk.layer_kinds
    if text.raw.get("use_bidirectional_attention") == "vision":  # within the windows alone
        kinds = tuple(
            one if one.attention and one.attention.window_tokens is None else seeing_ahead(one) for one in kinds
        )
    return replace(
        trunk,
        layer_kinds=kinds,
        built_class="Gemma4ForConditionalGeneration",
        tied=fields.flag("tie_word_embeddings", True),
        idle_layers=tuple(idle),
        num_idle_other_params=other,
    )


class _Text(Decoder):
    """The text trunk."""

    def __init__(self, text: Fields, path: str) -> None:
        super().__init__(text, kv_heads=4, head_dim=256)
        self.path = path
        self.global_head_dim = text.count("global_head_dim", default=512)
        self.k_is_v = text.flag("attention_k_eq_v", False)
        self.global_kv = self.num_kv
        if self.k_is_v:
            self.global_kv = text.count("num_global_key_value_heads", kind="heads", default=self.num_kv)
            text.divides("num_global_key_value_heads", self.global_kv, "num_attention_heads", self.num_heads)
        self.window = text.count("sliding_window", kind="window", default=512)
        self.intermediate = text.count("intermediate_size", kind="intermediate")
        self.double_wide = text.flag("use_double_wide_mlp", False)
        self.per_layer = text.count("hidden_size_per_layer_input", default=256, at_least=0)
        if text.raw.get("hidden_size_per_layer_input", 256) is None:
            self.per_layer = 0
        self.bias = text.flag("attention_bias", False)
        self.activation = text.text("hidden_activation", default="gelu_pytorch_tanh")
        self.experts = None
        if text.flag("enable_moe_block", False):
            self.experts = Experts(
                text.count("num_experts", kind="expert"),
                text.count("top_k_experts", kind="expert"),
                text.count("moe_intermediate_size", kind="intermediate"),
            )
        self.full = self._pattern()
        self.first_shared = self.first_sharing(self.full, default=0)

    def _pattern(self) -> tuple[bool, ...]:
        """Whether each layer is global; the last one always is."""
        full = self.fields.layers_of("full_attention", _TYPES, self.num_layers, lambda index: (index + 1) % 6 == 0)
        full[-1] = True
        return tuple(full)

    def _sizes(self) -> list[tuple[int, int]]:
        """Head size and key/value heads of every layer: by its type as the hub says it, or by number as transformers
        saves it (`per_layer_config`)."""
        overrides = self.fields.optional_sub("per_layer_config")
        if overrides is None:
            return [
                (self.global_head_dim, self.global_kv) if full else (self.head_dim, self.num_kv) for full in self.full
            ]
        sizes = [(self.head_dim, self.num_kv)] * self.num_layers
        for key in overrides.raw:
            index = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 6 else -1
            changed = overrides.sub(key)
            if not 0 <= index < self.num_layers or set(changed.raw) - {"head_dim", "num_key_value_heads"}:
                got = f"{shown(key)}: {shown(changed.raw)}"
                raise overrides.wrong(f"expected head_dim and num_key_value_heads by layer number, got {got}")
            num_kv = changed.count("num_key_value_heads", kind="heads", default=self.num_kv)
            self.fields.divides("num_key_value_heads", num_kv, "num_attention_heads", self.num_heads)
            sizes[index] = changed.count("head_dim", default=self.head_dim), num_kv
        return sizes

    def layer(self, key: tuple[bool, bool, int, int]) -> LayerSpec:
        """One kind of layer: global or local, with its own keys and values or with another layer's."""
        full, shared, head_dim, num_kv = key
        intermediate = self.intermediate * (2 if self.double_wide and shared else 1)
        norms = [norm(name, self.hidden) for name in SANDWICH]
        norms.append(norm("self_attn.q_norm", head_dim, rows=self.num_heads))
        if not shared:
            norms.append(norm("self_attn.k_norm", head_dim, rows=num_kv))
            norms.append(norm("self_attn.v_norm", head_dim, rows=num_kv, weight=False))
        linears = [*self._attention(full, shared, head_dim, num_kv), *gated_mlp(self.hidden, intermediate)]
        if self.per_layer:
            linears.append(linear("per_layer_input_gate", "other", self.hidden, self.per_layer))
            linears.append(linear("per_layer_projection", "other", self.per_layer, self.hidden))
            norms.append(norm("post_per_layer_input_norm", self.hidden))
        made = LayerSpec(
            kind=("full" if full else f"sliding-{self.window}") + ("+shared-kv" if shared else ""),
            linears=tuple(linears),
            norms=tuple(norms),
            attention=AttentionSpec(
                num_heads=self.num_heads,
                num_kv_heads=num_kv,
                head_dim=head_dim,
                value_head_dim=head_dim,
                window_tokens=None if full else self.window,
            ),
            mlp=gated(intermediate, self.activation),
            path=self.path,
        )
        return made if self.experts is None else self._with_experts(made, self.experts)

    def _with_experts(self, layer: LayerSpec, experts: Experts) -> LayerSpec:
        """The layer with routed experts beside its dense MLP."""
        assert layer.mlp is not None
        router = linear("router.proj", "router", self.hidden, experts.num)
        names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        return replace(
            layer,
            kind=f"{layer.kind}+moe",
            linears=(*layer.linears, router, *expert_stack(self.hidden, experts, prefix="experts")),
            norms=(
                *layer.norms,
                *(norm(name, self.hidden) for name in names),
                norm("router.norm", self.hidden, weight=False),
            ),
            mlp=MlpSpec(
                kind="moe",
                intermediate_size=experts.inner,
                activation=self.activation,
                num_experts=experts.num,
                num_active_experts=experts.active,
                shared_intermediate_size=layer.mlp.intermediate_size,
            ),
            num_other_params=self.hidden + experts.num,  # the router's scale and per-expert scale
        )

    def _attention(self, full: bool, shared: bool, head_dim: int, num_kv: int) -> list[LinearSpec]:
        linears = [linear("self_attn.q_proj", "q", self.hidden, self.num_heads * head_dim, self.bias)]
        if not shared:
            linears.append(linear("self_attn.k_proj", "k", self.hidden, num_kv * head_dim, self.bias))
            if not (self.k_is_v and full):
                linears.append(linear("self_attn.v_proj", "v", self.hidden, num_kv * head_dim, self.bias))
        linears.append(linear("self_attn.o_proj", "o", self.num_heads * head_dim, self.hidden, self.bias))
        return linears

    def trunk(self) -> ModelSpec:
        """The text model."""
        tables: tuple[EmbeddingSpec, ...] = ()
        outer: tuple[LinearSpec, ...] = ()
        if self.per_layer:
            packed = self.num_layers * self.per_layer
            rows = self.fields.count("vocab_size_per_layer_input", kind="vocab", default=262144)
            tables = (EmbeddingSpec(name="embed_tokens_per_layer", num_rows=rows, dim=packed),)
            outer = (linear("per_layer_model_projection", "other", self.hidden, packed),)
            self.final_norm += (norm("per_layer_projection_norm", self.per_layer, rows=self.num_layers),)
        return self.spec(
            "Gemma4ForCausalLM",
            tuple(
                (full, index >= self.first_shared, *sizes)
                for index, (full, sizes) in enumerate(zip(self.full, self._sizes(), strict=True))
            ),
            self.layer,
            tied=True,
            tables=tables,
            outer_linears=outer,
            logit_softcap=self.fields.positive("final_logit_softcapping"),
        )
