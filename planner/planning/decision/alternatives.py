"""What stands beside a plan: alternatives, the longest context, and what would make something fit."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from planner.core.errors import PlannerError, SetupError, UsageError
from planner.core.units import gib
from planner.hardware.cluster import make_cluster
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import all_gpus, larger_versions
from planner.hardware.prices import keys_on_demand, price_per_hour
from planner.memory.attention_kernels import attention_refusal, has_expert_stacks, missing_kernels
from planner.memory.states import pinned_bytes
from planner.memory.workload import Workload
from planner.models import catalogue
from planner.models.encoders import image_tokens
from planner.options.stacks import DEFAULT, STACKS
from planner.planning.decision.candidates import candidate
from planner.planning.decision.choosing import choose
from planner.planning.decision.layouts import FIELDS, layout_key, layout_name
from planner.planning.decision.node import Node
from planner.planning.decision.policy import fewer_matrices, opened_workloads, taken_when_asked
from planner.planning.decision.results import NodeResults, WalkResults, best_layout
from planner.planning.decision.tree import SingleGpuAnswer
from planner.planning.evidence.bands import memory_band
from planner.planning.expressed import variants_as_run
from planner.planning.groups import UNFUSED, same_kernels
from planner.planning.plan import Alternative, Answer, NoPlan, Plan, Remedy, SpaceCount, trade
from planner.planning.predict import device_peak_bytes
from planner.planning.space import branches, dimension_values, layer_variants, offloading_matters
from planner.planning.useful import job_s
from planner.planning.walk import WalkedSetup
from planner.setup import LAYOUT_FIELDS, TrainSetup
from planner.setup.allowed import FLEX, METHODS
from planner.setup.outcome import Candidate

# What stands beside the chosen setup of a plan.


NUM_LAYOUTS_SHOWN = 3


def alternatives(
    workload: Workload, chosen: Candidate, node: Node, results: WalkResults, alone: SingleGpuAnswer
) -> tuple[Alternative, ...]:
    """The best of the other layouts, the same on one GPU, and what one GPU's plan offers as well."""
    shown: list[Alternative] = []
    mine = layout_key(chosen.setup)
    others = [(key, layout_results.best()) for key, layout_results in results.of_node(node).items() if key != mine]
    points = sorted((p for _, p in others if p is not None), key=lambda point: -point.tokens_per_s)
    for point in points[:NUM_LAYOUTS_SHOWN]:
        other = candidate(workload, point.setup)
        shown.append(Alternative(label=layout_name(other.setup), candidate=other, trade=trade(chosen, other)))
    if isinstance(alone, Plan):
        shown.append(Alternative(label="one GPU", candidate=alone.chosen, trade=trade(chosen, alone.chosen)))
    setups = {each.candidate.setup for each in shown}
    rest = _of_one_layout(workload, chosen, node, results.nodes())
    return (*shown, *(each for each in rest if each.candidate.setup not in setups))


def _of_one_layout(
    workload: Workload, chosen: Candidate, node: Node, nodes: Mapping[Node, NodeResults]
) -> tuple[Alternative, ...]:
    """Other methods, ranks, checkpointing and micro-batches."""
    offered: dict[TrainSetup, str] = {}
    if chosen.setup.attention == "eager":
        flexible = chosen.setup.replace_trusted(attention=FLEX, compile=False)
        if not missing_kernels(workload.model, workload.gpu, flexible):
            offered[flexible] = "by FlexAttention"
    for label, setup in _offers(chosen.setup, node, nodes):
        if setup != chosen.setup:
            offered.setdefault(setup, label)
    others = [(label, candidate(workload, setup)) for setup, label in offered.items()]
    return tuple(Alternative(label=label, candidate=other, trade=trade(chosen, other)) for label, other in others)


