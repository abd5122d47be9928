"""Where nothing fits: the nearest setup, and single changes that would make something fit."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from planner.decision.candidates import candidate
from planner.decision.clusters import best_points
from planner.decision.facts import WalkResults
from planner.decision.layouts import FIELDS
from planner.decision.policy import taken_when_asked
from planner.errors import PlannerError, UsageError
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import all_gpus
from planner.models import catalogue
from planner.outcome import Candidate
from planner.plan import Answer, NoPlan, Remedy, SpaceCount
from planner.predict import device_peak_bytes
from planner.setup import LAYOUT_FIELDS, TrainSetup
from planner.units import gib
from planner.workload import Workload


def refusal(
    workload: Workload,
    facts: WalkResults,
    answers: tuple[Answer, ...],
    space: SpaceCount,
    notes: tuple[str, ...],
    *,
    helped: bool = True,
) -> NoPlan:
    """The answer where nothing fits: by how much, and, `helped`, what would help, as the level says that refused (a
    walked point's peak is the formula's as dry runs corrected it)."""
    smallest = [known.smallest for known in facts.nodes().values() if known.smallest is not None]
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
        remedies=tuple(_remedies(careful, facts, nearest)) if helped else (),
        tree=answers,
        space=space,
        notes=notes,
    )


def _remedies(workload: Workload, facts: WalkResults, nearest: Candidate) -> Iterator[Remedy]:
    """Smallest change first: options the user fixed, the host's memory, a shorter sequence, more GPUs or a larger host
    where there are several, another GPU of the table, a smaller model."""
    yield from _relaxed(workload, nearest)
    yield from _by_another_program(workload, nearest)
    yield from _offloaded(workload, nearest)
    yield from _streamed_experts(workload, nearest)
    yield from _smaller_batch(workload, nearest)
    yield from _shorter(workload, nearest)
    if workload.num_gpus > 1:
        yield from _more_gpus(workload, nearest)
        yield from _larger_host(facts)
    yield from _roomier_gpu(workload, nearest)
    yield from _smaller_model(workload, nearest)


def _relaxed(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The first of the user's own restrictions (target, spread, method, ...) without which something fits."""
    wishes = [("target", replace(workload, targets=()))] if workload.targets else []
    layout = ("parallel", *LAYOUT_FIELDS) if workload.num_gpus > 1 else ()
    wanted = ("method", "precision", "quantization", "optimizer", "checkpointing", "attention", "loss", "kernels")
    for name in (*layout, *wanted, "activation_offload", "selective_checkpointing"):
        if name in workload.fixed:
            left_out = {name, "method", "quantization", "precision"} if name in ("method", "quantization") else {name}
            freer = {key: value for key, value in workload.fixed.items() if key not in left_out}
            flag = {"pipeline_schedule": "schedule", "reshard_after_forward": "no-reshard"}.get(name, name)
            wishes.append((flag.replace("_", "-"), replace(workload, fixed=freer)))
    for flag, request in wishes:
        for node, point in best_points(request).items():
            if point is not None:
                saved = nearest.formula.peak_device_bytes - point.peak_device_bytes
                yield Remedy(action=f"leave --{flag} out: {node.words} fits", saves_bytes=saved, fits=True)
                return


