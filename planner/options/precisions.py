"""The precisions: the type that weights are kept in, and the type that autocast multiplies in."""

from collections.abc import Mapping
from typing import final

from planner.core.records import dataclass
from planner.core.shipped import by_model_type


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """One precision.

    Attributes:
        name: as `TrainSetup.precision` says it.
        weights: data type of weights that are not quantized: "fp32", "bf16" or "fp16".
        autocast: "bf16" or "fp16" under autocast (fp16 with loss scaling), None without.
        offered: whether a plan can have it; the others are other people's, and how engines compute (`Engine.computes`).
        trains_weights: whether full fine-tuning runs: a loss scaler cannot unscale 16-bit gradients.
    """

    name: str
    weights: str
    autocast: str | None
    offered: bool
    trains_weights: bool

    @property
    def compute(self) -> str:
        return self.autocast or self.weights

    @property
    def wide_weights(self) -> bool:
        """Whether autocast multiplies in 16 bit what is kept in fp32, so that small updates are not lost."""
        return self.autocast is not None and self.weights == "fp32"


_ROWS = (
    Precision(name="fp32", weights="fp32", autocast=None, offered=True, trains_weights=True),
    Precision(name="bf16-pure", weights="bf16", autocast=None, offered=True, trains_weights=True),
    Precision(name="bf16-autocast", weights="bf16", autocast="bf16", offered=True, trains_weights=True),
    Precision(name="bf16-mixed", weights="fp32", autocast="bf16", offered=True, trains_weights=True),
    Precision(name="fp16-autocast", weights="fp16", autocast="fp16", offered=True, trains_weights=False),
    Precision(name="fp16-mixed", weights="fp32", autocast="fp16", offered=True, trains_weights=True),
    Precision(name="fp16-bf16-autocast", weights="fp16", autocast="bf16", offered=False, trains_weights=True),
    Precision(name="bf16-fp16-autocast", weights="bf16", autocast="fp16", offered=False, trains_weights=False),
    Precision(name="fp16-pure", weights="fp16", autocast=None, offered=False, trains_weights=False),
)
PRECISIONS: Mapping[str, Precision] = {row.name: row for row in _ROWS}
"""Every precision by its name."""
_INFINITE = "its activations grow beyond 65,504, fp16's largest number: losses are infinite or no number"
_NO_NUMBER = "its gradients' norm often is no number, and the loss scaler then leaves the step out"
FP16_OVERFLOWS: Mapping[str, str] = {
    name: _NO_NUMBER if no_number else _INFINITE for name, no_number in by_model_type("unsloth_no_fp16").items()
}
"""Model types that do not train well in fp16 -> what happens.

Source: transformers issue 39972 (Gemma 3); unsloth.ai/blog/gpt-oss-context, 28 August 2025; unsloth-zoo pull requests
174 (Gemma 3) and 866 (mixtures of Gemma 4, Qwen3, GLM-4: no number on the first step, 15 steps; Gemma 4 E2B trained 100
steps of fp16 without any, unsloth pull request 4875); Unsloth 2026.10.9 `models/loader.py` _FORCE_FLOAT32_FALLBACK.
"""
FP16_DIVERGES = frozenset(name for name, what in FP16_OVERFLOWS.items() if what is _INFINITE)
"""Those of them whose forward overflows: a plan takes fp32 where a card has no bf16."""
_BY_TYPES = {(row.weights, row.autocast): row.name for row in _ROWS}

if not len(PRECISIONS) == len(_ROWS) == len(_BY_TYPES):
    raise AssertionError("two precisions share a name, or both their types")


def precision_of(weights: str, autocast: str | None) -> str:
    """The name of the precision with these types.

    Raises:
        KeyError: no precision has them.
    """
    return _BY_TYPES[weights, autocast]