def _offers(setup: TrainSetup, node: Node, nodes: Mapping[Node, NodeResults]) -> Iterator[tuple[str, TrainSetup]]:
    """What may stand beside the chosen setup, the first of two that are the same counts."""
    smallest = nodes[node].smallest
    tight = nodes[node].best_tight()
    if tight is not None and not nodes[node].fits_with_margin(tight):  # then faster by more than a preference is worth
        yield "tight", tight.setup
    if setup.stack != DEFAULT or setup.compile:
        plain = nodes[node].best_of(lambda shared: shared.stack == DEFAULT and not shared.compile)
        if plain is not None:
            yield "by TRL" if setup.stack != DEFAULT else "not compiled", plain.setup
    if setup.objective_spec.rolls_out and setup.rollout_settings.by_vllm:
        plain = nodes[node].best_of(lambda shared: not shared.rollout_settings.by_vllm)
        if plain is not None:
            yield "generated by transformers", plain.setup
    for other in Node:
        best = nodes[other].best()
        if other != node and best is not None:
            yield other.words, best.setup
    if setup.method != "full":
        row = setup.kind
        for rank in (2 * setup.lora_rank, max(1, setup.lora_rank // 2)) if row.size else ():
            yield f"{row.size} {rank}", setup.replace(lora_rank=rank)
        if setup.lora_targets == "all-linear" and row.adapts_matrices:
            yield "adapters on attention only", setup.replace(lora_targets="attention")
    if smallest is not None:
        yield "smallest memory", smallest.setup
    if not setup.checkpointing and (setup.method == "full" or setup.kind.checkpointing):
        yield "with checkpointing", setup.replace(checkpointing=1)
    for point in nodes[node].ranked():
        if point.shared.checkpointing != setup.checkpointing:
            yield "checkpointing " + ("off" if not point.shared.checkpointing else "on"), point.setup
            break
    for point in nodes[node].ranked():
        if point.micro_batch_seqs > setup.micro_batch_seqs and point.loss == setup.loss:
            yield "larger micro-batch", point.setup
            break


# How long the sequences of a method can be on one GPU, micro-batch 1, by the formula.


STEP_TOKENS = 256
UNKNOWN_CONTEXT_TOKENS = 131_072
"""Looked at where a model states no limit."""


def longest_tokens(workload: Workload) -> dict[str, int]:
    """Method -> the longest sequence (a multiple of STEP_TOKENS, at most what the model takes) of which one at a time
    fits with every layer checkpointed; 0 where none does. A method that the options rule out is left out."""
    most = _most_steps(workload)
    by_method = {}
    for method in METHODS:
        if "method" in workload.fixed and method not in workload.fixed["method"]:
            continue
        steps = 0
        for setup in _min_memory_setups(workload, method):
            steps = _longest_steps(workload, setup, steps, most)
        by_method[method] = steps * STEP_TOKENS
    return by_method


def _most_steps(workload: Workload) -> int:
    return max(1, (workload.model.max_position_embeddings or UNKNOWN_CONTEXT_TOKENS) // STEP_TOKENS)


def _longest_steps(workload: Workload, setup: TrainSetup, reached: int, most: int) -> int:
    """The most steps of a setup's sequence, where it goes beyond what others `reached`: most setups end with one look
    at the next step, so that the search is one setup's."""

    def too_long(steps: int) -> bool:
        return not _fits(workload, setup, steps * STEP_TOKENS)

    first = reached + 1
    if setup.activation_offload and "activation_offload" not in workload.fixed:
        lengths = (replace(workload, seq_len_tokens=steps * STEP_TOKENS) for steps in range(first, most + 1))
        first += next((more for more, longer in enumerate(lengths) if offloading_matters(longer)), most)
    if first > most or too_long(first):
        return reached
    return first + bisect_left(range(first + 1, most + 1), True, key=too_long)


def _min_memory_setups(workload: Workload, method: str) -> Iterator[TrainSetup]:
    """Setups of a method, the smallest among them: every layer checkpointed, one attention of those that run the same
    kernels (those that keep no tokens x tokens where there are such), any optimizer and loss."""
    fixed = {"kbit_fp32_cast": (False,), **workload.fixed, "method": (method,)}
    try:
        values = dimension_values(replace(workload, fixed=fixed))
    except UsageError:
        return
    fewer = fewer_matrices(workload, values, ())
    for given in (values, {**values, **fewer}) if fewer else (values,):
        yield from _min_memory_setups_of(workload, given, method, fixed)
        for request in opened_workloads(replace(workload, fixed=fixed), given):
            with suppress(UsageError):  # nothing of it has kernels here
                yield from _min_memory_setups_of(request, dimension_values(request), method, fixed)


def _min_memory_setups_of(
    workload: Workload, given: Mapping[str, tuple[Any, ...]], method: str, fixed: Mapping[str, tuple[Any, ...]]
) -> Iterator[TrainSetup]:
    """Those of one program."""
    values = dict(given)
    values["lora_rank"] = values["lora_rank"][:1]
    if "nf4-double" in values["quantization"]:  # never larger than with plain scales
        values["quantization"] = tuple(quantization for quantization in values["quantization"] if quantization != "nf4")
    if "activation_offload" not in fixed:
        values["activation_offload"] = (False, True)  # where a sequence is long enough for it: `_reached`
    if "kernels" not in fixed and not workload.targets:
        values["kernels"] = values["kernels"][:1]  # a later family is not smaller
    open_method = dict(workload.fixed)  # the branches of a plan that leaves the method open: no 16-bit masters
    for branch in branches(replace(workload, fixed=open_method), {**values, "method": (method,)}):
        layers = layer_variants(branch, {**values, "checkpointing": (1,)})
        longest = branch.of_length(_most_steps(workload) * STEP_TOKENS)  # longer than a window, other kernels may run
        by_kernels = same_kernels(workload.model, workload.gpu, longest, values["attention"])
        fused = [names[0] for kernels, names in by_kernels.items() if not UNFUSED & set(kernels)]
        attentions = fused or [names[0] for names in by_kernels.values()]
        for layer_fields, attention, optimizer, loss in product(
            layers, attentions, values["optimizer"], values["loss"]
        ):
            try:
                setup = branch.replace(**layer_fields, attention=attention, optimizer=optimizer, loss=loss)
            except SetupError:
                continue
            if setup.compile and not setup.compiled:
                continue
            if not workload.targets or variants_as_run(setup, workload) is not None:
                yield setup


def _fits(workload: Workload, setup: TrainSetup, tokens: int) -> bool:
    group = (
        setup.rollout_settings.num_generations if setup.objective_spec.rolls_out else 1
    )  # generated at once, trained one by one
    lone = setup.of_length(tokens).replace(
        micro_batch_seqs=setup.least_seqs(workload.global_batch_seqs), accumulation_steps=group
    )
    return device_peak_bytes(workload.model, workload.gpu, lone) <= workload.budget_bytes


# Where nothing fits: the nearest setup, and single changes that would make something fit.


def refusal(
    workload: Workload,
    results: WalkResults,
    answers: tuple[Answer, ...],
    space: SpaceCount,
    notes: tuple[str, ...],
    *,
    helped: bool = True,
) -> NoPlan:
    """The answer where nothing fits: by how much, and, `helped`, what would help, as the level says that refused (a
    walked point's peak is the formula's as dry runs corrected it)."""
    smallest = [node_results.smallest for node_results in results.nodes().values() if node_results.smallest is not None]
    point = min(smallest, key=lambda point: point.peak_device_bytes)
    nearest = candidate(workload, point.setup)
    more = max(0, point.peak_device_bytes - nearest.formula.peak_device_bytes)  # than the formula says
    careful = workload
    if more and workload.headroom_bytes + more < workload.memory_bytes:
        careful = replace(workload, headroom_bytes=workload.headroom_bytes + more)
    return NoPlan(
        workload=workload,
        nearest=nearest,
        missing_bytes=max(1, nearest.formula.peak_device_bytes + more - workload.budget_bytes),
        remedies=tuple(_remedies(careful, results, nearest)) if helped else (),
        tree=answers,
        space=space,
        notes=notes,
    )


def _remedies(workload: Workload, results: WalkResults, nearest: Candidate) -> Iterator[Remedy]:
    """Smallest change first: options the user fixed, the host's memory, a shorter sequence, more GPUs or a larger host
    where there are several, another GPU of the table, a smaller model."""
    relaxed = [*_relaxed(workload, nearest)]
    shorter = [*_shorter(workload, nearest)]
    yield from relaxed
    if not relaxed and not shorter:
        yield from _relaxed_and_shorter(workload, nearest)
    yield from _opt_in(workload, nearest)
    yield from in_backward(workload, nearest.formula.peak_device_bytes)
    yield from _offloaded(workload, nearest)
    yield from _streamed(workload, nearest)
    # The largest batch that fits, of an objective whose micro-batch is the whole batch.
    if nearest.setup.objective_spec.whole_batch or nearest.setup.trainer.steps_in_backward:
        most = workload.global_batch_seqs
        yield from _largest_that_fits(
            workload, nearest, "--global-batch", 1, most, lambda size: nearest.setup.replace(micro_batch_seqs=size)
        )
    yield from shorter
    yield from _smaller_images(workload, nearest)
    if workload.num_gpus > 1:
        yield from _more_gpus(workload, nearest)
        yield from _larger_host(results)
    yield from _larger_gpu(workload, nearest)
    # The largest catalogue model of the same type that fits with this setup, of the same maker where it has one.
    smaller: list[tuple[bool, int, str]] = []
    maker = workload.model.model_id.partition("/")[0].lower()
    for name in catalogue.names(model_type=workload.model.model_type):
        try:
            model = catalogue.load(name)
        except PlannerError:
            continue
        if model is None or model.num_params >= workload.model.num_params:
            continue
        if device_peak_bytes(model, workload.gpu, nearest.setup) <= workload.budget_bytes:
            by_maker = model.model_id.partition("/")[0].lower() == maker
            smaller.append((by_maker, model.num_params, model.model_id))
    if smaller:
        name = max(smaller, key=lambda entry: (*entry[:2], entry[2].lower()))[-1]
        saved = nearest.formula.peak_device_bytes - workload.budget_bytes
        yield Remedy(action=f"a smaller model: {name}", saves_bytes=saved, fits=True)


def _relaxed(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The first of the user's own restrictions (target, spread, method, ...) without which something fits."""
    requests = [("target", replace(workload, targets=()))] if workload.targets else []
    layout = ("parallel", *LAYOUT_FIELDS) if workload.num_gpus > 1 else ()
    wanted = ("method", "precision", "quantization", "optimizer", "checkpointing", "attention", "loss", "kernels")
    for name in (*layout, *wanted, "activation_offload", "selective_checkpointing"):
        if name in workload.fixed:
            left_out = {name, "method", "quantization", "precision"} if name in ("method", "quantization") else {name}
            freer = {key: value for key, value in workload.fixed.items() if key not in left_out}
            flag = {"pipeline_schedule": "schedule", "reshard_after_forward": "no-reshard"}.get(name, name)
            requests.append((flag.replace("_", "-"), replace(workload, fixed=freer)))
    for flag, request in requests:
        if remedy := _fitting(request, nearest.formula.peak_device_bytes, f"leave --{flag} out"):
            yield remedy
            return


def _fitting(
    request: Workload, peak_device_bytes: int, words: str, *, speed: bool = False, ending: str = ""
) -> Remedy | None:
    """What a request needs in the place of such a peak, by the first node that fits; None where none does.

    Args:
        words: how a person says the request.
        speed: whether it is said how fast that is.
    """
    fits = next(((node, point) for node, point in best_points(request).items() if point is not None), None)
    if fits is None:
        return None
    node, point = fits
    rate = f" at {point.tokens_per_s:,.0f} tokens/s" if speed else ""
    saved = peak_device_bytes - point.peak_device_bytes
    return Remedy(action=f"{words}: {node.words} fits{rate}{ending}", saves_bytes=saved, fits=True)


def best_points(workload: Workload) -> dict[Node, WalkedSetup | None]:
    """The best point of every node, as a plan walks it."""
    results = WalkResults()
    choose(workload, dimension_values(workload), results)
    results.nodes()  # settles what quality is taken over all layouts
    return {node: best_layout(results.of_node(node)) for node in Node}


def _relaxed_and_shorter(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """Any method at the largest half of the length, where neither by itself is enough."""
    fixed = {
        name: value for name, value in workload.fixed.items() if name not in ("method", "quantization", "precision")
    }
    length = workload.seq_len_tokens // 2
    while fixed != workload.fixed and workload.images is None and length >= LEAST_TOKENS:
        request = replace(workload, fixed=fixed, seq_len_tokens=length)
        if remedy := _fitting(request, nearest.formula.peak_device_bytes, f"leave --method out, --seq-len {length}"):
            yield remedy
            return
        length //= 2


LEAST_TOKENS = 256
"""Shortest length that is offered beside another method."""


def _smaller_images(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """Pictures of half their edges, as often as it takes."""
    if (images := workload.images) is None:
        return
    requested_tokens = image_tokens(workload.model, images)
    while min(images.width, images.height) >= 2 * LEAST_EDGE:
        images = replace(images, width=images.width // 2, height=images.height // 2)
        fewer = requested_tokens - image_tokens(workload.model, images)
        fixed = {**workload.fixed, "images": (images,)}
        with suppress(PlannerError):
            request = replace(workload, fixed=fixed, seq_len_tokens=workload.seq_len_tokens - fewer)
            words = f"--image-size {images.width}x{images.height}"
            if remedy := _fitting(request, nearest.formula.peak_device_bytes, words):
                yield remedy
                return


LEAST_EDGE = 112
"""Pixels below which no picture is offered."""


def _opt_in(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The first by which something fits on one GPU of what no plan takes unasked: FlexAttention, and programs."""
    if workload.targets or workload.num_gpus > 1:
        return
    requests = [(f"--target {name}", replace(workload, targets=(name,))) for name in workload.objective_spec.targets]
    requests = [entry for entry in requests if taken_when_asked(entry[1].targets[0])]
    if "attention" not in workload.fixed and not attention_refusal(workload.model, FLEX):
        requests.insert(0, (f"--attention {FLEX}", replace(workload, fixed={**workload.fixed, "attention": (FLEX,)})))
    for words, request in requests:
        with suppress(UsageError):  # it expresses nothing that the options allow
            if remedy := _fitting(request, nearest.formula.peak_device_bytes, words, speed=True):
                yield remedy
                return


def in_backward(workload: Workload, peak_device_bytes: int) -> Iterator[Remedy]:
    """The largest batch, of halves, whose whole model one GPU trains with the optimizer in the backward."""
    if workload.num_gpus > 1 or workload.targets or workload.fixed.get("method") != ("full",):
        return
    for target in (
        name for name in workload.objective_spec.targets if name in STACKS and STACKS[name].steps_in_backward
    ):
        batch = workload.global_batch_seqs
        while batch:
            with suppress(UsageError):  # it expresses nothing that the options allow
                request = replace(workload, targets=(target,), global_batch_seqs=batch)
                words = f"--target {target} --global-batch {batch}"
                if remedy := _fitting(request, peak_device_bytes, words, speed=True, ending=f", a step of {batch}"):
                    yield remedy
                    return
            batch //= 2


def _offloaded(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """What fits with the least of it in the memory of one GPU's host: in one as large as is known or usual, else in the
    smallest."""
    if workload.num_gpus > 1 or {"offload", "parallel"} & set(workload.fixed) or workload.gpu.vendor == "Apple":
        return
    from planner.memory.engines.host import HOST_SHARE, assumed_host_bytes, host_bytes_per_node, host_gib

    options, usual = [], int(assumed_host_bytes(workload) / HOST_SHARE)
    for host, offload in product((usual, workload.host_bytes), ("optimizer", "parameters")):
        request = replace(workload, fixed={**workload.fixed, "offload": (offload,)}, host_bytes=host)
        for node, point in best_points(request).items():
            if point is not None:
                most = point.peak_device_bytes * (1 + memory_band(workload.model, point.setup, workload.gpu))
                need = host_bytes_per_node(workload.model, point.setup, 1)
                options.append((most > workload.budget_bytes, host != usual, need, offload, node, point))
    if options:
        *_, need, offload, node, point = min(options, key=lambda option: option[:3])
        saved = nearest.formula.peak_device_bytes - point.peak_device_bytes
        words = f"{node.words} fits at {point.tokens_per_s:,.0f} tokens/s with {gib(need)} of the host's memory"
        memory = "" if workload.host_bytes else f" --host-memory {host_gib(need)}"
        yield Remedy(action=f"--offload {offload}{memory}: {words}", saves_bytes=saved, fits=True)


def _streamed(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """A mixture with its experts in 4 bits in the memory of a larger host than is known of."""
    if workload.num_gpus > 1 or workload.targets or not has_expert_stacks(workload.model):
        return
    if {"quantize_experts", "offload"} & set(workload.fixed):
        return
    from planner.memory.engines.host import host_gib  # seldom needed

    request = replace(workload, targets=("loggetta",), fixed={**workload.fixed, "quantize_experts": (True,)})
    with suppress(UsageError):
        for node, point in best_points(request).items():
            if point is not None:
                more = host_gib(pinned_bytes(workload.model, point.setup))
                saved = nearest.formula.peak_device_bytes - point.peak_device_bytes
                words = f"{node.words} beside experts of 4 bits there fits at {point.tokens_per_s:,.0f} tokens/s"
                yield Remedy(action=f"--host-memory {more}: {words}", saves_bytes=saved, fits=True)
                return


def _shorter(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The longest sequence length (a multiple of 64) at which the setup fits."""
    most = workload.seq_len_tokens // 64
    return _largest_that_fits(workload, nearest, "--seq-len", 64, most, lambda size: nearest.setup.of_length(size))


def _largest_that_fits(
    workload: Workload, nearest: Candidate, flag: str, step: int, most: int, setup_of: Callable[[int], TrainSetup]
) -> Iterator[Remedy]:
    """The largest size, a multiple of `step` up to `most` of them, whose setup fits."""

    def peak(steps: int) -> int:
        return device_peak_bytes(workload.model, workload.gpu, setup_of(steps * step))

    fitting = bisect_left(range(1, most + 1), True, key=lambda steps: peak(steps) > workload.budget_bytes)
    if fitting:
        saved = nearest.formula.peak_device_bytes - peak(fitting)
        yield Remedy(action=f"{flag} {fitting * step}", saves_bytes=saved, fits=True)


def _more_gpus(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The next doubling of the number of GPUs that fits."""
    for factor in (2, 4, 8, 16):
        num = workload.num_gpus * factor
        batch = num * -(-workload.global_batch_seqs // num)
        request = replace(workload, cluster=make_cluster(workload.gpu, num), global_batch_seqs=batch)
        points = [point for point in best_points(request).values() if point is not None]
        if points:
            saved = nearest.formula.peak_device_bytes - min(point.peak_device_bytes for point in points)
            action = f"--gpus {num}" + (f" --global-batch {batch}" if batch != workload.global_batch_seqs else "")
            yield Remedy(action=action, saves_bytes=saved, fits=True)
            return


def _larger_host(results: WalkResults) -> Iterator[Remedy]:
    """The least offloading that only the size of the host's memory rules out."""
    if not results.too_large_for_hosts:
        return
    from planner.memory.engines.host import host_gib  # seldom needed

    key, need = min(results.too_large_for_hosts.items(), key=lambda entry: entry[1])
    there = f"--offload {key[FIELDS.index('offload')]} fits with {gib(need)} in every node's host"
    yield Remedy(action=f"--host-memory {host_gib(need)}: {there}", saves_bytes=0, fits=True)


def _larger_gpu(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The same card with more memory, the smallest of the table on which the setup fits, and the one that is cheapest
    to rent for the job."""
    share, rented = workload.headroom_bytes / workload.memory_bytes, []

    def holds(gpu: GpuSpec) -> bool:
        return device_peak_bytes(workload.model, gpu, nearest.setup) <= gpu.memory_bytes * (1 - share)

    for version in [gpu for gpu in larger_versions(workload.gpu) if holds(gpu)][:1]:
        yield Remedy(action=f"--gpu {version.key}", saves_bytes=version.memory_bytes - workload.memory_bytes, fits=True)
    first = True
    for gpu in sorted(all_gpus(), key=lambda gpu: gpu.memory_bytes):
        if gpu.memory_bytes <= workload.gpu.memory_bytes or gpu.vendor != "NVIDIA" or gpu.is_built_in:
            continue
        if workload.num_gpus > 1 and gpu.key not in keys_on_demand():  # DGX Sparks are no node of GPUs
            continue
        if not holds(gpu):
            continue
        saved = gpu.memory_bytes - workload.memory_bytes
        if first:
            yield Remedy(action=f"--gpu {gpu.key}", saves_bytes=saved, fits=True)
            first = False
        if workload.num_gpus == 1 and (price := price_per_hour(gpu.key)) is not None:
            there = replace(workload, gpu=gpu, memory_bytes=gpu.memory_bytes, price_per_hour=price[0])
            step_s = candidate(there, nearest.setup).formula.step_time_s or 0.0
            rented.append((step_s * price[0] / 3600, gpu.key, price, saved, there))
    if rented:
        step_usd, key, (hourly, source, _), saved, there = min(rented, key=lambda offer: offer[:2])
        hours = job_s(there, candidate(there, nearest.setup))
        cost = f"${step_usd:.3g} a step" if hours is None else f"${hourly * hours / 3600:,.2f} for the job"
        action = f"--gpu {key}, rented at ${hourly:.2f} an hour ({source}): {cost}"
        yield Remedy(action=action, saves_bytes=saved, fits=True)
