"""Linear-attention layers in the formula: passes over memory, kernels and host seconds beyond their projections."""

from planner.choices.packages import DELTA_TYPES
from planner.records import dataclass

CHUNK = 64
"""Tokens of one chunk of the gated delta rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """What one layer issues beside its projections.

    Attributes:
        passes: over its elements (value heads x key size), twice forward and four times backward, in 16 bit.
        forward, backward: kernels that PyTorch launches whatever the length.
        launches: Triton kernels of a forward; the backward and a second forward have as many each.
        chunk_s, recomputed_chunk_s: the host's seconds for every chunk of a sequence, forward and backward, and more
            where the forward is computed again.
    """

    passes: float = 30.0
    forward: int = 0
    backward: int = 0
    launches: int = 0
    chunk_s: float = 0.0
    recomputed_chunk_s: float = 0.0


MIXERS = {
    "fla": Mixer(forward=49, backward=68, launches=8),
    "torch": Mixer(passes=320.0, forward=130, backward=168, chunk_s=1.26e-3, recomputed_chunk_s=0.84e-3),
}
"""By `TrainSetup.linear_attention`. Kernels are counted of Qwen3.5's layer; the other numbers are those of dry runs:
passes 251 to 277 more in the loop than with the package (RTX 4090, A100, H100; 4B and 27B), chunks by their number.

Measured: the loop of a Qwen3.5-4B on an H100, 2.69 s for 2.26 (docs/accuracy/own-runs.md); the package's path nowhere.
"""
_OTHERS = Mixer()
"""State spaces and recurrences: an elementwise stand-in."""


def mixer_of(model_type: str, linear_attention: str) -> Mixer:
    """That of a model's linear-attention layers."""
    return MIXERS[linear_attention] if model_type in DELTA_TYPES else _OTHERS
