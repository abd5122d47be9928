"""Is the choice the best of its class? Every combination evaluated on its own, without the shortcuts of the walk.

    python -m benchmarks.brute_force [--pairs 20] [--global-batch 32]

For each (model, card): the plan's choice, the fastest setup of its class that its program runs (benchmarks/fence.py
compares programs) and that surely fits (where none does: that may), found by `predict_memory` and the speed model over
the plain product of the dimensions (ranks and targets as the plan fixes them), their ratio, and for which preferences
the difference was given. A ratio below 0.97, or a difference without a preference, is a fault.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.memory.workload import Workload
from planner.models.resolve import resolve_model
from planner.options.stacks import DEFAULT
from planner.planning.answer import plan_workload
from planner.planning.decision.candidates import uneven_tokens_per_s
from planner.planning.decision.node import node_of_setup
from planner.planning.decision.policy import tie_break
from planner.planning.decision.results import PREFERENCE_FRACTION
from planner.planning.evidence.bands import memory_band
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.planning.space import branches, dimension_values, micro_batches
from planner.setup import TrainSetup
from planner.setup.packages import PACKAGE_PRICES
from planner.speed import speed_profile

PAIRS = (
    ("HuggingFaceTB/SmolLM2-135M", "rtx-3060"), ("HuggingFaceTB/SmolLM2-135M", "h100-sxm"),
    ("Qwen/Qwen2.5-0.5B", "t4"), ("Qwen/Qwen2.5-0.5B", "rtx-4090"), ("meta-llama/Llama-3.2-1B", "rtx-4060"),
    ("meta-llama/Llama-3.2-1B", "h200"), ("meta-llama/Llama-3.2-3B", "rtx-3070"), ("meta-llama/Llama-3.2-3B", "l4"),
    ("Qwen/Qwen3-4B", "t4"), ("Qwen/Qwen3-4B", "rtx-4090"), ("meta-llama/Llama-3.1-8B", "rtx-4070-ti-super"),
    ("meta-llama/Llama-3.1-8B", "rtx-4090"), ("meta-llama/Llama-3.1-8B", "h200"), ("Qwen/Qwen2.5-7B", "rtx-4090"),
    ("google/gemma-3-12b-it", "rtx-4090"), ("google/gemma-2-9b", "a100-40gb"), ("Qwen/Qwen2.5-14B", "l40s"),
    ("Qwen/Qwen2.5-32B", "h100-sxm"), ("meta-llama/Llama-3.3-70B-Instruct", "h200"),
    ("openai/gpt-oss-20b", "a100-80gb"),
)  # fmt: skip
ROUNDING = 1e-9
"""The walk and the single prediction add the same terms in another order."""


SHOWN = ("precision", "attention", "kernels", "loss", "optimizer", "checkpointing", "micro_batch_seqs", "quantization")


class Found(NamedTuple):
    """The choice of a plan beside the fastest of its class."""

    plan: Plan
    node: str
    fastest: TrainSetup
    worth: float
    evaluated: int

    @property
    def share(self) -> float:
        """Chosen speed over the fastest's, of samples that differ in length and by the price of a package."""
        chosen = self.plan.chosen
        return worth(chosen.setup.attention, uneven_tokens_per_s(self.plan.workload, chosen)) / self.worth

    @property
    def at_fault(self) -> bool:
        """Slower than a preference may cost, or slower for none."""
        return self.share < 1 - PREFERENCE_FRACTION or (self.share < 1 - ROUNDING and not self.preferences)

    @property
    def preferences(self) -> list[str]:
        """What the choice has that the fastest lacks."""
        request, chosen = self.plan.workload, self.plan.chosen.setup
        advantages = []
        if tie_break(chosen) < tie_break(self.fastest):
            advantages.append("simpler")
        if peak(request, chosen) < peak(request, self.fastest):
            advantages.append("smaller")
        return advantages


def uneven(request: Workload, setup: TrainSetup) -> TrainSetup:
    """A setup with samples that differ in length where those of the request may."""
    return setup.replace(uneven=request.uneven)


def worth(attention: str, tokens_per_s: float) -> float:
    """A speed by the price of its attention's package."""
    return tokens_per_s * (1 - PACKAGE_PRICES.get(attention, 0.0))


