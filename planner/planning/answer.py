"""From a workload to a `Plan` or `NoPlan` on the formula level: walk the layouts stage by stage (`decision.choosing`),
ask the tree, explain."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice, product
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from planner.core.errors import SetupError, UsageError
from planner.core.notes import measured, risk, usual
from planner.core.units import gib, seconds
from planner.memory.attention_kernels import has_expert_stacks, missing_kernels, supported_attentions
from planner.memory.engines import engine_of, why_not
from planner.memory.rank_part import rank_parts
from planner.memory.states import loading_refusal, pinned_bytes, weight_bytes
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.models.stored import dequantizing_class, plain_copy, stored_method
from planner.models.targets import ATTENTION_ROLES, adapts_expert_stacks, lora_linears
from planner.options.kernels import KERNELS
from planner.options.objectives import packs
from planner.planning.decision.alternatives import alternatives, other_classes, refusal, staged
from planner.planning.decision.candidates import WhenAsked, candidate, of_point
from planner.planning.decision.choosing import choose, choose_alone
from planner.planning.decision.layouts import FIELDS, Layout, all_layouts
from planner.planning.decision.node import Node, node_of_setup
from planner.planning.decision.policy import compile_s, job_notes, worst_quality
from planner.planning.decision.results import SHARED_MEMORY, NodeResults, WalkResults, merged
from planner.planning.decision.tree import SingleGpuAnswer, answers, kernels_words, preferred_nodes
from planner.planning.expressed import check_something_expressed, target_notes, unwritten, writers
from planner.planning.groups import WalkCache
from planner.planning.plan import Alternative, CorrectionKey, NoPlan, Plan, SpaceCount, Suggestion, trade
from planner.planning.space import BRANCH_FIELDS, branches, dimension_values, micro_batches, sample_setups
from planner.planning.walk import WalkedSetup
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate
from planner.setup.packages import PROGRAMS, packages_of, requirement

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it

NUM_RANKED = 24
Explained = bool | Literal["classes"]


class _Walked(NamedTuple):
    """What was looked at for a workload: the node of the tree that is taken and its best point, None where nothing
    fits."""

    workload: Workload
    values: Mapping[str, tuple[Any, ...]]
    results: WalkResults
    node: Node | None
    best: WalkedSetup | None


class _Planning(NamedTuple):
    """How a workload is planned: the arguments of `plan_workload`."""

    corrections: Mapping[CorrectionKey, float] | None
    cache: WalkCache
    num_ranked: int = NUM_RANKED
    helped: bool = True
    explained: Explained = True

    def walk(self, workload: Workload) -> _Walked:
        if True in workload.fixed.get("quantize_experts", ()) and not workload.targets:
            workload = replace(workload, targets=("axolotl",))  # the one target that has it on the card
        elif _packs_alone(workload):
            workload = replace(workload, fixed={**workload.fixed, "quantize_experts": (True,)})
        values, results = dimension_values(workload), WalkResults(cache=self.cache)
        taken = choose(workload, values, results, self.corrections, explained=bool(self.explained))
        return _Walked(workload, values, results, *taken)

    def walk_fitting(self, workload: Workload) -> _Walked | None:
        """The same; None where nothing fits, or no setup can be."""
        with suppress(UsageError):
            walked = self.walk(workload)
            return walked if walked.best is not None else None
        return None


def plan_workload(
    workload: Workload,
    corrections: Mapping[CorrectionKey, float] | None = None,
    cache: WalkCache | None = None,
    *,
    num_ranked: int = NUM_RANKED,
    helped: bool = True,
    explained: Explained = True,
) -> Plan | NoPlan:
    """The formula level's whole answer.

    Args:
        corrections: multiply the formula's peaks, and dry runs follow (see `refine`); None: the formula stands alone.
        cache: kept by whoever plans for the same model again.
        num_ranked: how many of the fastest points the plan lists, the chosen one first.
        helped: where nothing fits, with what would help.
        explained: with the tree, the alternatives and the notes, which take half of a plan's time; without them the
            choice and its figures are the same. "classes": of all that with what the other classes would take.

    Raises:
        UsageError: the user's requests contradict each other so that no setup can exist at all, or no way of spreading
            the job suits the number of GPUs, the global batch and the options given.
    """
    planning = _Planning(corrections, cache if cache is not None else WalkCache(), num_ranked, helped, explained)
    if quantizes_again(workload) and (unpacked := _of_unpacked(workload, "is not quantized again", planning)):
        return unpacked
    if not corrections and workload.num_gpus == 1 and _packed(workload) and _weights_alone_exceed(workload):
        packed = _with_packed_experts(workload, planning)
        if packed is not None:
            return packed
    walked = planning.walk(workload)
    if walked.best is None:
        return _nothing_fits(walked, planning)
    walked, lost = _of_some_target(walked.workload, walked.best, planning) or (walked, ())
    return _plan(walked, lost, num_ranked, explained)


def _plan(walked: _Walked, notes: Sequence[str], num_ranked: int = NUM_RANKED, explained: Explained = True) -> Plan:
    workload, values, results, node, best = walked
    assert node is not None
    assert best is not None
    chosen = candidate(workload, best.setup)
    if explained is not True:
        classes = other_classes(node, results.nodes()) if explained else ()
        options = ((label, candidate(workload, setup)) for label, setup in classes)
        return Plan(
            workload=workload,
            chosen=chosen,
            alternatives=tuple(Alternative(label, other, trade(chosen, other)) for label, other in options),
            ranked=(chosen,),
            tree=(),
            space=_space_count(workload, values, results),
            notes=(*notes,),
        )
    alone = _one_gpu(workload, results.cache) if workload.num_gpus > 1 else None
    installed = _with_packages(workload, chosen, results.cache)
    fastest = merged(results.of_node(node).values()).ranked()
    others = [*islice((point for point in fastest if point.setup != best.setup), num_ranked - 1)]
    return Plan(
        workload=workload,
        chosen=chosen,
        alternatives=WhenAsked(installed, alternatives(workload, chosen, node, results, alone)),
        ranked=WhenAsked([chosen], [partial(of_point, workload, point) for point in others]),
        tree=tuple(answers(workload, results, node, best, chosen, alone)),
        space=_space_count(workload, values, results),
        notes=(*notes, *_package_notes(workload, chosen, installed), *_notes(workload, chosen)),
    )


def _nothing_fits(walked: _Walked, planning: _Planning) -> Plan | NoPlan:
    """The way out that one of the other forms of the weights is, or else by how much nothing fits."""
    workload, values, results, _, _ = walked
    space = _space_count(workload, values, results)
    if not space.walked:
        if unpacked := _of_unpacked(workload, "the named target does not unpack", planning):
            return unpacked
        if workload.offloads and (in_the_host := _staged(workload, planning)):
            return in_the_host
        layouts = results.walked if workload.num_gpus > 1 else ()
        check_something_expressed(workload, sample_setups(workload, values, layouts))
        raise _nothing_to_walk(workload, results)
    if packed := _with_packed_experts(workload, planning):
        return packed
    why = "trains only unpacked and does not fit so"  # a copy that does not fit either is not shown, nor helped
    copied = _of_unpacked(workload, why, planning._replace(helped=False))
    if isinstance(copied, Plan):
        return copied
    if way_out := _in_the_host(workload, planning) or _by_device_map(workload, planning):
        return way_out
    if planning.explained is not True:
        return refusal(workload, results, (), space, (), helped=False)
    alone = _one_gpu(workload, results.cache) if workload.num_gpus > 1 else None
    tree = tuple(answers(workload, results, None, None, None, alone))
    installed = _with_packages(workload, None, results.cache)
    notes = (*_package_notes(workload, None, installed), *cluster_notes(workload.cluster))
    other_forms = tuple(_other_forms(workload)) if planning.helped else ()
    refused = refusal(workload, results, tree, space, notes, helped=planning.helped, other_forms=other_forms)
    if not planning.helped:
        return refused
    forms = [(candidate(*form).formula.peak_device_bytes, form[0]) for form in other_forms]
    beyond = [form for form in forms if workload.budget_bytes < form[0] < refused.nearest.formula.peak_device_bytes]
    if beyond:
        form = min(beyond, key=itemgetter(0))[1]
        afresh = planning._replace(corrections=None, cache=WalkCache())
        nearer = _nothing_fits(afresh.walk(form), afresh)
        if form.model is not workload.model:
            nearer = replace(nearer, notes=(_copied(workload.model, form.model, "is nearest unpacked"), *nearer.notes))
        actions = {suggestion.action for suggestion in refused.suggestions}
        if isinstance(nearer, NoPlan):
            more = (suggestion for suggestion in nearer.suggestions if suggestion.action not in actions)
            nearer = replace(nearer, suggestions=(*refused.suggestions, *more))
        return nearer
    return replace(refused, suggestions=(*_plain_copy(workload, refused.nearest), *refused.suggestions))


def _space_count(workload: Workload, values: Mapping[str, tuple[Any, ...]], results: WalkResults) -> SpaceCount:
    nodes = results.nodes().values()
    walked = sum(node.walked for node in nodes)
    # the plain product of all dimensions, impossible combinations included
    names = ("attention", "checkpointing", "selective_checkpointing", "loss", "kernels", "activation_offload")
    whole = prod(len(values[name]) for name in (*BRANCH_FIELDS, *names, "optimizer"))
    whole *= len(values.get("micro_batch_seqs") or micro_batches(workload.global_batch_seqs))
    impossible = max(0, whole * len({layout.name for layout in results.walked}) - walked)
    return SpaceCount(walked=walked, infeasible=sum(node.infeasible for node in nodes), impossible=impossible)


def _nothing_to_walk(workload: Workload, results: WalkResults) -> UsageError:
    contradicted = _contradiction(dimension_values(workload))
    if "offload" in workload.fixed and workload.gpu.shares_host_memory and results.too_large_for_hosts:
        return UsageError(f"{workload.gpu.name}: {SHARED_MEMORY}", hint="leave --offload out")
    if workload.num_gpus == 1:
        if results.too_large_for_hosts:
            from planner.memory.engines.host import assumed_host_bytes, host_gib  # seldom needed

            least, room = min(results.too_large_for_hosts.values()), gib(assumed_host_bytes(workload))
            there = f"{gib(least)} of states would lie there, at most {room} may"
            return UsageError(
                f"no setup of these options finds room in the host: {there}",
                hint=f"--host-memory {host_gib(least)} holds them; --optimizer sgd has no states",
            )
        return UsageError(
            f"no setup can satisfy all the options given{contradicted}",
            hint="options contradict each other: leave one out",
        )
    layouts = all_layouts(workload)
    left_out = [layout for layout in layouts if layout.reason]
    none_of_them = _no_such_setup(workload, layouts) if len(left_out) < len(layouts) and not results.refused else {}
    reasons = [*results.refused.values(), *none_of_them, *(layout.reason for layout in left_out)]
    num, batch = workload.num_gpus, workload.global_batch_seqs
    if contradicted or not reasons:
        return UsageError(
            f"no setup on {num} GPUs satisfies all the options given{contradicted}",
            hint="options contradict each other (for example --parallel ddp with --offload optimizer); leave one out",
        )
    usual_hint = "leave --parallel and the degrees out: the plan then chooses among all of them"
    hint = none_of_them.get(reasons[0]) or usual_hint
    uneven = [layout.reason for layout in left_out if batch % layout.data_degree]
    if uneven:
        hint = f"give --global-batch {num * -(-batch // num)}, or fewer GPUs"
    return UsageError(f"no way to spread this over {num} GPUs: {(uneven or reasons)[0]}", hint=hint)


def _no_such_setup(workload: Workload, layouts: Sequence[Layout]) -> dict[str, str | None]:
    """Why a setup cannot be spread, or no engine runs it, of those that could exist on one GPU, and what to use."""
    reasons, values = dict[str, str | None](), dimension_values(workload)
    for branch, layout in product(branches(workload, values), layouts):
        try:
            setup = branch.replace(**layout.fields)
        except SetupError as error:
            reasons[error.message] = error.hint
            continue
        for loss, optimizer in product(values["loss"], values["optimizer"]):
            refused = why_not(workload.model, setup.replace_trusted(loss=loss, optimizer=optimizer))
            reasons |= {refused: None} if refused else {}
    return reasons


def _contradiction(values: Mapping[str, tuple[Any, ...]]) -> str:
    """Why most combinations cannot exist, as the end of a sentence; "" where one can (then it is something else)."""
    names = ("method", "quantization", "precision", "attention")
    kind = {name: values[name][0] for name in ("objective", "adapter", "rollout") if name in values}
    kind |= {"loss": values["loss"][0]} if "objective" in kind else {}
    kind |= {"checkpointing": min(values["checkpointing"]), "packing": packs(values)}
    reasons: Counter[str] = Counter()
    for combination in product(*(values[name] for name in names)):
        setup = kind | dict(zip(names, combination, strict=True))
        try:
            TrainSetup(**setup, lora_rank=0 if setup["method"] == "full" else values["lora_rank"][0])
        except SetupError as error:
            reasons[error.message] += 1
        else:
            return ""
    return ": " + max(reasons, key=lambda reason: reasons[reason]) if reasons else ""


def _one_gpu(workload: Workload, cache: WalkCache) -> SingleGpuAnswer:
    """The plan of the same work on one GPU of the cluster; None where its options leave nothing."""
    fixed = {name: values for name, values in workload.fixed.items() if name not in FIELDS}
    request = replace(workload, cluster=None, fixed=fixed)
    try:
        return plan_workload(request, cache=cache, helped=False, explained=False)
    except UsageError:
        return None


def _packs_alone(workload: Workload) -> bool:
    """Whether the one target named trains a mixture beside quantized experts and in no other way that is asked for."""
    if "quantize_experts" in workload.fixed or workload.num_gpus > 1:
        return False
    qlora = workload.fixed.get("method") == ("qlora",) and has_expert_stacks(workload.model)
    return workload.targets == ("loggetta",) or (workload.targets == ("axolotl",) and qlora)


def _packed(workload: Workload) -> list[Workload]:
    """The same work with a mixture's experts in 4 bits too, by the programs that train them, on the card and then in
    the host's memory; empty where that is no way."""
    if "quantize_experts" in workload.fixed or not has_expert_stacks(workload.model):
        return []
    fixed = {**workload.fixed, "quantize_experts": (True,)}
    named = [(name,) for name in PACKING if workload.targets in ((), (name,))]
    return [replace(workload, targets=target, fixed=fixed) for target in named]


