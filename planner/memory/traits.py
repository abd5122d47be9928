"""What model classes of transformers do in their own way, where it changes memory: norms, dropouts, activations.

Facts by `model_type`, read in transformers 5.23's modeling files and seen in the dry run's events.
"""

from collections.abc import Mapping
from typing import Literal

from planner.hardware.kernels import masks_packed
from planner.models.spec import ModelSpec
from planner.records import dataclass

NormStyle = Literal["rms", "rms-fp32", "layer", "layer-cast-back", "layer-composed"]

RMS_FP32 = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "gemma4_vision",
        "qwen3_next",
        "qwen3_5",
    }
) | frozenset({"qwen3_5_moe", "olmo2", "olmo3", "gpt_oss"})
"""RMSNorms that multiply with their weight in fp32, before the cast back: a trained weight keeps fp32 rows."""
LAYER_CAST_BACK = frozenset({"olmo"})
"""`F.layer_norm` of an fp32 copy, cast back to the input's type."""
LAYER_COMPOSED = frozenset({"cohere", "cohere2"})
"""A layer norm of single operations in fp32, cast back: two fp32 tensors are kept."""
OF_TYPES: Mapping[str, frozenset[str]] = {
    # hand the kernel keys and values already repeated to all heads
    "expands_kv": frozenset({"falcon"}),
    # eager layers return their attention weights, which are then alive while the next layer runs; the sum with the mask
    # is a tensor beside the scores
    "hands_on_weights": frozenset({"falcon"}),
    # the same in the values' type
    "hands_on_cast": frozenset({"bloom", "gptj", "gpt_neo"}),
    # join the rotated part of each head and the rest even where nothing is left
    "joins_rotated": frozenset({"phi3"}),
    # norms follow attention and MLP: the projections' input is the residual itself
    "post_norm": frozenset({"olmo2", "olmo3"}),
    # their own attention multiplies queries and keys in fp32
    "fp32_scores": frozenset({"gptj", "gpt_neo"}),
    # eager softmax stays in its input's type, where others ask for fp32
    "plain_softmax": frozenset({"falcon", "gpt2", "llama4", "llama4_text", "t5", "whisper"}),
    # add a learned matrix of positions to their scores, and drop out inside their MLP
    "position_bias": frozenset({"t5"}),
    # lay out queries, keys and values head by head, so that SDPA's output is copied for what follows
    "heads_apart": frozenset({"whisper"}),
    # the encoder's layers clamp what they give in fp16, and keep what was clamped
    "clamps_encoder": frozenset({"whisper"}),
    # the MLP's last matrix stays fp32 where the rest is loaded in fp16 (`_keep_in_fp32_modules`)
    "fp32_down": frozenset({"t5"}),
    # hold a causal mask of one byte per pair of positions in every layer
    "mask_buffers": frozenset({"gpt_neo"}),
    # the layer holds the attention's output in a name of its own while its MLP runs, after adding it up
    "holds_attention": frozenset({"bloom", "gpt2", "gpt_neo", "stablelm"}),
    # the first layer takes another tensor than the embedding gives: with positions added, scaled, normalised or dropped
    # out
    "behind_embeddings": frozenset({"bloom", "gpt2", "gpt_neo", "granite", "opt", "t5"}),
    # a norm between the embeddings and the first layer
    "embedding_norm": frozenset({"bloom"}),
    # eager attention holds the biased scores and their masked sum at once
    "alibi_sum": frozenset({"bloom"}),
    # push every token through every expert, weighted by zero where it was not routed
    "dense_experts": frozenset({"llama4", "llama4_text"}),
}
"""Trait -> the types that have it."""
CASTS_PROBABILITIES = frozenset({"gpt2"})
"""Types that cast their probabilities to the values' type before they drop some, and hand them on."""
FP32_ROUTED = {
    "deepseek_v2": ("plain", "autocast"),
    "deepseek_v3": ("plain",),
    "gemma4": ("plain", "autocast"),
    "gemma4_text": ("plain", "autocast"),
    "glm4_moe": ("plain",),
    "mixtral": ("plain", "autocast"),
    "phimoe": ("autocast",),
}
"""Types whose router weighs the experts' outputs in fp32, without autocast ("plain") or under it.
Seen in the dry run's events: the type of the weighted outputs' gradients."""
ALTUP = frozenset({"gemma3n", "gemma3n_text"})
ALTUP_STREAMS = 4
"""Types whose layers update one of several residual streams and predict the others: Baykal et al. 2023, Alternating
Updates for Efficient Transformers, https://arxiv.org/abs/2301.13310; the class's default number."""
EXTRA_EXPERT_COPIES = {"gpt_oss": 3}
"""Further tensors of the intermediate size that an expert keeps: gpt-oss clamps, scales and shifts its gate."""
ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
RESIDUAL_DROPOUTS = (
    "resid_pdrop",
    "residual_dropout",
    "resid_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout",
    "dropout_rate",
)
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet")
"""Types that share BERT's layer and its dropouts."""
DEFAULTS = {"gpt2": (0.1, 0.1), "opt": (0.0, 0.1), "t5": (0.1, 0.1), **dict.fromkeys(ENCODERS, (0.1, 0.1))}
"""(attention, residual) dropout that a config leaves out because it is the class's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """How one model class deviates: its norms, whether its own dropouts are on while training, its experts."""

    norm: NormStyle
    attention_dropout: bool
    residual_dropout: bool
    expands_kv: bool
    joins_rotated: bool
    heads_apart: bool
    clamps_encoder: bool
    hands_on_weights: bool
    hands_on_cast: bool
    holds_wide_probabilities: bool
    """The same of one that casts them to its values' type, where that is fp32."""
    holds_probabilities: bool
    """Whether an eager layer holds the dropped probabilities to its end: under autocast fp32, beside what is kept."""
    dense_experts: bool
    extra_expert_copies: int
    post_norm: bool
    fp32_scores: bool
    plain_softmax: bool
    position_bias: bool
    inner_dropout: bool
    fp32_down: bool
    embedding_norm: bool
    behind_embeddings: bool
    holds_attention: bool
    alibi_sum: bool
    mask_buffers: bool
    masks_packed: bool
    """Whether SDPA is handed a mask of packed samples."""
    fp32_routed: tuple[str, ...]
    streams: int
    """Residual streams side by side (Gemma 3n's AltUp), elsewhere one."""


