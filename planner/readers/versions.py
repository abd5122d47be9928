"""What a tool's defaults were in its other versions: published files run with the version that they were written for.

Source: the tags of huggingface/trl v0.9.3 to v1.9.0 (`sft_config.py`, `base_config.py`, `sft_trainer.py`) and the
installed 1.16, read in November 2026.
"""

from dataclasses import dataclass

NEWEST_TRL = (1, 16)
TRL_CHECKPOINTING_SINCE = (0, 22)
TRL_BF16_SINCE = (0, 19)
TRL_CHUNKED_BY_DEFAULT_SINCE = (1, 7)
TRL_ONLY_CHUNKED_SINCE = (1, 10)
"""From here on "nll" never makes the full logits. 1.9 is the newest tag read in which it does, 1.15 the oldest read in
which it does not: the versions between are taken with 1.15."""


@dataclass(frozen=True, kw_only=True)
class TrlDefaults:
    """Defaults of one TRL version's SFT.

    Attributes:
        said: the version in words; assumed: whether nobody named one, so that the newest is taken.
    """

    version: tuple[int, ...]
    said: str
    assumed: bool

    @property
    def checkpointing(self) -> bool:
        """Whether SFTConfig switches gradient checkpointing on."""
        return self.version >= TRL_CHECKPOINTING_SINCE

    @property
    def bf16(self) -> bool:
        """Whether SFTConfig trains under bf16 autocast unless told otherwise."""
        return self.version >= TRL_BF16_SINCE

    def loss(self, loss_type: str | None, *, liger: bool) -> str:
        """The setup's loss for SFTConfig's `loss_type` (None: not given)."""
        if self.version >= TRL_ONLY_CHUNKED_SINCE:
            return "chunked"
        if liger:
            return "liger"
        chunked = loss_type is None and self.version >= TRL_CHUNKED_BY_DEFAULT_SINCE
        return "chunked" if chunked or loss_type == "chunked_nll" else "full"


def trl(version: str | None) -> TrlDefaults:
    """The defaults of a TRL version ("0.22.2"), of the newest where it is None."""
    if version is None:
        newest = ".".join(map(str, NEWEST_TRL))
        return TrlDefaults(version=NEWEST_TRL, said=f"TRL {newest}", assumed=True)
    return TrlDefaults(version=parsed(version), said=f"TRL {version}", assumed=False)


def parsed(version: str) -> tuple[int, ...]:
    """ "0.22.2" as (0, 22, 2); what follows the numbers is left out."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers) or NEWEST_TRL
