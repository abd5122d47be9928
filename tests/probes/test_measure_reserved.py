"""Reserved memory at full depth: measured where it fits, else replayed; a straight line is wrong for it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from planner.core.units import GIB, MIB
from planner.planning.evidence.bands import trainer_share
from planner.setup import TrainSetup
from planner.setup.outcome import SPEED_SPOILING_FLAGS, Prediction
from probes.dryrun.api import report_for_config
from probes.gpu import measure as measuring
from probes.gpu import run as measure_run
from probes.gpu.depth import Depths, reserved_gap, segments_grow
from probes.gpu.device import DeviceLease
from probes.gpu.process_group import process_group_of
from probes.gpu.ranks import RankInfo
from probes.gpu.request import ProbeRequest, StatusPipe
from probes.gpu.timing import DepthRun, extend
from probes.stack.configs import load_config, truncated_config

LAYERS = 16
CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
FULL = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", optimizer="adamw", seq_len_tokens=2048)
HOPPER = (9, 0)
CONTEXT = 500 * MIB


@cache
def dry(depth: int) -> Prediction:
    config = truncated_config(load_config(CONFIG), depth).to_dict()
    report = report_for_config(config, HOPPER, FULL)
    assert hasattr(report, "prediction"), report
    prediction: Prediction = report.prediction
    return prediction


def run_at(depth: int) -> DepthRun:
    """What a GPU would show at this depth, by the allocator's model."""
    prediction = dry(depth)
    return DepthRun(
        depth=depth,
        phase_peaks_bytes=prediction.phase_peaks_bytes,
        reserved_bytes=prediction.peak_reserved_bytes,
        context_bytes=CONTEXT,
        step_times_s=(0.01 * depth,),
    )


