"""The formula rung: one setup in, one `Prediction` out. Memory terms and step time from their own packages."""

from planner.calibration_bands import memory_band
from planner.gpu import GpuSpec
from planner.kernels import attention_kernel
from planner.memory.dtypes import flow_of
from planner.memory.model import predict_memory, trained_parameters
from planner.memory.optimizer import paged_bytes
from planner.models.spec import ModelSpec
from planner.outcome import Prediction, Rung
from planner.setup import TrainSetup
from planner.throughput import step_time
from planner.units import gib


def predict(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Prediction:
    """Memory peaks and step time of one setup from closed forms alone, in well under a millisecond.

    Source: `planner.memory` and `planner.throughput`, each term with its own source.
    Measured: docs/accuracy/formula.md, per source and per case.
    """
    memory = predict_memory(model, gpu, setup)
    speed = step_time(model, gpu, setup)
    return Prediction(
        rung=Rung.FORMULA,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        peak_device_bytes=memory.peak_device_bytes,
        peak_phase=memory.peak_phase,
        phase_peaks_bytes=memory.phase_bytes,
        terms=memory.at_peak(),
        memory_band_fraction=memory_band(model, setup),
        step_time_s=speed.step_time_s,
        tokens_per_s=speed.tokens_per_s,
        time_band_fraction=speed.band_fraction,
        mfu_fraction=speed.mfu_fraction,
        time_parts_s=speed.parts_s,
        notes=(*memory_notes(model, gpu, setup), *speed.notes),
    )


def memory_notes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[str, ...]:
    """What a person must know about this setup's memory, one sentence each."""
    notes = []
    flow = flow_of(setup)
    dtype = flow.attention_input
    kernels = {
        attention_kernel(model, setup, gpu, layer.attention, dtype)
        for layer in model.layer_kinds
        if layer.attention is not None
    }
    if "math" in kernels:
        notes.append(
            "SDPA falls back to its math kernel here (no fused kernel takes this dtype, card and head layout): "
            "it keeps tokens x tokens matrices"
        )
    if gpu.bf16_flops_per_s is None and setup.compute_dtype == "bf16":
        notes.append(f"{gpu.name} has no bf16 units: torch emulates bf16 slowly, fp16 is the better choice")
    if setup.attention == "flash-attention-2" and not gpu.flash_attention_2:
        notes.append(f"{gpu.name} cannot run flash-attention 2")
    paged = paged_bytes(trained_parameters(model, setup).num, setup.optimizer)
    if paged:
        notes.append(f"{gib(paged)} of paged optimizer state lie in managed memory, outside PyTorch's count")
    return tuple(notes)
