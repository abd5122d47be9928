"""Does more memory ever give a slower plan, and what do the stated preferences cost?

    python -m benchmarks.monotone_plans [--pairs 30] [--budgets 20] [--gpus 1] [--changes]

For each (model, card) pair: the choice at rising memory limits, formula rung; the space of a pair is walked once.
Within a class (full, LoRA, 4-bit, 8-bit) the chosen speed may fall by what preferences may cost (3 % for the simpler of
two, 3 % more where flash attention would be a package to install), no more; a change of class is listed. Beside it,
chosen speed over the fastest walked setup of the chosen class that surely fits, and what certainty costs: over the
fastest that may fit.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from planner.cli.options import cluster_of
from planner.decision.choosing import choose
from planner.decision.facts import PREFERENCE_FRACTION, Facts, merged
from planner.errors import PlannerError
from planner.hardware.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.planning.runs import Known
from planner.planning.space import dimension_values
from planner.wish import Wish

MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B", "google/gemma-3-12b-it", "Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
)  # fmt: skip
CARDS = ("t4", "rtx-4090", "h100-sxm")
PAIRS = tuple((model, card) for model in MODELS for card in CARDS)


GIVEN_FRACTION = 1 - (1 - PREFERENCE_FRACTION) ** 2
"""Of the best speed, for both preferences."""


class Step(NamedTuple):
    """What is chosen at one memory limit; `share` of the fastest walked setup of its class that surely fits
    (1 where none does: then the nearest to it is taken), `of_tight` of the fastest that may."""

    limit_gib: float
    node: str
    tokens_per_s: float
    share: float
    of_tight: float
    tight: bool


def rising(model_name: str, key: str, num_budgets: int, num_gpus: int = 1) -> list[Step]:
    """The choices at evenly rising memory limits up to the card's, where something fits."""
    model, card = resolve_model(model_name), find_gpu(key)
    known, steps = Known(), []
    cluster = cluster_of(card, num_gpus, None, None) if num_gpus > 1 else None
    for index in range(1, num_budgets + 1):
        limit_gib = card.memory_bytes / 2**30 * index / num_budgets
        try:
            wish = Wish(memory_gib=limit_gib).workload(model, card, cluster)
        except PlannerError:  # less than a quarter of a GiB
            continue
        facts = Facts(known=known)
        node, best = choose(wish, dimension_values(wish), facts)
        if node is None or best is None:
            continue
        whole = merged(facts.of_node(node).values())
        fastest = [max(point.tokens_per_s for point in points) for points in (whole.sure or [best], whole.fitting)]
        shares = (best.tokens_per_s / speed for speed in fastest)
        steps.append(Step(limit_gib, node, best.tokens_per_s, *shares, tight=not whole.sure))
    return steps


def slower(steps: list[Step]) -> Iterator[tuple[Step, float]]:
    """The steps that lose more against less memory in the same class than a preference may cost, and that speed."""
    best: dict[str, float] = {}
    for step in steps:
        before = best.get(step.node, 0.0)
        if step.tokens_per_s < before * (1 - GIVEN_FRACTION):
            yield step, before
        best[step.node] = max(before, step.tokens_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=len(PAIRS))
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--changes", action="store_true", help="list every change of class")
    args = parser.parse_args()
    num_slower, changes = 0, 0
    every: list[Step] = []
    for name, key in PAIRS[: args.pairs]:
        steps = rising(name, key, args.budgets, args.gpus)
        every += steps
        for step, before in slower(steps):
            num_slower += 1
            print(
                f"SLOWER {name} {key} at {step.limit_gib:.1f} GiB: "
                f"{step.node} {step.tokens_per_s:,.0f} after {before:,.0f}"
            )
        for was, now in pairwise(steps):
            if was.node != now.node:
                changes += 1
                if args.changes:
                    print(
                        f"{name} {key}: from {now.limit_gib:.1f} GiB {now.node} {now.tokens_per_s:,.0f} tokens/s "
                        f"(before {was.node} {was.tokens_per_s:,.0f})"
                    )
    pairs = len(PAIRS[: args.pairs])
    print(f"{len(every)} plans of {pairs} pairs: {num_slower} slower within a class, {changes} changes of class")
    for words, shares in (
        ("surely fits", [step.share for step in every]),
        ("may fit", [step.of_tight for step in every]),
    ):
        mean = sum(shares) / len(shares)
        print(f"chosen over the fastest of its class that {words}: worst {min(shares):.3f}, mean {mean:.4f}")
    print(f"{sum(step.tight for step in every)} tight plans: nothing surely fits")


if __name__ == "__main__":
    main()
