"""The walk of a workload's whole space, in stages, and the node of the tree that is taken: what every plan, suggestion,
table and search chooses from.

One GPU is a layout of one. With several, in stages: replicated and sharded data parallelism always; tensor and pipeline
parallelism where those leave out a method that the tree prefers, or spend too much of the step on communication;
offloading to the host only where nothing else surely fits, or still communicates as much, because its speed hangs on a
slow link and its room on memory that the planner does not know. The method is preferred
(`decision.tree.preferred_nodes`) among what fits so.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from planner.core.errors import UsageError
from planner.memory.workload import Workload
from planner.options.precisions import PRECISIONS
from planner.planning.decision.candidates import candidate, communication_share
from planner.planning.decision.layouts import layouts, layouts_of_one
from planner.planning.decision.node import Node
from planner.planning.decision.policy import fewer_matrices, opened_workloads
from planner.planning.decision.results import WalkResults, add_layouts, best_layout
from planner.planning.decision.tree import choose_node, preferred_nodes
from planner.planning.groups import WalkCache
from planner.planning.plan import CorrectionKey
from planner.planning.space import dimension_values
from planner.planning.walk import WalkedSetup
from planner.setup.outcome import Candidate

COMMUNICATION_LIMIT = 0.25
"""Above this share of the step for communication, tensor and pipeline parallelism are compared as well, and above it
still with them, offloading: what it frees is room for a larger micro-batch per gather."""
_FIRST = ("replicate", "shard", "other")
Values = Mapping[str, tuple[Any, ...]]


def spaces(workload: Workload, values: Values) -> Iterator[tuple[Workload, Values]]:
    """The plain space of a workload, and those that the policy opens beside it, each with the request that it is of;
    nothing where there are no values."""
    if values:
        yield workload, values
        for request in opened_workloads(workload, values):
            with suppress(UsageError):  # nothing of it has kernels here
                yield request, dimension_values(request)


def choose(
    workload: Workload,
    values: Values,
    results: WalkResults,
    corrections: Mapping[CorrectionKey, float] | None = None,
    *,
    explained: bool = True,
) -> tuple[Node | None, WalkedSetup | None]:
    """The node of the tree that is taken and its point, None where nothing fits; the facts learn what was walked,
    in as many stages as it takes.

    Args:
        explained: with what else could be taken; without it no quantized base is walked where none is needed.
    """

    def walk(given: Values, stages: tuple[str, ...]) -> None:
        for request, space_values in spaces(workload, given):
            chosen = layouts_of_one(request) if request.num_gpus == 1 else layouts(request, stages)
            add_layouts(request, space_values, results, chosen, corrections)

    def taken(node: Node | None) -> tuple[Node | None, WalkedSetup | None]:
        return node, best_layout(results.of_node(node)) if node is not None else None

    plain = {**values, "method": tuple(method for method in values["method"] if method != "qlora")}
    # where LoRA surely fits, only who prefers speed or offloads takes a quantized base for it
    apart = not (explained or workload.prefer == "speed" or workload.offloads) and "lora" in plain["method"]
    apart = apart and values["quantize_experts"] == (False,)
    walk(plain if apart else values, _FIRST)
    walk(fewer_matrices(workload, values, results.nodes()[Node.LORA].sure), _FIRST)
    if apart and results.nodes()[Node.LORA].sure:
        values = plain
    elif apart and "qlora" in values["method"]:
        walk({**values, "method": ("qlora",)}, _FIRST)
    node = choose_node(results.nodes(), workload, from_host=workload.num_gpus == 1 and workload.offloads)
    if workload.num_gpus == 1:
        return taken(node)
    slow = _slow(workload, results, node)
    left_out = _better_left_out(workload, results, node)
    if node is None or slow:
        walk(values, ("split",))
    elif left_out:
        # full fine-tuning alone would also be walked with 16-bit master weights, which is meant for who asks for it
        narrowed = {**values, "method": left_out}
        if left_out == ("full",) and "precision" not in workload.fixed and "method" not in workload.fixed:
            narrowed["precision"] = tuple(
                precision for precision in values["precision"] if PRECISIONS[precision].wide_weights
            )
        walk(narrowed, ("split",))
    split = node is None or slow
    node = choose_node(results.nodes(), workload)
    sure = node is not None and results.nodes()[node].sure  # what only may fit is no answer where something surely does
    if not sure or (slow and _slow(workload, results, node)):
        walk(values, ("offload",) if split else ("split", "offload"))
    # a quantized base takes a quarter of the host's memory and of the traffic: it stays unless clearly slower
    return taken(choose_node(results.nodes(), workload, from_host=node is None))


def choose_alone(workload: Workload, cache: WalkCache | None = None) -> Candidate | None:
    """What the plan of this work takes, without the rest of a plan; None where nothing fits, or no setup can be."""
    results = WalkResults() if cache is None else WalkResults(cache=cache)
    try:
        best = choose(workload, dimension_values(workload), results, explained=False)[1]
    except UsageError:
        return None
    return candidate(workload, best.setup) if best is not None else None


def _slow(workload: Workload, results: WalkResults, node: Node | None) -> bool:
    """Whether the fastest setup of a node spends too much of its step on communication."""
    best = results.nodes()[node].best() if node is not None else None
    if best is None:
        return False
    return communication_share(candidate(workload, best.setup, padding=False)) > COMMUNICATION_LIMIT


def _better_left_out(workload: Workload, results: WalkResults, node: Node | None) -> tuple[str, ...]:
    """Methods that the tree prefers to `node` and that do not fit so far."""
    if node is None:
        return ()
    order, nodes = preferred_nodes(workload), results.nodes()
    better = [(each, nodes[each]) for each in order[: order.index(node)]]
    missing = [each.method for each, walked in better if walked.smallest is not None and walked.best() is None]
    return tuple(dict.fromkeys(missing))
