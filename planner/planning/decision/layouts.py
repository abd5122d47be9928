"""The spreads a plan chooses from: every way of putting the job on its GPUs, in the order in which they are tried.

Stages, each tried only where the ones before leave something open (see `planner.planning.answer`):

    replicate   DDP: every GPU holds everything
    shard       ZeRO-1, ZeRO-2, FSDP2 (reshard off, on, hybrid over nodes), ZeRO-3: the more sharded, the more sent
    split       tensor parallelism within a node, pipeline parallelism, and both, over DDP or FSDP2; long sequences cut
                over GPUs (context parallelism) under FSDP2 or ZeRO-3; experts over a node's GPUs under FSDP2
    offload     optimizer states, or those and the weights, in the host's memory
    other       DP in one process, device-map, GPipe: explained, walked only when asked for

What the user fixed (`Workload.fixed`) filters the list; degrees that were asked for are generated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.memory.engines import engine_named, engine_of
from planner.memory.workload import Workload
from planner.options.layouts import SPLIT_DEGREES
from planner.setup import LAYOUT_FIELDS, TrainSetup
from planner.setup.allowed import SHARDED

STAGES = ("replicate", "shard", "split", "offload", "other")
FIRST_STAGES = ("replicate", "shard")
FIELDS = ("parallel", *LAYOUT_FIELDS)
"""Setup fields that make a layout, beside `num_gpus`."""
LayoutKey = tuple[Any, ...]
"""The values of FIELDS of one setup."""

_NODE_DEGREES = (2, 4, 8)
_PIPELINE_DEGREES = (*_NODE_DEGREES, 16)
LONG_TOKENS = 16384
"""Sequences from which they are cut over GPUs unasked: below, one sequence's activations are seldom what does not fit,
and its exchange costs more than it gives. Judgement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way of spreading the job.

    Attributes:
        fields: setup fields to set on a one-GPU setup, `num_gpus` included.
        data_degree: copies of the model that see their own sequences.
        reason: why it is left out in this workload; "" where it is walked.
    """

    stage: str
    fields: Mapping[str, Any]
    data_degree: int
    reason: str = ""

    @property
    def name(self) -> str:
        return fields_name(self.fields)


ONE_GPU = Layout(stage="replicate", fields={}, data_degree=1)
"""The spread of one: nothing to set."""


layout_key: Callable[[TrainSetup], LayoutKey] = attrgetter(*FIELDS)
"""What two setups share when they are spread alike."""


def layout_name(setup: TrainSetup) -> str:
    """A setup's spread in words: "FSDP2", "tensor 4 × pipeline 2 under DDP", "one GPU"."""
    return fields_name({"num_gpus": setup.num_gpus, **{name: getattr(setup, name) for name in FIELDS}})


def fields_name(fields: Mapping[str, Any]) -> str:
    """The words of `layout_name` from setup fields; absent fields have their defaults."""
    tensor, stages = (fields.get(name, 1) for name in ("tensor_degree", "pipeline_degree"))
    split = [f"tensor {tensor}"] * (tensor > 1)
    if (context := fields.get("context_degree", 1)) > 1:
        split.append(f"{'context' if fields.get('parallel') == 'fsdp2' else 'Ulysses'} {context}")
    if (experts := fields.get("expert_degree", 1)) > 1:
        split.append(f"experts {experts}")
    if stages > 1:
        split.append(("GPipe " if fields.get("pipeline_schedule") == "gpipe" else "") + f"pipeline {stages}")
    words = " × ".join(split)
    engine = "FSDP1" if fields.get("fsdp_version") == 1 else engine_named(fields.get("parallel", "none")).name
    if engine:
        words = f"{words} under {engine}" if words else engine
    if fields.get("shard_degree"):
        words += f" in groups of {fields['shard_degree']}"
    if not fields.get("reshard_after_forward", True):
        words += " keeping gathered weights"
    if (offload := fields.get("offload", "none")) != "none":
        words += f" with {'optimizer' if offload == 'optimizer' else 'weights and optimizer'} on the host"
    return words or "one GPU"


