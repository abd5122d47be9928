"""Measuring one setup on the device of this process: build, warm up, time, extend. Runs in the probe's child.

Each depth is built from the configuration with random weights, runs the trainer's own step with phase marks until the
optimizer's state exists (memory), then without marks until the step times settle (speed).

On several GPUs this runs in every rank of the job, on the rank's own device; the ranks agree on the steps they run
(`probes.gpu.process group`) and rank 0 answers for all.
"""

import gc
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from planner.core.units import MIB, gib, percent
from planner.planning.evidence.bands import NO_SHARE, trainer_share
from planner.setup.outcome import Measurement
from probes.gpu.depth import Depths, choose_depths, growth_asked_for
from probes.gpu.device import DeviceLease, clean_lease, lease_device, limit_cpu_memory
from probes.gpu.environment import read_environment
from probes.gpu.failures import MachineFault, UnsupportedProbe
from probes.gpu.meters import attention_backend
from probes.gpu.microbench import free_copy_rate
from probes.gpu.process_group import process_group_of
from probes.gpu.ranks import RankInfo, rank_info_of
from probes.gpu.request import ProbeRequest, StatusPipe
from probes.gpu.run import DepthRunner, attention_name
from probes.gpu.timing import DepthRun, extend, miss_fraction
from probes.gpu.topology import topology
from probes.stack.autocast import emulation_installed
from probes.stack.build import build_model
from probes.stack.configs import load_config, num_layers
from probes.stack.losses import loss_is_emulated
from probes.stack.parallelize import shards_first, whole_quantized_bytes

PARAMETER_STEPS_NOTE = "accumulation timed at 1 and 3 micro-batches and extended"


def measure(request: ProbeRequest, status: StatusPipe, *, alone: bool = False) -> Measurement:
    """The measurement of one request on this process's device; of a job of several ranks, the whole job's on rank 0 and
    this rank's on the others.

    Args:
        alone: whether the process is there for this request only: its garbage collector starts with the first depth.

    Raises:
        Whatever the libraries raise; `probes.gpu.failures.classify_exception` names it.
    """
    if request.setup.compile:
        raise UnsupportedProbe("torch.compile is not probed: its one-off compilation takes longer than the probe")
    if request.device == "cpu" and request.setup.offload != "none":
        raise UnsupportedProbe("offloading needs a GPU: on the CPU backend everything is in the host's memory already")
    status.progress("choosing depths")
    depths = _depths(request)  # no GPU needed yet: the one before us may still be measuring
    rank_info = rank_info_of() if request.num_ranks > 1 else RankInfo()
    if rank_info.size != request.num_ranks:
        raise UnsupportedProbe(f"a setup on {request.num_ranks} GPUs needs as many ranks, got {rank_info.size}")
    devices = request.devices
    request = replace(request, device=devices[rank_info.local_rank])
    lease = _claim_device(request, rank_info, status)
    with ExitStack() as resources:
        if rank_info.size > 1:
            status.progress("meeting the other ranks")
        process_group = resources.enter_context(process_group_of(rank_info, request.device, request.limits.time_s))
        if request.device == "cpu" and request.limits.cpu_memory_bytes is not None:
            limit_cpu_memory(request.limits.cpu_memory_bytes)
        status.starting(False)
        bandwidth = free_copy_rate(request.device) if request.limits.cpu_memory_bytes is None else 0.0
        if alone:  # the libraries' million objects are not looked through after every depth
            gc.freeze()
            gc.enable()
        if request.device == "cpu":
            resources.enter_context(emulation_installed())
        runner = DepthRunner(
            request=request,
            status=status,
            lease=lease,
            process_group=process_group,
            devices=devices,
            resources=resources,
        )
        mine = _assemble(request, depths, runner, bandwidth)
        return process_group.worst(mine) or mine


