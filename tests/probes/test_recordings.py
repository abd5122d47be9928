"""What a GPU said, kept so that it can be replayed for ever: JSON lines, a header before those of each call.

    {"recording": 1, "source": "NVIDIA H100 80GB HBM3, driver 580.159, torch 2.11.0+cu130", ...}
    {"reading": "refusals", "step": "cublas", "type": "builtins.RuntimeError", "text": ..., "kind": "out_of_memory"}
    {"reading": "traces", "step": "lora", "events": "+512 +2048 -0", "rows": [...], "result": {...}, ...}

`rows` are torch.cuda's statistics and the driver's at every mark of the meter, `events` every allocation ("+bytes",
numbered from 0) and release ("-number") in the allocator's order. `replay_problems` runs them through today's meter,
classifier, allocator model, device turn and watcher of launch files, and says where those come to another answer than
the GPU gave. Recorded by benchmarks/contact/readings.py of 1c4d607b.
"""

import builtins
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from planner.core.children import ROOT
from planner.core.units import GIB, MIB
from planner.hardware.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.planning.predict import predict
from planner.setup.codec import decode
from planner.setup.interchange import setup_from_request
from planner.setup.outcome import FailureKind
from probes.allocator.events import Alloc, Event, Free
from probes.allocator.replay import replay
from probes.gpu import device, meters
from probes.gpu.environment import DeviceStatus
from probes.gpu.failures import classify_exception
from probes.gpu.request import ProbeRequest
from probes.launched.run import LaunchedFile, Seen, measurement

ALLOCATED_FRACTION, RESERVED_FRACTION = 0.001, 0.02
"""How far the allocator's model may be from a GPU's allocator."""
LEAST_CONTEXT_GROWTH_BYTES = 96 << 20
"""What libraries may load into the context while known sizes are allocated: cuBLAS alone 66 MiB on an H100."""

LAUNCHED_FRACTIONS = {"peak_allocated_bytes": 0.007, "peak_reserved_bytes": 0.02, "tokens_per_s": 0.10}
"""How far the formula may be from a launch file's run."""

Line = Mapping[str, Any]


def recorded(card: str) -> list[dict[str, Any]]:
    """What one card said, without the header."""
    text = (ROOT / "benchmarks" / "data" / "gpu_recordings" / f"{card}.jsonl").read_text("utf-8")
    return [line for line in map(json.loads, text.splitlines()) if "recording" not in line]


def events_of(text: str) -> list[Event]:
    events: list[Event] = []
    count = 0
    for word in text.split():
        if word[0] == "+":
            events.append(Alloc(count, int(word[1:])))
            count += 1
        else:
            events.append(Free(int(word[1:])))
    return events


def replay_problems(lines: Sequence[Line]) -> list[str]:
    """Where today's code comes to another answer than the recording; empty where all agrees."""
    problems: list[str] = []
    for line in lines:
        check = CHECKS.get(str(line.get("reading")).partition(":")[0])
        if check is not None and "problem" not in line and "ended" not in line:
            name = f"{line['reading']} {line.get('step', '')}".strip()
            problems += [f"{name}: {problem}" for problem in check(line)]
    problems += _known_problems([entry for entry in lines if entry.get("reading") == "known"])
    return problems


def _refusal_problems(line: Line) -> Iterator[str]:
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


def _trace_problems(line: Line) -> Iterator[str]:
    """The allocator's model on the same requests, and the meter on the same statistics."""
    if "events" not in line:
        return
    resident_bytes = int(line["rows"][0]["allocated_bytes"])
    before: list[Event] = [Alloc(-1, resident_bytes)] if resident_bytes else []
    replayed = replay([*before, *events_of(line["events"])], expandable_segments=line["expandable_segments"])
    result = line["result"]
    allocated, reserved = max(result["phase_peaks_bytes"].values()), result["reserved_bytes"]
    if not line.get("cut"):
        for what, ours, theirs, band in (
            ("allocated", replayed.peak_allocated_bytes, allocated, ALLOCATED_FRACTION),
            ("reserved", replayed.peak_reserved_bytes, reserved, RESERVED_FRACTION),
        ):
            if abs(ours - theirs) > band * theirs:
                yield f"the model's {what} peak is {ours}, the allocator's {theirs}"
    measured = replay_meter(line)
    if measured != result:
        yield f"the meter says {measured}, it said {result}"


