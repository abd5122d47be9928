"""What a GPU said is replayed through meter, classifier, allocator model, device turn and watcher, for ever.

An H100's readings, what an H200 said (its forks' errors, its run of an emitted launch file), and a rehearsal's: a CPU's
tensors with the statistics of the allocator's model.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.contact import recording
from benchmarks.contact.recording import (
    REHEARSAL,
    Recording,
    decode,
    encode,
    events_of_trace,
    read_recordings,
    replay_problems,
)
from benchmarks.contact.traces import SETUPS, TapedMeter, setup_of
from planner.core.children import ROOT
from planner.core.units import GIB, MIB
from probes.allocator.events import Alloc, Free
from probes.gpu.meters import CudaMeter

DATA = ROOT / "benchmarks" / "data"
FILES = sorted([*(DATA / "gpu_recordings").glob("*.jsonl"), *(DATA / "contact").glob("readings.jsonl")])
REHEARSED = DATA / "gpu_recordings" / "rehearsal.jsonl"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_todays_code_answers_as_it_was_recorded(path: Path) -> None:
    problems = [problem for recorded in read_recordings(path) for problem in replay_problems(recorded)]
    assert problems == []


def rehearsal() -> Recording:
    return read_recordings(REHEARSED)[0]


def test_the_rehearsal_is_no_gpus_and_says_so() -> None:
    for recorded in read_recordings(REHEARSED):
        assert recorded.source == REHEARSAL == "rehearsal, not a GPU"
    traced = [line["step"] for line in rehearsal().lines if line["reading"] == "traces" and "events" in line]
    assert traced == [name for name, _, _ in SETUPS]
    assert any(line["reading"].startswith("refusal") for line in rehearsal().lines)
    assert REHEARSED.stat().st_size < 512 * 1024  # small enough to commit


def changed(step: str, change: Any) -> list[str]:
    """The problems of the rehearsal with one line changed."""
    lines = deepcopy([dict(line) for line in rehearsal().lines])
    for line in lines:
        if line.get("step") == step:
            change(line)
    return replay_problems(Recording(source=REHEARSAL, lines=tuple(lines)))


def test_a_meter_that_comes_to_another_answer_is_noticed() -> None:
    def more(line: dict[str, Any]) -> None:
        line["rows"][3]["max_allocated_bytes"] += 512 * MIB

    (problem,) = changed("lora", more)
    assert problem.startswith("traces lora: the meter says")


def test_an_allocator_model_that_comes_to_another_answer_is_noticed() -> None:
    def larger(line: dict[str, Any]) -> None:
        words = line["events"].split()
        line["events"] = " ".join(["+104857600", "-0", *(f"-{int(w[1:]) + 1}" if w[0] == "-" else w for w in words)])

    assert [problem.split(":")[1].split(" peak")[0] for problem in changed("full", larger)] == [
        " the model's allocated",
        " the model's reserved",
    ]


def test_a_refused_allocation_that_is_called_a_crash_is_noticed() -> None:
    def strange(line: dict[str, Any]) -> None:
        line["text"] = "the device said something that nobody has heard before"

    (problem,) = changed("torch", strange)
    assert "a refused allocation is crashed" in problem


def test_what_an_h200_said_is_replayed_and_another_answer_is_noticed() -> None:
    """A fork's words called out of memory, a step that took twice as long, a formula a percent too low."""
    (h200,) = read_recordings(DATA / "gpu_recordings" / "h200.jsonl")
    assert h200.source.startswith("NVIDIA H200")
    assert replay_problems(h200) == []
    lines = [deepcopy(dict(line)) for line in h200.lines]
    for line in lines:
        if line["reading"] == "fault":
            line["kind"] = "out_of_memory"
        else:
            line["seen"]["peak_allocated_bytes"] = round(1.01 * line["seen"]["peak_allocated_bytes"])
            line["seen"]["step_s"] = [2 * seconds for seconds in line["seen"]["step_s"]]
    problems = replay_problems(Recording(source=h200.source, lines=tuple(lines)))
    assert [problem.partition(":")[0] for problem in problems] == [
        "fault fork", "fault fork, transformers' trainer", *["launched trl"] * 3,
    ]  # fmt: skip


def test_without_expandable_segments_the_model_reserves_by_segments() -> None:
    """The same setup in both ways, so that a replay with the wrong one cannot pass."""

    def swapped(line: dict[str, Any]) -> None:
        line["expandable_segments"] = True

    (problem,) = changed("full-segments", swapped)
    assert "reserved peak" in problem


def of_gpu(*lines: dict[str, Any]) -> list[str]:
    return replay_problems(Recording(source="a GPU", lines=lines))


