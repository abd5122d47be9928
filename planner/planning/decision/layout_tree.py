"""The decision tree's third step: how the job is put on its GPUs, answered from the walked layouts with their bytes.

One GPU enough? The method as on one GPU. Then: do the states fit when every GPU holds them all; if not, the least
sharding that fits is usually fastest; tensor and pipeline parallelism where sharding leaves too much or sends too much;
the host's memory last. Every spread not taken is a cut with the bytes or the speed that decided it.
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.core.errors import SetupError
from planner.core.units import gib, percent
from planner.memory.engines import engine_named, engine_of, why_not
from planner.memory.model import rank_memories
from planner.memory.states import weight_bytes
from planner.memory.workload import Workload
from planner.planning.decision.candidates import candidate, communication_share
from planner.planning.decision.layouts import FIRST_STAGES, Layout, all_layouts, fields_name, layout_key, layout_name
from planner.planning.decision.node import Node, node_of_setup
from planner.planning.decision.results import TIE_FRACTION, NodeResults, WalkResults
from planner.planning.plan import Answer, NoPlan, Plan, PrunedBranch
from planner.setup import LAYOUT_FIELDS, TrainSetup
from planner.setup.outcome import Candidate

QUANTIZATION_RARELY_FROM = 4
"""GPUs from which sharding makes room so cheaply that quantization rarely pays."""


def layout_answers(
    workload: Workload,
    results: WalkResults,
    node: Node | None,
    chosen: Candidate | None,
    alone: Plan | NoPlan | None,
    methods: list[Answer],
) -> Iterator[Answer]:
    """What is asked on several GPUs, around the question of the method (`methods`)."""
    if alone is not None:
        yield one_gpu_answer(workload, chosen, alone)
    yield from _methods(results, methods)
    if node is None or chosen is None:
        yield from _given_up(workload, results)
        return
    yield _replicated(workload, results, node, chosen)
    yield _sharded(workload, results, node, chosen)
    yield _split(workload, results, node, chosen)
    cuts = tuple(_pruned_layouts(workload, results, node, chosen, ("offload",)))
    if chosen.setup.offload == "none":
        choice, reason = "no", "something fits on the GPUs alone, and is no slower"
    else:
        choice, reason = layout_name(chosen.setup), "nothing surely fits on the GPUs alone"
        if any(kept and kept.sure for *_, kept in _walked(results, node, (*FIRST_STAGES, "split"))):
            reason = "what fits on the GPUs alone waits longer for their links"
        if "offload" in workload.fixed:
            reason = "asked for"
    yield Answer("Must states move to the host's memory?", choice, reason, cuts=cuts)
    if chosen.setup.has_reference:
        yield _reference(workload, chosen.setup)
    yield _one_process(workload, chosen)
    if chosen.setup.parallel == "device-map":
        yield Answer(
            "GPUs that take turns (device map)?",
            "asked for, not recommended",
            "the layers are cut over the GPUs and one works while the others wait: room for one copy, no speed",
        )
    if workload.num_gpus >= QUANTIZATION_RARELY_FROM:
        yield _quantization(workload, results, node, chosen)


def one_gpu_answer(workload: Workload, chosen: Candidate | None, alone: Plan | NoPlan) -> Answer:
    """Would one GPU do, and what do the others buy?"""
    question, num = "Is one GPU enough?", workload.num_gpus
    if isinstance(alone, NoPlan):
        need = alone.nearest.formula.peak_device_bytes
        reason = f"the smallest setup of any method needs {gib(need)} there"
        return Answer(question, "no", reason, need, workload.budget_bytes)
    single = alone.chosen
    node = node_of_setup(single.setup)
    need = single.formula.peak_device_bytes
    fits = f"one fits {node.words} at {single.tokens_per_s:,.0f} tokens/s"
    if chosen is None:
        choice, reason = "yes", f"{fits}; {num} GPUs do not, with the options given"
    elif (mine := node_of_setup(chosen.setup)) != node:
        choice = f"for {node.words} only" if [*Node].index(mine) < [*Node].index(node) else "yes"
        reason = f"{fits}; {num} GPUs take {mine.words} at {chosen.tokens_per_s:,.0f}"
    else:
        ratio = chosen.tokens_per_s / single.tokens_per_s if single.tokens_per_s else 0.0
        choice = "yes, but slower" if ratio > 1 else "yes, and it is faster than all together"
        reason = (
            f"{fits}; {num} GPUs run {ratio:.2f} times as fast ({percent(ratio / num)} of {num} times), "
            f"so a token costs {num / ratio if ratio else 0:.2f} times as much"
        )
    return Answer(question, choice, reason, need, workload.budget_bytes)


def _methods(results: WalkResults, methods: list[Answer]) -> Iterator[Answer]:
    """Step 1 over all layouts: the smallest setup of each method says under which spread it is."""
    walked = filter(None, (results.nodes()[node].smallest for node in Node))
    for smallest, answer in zip(walked, methods, strict=True):
        where = f"; smallest as {layout_name(smallest.shared)}"
        yield replace(
            answer,
            question=answer.question.replace("?", " on every GPU?"),
            reason=answer.reason + where,
            cuts=tuple(replace(cut, reason=cut.reason + where) for cut in answer.cuts),
        )


def _replicated(workload: Workload, results: WalkResults, node: Node, chosen: Candidate) -> Answer:
    question = "Do the states fit when every GPU holds them all (DDP)?"
    for layout, key, layout_results in _walked(results, node, ("replicate",)):
        if layout_results is None:
            return Answer(question, "cannot run", results.refused.get((key, node), "not walked"))
        need = _need(layout_results)
        if layout_results.best() is None:
            choice, reason = "no", f"the smallest {node.words} setup needs {gib(need)} on every GPU"
        elif key == layout_key(chosen.setup):
            choice, reason = "yes, taken", f"{engine_named('ddp').sends}; nothing has to be gathered"
        else:
            choice = "yes, not taken" if layout_results.sure else "may fit, not taken"
            reason = _slower(workload, layout_results, chosen, layout.name)
        return Answer(question, choice, reason, need, workload.budget_bytes)
    return Answer(question, "not asked", _left_out(workload, ("replicate",)))


def _sharded(workload: Workload, results: WalkResults, node: Node, chosen: Candidate) -> Answer:
    setup = chosen.setup
    cuts = tuple(_pruned_layouts(workload, results, node, chosen, ("shard",)))
    needed = None
    if engine_of(setup).shares and not setup.is_split and setup.offload == "none":
        choice, needed = layout_name(setup), _need(results.of_node(node)[layout_key(setup)])
        sends = engine_of(setup).sends if setup.reshard_after_forward else "weights are gathered once per micro-batch"
        reason = f"each of {setup.shards} GPUs keeps its part of the {engine_of(setup).shares}; {sends}"
    elif not (needs := [cut.needed_bytes for cut in cuts if cut.needed_bytes is not None]):
        choice, reason = "not asked", cuts[0].reason if cuts else _left_out(workload, ("shard",))
    elif min(needs) > workload.budget_bytes:
        choice, reason = "sharding alone is not enough", f"none of these fits: {layout_name(setup)} is taken"
    else:
        choice, reason = "nothing", f"{layout_name(setup)} fits and nothing else is clearly faster"
    budget = workload.budget_bytes if needed is not None else None
    return Answer(
        "What must be sharded over the GPUs?", choice, reason, needed_bytes=needed, budget_bytes=budget, cuts=cuts
    )


def _split(workload: Workload, results: WalkResults, node: Node, chosen: Candidate) -> Answer:
    name, share = layout_name(chosen.setup), percent(communication_share(chosen))
    cuts = tuple(_pruned_layouts(workload, results, node, chosen, ("split",)))
    if chosen.setup.is_split:
        choice, reason = "yes", f"{name} is the fastest that fits; communication takes {share} of its step"
    elif cuts:
        choice, reason = "no", f"none beats {name}, whose communication takes {share} of the step"
    else:
        choice, reason = "not needed", f"{name} fits, and communication takes {share} of its step"
    cluster = workload.cluster
    if cluster is not None and cluster.between is not None:
        across = cluster.between.bytes_per_s / cluster.gpus_per_node / 1e9
        why = (
            f"it sends activations in every layer, and {cluster.between.name} gives one GPU {across:,.1f} GB/s against "
            f"{cluster.within.bytes_per_s / 1e9:,.0f} within a node"
        )
        cuts += (PrunedBranch("tensor parallelism across nodes", why, 0),)
    return Answer("Tensor, pipeline or context parallelism?", choice, reason, cuts=cuts)


def _reference(workload: Workload, setup: TrainSetup) -> Answer:
    question = "Where is the reference model?"
    if not setup.copies_reference:
        reason = "the base answers with its adapters switched off, spread as it is"
        return Answer(question, "nowhere else", reason)
    size = sum(weight_bytes(workload.model, engine_of(setup).computes(setup)).values())
    reason = f"a second copy of the weights, {gib(size)}"
    if setup.objective_spec.reference:
        reason += "; --precomputed-reference asks it before the first step and keeps none"
    return Answer(question, engine_of(setup).reference, reason)


def _one_process(workload: Workload, chosen: Candidate) -> Answer:
    """DP is explained and not recommended; its bytes where the setup can be put that way."""
    question = "One process for all GPUs (nn.DataParallel, DP)?"
    if chosen.setup.parallel == "dp":
        other = candidate(workload, chosen.setup.replace(parallel="ddp"), padding=False)
        reason = "one Python process drives every GPU, copies the weights out and gathers outputs on the first"
        if chosen.tokens_per_s:
            ratio = other.tokens_per_s / chosen.tokens_per_s
            need = gib(other.formula.peak_device_bytes)
            reason += f"; the same under DDP would run at {ratio:.2f} times the speed and need {need}"
        return Answer(question, "asked for, not recommended", reason)
    reason = (
        "one Python process would drive every GPU, copy the weights out at every forward and gather all outputs on the "
        "first; DDP has one process per GPU"
    )
    try:
        plain = TrainSetup(**{name: getattr(chosen.setup, name) for name in _ONE_GPU_FIELDS})
        if chosen.setup.data_degree != workload.num_gpus:  # another number of copies: one sequence each
            plain = plain.replace(micro_batch_seqs=1, accumulation_steps=1)
        setup = plain.replace(num_gpus=workload.num_gpus, parallel="dp")
    except SetupError:
        return Answer(question, "no", reason)
    refused = why_not(workload.model, setup)
    if refused:
        return Answer(question, "cannot run", refused)
    ranks = rank_memories(workload.model, workload.gpu, setup)
    peaks = [rank.breakdown.peak_device_bytes for rank in ranks]
    if max(peaks) > min(peaks):
        reason += f"; GPU 0 would need {gib(max(peaks))}, {gib(max(peaks) - min(peaks))} more than the others"
    return Answer(question, "no", reason, needed_bytes=max(peaks), budget_bytes=workload.budget_bytes)


_ONE_GPU_FIELDS = tuple(
    name for name in TrainSetup.__dataclass_fields__ if name not in ("num_gpus", "parallel", *LAYOUT_FIELDS)
)


def _quantization(workload: Workload, results: WalkResults, node: Node, chosen: Candidate) -> Answer:
    """Sharding already makes the base small on every GPU: quantizing it buys little from four GPUs on."""
    question = f"Would a quantized base help on {workload.num_gpus} GPUs?"
    if node.quantized:
        lora = results.nodes()[Node.LORA]
        need = _need(lora) if lora.smallest is not None else None
        unquantized = lora.best()
        if unquantized is None:
            reason = "no unquantized base fits, even sharded"
        elif chosen.setup.offload != "none":
            ratio = (chosen.tokens_per_s or 0.0) / unquantized.tokens_per_s
            reason = f"{ratio:.2f} times the speed of 16-bit LoRA, with a quarter of its base in the host's memory"
        else:
            reason = "the whole is faster"
        return Answer(question, "here, yes", reason, need, workload.budget_bytes)
    weights_bytes = sum(term.size_bytes for term in chosen.formula.terms if term.category == "weights")
    reason = f"rarely: {layout_name(chosen.setup)} leaves {gib(weights_bytes)} of weights on a GPU"
    if chosen.setup.method == "full":
        return Answer(question, "no", reason + ", and quantized weights cannot be trained")
    small = results.nodes()[Node.FOUR_BIT].best()
    if small is not None and chosen.tokens_per_s:
        ratio = small.tokens_per_s / chosen.tokens_per_s
        reason += f"; 4-bit weights must be unpacked at every use: {ratio:.2f} times its speed"
    return Answer(question, "no", reason)


def _given_up(workload: Workload, results: WalkResults) -> Iterator[Answer]:
    for question, stages in (
        ("Does it fit when sharded over the GPUs?", ("replicate", "shard")),
        ("Does it fit with tensor or pipeline parallelism?", ("split",)),
        ("Does it fit with states in the host's memory?", ("offload",)),
    ):
        needs = [
            (_need(layout_results), layout.name)
            for node in Node
            for layout, _, layout_results in _walked(results, node, stages)
            if layout_results is not None and layout_results.smallest is not None
        ]
        if needs:
            need, name = min(needs)
            reason = f"the smallest is {name}: {gib(need)}, {gib(need - workload.budget_bytes)} more than the budget"
            yield Answer(question, "no", reason, need, workload.budget_bytes)
            continue
        keys = {layout_key(TrainSetup(**layout.fields)) for layout in results.walked if layout.stage in stages}
        refused = [reason for (key, _), reason in results.refused.items() if key in keys]
        if refused:
            yield Answer(question, "no", refused[0])


def _walked(
    results: WalkResults, node: Node, stages: tuple[str, ...]
) -> Iterator[tuple[Layout, tuple[object, ...], NodeResults | None]]:
    """(spread, key, its facts of this node or None where no engine runs it) of the walked layouts of these stages."""
    by_layout = results.of_node(node)
    for layout in results.walked:
        if layout.stage in stages:
            key = layout_key(TrainSetup(**layout.fields))
            if key in by_layout or (key, node) in results.refused:
                yield layout, key, by_layout.get(key)


def _pruned_layouts(
    workload: Workload, results: WalkResults, node: Node, chosen: Candidate, stages: tuple[str, ...]
) -> Iterator[PrunedBranch]:
    """Every spread of these stages that was not taken: refused, too large, or slower."""
    for layout, key, layout_results in _walked(results, node, stages):
        if key == layout_key(chosen.setup):
            continue
        if layout_results is None:
            yield PrunedBranch(layout.name, results.refused[key, node], 0)
            continue
        fits, need = layout_results.best() is not None, _need(layout_results)
        reason = _slower(workload, layout_results, chosen, "") if fits else "does not fit"
        yield PrunedBranch(layout.name, reason, layout_results.walked, need, workload.budget_bytes)
    left: dict[str, list[str]] = {}
    tried = any(layout.stage in stages for layout in results.walked) or "split" not in stages
    for layout in all_layouts(workload):
        if tried and layout.reason and layout.stage in stages:
            left.setdefault(layout.reason, []).append(fields_name(layout.fields))
    for reason, names in left.items():
        words = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        yield PrunedBranch(words, reason, 0)


def _slower(workload: Workload, layout_results: NodeResults, chosen: Candidate, name: str) -> str:
    best = layout_results.best()
    assert best is not None
    other = candidate(workload, best.setup, padding=False)
    ratio = other.tokens_per_s / chosen.tokens_per_s if chosen.tokens_per_s else 0.0
    fit = layout_results.fit_words
    words = f"{fit} at {ratio:.2f} times the speed, {percent(communication_share(other))} of its step communication"
    if fit == "fits" and ratio > 1 - TIE_FRACTION:
        words = f"fits at {ratio:.2f} times the speed: not clearly faster, and {layout_name(chosen.setup)} is simpler"
    return f"{name} {words}".strip()


def _need(node_results: NodeResults) -> int:
    assert node_results.smallest is not None
    return node_results.smallest.peak_device_bytes


def _left_out(workload: Workload, stages: tuple[str, ...]) -> str:
    reasons = [layout.reason for layout in all_layouts(workload) if layout.stage in stages and layout.reason]
    return reasons[0] if reasons else "left out by the options given"
