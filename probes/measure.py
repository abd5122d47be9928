"""Measuring one setup on the device of this process: build, warm up, time, extend. Runs in the probe's child.

Each depth is built from the configuration with random weights, runs the trainer's own step with phase marks until the
optimizer's state exists (memory), then without marks until the step times settle (speed).

On several GPUs this runs in every rank of the job, on the rank's own device; the ranks agree on the steps they run
(`probes.crew`) and rank 0 answers for all.
"""

import gc
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch

from planner.exporters.deepspeed import STAGES as ZERO_STAGES
from planner.memory.optimizer import paged_bytes
from planner.outcome import Measurement
from planner.units import MIB, gib
from probes.child import StatusPipe, limit_cpu_memory
from probes.crew import Crew, crew_of
from probes.device import Turn, clean_turn, take_turn
from probes.environment import read_environment
from probes.failures import MachineFault, UnsupportedProbe, building
from probes.measure_depth import Depths, choose_depths
from probes.measure_kernels import attention_backend, kernels_of_step
from probes.measure_meters import CpuMeter, CudaMeter, Meter, copy_bandwidth
from probes.measure_reserved import growth_asked_for, reserved_gap, segments_grow
from probes.measure_timing import DepthRun, Extended, extend, miss_fraction, timed_until_settled
from probes.ranks import Seat, seat_of
from probes.request import ProbeRequest
from probes.stack import (
    build_model,
    inner_model,
    load_config,
    make_batch,
    make_trainer,
    optimizer_of,
    train_step,
)
from probes.stack.autocast import emulation_installed
from probes.stack.build import build_reference
from probes.stack.quantize import quantized_tensors
from probes.stack.real_losses import loss_is_emulated
from probes.stack.shards import fill_shards, shards_first, spread_on_meta, whole_quantized_bytes
from probes.stack.spread import spread_model
from probes.stack.step import Mark
from probes.stack.zero import fill_partitions, make_zero_trainer, num_trained, partitions_first, zero_step
from probes.topology import topology

ACCUMULATION_TIMED = (1, 3)
FITS_MARGIN = 1.2
"""The full depth is run for its memory where even a fifth more than the line says would fit."""
LEFTOVER_BYTES = 16 * MIB
"""More than this still allocated between two depths would be counted in the next one's peak."""
PARAMETER_STEPS_NOTE = "accumulation timed at 1 and 3 micro-batches and extended"


def measure(request: ProbeRequest, status: StatusPipe) -> Measurement:
    """The measurement of one request on this process's device; of a job of several ranks, the whole job's on rank 0 and
    this rank's on the others.

    Raises:
        Whatever the libraries raise; `probes.failures.classify_exception` names it.
    """
    if request.setup.compile:
        raise UnsupportedProbe("torch.compile is not probed: its one-off compilation takes longer than the probe")
    if request.device == "cpu" and request.setup.offload != "none":
        raise UnsupportedProbe("offloading needs a GPU: on the CPU backend everything is in the host's memory already")
    status.progress("choosing depths")
    depths = _depths(request)  # no GPU needed yet: the one before us may still be measuring
    seat = _seat(request)
    devices = request.devices
    request = replace(request, device=devices[seat.local_rank])
    turn = _claim_device(request, seat, status)
    with ExitStack() as resources:
        if seat.size > 1:
            status.progress("meeting the other ranks")
        crew = resources.enter_context(crew_of(seat, request.device, request.limits.time_s))
        if request.device == "cpu" and request.limits.cpu_memory_bytes is not None:
            limit_cpu_memory(request.limits.cpu_memory_bytes)
        status.starting(False)
        bandwidth = copy_bandwidth(request.device) if request.limits.cpu_memory_bytes is None else 0.0
        gc.collect()
        gc.freeze()  # the libraries' million objects are not looked through again after every depth
        resources.callback(gc.unfreeze)
        if request.device == "cpu":
            resources.enter_context(emulation_installed())
        runner = _DepthRunner(
            request=request, status=status, turn=turn, crew=crew, devices=devices, resources=resources
        )
        mine = _assemble(request, depths, runner, bandwidth)
        return crew.worst(mine) or mine


