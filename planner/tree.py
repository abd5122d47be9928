"""The decision tree: which questions are asked in which order, answered from the walked space with the deciding bytes.

Step 1 gets one sequence in: full fine-tuning, then LoRA, then 8-bit and 4-bit QLoRA; the first that fits is taken, and
a quantized one instead of LoRA only where the whole is faster. Step 2 spends what is left: attention kernel,
checkpointing, micro-batch, accumulation. The tree is not monotone (QLoRA with the fp32 cast can need more than LoRA),
so every branch is compared, none assumed.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from planner.calibration_bands import USUAL_BAND
from planner.plan import Answer, Cut
from planner.predict import attention_kernels
from planner.setup import TrainSetup
from planner.space import Point
from planner.units import gib
from planner.workload import Workload

NODES = ("full", "lora", "qlora-8bit", "qlora-4bit")
NODE_NAMES = {
    "full": "full fine-tuning",
    "lora": "LoRA (16-bit base)",
    "qlora-8bit": "8-bit QLoRA",
    "qlora-4bit": "4-bit QLoRA",
}
KEEP = 96
"""How many of the fastest points of a node are kept as candidates."""
QUANTIZE_GAIN_FRACTION = 0.05
"""QLoRA replaces a LoRA that fits only when predicted this much faster (and by more than the speed model errs)."""

TIE_FRACTION = 0.01
"""Speeds closer than this are a tie, far below the speed model's error: the simpler setup wins."""
SURE_SPEED_FRACTION = 0.03
"""So much speed, less than the speed model errs, is given for memory to spare by more than the formula errs."""
SIMPLE_FIRST = {
    "optimizer": ("adamw-fused", "adamw", "adamw-8bit", "paged-adamw-8bit"),
    "loss": ("chunked", "full", "liger"),
    "attention": ("sdpa", "flash-attention-2", "eager"),
    "quantization": ("none", "nf4-double", "nf4", "int8"),
}
"""Values in the order of what needs fewer extra packages and loses less; values not listed come last."""


def simplicity(setup: TrainSetup) -> int:
    """How far a setup is from the simplest, summed over the dimensions; smaller is simpler."""
    if setup.num_gpus > 1:
        from planner.parallel.strategies import spread_rank  # one GPU never needs it

        return spread_rank(setup) + simplicity(setup.trusted_with(num_gpus=1))
    return sum(
        values.index(getattr(setup, name)) if getattr(setup, name) in values else len(values)
        for name, values in SIMPLE_FIRST.items()
    )


def node_of_setup(setup: TrainSetup) -> str:
    """The node of the tree that a setup belongs to."""
    if setup.method != "qlora":
        return setup.method
    return "qlora-8bit" if setup.quantization == "int8" else "qlora-4bit"


@dataclass(slots=True)
class NodeFacts:
    """What the walk learned about one node."""

    walked: int = 0
    infeasible: int = 0
    budget_bytes: int = 0
    smallest: Point | None = None
    smallest_unchecked: Point | None = None
    smallest_cast: Point | None = None
    fastest: list[tuple[float, int, Point]] = field(default_factory=list)

    def best(self) -> Point | None:
        """The fastest point that fits, or one nearly as fast whose fitting is sure; among those within one percent the
        simplest, then the smallest."""
        fitting = [entry[2] for entry in self.fastest]
        if not fitting:
            return None
        sure_bytes = self.budget_bytes / (1 + USUAL_BAND)
        near = near_fastest(fitting, SURE_SPEED_FRACTION)
        sure = [point for point in near if point.peak_device_bytes <= sure_bytes]
        close = near_fastest(sure or fitting, TIE_FRACTION)
        return min(close, key=lambda point: (simplicity(point.family), point.peak_device_bytes))

    def ranked(self) -> list[Point]:
        """Kept points that fit, fastest first."""
        return [entry[2] for entry in sorted(self.fastest, key=lambda entry: (-entry[0], entry[1]))]