def test_a_context_that_shrinks_with_what_is_allocated_is_noticed() -> None:
    def row(step: str, used: int, reserved: int) -> dict[str, Any]:
        return {"reading": "known", "step": step, "used_bytes": used, "reserved_bytes": reserved}

    assert of_gpu(row("context", 600 * MIB, 2 * MIB), row("allocated", GIB + 598 * MIB, GIB)) == []
    assert of_gpu(row("context", 600 * MIB, 2 * MIB), row("allocated", GIB + 100 * MIB, GIB))


def test_the_turn_waits_for_a_recorded_teardown() -> None:
    rest = {"used_bytes": 4 * MIB}
    samples = [[0.0, 4 * GIB], [0.3, 560 * MIB], [2.1, 4 * MIB], [6.0, 4 * MIB]]
    line = {"reading": "teardown", "rest": rest, "full": {}, "samples": samples}
    assert of_gpu(line) == []
    stays = {**line, "samples": [[0.0, 4 * GIB], [0.3, 560 * MIB]]}
    assert "in use" in of_gpu(stays)[0]


def test_a_file_without_a_header_or_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "readings.jsonl"
    path.write_text(json.dumps({"reading": "rates"}) + "\n")
    with pytest.raises(ValueError, match="before any header"):
        read_recordings(path)
    path.write_text(json.dumps({"recording": recording.VERSION + 1, "source": "x"}) + "\n")
    with pytest.raises(ValueError, match="version"):
        read_recordings(path)


# What CUDA's own history becomes


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0}


def test_pytorchs_history_becomes_events() -> None:
    """Sizes as asked for; a block is free when its release is completed; what was there before is left out."""
    entries = [
        entry("free_completed", 9, 512),  # allocated before the history began
        entry("segment_map", 0, 20 * MIB),
        entry("alloc", 1, 1000),
        entry("alloc", 2, 4 * MIB),
        entry("free_requested", 1, 1000),
        entry("free_completed", 1, 1000),
        entry("alloc", 1, 700),
        {"action": "oom", "device_free": 5, "size": GIB, "stream": 0},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
    ]
    events, calls = events_of_trace(entries)
    assert events == [Alloc(0, 1000), Alloc(1, 4 * MIB), Free(0), Alloc(2, 700)]
    assert calls == 1
    assert decode(encode(events)) == events
    assert encode(events) == "+1000 +4194304 -0 +700"


def test_history_is_kept_by_cuda_with_the_allocator_that_the_setup_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names and arguments are PyTorch's; in what order they are asked is what counts here."""
    from benchmarks.contact import traces as contact_traces

    calls: list[tuple[str, Any]] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append(("init", None)))
    monkeypatch.setattr(memory, "_set_allocator_settings", lambda text: calls.append(("settings", text)), raising=False)
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda *on, **options: calls.append(("record", on or options["max_entries"]))
    )
    traces = [[], [entry("segment_alloc", 0, 2 * MIB), entry("alloc", 5, 300), entry("free_completed", 5, 300)]]
    monkeypatch.setattr(memory, "_snapshot", lambda: {"device_traces": traces})
    with contact_traces._history("cuda:1", False) as so_far:
        assert so_far() == ([Alloc(0, 300), Free(0)], 1, False)
        monkeypatch.setattr(contact_traces, "MAX_ENTRIES", 3)
        assert so_far()[2]  # full: the oldest were overwritten
    assert calls == [
        ("settings", "expandable_segments:False"),
        ("init", None),
        ("record", 200_000),
        ("record", (None,)),
    ]


def test_the_taped_meter_measures_as_the_meter_does() -> None:
    from contextlib import ExitStack

    from benchmarks.contact.played_cuda import MODELLED_CONTEXT_BYTES, Modelled
    from probes.dryrun.tracker import Tracker

    answers = []
    for kind in (CudaMeter, TapedMeter):
        tracker = Tracker("cpu")
        cuda = Modelled(tracker, expandable_segments=True)
        with ExitStack() as resources, cuda.installed(), tracker:
            meter = kind("cuda:0", resources, 0)
            tensors = [torch.empty(3 * MIB, dtype=torch.uint8)]
            for phase in ("forward", "loss", "backward", "step", "forward"):
                meter.mark(phase)
                tensors.append(torch.empty(5 * MIB, dtype=torch.uint8))
                torch.empty(40 * MIB, dtype=torch.uint8)
            answers.append(recording.meter_result(meter))
    assert answers[0] == answers[1]
    assert answers[0]["context_bytes"] == MODELLED_CONTEXT_BYTES
    assert answers[0]["phase_peaks_bytes"]["step"] == (3 + 4 * 5 + 40) * MIB


def test_ten_setups_that_can_exist() -> None:
    assert len({setup_of(fields).replace() for _, fields, _ in SETUPS[:-1]}) == 9
    assert [expandable for _, _, expandable in SETUPS].count(False) == 1
