"""Hourly GPU prices: dated and indicative. A price is a hint for comparing plans, never an offer."""

import csv
from functools import cache
from pathlib import Path
from typing import Any

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


@cache
def all_prices() -> tuple[Price, ...]:
    """Every price known."""
    with _PATH.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return tuple(
        Price(**row | {name: float(row[name]) for name in ("low_usd_per_h", "high_usd_per_h")}) for row in rows
    )


def price_per_hour(gpu_key: str) -> tuple[float, str, str] | None:
    """US dollars for one GPU for one hour, with its source and its date; None where no price is known.

    On-demand prices where there are any, else posted rates (often spot). Of several the median counts (a range by its
    middle), so that one provider's offer or one hyperscaler's list price does not decide; the date is the newest one's.
    """
    known = [price for price in all_prices() if price.gpu_key == gpu_key]
    prices = [price for price in known if price.kind.startswith("on-demand")] or known
    if not prices:
        return None
    usd = sorted(price.usd_per_h for price in prices)
    half = len(usd) // 2
    value = round((usd[half] + usd[~half]) / 2, 2)  # `statistics` costs a formula-only plan several milliseconds
    dated = [price.as_of for price in prices if price.as_of[:1].isdigit()]
    as_of = max(dated) if dated else "undated"
    if len(prices) == 1:
        return value, f"{prices[0].provider}, {prices[0].kind}: {prices[0].source}", as_of
    low = min(price.low_usd_per_h for price in prices)
    high = max(price.high_usd_per_h for price in prices)
    kind = "on-demand" if prices[0].kind.startswith("on-demand") else "posted"
    providers = ", ".join(sorted({price.provider for price in prices}))
    return value, f"median of {len(prices)} {kind} prices, {low:g} to {high:g} USD ({providers})", as_of
