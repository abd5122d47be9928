"""What stands beside the chosen setup of a plan."""

from collections.abc import Iterator, Mapping

from planner.choices.stacks import DEFAULT
from planner.decision.candidates import candidate
from planner.decision.facts import Facts, NodeFacts
from planner.decision.node import Node
from planner.decision.spreads import spread_key, spread_name
from planner.decision.tree import OneGpu
from planner.outcome import Candidate
from planner.plan import Alternative, Plan, trade
from planner.setup import TrainSetup
from planner.workload import Workload

NUM_SPREADS_SHOWN = 3


def alternatives(
    workload: Workload, chosen: Candidate, node: Node, facts: Facts, alone: OneGpu
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
    rest = _of_one_spread(workload, chosen, node, facts.nodes())
    return (*found, *(each for each in rest if each.candidate.setup not in known))


def _of_one_spread(
    workload: Workload, chosen: Candidate, node: Node, facts: Mapping[Node, NodeFacts]
) -> tuple[Alternative, ...]:
    """Other methods, ranks, checkpointing and micro-batches."""
    offered: dict[TrainSetup, str] = {}
    for label, setup in _offers(chosen.setup, node, facts):
        if setup != chosen.setup:
            offered.setdefault(setup, label)
    others = [(label, candidate(workload, setup)) for setup, label in offered.items()]
    return tuple(Alternative(label=label, candidate=other, trade=trade(chosen, other)) for label, other in others)


def _offers(setup: TrainSetup, node: Node, facts: Mapping[Node, NodeFacts]) -> Iterator[tuple[str, TrainSetup]]:
    """What may stand beside the chosen setup, the first of two that are the same counts."""
    smallest = facts[node].smallest
    tight = facts[node].best_tight()
    if tight is not None and not facts[node].surely_fits(tight):  # then faster by more than a preference is worth
        yield "tight", tight.setup
    if setup.stack != DEFAULT or setup.compile:
        plain = facts[node].best_of(lambda one: one.stack == DEFAULT and not one.compile)
        if plain is not None:
            yield "by TRL" if setup.stack != DEFAULT else "not compiled", plain.setup
    for other in Node:
        best = facts[other].best()
        if other != node and best is not None:
            yield other.words, best.setup
    if setup.method != "full":
        row = setup.kind
        for rank in (2 * setup.lora_rank, max(1, setup.lora_rank // 2)) if row.size else ():
            yield f"{row.size} {rank}", setup.with_(lora_rank=rank)
        if setup.lora_targets == "all-linear" and row.adapts_matrices:
            yield "adapters on attention only", setup.with_(lora_targets="attention")
    if smallest is not None:
        yield "smallest memory", smallest.setup
    if not setup.checkpointing and (setup.method == "full" or setup.kind.checkpointing):
        yield "with checkpointing", setup.with_(checkpointing=1)
    for point in facts[node].ranked():
        if point.shared.checkpointing != setup.checkpointing:
            yield "checkpointing " + ("off" if not point.shared.checkpointing else "on"), point.setup
            break
    for point in facts[node].ranked():
        if point.micro_batch_seqs > setup.micro_batch_seqs and point.loss == setup.loss:
            yield "larger micro-batch", point.setup
            break
