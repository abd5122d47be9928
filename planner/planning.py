"""From a workload to a `Plan` or `NoPlan` on the formula rung: walk the space, ask the tree, name the alternatives."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from planner.errors import PlannerError, SetupError, UsageError
from planner.expressed import check_something_expressed, target_notes
from planner.gpus import all_gpus
from planner.models import catalogue
from planner.outcome import Candidate
from planner.plan import Alternative, Answer, NoPlan, Plan, Remedy, SpaceCount, trade
from planner.predict import device_peak_bytes, predict
from planner.refine import ANY_SETUP, CorrectionKey, correction_key, spread_correction_key
from planner.setup import SPREAD_FIELDS, TrainSetup
from planner.space import BRANCH_FIELDS, Point, dimension_values, kinds, micro_batches, walk
from planner.tree import (
    NODE_NAMES,
    NODES,
    QUANTIZE_GAIN_FRACTION,
    NodeFacts,
    activation_answers,
    choose_node,
    collect,
    method_answers,
)
from planner.workload import Workload

NUM_RANKED = 24


def candidate(workload: Workload, setup: TrainSetup) -> Candidate:
    """A setup with its formula prediction against the workload's budget."""
    prediction = predict(workload.model, workload.gpu, setup, workload.cluster)
    return Candidate(setup=setup, budget_bytes=workload.budget_bytes, formula=prediction)


def plan_workload(workload: Workload, corrections: Mapping[CorrectionKey, float] | None = None) -> Plan | NoPlan:
    """The formula rung's whole answer; `corrections` multiply the formula's peaks (see `refine`).

    Raises:
        UsageError: the user's wishes contradict each other so that no setup can exist at all.
    """
    if workload.num_gpus > 1:
        from planner.parallel.planning import plan_spread  # one GPU never needs it

        return plan_spread(workload, corrections or {})
    values = dimension_values(workload)
    facts = collect(corrected(walk(workload, values), corrections or {}), workload.budget_bytes)
    walked = sum(known.walked for known in facts.values())
    if not walked:
        check_something_expressed(workload, kinds(workload, values))
        raise UsageError(
            f"no setup can satisfy all the options given{contradiction(values)}",
            hint="options contradict each other: leave one out",
        )
    space = SpaceCount(
        walked=walked,
        infeasible=sum(known.infeasible for known in facts.values()),
        impossible=num_combinations(workload, values) - walked,
    )
    chosen_node = choose_node(facts, needed_gain(workload, facts))
    answers = method_answers(facts, chosen_node, workload)
    if chosen_node is None:
        return refusal(workload, facts, tuple(answers), space)
    known = facts[chosen_node]
    best = known.best()
    assert best is not None  # choose_node returned it
    answers += activation_answers(known, best, workload, known.ranked())
    chosen = candidate(workload, best.setup)
    ranked = [best, *(point for point in known.ranked() if point is not best)][:NUM_RANKED]
    return Plan(
        workload=workload,
        chosen=chosen,
        alternatives=alternatives(workload, chosen, chosen_node, facts),
        ranked=(chosen, *(candidate(workload, point.setup) for point in ranked[1:])),
        walk=tuple(answers),
        space=space,
        notes=plan_notes(workload, chosen),
    )


def contradiction(values: Mapping[str, tuple[Any, ...]]) -> str:
    """Why most combinations cannot exist, as the end of a sentence; "" where one can (then it is something else)."""
    names = ("method", "quantization", "precision", "attention")
    reasons: Counter[str] = Counter()
    for combination in product(*(values[name] for name in names)):
        setup = dict(zip(names, combination, strict=True))
        try:
            TrainSetup(**setup, lora_rank=0 if setup["method"] == "full" else values["lora_rank"][0])
        except SetupError as error:
            reasons[error.message] += 1
        else:
            return ""
    return ": " + max(reasons, key=lambda reason: reasons[reason]) if reasons else ""


def num_combinations(workload: Workload, values: Mapping[str, tuple[Any, ...]]) -> int:
    """Size of the plain product of all dimensions, impossible combinations included."""
    batches = len(values.get("micro_batch_seqs") or micro_batches(workload.global_batch_seqs))
    dimensions = (*BRANCH_FIELDS, "attention", "checkpointing", "loss", "optimizer")
    return batches * prod(len(values[name]) for name in dimensions)


