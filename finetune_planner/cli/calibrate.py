"""`plan calibrate`: how fast this machine's card and host are by measurements, tested on what they did not show."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.cli import options
from finetune_planner.cli.output import console, print_json, write_text
from planner.core.errors import ConfigError, UsageError
from planner.core.inputs import parse_object, read_text
from planner.hardware.gpus import find_gpu
from planner.models.catalogue import load
from planner.models.spec import ModelSpec
from planner.speed.local_calibration import CalibrationReport
from planner.speed.local_calibration import calibrate as by_own
from planner.speed.roofline.calibration import Calibration, calibration_to_dict, load_calibration
from planner.speed.roofline.local import gpu_from_microbench, microbench_from_dict, with_microbench
from planner.speed.roofline.points import read_points

MAX_JSON_BYTES, MAX_POINTS_BYTES = 1_000_000, 64_000_000


def calibrate(
    measurements: Annotated[
        Path | None, typer.Argument(help="JSON lines: an export of the store, or interchange setups with tokens_per_s.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run a micro-benchmark of a few seconds on this machine's GPU.")
    ] = False,
    microbench: Annotated[Path | None, typer.Option(help="Use the figures of an earlier micro-benchmark.")] = None,
    device: Annotated[str, typer.Option(help="Device to measure.")] = "cuda:0",
    gpu: Annotated[str | None, typer.Option(help="Which card of the table the figures belong to.")] = None,
    base: Annotated[Path | None, typer.Option(help="Start from this calibration.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the calibration here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Learn how fast your card and host are from measurements, report held-out errors, write a calibration file."""
    if measurements is None and not measure and microbench is None:
        raise UsageError(
            "nothing to calibrate from",
            hint="give a file of measurements, or --measure to benchmark this machine's GPU",
        )
    start = load_calibration(str(base) if base is not None else None)
    answer: dict[str, Any] = {"schema": 1}
    lines: list[str] = []
    if measure or microbench is not None:
        start, bench, key = _with_figures(start, microbench, device, gpu)
        answer["microbench"] = bench
        share = start.matmul_share.get(key)
        lines.append(
            f"{bench['gpu_name']} as {key}: matmul share {share:.2f}" if share else f"{bench['gpu_name']}: {key}"
        )
    if measurements is not None:
        report, left_out = _measured(measurements, start)
        held_out = {name: value for name, value in asdict(report).items() if name != "calibration"}
        answer |= {"held_out": held_out, "left_out": left_out, "improved": report.improved}
        lines += [f"left out {number}: {reason}" for reason, number in left_out.items()]
        lines += [
            f"{name}: kernels take {card:.2f} times as long as taken, the host {host:.2f}"
            for name, (card, host) in report.scales.items()
        ]
        verdict = "better than" if report.improved else "no better than"
        lines.append(
            f"held out, one of {report.num_held_out} models and methods at a time: median error "
            f"{100 * report.before_median:.1f} % before, {100 * report.after_median:.1f} % now, {verdict} what is in "
            f"use; 90 % of unseen points within x or / {1 + report.band_fraction:.2f}"
        )
        start = report.calibration
    answer["calibration"] = calibration_to_dict(start)
    if out is not None:
        write_text(out, json.dumps(answer["calibration"], indent=1) + "\n")
        lines += [f"wrote {out}", f"use it: FINETUNE_PLANNER_CALIBRATION={out}"]
    if as_json:
        print_json(answer, whole=True)  # which --microbench reads
    else:
        console().print("\n".join(lines), markup=False)


def _with_figures(
    start: Calibration, file: Path | None, device: str, gpu: str | None
) -> tuple[Calibration, dict[str, Any], str]:
    if file is not None:
        values = _read_json(file)
    else:
        from probes.gpu.microbench import microbenchmark  # late: it says what it needs

        values = microbenchmark(device)
    bench = microbench_from_dict(values)
    try:
        card = find_gpu(gpu if gpu is not None else bench.gpu_name)
    except UsageError:
        if gpu is not None:
            raise
        card = gpu_from_microbench(bench)
    return with_microbench(start, card, bench), values, card.key


def _read_json(file: Path) -> dict[str, Any]:
    hint = "give a file that --measure --json wrote"
    values = parse_object(read_text(file, max_bytes=MAX_JSON_BYTES, hint=hint), str(file), hint=hint)
    inner = values.get("microbench", values)
    if not isinstance(inner, dict):
        raise ConfigError(f"{file}: expected a JSON object")
    return inner


def _measured(file: Path, start: Calibration) -> tuple[CalibrationReport, dict[str, int]]:
    text = read_text(file, max_bytes=MAX_POINTS_BYTES, hint="give a file of JSON lines")

    def find_model(name: str) -> ModelSpec:
        spec = load(name)
        if spec is None:
            raise UsageError(f"model {name!r} is not in the catalogue")
        return spec

    read = read_points(text.splitlines(), find_model=find_model, find_gpu=find_gpu)
    if not read.points:
        why = "; ".join(f"{number} x {reason}" for reason, number in read.left_out.items()) or "the file is empty"
        raise UsageError(f"no usable measurement in {file}: {why}", hint="plan probe stores measurements")
    return by_own(read.points, start), dict(read.left_out)