def _seat(request: ProbeRequest) -> Seat:
    """This process's place in the job that the request asks for.

    Raises:
        UnsupportedProbe: the job was started with another number of processes.
    """
    if request.num_ranks == 1:
        return Seat()
    seat = seat_of()
    if seat.size != request.num_ranks:
        raise UnsupportedProbe(f"a setup on {request.num_ranks} GPUs needs as many ranks, got {seat.size}")
    return seat


def _claim_device(request: ProbeRequest, seat: Seat, status: StatusPipe) -> Turn:
    """Waits for our turn on a clean device, makes it current and sets its memory cap."""
    torch.manual_seed(request.seed + seat.rank)
    turn = take_turn(request.device, status.waiting) if seat.size == 1 else clean_turn(request.device)
    if request.device == "cpu":
        return turn
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
    return turn


def cuda_problem() -> str:
    """Why torch has no GPU here, with what torch itself says about the driver; empty where it has one."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is a build without CUDA"
    words = "; ".join(str(one.message).strip() for one in said)
    return f"torch {torch.__version__} finds no usable driver" + (f": {words}" if words else "")


def _depths(request: ProbeRequest) -> Depths:
    if request.full_depth:
        from probes.stack import num_layers

        return Depths(full=num_layers(load_config(request.config)), reason="full depth was asked for")
    chosen = choose_depths(request.config, request.setup, check=request.check_depth)
    if not request.depths:
        return chosen
    wanted = sorted(request.depths)
    if len(wanted) == 1:
        return Depths(full=wanted[0], reason="one depth was asked for")
    check = wanted[2] if len(wanted) > 2 else None
    return Depths(full=chosen.full, short=wanted[0], long=wanted[1], check=check)


@dataclass(kw_only=True)
class _DepthRunner:
    """Builds and runs one depth after another on the same device, leaving nothing behind in between."""

    request: ProbeRequest
    status: StatusPipe
    turn: Turn
    crew: Crew
    devices: tuple[str, ...]
    resources: ExitStack
    profiled: bool = False

    @cached_property
    def trained(self) -> int:
        """Trained elements of the whole model, whatever depth is run."""
        return num_trained(self.request.config, self.request.setup, attention_name(self.request))

    def run(self, depth: int, *, timed: bool) -> DepthRun:
        """One depth: its phases' peaks and, if `timed`, its step times."""
        meter: Meter
        if self.request.device == "cpu":
            meter = CpuMeter(self.request.limits.cpu_clock, spread=self.crew.seat.size > 1)
        else:
            before = self.turn.before
            meter = CudaMeter(
                self.request.device,
                self.resources,
                before.used_bytes if before is not None else None,
                paged=self.request.setup.optimizer.startswith("paged-"),
            )
        found = self._run(depth, meter, timed=timed)
        return replace(found, flags=(*found.flags, *self._clean()))  # after an exception the process ends anyway

    def whole(self, depth: int, extended: Extended) -> DepthRun | None:
        """The memory of the full depth, run without timing where it will fit; None on the CPU (whose reserved memory is
        what is allocated), for a job of several ranks, and where it may not fit."""
        if self.request.device == "cpu" or self.crew.seat.size > 1:
            return None
        device = torch.device(self.request.device)
        free, _ = torch.cuda.mem_get_info(device)
        available = free + torch.cuda.memory_reserved(device)
        allowed = self.request.limits.allocator_bytes
        if allowed is not None:
            available = min(available, allowed)
        if extended.reserved_bytes * FITS_MARGIN > available:
            return None
        return self.run(depth, timed=False)

    def reserved(self, extended: Extended, depth: int | None, grown: bool | None) -> tuple[int, str]:
        """(reserved peak at `depth` layers (None: all), how it was found): live tensors by the line, what the allocator
        holds beyond them by replaying the dry run there, with segments that grow where they were seen to."""
        if self.request.device == "cpu" or self.crew.seat.size > 1:
            return extended.reserved_bytes, "memory extended linearly"
        capability = torch.cuda.get_device_capability(torch.device(self.request.device))
        gap = reserved_gap(self.request.config, self.request.setup, capability, depth, grown)
        if gap is None:
            return extended.reserved_bytes, "memory extended linearly (the dry run cannot follow this setup)"
        return extended.allocated_bytes + gap, "live memory extended linearly, reserved by replaying the dry run"

    def _clean(self) -> tuple[str, ...]:
        """Gives the depth's memory back, so that the next one is measured alone; flags what stays."""
        gc.collect()
        if self.request.device == "cpu":
            return ()
        device = torch.device(self.request.device)
        torch.cuda.synchronize(device)
        # cuBLAS keeps its workspace in PyTorch's count from the first product on: each depth shall make its own.
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:
            clear_workspaces()
        torch.cuda.empty_cache()
        return ("leftover-memory",) if torch.cuda.memory_allocated(device) > LEFTOVER_BYTES else ()

    def _run(self, depth: int, meter: Meter, *, timed: bool) -> DepthRun:
        request, setup, device = self.request, self.request.setup, torch.device(self.request.device)
        what = f"building {depth} layers"
        self.status.progress(what)
        sharded, partitioned, zero = shards_first(setup), partitions_first(setup), setup.parallel in ZERO_STAGES
        spread, job = None, None
        with building(what):
            model = build_model(
                request.config,
                setup,
                device="meta" if sharded or partitioned else device,
                num_layers=depth,
                attention=attention_name(request),
                seed=request.seed,
            )
            reference = build_reference(
                inner_model(model).config, setup, device=device, attention=attention_name(request), seed=request.seed
            )
            if sharded:
                spread = spread_on_meta(model, setup, device)
                fill_shards(model, device, setup, seed=request.seed)
        if isinstance(meter, CpuMeter) and not partitioned:
            _count_loaded(meter, model)
            if reference is not None:
                _count_loaded(meter, reference)
        with meter.following():
            if partitioned:
                with building(what):
                    fill_partitions(model, device, setup, trained=self.trained, seed=request.seed)
            if spread is None and self.crew.seat.size > 1 and not zero:
                spread = spread_model(model, setup, device=device)
            optimizer = optimizer_of(model, setup)
            if zero:
                job = make_zero_trainer(model, setup, optimizer, trained=self.trained)
                step: Callable[..., Any] = partial(zero_step, job)
                if setup.parallel == "zero3" and not partitioned:  # the trainer cuts the weights while it makes them
                    meter.rebase()
            else:
                step = partial(train_step, make_trainer(model, setup, optimizer, spread, reference))
            mark: Mark = meter.mark
            if setup.optimizer.startswith("paged-") and device.type == "cuda":
                mark = _only_what_is_free(meter.mark, optimizer, setup.optimizer, device)
            batches = [make_batch(setup, inner_model(model).config, device=device) for _ in range(_batches(request))]
            for number in range(1, request.limits.warmup_steps + 1):
                self.status.progress(f"warming up {depth} layers, step {number} of {request.limits.warmup_steps}")
                step(batches, mark)
        phase_peaks = meter.phase_peaks()
        times: tuple[float, ...] = ()
        kernels: tuple[str, ...] = ()
        is_settled = True
        if timed:
            self.status.progress(f"timing {depth} layers")
            times, is_settled = self._time(meter, lambda num: lambda: step(batches[:num]))
            if device.type == "cuda" and self.crew.seat.size == 1 and not self.profiled:
                self.profiled = True
                kernels = kernels_of_step(lambda: step(batches[:1]))
        found = DepthRun(
            depth=depth,
            phase_peaks_bytes=phase_peaks,
            reserved_bytes=meter.reserved_peak(),
            context_bytes=meter.context_bytes(),
            step_times_s=times,
            settled=is_settled,
            flags=tuple(sorted(meter.flags())),
            nvml=meter.has_nvml,
            kernels=kernels,
            grown=segments_grow(torch.cuda.memory_snapshot()) if device.type == "cuda" else None,
        )
        if job is not None:
            job.engine.destroy()  # it is held by its own hooks
        return found

    def _time(self, meter: Meter, step_of: Callable[[int], Callable[[], object]]) -> tuple[tuple[float, ...], bool]:
        """Step times of the setup's accumulation, extended from fewer micro-batches where there are many."""
        setup, limits = self.request.setup, self.request.limits
        steps = setup.accumulation_steps
        if steps <= limits.max_accumulation:
            return self._settled_times(meter, step_of(steps), limits.measure_s)
        few, more = ACCUMULATION_TIMED
        short, short_settled = self._settled_times(meter, step_of(few), limits.measure_s / 3)
        long, long_settled = self._settled_times(meter, step_of(more), limits.measure_s * 2 / 3)
        micro_s = max(0.0, (median(long) - median(short)) / (more - few))
        return tuple(time_s + micro_s * (steps - more) for time_s in long), short_settled and long_settled

    def _settled_times(
        self, meter: Meter, step: Callable[[], object], measure_s: float
    ) -> tuple[tuple[float, ...], bool]:
        """All ranks see the slowest one's times and rank 0's clock, and so run the same steps."""
        import time

        crew = self.crew
        first_s = crew.slowest(meter.time_steps(step, 1))[0]  # without marks for the first time: not counted
        return timed_until_settled(
            lambda num: crew.slowest(meter.time_steps(step, num)),
            replace(self.request.limits, measure_s=measure_s),
            lambda: crew.same(time.monotonic()),
            expected_step_s=first_s,
        )


