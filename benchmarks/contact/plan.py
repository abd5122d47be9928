"""What a first contact would take: a clock that plays GPU times, by the formula's steps and stated assumptions."""

import sys

from benchmarks.contact.calls import CAMPAIGNS, Kept, jobs_of
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.models.spec import ModelSpec
from planner.predict import predict
from planner.setup import TrainSetup
from probes.campaign_spec import Chain, read_spec
from probes.gpu.request import Limits

IMPORT_S, AHEAD = 15.0, 3
"""Imports of a probe's child on a GPU machine (assumed), which this many children do while one measures."""
FIXED_S = 4.0
"""Context, the device's turn, the profiler's first use, handing over (assumed)."""
BUILD_BYTES_PER_S = 5e9
"""Random weights made on the device, quantized or not (assumed)."""
CALL_START_S = 25.0
"""Wheels, the guard's child with torch, Triton and bitsandbytes (assumed)."""
DEPTHS = (2, 4)


def timing_s(step_s: float, limits: Limits) -> float:
    """Seconds of the timed steps of one depth, by the rule of `Limits`, of steps that do not jitter."""
    window = min(limits.window_steps, max(1, int(limits.measure_s / 2 / step_s)))
    least = 2 * window * step_s
    most = min(limits.measure_s, limits.max_steps * step_s)
    return max(step_s, min(most, max(least, min(limits.min_measure_s, limits.measure_s / 2))))


def probe_s(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, chain: Chain) -> float:
    """Seconds the device is taken by one probe.

    A truncated step takes its share of the layers; two warm-up steps and one thrown away belong to each depth.
    """
    prediction = predict(model, gpu, setup)
    assert prediction.step_time_s is not None
    layers = model.num_layers
    weights = 2.0 * model.num_params
    warmup = chain.limits.warmup_steps + 1
    if chain.depths == (0,):
        step = prediction.step_time_s
        return FIXED_S + weights / BUILD_BYTES_PER_S + warmup * step + timing_s(step, chain.limits)
    total = FIXED_S
    for depth in DEPTHS:
        step = prediction.step_time_s * depth / layers
        total += weights * depth / layers / BUILD_BYTES_PER_S + warmup * step + timing_s(step, chain.limits)
    if chain.check_depth:  # the memory of all layers
        total += weights / BUILD_BYTES_PER_S + chain.limits.warmup_steps * prediction.step_time_s
    return total


def campaign_s(name: str, gpu: GpuSpec) -> list[float]:
    """Seconds of every probe of one campaign, in order; a chain's micro-batches that cannot fit end it."""
    found = []
    for chain in read_spec(CAMPAIGNS / f"contact-{name}.yaml").chains:
        model = resolve_model(chain.model)
        for index in range(len(chain.micro_batches)):
            setup = chain.at(index)
            found.append(max(probe_s(model, gpu, setup, chain), IMPORT_S / AHEAD))
            memory = chain.limits.memory_bytes or gpu.memory_bytes
            if predict(model, gpu, setup).peak_device_bytes > memory:
                break
    return found


def planned_lines(gpu_name: str) -> list[str]:
    """For every call: its jobs, planned minutes, probes and probes per minute, as a Markdown table."""
    gpu = find_gpu(gpu_name)
    head = ("call", "job", "probes", "planned minutes", "probes per minute", "within its limit")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for call in (1, 2, 3, 4):
        minutes = CALL_START_S / 60
        for job in jobs_of(call, Kept(CAMPAIGNS)):
            if "campaign" in job.words:
                times = campaign_s(job.name, gpu)
                reached, spent = 0, IMPORT_S
                for one in times:
                    if spent + one > job.limit_s - 10:
                        break
                    reached, spent = reached + 1, spent + one
                whole = (IMPORT_S + sum(times)) / 60
                pace = 60 * len(times) / sum(times)
                rows.append(
                    f"| {call} | {job.name} | {len(times)} | {whole:.1f} | {pace:.1f} | {reached} of {len(times)} |"
                )
                minutes += min(whole, job.limit_s / 60)
            else:
                rows.append(f"| {call} | {job.name} | - | at most {job.limit_s / 60:.1f} | - | - |")
                minutes += job.limit_s / 60
        rows.append(f"| {call} | **all** | | **at most {minutes:.1f}** | | |")
    return rows


if __name__ == "__main__":
    print("\n".join(planned_lines(sys.argv[1] if len(sys.argv) > 1 else "h200")))
