"""From a workload on several GPUs to a `Plan` or `NoPlan`: walk the spreads stage by stage, ask the tree, explain.

Stages: replicated and sharded data parallelism always; tensor and pipeline parallelism where those leave out a method
that the tree prefers, or spend too much of the step on communication; offloading to the host only where nothing else
fits, because its speed hangs on a slow link and its room on memory that the planner does not know.

The method is preferred as on one GPU (full, LoRA, 8-bit, 4-bit) among what fits without offloading.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.cluster import Cluster, make_cluster
from planner.errors import UsageError
from planner.expressed import check_something_expressed
from planner.outcome import Candidate
from planner.parallel.facts import SpreadFacts, best_spread, merged, walk_stages
from planner.parallel.strategies import FIELDS, all_spreads, spread_key, spread_name
from planner.parallel.tree import OneGpu, spread_answers
from planner.plan import Alternative, Answer, NoPlan, Plan, Remedy, SpaceCount, trade
from planner.planning import (
    NUM_RANKED,
    alternatives,
    candidate,
    contradiction,
    needed_gain,
    num_combinations,
    plan_notes,
    plan_workload,
    refusal,
)
from planner.refine import CorrectionKey
from planner.space import dimension_values, kinds
from planner.tree import NODES, choose_node
from planner.workload import Workload

COMMUNICATION_LIMIT = 0.25
"""Above this share of the step for communication, tensor and pipeline parallelism are compared as well."""
NUM_SPREADS_SHOWN = 3
_FIRST = ("replicate", "shard", "other")


def plan_spread(workload: Workload, corrections: Mapping[CorrectionKey, float]) -> Plan | NoPlan:
    """The formula rung's whole answer for several GPUs.

    Raises:
        UsageError: no way of spreading the job suits the number of GPUs, the global batch and the options given.
    """
    values = dimension_values(workload)
    facts = SpreadFacts()
    node = _walk(workload, values, facts, corrections)
    nodes = facts.nodes()
    walked = sum(known.walked for known in nodes.values())
    if not walked:
        check_something_expressed(workload, kinds(workload, values, facts.walked))
        raise _nothing_to_walk(workload, facts)
    num_spreads = len({one.name for one in facts.walked})
    space = SpaceCount(
        walked=walked,
        infeasible=sum(known.infeasible for known in nodes.values()),
        impossible=max(0, num_combinations(workload, values) * num_spreads - walked),
    )
    alone = one_gpu(workload)
    best = best_spread(facts.of_node(node)) if node is not None else None
    chosen = candidate(workload, best.setup) if best is not None else None
    answers = tuple(spread_answers(workload, facts, node, chosen, alone))
    if node is None or best is None or chosen is None:
        return _refusal(workload, facts, answers, space)
    fastest = merged(facts.of_node(node).values()).ranked()
    ranked = [best, *(point for point in fastest if point is not best)][:NUM_RANKED]
    return Plan(
        workload=workload,
        chosen=chosen,
        alternatives=_alternatives(workload, chosen, node, facts, alone),
        ranked=(chosen, *(candidate(workload, point.setup) for point in ranked[1:])),
        walk=answers,
        space=space,
        notes=(*plan_notes(workload, chosen), *cluster_notes(workload.cluster)),
    )


def _walk(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    facts: SpreadFacts,
    corrections: Mapping[CorrectionKey, float],
) -> str | None:
    """Walks as many stages as it takes; the node of the tree that is taken, None where nothing fits."""
    walk_stages(workload, values, facts, _FIRST, corrections)
    nodes = facts.nodes()
    node = choose_node(nodes, needed_gain(workload, nodes))
    slow = node is not None and _communication_share(workload, facts, node) > COMMUNICATION_LIMIT
    left_out = _better_left_out(facts, node)
    if node is None or slow:
        walk_stages(workload, values, facts, ("split",), corrections)
    elif left_out:
        walk_stages(workload, _only(workload, values, left_out), facts, ("split",), corrections)
    nodes = facts.nodes()
    node = choose_node(nodes, needed_gain(workload, nodes))
    if node is None:
        walk_stages(workload, values, facts, ("offload",), corrections)
        nodes = facts.nodes()
        # a quantized base takes a quarter of the host's memory and of the traffic: it stays unless clearly slower
        node = choose_node(nodes, -needed_gain(workload, nodes))
    return node


def _only(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], methods: tuple[str, ...]
) -> dict[str, tuple[Any, ...]]:
    """The values with fewer methods. Full fine-tuning alone would also be walked with 16-bit master weights, which is
    meant for who asks for it."""
    narrowed = {**values, "method": methods}
    if methods == ("full",) and "precision" not in workload.fixed and "method" not in workload.fixed:
        narrowed["precision"] = tuple(one for one in values["precision"] if one.endswith("-mixed"))
    return narrowed


def _better_left_out(facts: SpreadFacts, node: str | None) -> tuple[str, ...]:
    """Methods that the tree prefers to `node` and that do not fit so far."""
    if node is None:
        return ()
    better = NODES[: NODES.index(node)]
    nodes = facts.nodes()
    missing = [one for one in better if nodes[one].smallest is not None and nodes[one].best() is None]
    return tuple(dict.fromkeys(one.partition("-")[0] for one in missing))


def _communication_share(workload: Workload, facts: SpreadFacts, node: str) -> float:
    best = facts.nodes()[node].best()
    if best is None:
        return 0.0
    formula = candidate(workload, best.setup).formula
    return formula.time_parts_s.get("communication", 0.0) / (formula.step_time_s or 1.0)


def _refusal(workload: Workload, facts: SpreadFacts, answers: tuple[Answer, ...], space: SpaceCount) -> NoPlan:
    """Nothing fits: one GPU's remedies, and more GPUs, or a larger host, before another kind of GPU."""
    no_plan = refusal(workload, facts.nodes(), answers, space)
    more = (*_more_gpus(workload, no_plan), *_larger_host(facts))
    cheap = tuple(one for one in no_plan.remedies if not one.action.startswith(("--gpu ", "a smaller")))
    rest = tuple(one for one in no_plan.remedies if one not in cheap)
    return replace(no_plan, remedies=(*cheap, *more, *rest), notes=cluster_notes(workload.cluster))


