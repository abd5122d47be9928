"""Measured throughputs, read from JSON lines, and how far off the formula is.

Two forms of line: a stored probe (`{"sha256": ..., "record": {...}}`, what the measurement store exports) and the
interchange form, one object with model, gpu, tokens_per_s (of one GPU) and the setup's keys, or those under "setup".
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from math import isfinite, log
from statistics import median
from typing import Any

from planner.core.errors import ConfigError, PlannerError
from planner.core.inputs import parse_json
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict
from planner.setup.outcome import SPEED_SPOILING_FLAGS
from planner.speed.roofline.calibration import Calibration
from planner.speed.roofline.model import SpeedModel
from planner.speed.roofline.profile import ThroughputProfile
from planner.speed.roofline.types import CURRENT, Conditions

FindModel = Callable[[str], ModelSpec]
FindGpu = Callable[[str], GpuSpec]
NOT_SETUP = frozenset({"model", "gpu", "tokens_per_s", "conditions", "source", "id"})


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured throughput. `group` says with what it is held out together ("fms_acceleration"), `key` who it is."""

    model: ModelSpec
    gpu: GpuSpec
    setup: TrainSetup
    tokens_per_s: float
    group: str
    key: str = ""
    conditions: Conditions = CURRENT
    repeats: tuple[float, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def log_errors(points: Sequence[Point], calibration: Calibration) -> list[float]:
    """log(predicted / measured) of each point by the formula; models are shared between points that share them."""
    speeds: dict[tuple[int, str, Conditions], SpeedModel] = {}
    errors = []
    for point in points:
        key = (id(point.model), point.gpu.key, point.conditions)
        speed = speeds.get(key)
        if speed is None:
            speed = speeds[key] = SpeedModel(point.model, point.gpu, calibration, point.conditions)
        setup = point.setup
        answer = ThroughputProfile(speed, setup).at(setup.micro_batch_seqs, setup.accumulation_steps)
        errors.append(log(answer[1] / point.tokens_per_s))
    return errors


@dataclass(frozen=True, kw_only=True)
class ReadPoints:
    """What a file of measurements held: usable points, and why other lines were left out."""

    points: tuple[Point, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


class _Unusable(Exception):
    """Why one line is no point."""


def read_points(lines: Iterable[str], *, find_model: FindModel, find_gpu: FindGpu) -> ReadPoints:
    """The points of a file; a line that cannot be used is counted with its reason, never guessed at."""
    models: dict[str, ModelSpec] = {}
    cards: dict[str, GpuSpec] = {}
    points: list[Point] = []
    reasons: Counter[str] = Counter()
    for line in lines:
        if not line.strip():
            continue
        try:
            name, card, values, speed, source, conditions = _fields(line)
            if name not in models:
                models[name] = find_model(name)
            if card not in cards:
                cards[card] = find_gpu(card)
            setup = setup_from_dict(values)
            if setup.num_gpus > 1:
                raise _Unusable("several GPUs: these constants are one GPU's, communication would bend them")
        except _Unusable as reason:
            reasons[str(reason)] += 1
            continue
        except PlannerError as error:
            reasons[error.message] += 1
            continue
        points.append(
            Point(
                model=models[name],
                gpu=cards[card],
                setup=setup,
                tokens_per_s=speed,
                group=source or f"{name} on {card}",
                conditions=conditions,
                labels={"model": name},
            )
        )
    return ReadPoints(points=tuple(points), left_out=dict(reasons))


def _fields(line: str) -> tuple[str, str, Mapping[str, Any], float, str, Conditions]:
    try:
        values = parse_json(line, "line")
    except ConfigError:
        raise _Unusable("not a line of JSON") from None
    if not isinstance(values, dict):
        raise _Unusable("not a JSON object")
    record = values.get("record")
    if isinstance(record, dict):
        return _stored(record)
    speed = values.get("tokens_per_s")
    name, card = values.get("model"), values.get("gpu")
    if not isinstance(name, str) or not isinstance(card, str):
        raise _Unusable("no model or no gpu named")
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not isfinite(speed) or speed <= 0:
        raise _Unusable("no tokens_per_s above 0")
    setup = values.get("setup")
    if not isinstance(setup, dict):
        setup = {key: value for key, value in values.items() if key not in NOT_SETUP}
    return name, card, setup, float(speed), str(values.get("source", "")), _conditions(values.get("conditions", {}))


def _conditions(values: object) -> Conditions:
    if not isinstance(values, dict):
        raise _Unusable("conditions must be an object")
    try:
        return replace(CURRENT, **values)
    except TypeError:
        raise _Unusable("an unknown condition") from None


def _stored(record: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any], float, str, Conditions]:
    """A probe has no trainer around it and clips no gradients: its step is forward, backward and optimizer alone."""
    outcome = record.get("outcome")
    if not isinstance(outcome, dict) or outcome.get("outcome") != "measurement":
        raise _Unusable("a stored failure")
    environment = outcome.get("environment") or {}
    if not isinstance(environment, dict):
        raise _Unusable("a stored measurement without GPU, step times or tokens")
    if str(environment.get("device", "cuda")).startswith("cpu"):
        raise _Unusable("measured on a CPU")
    flags = outcome.get("flags") or []
    if not isinstance(flags, list):
        raise _Unusable("flags must be a list")
    spoiled = sorted((SPEED_SPOILING_FLAGS | {"unstable"}).intersection(map(str, flags)))
    if spoiled:
        raise _Unusable(f"a stored measurement without a speed to fit ({', '.join(spoiled)})")
    card = environment.get("gpu_key") or environment.get("gpu_name")
    times, tokens = outcome.get("step_times_s"), outcome.get("tokens_per_step")
    if not isinstance(card, str) or not isinstance(times, list) or not times or not isinstance(tokens, int):
        raise _Unusable("a stored measurement without GPU, step times or tokens")
    setup = record.get("setup")
    name = record.get("model_id")
    if not isinstance(setup, dict) or not isinstance(name, str):
        raise _Unusable("a stored measurement without model or setup")
    if not all(isinstance(time, (int, float)) for time in times):
        raise _Unusable("step times must be numbers")
    step_s = median(times)
    if step_s <= 0:
        raise _Unusable("a stored measurement with no time")
    bare = replace(CURRENT, trainer_overhead=False, gradient_clipping=False)
    return name, card, setup, tokens / step_s, "", bare
