"""T5 and Flan-T5: encoder and decoder, relative positions held by the first layer of each, no scaling of logits."""

from planner.errors import ConfigError
from planner.models.adapters.fields import Fields
from planner.models.adapters.parts import assemble, gated, linear, norm, plain
from planner.models.spec import AttentionSpec, EmbeddingSpec, LayerSpec, LinearSpec, ModelSpec


def build(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """The layers are the encoder's, then the decoder's; transformers 5 ties the head whatever the config says."""
    hidden = fields.count("d_model", "hidden_size")
    vocab = fields.count("vocab_size", kind="vocab")
    num_encoder = fields.count("num_layers", "num_hidden_layers", kind="layers")
    num_decoder = fields.count("num_decoder_layers", kind="layers", default=num_encoder)
    num_heads = fields.count("num_heads", "num_attention_heads", kind="heads")
    head_dim = fields.count("d_kv", default=64)
    inner = fields.count("d_ff", kind="intermediate")
    buckets = fields.count("relative_attention_num_buckets", kind="intermediate", default=32)
    projection = fields.text("feed_forward_proj", default="relu")
    is_gated = projection.startswith("gated-")
    if projection.count("-") > 1 or (projection.count("-") == 1 and not is_gated):
        raise ConfigError(
            f"{fields.where}: feed_forward_proj must be like 'relu' or 'gated-gelu', got {projection!r}",
            hint="correct the field in config.json",
        )
    activation = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")

    def attention(prefix: str) -> tuple[LinearSpec, ...]:
        width = num_heads * head_dim
        return (
            linear(f"{prefix}.q", "q", hidden, width),
            linear(f"{prefix}.k", "k", hidden, width),
            linear(f"{prefix}.v", "v", hidden, width),
            linear(f"{prefix}.o", "o", width, hidden),
        )

    def mlp(prefix: str) -> tuple[LinearSpec, ...]:
        down = linear(f"{prefix}.wo", "down", inner, hidden)
        if not is_gated:
            return (linear(f"{prefix}.wi", "up", hidden, inner), down)
        return (
            linear(f"{prefix}.wi_0", "gate", hidden, inner),
            linear(f"{prefix}.wi_1", "up", hidden, inner),
            down,
        )

    def softmax(cross: bool = False) -> AttentionSpec:
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
            rotary=False,
            cross=cross,
        )

    def layer(key: tuple[bool, bool]) -> LayerSpec:
        decoder, first = key
        last = 2 if decoder else 1
        linears = attention("layer.0.SelfAttention")
        if decoder:
            linears += attention("layer.1.EncDecAttention")
        return LayerSpec(
            kind="decoder" if decoder else "encoder",
            linears=linears + mlp(f"layer.{last}.DenseReluDense"),
            norms=tuple(norm(f"layer.{index}.layer_norm", hidden) for index in range(last + 1)),
            attention=softmax(),
            cross_attention=softmax(cross=True) if decoder else None,
            mlp=gated(inner, activation) if is_gated else plain(inner, activation),
            num_other_params=buckets * num_heads if first else 0,
            path="decoder.block" if decoder else "encoder.block",
        )

    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="T5ForConditionalGeneration",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=tuple((False, index == 0) for index in range(num_encoder))
        + tuple((True, index == 0) for index in range(num_decoder)),
        make_layer=layer,
        tied=True,
        embeddings=(EmbeddingSpec(name="shared", num_rows=vocab, dim=hidden),),
        final_norm=(norm("encoder.final_layer_norm", hidden), norm("decoder.final_layer_norm", hidden)),
        is_encoder_decoder=True,
        attentions=("eager", "sdpa"),
    )