def _more_gpus(workload: Workload, no_plan: NoPlan) -> tuple[Remedy, ...]:
    """The next doubling of the number of GPUs that fits, over the coarse walk."""
    from planner.parallel.which import best_of  # which builds on this module

    peak = no_plan.nearest.formula.peak_device_bytes
    for factor in (2, 4, 8, 16):
        num = workload.num_gpus * factor
        batch = num * -(-workload.global_batch_seqs // num)
        wish = replace(workload, cluster=make_cluster(workload.gpu, num), global_batch_seqs=batch)
        points = [point for point in best_of(wish).values() if point is not None]
        if points:
            smallest = min(point.peak_device_bytes for point in points)
            action = f"--gpus {num}" + (f" --global-batch {batch}" if batch != workload.global_batch_seqs else "")
            return (Remedy(action=action, saves_bytes=peak - smallest, fits=True),)
    return ()


def _larger_host(facts: SpreadFacts) -> tuple[Remedy, ...]:
    """Offloading that only the assumed size of the host's memory rules out."""
    for (key, _), reason in facts.refused.items():
        offload = key[FIELDS.index("offload")]
        if offload != "none" and "host memory" in reason:
            return (Remedy(action=f"--offload {offload} ({reason.partition(',')[0]})", saves_bytes=0, fits=True),)
    return ()


def _nothing_to_walk(workload: Workload, facts: SpreadFacts) -> UsageError:
    """The error with the reasons of the spreads that were left out."""
    reasons = list(dict.fromkeys(one.reason for one in all_spreads(workload) if one.reason))
    if facts.refused:
        reasons = [*dict.fromkeys(reason for reason in facts.refused.values()), *reasons]
    num = workload.num_gpus
    contradicted = contradiction(dimension_values(workload))
    if contradicted or not reasons:
        return UsageError(
            f"no setup on {num} GPUs satisfies all the options given{contradicted}",
            hint="options contradict each other (for example --parallel ddp with --offload optimizer); leave one out",
        )
    hint = f"give --global-batch {num * -(-workload.global_batch_seqs // num)}, or fewer GPUs"
    if not any("global batch" in reason for reason in reasons):
        hint = "leave --parallel and the degrees out: the plan then chooses among all of them"
    mendable = [reason for reason in reasons if "global batch" in reason] or reasons
    return UsageError(f"no way to spread this over {num} GPUs: {mendable[0]}", hint=hint)


def one_gpu(workload: Workload) -> OneGpu:
    """The plan of the same work on one GPU of the cluster; None where its options leave nothing."""
    fixed = {name: values for name, values in workload.fixed.items() if name not in FIELDS}
    wish = replace(workload, cluster=None, fixed=fixed)
    try:
        return plan_workload(wish)
    except UsageError:
        return None


def _alternatives(
    workload: Workload, chosen: Candidate, node: str, facts: SpreadFacts, alone: OneGpu
) -> tuple[Alternative, ...]:
    """The best of the other spreads, the same on one GPU, and what one GPU's plan offers as well."""
    found: list[Alternative] = []
    mine = spread_key(chosen.setup)
    others = [(key, known.best()) for key, known in facts.of_node(node).items() if key != mine]
    points = sorted((p for _, p in others if p is not None), key=lambda point: -point.tokens_per_s)
    for point in points[:NUM_SPREADS_SHOWN]:
        other = candidate(workload, point.setup)
        found.append(Alternative(label=spread_name(other.setup), candidate=other, trade=trade(chosen, other)))
    if isinstance(alone, Plan):
        found.append(Alternative(label="one GPU", candidate=alone.chosen, trade=trade(chosen, alone.chosen)))
    known = {each.candidate.setup for each in found}
    rest = alternatives(workload, chosen, node, facts.nodes())
    return (*found, *(each for each in rest if each.candidate.setup not in known))


def cluster_notes(cluster: Cluster | None) -> tuple[str, ...]:
    """What is assumed about the cluster, one sentence each; nothing on one GPU."""
    if cluster is None:
        return ()
    within = f"{cluster.within.name}, {cluster.within.bytes_per_s / 1e9:,.0f} GB/s each way for one GPU"
    notes = [f"{cluster.gpus_per_node} GPUs in a node talk over {within} (nominal; --interconnect changes it)"]
    if cluster.gpus_per_node == 1:
        notes = []
    if cluster.between is not None:
        notes.append(
            f"{cluster.num_nodes} nodes talk over {cluster.between.name}, "
            f"{cluster.between.bytes_per_s / 1e9:,.0f} GB/s each way for one node (nominal; --interconnect changes it)"
        )
    return tuple(notes)