def layout_order(setup: TrainSetup) -> int:
    """How far a layout is from the simplest; 0 on one GPU. Breaks ties in speed."""
    if setup.single_gpu:
        return 0
    rank = engine_of(setup).tie_break
    rank += 4 * sum(degree > 1 for degree in setup.degrees) + 8 * (setup.offload != "none")
    return rank + (setup.shard_degree > 0) + (not setup.reshard_after_forward)


def layouts(workload: Workload, stages: Sequence[str] = FIRST_STAGES) -> tuple[Layout, ...]:
    """The layouts of these stages that this workload can walk.

    Which of them the engines run with which method is `planner.memory.engines.why_not`'s to say, setup by setup.
    """
    return tuple(layout for layout in all_layouts(workload) if layout.stage in stages and not layout.reason)


def layouts_of_one(workload: Workload) -> tuple[Layout, ...]:
    """What one GPU can do: hold everything, or, where that was asked for, put some of it into the host's memory."""
    return layouts(workload, ("offload",)) if workload.offloads else (ONE_GPU,)


def all_layouts(workload: Workload) -> tuple[Layout, ...]:
    """Every spread of the workload's GPUs that the user's requests allow, those left out with their reason; of one GPU
    what was asked of the host's memory."""
    if workload.num_gpus == 1 and not workload.offloads:
        return ()
    by_key: dict[LayoutKey, Layout] = {}
    for stage, fields in _candidates(workload):
        try:
            setup = TrainSetup(**fields)
        except SetupError as error:  # degrees that the user gave and that do not divide the GPUs
            by_key[tuple(fields.items())] = Layout(stage=stage, fields=fields, data_degree=1, reason=error.message)
            continue
        wanted = all(getattr(setup, name) in workload.fixed[name] for name in FIELDS if name in workload.fixed)
        if wanted and layout_key(setup) not in by_key:
            by_key[layout_key(setup)] = Layout(
                stage=stage, fields=fields, data_degree=setup.data_degree, reason=_why_left_out(workload, setup)
            )
    return tuple(by_key.values())


