"""The formula level's speed model: operator counts, a roofline per operator class, fitted constants apart from facts.

`step_time(model, gpu, setup)` answers one setup whole; `throughput_profile(model, gpu, setup).at(micro, accumulation)`
ranks whole spaces. Pure Python, no numpy.
"""

from typing import Any

from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed.roofline.calibration import Calibration, Constants, load_calibration
from planner.speed.roofline.model import SpeedModel
from planner.speed.roofline.profile import ThroughputProfile, profile_of
from planner.speed.roofline.types import CURRENT, PARTS, Conditions, StepTime, conditions_of

__all__ = [
    "CURRENT",
    "PARTS",
    "Calibration",
    "Conditions",
    "Constants",
    "SpeedModel",
    "StepTime",
    "ThroughputProfile",
    "conditions_of",
    "load_calibration",
    "speed_model",
    "step_time",
    "throughput_profile",
]

_MAX_MODELS = 64
_MAX_WORKS = 200
"""Kinds of step that one of them remembers, up to 75 KB each, before it is made anew: a plan needs some 60, `plan
estimate --setups` another for every line."""
_MODELS: dict[tuple[int, int, int, int], tuple[SpeedModel, tuple[object, ...]]] = {}
"""The last ones made, each with its model, GPU, calibration and conditions, so that no other object can take their
identity. Not kept with the model (`ModelSpec.once`): the catalogue's live as long as the process, and each card adds a
megabyte."""


def speed_model(
    model: ModelSpec, gpu: GpuSpec, *, calibration: Calibration | None = None, conditions: Conditions = CURRENT
) -> SpeedModel:
    """The (remembered) speed model of one model on one GPU."""
    used = calibration if calibration is not None else load_calibration()
    key = (id(model), id(gpu), id(used), id(conditions))
    cached = _MODELS.get(key)
    if cached is None or len(cached[0].works) >= _MAX_WORKS:
        if len(_MODELS) >= _MAX_MODELS:
            del _MODELS[next(iter(_MODELS))]
        cached = _MODELS[key] = SpeedModel(model, gpu, used, conditions), (model, gpu, used, conditions)
    return cached[0]


def throughput_profile(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    *,
    calibration: Calibration | None = None,
    conditions: Conditions = CURRENT,
) -> ThroughputProfile:
    """The profile of `setup`: the same answer object for every micro-batch and accumulation of it.

    Its `step_time(setup)` is the predicted time of one optimizer step, with where it goes.

    Source: Williams et al. 2009, Roofline, https://doi.org/10.1145/1498765.1498785, per operator class; counts in
    `planner.speed.roofline.counts`, constants in `planner/data/calibration.json`.
    Not counted: communication between GPUs, allocator retries near the memory limit.
    Measured: docs/speed-accuracy.md.
    """
    return profile_of(speed_model(model, gpu, calibration=calibration, conditions=conditions), setup)


def step_time(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, **given: Any) -> StepTime:
    """`throughput_profile` of one setup, asked for that alone."""
    return throughput_profile(model, gpu, setup, **given).step_time(setup)