def _other_forms(workload: Workload) -> Iterator[tuple[Workload, TrainSetup]]:
    """The smallest setups of what a plan takes where the weights as published do not fit: their 16-bit copy, and
    experts in 4 bits."""
    copy = plain_copy(workload.model)
    copies = [replace(workload, model=copy)] if copy is not None else []
    for request in (*_packed(workload), *copies, *chain.from_iterable(map(_packed, copies))):
        with suppress(UsageError):
            walked = _Planning(None, WalkCache()).walk(request)
            points = filter(None, (node.smallest for node in walked.results.nodes().values()))
            if smallest := min(points, key=lambda point: point.peak_device_bytes, default=None):
                yield walked.workload, smallest.setup


PACKING = {
    "axolotl": "nothing fits with the experts in 16 bits; in 4 bits Axolotl alone trains them (quantize_moe_experts)",
    "loggetta": "nothing fits with the experts on the card: Loggetta keeps them in the host's memory, in 4 bits",
}
"""Targets that train beside experts of 4 bits -> what a plan says that takes one unasked."""


def _weights_alone_exceed(workload: Workload) -> bool:
    """Whether every branch's weights by themselves are more than one GPU takes: then nothing has to be walked to know
    that nothing fits."""
    branched = list(branches(workload, dimension_values(workload)))
    return bool(branched) and all(
        engine_of(setup).state(rank_parts(workload.model, setup)[0], setup, accumulated=False).moment_bytes["resident"]
        > workload.budget_bytes
        for setup in branched
    )


