"""The launch targets side by side: for each, what `plan --target` would plan for one request, and whether one that
no plan takes unasked is faster."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.core.errors import NotExpressed, SetupError, UsageError
from planner.core.notes import measured, risk
from planner.core.records import dataclass
from planner.frameworks.tools import LAUNCHERS
from planner.memory.attention_kernels import has_expert_stacks, missing_kernels
from planner.memory.workload import Workload
from planner.options.kernels import KERNELS
from planner.options.stacks import TARGET_ROWS
from planner.planning.answer import plan_workload
from planner.planning.decision.choosing import choose_alone
from planner.planning.decision.policy import left_out
from planner.planning.decision.results import PREFERENCE_FRACTION
from planner.planning.groups import WalkCache
from planner.planning.plan import NoPlan, Plan
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, sides_of


@dataclass(frozen=True, kw_only=True)
class TargetChoice:
    """One launch target: what is planned for it, or why nothing is."""

    target: str
    title: str
    candidate: Candidate | None = None
    refused: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        return self.candidate.formula.tokens_per_s if self.candidate is not None else None


def compare_targets(workload: Workload) -> list[TargetChoice]:
    """The fastest plan by the formula of every target that has a file for the objective, fastest first; what plans
    nothing last."""
    apart = dict.fromkeys(LAUNCHERS, workload.num_gpus == 1) | {  # which start another's program
        "mlx": workload.gpu.vendor != "Apple",
        "loggetta": not has_expert_stacks(workload.model),
    }
    names = [name for name in workload.objective_spec.targets if not apart.get(name)]
    return sorted((_choice(workload, name) for name in names), key=lambda row: -(row.tokens_per_s or 0.0))


def _choice(workload: Workload, name: str) -> TargetChoice:
    choice = TargetChoice(target=name, title=TARGET_ROWS[name].title)
    try:
        plan = plan_workload(replace(workload, targets=(name,)))
    except UsageError as problem:
        return replace(choice, refused=problem.reason if isinstance(problem, NotExpressed) else problem.message)
    if isinstance(plan, NoPlan):
        return replace(choice, refused="nothing fits")
    return replace(choice, candidate=plan.chosen)


def as_fast(rows: Sequence[TargetChoice]) -> list[TargetChoice]:
    """Targets whose speed lies within the fastest one's band: not surely slower."""
    best, *others = [(row, row.candidate.formula) for row in rows if row.candidate is not None]
    speed, band = best[1].tokens_per_s or 0.0, best[1].time_band_fraction or 0.0
    return [row for row, formula in others if (formula.tokens_per_s or 0.0) * (1 + band) >= speed]


ALIKE = ("method", "precision", "kbit_fp32_cast", "lora_rank", "lora_targets", "attention")
"""What another program's setup shares with the plan's, so that programs are compared on the same training; the base's
4-bit form is left open."""


def _alike(setup: TrainSetup, *, but: str = "") -> dict[str, tuple[Any, ...]]:
    fixed: dict[str, tuple[Any, ...]] = {name: (getattr(setup, name),) for name in ALIKE if name != but}
    fixed["quantization"] = ("nf4-double", "nf4") if setup.four_bit else (setup.quantization,)
    return fixed if setup.method != "full" else {name: fixed[name] for name in fixed if name != "lora_rank"}


def own_choice(workload: Workload, setup: TrainSetup, target: str) -> Candidate | None:
    """What a target would best run of the same training, where it cannot run a plan's own setup; None where nothing."""
    fixed = {**_alike(setup, but="attention"), **workload.fixed}
    return choose_alone(replace(workload, targets=(target,), fixed=fixed))


def left_out_engines(plan: Plan, cache: WalkCache) -> list[TargetChoice]:
    """Programs with kernels of their own that the policy leaves out (`planner.planning.decision.policy.left_out`) and
    that are predicted to train the chosen class faster, fastest first.

    Only what differs is walked: kernels, checkpointing, loss, optimizer and micro-batch. By the formula on both sides.
    `cache`: what walks of the model computed.
    """
    request, chosen = plan.workload, plan.chosen
    mine, asked_for = chosen.formula.tokens_per_s, request.targets or "kernels" in request.fixed
    if asked_for or request.num_gpus > 1 or chosen.setup.method == "full" or not mine:
        return []
    choices = []
    for family in KERNELS.values():
        for target in family.only:
            reason = left_out(request, chosen.setup.replace_trusted(stack=target))
            if target not in request.objective_spec.targets or not reason:
                continue
            try:
                if missing_kernels(request.model, request.gpu, chosen.setup.replace(kernels=family.name)):
                    continue
            except SetupError:  # it does not take the plan's quantization or adapter
                continue
            fixed = {**_alike(chosen.setup), **request.fixed, "kernels": (family.name,)}
            theirs = choose_alone(replace(request, targets=(target,), fixed=fixed), cache)
            title = TARGET_ROWS[target].title
            choices.append(TargetChoice(target=target, title=title, candidate=theirs, refused=reason))
    faster = [row for row in choices if (row.tokens_per_s or 0.0) > mine * (1 + PREFERENCE_FRACTION)]
    return sorted(faster, key=lambda row: -(row.tokens_per_s or 0.0))


def with_engine_note(plan: Plan, cache: WalkCache) -> Plan:
    """The plan with one sentence on the fastest program that was left out, where one is faster."""
    for row in left_out_engines(plan, cache)[:1]:
        assert row.candidate is not None
        formula = row.candidate.formula
        speed = formula.tokens_per_s or 0.0
        below, above = sides_of(formula) or (0.0, 0.0)
        times = f"{speed / (plan.chosen.formula.tokens_per_s or speed):.1f} x this"
        band = f"-{100 * below:.0f} to +{100 * above:.0f} %"
        words = f"{row.title}: {speed:,.0f} tokens/s predicted ({band}), {times}, left out: {row.refused}"
        plan = replace(plan, notes=(risk(f"{words} (--target {row.target} plans for it)"), *plan.notes))
    return plan


WAITING_FROM_FRACTION = 0.2
"""Of a step, sent and waited for, from which one node alone is planned too: below it half the GPUs are no faster."""


def with_one_node_note(plan: Plan, cache: WalkCache) -> Plan:
    """The plan with one sentence where one of its nodes alone is faster than all of them over their network."""
    request, chosen = plan.workload, plan.chosen.formula
    cluster, waits = request.cluster, ("communication", "bubble")
    if cluster is None or cluster.num_nodes == 1 or not chosen.step_time_s or not chosen.tokens_per_s:
        return plan
    if sum(chosen.time_parts_s.get(name, 0.0) for name in waits) < WAITING_FROM_FRACTION * chosen.step_time_s:
        return plan
    each = cluster.gpus_per_node
    one_node = replace(cluster, num_gpus=each, num_nodes=1, between=None)
    alone = choose_alone(replace(request, cluster=one_node), cache)
    speed = (alone.formula.tokens_per_s or 0.0) if alone is not None else 0.0
    if speed <= chosen.tokens_per_s:
        return plan
    named = f"{each} GPU{'s' * (each > 1)} {speed:,.0f} tokens/s"
    words = f"one of these nodes alone is faster: {named}, all {chosen.tokens_per_s:,.0f} over their network"
    way = f"(--gpus {each}, without --nodes{', --interconnect and --parallel' * (each == 1)})"
    return replace(plan, notes=(measured(f"{words} {way}"), *plan.notes))
