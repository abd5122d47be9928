"""From what a phantom GPU recorded to a `TraceResult`."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable

from planner.core.install import installed
from planner.planning.trace_result import Holding, TraceResult
from probes.allocator.events import Alloc, Free, rounded
from probes.phantom.mode import Phantom
from probes.phantom.origins import Origin, code_name
from probes.phantom.session import EAGER
from probes.phantom.steps import parts_of

LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "liger-kernel", "datasets")
WEIGHTS = "weights and buffers"
_POINTS = 400
_SHOWN = 40


def summary(phantom: Phantom, status: str, error: str = "", elapsed_s: float = 0.0) -> TraceResult:
    phantom.memory.keep_peaks()
    _own_weights(phantom)
    totals, alive, peaks = _walk(phantom)
    peak_phase = max(peaks, key=lambda phase: peaks[phase]) if peaks else "load"
    repeated = (
        f"{phantom.num_repeated} of {phantom.num_micro_batches} micro-batches repeat the one before, byte for byte, "
        "and were not run again (--every-micro-batch runs them)"
    )
    return TraceResult(
        status=status,
        error=error,
        num_steps=max(phantom.num_steps.values(), default=0),
        num_events=len(phantom.memory.events),
        peak_allocated_bytes=phantom.memory.peak_allocated_bytes,
        peak_reserved_bytes=phantom.memory.peak_reserved_bytes,
        context_bytes=phantom.card.context_bytes + phantom.memory.group_bytes,
        peak_phase=peak_phase,
        phase_peaks_bytes=peaks,
        by_category=_grouped(phantom, alive, lambda number, origin: category_of(phantom, number, origin)),
        by_module=_grouped(phantom, alive, lambda number, origin: _module(phantom, number, origin)),
        by_line=_grouped(phantom, alive, lambda number, origin: str(origin.line or "(libraries)")),
        by_code=_grouped(phantom, alive, lambda number, origin: code_name(origin.code)),
        by_op=_grouped(phantom, alive, lambda _, origin: origin.op.removeprefix("aten.").removesuffix(".default")),
        refusal=phantom.origins.refused,
        notes=(*phantom.notes, *[repeated] * (phantom.num_repeated > 0), *[IDLE] * phantom.origins.idle_checkpointing),
        questions=tuple((what, str(line or ""), times) for (what, line), times in phantom.origins.questions.items()),
        kernels={**phantom.log.chosen, **phantom.kernels},
        timeline=_timeline(phantom, totals),
        libraries=installed(LIBRARIES),
        elapsed_s=elapsed_s,
        program=None if EAGER in phantom.notes else phantom.issued.rows(),
    )


IDLE = (
    "gradient checkpointing is on, but the model trains in evaluation mode, where it does nothing: call model.train() "
    "(from_pretrained gives a model in evaluation mode)"
)


def _own_weights(phantom: Phantom) -> None:
    """What no optimizer owned (a frozen base, a model that only answers) is known by the module that holds it."""
    for model in filter(None, (reference() for reference in phantom.origins.models.values())):
        for _, parameter in model.named_parameters():
            for part in parts_of(parameter):
                phantom.origins.set_owner(phantom.number_of(part), WEIGHTS, phantom.origins.parameter_name(parameter))


def _walk(phantom: Phantom) -> tuple[list[int], set[int], dict[str, int]]:
    """Allocated bytes after every event, what is alive at the highest, and the peak of each phase."""
    sizes: dict[int, int] = {}
    totals: list[int] = []
    peaks: dict[str, int] = {}
    total, highest, at = 0, -1, -1
    for index, event in enumerate(phantom.memory.events):
        if isinstance(event, Alloc):
            sizes[event.id] = rounded(event.size_bytes)
            total += sizes[event.id]
            phase = phantom.origins.by_allocation[event.id].phase
            peaks[phase] = max(peaks.get(phase, 0), total)
            if total > highest:
                highest, at = total, index
        elif isinstance(event, Free):
            total -= sizes.get(event.id, 0)
        totals.append(total)
    alive: set[int] = set()
    for event in phantom.memory.events[: at + 1]:
        if isinstance(event, Alloc):
            alive.add(event.id)
        elif isinstance(event, Free):
            alive.discard(event.id)
    return totals, alive, peaks


def _grouped(phantom: Phantom, alive: set[int], key: Callable[[int, Origin], str]) -> tuple[Holding, ...]:
    sizes: dict[str, int] = defaultdict(int)
    numbers: Counter[str] = Counter()
    for number in alive:
        origin = phantom.origins.by_allocation[number]
        name = key(number, origin)
        sizes[name] += rounded(origin.size_bytes)
        numbers[name] += 1
    ordered = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
    return tuple(Holding(name=name, size_bytes=sizes[name], num_allocations=numbers[name]) for name in ordered)


def category_of(phantom: Phantom, number: int, origin: Origin) -> str:
    """The kind of memory: weights, gradients, optimizer states, loss, activations, ..."""
    owned = phantom.origins.owners.get(number)
    if owned is not None:
        return owned[0]
    if "workspace" in origin.op:
        return "workspaces"
    if origin.phase == "load":
        return WEIGHTS
    if origin.phase == "step":
        return "optimizer temporaries"
    if origin.phase == "evaluation":
        return "evaluation"
    if any(word in origin.op for word in _LOSS):
        return "loss"
    return "activations kept for the backward" if origin.phase == "forward" else "gradients of activations, recomputed"


_LOSS = ("log_softmax", "nll_loss", "cross_entropy", "logsumexp")


def _module(phantom: Phantom, number: int, origin: Origin) -> str:
    owned = phantom.origins.owners.get(number)
    name = owned[1].rpartition(".")[0] if owned is not None and owned[1] else origin.module
    return re.sub(r"\.\d+(?=\.|$)", ".*", name) or f"({origin.phase})"


def _timeline(phantom: Phantom, totals: list[int]) -> tuple[tuple[float, int, str], ...]:
    """In each of some hundred equal parts of the run its highest moment."""
    width = max(1, len(totals) // _POINTS)
    points: list[tuple[float, int, str]] = []
    phase = "load"
    for start in range(0, len(totals), width):
        part = totals[start : start + width]
        for event in phantom.memory.events[start : start + width]:
            if isinstance(event, Alloc):
                phase = phantom.origins.by_allocation[event.id].phase
        points.append((start / len(totals), max(part), phase))
    return tuple(points)
