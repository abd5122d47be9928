"""Rented machines by the names that AWS, Google Cloud and Azure give them: "g5.12xlarge" is four A10G.

`planner/data/instances.csv` holds a family per row: its sizes stand for `{}`, behind the number of cards that each has.
"""

import csv
from functools import cache

from planner.core.shipped import DATA


def cards_of(name: str) -> tuple[int, str] | None:
    """(how many cards a machine has, the card's key), None of any other name. SageMaker's "ml." is left out."""
    spelled = name.strip().lower().removeprefix("ml.")
    if spelled.startswith(("nc", "nd", "nv")):  # Azure's, without its first word
        spelled = f"standard_{spelled}"
    return _instances().get(spelled)


@cache
def _instances() -> dict[str, tuple[int, str]]:
    cards: dict[str, tuple[int, str]] = {}
    with (DATA / "instances.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for group in row["sizes"].split(";"):
                num, _, sizes = group.partition("=")
                cards |= {row["name"].format(size): (int(num), row["gpu_key"]) for size in sizes.split("|")}
    return cards
