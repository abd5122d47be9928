"""Which models the hub hands out only to people who are logged in."""

import csv
from functools import cache
from pathlib import Path

from planner.core.records import dataclass
from planner.core.shipped import DATA


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What is known of the access to some models: which of them the hub hands out only to people who accepted their
    terms and are logged in. Of all that the table does not name it is not known, and said so.

    Attributes:
        begins: of their hub ids.
        asks: what their authors ask for on the models' cards; "" where the download was only seen to be refused, which
            may have changed.
        seen: the year, or the day, on which it was so.
        source: who says so.
    """

    begins: str
    asks: str
    seen: str
    source: str


@cache
def gates() -> tuple[Gate, ...]:
    with (DATA / "gated.csv").open(newline="", encoding="utf-8") as file:
        return tuple(Gate(**row) for row in csv.DictReader(file))


def gate_of(model_id: str) -> Gate | None:
    """What is known of a model's access, None where nothing is."""
    name = model_id.lower()
    return next((gate for gate in gates() if name.startswith(gate.begins.lower())), None)


def on_hub(model_id: str) -> bool:
    """Whether a name is a hub id rather than a directory."""
    return not (model_id.startswith((".", "/", "~")) or Path(model_id).exists())