def _in_the_host(workload: Workload, planning: _Planning) -> Plan | None:
    """The plan with states in the memory of one GPU's host, where it was said how much that has."""
    if not workload.host_bytes or workload.num_gpus > 1 or {"offload", "parallel"} & set(workload.fixed):
        return None
    fixed = {**workload.fixed, "offload": ("optimizer", "parameters")}
    stateless = "SGD, which learns slower: AdamW's states have no room in the host"
    for more in ({}, {"optimizer": ("sgd",)}):
        if more.keys() & workload.fixed.keys():
            continue
        if walked := planning._replace(explained=True).walk_fitting(replace(workload, fixed={**fixed, **more})):
            plan = _plan(walked, [risk("nothing fits on the card alone: states lie in its host")])
            return replace(plan, notes=(measured(stateless), *plan.notes)) if more else plan
    return _staged(workload, planning)


def _staged(workload: Workload, planning: _Planning) -> Plan | None:
    """The plan of a target that makes a 4-bit base in the host's memory; None where that is no way out."""
    for request in staged(workload):
        if walked := planning._replace(explained=True).walk_fitting(request):
            return _plan(walked, [risk("Axolotl makes the 4-bit base in the host's memory, where it stays")])
    return None


def _by_device_map(workload: Workload, planning: _Planning) -> Plan | None:
    """Where only loading bars a quantized base from being cut over the GPUs of one node: the plan with whole layers
    placed on them by one process, or, where that is faster, with the base in the host's memory."""
    cluster = workload.cluster
    if cluster is None or cluster.num_nodes > 1 or workload.num_gpus == 1 or "parallel" in workload.fixed:
        return None
    cut = {"num_gpus": workload.num_gpus, "parallel": "fsdp2"}
    sharded = [branch.replace_trusted(**cut) for branch in branches(workload, dimension_values(workload))]
    reasons = [
        (sum(weight_bytes(workload.model, setup).values()), reason)
        for setup in sharded
        if (reason := loading_refusal(workload.model, setup, workload.budget_bytes))
    ]
    if not reasons:
        return None
    fixed = {**workload.fixed, "parallel": ("device-map",)}
    walked = planning._replace(explained=True).walk_fitting(replace(workload, fixed=fixed))
    words = f"a device map, whose GPUs take turns: {min(reasons)[1]}"
    placed = _plan(walked, [measured(words)]) if walked is not None else None
    plans = [plan for plan in (placed, _staged(workload, planning)) if plan is not None]
    return max(plans, key=lambda plan: (plan.chosen.verdict == "fits", plan.chosen.tokens_per_s), default=None)


