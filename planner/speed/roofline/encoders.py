"""The time of what runs beside the text at lengths of its own: a vision encoder's pictures, an encoder's clips."""

from dataclasses import replace
from typing import NamedTuple

from planner.core.errors import SetupError
from planner.memory.dtypes import SIZE_BYTES, dtype_policy_of
from planner.memory.modality_encoder import asks_gradients, encoder_adapted, encoder_setup
from planner.memory.trained import frozen_below
from planner.models.encoders import encoder_of
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.models.vision_encoders.mobilenet import FLOPS, PICTURE_BYTES
from planner.setup import TrainSetup
from planner.speed.host import BEYOND_S, HOOK_S, LAUNCH_S
from planner.speed.operators import ISSUERS
from planner.speed.roofline.family import Family, family_of
from planner.speed.roofline.model import SpeedModel
from planner.speed.roofline.rented import BACKWARD_S, FORWARD_S


class Layers(NamedTuple):
    """Layers of one kind: `length` tokens attend to each other, in `rows` sequences for each sample; `both_ways`: over
    twice the pairs of a text."""

    family: Family
    length: int
    rows: int
    both_ways: bool


class EncoderTime(NamedTuple):
    """GPU and host seconds of the pictures or clips of a micro-batch.

    Measured: no run with either; counted from the same constants as the text's layers. Not counted: projectors, the
    convolutions before layers (Whisper large: 0.8 % of the encoder's products), making of pictures and frames on the
    host.

    Attributes:
        name: of the part of a step.
        gradients: whether the backward reaches them; adapts: whether anything of them trains.
        fixed_s: seconds of the GPU for each sample, and of the host for each micro-batch, that no layer takes.
        windows_s: host seconds for each sample, of windows that attend one after another.
    """

    name: str
    note: str
    layers: tuple[Layers, ...]
    gradients: bool
    adapts: bool
    fixed_s: tuple[float, float] = (0.0, 0.0)
    windows_s: float = 0.0

    def seconds(self, samples: int) -> float:
        """GPU seconds of one micro-batch."""
        total = samples * self.fixed_s[0]
        for layer in self.layers:
            rows = samples * layer.rows
            if not self.gradients:
                total += layer.family.work.forward_s(rows, layer.length)
                continue
            parts = layer.family.parts(rows)
            total += sum(parts.values()) - (0.0 if self.adapts else parts["lora"])
            total += parts["attention"] * layer.both_ways
        return total

    def host_s(self, samples: int) -> float:
        """Host seconds to issue one micro-batch's kernels."""
        each = (layer.family.host_s if self.gradients else layer.family.forward_host_s for layer in self.layers)
        return self.fixed_s[1] + samples * self.windows_s + sum(each)

    def flops(self, samples: int, *, full: bool) -> float:
        """Floating-point operations that the clips of one micro-batch need; those of pictures are not counted."""
        if self.name != "encoder":
            return 0.0
        ((family, length, _, _),) = self.layers
        inv = family.work.speed.inv
        weights = sum(group.weights for group in inv.groups) + sum(linear.num_weights for linear in inv.outer)
        passes = 2.0 if not self.gradients else 6.0 if full else 4.0
        return samples * (passes * weights * length + (1 + 2 * self.gradients) * family.work.attention_flops)


def clips(speed: SpeedModel, setup: TrainSetup) -> EncoderTime:
    """An encoder of clips, with the keys and values that the decoder's layers make of its output."""
    model, length = _encoder_alone(speed.model), speed.model.encoder_tokens
    adapts = setup.method == "full" or _matches(model, setup)
    targets = {} if adapts else {"lora_targets": "all-linear"}
    clip_setup = setup.replace_trusted(frozen_encoder=False, seq_len_tokens=length, **targets)
    layers = Layers(_family(speed, model, clip_setup), length, 1, both_ways=False)
    note = (
        "No training run with sound has been compared in speed: the encoder's time is counted from the constants of "
        "text's layers, without its convolutions; reading sound on the host is not counted."
    )
    return EncoderTime("encoder", note, (layers,), frozen_below(speed.model, setup) == 0, adapts)


