"""What a trace found, as plain data that passes from the traced process to whoever asked. No torch here."""

import json
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError
from planner.core.inputs import parse_object, read_text, whole
from planner.core.records import dataclass

MAX_BYTES = 256 << 20
_COUNTS = ("num_steps", "num_events", "peak_allocated_bytes", "peak_reserved_bytes", "context_bytes")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The first request that the card refused; `line`: "file:number" of the user's program, "" where only libraries
    ran."""

    requested_bytes: int
    allocated_bytes: int
    line: str
    module: str
    phase: str
    op: str


@dataclass(frozen=True, kw_only=True)
class Holding:
    name: str
    size_bytes: int
    num_allocations: int


@dataclass(frozen=True, kw_only=True)
class Protection:
    """What kept the traced program from the machine, and what it did there instead.

    Attributes:
        kind: "namespaces": its writes went to a private copy, it had no network, GPU or process but its own;
            "landlock": it could write in a private folder alone; or "none".
        num_written: files that it left behind, of which `num_replaced` had been there before.
        paths: some of them, by the names that it gave them.
    """

    kind: str
    num_written: int = 0
    num_replaced: int = 0
    num_deleted: int = 0
    written_bytes: int = 0
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """One traced process.

    Attributes:
        status: "done" (as many steps as asked), "ended" (by itself), "out of memory", "refused" (cannot be followed),
            "untraceable" (it fails on the phantom GPU alone) or "failed" (the program's own error).
        by_category, by_module, by_line, by_code, by_op: what is alive at the peak, largest first; by the program's
            line, and by the innermost function that is not PyTorch's.
        questions: values that only a GPU knows and the program asked for: (what, line, how often).
        timeline: (fraction of the run, allocated bytes), thinned.
        kernels: launches of Triton kernels and attention kernels, by name.
        protection: what whoever ran it says, never the process itself.
        program: the last whole optimizer step, `planner.speed.operators.Program.rows` with the place of every call
            ("places", by stretch: numbers of "names", which are lines and modules); None where no step ended, and
            of a program that compiles. Of a rank of several also "num_ranks".
    """

    status: str
    error: str = ""
    num_steps: int
    num_events: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int
    peak_phase: str
    phase_peaks_bytes: Mapping[str, int]
    by_category: tuple[Holding, ...]
    by_module: tuple[Holding, ...]
    by_line: tuple[Holding, ...]
    by_code: tuple[Holding, ...]
    by_op: tuple[Holding, ...]
    refusal: Refusal | None
    notes: tuple[str, ...]
    questions: tuple[tuple[str, str, int], ...]
    kernels: Mapping[str, int]
    timeline: tuple[tuple[float, int, str], ...]
    libraries: Mapping[str, str] = field(default_factory=dict)
    elapsed_s: float = 0.0
    protection: Protection | None = None
    program: Mapping[str, Any] | None = None

    @property
    def peak_device_bytes(self) -> int:
        return self.peak_reserved_bytes + self.context_bytes

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        part_path = path.with_suffix(".part")
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # no copy of the program's lists
        part_path.write_text(json.dumps(values, default=asdict), encoding="utf-8")
        part_path.rename(path)

    @classmethod
    def read(cls, path: Path, *, without: str = "") -> "TraceResult":
        """The inverse of `write`; `without` something that its texts may hold.

        Raises:
            ConfigError: something else lies there: the traced program could write to it too.
        """
        text = read_text(path, max_bytes=MAX_BYTES)
        values = parse_object(text.replace(json.dumps(without)[1:-1], "") if without else text, "the trace's result")
        from planner.setup.codec import decode  # late: the traced process reads none

        what = "the trace's result"
        result = decode(cls, values | {"protection": None}, what)
        try:
            for name in _COUNTS:
                whole(getattr(result, name), f"{what}: {name}")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return result
