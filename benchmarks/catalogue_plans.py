"""The chosen setup of every catalogue model on some cards, one JSON line per plan; what changed between two such files.

    python -m benchmarks.catalogue_plans --out after.jsonl [--gpus t4,rtx-4090] [--models llama] [--workers 2]
    python -m benchmarks.catalogue_plans --compare before.jsonl after.jsonl

Formula level only: a reshaping must leave every line as it was, a change of a formula or a rule
shows which plans it moves.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.shared import rows_of
from planner.core.errors import PlannerError
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.resolve import resolve_model
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan
from planner.planning.plan_request import PlanRequest
from planner.setup.interchange import setup_to_dict

GPUS = ("t4", "rtx-3060", "rtx-4090", "a100-80gb", "h100-sxm")


def one_plan(pair: tuple[str, str]) -> dict[str, Any]:
    """The plan of one (model, gpu) with no other request, as plain data."""
    name, key = pair
    line: dict[str, Any] = {"model": name, "gpu": key}
    try:
        plan = plan_workload(PlanRequest().workload(resolve_model(name), find_gpu(key)))
    except PlannerError as error:
        return line | {"error": str(error)}
    chosen = plan.nearest if isinstance(plan, NoPlan) else plan.chosen
    return line | {
        "fits": not isinstance(plan, NoPlan),
        "setup": setup_to_dict(chosen.setup),
        "peak_device_bytes": chosen.formula.peak_device_bytes,
        "tokens_per_s": chosen.formula.tokens_per_s,
        "walked": plan.space.walked,
        "infeasible": plan.space.infeasible,
        "alternatives": [] if isinstance(plan, NoPlan) else [each.label for each in plan.alternatives],
    }


Plans = dict[tuple[str, str], dict[str, Any]]


def _plans_by_pair(path: Path) -> Plans:
    return {(line["model"], line["gpu"]): line for line in rows_of(path)}


def compare(before: Path, after: Path) -> int:
    """Prints every plan that differs, with what differs; the number of them."""
    old, new = _plans_by_pair(before), _plans_by_pair(after)
    moved: Counter[str] = Counter()
    differing = 0
    for pair in sorted(old.keys() | new.keys()):
        was, now = old.get(pair, {}), new.get(pair, {})
        changes = []
        for field in sorted(was.keys() | now.keys()):
            if was.get(field) == now.get(field):
                continue
            if field == "setup":
                mine, other = was.get(field, {}), now.get(field, {})
                keys = [key for key in sorted(mine.keys() | other.keys()) if mine.get(key) != other.get(key)]
                changes += [f"{key} {mine.get(key)} -> {other.get(key)}" for key in keys]
                moved.update(keys)
            else:
                changes.append(f"{field} {was.get(field)} -> {now.get(field)}")
                moved[field] += 1
        if changes:
            differing += 1
            print(*pair, "|", "; ".join(changes))
    print(
        f"{differing} of {len(old.keys() | new.keys())} plans differ; by field: {dict(moved.most_common())}",
        file=sys.stderr,
    )
    for words in classes(old, new):
        print(words, file=sys.stderr)
    return differing


def classes(old: Plans, new: Plans) -> Iterator[str]:
    """How many plans that fit moved from which class to which, and what the setups that moved inside theirs lost."""
    pairs = [pair for pair in old.keys() & new.keys() if old[pair].get("fits") and new[pair].get("fits")]
    moves = Counter((_node(old[pair]), _node(new[pair])) for pair in pairs)
    for (was, now), count in moves.most_common():
        if was != now:
            yield f"{was} -> {now}: {count}"
    stayed = [pair for pair in pairs if _node(old[pair]) == _node(new[pair])]
    moved = [pair for pair in stayed if old[pair]["setup"] != new[pair]["setup"]]
    shares = sorted(new[pair]["tokens_per_s"] / old[pair]["tokens_per_s"] for pair in moved)
    yield f"the same setup: {len(stayed) - len(moved)}; another setup of the same class: {len(moved)}"
    if shares:
        worst, middle, best = shares[0], shares[len(shares) // 2], shares[-1]
        yield f"their speed, new over old: worst {worst:.3f}, median {middle:.3f}, best {best:.3f}"


def _node(line: dict[str, Any]) -> str:
    setup = line["setup"]
    eight = setup.get("quantization") == "int8"
    return str(setup["method"]) if setup["method"] != "qlora" else "8-bit QLoRA" if eight else "4-bit QLoRA"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpus", default=",".join(GPUS))
    parser.add_argument("--models", default="", help="only names that contain this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        sys.exit(1 if compare(*args.compare) else 0)
    names = [name for name in catalogue.names() if args.models.lower() in name.lower()]
    pairs = [(name, gpu) for name in names for gpu in args.gpus.split(",")]
    out = args.out.open("w") if args.out else sys.stdout
    with ProcessPoolExecutor(args.workers) as pool:
        for line in pool.map(one_plan, pairs, chunksize=8):
            print(json.dumps(line), file=out)


if __name__ == "__main__":
    main()
