"""Hourly GPU prices: dated and indicative. A price is a hint for comparing plans, never an offer."""

import csv
from functools import cache
from pathlib import Path
from typing import Any

from planner import plugins
from planner.records import dataclass

_PATH = Path(__file__).parents[1] / "data" / "prices.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """One published price of one GPU for one hour, a range where the source gives one."""

    gpu_key: str
    provider: str
    kind: str
    low_usd_per_h: float
    high_usd_per_h: float
    as_of: str
    confidence: str
    source: str

    @property
    def usd_per_h(self) -> float:
        """The price, or the middle of its range."""
        return (self.low_usd_per_h + self.high_usd_per_h) / 2

    @property
    def is_on_demand(self) -> bool:
        """Whether a provider rents it to anyone at this price, for as long as it is wanted."""
        return self.kind.startswith("on-demand")


@cache
def all_prices() -> tuple[Price, ...]:
    """Every price known, those of plug-ins last."""
    with _PATH.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows: list[dict[str, Any]] = list(reader)
    rows += plugins.rows("prices", tuple(reader.fieldnames or ()))
    return tuple(
        Price(**row | {name: float(row[name]) for name in ("low_usd_per_h", "high_usd_per_h")}) for row in rows
    )


MOST_NAMED = 4
"""Providers that are named; more are counted."""


def price_per_hour(gpu_key: str) -> tuple[float, str, str] | None:
    """US dollars for one GPU for one hour, who asks it, and its date; None where no price is known.

    On-demand prices where there are any, else others (a marketplace's lowest ask). Of several the median counts (a
    range by its middle), so that one provider's offer or one hyperscaler's list price does not decide; the date is the
    newest one's.
    """
    known = [price for price in all_prices() if price.gpu_key == gpu_key]
    prices = [price for price in known if price.is_on_demand] or known
    if not prices:
        return None
    usd = sorted(price.usd_per_h for price in prices)
    half = len(usd) // 2
    value = round((usd[half] + usd[~half]) / 2, 4)  # `statistics` costs a formula-only plan several milliseconds
    dated = [price.as_of for price in prices if price.as_of[:1].isdigit()]
    as_of = max(dated) if dated else "undated"
    if len(prices) == 1:
        return value, f"{prices[0].provider}, {prices[0].kind}", as_of
    low = min(price.low_usd_per_h for price in prices)
    high = max(price.high_usd_per_h for price in prices)
    kind = "on-demand" if prices[0].is_on_demand else "posted"
    names = sorted({price.provider for price in prices})
    providers = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} providers"
    return value, f"median of {len(prices)} {kind} prices, {low:.2f} to {high:.2f} USD ({providers})", as_of


@cache
def keys_on_demand() -> frozenset[str]:
    """GPUs that some provider rents on demand: a marketplace has a few of a card at a time."""
    return frozenset(price.gpu_key for price in all_prices() if price.is_on_demand)