def _with_packed_experts(workload: Workload, planning: _Planning) -> Plan | None:
    """The plan with a mixture's experts in 4 bits too, where nothing else fits; None where that is no way out."""
    from planner.memory.engines.host import assumed_host_bytes  # seldom needed

    for request in _packed(workload):
        walked = planning._replace(explained=True).walk_fitting(request)
        if walked is None or walked.best is None:
            continue
        if pinned_bytes(workload.model, walked.best.setup) <= assumed_host_bytes(workload):
            return _plan(walked, [risk(PACKING[request.targets[0]])])
    return None


def _of_some_target(
    workload: Workload, fastest: WalkedSetup, planning: _Planning
) -> tuple[_Walked, tuple[str, ...]] | None:
    """The target whose own best setup is best, where none has a file for the fastest setup of all, and a note where
    that costs speed; None where one has, or no target trains anything that fits."""
    reason = unwritten(workload, fastest.setup)
    if not reason:
        return None
    targets = [replace(workload, targets=(name,)) for name, why_not in writers(workload).items() if not why_not]
    options = [*filter(None, map(planning._replace(explained=False).walk_fitting, targets))]
    if not options:
        return None
    walked = _least_lossy(workload, options, fastest)
    walked = planning.walk(walked.workload) if planning.explained else walked
    of_samples = " of the samples' own" * bool(workload.data.real_fractions)
    speed = f"{fastest.tokens_per_s:,.0f} tokens/s{of_samples}"
    note = measured(f"no tool has a file for the fastest setup ({speed}): {reason}")
    assert walked.best is not None
    slower = walked.best.tokens_per_s < fastest.tokens_per_s  # what a tool runs otherwise may be faster
    return walked, (note,) if slower else ()


