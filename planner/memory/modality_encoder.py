"""What pictures add to the memory of a micro-batch: the encoder's activations, its inputs, what it hands to the
text."""

from dataclasses import replace

from planner.hardware.gpu import GpuSpec
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.layer_terms import LayerContext
from planner.memory.layers import layer_costs, layer_saved
from planner.memory.micro_batch import (
    EncoderBytes,
    activation_parts,
    shared_layer_costs,
    step_dtype_policy,
)
from planner.models.encoders import encoder_of
from planner.models.spec import LayerSpec, ModelSpec
from planner.models.targets import lora_linears
from planner.models.vision_encoders.encoder import Encoder
from planner.models.vision_encoders.mobilenet import PICTURE_BYTES
from planner.setup import TrainSetup


def encoder_setup(setup: TrainSetup, encoder: Encoder) -> TrainSetup:
    """The same setup of the encoder alone: its frames are its sequences."""
    assert setup.images is not None
    targets = {} if setup.method == "full" else {"lora_targets": "all-linear"}  # names of the text mean nothing here
    return setup.replace_trusted(
        **targets,
        images=None,
        uneven=False,  # texts differ in length, and padding is the text's alone
        checkpointing=setup.checkpointing * encoder.checkpoints,
        micro_batch_seqs=setup.micro_batch_seqs * setup.images.num * encoder.frames,
        seq_len_tokens=encoder.patches,
    )


def encoder_adapted(model: ModelSpec, setup: TrainSetup) -> frozenset[str]:
    """Full names of the encoder's matrices that get adapters, without the numbers of layers."""
    if setup.method == "full" or not setup.kind.adapts_matrices:
        return frozenset()
    idle = {id(layer) for layer, _ in model.idle_layers}
    adapted_layers = [(layer, linears) for layer, _, linears in lora_linears(model, setup.lora_targets)]
    return frozenset(
        f"{layer.path}.{linear.name}".lstrip(".")
        for layer, linears in adapted_layers
        if id(layer) in idle
        for linear in linears
    )


def asks_gradients(encoder: Encoder, setup: TrainSetup, adapted: frozenset[str]) -> bool:
    """Whether autograd keeps the encoder: it is trained, or adapters beside checkpointing make the patches' embeddings
    ask for a gradient, as those of the text do.

    Source: transformers 5.23 `PreTrainedModel.enable_input_require_grads`: a hook on the input embeddings of every
    model inside; `probes/stack/build.py`.
    """
    return setup.method == "full" or bool(adapted) or (encoder.named_embeddings and bool(setup.checkpointing))


def _adapted(layer: LayerSpec, names: frozenset[str]) -> frozenset[str]:
    """Names of the layer's adapted matrices, of full ones."""
    return frozenset(linear.name for linear in layer.linears if f"{layer.path}.{linear.name}" in names)


def projectors_saved(encoder: Encoder, setup: TrainSetup, dtypes: DtypePolicy, adapted: frozenset[str]) -> int:
    """Bytes that the networks between encoder and text keep: no class checkpoints them."""
    total, frames = 0, setup.micro_batch_seqs
    for projector in encoder.projectors:
        context = LayerContext(
            setup=setup,
            dtypes=dtypes,
            adapted=_adapted(projector.layer, adapted),
            kernel="flash",
            tokens=frames * projector.tokens,
            hidden=projector.layer.linears[0].in_features,
            traits=encoder.model.traits,
        )
        total += projector.num * layer_saved(projector.layer, context).total
    return total


def _seen(encoder: Encoder, setup: TrainSetup) -> int:
    """Rows of the micro-batch's pictures that come out of the first projector."""
    return setup.micro_batch_seqs * encoder.projectors[0].tokens


