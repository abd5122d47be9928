"""`ProbeRequest`: what one probe is asked to run, as one JSON file; `ProbePaths`: where its files lie;
`StatusPipe`: what its processes tell the runner.

The same JSON runs in a child process of this machine or, through `probes.gpu.executors`, on a cluster node.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from planner.core.errors import ConfigError, UsageError
from planner.memory.workspace import CONTEXT_BYTES
from planner.setup import TrainSetup
from planner.setup.codec import decode
from planner.setup.interchange import to_jsonable
from planner.setup.outcome import Fidelity

REQUEST_SCHEMA = 1
WARMUP_STEPS = 2
"""Not counted: the optimizer makes its state in the first."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a probe may take, and when its step times count as settled.

    The rule for step times: `WARMUP_STEPS` steps are thrown away; then steps run until the medians of the last two
    windows of `window_steps` steps differ by at most `SETTLED_FRACTION`, or `max_steps` steps or `measure_s` seconds
    are reached (then the measurement is flagged "unstable"). They count as settled only after `min_measure_s` seconds.

    Attributes:
        time_s: wall time of the child process from when it holds its device, building included; past it it is killed.
            Imports and the wait for the device have limits of their own (`probes.gpu.watch.START_LIMIT_S`).
        measure_s: cap in seconds on the measured steps of one depth.
        min_measure_s: the least that is measured, where the cap allows. The extension to full depth doubles the noise:
            with 1 % of jitter, six steps miss by 2 to 3.5 % at the 95th percentile, thirty by about 1 %.
        max_accumulation: with more micro-batches per step than this, one and three are timed and the rest is added at
            the difference (memory stops growing at two).
        memory_bytes: of a smaller card that this one stands in for; the allocator gets what the CUDA context leaves.
        cpu_memory_bytes: what a child on the CPU backend may map beyond its imports (RLIMIT_AS), its "card size".
    """

    time_s: float = 180.0
    measure_s: float = 20.0
    min_measure_s: float = 2.0
    window_steps: int = 3
    max_steps: int = 40
    max_accumulation: int = 4
    memory_bytes: int | None = None
    cpu_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not (self.time_s > 0 and self.measure_s > 0):  # nor are they numbers at all (nan)
            raise UsageError(f"time limits must be above 0 s, got {self.time_s} and {self.measure_s}")
        if self.window_steps < 1 or self.max_steps < 2 * self.window_steps:
            raise UsageError(f"max_steps must hold two windows of {self.window_steps} steps, got {self.max_steps}")
        if self.memory_bytes is not None and self.memory_bytes <= CONTEXT_BYTES:
            raise UsageError(f"memory_bytes must leave room beside a CUDA context, got {self.memory_bytes}")

    @property
    def allocator_bytes(self) -> int | None:
        """What PyTorch may reserve on the stand-in; None: all there is."""
        return None if self.memory_bytes is None else self.memory_bytes - CONTEXT_BYTES


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """One probe: a model's configuration, a setup, a device (the first of several where the setup takes several).

    Attributes:
        config: the raw `config.json` (weights are random; nothing is downloaded).
        depths: () for two truncated depths chosen by the layer pattern, (0,) for full depth, else the depths to run;
            with two or more the figures are extended linearly to the full depth. Memory is then that of the full depth
            where it fits, else a third depth says how far the extension missed it.
        device: "cuda:0" or "cpu".
        gpu_key: row of the GPU table that the device is, recorded with the environment.
    """

    model_id: str
    config: Mapping[str, Any] = field(repr=False)
    setup: TrainSetup
    device: str
    level: Fidelity = Fidelity.PROBE
    depths: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)
    gpu_key: str | None = None

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise UsageError(f"device must be 'cpu' or 'cuda:N', got {self.device!r}")
        if any(depth < 0 for depth in self.depths) or (0 in self.depths and len(self.depths) > 1):
            raise UsageError(f"depths must be positive, or (0,) for full depth; got {self.depths}")

    @property
    def num_ranks(self) -> int:
        return self.setup.num_processes

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device of the job, by rank; all ranks share the one CPU."""
        if self.device == "cpu":
            return ("cpu",) * self.setup.num_gpus
        first = int(self.device.partition(":")[2] or 0)
        return tuple(f"cuda:{index}" for index in range(first, first + self.setup.num_gpus))

    @property
    def full_depth(self) -> bool:
        return self.depths == (0,)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": REQUEST_SCHEMA, **to_jsonable(self), "config": dict(self.config)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The request that `to_dict` wrote.

        Raises:
            ConfigError: another schema or a missing field.
        """
        if values.get("schema") != REQUEST_SCHEMA:
            raise ConfigError(f"request schema must be {REQUEST_SCHEMA}, got {values.get('schema')!r}")
        return decode(cls, values, "the probe request", newer=True)


class ProbePaths:
    """The files of one probe, all in one directory of its own; `result` appears whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.request = directory / "request.json"
        self.result = directory / "result.json"
        self.log = directory / "log.txt"


class StatusPipe:
    """One JSON line per event to the runner; silent when nobody listens.

    Args:
        rank: of the job's process that speaks; None where there is but one.
    """

    def __init__(self, descriptor: int | None, rank: int | None = None) -> None:
        self._descriptor = descriptor
        self._rank = rank

    def send(self, kind: str, value: object) -> bool:
        """Whether the line was delivered."""
        if self._descriptor is None:
            return False
        event = {kind: value} if self._rank is None else {kind: value, "rank": self._rank}
        line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:
            return False
        return True

    def progress(self, text: str) -> None:
        """What is being done now, for a person's progress bar."""
        self.send("progress", text)

    def starting(self, begins: bool) -> None:
        """What every probe needs before its own work begins or ends: imports, the device. It has a limit of its own."""
        self.send("starting", begins)

    def waiting(self, begins: bool) -> None:
        """Waiting for another probe's device begins or ends; the runner's clock stands still meanwhile."""
        self.send("waiting", begins)
