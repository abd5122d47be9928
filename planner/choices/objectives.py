"""The training objectives: what a step of each holds and computes beside a supervised one. To add one, add its row.

"sft" is the supervised step that every other row is read against.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

DEFAULT = "sft"
"""The objective of a plan for which nobody names one."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """One objective, as its trainer's step treats memory and time.

    Attributes:
        title: its name for people.
        source: where all this was read.
    """

    name: str
    title: str
    source: str


_ROWS = (Objective(name="sft", title="supervised fine-tuning", source="trl 1.16 trainer/sft_trainer.py"),)

OBJECTIVES: Mapping[str, Objective] = {row.name: row for row in _ROWS}
"""Every objective by its name."""