def encoder_bytes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> EncoderBytes:
    """What the pictures of a micro-batch add."""
    assert setup.images is not None
    encoder = encoder_of(model, setup.images)
    vision_setup, adapted = encoder_setup(setup, encoder), encoder_adapted(model, setup)
    dtypes = step_dtype_policy(encoder.model, vision_setup)
    if encoder.clipped and setup.quantized:  # patches are embedded by a matrix, which returns the type of the pixels
        dtypes = replace(dtypes, residual="fp32")
    if encoder.convolves:
        return _convolved(model, encoder, vision_setup, dtypes, adapted)
    costs = layer_costs(
        encoder.model, gpu, vision_setup, dtypes, [_adapted(layer, adapted) for layer in encoder.model.layer_kinds]
    )
    patches, row = vision_setup.micro_batch_seqs * encoder.patches, SIZE_BYTES[dtypes.residual]
    if encoder.clipped:
        # what the clamps around every matrix take, which no two matrices share behind them, and what the matrix gave
        # (transformers 5.23 `models/gemma4/modeling_gemma4.py` Gemma4ClippableLinear)
        given = SIZE_BYTES[dtypes.linear_out(dtypes.residual)]
        for layer, cost in zip(encoder.model.layer_kinds, costs, strict=True):
            width = sum(row * linear.in_features + given * linear.out_features for linear in layer.linears)
            cost.saved.mlp += patches * width
    ground = shared_layer_costs(
        encoder.model, gpu, vision_setup, costs, casts_adapters=False
    )  # the text's count those of both
    parts = activation_parts(encoder.model, gpu, vision_setup, ground)
    inputs, mask = vision_setup.micro_batch_seqs * encoder.input_bytes, 0
    if encoder.joined and setup.attention != "flash-attention-2":
        # keeps joined frames apart and is all layers' (transformers 5.23 `models/pixtral/modeling_pixtral.py`
        # generate_block_attention_mask); flash-attention takes their lengths
        mask = SIZE_BYTES[dtypes.table] * patches**2
    outputs = row * (patches * encoder.model.hidden_size + _seen(encoder, vision_setup) * model.hidden_size)
    if not asks_gradients(encoder, setup, adapted):
        return EncoderBytes(inputs=inputs, between_encoder_and_text=outputs, forward=parts.forward_temp + mask)
    text_gradients = 2 * row * model.hidden_size * setup.tokens_per_micro_batch * (setup.method != "full")
    if encoder.looked_at:  # text is embedded after the encoder has run, so that its gradients come back first
        text_gradients += SIZE_BYTES[dtypes.table] * model.num_embedding_params * (setup.method == "full")
    return EncoderBytes(
        inputs=inputs,
        stored=sum(parts.stored.values()) + parts.weight_casts[1],
        mask=mask,
        between_encoder_and_text=outputs + parts.final_norm + projectors_saved(encoder, vision_setup, dtypes, adapted),
        forward=parts.forward_temp,
        backward=tuple(moment.total + text_gradients for moment in parts.layer_moments),
    )


def _convolved(
    model: ModelSpec, encoder: Encoder, vision_setup: TrainSetup, dtypes: DtypePolicy, adapted: frozenset[str]
) -> EncoderBytes:
    """Of an encoder of convolutions: PEFT adapts none, so that it keeps something where it is trained itself, and all
    of it; the copies that autocast makes of fp32 weights too."""
    narrow = SIZE_BYTES[dtypes.autocast or dtypes.table]
    frames, sizes = vision_setup.micro_batch_seqs, PICTURE_BYTES[narrow, 4 if dtypes.autocast else narrow]
    widened = replace(dtypes, residual="fp32" if dtypes.autocast else dtypes.residual)
    features = SIZE_BYTES[dtypes.linear_out(dtypes.residual)] * _seen(encoder, vision_setup) * model.hidden_size
    frozen = EncoderBytes(
        inputs=frames * encoder.input_bytes,
        between_encoder_and_text=features
        + (
            projectors_saved(encoder, vision_setup, widened, adapted) if vision_setup.method == "full" or adapted else 0
        ),
        forward=frames * sizes.idle,
    )
    if vision_setup.method != "full":
        return frozen
    casts = (
        SIZE_BYTES[dtypes.autocast] * encoder.num_other_params
        if dtypes.autocast and dtypes.autocast != dtypes.table
        else 0
    )
    return replace(frozen, stored=frames * sizes.kept + casts, forward=0, backward=(frames * sizes.backward,))
