"""Is the choice the best of its class over all that the planner compares: programs, kernels, torch.compile, layouts?

    python -m benchmarks.fence [--request TEXT] [--write]

For each of 24 requests: the plan's choice, and the fastest that surely fits, of the same class (method and
quantization, in full fine-tuning with or without fp32 master weights, the same rank and adapted matrices), over every
launch target that has a file for the objective, its kernel families, torch.compile, every layout, checkpointing, loss,
optimizer, attention, generator and micro-batch: each target's whole space is walked by itself. "Best" is the fastest
that the policy (docs/choices.md) leaves open, flash attention 2 taken for slower by its package's price; what the
policy leaves out and is faster stands beside it with the reason. A share below 0.97 is a fault.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, NamedTuple

from benchmarks.brute_force import worth
from benchmarks.shared import DOCS, marked
from planner.core.errors import UsageError
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.models.resolve import resolve_model
from planner.options.kernels import KERNELS
from planner.options.stacks import DEFAULT
from planner.planning.answer import plan_workload
from planner.planning.decision.candidates import uneven_tokens_per_s
from planner.planning.decision.layouts import STAGES, layout_name, layouts
from planner.planning.decision.node import node_of_setup
from planner.planning.decision.policy import full_quality, left_out
from planner.planning.decision.results import Limits
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.planning.space import dimension_values
from planner.planning.targets import LAUNCHERS
from planner.planning.walk import Padding, WalkedSetup, walk
from planner.setup import TrainSetup

LEAST_SHARE = 0.97


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: a model, its cards, and what is asked beside them."""

    model: str
    gpu: str
    num_gpus: int = 1
    words: str = ""
    seq_len: int | None = None
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        cards = f"{self.num_gpus} x " * (self.num_gpus > 1) + self.gpu
        return f"{self.model.split('/')[-1]} / {cards} {self.words}".strip()

    def workload(self) -> Workload:
        gpu = find_gpu(self.gpu)
        cluster = make_cluster(gpu, self.num_gpus) if self.num_gpus > 1 else None
        batch = None if "objective" in self.fixed else 32
        request = PlanRequest(seq_len=self.seq_len, fixed=self.fixed, global_batch=batch)
        return request.workload(resolve_model(self.model), gpu, cluster)


FULL: Mapping[str, tuple[Any, ...]] = {"method": ("full",)}
DPO: Mapping[str, tuple[Any, ...]] = {"objective": ("dpo",)}
WISHES = (
    Asked(model="Qwen/Qwen2.5-0.5B", gpu="t4"),
    Asked(model="Qwen/Qwen2.5-0.5B", gpu="rtx-4090", words="full", fixed=FULL),
    Asked(model="meta-llama/Llama-3.2-1B", gpu="rtx-3060"),
    Asked(model="meta-llama/Llama-3.2-1B", gpu="h100-sxm", words="full", fixed=FULL),
    Asked(model="meta-llama/Llama-3.2-3B", gpu="l4"),
    Asked(model="meta-llama/Llama-3.2-3B", gpu="rtx-4090", words="DPO", fixed=DPO),
    Asked(model="Qwen/Qwen3-4B", gpu="t4"),
    Asked(model="Qwen/Qwen2.5-7B", gpu="rtx-5090", words="4k", seq_len=4096),
    Asked(model="meta-llama/Llama-3.1-8B", gpu="rtx-4090"),
    Asked(model="meta-llama/Llama-3.1-8B", gpu="rtx-3090", num_gpus=2),
    Asked(model="meta-llama/Llama-3.1-8B", gpu="a100-80gb"),
    Asked(model="meta-llama/Llama-3.1-8B", gpu="h100-sxm", words="32k", seq_len=32768),
    Asked(model="meta-llama/Llama-3.1-8B", gpu="h100-sxm", num_gpus=8, words="full", fixed=FULL),
    Asked(model="meta-llama/Llama-3.1-8B", gpu="h100-sxm", words="GRPO", fixed={"objective": ("grpo",)}),
    Asked(model="Qwen/Qwen2.5-14B", gpu="rtx-4090"),
    Asked(model="Qwen/Qwen2.5-14B", gpu="a100-80gb", words="DPO", fixed=DPO),
    Asked(model="Qwen/Qwen2.5-32B", gpu="h100-sxm"),
    Asked(model="meta-llama/Llama-3.3-70B-Instruct", gpu="b200"),
    Asked(model="meta-llama/Llama-3.3-70B-Instruct", gpu="mi300x"),
    Asked(model="meta-llama/Llama-3.3-70B-Instruct", gpu="h100-sxm", num_gpus=8),
    Asked(model="openai/gpt-oss-20b", gpu="h100-sxm"),
    Asked(model="Qwen/Qwen3-30B-A3B", gpu="h100-sxm"),
    Asked(model="Qwen/Qwen3.5-9B", gpu="rtx-4090"),
    Asked(model="Qwen/Qwen3-Next-80B-A3B-Instruct", gpu="b200"),
)


class Found(NamedTuple):
    """A plan beside the fastest of its class: of what the policy leaves open, and of all with why it was left out."""

    plan: Plan
    fastest: WalkedSetup
    beyond: WalkedSetup
    reason: str
    walked: int

    @property
    def share(self) -> float:
        """Chosen speed over the fastest's that is open, of samples that differ in length."""
        workload, chosen = self.plan.workload, self.plan.chosen
        mine = worth(chosen.setup.attention, uneven_tokens_per_s(workload, chosen))
        return mine / worth_of(self.fastest, Padding(workload))