def _least_lossy(workload: Workload, options: Sequence[_Walked], fastest: WalkedSetup) -> _Walked:
    """Of walks that fit the one whose best setup is best, as in one walk: by node, matrices, what surely fits, and then
    by `NodeResults`."""
    order = preferred_nodes(workload)

    def rank(walked: _Walked) -> tuple[int, bool, bool]:
        assert walked.node is not None
        assert walked.best is not None
        fewer = walked.best.shared.lora_targets != fastest.shared.lora_targets
        return order.index(walked.node), fewer, not walked.results.nodes()[walked.node].sure

    first = min(map(rank, options))
    alike = [(walked, walked.best) for walked in options if walked.best is not None and rank(walked) == first]
    points = [point for _, point in alike]
    worst = worst_quality((point.shared, point.tokens_per_s) for point in points)
    limits = alike[0][0].results.nodes()[order[first[0]]].limits
    best = NodeResults(limits=limits, sure=points, worst_quality=worst).best()
    return next(walked for walked, point in alike if point == best)


def quantizes_again(workload: Workload) -> bool:
    """Whether a quantized base is asked for of weights that are published in a type that is not quantized again."""
    fixed = workload.fixed
    quantized = fixed.get("method") == ("qlora",) or "none" not in fixed.get("quantization", ("none",))
    return quantized and bool(dequantizing_class(workload.model))


