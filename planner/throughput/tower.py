"""The time that a vision tower takes: its layers as a model of its own, beside the text's."""

from dataclasses import replace
from typing import NamedTuple

from planner.memory.dtypes import SIZE_BYTES, flow_of
from planner.memory.tower import asks_gradients, tower_adapted, tower_setup
from planner.models.eyes.mobilenet import FLOPS, PICTURE_BYTES
from planner.models.eyes.tower import Tower
from planner.models.spec import ModelSpec
from planner.models.towers import tower_of
from planner.setup import TrainSetup
from planner.throughput.family import Family, family_of
from planner.throughput.model import SpeedModel
from planner.throughput.rented import BACKWARD_S, FORWARD_S


class TowerTime:
    """GPU and host seconds of the pictures of a micro-batch.

    Measured: no run with pictures; counted from the same constants as the text's layers. Not counted: the projector.
    """

    name = "tower"
    note = (
        "No run with pictures has been compared: the tower's time is counted from the constants of the text's "
        "layers, without its projector; reading and resizing pictures on the host is not counted."
    )

    def __init__(self, speed: SpeedModel, setup: TrainSetup) -> None:
        assert setup.images is not None
        tower = tower_of(speed.model, setup.images)
        adapted = tower_adapted(speed.model, setup)
        own = tower_setup(setup, tower)
        self._images = setup.images.num * tower.frames
        self._adapts, self._gradients = bool(adapted), asks_gradients(tower, setup, adapted)
        self._convolutions = _convolutions(speed, setup) if tower.convolves else None
        self._families: list[tuple[Family, int, int]] = []  # with the length of what attends, and such of one picture
        for model, length in _by_length(tower):
            alone = SpeedModel(model, speed.gpu, speed.calibration, speed.conditions)
            family = family_of(alone, own.trusted_with(seq_len_tokens=length))
            self._families.append((family, length, -(-tower.patches // length)))

    def seconds(self, samples: int) -> float:
        """GPU seconds of one micro-batch."""
        if self._convolutions is not None:
            return samples * self._images * self._convolutions.picture_s
        total = 0.0
        for family, length, times in self._families:
            rows = samples * self._images * times
            if not self._gradients:
                total += family.work.forward_s(rows, length)
                continue
            parts = family.parts(rows)
            total += sum(seconds for name, seconds in parts.items() if self._adapts or name != "lora")
            total += parts["attention"]  # both ways, twice the pairs of a text
        return total

    def flops(self, samples: int, *, full: bool) -> float:
        """Of pictures: not counted among what a step needs."""
        return 0.0

    @property
    def host_s(self) -> float:
        """Host seconds to issue one micro-batch's kernels."""
        if self._convolutions is not None:
            return self._convolutions.host_s
        return sum(one.host_s if self._gradients else one.forward_host_s for one, _, _ in self._families)


class _Convolutions(NamedTuple):
    """Seconds of a tower of convolutions: of the GPU for one picture, of the host for all of a micro-batch."""

    picture_s: float
    host_s: float


FORWARD_KERNELS, BACKWARD_KERNELS = 2600, 4900
"""Of MobileNet-V5 under autocast, counted by running timm 1.0.31's on meta tensors."""


def _convolutions(speed: SpeedModel, setup: TrainSetup) -> _Convolutions:
    """From the multiplications at the rate of the text's matrices, and what its backward would keep, written and read
    once; trained, three times that."""
    flow = flow_of(setup)
    trained, narrow = setup.method == "full", SIZE_BYTES[flow.autocast or flow.table]
    once = FLOPS / speed.rates.matmul[flow.autocast or flow.compute]
    once += 2.0 * PICTURE_BYTES[narrow, 4 if flow.autocast else narrow].kept / speed.bandwidth
    host = FORWARD_KERNELS * FORWARD_S + trained * BACKWARD_KERNELS * BACKWARD_S
    return _Convolutions((1 + 2 * trained) * once, host * speed.host_scale)


def _by_length(tower: Tower) -> list[tuple[ModelSpec, int]]:
    """The layers of a tower as models of one kind of layer each, with the length of what attends to each other."""
    found = []
    for kind, num in tower.model.layer_counts:
        length = tower.window_patches if kind.kind == "vision-window" else tower.patches
        part = replace(tower.model, layer_kinds=(kind,), layer_order=(0,) * num)
        found.append((part, min(length, tower.patches)))
    return found