def _only_what_is_free(mark: Mark, optimizer: Any, name: str, device: torch.device) -> Mark:
    """The marks, with a look before the first optimizer step: managed memory beyond what is free can hang a whole GPU,
    so a paged optimizer whose states would begin to travel is not probed."""
    trained = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    wanted, looked = paged_bytes(trained, name), False

    def careful(phase: str, layer: int | None = None) -> None:
        nonlocal looked
        if phase == "step" and not looked:
            looked = True
            free, _ = torch.cuda.mem_get_info(device)
            if wanted > free:
                raise UnsupportedProbe(
                    f"{name} would keep {gib(wanted)} of states in managed memory where {gib(free)} are free: more "
                    "than is free can hang the GPU, so paging itself is not probed"
                )
        mark(phase, layer)

    return careful


def _batches(request: ProbeRequest) -> int:
    steps = request.setup.accumulation_steps
    return steps if steps <= request.limits.max_accumulation else ACCUMULATION_TIMED[1]


def attention_name(request: ProbeRequest) -> str | None:
    """transformers' name of the attention to build with; eager where the architecture has no SDPA path, as transformers
    itself falls back when nobody insists."""
    if request.setup.attention != "sdpa":
        return None
    from probes.dryrun.trace import resolve_attention

    name, _ = resolve_attention(load_config(request.config), request.setup)
    return name


