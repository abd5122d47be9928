"""Does more of anything ever give a slower plan, and what do the stated preferences cost?

    python -m benchmarks.monotone_plans [--pairs 30] [--budgets 20] [--gpus 1] [--along memory] [--changes]

For each (model, card) pair the choice, formula level, at rising memory limits (`--along memory`), larger batches
(`batch`), shorter sequences of as many tokens a step (`length`), or more GPUs (`gpus`). Within a class (full, LoRA on
all matrices or on attention's, 4-bit, 8-bit; of full fine-tuning with or without fp32 masters) the chosen speed may
fall by what preferences may cost (3 % for the simpler of two, 3 % more where flash attention would be a package to
install), no more; a change of class is listed. Beside it, chosen speed over the fastest walked setup of the chosen
class that surely fits, and what certainty costs: over the fastest that may fit.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from finetune_planner.cli.options import cluster_of
from planner.core.errors import PlannerError
from planner.hardware.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.planning.decision.choosing import choose
from planner.planning.decision.policy import full_quality
from planner.planning.decision.results import PREFERENCE_FRACTION, WalkResults, merged, near_fastest
from planner.planning.groups import WalkCache
from planner.planning.plan_request import PlanRequest
from planner.planning.space import dimension_values

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
    """What is chosen at one step of what rises; `share` of the fastest walked setup of its class that surely fits
    (1 where none does: then the nearest to it is taken), `of_tight` of the fastest that may."""

    at: str
    node: str
    tokens_per_s: float
    share: float
    of_tight: float
    tight: bool


BATCHES = (16, 32, 64, 256)
LENGTHS = (8192, 4096, 2048, 1024)
GPUS = (1, 2, 4, 8)
ALONG = ("memory", "batch", "length", "gpus")


def wishes(along: str, memory_gib: float, num_budgets: int, num_gpus: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(words, options of the request, GPUs) of every step of what rises."""
    if along == "memory":
        for index in range(1, num_budgets + 1):
            limit_gib = memory_gib * index / num_budgets
            yield f"{limit_gib:.1f} GiB", {"memory_gib": limit_gib}, num_gpus
    elif along == "batch":
        yield from ((f"{batch} a step", {"global_batch": batch}, num_gpus) for batch in BATCHES)
    elif along == "length":
        for tokens in LENGTHS:
            yield f"{tokens} tokens", {"seq_len": tokens, "global_batch": 16 * LENGTHS[0] // tokens}, num_gpus
    else:
        yield from ((f"{num} GPUs", {"global_batch": 64}, num) for num in GPUS)


def rising(
    model_name: str, key: str, num_budgets: int, num_gpus: int = 1, *, along: str = "memory", **options: Any
) -> list[Step]:
    """The choices as one thing rises, where something fits; `options` of the request."""
    model, card = resolve_model(model_name), find_gpu(key)
    cache, steps = WalkCache(), []
    for words, overrides, num in wishes(along, card.memory_bytes / 2**30, num_budgets, num_gpus):
        cluster = cluster_of(card, num, None, None) if num > 1 else None
        results = WalkResults(cache=cache)
        try:
            request = PlanRequest(**{**options, **overrides}).workload(model, card, cluster)
            node, best = choose(request, dimension_values(request), results)
        except PlannerError:  # less than a quarter of a GiB, a batch that is no whole groups
            continue
        if node is None or best is None:
            continue
        whole, quality = merged(results.of_node(node).values()), full_quality(best.shared)
        padding = whole.limits.padding if whole.limits is not None else None
        fastest = [
            near_fastest([point for point in points if full_quality(point.shared) == quality], 0.0, None, padding)[0]
            for points in (whole.sure or [best], whole.fitting)
        ]
        speed = whole.speed(best)
        shares = (speed / whole.speed(point) for point in fastest)
        kind = f"{node} {quality} {best.shared.lora_targets}{' tight' * (not whole.sure)}"
        steps.append(Step(words, kind, speed, *shares, tight=not whole.sure))
    return steps


def after(steps: list[Step]) -> Iterator[tuple[Step, float]]:
    """Every step and the best speed that less of it gave in the same class, 0 where it is the first."""
    best: dict[str, float] = {}
    for step in steps:
        before = best.get(step.node, 0.0)
        yield step, before
        best[step.node] = max(before, step.tokens_per_s)


def slower(steps: list[Step]) -> list[tuple[Step, float]]:
    """The steps that lose more against a smaller one in the same class than a preference may cost, and that speed."""
    return [(step, before) for step, before in after(steps) if step.tokens_per_s < before * (1 - GIVEN_FRACTION)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=len(PAIRS))
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--along", choices=ALONG, default="memory")
    parser.add_argument("--changes", action="store_true", help="list every change of class")
    args = parser.parse_args()
    num_slower, changes, least = 0, 0, 1.0
    every: list[Step] = []
    for name, key in PAIRS[: args.pairs]:
        steps = rising(name, key, args.budgets, args.gpus, along=args.along)
        every += steps
        least = min([least, *(step.tokens_per_s / before for step, before in after(steps) if before)])
        for step, before in slower(steps):
            num_slower += 1
            print(f"SLOWER {name} {key} at {step.at}: {step.node} {step.tokens_per_s:,.0f} after {before:,.0f}")
        for was, now in pairwise(steps):
            if was.node != now.node:
                changes += 1
                if args.changes:
                    print(
                        f"{name} {key}: from {now.at} {now.node} {now.tokens_per_s:,.0f} tokens/s "
                        f"(before {was.node} {was.tokens_per_s:,.0f})"
                    )
    pairs = len(PAIRS[: args.pairs])
    print(f"{len(every)} plans of {pairs} pairs: {num_slower} slower within a class, {changes} changes of class")
    print(f"worst against less of it in the same class: {least:.3f}")
    for words, shares in (
        ("surely fits", [step.share for step in every]),
        ("may fit", [step.of_tight for step in every]),
    ):
        mean = sum(shares) / len(shares)
        print(f"chosen over the fastest of its class that {words}: worst {min(shares):.3f}, mean {mean:.4f}")
    print(f"{sum(step.tight for step in every)} tight plans: nothing surely fits")


if __name__ == "__main__":
    main()