def needed_gain(workload: Workload, facts: dict[str, NodeFacts]) -> float:
    """How much faster a quantized setup must be to replace a LoRA that fits: more than the speed model errs."""
    best = facts["lora"].best()
    if best is None:
        return 0.0
    return max(QUANTIZE_GAIN_FRACTION, candidate(workload, best.setup).formula.time_band_fraction or 0.0)


def corrected(points: Iterable[Point], corrections: Mapping[CorrectionKey, float]) -> Iterable[Point]:
    """The points with the peaks of corrected families multiplied by their ratio."""
    if not corrections:
        return points
    other = corrections.get(ANY_SETUP)

    def ratio(setup: TrainSetup) -> float | None:
        rest = corrections.get(spread_correction_key(setup), other) if setup.num_gpus > 1 else other
        return corrections.get(correction_key(setup), rest)

    return (_scaled(point, ratio(point.shared)) for point in points)


def _scaled(point: Point, ratio: float | None) -> Point:
    return point if ratio is None else point._replace(peak_device_bytes=int(point.peak_device_bytes * ratio))


def plan_notes(workload: Workload, chosen: Candidate) -> tuple[str, ...]:
    """The stated assumptions of a plan, one sentence each."""
    notes = [*target_notes(workload)]
    if not chosen.setup.packing:
        notes.append(
            f"every sequence is taken to be {workload.seq_len_tokens} tokens long (the worst batch); "
            "shorter ones need less memory"
        )
    notes.append("evaluation and saving are not counted; keep their batch at the micro-batch or below")
    masters = chosen.setup.parallel.startswith("zero")  # DeepSpeed keeps fp32 copies of bf16 weights
    if chosen.setup.method == "full" and chosen.setup.weight_dtype == "bf16" and not masters:
        notes.append(
            "bf16 weights take the updates without an fp32 copy: small ones round to nothing; --precision bf16-mixed "
            "keeps one"
        )
    return tuple(notes)


