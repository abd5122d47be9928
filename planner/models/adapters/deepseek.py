"""DeepSeek V2 and V3: latent attention (low-rank q and kv) and routed experts with shared ones."""

from planner.models.adapters.fields import Fields
from planner.models.adapters.moe import moe_mlp
from planner.models.adapters.parts import assemble, expert_stack, gated, gated_mlp, linear, norm
from planner.models.spec import AttentionSpec, EmbeddingSpec, LayerSpec, LinearSpec, ModelSpec, NormSpec


def build(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """The spec of a DeepSeek decoder.

    Not counted: multi-token-prediction layers (transformers builds none) and the router's correction bias (a buffer).
    """
    version = 2 if fields.text("model_type") == "deepseek_v2" else 3
    hidden = fields.count("hidden_size")
    vocab = fields.count("vocab_size", kind="vocab")
    num_layers = fields.count("num_hidden_layers", kind="layers")
    num_heads = fields.count("num_attention_heads", kind="heads")
    activation = fields.text("hidden_act", default="silu")
    nope = fields.count("qk_nope_head_dim", default=128)
    rope = fields.count("qk_rope_head_dim", default=64)
    value = fields.count("v_head_dim", default=128)
    attention, latent_norms = _latent_attention(fields, hidden, num_heads, nope, rope, value)

    num_dense = fields.count("first_k_dense_replace", kind="layers", default=0 if version == 2 else 3, at_least=0)
    dense = fields.count("intermediate_size", kind="intermediate")
    num_experts = fields.count("n_routed_experts", kind="expert", default=64 if version == 2 else 256)
    num_active = fields.count("num_experts_per_tok", kind="expert")
    intermediate = fields.count("moe_intermediate_size", kind="intermediate")
    shared = intermediate * fields.count("n_shared_experts", kind="expert", default=2 if version == 2 else 1)
    mlp_bias = fields.flag("mlp_bias", False) if version == 2 else False
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden), *latent_norms)

    def layer(moe: bool) -> LayerSpec:
        if moe:
            mlp = (
                *expert_stack(hidden, intermediate, num_experts, num_active),
                linear("mlp.gate", "router", hidden, num_experts, module="parameter"),
                *gated_mlp(hidden, shared, bias=mlp_bias, prefix="mlp.shared_experts"),
            )
        else:
            mlp = gated_mlp(hidden, dense, bias=mlp_bias)
        return LayerSpec(
            kind="latent+moe" if moe else "latent",
            linears=attention + mlp,
            norms=norms,
            attention=AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=nope + rope,
                value_head_dim=value,
                rotary_fraction=rope / (nope + rope),
            ),
            mlp=moe_mlp(activation, num_experts, num_active, intermediate, shared) if moe else gated(dense, activation),
        )

    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class=f"DeepseekV{version}ForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_keys=tuple(index >= num_dense for index in range(num_layers)),
        make_layer=layer,
        tied=fields.flag("tie_word_embeddings", False),
        embeddings=(EmbeddingSpec(name="embed_tokens", num_rows=vocab, dim=hidden),),
        final_norm=(norm("norm", hidden),),
    )


def _latent_attention(
    fields: Fields, hidden: int, num_heads: int, nope: int, rope: int, value: int
) -> tuple[tuple[LinearSpec, ...], tuple[NormSpec, ...]]:
    """Source: DeepSeek-AI, 2024, DeepSeek-V2, section 2.1, arXiv 2405.04434; names as in transformers."""
    bias = fields.flag("attention_bias", False)
    kv_rank = fields.count("kv_lora_rank", default=512)
    # Absent means the class default, null means a direct projection.
    q_rank = fields.optional_count("q_lora_rank")
    if q_rank is None and not fields.has("q_lora_rank"):
        q_rank = 1536
    q_out = num_heads * (nope + rope)
    norms: tuple[NormSpec, ...] = ()
    if q_rank is None:
        queries: tuple[LinearSpec, ...] = (linear("self_attn.q_proj", "q", hidden, q_out),)
    else:
        queries = (
            linear("self_attn.q_a_proj", "mixer", hidden, q_rank, bias),
            linear("self_attn.q_b_proj", "mixer", q_rank, q_out),
        )
        norms = (norm("self_attn.q_a_layernorm", q_rank),)
    linears = (
        *queries,
        linear("self_attn.kv_a_proj_with_mqa", "mixer", hidden, kv_rank + rope, bias),
        linear("self_attn.kv_b_proj", "mixer", kv_rank, num_heads * (nope + value)),
        linear("self_attn.o_proj", "o", num_heads * value, hidden, bias),
    )
    return linears, (*norms, norm("self_attn.kv_a_layernorm", kv_rank))