class Runs(measure_run.DepthRunner):
    """Depths that the allocator's model answers instead of a GPU."""

    def run(self, depth: int, *, timed: bool) -> DepthRun:
        self.asked.append((depth, timed))
        depth_run = run_at(depth)
        return depth_run if timed else replace(depth_run, step_times_s=())


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, *, setup: TrainSetup = FULL, shared_bytes: int = 0
) -> Callable[..., Any]:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free_bytes, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)
    properties = type("P", (), {"total_memory": 80 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    request = ProbeRequest(model_id="m", config=CONFIG, setup=setup, device="cuda:0")

    def assemble() -> Any:
        with process_group_of(RankInfo(), "cpu", 10.0) as process_group:
            runner = Runs(
                request=request,
                status=StatusPipe(None),
                lease=DeviceLease(descriptor=None, before=None, shared_bytes=shared_bytes),
                process_group=process_group,
                devices=("cuda:0",),
                resources=None,  # type: ignore[arg-type]
            )
            runner.asked = []  # type: ignore[attr-defined]
            return measuring._assemble(request, Depths(full=LAYERS, short=2, long=4, check=6), runner, 0.0), runner

    return assemble


def test_a_line_is_wrong_for_what_the_allocator_reserves() -> None:
    """What the rest of this file is for."""
    line = extend(run_at(2), run_at(4), LAYERS)
    truth = dry(LAYERS)
    assert line.allocated_bytes == pytest.approx(truth.peak_allocated_bytes, rel=1e-4)
    assert abs(line.reserved_bytes / truth.peak_reserved_bytes - 1) > 0.005


def test_memory_is_measured_at_full_depth_where_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement, runner = on_a_gpu(monkeypatch, 79 * GIB)()
    truth = dry(LAYERS)
    assert runner.asked == [(2, True), (4, True), (LAYERS, False)]
    assert measurement.peak_reserved_bytes == truth.peak_reserved_bytes
    assert measurement.peak_device_bytes == truth.peak_reserved_bytes + CONTEXT
    assert measurement.phase_peaks_bytes == dict(truth.phase_peaks_bytes)
    assert measurement.step_time_s == pytest.approx(0.01 * LAYERS * (1 + trainer_share(FULL).fraction))
    assert any(note.startswith("timed is our own step; ") for note in measurement.notes)
    assert measurement.layers_measured == (2, 4, LAYERS)
    assert "memory of all 16 layers measured" in measurement.notes[0]


def test_where_full_depth_does_not_fit_reserved_is_replayed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement, runner = on_a_gpu(monkeypatch, 2 * GIB)()
    truth = dry(LAYERS)
    assert runner.asked == [(2, True), (4, True), (6, False)]
    assert measurement.peak_reserved_bytes == pytest.approx(truth.peak_reserved_bytes, rel=1e-4)
    assert measurement.extrapolation_error_fraction == pytest.approx(0.0, abs=1e-4)
    assert "reserved by replaying" in measurement.notes[0]


def test_a_third_depth_that_reserves_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, only live tensors were compared at the third depth."""
    assemble = on_a_gpu(monkeypatch, 2 * GIB)
    real = run_at

    def fragmented(depth: int) -> DepthRun:
        depth_run = real(depth)
        return replace(depth_run, reserved_bytes=round(depth_run.reserved_bytes * 1.25)) if depth == 6 else depth_run

    monkeypatch.setitem(globals(), "run_at", fragmented)
    measurement, _ = assemble()
    assert measurement.extrapolation_error_fraction == pytest.approx(1 / 1.25 - 1, abs=0.01)


def test_segments_that_do_not_grow_although_asked_to_are_replayed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm before 7, and builds without the driver's mapping calls, ignore the setting and warn."""
    assemble = on_a_gpu(monkeypatch, 2 * GIB)
    real = run_at
    monkeypatch.setitem(globals(), "run_at", lambda depth: replace(real(depth), grown=False))
    measurement, _ = assemble()
    monkeypatch.setitem(globals(), "run_at", lambda depth: replace(real(depth), grown=True))
    grown, _ = assemble()
    assert measurement.peak_reserved_bytes != grown.peak_reserved_bytes
    gap = reserved_gap(CONFIG, FULL, HOPPER, grown=False)
    assert gap is not None
    assert measurement.peak_reserved_bytes == measurement.peak_allocated_bytes + gap
    assert any("ignores expandable_segments" in note for note in measurement.notes)
    assert not any("ignores expandable_segments" in note for note in grown.notes)


@pytest.mark.parametrize("flag", ["", *sorted(SPEED_SPOILING_FLAGS), "power-capped"])
def test_a_run_that_is_not_the_setups_own_gives_memory_and_no_speed(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """Before: four flags were written down, and the time counted all the same."""
    setup = replace(FULL, loss="liger") if flag == "loss-emulated" else FULL
    monkeypatch.setattr(measuring, "loss_is_emulated", lambda setup: setup.loss != "full")
    run = DepthRun(depth=2, phase_peaks_bytes={"step": GIB}, reserved_bytes=2 * GIB, context_bytes=CONTEXT)
    of_the_run = (flag,) if flag in ("allocator-retries", "power-capped") else ()

    def answer(depth: int) -> DepthRun:
        times = (0.01 if flag == "noise" else 0.01 * depth,)
        return replace(run, depth=depth, step_times_s=times, settled=flag != "unstable", flags=of_the_run)

    monkeypatch.setitem(globals(), "run_at", answer)
    shared = 3 * GIB if flag == "device-shared" else 0
    measurement, _ = on_a_gpu(monkeypatch, 79 * GIB, setup=setup, shared_bytes=shared)()
    assert measurement.flags == ((flag,) if flag else ())
    assert measurement.peak_device_bytes == 2 * GIB + CONTEXT
    assert measurement.speed_spoiled_by == ((flag,) if flag in SPEED_SPOILING_FLAGS else ())
    step_s = 0.01 * LAYERS * (1 + trainer_share(setup).fraction)
    speed = None if flag in SPEED_SPOILING_FLAGS else pytest.approx(setup.tokens_per_step / step_s)
    assert measurement.tokens_per_s == speed


def test_steps_that_wander_give_their_median_and_the_band_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200's steps of a 0.5B went from 354 to 393 ms over tens of steps: before, there was no speed at all."""
    waves = (0.354, 0.355, 0.354, 0.37, 0.371, 0.37, 0.393, 0.392, 0.393)
    before = run_at

    def answer(depth: int) -> DepthRun:
        return replace(before(depth), step_times_s=waves if depth > 2 else (0.1,) * 9, settled=depth == 2)

    monkeypatch.setitem(globals(), "run_at", answer)
    measurement, _ = on_a_gpu(monkeypatch, 79 * GIB)()
    assert measurement.flags == ("unstable",)
    share, middle = trainer_share(FULL), sorted(measurement.step_times_s)[4]
    assert measurement.tokens_per_s == pytest.approx(FULL.tokens_per_step / (middle * (1 + share.fraction)))
    assert measurement.time_band_fraction == pytest.approx((0.393 - 0.37) / middle + share.band_fraction)


def test_growth_is_read_off_the_allocators_segments() -> None:
    assert segments_grow([]) is None
    assert segments_grow([{"is_expandable": False}, {"is_expandable": True}]) is True
    assert segments_grow([{"is_expandable": False}]) is False


def test_a_setup_that_the_dry_run_cannot_follow_has_no_gap() -> None:
    assert reserved_gap({"model_type": "nobody"}, FULL, HOPPER) is None
