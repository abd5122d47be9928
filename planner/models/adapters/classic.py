"""The GPT lineage: GPT-2, GPT-J, GPT-Neo, GPT-NeoX, BLOOM, OPT, Falcon. Layer norms, plain MLPs, biases."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from planner.errors import ConfigError
from planner.models.adapters.fields import Fields, shown
from planner.models.adapters.parts import Decoder, layer_norm, linear, plain, plain_mlp
from planner.models.spec import EmbeddingSpec, LayerSpec, LinearSpec, ModelSpec


class _Gpt(Decoder):
    """The lineage's names for the sizes, and its layer: as many heads of keys and values as of queries."""

    HIDDEN = ("n_embd", "n_embed", "hidden_size")
    LAYERS = ("n_layer", "num_layers", "num_hidden_layers")
    HEADS = ("n_head", "num_heads", "num_attention_heads")
    KV_HEADS = HEAD_DIM = ""

    def inner(self, name: str) -> int:
        """Width of the MLP, four times the hidden size where `name` is absent."""
        return self.fields.count(name, kind="intermediate", default=4 * self.hidden)

    def fused(self, prefix: str, bias: bool = True) -> tuple[LinearSpec, ...]:
        """q, k and v in one matrix, and o, as BLOOM, Falcon and GPT-NeoX call them."""
        width = (self.num_heads + 2 * self.num_kv) * self.head_dim
        return (
            linear(f"{prefix}.query_key_value", "qkv", self.hidden, width, bias),
            linear(f"{prefix}.dense", "o", self.hidden, self.hidden, bias),
        )

    def layer(
        self,
        attention: tuple[LinearSpec, ...],
        mlp: tuple[str, str],
        norms: tuple[str, ...],
        *,
        inner: int,
        activation: str,
        bias: bool = True,
        window: int | None = None,
        parallel: bool = False,
        path: str = "transformer.h",
        **softmax: Any,
    ) -> LayerSpec:
        """One layer; `bias` is that of the MLP's two matrices, which `mlp` names."""
        return LayerSpec(
            kind="full" if window is None else f"sliding-{window}",
            linears=(*attention, *plain_mlp(self.hidden, inner, mlp, bias)),
            norms=tuple(layer_norm(name, self.hidden) for name in norms),
            attention=self.softmax(window, **softmax),
            mlp=plain(inner, activation),
            parallel_residual=parallel,
            path=path,
        )

    def model(self, built: str, *layers: LayerSpec, order: Sequence[Hashable] = (), **more: Any) -> ModelSpec:
        """The whole model; `order` says which of several layers stands where, by its number."""
        return self.spec(built, order or (0,) * self.num_layers, layers.__getitem__, **more)


def gpt2(fields: Fields) -> ModelSpec:
    """GPT-2 writes its matrices as Conv1D, which PEFT adapts like nn.Linear."""
    if fields.flag("add_cross_attention", False):
        raise ConfigError(f"{fields.where}: add_cross_attention is not supported", hint="use a decoder-only GPT-2")
    base = _Gpt(fields)
    base.token_table, base.final_norm = "wte", (layer_norm("ln_f", base.hidden),)
    positions = fields.count("n_positions", "max_position_embeddings", "n_ctx", kind="vocab", default=1024)
    base.max_positions = positions
    layer = base.layer(
        (
            linear("attn.c_attn", "qkv", base.hidden, 3 * base.hidden, True),
            linear("attn.c_proj", "o", base.hidden, base.hidden, True),
        ),
        ("mlp.c_fc", "mlp.c_proj"),
        ("ln_1", "ln_2"),
        inner=base.inner("n_inner"),
        activation=fields.text("activation_function", default="gelu_new"),
        rotary=False,
    )
    layer = replace(layer, linears=tuple(replace(one, module="conv1d") for one in layer.linears))
    tables = (EmbeddingSpec(name="wpe", num_rows=positions, dim=base.hidden),)
    return base.model("GPT2LMHeadModel", layer, tied=True, tables=tables)


def gptj(fields: Fields) -> ModelSpec:
    """GPT-J: one norm per layer, attention and MLP side by side, a head with bias."""
    base = _Gpt(fields)
    base.token_table, base.final_norm = "wte", (layer_norm("ln_f", base.hidden),)
    layer = base.layer(
        base.attention(prefix="attn", o_name="out_proj"),
        ("mlp.fc_in", "mlp.fc_out"),
        ("ln_1",),
        inner=base.inner("n_inner"),
        activation=fields.text("activation_function", default="gelu_new"),
        parallel=True,
        rotary_fraction=min(fields.count("rotary_dim", default=base.head_dim), base.head_dim) / base.head_dim,
    )
    return base.model("GPTJForCausalLM", layer, head_bias=True, attentions=("eager", "flash-attention-2"))


def gpt_neo(fields: Fields) -> ModelSpec:
    """GPT-Neo: global and local layers in turn. Local layers still compute the full matrix, then mask it."""
    base = _Gpt(fields)
    base.token_table, base.final_norm = "wte", (layer_norm("ln_f", base.hidden),)
    positions = fields.count("max_position_embeddings", kind="vocab", default=2048)
    inner = base.inner("intermediate_size")
    window = fields.count("window_size", kind="window", default=256)
    layers = (
        base.layer(
            base.attention(prefix="attn.attention", o_name="out_proj", o_bias=True),
            ("mlp.c_fc", "mlp.c_proj"),
            ("ln_1", "ln_2"),
            inner=inner,
            activation=fields.text("activation_function", default="gelu_new"),
            window=one,
            rotary=False,
        )
        for one in (None, window)
    )
    return base.model(
        "GPTNeoForCausalLM",
        *layers,
        order=_neo_pattern(fields, base.num_layers),
        tied=True,
        tables=(EmbeddingSpec(name="wpe", num_rows=positions, dim=base.hidden),),
        attentions=("eager", "flash-attention-2"),
    )


