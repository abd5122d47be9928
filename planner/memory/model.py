"""The formula rung's memory model: terms composed into phases. Peak = resident + the largest phase.

Three parts do not depend on each other, so a walk over the whole space computes each once: activations (`micro_batch`:
precision, adapters, kernel, checkpointing), the loss chain (`moments.loss_parts`: loss, precision) and what is trained
(`trained`: parameters, optimizer). Every part is affine in the micro-batch.
"""

from planner.gpu import GpuSpec
from planner.memory.allocator import allocator_gap_bytes
from planner.memory.micro_batch import activation_parts
from planner.memory.moments import backward_peak, halves_stay_apart, loss_parts, loss_parts_logits, loss_peak
from planner.memory.optimizer import state_bytes, step_bytes
from planner.memory.trained import trained_parameters
from planner.memory.types import MemoryBreakdown, MemoryTerm, Phase
from planner.memory.weights import weight_bytes
from planner.memory.workspace import context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

AFTER_LOAD: tuple[Phase, ...] = ("forward", "loss", "backward", "step")

_PART_NAMES = {
    "norm": "norm inputs",
    "attention": "attention inputs and outputs",
    "scores": "attention scores (tokens x tokens)",
    "mlp": "MLP activations",
    "adapters": "adapter input copies",
    "pinned": "inputs that int8 matrices keep",
    "inputs": "checkpointed layer inputs",
    "bias": "position biases (tokens x tokens)",
    "masks": "attention masks (tokens x tokens)",
}


def predict_memory(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> MemoryBreakdown:
    """All memory terms of one setup on one GPU, with the phases in which each is alive.

    Source: the terms' own functions; docs/memory-model.md shows how the phases were found (the dry run's event order).
    Not counted: paged optimizer states (managed memory, evictable), the data loader, NCCL.
    """
    parts, chain, trained = (
        activation_parts(model, gpu, setup),
        loss_parts(model, setup),
        trained_parameters(model, setup),
    )
    accumulated = setup.accumulation_steps > 1
    terms: list[MemoryTerm] = []

    def add(category: str, name: str, size_bytes: int, *phases: Phase) -> None:
        if size_bytes > 0:
            alive = {"phases": phases} if phases else {}
            terms.append(MemoryTerm(category=category, name=name, size_bytes=size_bytes, **alive))  # type: ignore[arg-type]

    for part, size in weight_bytes(model, setup).items():
        add("weights", f"weights: {part}", size)
    if setup.method != "full":
        add("adapters", "LoRA matrices", trained.size_bytes)
    states = state_bytes(trained.num, trained.dtype, setup.optimizer, matrix_edge_sum=trained.edge_sum)
    add("optimizer", f"states of {setup.optimizer}", states, *AFTER_LOAD)
    add("workspace", "cuBLAS workspaces", cublas_workspace_bytes(gpu))
    apart = halves_stay_apart(model, setup)
    peak = backward_peak(model, parts, trained, accumulated=accumulated, apart=apart)
    shrunk = peak.where != "first layer"
    compute: tuple[Phase, ...] = ("forward", "loss") if shrunk else ("forward", "loss", "backward")
    for part, size in parts.stored.items():
        add("activations", _PART_NAMES[part], size, *compute)
    add("activations", "autocast copies of the weights", parts.weight_casts[1], *compute)
    add("activations", "final norm", parts.final_norm, *compute[1:])
    if shrunk:
        add("activations", "what is left of the activations", peak.stored, "backward")
    add(
        "activations",
        "autocast's cache",
        parts.weight_casts[0] - parts.weight_casts[1] + parts.adapter_casts,
        "forward",
    )
    if accumulated:
        add("gradients", "accumulated gradients", trained.size_bytes, "forward", "loss", "backward")
    add("activations", "one layer's forward temporaries", parts.forward_temp, "forward")
    add("dequantization", "one dequantized matrix in the forward", parts.dequantized, "forward")
    in_loss, cache = loss_peak(chain, parts, trained, loss_parts_logits(model, setup))
    add("loss", f"loss chain ({setup.loss})", in_loss, "loss")
    add("activations", "autocast's cache in the loss", cache, "loss")
    add("activations", "one recomputed layer", peak.recomputed, "backward")
    add("workspace", "one layer's gradients of activations", peak.transient, "backward")
    add("dequantization", "one dequantized matrix in the backward", peak.dequantized, "backward")
    add("gradients", "gradients in the backward", peak.gradients, "backward")
    add("gradients", "gradients", trained.size_bytes, "step")
    temporary = step_bytes(trained.num, trained.dtype, setup.optimizer, largest_tensor=trained.largest)
    add("optimizer", f"temporaries of {setup.optimizer}", temporary, "step")
    resident = sum(term.size_bytes for term in terms if len(term.phases) >= len(AFTER_LOAD))
    totals = {
        phase: sum(t.size_bytes for t in terms if phase in t.phases)
        for phase in ("forward", "loss", "backward", "step")
    }
    return MemoryBreakdown(
        terms=tuple(terms),
        allocator_gap_bytes=allocator_gap_bytes(resident, max(totals.values()) - resident),
        context_bytes=context_bytes(gpu),
    )