def _candidates(workload: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    """(stage, fields) of everything that is thought of, in the order of STAGES."""
    num, per_node = workload.num_gpus, _per_node(workload)
    whole: dict[str, Any] = {"num_gpus": num}
    if num == 1:
        yield from _offloads(whole)
        return
    fsdp, keeping = {**whole, "parallel": "fsdp2"}, {"reshard_after_forward": False}
    yield "replicate", {**whole, "parallel": "ddp"}
    yield "shard", {**whole, "parallel": "zero1"}
    yield "shard", {**whole, "parallel": "zero2"}
    yield "shard", {**fsdp, **keeping}
    yield "shard", fsdp
    groups = _fixed(workload, "shard_degree") or ((per_node,) if 1 < per_node < num else ())
    for group in groups:
        yield "shard", {**fsdp, "shard_degree": group}
        yield "shard", {**fsdp, "shard_degree": group, **keeping}
    yield "shard", {**whole, "parallel": "zero3"}
    schedules = tuple(dict.fromkeys(("1f1b", *_fixed(workload, "pipeline_schedule"))))
    for tensor, depth, overs in _tensor_pipeline_degrees(workload):
        degrees = {"tensor_degree": tensor, "pipeline_degree": depth}
        for parallel in ("none",) if tensor * depth == num else overs:
            for schedule in schedules if depth > 1 else ("1f1b",):
                yield "split", {**whole, **degrees, "parallel": parallel, "pipeline_schedule": schedule}
    for degree, parallel in _context_degrees(workload):
        yield "split", {**whole, "context_degree": degree, "parallel": parallel}
    for degree in _expert_degrees(workload):
        for group in (0, *groups):
            yield "split", {**fsdp, "expert_degree": degree, "shard_degree": group}
    yield from _offloads(whole)
    for parallel in ("device-map", "dp"):
        if parallel in _fixed(workload, "parallel"):
            yield "other", {**whole, "parallel": parallel}


def _offloads(whole: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What lies in the host's memory between its uses; on one GPU too (an engine's rank of one)."""
    for offload, parallels in (("optimizer", ("zero2", "zero1", "zero3")), ("parameters", ("fsdp2", "zero3"))):
        for parallel in parallels:
            yield "offload", {**whole, "parallel": parallel, "offload": offload}


def _context_degrees(workload: Workload) -> Iterator[tuple[int, str]]:
    """(context degree, what shards beside it): the user's, or powers of two within a node for long sequences."""
    if "tensor_degree" in workload.fixed or "pipeline_degree" in workload.fixed:
        return
    degrees = _fixed(workload, "context_degree")
    if not degrees and "parallel" not in workload.fixed and workload.seq_len_tokens >= LONG_TOKENS:
        degrees = _degrees_within_node(workload)
    parallels = _fixed(workload, "parallel") or ("fsdp2", "zero3")
    for degree in degrees:
        if degree > 1:
            yield from ((degree, parallel) for parallel in parallels if parallel in SHARDED)


def _expert_degrees(workload: Workload) -> Iterator[int]:
    """Degrees of expert parallelism: the user's, or of a mixture the most GPUs of a node that its experts divide over,
    as its exchange is in every layer and what they gather less grows with them."""
    if degrees := _fixed(workload, "expert_degree"):
        yield from (degree for degree in degrees if degree > 1)
        return
    if {"parallel", *SPLIT_DEGREES} & set(workload.fixed):
        return
    stacks, fitting = workload.model.expert_stacks, _degrees_within_node(workload)
    yield from [degree for degree in fitting if stacks and not any(num % degree for num in stacks)][-1:]


def _tensor_pipeline_degrees(workload: Workload) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """(tensor degree, pipeline degree, data parallelism over them) beyond 1 x 1: the user's, or powers of two.

    Not asked for, tensor parallelism stays within a node, because it sends activations in every layer; over it lies
    FSDP2 (Accelerate, torchtitan), over a pipeline FSDP2 or DeepSpeed's ZeRO-1; both together only as whole nodes.
    """
    if "tensor_degree" in workload.fixed or "pipeline_degree" in workload.fixed:
        for tensor in _fixed(workload, "tensor_degree") or (1,):
            for depth in _fixed(workload, "pipeline_degree") or (1,):
                yield tensor, depth, ("ddp", "zero1", "fsdp2")
        return
    if "parallel" in workload.fixed or "context_degree" in workload.fixed:
        return  # who names a way of data parallelism means it plain
    tensors = _degrees_within_node(workload)
    yield from ((tensor, 1, ("fsdp2",)) for tensor in tensors)
    for most, engines in ((1, ("zero1", "fsdp2")), *((tensor, ("fsdp2",)) for tensor in tensors[-1:])):
        yield from ((most, depth, engines) for depth in _PIPELINE_DEGREES if workload.num_gpus % (most * depth) == 0)


def _why_left_out(workload: Workload, setup: TrainSetup) -> str:
    batch, model = workload.global_batch_seqs, workload.model
    if refused := workload.objective_spec.layout_refusal(setup.parallel, split=setup.is_split):
        return refused
    if batch % setup.data_degree:
        return f"the global batch of {batch} sequences cannot be distributed evenly over {setup.data_degree} copies"
    if setup.pipeline_degree > model.num_layers:
        return f"{model.num_layers} layers cannot be cut into {setup.pipeline_degree} stages"
    for attention in filter(None, (layer.attention for layer in model.layer_kinds)):
        for num, what in ((attention.num_heads, "attention"), (attention.num_kv_heads, "key and value")):
            if num % setup.tensor_degree:
                return f"{num} {what} heads cannot be divided by tensor degree {setup.tensor_degree}"
    return ""


def _fixed(workload: Workload, name: str) -> tuple[Any, ...]:
    return tuple(workload.fixed.get(name, ()))


def _degrees_within_node(workload: Workload) -> tuple[int, ...]:
    return tuple(degree for degree in _NODE_DEGREES if _per_node(workload) % degree == 0)


def _per_node(workload: Workload) -> int:
    return workload.cluster.gpus_per_node if workload.cluster is not None else workload.num_gpus