def worth_of(point: WalkedSetup, padding: Padding) -> float:
    """A speed of samples that differ in length, by the price of its package."""
    return worth(point.attention, point.tokens_per_s * padding.kept_fraction(point))


def quality(workload: Workload, setup: TrainSetup) -> tuple[object, ...]:
    return node_of_setup(setup), full_quality(setup), setup.lora_rank, setup.lora_targets


def spaces(workload: Workload) -> Iterator[Workload]:
    """The workload once for every target and its kernels, with torch.compile and without."""
    for target in [name for name in workload.objective_spec.targets if name not in LAUNCHERS]:
        for compiled in (False, True):
            families = {} if compiled or "kernels" in workload.fixed else {"kernels": tuple(KERNELS)}
            fixed = {**workload.fixed, **families, **({"compile": (True,)} if compiled else {})}
            yield replace(workload, targets=(target,), fixed=fixed)


def points(workload: Workload) -> Iterator[WalkedSetup]:
    """Every point of every target's space under every layout."""
    for space in spaces(workload):
        try:
            values = dimension_values(space)
            placements = layouts(space, [stage for stage in STAGES if stage != "offload"]) if space.num_gpus > 1 else ()
        except UsageError:
            continue
        if space.num_gpus == 1 or placements:
            yield from walk(space, values, placements)


def search(request: Asked) -> Found | None:
    """The plan and the fastest of its class; None where nothing fits."""
    workload = request.workload()
    plan = plan_workload(workload)
    if not isinstance(plan, Plan):
        return None
    limits = Limits(workload.model, workload.budget_bytes, gpu=workload.gpu)
    chosen, walked = plan.chosen, 0
    mine, sure = (
        quality(workload, chosen.setup),
        limits.bytes_with_margin(chosen.setup) >= chosen.formula.peak_device_bytes,
    )
    padding = Padding(workload)
    best: dict[str, WalkedSetup] = {}  # by why it is left out
    reasons: dict[tuple[object, ...], str] = {}
    for point in points(workload):
        walked += 1
        if point.peak_device_bytes > workload.budget_bytes:
            continue
        setup = point.family
        if quality(workload, setup) != mine or (sure and point.peak_device_bytes > limits.bytes_with_margin(setup)):
            continue
        kind = setup.stack, setup.compile, setup.method, setup.lora_targets
        if kind not in reasons:
            reasons[kind] = left_out(workload, setup)
        reason = reasons[kind]
        if reason not in best or worth_of(point, padding) > worth_of(best[reason], padding):
            best[reason] = point
    fastest = best[""]
    reason, beyond = max(best.items(), key=lambda entry: worth_of(entry[1], padding))
    return Found(plan, fastest, beyond, reason, walked)


def differences(fastest: TrainSetup, chosen: TrainSetup) -> str:
    names = (
        "stack", "kernels", "compile", "attention", "precision", "quantization", "optimizer", "loss", "checkpointing",
        "selective_checkpointing", "micro_batch_seqs", "rollout",
    )  # fmt: skip
    words = [f"{name} {getattr(fastest, name)}" for name in names if getattr(fastest, name) != getattr(chosen, name)]
    if layout_name(fastest) != layout_name(chosen):
        words.append(layout_name(fastest))
    return ", ".join(words) or "the same"


def row(request: Asked, outcome: Found) -> str:
    chosen = outcome.plan.chosen
    setup, speed = chosen.setup, chosen.formula.tokens_per_s or 0.0
    by = setup.trainer.title if setup.stack != DEFAULT else "TRL"
    how = f"{by}, {setup.kernels}" + ", compiled" * setup.compile
    more = ""
    if outcome.beyond.tokens_per_s > outcome.fastest.tokens_per_s * 1.0001:
        words = differences(outcome.beyond.setup, setup)
        more = f"{outcome.beyond.tokens_per_s / speed:.2f} times by {words}: {outcome.reason}"
    nearest = differences(outcome.fastest.setup, setup)
    return f"| {request.title} | {node_of_setup(setup)}, {how} | {outcome.share:.3f} | {nearest} | {more} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--request", default="", help="only requests whose title has this text")
    parser.add_argument("--write", action="store_true", help="write the table into docs/choices.md")
    args = parser.parse_args()
    head = "| request | chosen | share | the best differs in | left out |"
    lines = [f"Walked on {date.today()}.\n", head, "|---|---" * 2 + "|---|"]
    print("\n".join(lines), flush=True)
    shares, start, walked = [], time.process_time(), 0
    for request in WISHES:
        if args.request.lower() not in request.title.lower():
            continue
        outcome = search(request)
        line = row(request, outcome) if outcome is not None else f"| {request.title} | nothing surely fits | | | |"
        print(line, flush=True)
        lines.append(line)
        shares += [outcome.share] if outcome is not None else []
        walked += outcome.walked if outcome is not None else 0
    print(
        f"{len(shares)} plans, {walked:,} setups: worst {min(shares):.3f}, mean {sum(shares) / len(shares):.3f}, "
        f"{sum(share < LEAST_SHARE for share in shares)} below {LEAST_SHARE}; {time.process_time() - start:.0f} CPU s"
    )
    if args.write:
        marked(DOCS / "choices.md", "fence", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