def near_fastest(points: list[Point], fraction: float) -> list[Point]:
    """The points no slower than the fastest by this share."""
    floor = max(point.tokens_per_s for point in points) * (1 - fraction)
    return [point for point in points if point.tokens_per_s >= floor]


def collect(points: Iterable[Point], budget_bytes: int) -> dict[str, NodeFacts]:
    """Facts of every node from one pass over the walked points."""
    facts = {node: NodeFacts() for node in NODES}
    collect_into(points, budget_bytes, lambda shared: facts[node_of_setup(shared)])
    for node in facts.values():
        if node.smallest is None:
            node.smallest = node.smallest_cast
    return facts


def collect_into(points: Iterable[Point], budget_bytes: int, facts_of: Callable[[TrainSetup], NodeFacts]) -> None:
    """Adds the walked points to the facts that `facts_of` gives for what they share."""
    shared = node = None
    for index, point in enumerate(points):
        if point.shared is not shared or node is None:  # points come in runs that share their branch
            shared = point.shared
            node = facts_of(shared)
            node.budget_bytes = budget_bytes
        node.walked += 1
        peak = point.peak_device_bytes
        if point.micro_batch_seqs == 1:
            if point.shared.kbit_fp32_cast:
                if node.smallest_cast is None or peak < node.smallest_cast.peak_device_bytes:
                    node.smallest_cast = point
            elif node.smallest is None or peak < node.smallest.peak_device_bytes:
                node.smallest = point
            if not point.shared.checkpointing and (
                node.smallest_unchecked is None or peak < node.smallest_unchecked.peak_device_bytes
            ):
                node.smallest_unchecked = point
        if peak > budget_bytes:
            node.infeasible += 1
        else:
            _keep(node.fastest, point, index)


def _keep(heap: list[tuple[float, int, Point]], point: Point, index: int) -> None:
    entry = (point.tokens_per_s, -index, point)
    if len(heap) < KEEP:
        heapq.heappush(heap, entry)
    elif entry[0] > heap[0][0]:
        heapq.heapreplace(heap, entry)


def choose_node(facts: dict[str, NodeFacts], needed_gain_fraction: float) -> str | None:
    """The node taken: the least approximate that fits, or a quantized one faster than LoRA by the needed gain."""
    for node in NODES:
        best = facts[node].best()
        if best is None:
            continue
        if node != "lora":
            return node
        rivals = [(facts[other].best(), other) for other in ("qlora-8bit", "qlora-4bit")]
        faster = [(rival.tokens_per_s, other) for rival, other in rivals if rival is not None]
        quickest = max(faster, default=(0.0, "lora"))
        return quickest[1] if quickest[0] > best.tokens_per_s * (1 + needed_gain_fraction) else "lora"
    return None


def method_answers(facts: dict[str, NodeFacts], chosen: str | None, workload: Workload) -> list[Answer]:
    """Step 1 as answers: one per node, in order, with the bytes of its smallest setup."""
    budget = workload.budget_bytes
    answers = []
    passed = False
    for node in NODES:
        known = facts[node]
        if known.smallest is None:
            continue
        need = known.smallest.peak_device_bytes
        name = NODE_NAMES[node]
        cuts: tuple[Cut, ...] = ()
        if known.best() is None:
            choice = "no"
            reason = f"the smallest {name} setup needs {gib(need)}, {gib(need - budget)} more than the budget"
            cuts = (Cut(branch=name, reason=reason, num_setups=known.walked, needed_bytes=need, budget_bytes=budget),)
        elif node == chosen:
            choice = "yes, taken"
            reason = f"one sequence needs {gib(need)} at least, {gib(budget - need)} are left for activations"
            rival, mine = facts["lora"].best(), known.best()
            if node.startswith("qlora") and rival and mine and mine.tokens_per_s > rival.tokens_per_s:
                reason += "; the whole is faster than 16-bit LoRA"
            passed = True
        else:
            choice = "fits, not taken"
            reason = _not_taken(node, facts, chosen, passed)
        answers.append(
            Answer(
                question=f"Does {name} fit with one sequence?",
                choice=choice,
                reason=reason + _cast_note(known),
                needed_bytes=need,
                budget_bytes=budget,
                cuts=cuts,
            )
        )
    return answers