def _claim_device(request: ProbeRequest, rank_info: RankInfo, status: StatusPipe) -> DeviceLease:
    """Waits for our turn on a clean device, makes it current and sets its memory cap."""
    torch.manual_seed(rank_info.rank)
    lease = lease_device(request.device, status.waiting) if rank_info.size == 1 else clean_lease(request.device)
    if request.device == "cpu":
        return lease
    problem = cuda_problem()
    if problem:
        raise MachineFault(problem)
    index = torch.device(request.device).index or 0
    if index >= torch.cuda.device_count():
        raise MachineFault(f"{request.device} does not exist: this machine has {torch.cuda.device_count()} GPU(s)")
    torch.cuda.set_device(index)
    allowed = request.limits.allocator_bytes
    if allowed is not None:
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), index)
    return lease


def cuda_problem() -> str:
    """Why torch has no GPU here, with what torch itself says about the driver; empty where it has one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is a build without CUDA"
    words = "; ".join(str(warning.message).strip() for warning in caught)
    return f"torch {torch.__version__} finds no usable driver" + (f": {words}" if words else "")


def _depths(request: ProbeRequest) -> Depths:
    if request.full_depth:
        return Depths(full=num_layers(load_config(request.config)), reason="full depth was asked for")
    if not request.depths:
        return choose_depths(request.config, request.setup)
    full, wanted = num_layers(load_config(request.config)), sorted(request.depths)
    if len(wanted) == 1:
        return Depths(full=wanted[0], reason="one depth was asked for")
    check = wanted[2] if len(wanted) > 2 else None
    return Depths(full=full, short=wanted[0], long=wanted[1], check=check)


@dataclass(kw_only=True)
class _Readings:
    """What the depths gave: memory and times of the whole model, and what a reader must know about them."""

    runs: list[DepthRun]
    phases: Mapping[str, int]
    reserved_bytes: int
    context_bytes: int
    times_s: tuple[float, ...]
    error: float | None = None
    flags: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def _assemble(request: ProbeRequest, depths: Depths, runner: DepthRunner, bandwidth: float) -> Measurement:
    readings = _two_depths(request, depths, runner) if depths.truncated else _one_depth(depths, runner)
    for run in readings.runs:
        readings.flags.update(run.flags)
        if not run.settled:
            readings.flags.add("unstable")
    kernels = next((run.kernels for run in readings.runs if run.kernels), ())
    _step_notes(request, runner, kernels, readings)
    share = trainer_share(request.setup) if request.device != "cpu" else NO_SHARE
    if share.fraction:
        readings.notes.append(
            f"timed is our own step; {request.setup.trainer.title} took {percent(share.fraction)} longer "
            f"(±{percent(share.band_fraction)}) where both were measured, which is counted"
        )
    return Measurement(
        level=request.level,
        peak_allocated_bytes=max(readings.phases.values()),
        peak_reserved_bytes=readings.reserved_bytes,
        peak_device_bytes=readings.reserved_bytes + readings.context_bytes,
        phase_peaks_bytes=dict(readings.phases),
        step_times_s=readings.times_s,
        tokens_per_step=request.setup.tokens_per_step,
        layers_measured=tuple(run.depth for run in readings.runs),
        environment=read_environment(
            request.device, request.gpu_key, cuda=torch.version.cuda or torch.version.hip or ""
        ),
        extrapolation_error_fraction=readings.error,
        flags=tuple(sorted(readings.flags)),
        notes=tuple(readings.notes),
        device_peak_is_nvml=all(run.nvml for run in readings.runs),
        copy_bandwidth_bytes_per_s=bandwidth or None,
        kernels=kernels,
        trainer_fraction=share.fraction,
        trainer_band_fraction=share.band_fraction,
    )


def _one_depth(depths: Depths, runner: DepthRunner) -> _Readings:
    only = runner.run(depths.full, timed=True)
    return _Readings(
        runs=[only],
        phases=only.phase_peaks_bytes,
        reserved_bytes=only.reserved_bytes,
        context_bytes=only.context_bytes,
        times_s=only.step_times_s,
        notes=[f"all {depths.full} layers measured" + (f": {depths.reason}" if depths.reason else "")],
    )


def _two_depths(request: ProbeRequest, depths: Depths, runner: DepthRunner) -> _Readings:
    assert depths.short is not None
    assert depths.long is not None
    short, long = runner.run(depths.short, timed=True), runner.run(depths.long, timed=True)
    full = extend(short, long, depths.full)
    whole = runner.whole(depths.full, full)
    readings = _Readings(
        runs=[short, long],
        phases=full.phase_peaks_bytes,
        reserved_bytes=0,
        context_bytes=full.context_bytes,
        times_s=full.step_times_s,
    )
    if full.layer_s <= 0:
        readings.flags.add("noise")
        readings.notes.append("the longer model was not slower than the shorter one: step times are noise")
    if whole is not None:
        readings.runs.append(whole)
        readings.error = miss_fraction(full.allocated_bytes, whole.allocated_bytes)
        readings.phases, readings.context_bytes = whole.phase_peaks_bytes, whole.context_bytes
        readings.reserved_bytes, memory = whole.reserved_bytes, f"memory of all {depths.full} layers measured"
    else:
        if depths.check is not None:
            check = runner.run(depths.check, timed=False)
            readings.runs.append(check)
            extended = extend(short, long, check.depth)
            reserved, _ = runner.reserved(extended, check.depth, check.grown)
            misses = (
                miss_fraction(extended.allocated_bytes, check.allocated_bytes),
                miss_fraction(reserved, check.reserved_bytes),
            )
            readings.error = max(misses, key=abs)
        readings.reserved_bytes, memory = runner.reserved(full, None, long.grown)
    readings.notes.append(
        f"{depths.short} and {depths.long} of {depths.full} layers timed, "
        f"{full.layer_s * 1000:.3f} ms per layer, extended linearly; {memory}"
    )
    return readings


def _step_notes(request: ProbeRequest, runner: DepthRunner, kernels: tuple[str, ...], readings: _Readings) -> None:
    setup, notes = request.setup, readings.notes
    if setup.accumulation_steps > request.limits.max_accumulation:
        notes.append(PARAMETER_STEPS_NOTE)
    if kernels and setup.attention == "sdpa":
        notes.append(f"attention ran on SDPA's {attention_backend(kernels)} backend")
    if growth_asked_for() and any(run.grown is False for run in readings.runs):
        notes.append(
            "this PyTorch ignores expandable_segments here: memory is lost to fragments that launch files avoid"
        )
    if request.device == "cpu":
        notes.append("CPU backend: memory as a GPU's allocator would count it (512-byte rounding), speed of this CPU")
    else:
        _device_notes(request, runner.lease, readings)
    if shards_first(setup) and setup.quantized:
        model = build_model(request.config, setup, device="meta", attention=attention_name(request))
        notes.append(
            "weights were cut as they were made; a trainer's loader holds all "
            f"{gib(whole_quantized_bytes(model))} of 4-bit weights on every GPU before it cuts them (accelerate 1.15 "
            "fsdp2_prepare_model)"
        )
    if request.device != "cpu" and runner.process_group.rank_info.size > 1:
        notes.append(f"links between the GPUs: {topology(runner.devices).text()}")


def _device_notes(request: ProbeRequest, lease: DeviceLease, readings: _Readings) -> None:
    setup, flags, notes = request.setup, readings.flags, readings.notes
    if lease.shared_bytes:
        flags.add("device-shared")
        notes.append(
            f"others held {lease.shared_bytes // MIB} MiB of the GPU: "
            "speed and the largest batch are not the machine's best"
        )
    if torch.version.hip:
        notes.append("ROCm: live memory is measured; reserved memory that is not is modelled after CUDA's allocator")
    if loss_is_emulated(setup):
        flags.add("loss-emulated")
        notes.append(f"loss {setup.loss!r} ran as this project's own kernels: memory is right, speed is not")
    total = torch.cuda.get_device_properties(torch.device(request.device)).total_memory
    total = min(total, request.limits.memory_bytes or total)
    if readings.reserved_bytes + readings.context_bytes > total:
        flags.add("beyond-device")
        notes.append("at full depth this needs more memory than the device has")
