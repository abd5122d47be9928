"""The time of what runs at another length than the text beside it: an encoder of clips, and the keys and values that
the decoder's layers make of its output."""

from dataclasses import replace

from planner.errors import SetupError
from planner.memory.trained import frozen_below
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.setup import TrainSetup
from planner.throughput.family import family_of
from planner.throughput.model import SpeedModel


class EncoderTime:
    """GPU and host seconds of the clips of a micro-batch.

    Measured: no run with sound; counted from the same constants as the text's layers. Not counted: the convolutions
    (large: 0.8 % of the encoder's products), reading sound and making frames of it on the host.
    """

    name = "encoder"
    note = (
        "No training run with sound has been compared in speed: the encoder's time is counted from the constants of "
        "text's layers, without its convolutions; reading sound on the host is not counted."
    )

    def __init__(self, speed: SpeedModel, setup: TrainSetup) -> None:
        model = _alone(speed.model)
        self._gradients = frozen_below(speed.model, setup) == 0
        self._adapts = setup.method == "full" or _matches(model, setup)
        length = {"seq_len_tokens": speed.model.encoder_tokens}
        targets = {} if self._adapts else {"lora_targets": "all-linear"}
        self._length = speed.model.encoder_tokens
        alone = SpeedModel(model, speed.gpu, speed.calibration, speed.conditions)
        self._family = family_of(alone, setup.trusted_with(frozen_encoder=False, **targets, **length))
        inv = alone.inv
        self._weights = sum(group.weights for group in inv.groups) + sum(one.num_weights for one in inv.outer)

    def seconds(self, samples: int) -> float:
        """GPU seconds of one micro-batch."""
        if not self._gradients:
            return self._family.work.forward_s(samples, self._length)
        parts = self._family.parts(samples)
        return sum(seconds for name, seconds in parts.items() if self._adapts or name != "lora")

    @property
    def host_s(self) -> float:
        """Host seconds to issue one micro-batch's kernels."""
        return self._family.host_s if self._gradients else self._family.forward_host_s

    def flops(self, samples: int, *, full: bool) -> float:
        """Floating-point operations that one micro-batch needs."""
        passes = 2.0 if not self._gradients else 6.0 if full else 4.0
        attention = self._family.work.attention_flops * (3.0 if self._gradients else 1.0)
        return samples * (passes * self._weights * self._length + attention)


def _matches(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether any of these matrices is adapted."""
    try:
        return bool(lora_linears(model, setup.lora_targets))
    except SetupError:
        return False


def _alone(model: ModelSpec) -> ModelSpec:
    """The encoder as a model without a head; the decoder's matrices that take its output stand outside its layers."""
    order = model.layer_order[: model.num_encoder_layers]
    crossed = [one for kind in model.layer_order for one in model.layer_kinds[kind].linears if one.of_encoder]
    return replace(
        model,
        layer_kinds=tuple(replace(one, fixed_tokens=0) for one in model.layer_kinds[: max(order, default=-1) + 1]),
        layer_order=order,
        embeddings=(),
        head=None,
        tied=False,
        outer_linears=tuple(replace(one, of_encoder=False) for one in crossed),
        outer_norms=model.outer_norms[:1],
        is_encoder_decoder=False,
        front_end=None,
    )