def _of_unpacked(workload: Workload, why: str, planning: _Planning) -> Plan | NoPlan | None:
    """The answer for the 16-bit copy of weights that are published packed; None where there is none, or no setup."""
    if (copy := plain_copy(workload.model)) is None:
        return None
    how = planning._replace(cache=planning.cache.of_copy)._asdict()
    try:
        plan = plan_workload(replace(workload, model=copy), **how)
    except UsageError:
        return None
    return replace(plan, notes=(_copied(workload.model, copy, why), *plan.notes))


def _copied(model: ModelSpec, copy: ModelSpec, why: str) -> str:
    published = f"{model.model_id} is published in {stored_method(model)}"
    return measured(f"{published}, which {why}: planned for its 16-bit copy {copy.model_id}")


def _plain_copy(workload: Workload, nearest: Candidate) -> tuple[Suggestion, ...]:
    """A 16-bit copy of weights that are published in a type that is not quantized again."""
    if not dequantizing_class(workload.model):
        return ()
    config = {key: value for key, value in workload.model.config.items() if key != "quantization_config"}
    request = replace(workload, model=replace(workload.model, config=config))
    chosen = next(filter(None, map(choose_alone, (request, *_packed(request)))), None)
    if chosen is None:
        return ()
    title = chosen.setup.trainer.title
    experts = f", experts too, in {title}" if chosen.setup.quantize_experts else ""
    words = f"name a 16-bit copy of it: it trains in {chosen.setup.quantization}{experts}"
    saved = nearest.formula.peak_device_bytes - chosen.formula.peak_device_bytes
    return (Suggestion(words, saved),)


def _with_packages(workload: Workload, chosen: Candidate | None, cache: WalkCache) -> tuple[Alternative, ...]:
    """The choice for the same work once what this machine lacks is installed; nothing where it is no other."""
    if not workload.absent_packages:
        return ()
    other = choose_alone(replace(workload, absent_packages=()), cache)
    if other is None or (chosen is not None and other.setup == chosen.setup):
        return ()
    words = trade(chosen, other) if chosen is not None else "fits"
    return (Alternative(f"with {' and '.join(packages_of(other.setup))}", other, words),)


def _attention_price(workload: Workload, chosen: Candidate) -> str:
    """What the same setup does on the other of SDPA and flash attention 2, where that is a difference in speed; ""
    where the user named one, or the card or the model has only one."""
    both, attention = ("sdpa", "flash-attention-2"), chosen.setup.attention
    allowed = supported_attentions(workload.model, workload.gpu)
    if "attention" in workload.fixed or attention not in both or not {*both} <= {*allowed}:
        return ""
    try:
        setup = chosen.setup.replace(attention=both[attention == "sdpa"])
    except SetupError:  # context parallelism, say, has SDPA alone
        return ""
    if missing_kernels(workload.model, workload.gpu, setup) or setup.compiled:
        return ""
    other = candidate(workload, setup, padding=False).formula
    mine, its = chosen.formula.tokens_per_s or 0.0, other.tokens_per_s or 0.0
    if not mine or abs(its / mine - 1) < 0.01:
        return ""
    more = f"{abs(its / mine - 1):.0%} {'faster' if its > mine else 'slower'}: {its:,.0f} tokens/s"
    if attention == "sdpa":
        fits = "" if other.peak_device_bytes <= workload.budget_bytes else ", but it does not fit"
        return f"sdpa needs no package; flash-attention-2 is {more}{fits} (--attention flash-attention-2)"
    return (
        f"flash-attention-2 comes from the hub (package kernels); sdpa, which needs none, is {more} (--attention sdpa)"
    )


