"""Own measurements: two numbers a card that are found again, moved by nothing else, and tested on what they did not
show. Points of published runs likewise move the formula's constants."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from finetune_planner.cli import calibrate as command
from planner.core.errors import UsageError
from planner.hardware.gpus import find_gpu
from planner.setup import TrainSetup
from planner.setup.interchange import setup_to_dict
from planner.speed.local_calibration import band_of, calibrate
from planner.speed.rates import card_rates
from planner.speed.roofline import Calibration, load_calibration
from planner.speed.roofline.calibration import calibration_from_dict
from planner.speed.roofline.points import Point, log_errors, read_points
from planner.speed.sized import program_speed
from tests.planner.helpers import loaded

pytest.importorskip("scipy")

SHIPPED = load_calibration()
A100 = find_gpu("a100-80gb")
MODELS = ("EleutherAI/gpt-neo-1.3B", "EleutherAI/gpt-neo-2.7B", "google/gemma-4-31b-it")
SETUPS = (
    TrainSetup(method="full", lora_rank=0, precision="bf16-pure", micro_batch_seqs=4),
    TrainSetup(micro_batch_seqs=4, seq_len_tokens=4096),
    TrainSetup(method="qlora", quantization="nf4-double", micro_batch_seqs=8, checkpointing=0),
    TrainSetup(micro_batch_seqs=1, seq_len_tokens=512),
)


@pytest.fixture
def by_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """The points below are what the formula predicts."""
    monkeypatch.setattr("planner.speed.local_calibration.program_speed", lambda *_: None)


def made_by(truth: Calibration, *, models: Sequence[str] = MODELS, group: str = "") -> list[Point]:
    """Points whose speeds the given constants predict exactly."""
    points = []
    for name in models:
        for setup in SETUPS:
            blank = Point(model=loaded(name), gpu=A100, setup=setup, tokens_per_s=1.0, group=group or name)
            speed = exp(log_errors([blank], truth)[0])
            points.append(replace(blank, tokens_per_s=speed, labels={"model": name}))
    return points


def slower(card: float, host: float = 1.0) -> Calibration:
    """The shipped constants on a machine whose card and host take so many times as long."""
    return replace(SHIPPED, constants={**SHIPPED.constants, "card_scale": card, "host_scale": host})


@pytest.mark.usefixtures("by_the_formula")
def test_both_numbers_are_found_again() -> None:
    report = calibrate(made_by(slower(1.4, 2.5)), SHIPPED)
    card, host = report.scales["a100-80gb"]
    assert card == pytest.approx(1.4, rel=0.03)
    assert host == pytest.approx(2.5, rel=0.1)
    assert report.improved
    assert report.after_median < 0.1 * report.before_median
    assert report.calibration.constants_for(A100).card_scale == pytest.approx(card)
    assert report.calibration.date >= "2026"


@pytest.mark.usefixtures("by_the_formula")
def test_points_that_fit_move_nothing() -> None:
    report = calibrate(made_by(SHIPPED), SHIPPED)
    assert report.scales["a100-80gb"] == pytest.approx((1.0, 1.0), rel=0.01)
    assert not report.improved or report.before_median < 0.01


@pytest.mark.usefixtures("by_the_formula")
def test_one_odd_row_bends_nothing() -> None:
    points = made_by(SHIPPED)
    odd = [*points[:-1], replace(points[-1], tokens_per_s=points[-1].tokens_per_s * 10)]
    assert calibrate(odd, SHIPPED).scales["a100-80gb"][0] == pytest.approx(1.0, rel=0.03)


def test_programs_are_held_against_measurements_too() -> None:
    """A model that ships programs: what a card's own number says goes into them."""
    model, h200 = loaded("Qwen/Qwen3-8B"), find_gpu("h200")
    lora = TrainSetup(micro_batch_seqs=4, seq_len_tokens=2048, lora_rank=16, kernels="liger", loss="chunked")
    full = lora.replace(method="full", precision="bf16-mixed", lora_rank=0, checkpointing=1)
    points = []
    for setup in (lora, lora.replace(checkpointing=0), full, full.replace(seq_len_tokens=1024)):
        speed = program_speed(model, h200, setup)
        rate = setup.tokens_per_step / (1.3 * speed.seconds_at(setup, 1.0))
        points.append(Point(model=model, gpu=h200, setup=setup, tokens_per_s=rate, group="own"))
    report = calibrate(points, SHIPPED)
    assert report.scales["h200"][0] == pytest.approx(1.3, rel=0.03)
    rates = card_rates(h200, calibration=report.calibration)
    assert rates.copy == pytest.approx(card_rates(h200).copy / report.scales["h200"][0])


def test_band_holds_nine_of_ten() -> None:
    """Errors 0.01 to 1.00: the conformal rank is ceil(101 x 0.9) = 91."""
    assert band_of([0.01 * (index + 1) for index in range(100)]) == pytest.approx(0.91)


