"""The adapters of peft that can be trained beside a frozen base. To add one, add its row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One kind of adapter.

    Attributes:
        name: as `TrainSetup.adapter` says it.
        title: its name for people.
        source: where it was published.
    """

    name: str
    title: str
    source: str


_ROWS = (
    Adapter(
        name="lora",
        title="LoRA",
        source="Hu et al. 2021, https://arxiv.org/abs/2106.09685; peft 0.21 tuners/lora",
    ),
    Adapter(
        name="rslora",
        title="rank-stabilised LoRA",
        source="Kalajdzievski 2023, https://arxiv.org/abs/2312.03732; peft 0.21 LoraConfig.use_rslora",
    ),
)
ADAPTERS: Mapping[str, Adapter] = {row.name: row for row in _ROWS}
"""Every kind by its name."""