def pictures(speed: SpeedModel, setup: TrainSetup) -> EncoderTime:
    """The layers of a vision encoder, each kind as a model of its own."""
    assert setup.images is not None
    encoder, adapted = encoder_of(speed.model, setup.images), encoder_adapted(speed.model, setup)
    vision_setup, images = encoder_setup(setup, encoder), setup.images.num * encoder.frames
    gradients, windows_s = asks_gradients(encoder, setup, adapted), 0.0
    layers = []
    for kind, num in () if encoder.convolves else encoder.model.layer_counts:
        length = min(encoder.window_patches if kind.kind == "vision-window" else encoder.patches, encoder.patches)
        part = replace(encoder.model, layer_kinds=(kind,), layer_order=(0,) * num)
        family = _family(speed, part, vision_setup.replace_trusted(seq_len_tokens=length))
        layers.append(Layers(family, length, images * -(-encoder.patches // length), both_ways=True))
        if kind.kind == "vision-window" and setup.attention != "flash-attention-2":
            calls = images * num * (encoder.num_windows - 1)
            windows_s = calls * _window_s(vision_setup, gradients=gradients) * speed.host_scale
    note = (
        "No run with pictures has been compared: the encoder's time is counted from the constants of the text's "
        "layers, without its projector; reading and resizing pictures on the host is not counted."
    )
    fixed_s = _convolutions(speed, setup, images) if encoder.convolves else (0.0, 0.0)
    return EncoderTime("vision encoder", note, tuple(layers), gradients, bool(adapted), fixed_s, windows_s)


def _family(speed: SpeedModel, model: ModelSpec, setup: TrainSetup) -> Family:
    return family_of(SpeedModel(model, speed.gpu, speed.calibration, speed.conditions), setup)


SAVED = 8
"""Tensors that SDPA's kernels keep for a backward. Counted in dry runs."""


def _window_s(setup: TrainSetup, *, gradients: bool) -> float:
    """Host seconds of one window's call of SDPA, with its backward."""
    forward, backward = (BEYOND_S[f"aten._scaled_dot_product_flash_attention{way}"] for way in ("", "_backward"))
    if not gradients:
        return LAUNCH_S[ISSUERS.index("no-grad")] + forward
    checkpointed = bool(setup.checkpointing)
    handed = LAUNCH_S[ISSUERS.index("engine")] + backward + checkpointed * SAVED * HOOK_S
    return (1 + checkpointed) * (LAUNCH_S[ISSUERS.index("forward")] + forward) + handed


FORWARD_KERNELS, BACKWARD_KERNELS = 2600, 4900
"""Of MobileNet-V5 under autocast, counted by running timm 1.0.31's on meta tensors."""


def _convolutions(speed: SpeedModel, setup: TrainSetup, images: int) -> tuple[float, float]:
    """From the multiplications at the rate of the text's matrices, and what its backward would keep, written and read
    once; trained, three times that."""
    dtypes = dtype_policy_of(setup)
    trained, narrow = setup.method == "full", SIZE_BYTES[dtypes.autocast or dtypes.table]
    once = FLOPS / speed.rates.matmul[dtypes.autocast or dtypes.compute]
    once += 2.0 * PICTURE_BYTES[narrow, 4 if dtypes.autocast else narrow].kept / speed.bandwidth
    host = FORWARD_KERNELS * FORWARD_S + trained * BACKWARD_KERNELS * BACKWARD_S
    return images * (1 + 2 * trained) * once, host * speed.host_scale


def _matches(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether any of these matrices is adapted."""
    try:
        return bool(lora_linears(model, setup.lora_targets))
    except SetupError:
        return False


def _encoder_alone(model: ModelSpec) -> ModelSpec:
    """The encoder as a model without a head; the decoder's matrices that take its output stand outside its layers."""
    order = model.layer_order[: model.num_encoder_layers]
    crossed = [linear for kind in model.layer_order for linear in model.layer_kinds[kind].linears if linear.of_encoder]
    return replace(
        model,
        layer_kinds=tuple(replace(layer, fixed_tokens=0) for layer in model.layer_kinds[: max(order, default=-1) + 1]),
        layer_order=order,
        embeddings=(),
        head=None,
        tied=False,
        outer_linears=tuple(replace(linear, of_encoder=False) for linear in crossed),
        outer_norms=model.outer_norms[:1],
        is_encoder_decoder=False,
        front_end=None,
    )
