"""`plan prices FILE`: today's prices of the clouds from gpuhunt's catalogue, in the form of the table that ships."""

import csv
import logging
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.cli.output import console
from planner.core.errors import EnvironmentProblem
from planner.core.install import install_command
from planner.core.units import GIB
from planner.frameworks.exporters.jobs import scheduler_names
from planner.hardware.gpus import all_gpus
from planner.hardware.prices import COLUMNS, PRICES_VARIABLE, all_prices

PROVIDERS = {
    "aws": "AWS", "azure": "Azure", "gcp": "Google Cloud", "lambdalabs": "Lambda", "nebius": "Nebius", "oci": "Oracle",
    "runpod": "RunPod", "verda": "DataCrunch", "cloudrift": "CloudRift",
}  # fmt: skip
"""gpuhunt's name of a provider whose catalogue needs no account -> the price table's."""
ONLY_BOARDS = ("aws", "gcp", "nebius", "oci")
"""Providers whose A100, H100 and V100 are all SXM (p3 to p5, a2 and a3, gpu-h100-sxm, BM.GPU)."""
WHOLE_MACHINE_GPUS = 8
MEMORY_TOLERANCE = 0.1


def prices(out: Annotated[Path, typer.Argument(metavar="FILE", help="The CSV file to write.")]) -> None:
    """Write today's prices of the clouds to FILE, by gpuhunt; FINETUNE_PLANNER_PRICES=FILE plans with them."""
    rows = rows_of(_offers(), datetime.now(UTC).date().isoformat())
    if not rows:
        raise EnvironmentProblem("gpuhunt knows no price of any card here", hint="pip install -U gpuhunt")
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    cards = len({row["gpu_key"] for row in rows})
    console().print(f"{len(rows)} prices of {cards} cards in {out}; take them: {PRICES_VARIABLE}={out}", soft_wrap=True)


def _offers() -> list[Any]:
    try:
        import gpuhunt
    except ImportError:
        raise EnvironmentProblem("plan prices needs gpuhunt", hint=install_command("prices")) from None
    logging.getLogger("gpuhunt").setLevel(logging.CRITICAL)  # nine tracebacks where there is no network
    catalog = gpuhunt.Catalog(auto_reload=False)
    try:
        if "GPUHUNT_CATALOG_DIR" not in os.environ:
            catalog.load()
        return list(catalog.query(min_gpu_count=1))
    except Exception as error:  # its own, the network's, a file's
        raise EnvironmentProblem(
            f"gpuhunt's catalogue does not answer: {error}", hint="without it plan goes on with the prices that ship"
        ) from error


def rows_of(offers: list[Any], today: str) -> list[dict[str, str]]:
    """The cheapest offer of each card by each provider, spot apart, and of a whole machine with its network where the
    table that ships knows it, in rows of `planner/data/prices.csv`."""
    networks = {(price.gpu_key, name): price.network for price in all_prices() for name in PROVIDERS.values()
                if price.network and price.provider.startswith(name)}  # fmt: skip
    cheapest: dict[tuple[str, str, str, str], tuple[float, Any]] = {}
    for offer in offers:
        provider, key = PROVIDERS.get(offer.provider), _card(offer)
        if provider is None or key is None:
            continue
        usd, kind = offer.price / offer.gpu_count, "spot" if offer.spot else "on-demand"
        network = networks.get((key, provider), "") if offer.gpu_count == WHOLE_MACHINE_GPUS else ""
        for place in {(key, provider, kind, ""), (key, provider, kind, network)}:
            if place not in cheapest or usd < cheapest[place][0]:
                cheapest[place] = (usd, offer)
    joined = {(*place[:3], id(offer)) for place, (_, offer) in cheapest.items() if place[3]}
    rows = []
    for (key, provider, kind, network), (usd, offer) in sorted(cheapest.items(), key=lambda item: item[0]):
        if not network and (key, provider, kind, id(offer)) in joined:
            continue  # the same machine, its network known
        where, source = f"{provider} {offer.location}", f"gpuhunt: {offer.instance_name}"
        values = (key, where, kind, network, f"{usd:.4f}", f"{usd:.4f}", today, "medium", source)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def _card(offer: Any) -> str | None:
    """The GPU table's key of an offer's card, None where it has none; a card on a board of its own (SXM) or in a slot
    (PCIe) is told by the machine's name."""
    machine, memory_gib = offer.instance_name.lower(), offer.gpu_memory or math.inf
    named = {key: names["dstack"].partition(":")[0] for key, names in scheduler_names().items()}
    near = [
        gpu.key
        for gpu in all_gpus()
        if named.get(gpu.key) == offer.gpu_name and abs(gpu.memory_bytes / GIB / memory_gib - 1) <= MEMORY_TOLERANCE
    ]
    if len(near) > 1:
        slot = "pcie" in machine or machine.startswith("standard_nc")
        board = "sxm" in machine or machine.startswith("standard_nd") or offer.provider in ONLY_BOARDS
        near = [key for key in near if ("pcie" in key) == slot] if slot != board else []
    return near[0] if len(near) == 1 else None
