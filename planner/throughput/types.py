"""`StepTime`: what the speed model answers about one setup."""

from collections.abc import Mapping
from dataclasses import field, replace

from planner.records import dataclass

WITHOUT_GRADIENTS = "forwards without gradients"
PARTS = (
    "generation",
    WITHOUT_GRADIENTS,
    "matmul",
    "recompute",
    "attention",
    "elementwise",
    "lora",
    "dequantization",
    "loss",
    "tower",
    "encoder",
    "optimizer",
    "paging",
    "host",
    "trainer",
)
"""Where time goes. generation: of completions, where the objective makes its own; recompute: everything that
checkpointing runs a second time; paging: of a paged optimizer's states over the link to the host; host: time that the
GPU waits for the Python side to issue kernels; trainer: the trainer's stated constant."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted time of one optimizer step on one GPU.

    Attributes:
        parts_s: seconds by operator class, keys of PARTS; they sum to `step_time_s`.
        flops: what the step needs on one GPU (forward and the gradients asked for; recomputation not counted).
        mfu_fraction: `flops` over the step time and the data sheet's rate for the compute type.
        tokens_per_s: tokens of all GPUs per second, padding included.
        band_fraction: half-width of the 90 % band: the truth lies within step_time_s x or / (1 + band).
        notes: what a person must know, one sentence each.
    """

    step_time_s: float
    parts_s: Mapping[str, float]
    flops: float
    mfu_fraction: float
    tokens_per_s: float
    band_fraction: float
    notes: tuple[str, ...] = field(default=())

    def share(self, part: str) -> float:
        """The fraction of the step that `part` takes."""
        return self.parts_s.get(part, 0.0) / self.step_time_s

    def without_paging(self) -> "StepTime":
        """The same step where all of a paged optimizer's states stay on the card."""
        saved = self.parts_s.get("paging", 0.0)
        faster = self.step_time_s / (self.step_time_s - saved)
        return replace(
            self,
            step_time_s=self.step_time_s - saved,
            parts_s={**self.parts_s, "paging": 0.0},
            mfu_fraction=self.mfu_fraction * faster,
            tokens_per_s=self.tokens_per_s * faster,
        )
