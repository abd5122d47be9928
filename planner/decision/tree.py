"""The decision tree: which questions are asked in which order, answered from the walked space with the deciding bytes.

Step 1 gets one sequence in: full fine-tuning, then LoRA, then 8-bit and 4-bit QLoRA; the first that fits is taken, and
a quantized one instead of LoRA only where the whole is faster. With several GPUs `spread_tree` then asks how the job is
put on them. The last step spends what is left: attention kernel, checkpointing, micro-batch, accumulation. The tree is
not monotone (QLoRA with the fp32 cast can need more than LoRA), so every branch is compared, none assumed.
"""

from collections.abc import Iterator, Mapping

from planner.decision.candidates import candidate
from planner.decision.facts import NODE_NAMES, NODES, Facts, NodeFacts
from planner.decision.spreads import spread_key
from planner.outcome import Candidate
from planner.plan import Answer, Cut, NoPlan, Plan
from planner.predict import attention_kernels
from planner.setup import TrainSetup
from planner.space import Point
from planner.units import gib
from planner.workload import Workload

QUANTIZE_GAIN_FRACTION = 0.05
"""QLoRA replaces a LoRA that fits only when predicted this much faster (and by more than the speed model errs)."""

OneGpu = Plan | NoPlan | None
"""The answer for the same work on one GPU; None where the options leave nothing to plan there."""


def answers(
    workload: Workload, facts: Facts, node: str | None, chosen: Candidate | None, alone: OneGpu
) -> Iterator[Answer]:
    """All answers, in the order in which the questions are asked; `node` and `chosen` are what was taken, if anything
    fits."""
    methods = method_answers(facts.nodes(), node, workload)
    if workload.num_gpus == 1:
        yield from methods
    else:
        from planner.decision.spread_tree import spread_answers  # one GPU never needs it

        yield from spread_answers(workload, facts, node, chosen, alone, methods)
    if node is not None and chosen is not None:
        mine = facts.of_node(node)[spread_key(chosen.setup)]
        ranked = mine.ranked()
        best = next(point for point in ranked if point.setup == chosen.setup)
        yield from activation_answers(mine, best, workload, ranked)


def needed_gain(workload: Workload, facts: Mapping[str, NodeFacts]) -> float:
    """How much faster a quantized setup must be to replace a LoRA that fits: more than the speed model errs."""
    best = facts["lora"].best()
    if best is None:
        return 0.0
    return max(QUANTIZE_GAIN_FRACTION, candidate(workload, best.setup).formula.time_band_fraction or 0.0)


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