def _count_loaded(meter: CpuMeter, model: Any) -> None:
    """Counts what loading leaves: parameters, buffers, quantization statistics."""
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            meter.track(tensor)
        for _, tensor in quantized_tensors(module):
            meter.track(tensor)


def _assemble(request: ProbeRequest, depths: Depths, runner: _DepthRunner, bandwidth: float) -> Measurement:
    setup = request.setup
    flags: set[str] = set()
    notes: list[str] = []
    error: float | None = None
    if depths.truncated:
        assert depths.short is not None
        assert depths.long is not None
        short = runner.run(depths.short, timed=True)
        long = runner.run(depths.long, timed=True)
        runs = [short, long]
        full = extend(short, long, depths.full)
        if full.layer_s <= 0:
            flags.add("unstable")
            notes.append("the longer model was not slower than the shorter one: step times are noise")
        whole = runner.whole(depths.full, full) if request.check_depth else None
        if whole is not None:
            runs.append(whole)
            error = miss_fraction(full.allocated_bytes, whole.allocated_bytes)
            phases, reserved, context = whole.phase_peaks_bytes, whole.reserved_bytes, whole.context_bytes
            memory = f"memory of all {depths.full} layers measured"
        else:
            phases, context = full.phase_peaks_bytes, full.context_bytes
            if depths.check is not None:
                check = runner.run(depths.check, timed=False)
                runs.append(check)
                error = _worst_miss(extend(short, long, check.depth), check, runner)
            reserved, memory = runner.reserved(full, None, long.grown)
        notes.append(
            f"{depths.short} and {depths.long} of {depths.full} layers timed, "
            f"{full.layer_s * 1000:.3f} ms per layer, extended linearly; {memory}"
        )
        times = full.step_times_s
    else:
        only = runner.run(depths.full, timed=True)
        runs = [only]
        phases, reserved, context, times = (
            only.phase_peaks_bytes,
            only.reserved_bytes,
            only.context_bytes,
            only.step_times_s,
        )
        notes.append(f"all {depths.full} layers measured" + (f": {depths.reason}" if depths.reason else ""))
    for run in runs:
        flags.update(run.flags)
        if not run.settled:
            flags.add("unstable")
    if setup.accumulation_steps > request.limits.max_accumulation:
        notes.append(PARAMETER_STEPS_NOTE)
    kernels = next((run.kernels for run in runs if run.kernels), ())
    if kernels and setup.attention == "sdpa":
        notes.append(f"attention ran on SDPA's {attention_backend(kernels)} backend")
    if growth_asked_for() and any(run.grown is False for run in runs):
        notes.append(
            "this PyTorch ignores expandable_segments here: memory is lost to fragments that launch files avoid"
        )
    _device_notes(request, runner.turn, reserved + context, flags, notes)
    if shards_first(setup) and setup.quantized:
        model = build_model(request.config, setup, device="meta", attention=attention_name(request))
        notes.append(
            "weights were cut as they were made; a trainer's loader holds all "
            f"{gib(whole_quantized_bytes(model))} of 4-bit weights on every GPU before it cuts them (accelerate 1.15 "
            "fsdp2_prepare_model)"
        )
    if request.device != "cpu" and runner.crew.seat.size > 1:
        notes.append(f"links between the GPUs: {topology(runner.devices).text()}")
    return Measurement(
        rung=request.rung,
        peak_allocated_bytes=max(phases.values()),
        peak_reserved_bytes=reserved,
        peak_device_bytes=reserved + context,
        phase_peaks_bytes=dict(phases),
        step_times_s=times,
        tokens_per_step=setup.tokens_per_step,
        layers_measured=tuple(run.depth for run in runs),
        environment=read_environment(
            request.device, request.gpu_key, cuda=torch.version.cuda or torch.version.hip or ""
        ),
        extrapolation_error_fraction=error,
        flags=tuple(sorted(flags)),
        notes=tuple(notes),
        device_peak_is_nvml=all(run.nvml for run in runs),
        copy_bandwidth_bytes_per_s=bandwidth or None,
        kernels=kernels,
    )


