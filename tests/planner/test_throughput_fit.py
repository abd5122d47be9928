"""The fit finds constants that made the points, moves nothing without reason, and is tested on what it did not see."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.speed_accuracy import FITTED, SET_APART, kept_apart
from planner.cli import calibrate as command
from planner.errors import UsageError
from planner.hardware.gpus import find_gpu
from planner.interchange import setup_to_dict
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.throughput import Calibration, Constants, load_calibration
from planner.throughput.calibration import calibration_from_dict
from planner.throughput.fit import FitPoint, band_from, fit_constants, log_errors
from planner.throughput.holdout import calibrate
from planner.throughput.points import read_points

pytest.importorskip("scipy")

SHIPPED = load_calibration()
SHRINKAGE = 0.4  # a dozen points do not outweigh the stated uncertainty entirely
A100 = find_gpu("a100-80gb")
MODELS = ("meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-1.5B")
SETUPS = (
    TrainSetup(method="full", lora_rank=0, precision="bf16-pure", micro_batch_seqs=4),
    TrainSetup(micro_batch_seqs=4, seq_len_tokens=4096),
    TrainSetup(method="qlora", quantization="nf4-double", micro_batch_seqs=8, checkpointing=0),
    TrainSetup(micro_batch_seqs=1, seq_len_tokens=512),
)


def spec(name: str) -> ModelSpec:
    found = catalogue.load(name)
    assert found is not None
    return found


def made_by(truth: Calibration, *, models: Sequence[str] = MODELS, group: str = "") -> list[FitPoint]:
    """Points whose speeds the given constants predict exactly."""
    points = []
    for name in models:
        for setup in SETUPS:
            blank = FitPoint(model=spec(name), gpu=A100, setup=setup, tokens_per_s=1.0, group=group or name)
            speed = exp(log_errors([blank], truth)[0])
            points.append(replace(blank, tokens_per_s=speed, labels={"model": name}))
    return points


def slower(factor: float) -> Calibration:
    """The shipped constants on a machine that sustains only `factor` of them in matmuls."""
    return replace(
        SHIPPED, constants={**SHIPPED.constants, "training_share": SHIPPED.constants["training_share"] * factor}
    )


def test_fit_finds_the_constant_that_made_the_points() -> None:
    truth = slower(0.88)  # within its stated uncertainty: a fit far outside would distrust the points
    points = made_by(truth)
    names = ("training_share", "bandwidth_share", "host_forward_s")
    fitted = fit_constants(points, SHIPPED, names=names, group_noise=0.0)
    assert fitted.constants["training_share"] == pytest.approx(truth.constants["training_share"], rel=0.06)
    assert fitted.constants["bandwidth_share"] == pytest.approx(SHIPPED.constants["bandwidth_share"], rel=0.06)
    before, after = log_errors(points, SHIPPED), log_errors(points, fitted)
    assert max(map(abs, after)) < SHRINKAGE * max(map(abs, before))


def test_fit_moves_nothing_when_the_points_already_fit() -> None:
    fitted = fit_constants(made_by(SHIPPED), SHIPPED, names=("training_share", "k_half", "host_forward_s"))
    for name in ("training_share", "k_half", "host_forward_s"):
        assert fitted.constants[name] == pytest.approx(SHIPPED.constants[name], rel=1e-3)


def test_fit_is_not_bent_by_one_odd_row() -> None:
    points = made_by(SHIPPED)
    odd = [*points[:-1], replace(points[-1], tokens_per_s=points[-1].tokens_per_s * 10)]
    fitted = fit_constants(odd, SHIPPED, names=("training_share", "host_forward_s"))
    assert fitted.constants["training_share"] == pytest.approx(SHIPPED.constants["training_share"], rel=0.1)


def test_fit_needs_a_point() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit_constants([], SHIPPED)


def test_band_from_holds_nine_of_ten() -> None:
    """Errors 0.01 to 1.00: the conformal rank is ceil(101 x 0.9) = 91."""
    errors = [0.01 * (index + 1) for index in range(100)]
    band = band_from(errors)
    assert band == pytest.approx(2.718281828**0.91 - 1, rel=1e-6)
    with pytest.raises(ValueError, match="at least one"):
        band_from([])


def test_calibrate_holds_out_whole_models_and_reports_both_errors() -> None:
    report = calibrate(made_by(slower(0.7), group="one place"), SHIPPED)
    assert report.split == "model"
    assert {part.name for part in report.parts} == set(MODELS)
    assert report.improved
    assert report.after_median < 0.5 * report.before_median
    assert report.calibration.points["sources"] == {"one place": 12}
    assert report.calibration.date >= "2026"


def test_calibrate_says_when_it_does_not_help() -> None:
    report = calibrate(made_by(SHIPPED), SHIPPED)
    assert not report.improved
    assert report.after_median < 0.01


def test_calibrate_refuses_what_cannot_be_tested() -> None:
    with pytest.raises(UsageError, match="at least 4"):
        calibrate(made_by(SHIPPED)[:3], SHIPPED)
    same = [replace(point, setup=SETUPS[1]) for point in made_by(SHIPPED, models=MODELS[:1], group="here")]
    with pytest.raises(UsageError, match="nothing can be held out"):
        calibrate(same, SHIPPED)


def interchange_lines(points: Sequence[FitPoint]) -> list[str]:
    return [
        json.dumps(
            {"model": p.labels["model"], "gpu": p.gpu.key, "tokens_per_s": p.tokens_per_s, **setup_to_dict(p.setup)}
        )
        for p in points
    ]


def stored_line(point: FitPoint, *flags: str, **environment: object) -> str:
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
    read = read_points(lines, find_model=spec, find_gpu=find_gpu)
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


def test_calibrate_command_writes_a_file_that_loads(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.jsonl", tmp_path / "own.json"
    source.write_text("\n".join([*interchange_lines(made_by(slower(0.8))), "{torn"]))
    code, text = invoke(str(source), "--out", str(out), "--json")
    assert code == 0
    answer = json.loads(text)
    assert answer["improved"]
    assert answer["held_out"]["after_median"] < answer["held_out"]["before_median"]
    assert answer["left_out"] == {"not a line of JSON": 1}
    own = calibration_from_dict(json.loads(out.read_text()))
    assert Constants(**own.constants).training_share < SHIPPED.constants["training_share"]
    code, text = invoke(str(source))
    assert "held out, one source at a time" in text
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


def test_a_refit_on_the_points_leaves_torch_compiles_constants() -> None:
    """They were set on other runs: a fit on points of which some are compiled must not overwrite them."""
    start = replace(SHIPPED, constants=kept_apart(SHIPPED))
    setups = [replace(SETUPS[0], compile=True, checkpointing=0), SETUPS[1]]
    points = [FitPoint(model=spec(MODELS[0]), gpu=A100, setup=one, tokens_per_s=5e4, group="g") for one in setups]
    fitted = fit_constants(points, start, names=FITTED)
    assert {name: fitted.constants[name] for name in SET_APART} == kept_apart(SHIPPED)
    assert fitted.constants["training_share"] != Constants().training_share
