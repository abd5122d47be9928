"""`Images`: the pictures of a sample, of a vision-language model."""

from collections.abc import Mapping
from typing import Any, Self, final

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.options.layouts import SPLIT_DEGREES
from planner.options.nested import read_record, values_of

MAX_SIDE = 1 << 16
IMAGE_TARGETS = ("trl", "llamafactory")
"""Launch targets whose files train on pictures."""
WITH_IMAGES: Mapping[str, tuple[object, ...]] = {
    "objective": ("sft",),
    "parallel": ("none", "ddp"),
    **dict.fromkeys(SPLIT_DEGREES, (1,)),
    "adapter": ("lora",),
    "packing": (False,),
    "attention": ("sdpa", "flash-attention-2"),
    "kernels": ("eager",),
    "loss": ("full", "chunked"),
    "compile": (False,),
    "activation_offload": (False,),
    "selective_checkpointing": (False,),
}
"""What goes with pictures, by the fields of a setup. No trainer packs them; eager attention would keep an encoder's
patches times patches; how FSDP2 and ZeRO gather an encoder's layers is not modelled."""
TEXT_TOKENS = 512
"""Tokens of a sample beside its pictures, where nobody says how long it is."""


def with_text(tokens: int) -> int:
    """Length of a sequence with so many tokens of pictures, in whole 256."""
    return -(-(tokens + TEXT_TOKENS) // 256) * 256


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """What every sample shows beside its text.

    Attributes:
        num: pictures of one sample.
        width, height: of each, in pixels, before the processor resizes it.
    """

    num: int = 1
    width: int
    height: int

    def __post_init__(self) -> None:
        for name, most in (("num", 1 << 12), ("width", MAX_SIDE), ("height", MAX_SIDE)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise SetupError(f"images: {name} must be a whole number from 1 to {most}, got {value!r:.80}")

    @classmethod
    def read(cls, values: Any) -> Self:
        """From JSON values, or one as it is.

        Raises:
            SetupError: an unknown key or a wrong value.
        """
        return read_record(cls, values, "images", required=("width", "height"))

    @property
    def values(self) -> dict[str, int]:
        return values_of(self)

    @property
    def words(self) -> str:
        return f"{self.num} image{'s' * (self.num > 1)} of {self.width} x {self.height} pixels"
