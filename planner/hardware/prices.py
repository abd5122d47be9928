"""Hourly GPU prices: dated and indicative. A price is a hint for comparing plans, never an offer."""

import csv
import os
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from planner.core import plugins
from planner.core.errors import ConfigError
from planner.core.records import dataclass
from planner.core.shipped import DATA

PRICES_VARIABLE = "FINETUNE_PLANNER_PRICES"
"""Names a file that `plan prices` wrote, in place of the table that ships."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """One published price of one GPU for one hour, a range where the source gives one.

    Attributes:
        kind: "on-demand ...", "spot", or of a marketplace.
        network: what joins several machines of this very offer, a key of the links; "" where none is known. Sources (of
            2026-11-29): EC2 user guide, p5-efa (3,200 of p5, p5e; 400 of p4d, p4de and 3,200 of p5en, p6-b200 by its
            instance tables); MicrosoftDocs/azure-docs nd-mi300x-v5-series.md (8 x 400), learn.microsoft.com
            nda100-v4-series (8 x 200); blogs.oracle.com superclusters-rdma-high-performance (1,600 of 8 A100);
            docs.skypilot.co coreweave_infiniband (455 GB/s measured between two machines of 8 H200);
            mlcommons/inference_results_v6.0 nebius_b200_n1.json (8 x 400), drmysore/nebius-h100-16gpu-benchmark (435
            GB/s between two of 8 H100; Nebius says 400 Gbit/s a GPU of all its Quantum-2 hosts). CoreWeave's H100 and
            B200 stand without: no page found says.
    """

    gpu_key: str
    provider: str
    kind: str
    network: str
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

    @property
    def is_spot(self) -> bool:
        """Whether the provider may take the machine back at any time."""
        return self.kind == "spot"


COLUMNS = tuple(field.name for field in fields(Price))


@cache
def all_prices() -> tuple[Price, ...]:
    """Every price known, those of plug-ins last.

    Raises:
        ConfigError: the user's own file is no such table.
    """
    rows: list[dict[str, Any]]
    path = Path(os.environ.get(PRICES_VARIABLE) or DATA / "prices.csv")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        rows += plugins.rows("prices", COLUMNS)
        return tuple(
            Price(**row | {name: float(row[name]) for name in ("low_usd_per_h", "high_usd_per_h")}) for row in rows
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{PRICES_VARIABLE}: {path} is no table of prices: {error}", hint=f"plan prices {path} writes one"
        ) from error


MOST_NAMED = 4
"""Providers that are named; more are counted."""


def cluster_offer(gpu_key: str, *, spot: bool = False, least_bytes_per_s: float = 0.0) -> Price | None:
    """Of the offers of machines with a network between them (of at least so much per machine) the median one, of two
    the cheaper: price and network belong to it. None where nobody is known to offer that."""
    from planner.hardware.cluster import links  # one GPU needs none of it

    networked = (price for price in all_prices() if price.gpu_key == gpu_key and price.network)
    offers = [price for price in networked if price.is_spot == spot]
    offers = [price for price in offers if links()[price.network].bytes_per_s >= least_bytes_per_s]
    offers.sort(key=lambda price: price.usd_per_h)
    return offers[(len(offers) - 1) // 2] if offers else None


def price_per_hour(gpu_key: str, *, spot: bool = False) -> tuple[float, str, str] | None:
    """US dollars for one GPU for one hour, who asks it, and its date; None where no price is known.

    On-demand prices where there are any, else others (a marketplace's lowest ask), or spot prices alone. Of several the
    median counts (a range by its middle), so that one provider's offer or one hyperscaler's list price does not decide;
    the date is the newest one's.
    """
    matching = [price for price in all_prices() if price.gpu_key == gpu_key and price.is_spot == spot]
    prices = [price for price in matching if price.is_on_demand] or matching
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
    kind = "on-demand" if prices[0].is_on_demand else "spot" if spot else "posted"
    names = sorted({price.provider for price in prices})
    providers = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} providers"
    return value, f"median of {len(prices)} {kind} prices, {low:.2f} to {high:.2f} USD ({providers})", as_of


@cache
def keys_on_demand() -> frozenset[str]:
    """GPUs that some provider rents on demand: a marketplace has a few of a card at a time."""
    return frozenset(price.gpu_key for price in all_prices() if price.is_on_demand)
