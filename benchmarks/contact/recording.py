"""What a GPU said, kept so that it can be replayed for ever: JSON lines, a header before those of each call.

    {"recording": 1, "source": "NVIDIA H100 80GB HBM3, driver 580.159, torch 2.11.0+cu130", ...}
    {"reading": "refusals", "step": "cublas", "type": "builtins.RuntimeError", "text": ..., "kind": "out_of_memory"}
    {"reading": "traces", "step": "lora", "events": "+512 +2048 -0", "rows": [...], "result": {...}, ...}

`rows` are torch.cuda's statistics and the driver's at every mark of the meter, `events` every allocation ("+bytes",
numbered from 0) and release ("-number") in the allocator's order. `replay_problems` runs them through today's meter,
classifier, allocator model, device turn and watcher of launch files, and says where those come to another answer than
the GPU gave.
"""

import builtins
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from planner.core.records import dataclass
from planner.setup.outcome import FailureKind
from probes.allocator.events import Alloc, Event, Free
from probes.allocator.replay import replay
from probes.gpu.environment import DeviceStatus
from probes.gpu.failures import classify_exception

VERSION = 1
REHEARSAL = "rehearsal, not a GPU"
ALLOCATED_FRACTION, RESERVED_FRACTION = 0.001, 0.02
"""How far the allocator's model may be from a GPU's allocator; of a rehearsal, which is the model's own, nothing."""
LEAST_CONTEXT_GROWTH_BYTES = 96 << 20
"""What libraries may load into the context while known sizes are allocated: cuBLAS alone 66 MiB on an H100."""

LAUNCHED_FRACTIONS = {"peak_allocated_bytes": 0.007, "peak_reserved_bytes": 0.02, "tokens_per_s": 0.10}
"""How far the formula may be from a launch file's run."""

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One call's readings and what they were taken on."""

    source: str
    lines: tuple[Line, ...]

    @property
    def is_rehearsal(self) -> bool:
        """Whether no GPU said this."""
        return self.source == REHEARSAL


def header(source: str, **fields: Any) -> dict[str, Any]:
    """The line before the readings of one call."""
    return {"recording": VERSION, "source": source, **fields}