def alternatives(
    workload: Workload, chosen: Candidate, node: str, facts: dict[str, NodeFacts]
) -> tuple[Alternative, ...]:
    found: list[Alternative] = []
    seen = {chosen.setup}

    def offer(label: str, setup: TrainSetup | None) -> None:
        if setup is None or setup in seen:
            return
        seen.add(setup)
        other = candidate(workload, setup)
        found.append(Alternative(label=label, candidate=other, trade=trade(chosen, other)))

    for other in NODES:
        best = facts[other].best()
        if other != node and best is not None:
            offer(NODE_NAMES[other], best.setup)
    setup = chosen.setup
    if setup.method != "full":
        for rank in (2 * setup.lora_rank, max(1, setup.lora_rank // 2)):
            offer(f"rank {rank}", setup.with_(lora_rank=rank))
        if setup.lora_targets == "all-linear":
            offer("adapters on attention only", setup.with_(lora_targets="attention"))
    offer("smallest memory", _smallest(facts[node]))
    if not setup.checkpointing:
        offer("with checkpointing", setup.with_(checkpointing=1))
    for point in facts[node].ranked():
        if point.shared.checkpointing != setup.checkpointing:
            offer("checkpointing " + ("off" if not point.shared.checkpointing else "on"), point.setup)
            break
    larger = [
        point
        for point in facts[node].ranked()
        if point.micro_batch_seqs > setup.micro_batch_seqs and point.loss == setup.loss
    ]
    if larger:
        offer("larger micro-batch", max(larger, key=lambda point: point.micro_batch_seqs).setup)
    return tuple(found)


def _smallest(known: NodeFacts) -> TrainSetup | None:
    return known.smallest.setup if known.smallest is not None else None


def refusal(
    workload: Workload,
    facts: dict[str, NodeFacts],
    answers: tuple[Answer, ...],
    space: SpaceCount,
) -> NoPlan:
    smallest = [known.smallest for known in facts.values() if known.smallest is not None]
    nearest = candidate(workload, min(smallest, key=lambda point: point.peak_device_bytes).setup)
    missing = max(1, nearest.formula.peak_device_bytes - workload.budget_bytes)
    return NoPlan(
        workload=workload,
        nearest=nearest,
        missing_bytes=missing,
        remedies=_remedies(workload, nearest),
        walk=answers,
        space=space,
    )


def _remedies(workload: Workload, nearest: Candidate) -> tuple[Remedy, ...]:
    """Single changes that would make the nearest setup fit, smallest change first: options the user fixed, a shorter
    sequence, another GPU of the table, a smaller model."""
    budget = workload.budget_bytes
    before = nearest.formula.peak_device_bytes
    found: list[Remedy] = []
    relaxed = _relaxed(workload)
    if relaxed is not None:
        found.append(relaxed)
    seq_len = _longest_that_fits(workload, nearest.setup)
    if seq_len:
        after = device_peak_bytes(workload.model, workload.gpu, nearest.setup.with_(seq_len_tokens=seq_len))
        found.append(Remedy(action=f"--seq-len {seq_len}", saves_bytes=before - after, fits=True))
    roomier = sorted(
        (gpu for gpu in all_gpus() if gpu.memory_bytes > workload.gpu.memory_bytes), key=lambda g: g.memory_bytes
    )
    for gpu in roomier:
        setup = nearest.setup
        share = workload.headroom_bytes / workload.memory_bytes
        if gpu.vendor == "NVIDIA" and device_peak_bytes(workload.model, gpu, setup) <= gpu.memory_bytes * (1 - share):
            found.append(
                Remedy(action=f"--gpu {gpu.key}", saves_bytes=gpu.memory_bytes - workload.memory_bytes, fits=True)
            )
            break
    found += _smaller_models(workload, nearest.setup, budget, before)
    return tuple(found)


def _relaxed(workload: Workload) -> Remedy | None:
    """Whether dropping the user's own restrictions on method, optimizer or checkpointing lets something fit."""
    if workload.targets:
        fits = [(node, point) for node, point in _best_of(replace(workload, targets=())).items() if point is not None]
        if fits:
            node, point = fits[0]
            saved = workload.budget_bytes - point.peak_device_bytes
            return Remedy(action=f"leave --target out ({NODE_NAMES[node]} fits)", saves_bytes=saved, fits=True)
    spread = ("parallel", *SPREAD_FIELDS) if workload.num_gpus > 1 else ()
    for name in (*spread, "method", "precision", "quantization", "optimizer", "checkpointing", "attention", "loss"):
        if name not in workload.fixed:
            continue
        freer = {key: value for key, value in workload.fixed.items() if key != name}
        if name in ("method", "quantization"):
            freer = {key: value for key, value in freer.items() if key not in ("method", "quantization", "precision")}
        other = replace(workload, fixed=freer)
        fits = [(node, point) for node, point in _best_of(other).items() if point is not None]
        if fits:
            node, point = fits[0]
            flag = {"pipeline_schedule": "schedule", "reshard_after_forward": "no-reshard"}.get(name, name)
            return Remedy(
                action=f"leave --{flag.replace('_', '-')} out ({NODE_NAMES[node]} fits)",
                saves_bytes=workload.budget_bytes - point.peak_device_bytes,
                fits=True,
            )
    return None


def _best_of(workload: Workload) -> dict[str, Point | None]:
    """The best point of every node; on several GPUs over a coarse walk."""
    if workload.num_gpus > 1:
        from planner.parallel.which import best_of  # one GPU never needs it

        return best_of(workload)
    return {node: known.best() for node, known in collect(walk(workload), workload.budget_bytes).items()}


def _longest_that_fits(workload: Workload, setup: TrainSetup) -> int:
    """The longest sequence length (a multiple of 64) at which the setup fits, 0 if none does."""
    low, high = 0, workload.seq_len_tokens // 64
    while low < high:
        middle = (low + high + 1) // 2
        peak = device_peak_bytes(workload.model, workload.gpu, setup.with_(seq_len_tokens=middle * 64))
        if peak <= workload.budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low * 64


def _smaller_models(workload: Workload, setup: TrainSetup, budget: int, before: int) -> Sequence[Remedy]:
    """The largest catalogue model of the same type that fits with this setup."""
    smaller: list[tuple[int, str]] = []
    for name in catalogue.names(model_type=workload.model.model_type):
        try:
            model = catalogue.load(name)
        except PlannerError:
            continue
        if model is None or model.num_params >= workload.model.num_params:
            continue
        peak = device_peak_bytes(model, workload.gpu, setup)
        if peak <= budget:
            smaller.append((model.num_params, model.model_id))
    if not smaller:
        return ()
    name = max(smaller, key=lambda one: (one[0], one[1].lower()))[1]
    return (Remedy(action=f"a smaller model: {name}", saves_bytes=before - budget, fits=True),)
