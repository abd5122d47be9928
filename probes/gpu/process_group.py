"""The ranks of one job among themselves: the process group, agreeing on step times, one measurement out of many.

Figures travel through a gloo group of the host's memory, apart from the collectives that are measured.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from planner.core.units import gib
from planner.setup.outcome import Measurement
from probes.gpu.ranks import RankInfo

MIN_TIMEOUT_S = 5.0
MAX_TIMEOUT_S = 600.0
"""PyTorch's own default for a collective over NCCL."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """All ranks of a job as one of them sees them; a process group of one needs no process group."""

    rank_info: RankInfo
    group: Any = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; on every rank."""
        if self.rank_info.size == 1:
            return [value]
        values = [None] * self.rank_info.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def same(self, value: Any) -> Any:
        """Rank 0's value, on every rank: what all must decide alike."""
        return self.gather(value)[0]

    def slowest(self, times_s: Sequence[float]) -> list[float]:
        """Seconds of every step on the rank that took longest for it."""
        return [max(step) for step in zip(*self.gather(list(times_s)), strict=True)]

    def worst(self, mine: Measurement) -> Measurement | None:
        """The job's measurement on rank 0, None on the others.

        Figures are those of the rank with the largest device peak; flags and notes of every rank are kept, and every
        rank's peak beside. Step times are the same on all already (`slowest`).
        """
        if self.rank_info.size == 1:
            return mine
        every: list[Measurement] = self.gather(mine)
        dist.barrier(group=self.group)  # nobody leaves before all have read
        return merge(every) if self.rank_info.rank == 0 else None


def merge(every: Sequence[Measurement]) -> Measurement:
    """One measurement of a job from those of its ranks, in order of rank."""
    order = sorted(range(len(every)), key=lambda rank: (-every[rank].peak_device_bytes, rank))
    worst = every[order[0]]
    peaks = tuple((f"rank {rank}", 1, every[rank].peak_device_bytes) for rank in order)
    spread_bytes = peaks[0][2] - peaks[-1][2]
    notes = [
        f"{len(every)} ranks: the memory of {peaks[0][0]}, the largest by {gib(spread_bytes)}; the slowest rank's steps"
    ]
    notes += [
        note for note in dict.fromkeys(note for measurement in every for note in measurement.notes) if note not in notes
    ]
    errors = [error for measurement in every if (error := measurement.extrapolation_error_fraction) is not None]
    rates = [rate for measurement in every if (rate := measurement.copy_bandwidth_bytes_per_s) is not None]
    return replace(
        worst,
        rank_peaks=peaks,
        notes=tuple(notes),
        flags=tuple(sorted({flag for measurement in every for flag in measurement.flags})),
        extrapolation_error_fraction=max(errors, key=abs) if errors else None,
        copy_bandwidth_bytes_per_s=min(rates) if rates else None,
        device_peak_is_nvml=all(measurement.device_peak_is_nvml for measurement in every),
    )


def collective_timeout_s(limit_s: float) -> float:
    """How long a rank waits for the others: half of the probe's time, so that a straggler is named before the runner
    ends the job."""
    return min(MAX_TIMEOUT_S, max(MIN_TIMEOUT_S, limit_s / 2))


@contextmanager
def process_group_of(rank_info: RankInfo, device: str, limit_s: float) -> Iterator[ProcessGroup]:
    """The process group of this process: NCCL on GPUs, gloo on the CPU, over torchrun's own store.

    The process group is not destroyed: the process ends at once after its answer, and tearing down may hang.
    """
    if rank_info.size == 1:
        yield ProcessGroup(rank_info=rank_info)
        return
    timeout = timedelta(seconds=collective_timeout_s(limit_s))
    if device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
    else:
        # The watchdog ends the process when a collective is late, also one that hangs inside the driver.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device(device))
    group = dist.new_group(backend="gloo", timeout=timeout)
    yield ProcessGroup(rank_info=rank_info, group=group)