def read_recordings(path: Path) -> tuple[Recording, ...]:
    """The calls of one file, in order.

    Raises:
        ValueError: readings before a header, a header of another version, a line that is no JSON object.
    """
    calls: list[tuple[str, list[Line]]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = json.loads(text)
        if "recording" in line:
            if line["recording"] != VERSION:
                raise ValueError(f"{path}:{number}: version {line['recording']}, this reads {VERSION}")
            calls.append((str(line["source"]), []))
        elif not calls:
            raise ValueError(f"{path}:{number}: a reading before any header")
        else:
            calls[-1][1].append(line)
    return tuple(Recording(source=source, lines=tuple(lines)) for source, lines in calls)


def encode(events: Iterable[Event]) -> str:
    """Allocations and releases as text; those of storages that began before are left out."""
    numbers: dict[int, int] = {}
    words, count = [], 0
    for event in events:
        if isinstance(event, Alloc):
            numbers[event.id] = count
            count += 1
            words.append(f"+{event.size_bytes}")
        elif isinstance(event, Free) and event.id in numbers:
            words.append(f"-{numbers.pop(event.id)}")
    return " ".join(words)


def decode(text: str) -> list[Event]:
    events: list[Event] = []
    count = 0
    for word in text.split():
        if word[0] == "+":
            events.append(Alloc(count, int(word[1:])))
            count += 1
        else:
            events.append(Free(int(word[1:])))
    return events


def events_of_trace(entries: Sequence[Mapping[str, Any]]) -> tuple[list[Event], int]:
    """(allocations and releases, calls to the driver) of one device's trace in PyTorch's memory snapshot.

    `size` of an allocation is what was asked for; a block is free again at "free_completed".

    Source: torch.cuda.memory._snapshot (PyTorch 2.11), c10/cuda/CUDACachingAllocator.cpp `record_trace`.
    """
    events: list[Event] = []
    calls, alive, number = 0, {}, 0
    for entry in entries:
        action = entry["action"]
        if action == "alloc":
            alive[entry["addr"]] = number
            events.append(Alloc(number, int(entry["size"])))
            number += 1
        elif action == "free_completed" and entry["addr"] in alive:
            events.append(Free(alive.pop(entry["addr"])))
        elif action in ("segment_alloc", "segment_map"):
            calls += 1
    return events, calls


# Replaying


def replay_problems(recording: Recording) -> list[str]:
    """Where today's code comes to another answer than the recording; empty where all agrees."""
    problems: list[str] = []
    for line in recording.lines:
        check = CHECKS.get(str(line.get("reading")).partition(":")[0])
        if check is not None and "problem" not in line and "ended" not in line:
            name = f"{line['reading']} {line.get('step', '')}".strip()
            problems += [f"{name}: {problem}" for problem in check(line, recording.is_rehearsal)]
    problems += _known_problems([entry for entry in recording.lines if entry.get("reading") == "known"])
    return problems


def _refusal_problems(line: Line, rehearsal: bool) -> Iterator[str]:
    """Every refused allocation is out of memory, whichever library said it."""
    if not line["type"]:
        return  # it had enough
    kind, _ = classify_exception(error_of(line), device_is_full=lambda: True)  # so it was
    if kind is not FailureKind.OUT_OF_MEMORY:
        yield f"a refused allocation is {kind.value}: {line['text']!r}"


def error_of(line: Line) -> Exception:
    """An exception of the recorded class and text; of a library's class one of its name that is a RuntimeError where
    the recording says so."""
    module, _, name = str(line["type"]).rpartition(".")
    builtin = getattr(builtins, name, None) if module == "builtins" else None
    base: type[Exception] = RuntimeError if line.get("is_runtime_error", True) else Exception
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        base = builtin
    made: Exception = type(name, (base,), {"__module__": module})(line["text"])
    return made


def _trace_problems(line: Line, rehearsal: bool) -> Iterator[str]:
    """The allocator's model on the same requests, and the meter on the same statistics."""
    if "events" not in line:
        return
    resident_bytes = int(line["rows"][0]["allocated_bytes"])
    before: list[Event] = [Alloc(-1, resident_bytes)] if resident_bytes else []
    replayed = replay([*before, *decode(line["events"])], expandable_segments=line["expandable_segments"])
    bands = (0.0, 0.0) if rehearsal else (ALLOCATED_FRACTION, RESERVED_FRACTION)
    result = line["result"]
    allocated, reserved = max(result["phase_peaks_bytes"].values()), result["reserved_bytes"]
    if not line.get("cut"):
        for what, ours, theirs, band in (
            ("allocated", replayed.peak_allocated_bytes, allocated, bands[0]),
            ("reserved", replayed.peak_reserved_bytes, reserved, bands[1]),
        ):
            if abs(ours - theirs) > band * theirs:
                yield f"the model's {what} peak is {ours}, the allocator's {theirs}"
    measured = replay_meter(line)
    if measured != result:
        yield f"the meter says {measured}, it said {result}"


def replay_meter(line: Line) -> dict[str, Any]:
    """What today's `CudaMeter` makes of the recorded statistics."""
    from benchmarks.contact.played_cuda import KEYS, Recorded
    from probes.gpu.meters import CudaMeter

    first, *marks = line["rows"]
    cuda = Recorded(row={key: first[key] for key in KEYS})
    with ExitStack() as resources, cuda.installed():
        meter = CudaMeter("cuda:0", resources, line["base_used_bytes"], paged=line["paged"])
        for row in marks:
            cuda.at(row)
            if row["mark"] is not None:
                meter.mark(row["mark"])
        return meter_result(meter)


def meter_result(meter: Any) -> dict[str, Any]:
    return {
        "phase_peaks_bytes": meter.phase_peaks(),
        "reserved_bytes": meter.reserved_peak(),
        "context_bytes": meter.context_bytes(),
        "flags": sorted(meter.flags()),
    }


def _teardown_problems(line: Line, rehearsal: bool) -> Iterator[str]:
    """The device's turn, on what the driver showed of a dying process, finds the device as it was at rest."""
    from unittest.mock import patch

    from probes.gpu import device

    samples = line.get("samples")
    rest = line.get("rest", {}).get("used_bytes")
    if rest is None or not samples or samples[0][1] is None:
        return
    clock = _Clock()

    def shown(name: str) -> DeviceStatus:
        used = [sample[1] for sample in samples if sample[0] <= clock.now_s]
        return DeviceStatus(
            name="", uuid="", used_bytes=(used or [samples[0][1]])[-1], total_bytes=1 << 50, process_ids=()
        )

    with patch.object(device, "time", clock):
        status = device.wait_until_clean("cuda:0", resting_bytes=rest, read=shown)
    if status is None or abs(status.used_bytes - rest) > device.RESTING_SLACK_BYTES:
        yield f"the turn began with {status and status.used_bytes} bytes in use, at rest there were {rest}"


class _Clock:
    """Time that passes only in sleep."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def _known_problems(lines: Sequence[Line]) -> Iterator[str]:
    """What the driver counts beyond PyTorch, from the context on, is the same whatever is allocated."""
    rows = [line for line in lines if "reserved_bytes" in line and "used_bytes" in line]
    if not rows:
        return
    beyond = {row["step"]: row["used_bytes"] - row["reserved_bytes"] for row in rows}
    least, most = min(beyond.values()), max(beyond.values())
    if least <= 0 or most - least > LEAST_CONTEXT_GROWTH_BYTES:
        yield f"known: the driver counts {beyond} bytes beyond what PyTorch reserves"


def _fault_problems(line: Line, rehearsal: bool) -> Iterator[str]:
    """What says nothing about a setup is never out of memory, not even on a full device."""
    kind, _ = classify_exception(error_of(line), device_is_full=lambda: True)
    if kind.value != line["kind"]:
        yield f"{line['text']!r} is {kind.value}, it is {line['kind']}"


def _launched_problems(line: Line, rehearsal: bool) -> Iterator[str]:
    """A launch file's run is measured as it was seen, and the formula says its memory (LAUNCHED_FRACTIONS)."""
    from planner.hardware.gpus import find_gpu
    from planner.models.resolve import resolve_model
    from planner.planning.predict import predict
    from planner.setup.codec import decode
    from planner.setup.interchange import setup_from_request
    from probes.gpu.request import ProbeRequest
    from probes.launched.run import LaunchedFile, Seen, measurement

    fields = dict(line["setup"])
    model, card = resolve_model(fields.pop("model")), find_gpu(fields.pop("gpu"))
    setup = setup_from_request(fields)
    file = LaunchedFile(target="trl", command="python", files={}, model_name=model.model_id, dataset_names=())
    request = ProbeRequest(model_id=model.model_id, config=model.config, setup=setup, device="cuda:0")
    seen = {"loaded_bytes": 0, "cuda": "", "python": "", "libraries": {}, "peak_resident_bytes": 0, **line["seen"]}
    measured = measurement(file, request, decode(Seen, seen, newer=True), line["used_before_bytes"])
    answers = {name: getattr(measured, name) for name in line["result"]}
    if answers != line["result"]:
        yield f"the run is {answers}, it was {line['result']}"
    predicted = predict(model, card, setup, planned=True)
    for name, most in LAUNCHED_FRACTIONS.items():
        error = (getattr(predicted, name) or 0.0) / (getattr(measured, name) or 1.0) - 1
        if abs(error) > most:
            yield f"{name} is predicted {100 * error:+.2f} % off, at most {100 * most:g} %"


CHECKS = {
    "refusals": _refusal_problems,
    "refusal": _refusal_problems,
    "traces": _trace_problems,
    "teardown": _teardown_problems,
    "fault": _fault_problems,
    "launched": _launched_problems,
}