def _worst_miss(extended: Extended, check: DepthRun, runner: _DepthRunner) -> float:
    """How far the extension missed a third depth, in what is allocated or in what is reserved."""
    reserved, _ = runner.reserved(extended, check.depth, check.grown)
    misses = (
        miss_fraction(extended.allocated_bytes, check.allocated_bytes),
        miss_fraction(reserved, check.reserved_bytes),
    )
    return max(misses, key=abs)


def _device_notes(request: ProbeRequest, turn: Turn, device_bytes: int, flags: set[str], notes: list[str]) -> None:
    """What a person must know about this device and this loss."""
    setup = request.setup
    if request.device == "cpu":
        notes.append("CPU backend: memory as a GPU's allocator would count it (512-byte rounding), speed of this CPU")
        return
    if turn.shared_bytes:
        flags.add("device-shared")
        notes.append(
            f"others held {turn.shared_bytes // MIB} MiB of the GPU: "
            "speed and the largest batch are not the machine's best"
        )
    if torch.version.hip:
        notes.append("ROCm: live memory is measured; reserved memory that is not is modelled after CUDA's allocator")
    if loss_is_emulated(setup):
        flags.add("loss-emulated")
        notes.append(f"loss {setup.loss!r} ran as this project's own kernels: memory is right, speed is not")
    total = torch.cuda.get_device_properties(torch.device(request.device)).total_memory
    total = min(total, request.limits.memory_bytes or total)
    if device_bytes > total:
        flags.add("beyond-device")
        notes.append("at full depth this needs more memory than the device has")
