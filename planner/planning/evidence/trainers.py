"""What a trainer adds to the optimizer step that a probe times: its metrics, its callbacks, its way to the data."""

from planner.core.records import dataclass
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerShare:
    """By how much a trainer's step is longer than a probe's of the same setup, as fractions of that.

    Attributes:
        band_fraction: half of what the measured pairs are apart.
        source: the pairs.
    """

    fraction: float
    band_fraction: float
    source: str


SHARES = {
    "trl": TrainerShare(
        fraction=0.049,
        band_fraction=0.019,
        source="two setups of Qwen3-8B on one H200, 26 November 2026, probed and then trained by TRL 1.16: QLoRA 1.136 "
        "and 1.213 s (its step and what lies between two), LoRA 1.321 and 1.360 s",
    )
}
"""Stack -> its trainer's share. Of other trainers no such pair is known: nothing is added."""


NO_SHARE = TrainerShare(fraction=0.0, band_fraction=0.0, source="")


def trainer_share(setup: TrainSetup) -> TrainerShare:
    """The share of the trainer that runs a setup; none where none was measured."""
    return SHARES.get(setup.stack, NO_SHARE)
