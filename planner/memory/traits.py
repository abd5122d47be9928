"""What model classes of transformers do in their own way, where it changes memory: norms, dropouts, activations.

Facts by `model_type`, read in transformers 5.23's modeling files and seen in the dry run's events.
"""

from collections.abc import Mapping
from typing import Literal

from planner.core.records import dataclass
from planner.memory.attention_kernels import masks_packed
from planner.models.spec import ModelSpec

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
    # join the rotated part of each head and the rest even where nothing is left
    "joins_rotated": frozenset({"phi3"}),
    # eager softmax stays in its input's type, where others ask for fp32
    "plain_softmax": frozenset({"falcon", "gpt2", "llama4", "llama4_text", "t5", "whisper"}),
    # add a learned matrix of positions to their scores
    "position_bias": frozenset({"t5"}),
    # push every token through every expert, weighted by zero where it was not routed
    "dense_experts": frozenset({"llama4", "llama4_text"}),
}
"""Trait -> the types that have it."""
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
    joins_rotated: bool
    dense_experts: bool
    extra_expert_copies: int
    plain_softmax: bool
    position_bias: bool
    masks_packed: bool
    """Whether SDPA is handed a mask of packed samples."""
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
        extra_expert_copies=EXTRA_EXPERT_COPIES.get(kind, 0),
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
