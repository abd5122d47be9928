"""The GPT lineage: GPT-2, GPT-J, GPT-Neo, GPT-NeoX, BLOOM, OPT, Falcon. Layer norms, plain MLPs, biases."""

from dataclasses import replace

from planner.errors import ConfigError
from planner.models.adapters.fields import Fields, shown
from planner.models.adapters.parts import assemble, linear, plain, plain_mlp, softmax_attention
from planner.models.spec import EmbeddingSpec, LayerSpec, LinearSpec, ModelSpec, NormSpec


def _ln(name: str, size: int, weight: bool = True) -> NormSpec:
    return NormSpec(name=name, kind="layer", size=size, bias=weight, weight=weight)


def _heads(fields: Fields, hidden: int, *names: str) -> int:
    num_heads = fields.count(*names, kind="heads")
    fields.divides(names[0], num_heads, "hidden size", hidden)
    return num_heads


def gpt2(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """GPT-2 writes its matrices as Conv1D, which PEFT adapts like nn.Linear."""
    if fields.flag("add_cross_attention", False):
        raise ConfigError(f"{fields.where}: add_cross_attention is not supported", hint="use a decoder-only GPT-2")
    hidden = fields.count("n_embd", "hidden_size")
    vocab = fields.count("vocab_size", kind="vocab")
    num_layers = fields.count("n_layer", "num_hidden_layers", kind="layers")
    num_heads = _heads(fields, hidden, "n_head", "num_attention_heads")
    positions = fields.count("n_positions", "max_position_embeddings", "n_ctx", kind="vocab", default=1024)
    inner = fields.count("n_inner", kind="intermediate", default=4 * hidden)
    layer = LayerSpec(
        kind="full",
        linears=(
            linear("attn.c_attn", "qkv", hidden, 3 * hidden, True, "conv1d"),
            linear("attn.c_proj", "o", hidden, hidden, True, "conv1d"),
            linear("mlp.c_fc", "up", hidden, inner, True, "conv1d"),
            linear("mlp.c_proj", "down", inner, hidden, True, "conv1d"),
        ),
        norms=(_ln("ln_1", hidden), _ln("ln_2", hidden)),
        attention=softmax_attention(num_heads, num_heads, hidden // num_heads, rotary=False),
        mlp=plain(inner, fields.text("activation_function", default="gelu_new")),
        path="transformer.h",
    )
    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="GPT2LMHeadModel",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=(0,) * num_layers,
        make_layer=lambda _: layer,
        tied=fields.flag("tie_word_embeddings", True),
        embeddings=(
            EmbeddingSpec(name="wte", num_rows=vocab, dim=hidden),
            EmbeddingSpec(name="wpe", num_rows=positions, dim=hidden),
        ),
        final_norm=(_ln("ln_f", hidden),),
        max_positions=positions,
    )


def gptj(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """GPT-J: one norm per layer, attention and MLP side by side, a head with bias."""
    hidden = fields.count("n_embd", "hidden_size")
    vocab = fields.count("vocab_size", kind="vocab")
    num_layers = fields.count("n_layer", "num_hidden_layers", kind="layers")
    num_heads = _heads(fields, hidden, "n_head", "num_attention_heads")
    inner = fields.count("n_inner", kind="intermediate", default=4 * hidden)
    rotary = min(fields.count("rotary_dim", default=hidden // num_heads), hidden // num_heads)
    layer = LayerSpec(
        kind="full",
        linears=(
            linear("attn.q_proj", "q", hidden, hidden),
            linear("attn.k_proj", "k", hidden, hidden),
            linear("attn.v_proj", "v", hidden, hidden),
            linear("attn.out_proj", "o", hidden, hidden),
            *plain_mlp(hidden, inner, ("mlp.fc_in", "mlp.fc_out"), True),
        ),
        norms=(_ln("ln_1", hidden),),
        attention=softmax_attention(
            num_heads, num_heads, hidden // num_heads, rotary_fraction=rotary * num_heads / hidden
        ),
        mlp=plain(inner, fields.text("activation_function", default="gelu_new")),
        parallel_residual=True,
        path="transformer.h",
    )
    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="GPTJForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=(0,) * num_layers,
        make_layer=lambda _: layer,
        tied=fields.flag("tie_word_embeddings", False),
        embeddings=(EmbeddingSpec(name="wte", num_rows=vocab, dim=hidden),),
        final_norm=(_ln("ln_f", hidden),),
        head_bias=True,
        attentions=("eager", "flash-attention-2"),
    )


def gpt_neo(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """GPT-Neo: global and local layers in turn. Local layers still compute the full matrix, then mask it."""
    hidden = fields.count("hidden_size")
    vocab = fields.count("vocab_size", kind="vocab")
    num_layers = fields.count("num_layers", "num_hidden_layers", kind="layers")
    num_heads = _heads(fields, hidden, "num_heads", "num_attention_heads")
    positions = fields.count("max_position_embeddings", kind="vocab", default=2048)
    inner = fields.count("intermediate_size", kind="intermediate", default=4 * hidden)
    window = fields.count("window_size", kind="window", default=256)
    local = _neo_pattern(fields, num_layers)

    def layer(is_local: bool) -> LayerSpec:
        return LayerSpec(
            kind=f"sliding-{window}" if is_local else "full",
            linears=(
                linear("attn.attention.q_proj", "q", hidden, hidden),
                linear("attn.attention.k_proj", "k", hidden, hidden),
                linear("attn.attention.v_proj", "v", hidden, hidden),
                linear("attn.attention.out_proj", "o", hidden, hidden, True),
                *plain_mlp(hidden, inner, ("mlp.c_fc", "mlp.c_proj"), True),
            ),
            norms=(_ln("ln_1", hidden), _ln("ln_2", hidden)),
            attention=softmax_attention(
                num_heads, num_heads, hidden // num_heads, window if is_local else None, rotary=False
            ),
            mlp=plain(inner, fields.text("activation_function", default="gelu_new")),
            path="transformer.h",
        )

    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="GPTNeoForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=local,
        make_layer=layer,
        tied=fields.flag("tie_word_embeddings", True),
        embeddings=(
            EmbeddingSpec(name="wte", num_rows=vocab, dim=hidden),
            EmbeddingSpec(name="wpe", num_rows=positions, dim=hidden),
        ),
        final_norm=(_ln("ln_f", hidden),),
        attentions=("eager", "flash-attention-2"),
    )


def _neo_pattern(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """`attention_types` is [[pattern, repeats], ...]; `attention_layers` is the same written out."""
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
        raise ConfigError(
            f'{fields.where}: attention_types must be like [[["global", "local"], 12]], got {shown(types)}',
            hint="correct the field in config.json",
        ) from error
    if len(pattern) != num_layers:
        raise ConfigError(
            f"{fields.where}: attention_types covers {len(pattern)} layers, num_layers is {num_layers}",
            hint="correct the field in config.json",
        )
    return tuple(pattern)


def gpt_neox(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """GPT-NeoX and Pythia: fused qkv, attention and MLP side by side, partial rotary."""
    hidden = fields.count("hidden_size")
    vocab = fields.count("vocab_size", kind="vocab")
    num_layers = fields.count("num_hidden_layers", kind="layers")
    num_heads = _heads(fields, hidden, "num_attention_heads")
    inner = fields.count("intermediate_size", kind="intermediate")
    bias = fields.flag("attention_bias", True)
    layer = LayerSpec(
        kind="full",
        linears=(
            linear("attention.query_key_value", "qkv", hidden, 3 * hidden, bias),
            linear("attention.dense", "o", hidden, hidden, bias),
            *plain_mlp(hidden, inner, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), True),
        ),
        norms=(_ln("input_layernorm", hidden), _ln("post_attention_layernorm", hidden)),
        attention=softmax_attention(
            num_heads, num_heads, hidden // num_heads, rotary_fraction=fields.rotary_fraction(0.25, "rotary_pct")
        ),
        mlp=plain(inner, fields.text("hidden_act", default="gelu")),
        parallel_residual=fields.flag("use_parallel_residual", True),
        path="gpt_neox.layers",
    )
    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="GPTNeoXForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=(0,) * num_layers,
        make_layer=lambda _: layer,
        tied=fields.flag("tie_word_embeddings", False),
        embeddings=(EmbeddingSpec(name="embed_in", num_rows=vocab, dim=hidden),),
        final_norm=(_ln("final_layer_norm", hidden),),
    )


def bloom(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """BLOOM: ALiBi instead of positions, a norm after the embedding."""
    hidden = fields.count("hidden_size", "n_embed")
    vocab = fields.count("vocab_size", kind="vocab")
    num_layers = fields.count("n_layer", "num_hidden_layers", kind="layers")
    num_heads = _heads(fields, hidden, "n_head", "num_attention_heads")
    layer = LayerSpec(
        kind="full",
        linears=(
            linear("self_attention.query_key_value", "qkv", hidden, 3 * hidden, True),
            linear("self_attention.dense", "o", hidden, hidden, True),
            *plain_mlp(hidden, 4 * hidden, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), True),
        ),
        norms=(_ln("input_layernorm", hidden), _ln("post_attention_layernorm", hidden)),
        attention=softmax_attention(num_heads, num_heads, hidden // num_heads, rotary=False),
        mlp=plain(4 * hidden, "bloom_gelu"),
        path="transformer.h",
    )
    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="BloomForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=(0,) * num_layers,
        make_layer=lambda _: layer,
        tied=fields.flag("tie_word_embeddings", True),
        embeddings=(EmbeddingSpec(name="word_embeddings", num_rows=vocab, dim=hidden),),
        final_norm=(_ln("word_embeddings_layernorm", hidden), _ln("ln_f", hidden)),
        attentions=("eager",),
    )


def opt(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """OPT; the 350m has narrower embeddings (project_in, project_out) and norms after the blocks."""
    hidden = fields.count("hidden_size")
    vocab = fields.count("vocab_size", kind="vocab")
    num_layers = fields.count("num_hidden_layers", kind="layers")
    num_heads = _heads(fields, hidden, "num_attention_heads")
    positions = fields.count("max_position_embeddings", kind="vocab", default=2048)
    inner = fields.count("ffn_dim", kind="intermediate")
    narrow = fields.count("word_embed_proj_dim", default=hidden)
    bias = fields.flag("enable_bias", True)
    weight = fields.flag("layer_norm_elementwise_affine", True)
    outer: tuple[LinearSpec, ...] = ()
    if narrow != hidden:
        outer = (
            linear("project_out", "other", hidden, narrow),
            linear("project_in", "other", narrow, hidden),
        )
    last = fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm", False)
    layer = LayerSpec(
        kind="full",
        linears=(
            linear("self_attn.k_proj", "k", hidden, hidden, bias),
            linear("self_attn.v_proj", "v", hidden, hidden, bias),
            linear("self_attn.q_proj", "q", hidden, hidden, bias),
            linear("self_attn.out_proj", "o", hidden, hidden, bias),
            *plain_mlp(hidden, inner, ("fc1", "fc2"), bias),
        ),
        norms=(_ln("self_attn_layer_norm", hidden, weight), _ln("final_layer_norm", hidden, weight)),
        attention=softmax_attention(num_heads, num_heads, hidden // num_heads, rotary=False),
        mlp=plain(inner, fields.text("activation_function", default="relu")),
        path="model.decoder.layers",
    )
    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="OPTForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=(0,) * num_layers,
        make_layer=lambda _: layer,
        tied=fields.flag("tie_word_embeddings", True),
        embeddings=(
            EmbeddingSpec(name="embed_tokens", num_rows=vocab, dim=narrow),
            EmbeddingSpec(name="embed_positions", num_rows=positions + 2, dim=hidden),  # two offset rows
        ),
        final_norm=(_ln("final_layer_norm", hidden, weight),) if last else (),
        head_in=narrow,
        outer_linears=outer,
    )


def falcon(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """Falcon: fused qkv with one shared key/value head (7B) or groups (40B); `FalconLinear` is an nn.Linear for PEFT
    and none for bitsandbytes."""
    hidden = fields.count("n_embed", "hidden_size")
    vocab = fields.count("vocab_size", kind="vocab")
    num_layers = fields.count("num_hidden_layers", "n_layer", kind="layers")
    num_heads = _heads(fields, hidden, "num_attention_heads", "n_head")
    head_dim = hidden // num_heads
    inner = fields.count("ffn_hidden_size", kind="intermediate", default=4 * hidden)
    bias = fields.flag("bias", False)
    new = fields.flag("new_decoder_architecture", False)
    parallel = fields.flag("parallel_attn", True)
    if new:
        num_kv = fields.count("num_kv_heads", "n_head_kv", kind="heads", default=num_heads)
        fields.divides("num_kv_heads", num_kv, "num_attention_heads", num_heads)
    else:
        num_kv = 1 if fields.flag("multi_query", True) else num_heads
    num_norms = fields.count("num_ln_in_parallel_attn", kind="layers", default=2 if new else 1)
    if not parallel:
        names: tuple[str, ...] = ("post_attention_layernorm", "input_layernorm")
    else:
        names = ("ln_attn", "ln_mlp") if num_norms == 2 else ("input_layernorm",)
    linears = (
        linear("self_attention.query_key_value", "qkv", hidden, (num_heads + 2 * num_kv) * head_dim, bias),
        linear("self_attention.dense", "o", hidden, hidden, bias),
        *plain_mlp(hidden, inner, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), bias),
    )
    layer = LayerSpec(
        kind="full",
        linears=tuple(replace(one, kept=True) for one in linears),
        norms=tuple(_ln(name, hidden) for name in names),
        attention=softmax_attention(num_heads, num_kv, head_dim, rotary=not fields.flag("alibi", False)),
        mlp=plain(inner, fields.text("activation", default="gelu")),
        parallel_residual=parallel,
        path="transformer.h",
    )
    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="FalconForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=(0,) * num_layers,
        make_layer=lambda _: layer,
        tied=fields.flag("tie_word_embeddings", True),
        embeddings=(EmbeddingSpec(name="word_embeddings", num_rows=vocab, dim=hidden),),
        final_norm=(_ln("ln_f", hidden),),
    )