def _neo_pattern(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is local: `attention_types` is [[pattern, repeats], ...], `attention_layers` written out."""
    written = fields.texts("attention_layers", num_layers, ("global", "local"))
    if written is not None:
        return tuple(one == "local" for one in written)
    types = fields.raw.get("attention_types")
    if types is None:
        return tuple(index % 2 == 1 for index in range(num_layers))
    pattern: list[bool] = []
    try:
        for names, repeats in types:
            if isinstance(repeats, bool) or not 0 < repeats <= num_layers or not 0 < len(names) <= num_layers:
                raise ValueError("repeats")
            if any(name not in ("global", "local") for name in names):
                raise ValueError("names")
            pattern += [name == "local" for name in names] * repeats
            if len(pattern) > num_layers:
                raise ValueError("length")
    except (TypeError, ValueError) as error:
        raise fields.wrong(f'attention_types must be like [[["global", "local"], 12]], got {shown(types)}') from error
    if len(pattern) != num_layers:
        raise fields.wrong(f"attention_types covers {len(pattern)} layers, num_layers is {num_layers}")
    return tuple(pattern)


def gpt_neox(fields: Fields) -> ModelSpec:
    """GPT-NeoX and Pythia: fused qkv, attention and MLP side by side, partial rotary."""
    base = _Gpt(fields)
    base.token_table, base.final_norm = "embed_in", (layer_norm("final_layer_norm", base.hidden),)
    layer = base.layer(
        base.fused("attention", fields.flag("attention_bias", True)),
        ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ("input_layernorm", "post_attention_layernorm"),
        inner=fields.count("intermediate_size", kind="intermediate"),
        activation=fields.text("hidden_act", default="gelu"),
        parallel=fields.flag("use_parallel_residual", True),
        path="gpt_neox.layers",
        rotary_fraction=fields.rotary_fraction(0.25, "rotary_pct"),
    )
    return base.model("GPTNeoXForCausalLM", layer)


def bloom(fields: Fields) -> ModelSpec:
    """BLOOM: ALiBi instead of positions, a norm after the embedding."""
    base = _Gpt(fields)
    base.token_table = "word_embeddings"
    base.final_norm = (layer_norm("word_embeddings_layernorm", base.hidden), layer_norm("ln_f", base.hidden))
    layer = base.layer(
        base.fused("self_attention"),
        ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ("input_layernorm", "post_attention_layernorm"),
        inner=4 * base.hidden,
        activation="bloom_gelu",
        rotary=False,
    )
    return base.model("BloomForCausalLM", layer, tied=True, attentions=("eager",))


def opt(fields: Fields) -> ModelSpec:
    """OPT; the 350m has narrower embeddings (project_in, project_out) and norms after the blocks."""
    base = _Gpt(fields)
    positions = fields.count("max_position_embeddings", kind="vocab", default=2048)
    narrow = fields.count("word_embed_proj_dim", default=base.hidden)
    bias = fields.flag("enable_bias", True)
    weight = fields.flag("layer_norm_elementwise_affine", True)
    last = fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm", False)
    base.final_norm = (layer_norm("final_layer_norm", base.hidden, affine=weight),) if last else ()
    layer = base.layer(
        base.attention(bias, bias, o_name="out_proj"),
        ("fc1", "fc2"),
        (),
        inner=fields.count("ffn_dim", kind="intermediate"),
        activation=fields.text("activation_function", default="relu"),
        bias=bias,
        path="model.decoder.layers",
        rotary=False,
    )
    norms = tuple(layer_norm(name, base.hidden, affine=weight) for name in ("self_attn_layer_norm", "final_layer_norm"))
    outer = (linear("project_out", "other", base.hidden, narrow), linear("project_in", "other", narrow, base.hidden))
    return base.model(
        "OPTForCausalLM",
        replace(layer, norms=norms),
        tied=True,
        tables=(EmbeddingSpec(name="embed_positions", num_rows=positions + 2, dim=base.hidden),),  # two offset rows
        head_in=narrow,
        outer_linears=outer if narrow != base.hidden else (),
    )


def falcon(fields: Fields) -> ModelSpec:
    """Falcon: fused qkv with one shared key/value head (7B) or groups (40B); `FalconLinear` is an nn.Linear for PEFT
    and none for bitsandbytes."""
    base = _Gpt(fields)
    base.token_table, base.final_norm = "word_embeddings", (layer_norm("ln_f", base.hidden),)
    bias = fields.flag("bias", False)
    new = fields.flag("new_decoder_architecture", False)
    parallel = fields.flag("parallel_attn", True)
    if new:
        base.num_kv = fields.count("num_kv_heads", "n_head_kv", kind="heads", default=base.num_heads)
        fields.divides("num_kv_heads", base.num_kv, "num_attention_heads", base.num_heads)
    elif fields.flag("multi_query", True):
        base.num_kv = 1
    num_norms = fields.count("num_ln_in_parallel_attn", kind="layers", default=2 if new else 1)
    names: tuple[str, ...] = ("ln_attn", "ln_mlp") if num_norms == 2 else ("input_layernorm",)
    layer = base.layer(
        base.fused("self_attention", bias),
        ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        names if parallel else ("post_attention_layernorm", "input_layernorm"),
        inner=base.inner("ffn_hidden_size"),
        activation=fields.text("activation", default="gelu"),
        bias=bias,
        parallel=parallel,
        rotary=not fields.flag("alibi", False),
    )
    kept = tuple(replace(one, kept=True) for one in layer.linears)
    return base.model("FalconForCausalLM", replace(layer, linears=kept), tied=True)
