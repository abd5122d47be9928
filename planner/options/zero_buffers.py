"""`ZeroBuffers`: how large DeepSpeed's buffers are, where a configuration of its own says so."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self, final

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.options.nested import read_record, values_of

AUTO = -1
"""A size that transformers and accelerate fill in from the model's hidden size ("auto")."""
KEYS = {
    "reduce_bucket_elements": ("reduce_bucket_size",),
    "prefetch_elements": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    "persistent_elements": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
    "live_elements": ("stage3_max_live_parameters", "max_live_parameters"),
    "sub_group_elements": ("sub_group_size",),
}
"""Field -> what DeepSpeed's JSON calls it."""
BY_MODEL = ("reduce_bucket_elements", "prefetch_elements", "persistent_elements")
"""Those that may be AUTO."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBuffers:
    """Sizes in elements, with DeepSpeed's own defaults.

    Attributes:
        reduce_bucket_elements: of the buffer that gradients are reduced in, allocated whole whatever is trained.
        overlaps: whether reduction overlaps the backward: stages 1 and 2 then hold two of those buffers.
        prefetch_elements, persistent_elements, live_elements: of ZeRO-3: gathered ahead; parameters with fewer stay
            gathered; no more are gathered ahead beyond so many whole ones.
        sub_group_elements: of this rank's part, stepped at once under ZeRO-3; 0: one parameter after the other.

    Source: DeepSpeed 0.19 `runtime/zero/config.py`.
    """

    reduce_bucket_elements: int = 500_000_000
    overlaps: bool = False
    prefetch_elements: int = 50_000_000
    persistent_elements: int = 100_000
    live_elements: int = 1_000_000_000
    sub_group_elements: int = 1_000_000_000

    def __post_init__(self) -> None:
        for name in KEYS:
            value, least = getattr(self, name), AUTO if name in BY_MODEL else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SetupError(f"zero_buffers: {name} must be a whole number of elements, got {value!r:.80}")
        if not isinstance(self.overlaps, bool):
            raise SetupError(f"zero_buffers: overlaps must be true or false, got {self.overlaps!r:.80}")

    @classmethod
    def read(cls, values: Any) -> Self:
        """From JSON values, or one as it is.

        Raises:
            SetupError: an unknown key or a wrong value.
        """
        return read_record(cls, values, "zero_buffers")

    @property
    def values(self) -> dict[str, int]:
        return values_of(self)

    @property
    def words(self) -> str:
        size = self.reduce_bucket_elements
        elements = "the hidden size squared" if size == AUTO else f"{size / 1e6:,.4g} M elements"
        return f"{'two reduce buckets' if self.overlaps else 'a reduce bucket'} of {elements}"

    def filled_in(self, hidden_size: int) -> Self:
        """With a number for every "auto".

        Source: transformers 5.23 `integrations/deepspeed.py` trainer_config_finalize; accelerate 1.15 `Accelerator.
        _prepare_deepspeed`.
        """
        square = hidden_size * hidden_size
        usual = {
            "reduce_bucket_elements": square,
            "prefetch_elements": int(0.9 * square),
            "persistent_elements": 10 * hidden_size,
        }
        values: Mapping[str, Any] = {name: value for name, value in usual.items() if getattr(self, name) == AUTO}
        return replace(self, **values)


SHIPPED = {
    "zero1": ZeroBuffers(),
    "zero2": ZeroBuffers(),
    "zero3": ZeroBuffers(reduce_bucket_elements=AUTO, prefetch_elements=AUTO, persistent_elements=AUTO),
}
"""Stage -> what the files have that LLaMA-Factory and ms-swift ship, where one is not at hand: DeepSpeed's own sizes,
or for stage 3 the model's (LLaMA-Factory 0.9.5 examples/deepspeed; ms-swift 4.6 swift/config, whose bucket of stage 2
is 2e8)."""