def traits_of(model: ModelSpec) -> Traits:
    """The traits of a model, from its type and its config's dropout rates.

    Source: transformers 5.23 `modeling_*.py` and `configuration_*.py`.
    """
    return model.once("traits", _read_traits)


def _read_traits(model: ModelSpec) -> Traits:
    kind = _text_type(model)
    attention, residual = DEFAULTS.get(kind, (0.0, 0.0))
    attention_dropout = _rate(model, ATTENTION_DROPOUTS, attention) > 0
    residual_dropout = _rate(model, RESIDUAL_DROPOUTS, residual) > 0
    kinds = {norm.kind for layer in model.layer_kinds for norm in layer.norms}
    style: NormStyle
    if kinds == {"layer"}:
        style = (
            "layer-cast-back" if kind in LAYER_CAST_BACK else "layer-composed" if kind in LAYER_COMPOSED else "layer"
        )
    else:
        style = "rms-fp32" if kind in RMS_FP32 else "rms"
    return Traits(
        norm=style,
        attention_dropout=attention_dropout,
        residual_dropout=residual_dropout,
        holds_probabilities=kind in ENCODERS and attention_dropout,
        holds_wide_probabilities=kind in CASTS_PROBABILITIES and attention_dropout,
        inner_dropout=kind in OF_TYPES["position_bias"] and residual_dropout,
        extra_expert_copies=EXTRA_EXPERT_COPIES.get(kind, 0),
        fp32_routed=FP32_ROUTED.get(kind, ()),
        masks_packed=masks_packed(kind),
        streams=_streams(model),
        **{trait: kind in types for trait, types in OF_TYPES.items()},
    )


def _streams(model: ModelSpec) -> int:
    given = model.config.get("text_config", model.config).get("altup_num_inputs", ALTUP_STREAMS)
    return given if model.model_type in ALTUP and isinstance(given, int) else 1


def _text_type(model: ModelSpec) -> str:
    """The type of what reads the text: of a class with eyes that no adapter knows, its `text_config`'s."""
    text = model.config.get("text_config")
    named = text.get("model_type") if model.from_tree and isinstance(text, Mapping) else None
    return named if isinstance(named, str) else model.model_type


def _rate(model: ModelSpec, names: tuple[str, ...], default: float) -> float:
    for name in names:
        value = model.config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return default