def _package_notes(workload: Workload, chosen: Candidate | None, installed: tuple[Alternative, ...]) -> tuple[str, ...]:
    notes: list[str] = []
    if chosen is not None and chosen.setup.kernels != "eager" and "kernels" not in workload.fixed:
        words = f"{KERNELS[chosen.setup.kernels].words}: {kernels_words(workload, chosen.setup)}"
        notes.append(f"{words} (--no-extra-packages plans without)")
    if chosen is not None and (words := _attention_price(workload, chosen)):
        notes.append(words)
    for alternative in installed:
        missing = [name for name in packages_of(alternative.candidate.setup) if name in workload.absent_packages]
        command = f"pip install {' '.join(map(requirement, missing))}, and plan again"
        if programs := [name for name in missing if name in PROGRAMS]:
            command = (
                f"plan with --target {programs[0]} --out DIR, whose run.sh installs it in an environment of its own"
            )
        notes.append(risk(f"not installed here: {' and '.join(missing)}; with that, {alternative.trade}: {command}"))
    return tuple(notes)


def _notes(workload: Workload, chosen: Candidate) -> tuple[str, ...]:
    notes = [*filter(None, (workload.model.taken_as, workload.gpu.taken_as)), *target_notes(workload, chosen.setup)]
    if chosen.setup.activation_offload:
        from planner.memory.engines.host import offloaded_checkpoints_bytes  # seldom needed

        size_bytes = offloaded_checkpoints_bytes(workload.model, chosen.setup)
        notes.append(risk(f"checkpoints lie in the host's pinned memory: {gib(size_bytes)} for every GPU"))
    if chosen.setup.compile:
        notes.append(usual(f"torch.compile takes about {seconds(compile_s(workload.model))} before the first step"))
    if not chosen.setup.packing:
        long = f"{workload.seq_len_tokens} tokens long (the worst batch)"
        notes.append(usual(f"every sequence is taken to be {long}; shorter ones need less memory"))
    notes += _adapted_notes(workload.model, chosen.setup)
    notes += job_notes(workload, chosen)
    masters = engine_of(chosen.setup).keeps_fp32_masters
    if chosen.setup.method == "full" and chosen.setup.weight_dtype == "bf16" and not masters:
        words = "bf16 weights take the updates without an fp32 copy: small ones round to nothing"
        notes.append(risk(f"{words}; --precision bf16-mixed keeps one"))
    return (*notes, *cluster_notes(workload.cluster))


def _adapted_notes(model: ModelSpec, setup: TrainSetup) -> list[str]:
    """What of a mixture has adapters, one sentence: "all linear" is what peft makes of it."""
    if setup.method == "full" or not model.expert_stacks or not setup.kind.adapts_matrices:
        return []
    roles = {linear.role for _, _, linears in lora_linears(model, setup.lora_targets) for linear in linears}
    stacked = adapts_expert_stacks(model, setup.lora_targets)
    words = "attention" if roles & ATTENTION_ROLES else "no attention"
    words += ", every expert (gate and up share a stack, at twice the rank)" if stacked else ", no expert"
    words += ", the router" if "router" in roles else ", no router"
    as_note = risk if setup.lora_targets == "all-linear" and not stacked else usual  # not what "all linear" sounds like
    return [as_note(f"of this mixture peft adapts {words}")]


def cluster_notes(cluster: "Cluster | None") -> tuple[str, ...]:
    """What is assumed about the cluster, one sentence each; nothing on one GPU."""
    if cluster is None:
        return ()
    within = f"{cluster.within.name}, {cluster.within.bytes_per_s / 1e9:,.0f} GB/s each way for one GPU"
    links = [f"{cluster.gpus_per_node} GPUs in a node talk over {within}"] * (cluster.gpus_per_node > 1)
    if cluster.between is not None:
        rate = f"{cluster.between.bytes_per_s / 1e9:,.0f} GB/s each way for one node"
        links.append(f"{cluster.num_nodes} nodes talk over {cluster.between.name}, {rate}")
    return tuple(usual(f"{link} (nominal; --interconnect changes it)") for link in links)


def best_by_method(answer: Plan | NoPlan) -> dict[str, Candidate]:
    """Method -> its fastest setup that fits, of those that the plan compared: the chosen one and the other classes."""
    if isinstance(answer, NoPlan):
        return {}
    words = {node.words for node in Node}
    classes = [alternative.candidate for alternative in answer.alternatives if alternative.label in words]
    fitting = [option for option in (answer.chosen, *classes) if option.fits]
    by_method: dict[str, Candidate] = {}
    for option in sorted(fitting, key=lambda option: -option.tokens_per_s):
        by_method.setdefault(node_of_setup(option.setup).method, option)
    return by_method