def _by_another_program(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The first of the programs that no plan takes unasked by which something fits on one GPU."""
    if workload.targets or workload.num_gpus > 1:
        return
    for name in workload.aim.targets:
        with suppress(UsageError):  # it expresses nothing that the options allow
            found = best_points(replace(workload, targets=(name,))) if taken_when_asked(name) else {}
            for node, point in found.items():
                if point is not None:
                    saved = nearest.formula.peak_device_bytes - point.peak_device_bytes
                    words = f"{node.words} fits at {point.tokens_per_s:,.0f} tokens/s"
                    yield Remedy(action=f"--target {name}: {words}", saves_bytes=saved, fits=True)
                    return


def _offloaded(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """What fits with the least of it in the memory of one GPU's host."""
    if workload.num_gpus > 1 or {"offload", "parallel"} & set(workload.fixed) or workload.gpu.vendor == "Apple":
        return
    from planner.engines.host import host_bytes_per_node  # seldom needed

    found = []
    for offload in ("optimizer", "parameters"):
        request = replace(workload, fixed={**workload.fixed, "offload": (offload,)})
        for node, point in best_points(request).items():
            if point is not None:
                found.append((host_bytes_per_node(workload.model, point.setup, 1), offload, node, point))
    if found:
        need, offload, node, point = min(found, key=lambda one: one[0])
        saved = nearest.formula.peak_device_bytes - point.peak_device_bytes
        words = f"{node.words} fits at {point.tokens_per_s:,.0f} tokens/s with {gib(need)} of the host's memory"
        yield Remedy(action=f"--offload {offload}: {words}", saves_bytes=saved, fits=True)


STREAMED_EXPERTS = {"Qwen/Qwen3-30B-A3B": (2048, 10_463_000_000)}
"""Models that experts4bit-qlora trains with 4-bit experts in the host's memory, one layer's on the card: at most so
many tokens in so many bytes (allocated, micro-batch 1, rank 16 on attention and experts, fp32 adapters).

Source: experts4bit-qlora 0.58.1 on PyPI, description, e4b.train.frontier.qwen3.a2000-12gb.2026-10-02: one run on an RTX
A2000 12 GB. Its 7.16 GB of an earlier version was not reproduced, it says. Its own trainer reads tatsu-lab/alpaca
alone; loggetta 0.7.0 (PyPI, `loggetta train`) runs it on anybody's data, with a plan of its own and no file to write.
"""


def _streamed_experts(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """A tool that no plan is made for, where it published a run that this card holds."""
    tokens, peak_bytes = STREAMED_EXPERTS.get(workload.model.model_id, (0, 0))
    gpu, restricted = workload.gpu, workload.targets or {"method", "quantization"} & set(workload.fixed)
    runs_there = gpu.vendor == "NVIDIA" and (gpu.compute_capability or (0, 0)) >= (8, 0) and workload.num_gpus == 1
    if restricted or not runs_there or not workload.aim.supervised:
        return
    if workload.seq_len_tokens <= tokens and peak_bytes <= workload.budget_bytes:
        command = f"loggetta train {workload.model.model_id} --dataset FILE --seq {workload.seq_len_tokens}"
        action = (
            f"{command} --experts host, no target here: experts4bit-qlora keeps 4-bit experts in the host's memory; "
            f"published: rank 16, {tokens:,} tokens in {gib(peak_bytes)}"
        )
        saved = nearest.formula.peak_device_bytes - peak_bytes
        yield Remedy(action=action, saves_bytes=saved, fits=True)


def _shorter(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The longest sequence length (a multiple of 64) at which the setup fits."""
    most = workload.seq_len_tokens // 64
    return _less(workload, nearest, "--seq-len", 64, most, lambda size: nearest.setup.of_length(size))


def _smaller_batch(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The largest batch that fits, of an objective whose micro-batch is the whole batch."""
    if nearest.setup.aim.whole_batch:
        most = workload.global_batch_seqs
        yield from _less(
            workload, nearest, "--global-batch", 1, most, lambda size: nearest.setup.replace(micro_batch_seqs=size)
        )


def _less(
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
    """The next doubling of the number of GPUs that fits, over the coarse walk."""
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


def _larger_host(facts: WalkResults) -> Iterator[Remedy]:
    """Offloading that only the assumed size of the host's memory rules out."""
    for key, need in facts.too_large_for_hosts.items():
        where = f"{gib(need)} would lie in every node's host memory"
        yield Remedy(action=f"--offload {key[FIELDS.index('offload')]} ({where})", saves_bytes=0, fits=True)
        return


def _roomier_gpu(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The smallest GPU of the table on which the setup fits."""
    share = workload.headroom_bytes / workload.memory_bytes
    for gpu in sorted(all_gpus(), key=lambda gpu: gpu.memory_bytes):
        if gpu.memory_bytes <= workload.gpu.memory_bytes or gpu.vendor != "NVIDIA" or gpu.is_built_in:
            continue
        if device_peak_bytes(workload.model, gpu, nearest.setup) <= gpu.memory_bytes * (1 - share):
            saved = gpu.memory_bytes - workload.memory_bytes
            yield Remedy(action=f"--gpu {gpu.key}", saves_bytes=saved, fits=True)
            return


def _smaller_model(workload: Workload, nearest: Candidate) -> Iterator[Remedy]:
    """The largest catalogue model of the same type that fits with this setup."""
    smaller: list[tuple[int, str]] = []
    for name in catalogue.names(model_type=workload.model.model_type):
        try:
            model = catalogue.load(name)
        except PlannerError:
            continue
        if model is None or model.num_params >= workload.model.num_params:
            continue
        if device_peak_bytes(model, workload.gpu, nearest.setup) <= workload.budget_bytes:
            smaller.append((model.num_params, model.model_id))
    if smaller:
        name = max(smaller, key=lambda one: (one[0], one[1].lower()))[1]
        saved = nearest.formula.peak_device_bytes - workload.budget_bytes
        yield Remedy(action=f"a smaller model: {name}", saves_bytes=saved, fits=True)