def test_calibrate_refuses_what_cannot_be_tested() -> None:
    with pytest.raises(UsageError, match="at least 4"):
        calibrate(made_by(SHIPPED)[:3], SHIPPED)
    same = [replace(point, setup=SETUPS[1]) for point in made_by(SHIPPED, models=MODELS[:1], group="here")]
    with pytest.raises(UsageError, match="nothing can be held out"):
        calibrate(same, SHIPPED)


def interchange_lines(points: Sequence[Point]) -> list[str]:
    return [
        json.dumps(
            {"model": p.labels["model"], "gpu": p.gpu.key, "tokens_per_s": p.tokens_per_s, **setup_to_dict(p.setup)}
        )
        for p in points
    ]


def stored_line(point: Point, *flags: str, **environment: object) -> str:
    where = {"gpu_key": point.gpu.key, "gpu_name": point.gpu.driver_name, "device": "cuda", **environment}
    step_s = point.setup.tokens_per_step / point.tokens_per_s
    outcome = {
        "schema": 1, "outcome": "measurement", "step_times_s": [step_s] * 3, "environment": where,
        "tokens_per_step": point.setup.tokens_per_step, "flags": list(flags),
    }  # fmt: skip
    record = {"model_id": point.labels["model"], "setup": setup_to_dict(point.setup), "outcome": outcome}
    return json.dumps({"sha256": "-", "record": record})


def test_read_points_takes_both_forms_and_counts_the_rest() -> None:
    points = made_by(SHIPPED, models=MODELS[:1])
    lines = [
        *interchange_lines(points),
        stored_line(points[0]),
        stored_line(points[0], gpu_key=None),
        stored_line(points[0], device="cpu"),
        stored_line(points[0], "power-capped", "unstable"),  # before: an unstable time was fitted
        json.dumps({"record": {"outcome": {"outcome": "failure"}}}),
        "{torn",
        "[]",
        "",
        json.dumps({"model": MODELS[0], "gpu": "a100-80gb", "tokens_per_s": -1}),
        json.dumps({"model": MODELS[0], "gpu": "a100-80gb", "tokens_per_s": 5, "lora_rank": -3}),
        json.dumps({"model": MODELS[0], "gpu": "a100-80gb", "tokens_per_s": 5, "num_gpus": 2, "parallel": "ddp"}),
        json.dumps({"model": MODELS[0], "gpu": "no-such-card", "tokens_per_s": 5}),
        json.dumps({"model": MODELS[0], "gpu": "a100-80gb", "tokens_per_s": 5, "conditions": {"magic": True}}),
    ]
    read = read_points(lines, find_model=loaded, find_gpu=find_gpu)
    assert len(read.points) == len(points) + 2
    assert sum(read.left_out.values()) == 10
    assert read.left_out["measured on a CPU"] == 1
    assert sum("several GPUs" in reason for reason in read.left_out) == 1
    assert read.points[0].tokens_per_s == pytest.approx(points[0].tokens_per_s)
    assert read.points[-1].tokens_per_s == pytest.approx(points[0].tokens_per_s)
    assert not read.points[-1].conditions.trainer_overhead


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command.calibrate)
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.mark.usefixtures("by_the_formula")
def test_calibrate_command_writes_a_file_that_loads(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.jsonl", tmp_path / "own.json"
    source.write_text("\n".join([*interchange_lines(made_by(slower(1.2))), "{torn"]))
    code, text = invoke(str(source), "--out", str(out), "--json")
    assert code == 0
    answer = json.loads(text)
    assert answer["improved"]
    assert answer["held_out"]["after_median"] < answer["held_out"]["before_median"]
    assert answer["left_out"] == {"not a line of JSON": 1}
    assert calibration_from_dict(json.loads(out.read_text())).constants_for(A100).card_scale > 1.1
    code, text = invoke(str(source))
    assert "kernels take 1.18 times as long" in text
    assert "better than what is in use" in text


def test_calibrate_command_takes_a_microbenchmark(tmp_path: Path) -> None:
    figures = tmp_path / "bench.json"
    figures.write_text(
        json.dumps(
            {
                "gpu_name": "NVIDIA A100-SXM4-80GB", "matmul_flops_per_s": {"bf16": 156e12}, "copy_bytes_per_s": 1.7e12,
                "issue_s": 5e-6, "memory_bytes": 85_000_000_000, "capability": [8, 0],
            }
        )
    )  # fmt: skip
    code, text = invoke("--microbench", str(figures), "--json")
    assert code == 0
    assert json.loads(text)["calibration"]["matmul_share"]["a100-80gb"] == pytest.approx(0.5)


def test_calibrate_command_refuses_nothing_and_nonsense(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to calibrate"):
        invoke()
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"model": "unknown/model", "gpu": "a100-80gb", "tokens_per_s": 3}\n')
    with pytest.raises(UsageError, match="not in the catalogue"):
        invoke(str(empty))