def _not_taken(node: str, facts: dict[str, NodeFacts], chosen: str | None, passed: bool) -> str:
    best, taken = facts[node].best(), facts[chosen].best() if chosen else None
    if best is None or taken is None:
        return "fits, but another branch was taken"
    ratio = best.tokens_per_s / taken.tokens_per_s
    if not passed:
        spare = ", with a quarter of its base in the host's memory" if taken.shared.offload != "none" else ""
        return f"fits, but {NODE_NAMES[chosen or '']} is predicted {1 / ratio:.2f} times as fast{spare}"
    if node.startswith("qlora") and chosen == "lora":
        return (
            f"16-bit LoRA fits; quantizing would run at {ratio:.2f} times its speed: no gain beyond the model's error"
        )
    return f"{NODE_NAMES[chosen or '']} fits and approximates less; this runs at {ratio:.2f} times its speed"


def _cast_note(known: NodeFacts) -> str:
    if known.smallest_cast is None or known.smallest is None or known.smallest is known.smallest_cast:
        return ""
    extra = known.smallest_cast.peak_device_bytes - known.smallest.peak_device_bytes
    return f"; peft's fp32 cast of embeddings, norms and head would cost {gib(extra)} more"


def _attention_reason(workload: Workload, family: TrainSetup) -> str:
    """What the chosen attention does on this card."""
    if "sdpa" not in workload.model.attentions and family.attention == "eager":
        return "no fused kernel supports this model's attention"
    if attention_kernels(workload.model, workload.gpu, family) & {"math", "eager"}:
        return "no fused kernel takes this on the card: tokens x tokens matrices are kept"
    return "fused kernels keep no tokens x tokens matrix"


def activation_answers(facts: NodeFacts, best: Point, workload: Workload, same_node: list[Point]) -> list[Answer]:
    """Step 2 as answers: attention, checkpointing, micro-batch, accumulation."""
    budget = workload.budget_bytes
    family = best.family
    answers = [
        Answer(
            question="Which attention kernel?",
            choice=family.attention,
            reason=_attention_reason(workload, family),
        )
    ]
    unchecked = facts.smallest_unchecked
    if unchecked is not None:
        need = unchecked.peak_device_bytes
        fits = need <= budget
        if not fits:
            choice, reason = "yes", f"without it one sequence needs {gib(need)}, {gib(need - budget)} too much"
        elif family.checkpointing:
            choice = "yes"
            reason = f"one sequence would fit without it ({gib(need)}), but the larger micro-batch it allows is faster"
        else:
            choice, reason = "no", f"one sequence fits without it ({gib(need)}), and nothing has to be recomputed"
        if family.checkpointing > 1 and choice == "yes":
            choice = f"every {family.checkpointing} layers"
        answers.append(
            Answer(
                question="Is gradient checkpointing needed?",
                choice=choice,
                reason=reason,
                needed_bytes=need,
                budget_bytes=budget,
            )
        )
    larger = [p for p in same_node if p.family == family and p.micro_batch_seqs > best.micro_batch_seqs]
    copies = family.data_degree
    if best.accumulation_steps == 1:
        reason = "the whole global batch fits in one forward" + (" of every copy" if copies > 1 else "")
    elif larger:
        reason = "larger micro-batches fit but are not predicted to be faster"
    else:
        reason = f"the fastest that fits: {gib(best.peak_device_bytes)} of {gib(budget)}"
    answers.append(
        Answer(
            question="Which micro-batch, and how much accumulation?",
            choice=f"{best.micro_batch_seqs} x {best.accumulation_steps}"
            + (f" x {copies} copies" if copies > 1 else ""),
            reason=f"{reason}; the global batch stays {workload.global_batch_seqs} sequences",
            needed_bytes=best.peak_device_bytes,
            budget_bytes=budget,
        )
    )
    return answers
