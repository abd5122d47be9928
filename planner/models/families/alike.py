"""`--like`: a type that nobody knows, from its configuration alone, with the geometry of a kind that is named.

The sizes are read under the names that decoders' configurations have for them; what else sets the type apart from the
kind (further norms, biases, positions) is not known and makes the wide band
`planner.planning.evidence.bands.LIKE_BANDS`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.core.errors import UsageError
from planner.models.families.fields import Fields, shown
from planner.models.families.llama_like import build as llama
from planner.models.families.llama_like import layer_kind
from planner.models.families.parts import PRE, Decoder, gated, gated_mlp, linear, norm
from planner.models.spec import LayerSpec, LinearSpec, MlpSpec, ModelSpec

KINDS = LLAMA, MIXTURE = ("llama", "mixture")
SOFT_CAPPED = ("eager", "flash-attention-2")
"""SDPA cannot soft-cap."""
_NAMES = {
    "hidden_size": ("n_embd", "d_model", "dim", "embed_dim", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "n_head_kv", "num_query_groups", "multi_query_group_num"),
    "head_dim": ("kv_channels", "head_size", "attention_head_size"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim", "d_ff", "ffn_intermediate_size"),
    "vocab_size": ("padded_vocab_size", "n_vocab"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_seq_length", "seq_length", "n_ctx"),
    "hidden_act": ("hidden_activation", "activation_function", "ffn_activation"),
    "tie_word_embeddings": ("tie_embeddings",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts", "n_experts"),
    "num_experts_per_tok": (
        *("num_experts_per_token", "experts_per_token", "num_experts_per_topk", "num_selected_experts"),
        *("moe_topk", "moe_top_k", "moe_k", "moe_router_topk", "top_k_experts"),
    ),
    "moe_intermediate_size": ("expert_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": ("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    "first_k_dense_replace": ("moe_layer_start_index", "num_dense_layers", "n_dense_layers"),
    "moe_layer_freq": ("moe_layer_interval", "expert_layer_period", "interleave_moe_layer_step", "decoder_sparse_step"),
}
"""A size -> its names in the configurations of other types (transformers' `attribute_map`s, remote code)."""
MOST_EXPERTS = 1024
"""More are looked up in a table (Doge's 16,384), not multiplied by; the largest mixture of the catalogue has 512."""
_DECIDING = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_STRANGERS = ("ssm", "mamba", "rwkv", "state_size", "conv_kernel", "linear_attn", "linear_key", "kv_lora_rank")
"""Parts of names that tell of layers without softmax attention over keys and values of their own."""


def _renamed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration under Llama's names; what is there under them already stays."""
    renamed = dict(raw)
    for name, others in _NAMES.items():
        given = [raw[key] for key in (name, *others) if raw.get(key) is not None]
        if given:
            renamed[name] = given[0]
    return renamed


def kind_of(fields: Fields) -> str:
    """The kind as which a configuration of an unknown type can be planned: one of `KINDS`, "" where it is neither."""
    raw = _renamed(fields.raw)
    if any(raw.get(name) is None for name in _DECIDING) or _strange(raw):
        return ""
    num = raw.get("num_experts")
    if not isinstance(num, int) or num <= 1:
        return LLAMA
    return MIXTURE if num <= MOST_EXPERTS else ""


def _strange(raw: Mapping[str, Any]) -> str:
    """The field that tells of other layers, "" for none."""
    set_ones = (name for name, value in raw.items() if value not in (None, 0, False))
    return next((name for name in set_ones if any(part in name for part in _STRANGERS)), "")


def build(fields: Fields, like: str) -> ModelSpec:
    """The spec of a configuration with the geometry of `like`.

    Raises:
        UsageError: the configuration tells of another geometry, or no such kind.
        ConfigError: it lacks a size.
    """
    raw = _renamed(fields.raw)
    if like not in KINDS:
        raise UsageError(f"--like {shown(like)}: no such kind", hint=f"known: {', '.join(KINDS)}")
    if strange := _strange(raw):
        raise UsageError(
            f"--like {like}: {fields.where} has {strange}, which tells of layers of another kind",
            hint="where transformers knows the type, pip install torch transformers plans its real layers",
        )
    if "vision_config" in raw or "audio_config" in raw:
        raise UsageError(
            f"--like {like}: {fields.where} has an encoder beside the text model, whose size is not known",
            hint="plan the text model: its text_config as config.json",
        )
    fits = kind_of(fields)
    if fits and fits != like:
        num = raw.get("num_experts")
        difference = f"has {num} experts" if fits == MIXTURE else "has no experts"
        raise UsageError(f"--like {like}: {fields.where} {difference}", hint=f"--like {fits}")
    read = Fields(raw, fields.where)
    spec = llama(read, LLAMA) if like == LLAMA else _mixture(read)
    attentions = SOFT_CAPPED if read.positive("attn_logit_softcapping") else spec.attentions
    return replace(spec, like=like, attentions=attentions)


def _mixture(fields: Fields) -> ModelSpec:
    """Softmax attention and routed experts in every layer but the first dense ones and those between; most routers hold
    a bare weight."""
    base = Decoder(fields)
    activation = fields.text("hidden_act", default="silu")
    own_width = fields.raw.get("moe_intermediate_size") is not None
    num, active = fields.count("num_experts", kind="expert"), fields.count("num_experts_per_tok", kind="expert")
    inner = fields.count("moe_intermediate_size" if own_width else "intermediate_size", kind="intermediate")
    if active > num:
        raise fields.wrong(f"num_experts_per_tok {active} must not exceed num_experts {num}")
    shared = fields.optional_count("shared_expert_intermediate_size", kind="intermediate", at_least=0)
    if shared is None:
        shared = inner * fields.count("n_shared_experts", kind="expert", default=0, at_least=0)
    num_dense = fields.count("first_k_dense_replace", kind="layers", default=0, at_least=0)
    period = fields.count("moe_layer_freq", kind="layers", default=1)
    named_dense = fields.indices("mlp_only_layers")
    bias = fields.flag("attention_bias", False)

    def is_sparse(index: int) -> bool:
        return index >= num_dense and (index - num_dense + 1) % period == 0 and index not in named_dense

    def layer(sparse: bool) -> LayerSpec:
        linears: tuple[LinearSpec, ...]
        if sparse:
            linears = (
                linear("mlp.gate", "router", base.hidden, num, False, "parameter"),
                linear("mlp.experts.gate_up_proj", "gate_up", base.hidden, 2 * inner, False, "parameter", num, active),
                linear("mlp.experts.down_proj", "down", inner, base.hidden, False, "parameter", num, active),
                *(gated_mlp(base.hidden, shared, prefix="mlp.shared_experts") if shared else ()),
            )
            mlp = MlpSpec(
                kind="moe",
                intermediate_size=inner,
                activation=activation,
                num_experts=num,
                num_active_experts=active,
                shared_intermediate_size=shared,
            )
        else:
            dense = fields.count("intermediate_size", kind="intermediate")
            linears, mlp = gated_mlp(base.hidden, dense), gated(dense, activation)
        return LayerSpec(
            kind=layer_kind(None) + ("+moe" if sparse else ""),
            linears=base.attention(bias, bias) + linears,
            norms=tuple(norm(name, base.hidden) for name in PRE),
            attention=base.softmax(),
            mlp=mlp,
        )

    return base.spec("a mixture of experts", [is_sparse(index) for index in range(base.num_layers)], layer)
