"""Does more memory ever give a slower plan, and what do the stated preferences cost?

    python benchmarks/monotone_plans.py [--pairs 30] [--budgets 20] [--workers 2]

For each (model, card) pair: the plan at rising memory limits, formula rung. Within a class (full, LoRA, 4-bit, 8-bit)
the chosen speed may fall by what a preference may cost (3 %), no more; a change of class is listed. Beside it, chosen
speed over the fastest setup of the chosen class that fits (the whole space is walked, so this is brute force).
"""

import argparse
from concurrent.futures import ProcessPoolExecutor

from planner.cli.wish import workload
from planner.decision.facts import PREFERENCE_FRACTION, NodeFacts, collect_into, node_of_setup
from planner.errors import PlannerError
from planner.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.plan import Plan
from planner.planning import plan_workload
from planner.space import dimension_values, walk
from planner.workload import Workload

MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B", "google/gemma-3-12b-it", "Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
)  # fmt: skip
CARDS = ("t4", "rtx-4090", "h100-sxm")
Step = tuple[float, str, float, float]


def fastest_of(asked: Workload, node: str) -> float:
    """Tokens/s of the fastest setup of a class that fits, over the whole space."""
    known = NodeFacts()
    points = (point for point in walk(asked, dimension_values(asked)) if node_of_setup(point.shared) == node)
    collect_into(points, asked.budget_bytes, lambda _: known)
    return max(point.tokens_per_s for point in known.ranked())


def rising(task: tuple[str, str, int]) -> tuple[str, str, list[Step]]:
    """(memory in GiB, node, tokens/s, share of the fastest of the node) at each limit where something fits."""
    name, key, count = task
    model, card = resolve_model(name), find_gpu(key)
    steps: list[Step] = []
    for index in range(1, count + 1):
        limit = card.memory_bytes / 2**30 * index / count
        try:
            wish = workload(model, card, fixed={}, memory_gib=limit)
        except PlannerError:
            continue
        plan = plan_workload(wish)
        if not isinstance(plan, Plan) or not plan.chosen.tokens_per_s:
            continue
        node = node_of_setup(plan.chosen.setup)
        fastest = fastest_of(wish, node)
        steps.append((limit, node, plan.chosen.tokens_per_s, plan.chosen.tokens_per_s / fastest))
    return name, key, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    tasks = [(model, card, args.budgets) for model in MODELS for card in CARDS][: args.pairs]
    slower = changes = plans = 0
    shares: list[float] = []
    with ProcessPoolExecutor(args.workers) as pool:
        for name, key, steps in pool.map(rising, tasks):
            plans += len(steps)
            shares += [share for *_, share in steps]
            best: dict[str, float] = {}
            for before, after in zip([None, *steps], steps, strict=False):
                limit, node, speed, _ = after
                if speed < best.get(node, 0.0) * (1 - PREFERENCE_FRACTION):
                    slower += 1
                    print(f"SLOWER {name} {key} at {limit:.1f} GiB: {node} {speed:,.0f} after {best[node]:,.0f}")
                best[node] = max(best.get(node, 0.0), speed)
                if before is not None and before[1] != node:
                    changes += 1
                    was = f"{before[1]} {before[2]:,.0f}"
                    print(f"{name} {key}: from {limit:.1f} GiB {node} {speed:,.0f} tokens/s (before {was})")
    print(f"{plans} plans of {len(tasks)} pairs: {slower} slower within a class, {changes} changes of class")
    print(f"chosen over the fastest of its class: worst {min(shares):.3f}, mean {sum(shares) / len(shares):.4f}")


if __name__ == "__main__":
    main()