def peak(request: Workload, setup: TrainSetup) -> int:
    """Device peak by the formula for one setup."""
    return predict_memory(request.model, request.gpu, uneven(request, setup)).peak_device_bytes


def families(request: Workload, node: str) -> Iterator[TrainSetup]:
    """Every setup of a class at micro-batch 1."""
    values = dimension_values(request)
    for branch in branches(request, values):
        if node_of_setup(branch) != node:
            continue
        names = ("attention", "kernels", "checkpointing", "loss", "optimizer")
        for chosen in product(*(values[name] for name in names)):
            yield branch.replace(**dict(zip(names, chosen, strict=True)))


def search(model: str, gpu: str, global_batch: int) -> Found | None:
    """The plan and the fastest of its class; None where nothing fits."""
    request = PlanRequest(global_batch=global_batch).workload(resolve_model(model), find_gpu(gpu))
    plan = plan_workload(request)
    if not isinstance(plan, Plan):
        return None
    chosen = plan.chosen.setup
    node = node_of_setup(chosen)
    targets = () if chosen.stack == DEFAULT else (chosen.stack,)
    of_program = replace(request, targets=targets, fixed={**request.fixed, "compile": (chosen.compile,)})
    pairs = [(micro, request.global_batch_seqs // micro) for micro in micro_batches(request.global_batch_seqs)]
    speeds = []
    for family in families(of_program, node):
        alone, padded = (
            speed_profile(request.model, request.gpu, uneven(request, family.replace(micro_batch_seqs=micro)))
            for micro in (1, 2)
        )
        for pair in pairs:
            tokens_per_s = (padded if pair[0] > 1 else alone).at(*pair)[1]
            speeds.append((worth(family.attention, tokens_per_s), family, pair))
    may, least = None, {}
    for speed, family, (micro, steps) in sorted(speeds, key=lambda candidate: -candidate[0]):
        if id(family) not in least:  # more sequences never need less (tests/planner/test_memory_terms.py)
            least[id(family)] = peak(
                request, family.replace(micro_batch_seqs=1, accumulation_steps=request.global_batch_seqs)
            )
        if least[id(family)] > request.budget_bytes:
            continue
        setup = family.replace(micro_batch_seqs=micro, accumulation_steps=steps)
        needed = peak(request, setup)
        if needed * (1 + memory_band(request.model, setup)) <= request.budget_bytes:
            break
        may = may or (needed <= request.budget_bytes and (speed, setup))
    else:
        assert may  # the plan has a choice, so something fits
        speed, setup = may
    return Found(plan, node, setup, speed, len(speeds))


def line(outcome: Found) -> str:
    chosen = outcome.plan.chosen
    differs = [
        f"{name} {getattr(outcome.fastest, name)}"
        for name in SHOWN
        if getattr(outcome.fastest, name) != getattr(chosen.setup, name)
    ]
    return (
        f"{outcome.plan.workload.model.model_id:34} {outcome.plan.workload.gpu.key:18} {outcome.node:10} "
        f"{outcome.share * outcome.worth:9,.0f} {outcome.worth:9,.0f} {outcome.share:6.3f} {outcome.evaluated:6,}  "
        f"{', '.join(outcome.preferences) or '-'}; the fastest: {', '.join(differs) or 'the same'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=len(PAIRS))
    parser.add_argument("--global-batch", type=int, default=32)
    args = parser.parse_args()
    print(f"{'model':34} {'card':18} {'class':10} {'chosen':>9} {'fastest':>9} {'share':>6} {'setups':>6}")
    shares, faults, start = [], 0, time.process_time()
    for model, gpu in PAIRS[: args.pairs]:
        outcome = search(model, gpu, args.global_batch)
        if outcome is None:
            print(f"{model:34} {gpu:18} nothing fits")
            continue
        print(line(outcome), flush=True)
        shares.append(outcome.share)
        faults += outcome.at_fault
    print(
        f"{len(shares)} plans: worst {min(shares):.3f}, mean {sum(shares) / len(shares):.4f}, {faults} faults; "
        f"{time.process_time() - start:.0f} CPU s"
    )


if __name__ == "__main__":
    main()