class PlayedCuda:
    """torch.cuda's statistics and the driver's as a row of a recording says them; between two rows nothing happens but
    that the peaks are reset."""

    def __init__(self, row: Line) -> None:
        self.at(row)

    def at(self, row: Line) -> None:
        self.row = {key: row[key] for key in row if key != "mark"}

    def used_bytes(self) -> int:
        """As `NvmlReader`."""
        used: int = self.row["used_bytes"]
        return used

    def throttle_flags(self) -> set[str]:
        """As `NvmlReader`."""
        return set()

    def reset_peaks(self) -> None:
        self.row["max_allocated_bytes"] = self.row["allocated_bytes"]
        self.row["max_reserved_bytes"] = self.row["reserved_bytes"]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it `CudaMeter` measures this device."""
        served: dict[str, Any] = {
            "memory_allocated": lambda *_: self.row["allocated_bytes"],
            "max_memory_allocated": lambda *_: self.row["max_allocated_bytes"],
            "memory_reserved": lambda *_: self.row["reserved_bytes"],
            "max_memory_reserved": lambda *_: self.row["max_reserved_bytes"],
            "memory_stats": lambda *_: {"num_alloc_retries": self.row["num_alloc_retries"]},
            "reset_peak_memory_stats": lambda *_: self.reset_peaks(),
            "synchronize": lambda *_: None,
            "empty_cache": lambda *_: None,
        }
        with ExitStack() as patches:
            for name, function in served.items():
                patches.enter_context(patch.object(torch.cuda, name, function))
            patches.enter_context(patch.object(meters, "nvml_reader", lambda resources, device: self))
            yield


def replay_meter(line: Line) -> dict[str, Any]:
    """What today's `CudaMeter` makes of the recorded statistics."""
    first, *marks = line["rows"]
    cuda = PlayedCuda(first)
    with ExitStack() as resources, cuda.installed():
        meter = meters.CudaMeter("cuda:0", resources, line["base_used_bytes"], paged=line["paged"])
        for row in marks:
            cuda.at(row)
            if row["mark"] is not None:
                meter.mark(row["mark"])
        return {
            "phase_peaks_bytes": meter.phase_peaks(),
            "reserved_bytes": meter.reserved_peak(),
            "context_bytes": meter.context_bytes(),
            "flags": sorted(meter.flags()),
        }


def _teardown_problems(line: Line) -> Iterator[str]:
    """The device's turn, on what the driver showed of a dying process, finds the device as it was at rest."""
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


def _fault_problems(line: Line) -> Iterator[str]:
    """What says nothing about a setup is never out of memory, not even on a full device."""
    kind, _ = classify_exception(error_of(line), device_is_full=lambda: True)
    if kind.value != line["kind"]:
        yield f"{line['text']!r} is {kind.value}, it is {line['kind']}"


def _launched_problems(line: Line) -> Iterator[str]:
    """A launch file's run is measured as it was seen, and the formula says its memory (LAUNCHED_FRACTIONS)."""
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


# The tests


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_todays_code_answers_as_it_was_recorded(card: str) -> None:
    """What an H100's meters, allocator, libraries and driver said; an H200's forks and its run of an emitted file."""
    assert replay_problems(recorded(card)) == []


def changed(step: str, change: Callable[[dict[str, Any]], None]) -> list[str]:
    """The problems of the H100's recording with one line changed."""
    lines = recorded("h100")
    for line in lines:
        if line.get("step") == step:
            change(line)
    return replay_problems(lines)


def test_a_meter_that_comes_to_another_answer_is_noticed() -> None:
    def more(line: dict[str, Any]) -> None:
        line["rows"][3]["max_allocated_bytes"] += 512 * MIB

    (problem,) = changed("lora", more)
    assert problem.startswith("traces lora: the meter says")


def test_another_answer_than_the_h200_gave_is_noticed() -> None:
    """A fork's words called out of memory, a step that took twice as long, a formula a percent too low."""
    lines = recorded("h200")
    for line in lines:
        if line["reading"] == "fault":
            line["kind"] = "out_of_memory"
        else:
            line["seen"]["peak_allocated_bytes"] = round(1.01 * line["seen"]["peak_allocated_bytes"])
            line["seen"]["step_s"] = [2 * seconds for seconds in line["seen"]["step_s"]]
    assert [problem.partition(":")[0] for problem in replay_problems(lines)] == [
        "fault fork", "fault fork, transformers' trainer", *["launched trl"] * 3,
    ]  # fmt: skip


def test_the_turn_waits_for_a_recorded_teardown() -> None:
    rest = {"used_bytes": 4 * MIB}
    samples = [[0.0, 4 * GIB], [0.3, 560 * MIB], [2.1, 4 * MIB], [6.0, 4 * MIB]]
    line = {"reading": "teardown", "rest": rest, "full": {}, "samples": samples}
    assert replay_problems([line]) == []
    assert "in use" in replay_problems([{**line, "samples": [[0.0, 4 * GIB], [0.3, 560 * MIB]]}])[0]
