"""One depth of a model after another on this process's device: built, stepped until its memory is known, timed."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch

from planner.core.units import MIB, gib
from planner.frameworks.exporters.deepspeed import STAGES as ZERO_STAGES
from planner.hardware.gpus import find_gpu
from planner.memory.states import paged_bytes
from planner.memory.workspace import CONTEXT_BYTES, context_bytes
from planner.options.optimizers import OPTIMIZERS
from probes.gpu.depth import reserved_gap, segments_grow
from probes.gpu.device import DeviceLease
from probes.gpu.failures import UnsupportedProbe, building
from probes.gpu.meters import CpuMeter, CudaMeter, Meter, kernels_of_step
from probes.gpu.process_group import ProcessGroup
from probes.gpu.request import WARMUP_STEPS, ProbeRequest, StatusPipe
from probes.gpu.timing import DepthRun, timed_until_settled
from probes.stack.batch import make_batch
from probes.stack.build import build_model, build_reference
from probes.stack.configs import load_config
from probes.stack.optimizers import optimizer_of
from probes.stack.parallelize import fill_shards, layout_model, shards_first
from probes.stack.quantize import quantized_tensors
from probes.stack.step import Mark, inner_model, make_trainer, train_step
from probes.stack.zero import fill_partitions, make_zero_trainer, num_trained, partitions_first, zero_step

ACCUMULATION_TIMED = (1, 3)
FITS_MARGIN = 1.2
"""The full depth is run for its memory where even a fifth more than the line says would fit."""
LEFTOVER_BYTES = 16 * MIB
"""More than this still allocated between two depths would be counted in the next one's peak."""


@dataclass(kw_only=True)
class DepthRunner:
    """Builds and runs one depth after another on the same device, leaving nothing behind in between."""

    request: ProbeRequest
    status: StatusPipe
    lease: DeviceLease
    process_group: ProcessGroup
    devices: tuple[str, ...]
    resources: ExitStack
    profiled: bool = False

    @cached_property
    def trained(self) -> int:
        """Trained elements of the whole model, whatever depth is run."""
        return num_trained(self.request.config, self.request.setup, attention_name(self.request))

    def run(self, depth: int, *, timed: bool) -> DepthRun:
        meter: Meter
        if self.request.device == "cpu":
            meter = CpuMeter(layout=self.process_group.rank_info.size > 1)
        else:
            before = self.lease.before
            meter = CudaMeter(
                self.request.device,
                self.resources,
                before.used_bytes if before is not None else None,
                paged=OPTIMIZERS[self.request.setup.optimizer].paged,
                assumed_context_bytes=context_bytes(find_gpu(key)) if (key := self.request.gpu_key) else CONTEXT_BYTES,
            )
        run = self._run(depth, meter, timed=timed)
        return replace(run, flags=(*run.flags, *self._clean()))  # after an exception the process ends anyway

    def whole(self, depth: int, extended: DepthRun) -> DepthRun | None:
        """The memory of the full depth, run without timing where it will fit; None on the CPU (whose reserved memory is
        what is allocated), for a job of several ranks, and where it may not fit."""
        if self.request.device == "cpu" or self.process_group.rank_info.size > 1:
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

    def reserved(self, extended: DepthRun, depth: int | None, grown: bool | None) -> tuple[int, str]:
        """(reserved peak at `depth` layers (None: all), how it was found): live tensors by the line, what the allocator
        holds beyond them by replaying the dry run there, with segments that grow where they were seen to."""
        if self.request.device == "cpu" or self.process_group.rank_info.size > 1:
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

    def _profile(self, step: Callable[[], object]) -> tuple[str, ...]:
        """Names of the GPU's kernels in a step, asked once for a probe of one GPU."""
        if self.profiled or self.process_group.rank_info.size > 1 or torch.device(self.request.device).type != "cuda":
            return ()
        self.profiled = True
        return kernels_of_step(step)

    def _run(self, depth: int, meter: Meter, *, timed: bool) -> DepthRun:
        setup, device = self.request.setup, torch.device(self.request.device)
        what = f"building {depth} layers"
        self.status.progress(what)
        model, reference, layout = self._models(depth, what)
        partitioned = partitions_first(setup)
        if isinstance(meter, CpuMeter) and not partitioned:
            for loaded in (model,) if reference is None else (model, reference):
                _count_loaded(meter, loaded)
        with meter.following():
            if partitioned:
                with building(what):
                    fill_partitions(model, device, setup, trained=self.trained)
            step, mark, job = self._trainer(model, reference, layout, meter)
            config = inner_model(model).config
            batches = [make_batch(setup, config, device=device) for _ in range(_batches(self.request))]
            for number in range(1, WARMUP_STEPS + 1):
                self.status.progress(f"warming up {depth} layers, step {number} of {WARMUP_STEPS}")
                step(batches, mark)
        phase_peaks = meter.phase_peaks()
        if timed:
            self.status.progress(f"timing {depth} layers")
        times, is_settled = self._time(meter, lambda num: lambda: step(batches[:num])) if timed else ((), True)
        kernels = self._profile(lambda: step(batches[:1])) if timed else ()
        run = DepthRun(
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
        return run

    def _models(self, depth: int, what: str) -> tuple[Any, Any, Any]:
        """(the model at a depth, the reference of an objective that has one, how it is spread where it was cut as it
        was made)."""
        request, setup, device = self.request, self.request.setup, torch.device(self.request.device)
        sharded, attention, layout = shards_first(setup), attention_name(request), None
        with building(what):
            model = build_model(
                request.config,
                setup,
                device="meta" if sharded or partitions_first(setup) else device,
                num_layers=depth,
                attention=attention,
            )
            reference = build_reference(inner_model(model).config, setup, device=device, attention=attention)
            if sharded:
                layout = layout_model(model, setup, device=device)
                fill_shards(model, device, setup)
        return model, reference, layout

    def _trainer(self, model: Any, reference: Any, layout: Any, meter: Meter) -> tuple[Callable[..., Any], Mark, Any]:
        """(one optimizer step, its phase marks, the ZeRO engine's job where there is one)."""
        setup, device = self.request.setup, torch.device(self.request.device)
        zero = setup.parallel in ZERO_STAGES
        if layout is None and self.process_group.rank_info.size > 1 and not zero:
            layout = layout_model(model, setup, device=device)
        optimizer = optimizer_of(model, setup)
        mark: Mark = meter.mark
        if OPTIMIZERS[setup.optimizer].paged and device.type == "cuda":
            mark = _only_what_is_free(meter.mark, optimizer, setup.optimizer, device)
        if not zero:
            return partial(train_step, make_trainer(model, setup, optimizer, layout, reference)), mark, None
        job = make_zero_trainer(model, setup, optimizer, trained=self.trained)
        if setup.parallel == "zero3" and not partitions_first(
            setup
        ):  # the trainer cuts the weights while it makes them
            meter.rebase()
        return partial(zero_step, job), mark, job

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

        process_group = self.process_group
        first_s = process_group.slowest(meter.time_steps(step, 1))[0]  # without marks for the first time: not counted
        return timed_until_settled(
            lambda num: process_group.slowest(meter.time_steps(step, num)),
            replace(self.request.limits, measure_s=measure_s),
            lambda: process_group.same(time.monotonic()),
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
