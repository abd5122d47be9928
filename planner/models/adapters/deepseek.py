"""DeepSeek V2 and V3: latent attention (low-rank q and kv) and routed experts with shared ones."""

from planner.models.adapters.fields import Fields
from planner.models.adapters.moe import Mixture
from planner.models.adapters.parts import linear, norm
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, ModelSpec, NormSpec


class _Latent(Mixture):
    """Every head has keys and values of its own, whatever the configuration calls them."""

    KV_HEADS = ""


def build(fields: Fields) -> ModelSpec:
    """The spec of a DeepSeek decoder.

    Not counted: multi-token-prediction layers (transformers builds none) and the router's correction bias (a buffer).
    """
    version = 2 if fields.text("model_type") == "deepseek_v2" else 3
    nope = fields.count("qk_nope_head_dim", default=128)
    rope = fields.count("qk_rope_head_dim", default=64)
    base = _Latent(fields, head_dim=nope + rope)
    value = fields.count("v_head_dim", default=128)
    mixer, latent_norms = _latent_attention(fields, base, nope, rope, value)
    attention = AttentionSpec(
        num_heads=base.num_heads,
        num_kv_heads=base.num_heads,
        head_dim=nope + rope,
        value_head_dim=value,
        rotary_fraction=rope / (nope + rope),
    )
    num_dense = fields.count("first_k_dense_replace", kind="layers", default=0 if version == 2 else 3, at_least=0)
    dense = fields.count("intermediate_size", kind="intermediate")
    experts = base.experts("n_routed_experts", default_num=64 if version == 2 else 256)
    shared = experts.inner * fields.count("n_shared_experts", kind="expert", default=2 if version == 2 else 1)
    bias = version == 2 and fields.flag("mlp_bias", False)

    def layer(moe: bool) -> LayerSpec:
        linears, mlp = base.routed(experts, shared=shared, bias=bias) if moe else base.dense(dense, bias=bias)
        return LayerSpec(
            kind="latent+moe" if moe else "latent",
            linears=mixer + linears,
            norms=(*base.norms(), *latent_norms),
            attention=attention,
            mlp=mlp,
        )

    return base.spec(f"DeepseekV{version}ForCausalLM", [index >= num_dense for index in range(base.num_layers)], layer)


def _latent_attention(
    fields: Fields, base: Mixture, nope: int, rope: int, value: int
) -> tuple[tuple[LinearSpec, ...], tuple[NormSpec, ...]]:
    """Source: DeepSeek-AI, 2024, DeepSeek-V2, section 2.1, arXiv 2405.04434; names as in transformers."""
    hidden, num_heads = base.hidden, base.num_heads
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
