"""What pictures add to the memory of a micro-batch: the tower's activations, its inputs, what it hands to the text."""

from dataclasses import replace

from planner.hardware.gpu import GpuSpec
from planner.memory.activations import layer_saved
from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.layer_context import LayerContext
from planner.memory.layer_costs import layer_costs
from planner.memory.micro_batch import activation_parts, groundwork, step_flow
from planner.memory.parts import ActivationParts, TowerBytes
from planner.memory.traits import traits_of
from planner.models.eyes.mobilenet import PICTURE_BYTES
from planner.models.eyes.tower import Tower
from planner.models.spec import LayerSpec, ModelSpec
from planner.models.targets import lora_linears
from planner.models.towers import tower_of
from planner.setup import TrainSetup


def tower_setup(setup: TrainSetup, tower: Tower) -> TrainSetup:
    """The same setup of the tower alone: its frames are its sequences."""
    assert setup.images is not None
    targets = {} if setup.method == "full" else {"lora_targets": "all-linear"}  # names of the text mean nothing here
    return setup.trusted_with(
        **targets,
        images=None,
        checkpointing=setup.checkpointing * tower.checkpoints,
        micro_batch_seqs=setup.micro_batch_seqs * setup.images.num * tower.frames,
        seq_len_tokens=tower.patches,
    )


def tower_adapted(model: ModelSpec, setup: TrainSetup) -> frozenset[str]:
    """Full names of the tower's matrices that get adapters, without the numbers of layers."""
    if setup.method == "full" or not setup.kind.adapts_matrices:
        return frozenset()
    idle = {id(layer) for layer, _ in model.idle_layers}
    found = [(layer, linears) for layer, _, linears in lora_linears(model, setup.lora_targets)]
    return frozenset(
        f"{layer.path}.{one.name}".lstrip(".") for layer, linears in found if id(layer) in idle for one in linears
    )


def asks_gradients(tower: Tower, setup: TrainSetup, adapted: frozenset[str]) -> bool:
    """Whether autograd keeps the tower: it is trained, or adapters beside checkpointing make the patches' embeddings
    ask for a gradient, as those of the text do.

    Source: transformers 5.23 `PreTrainedModel.enable_input_require_grads`: a hook on the input embeddings of every
    model inside; `probes/stack/build.py`.
    """
    return setup.method == "full" or bool(adapted) or (tower.named_embeddings and bool(setup.checkpointing))


def tower_names(tower: Tower, adapted: frozenset[str]) -> tuple[frozenset[str], ...]:
    """Of each kind of layer of the tower, the names of its adapted matrices."""
    return tuple(
        frozenset(one.name for one in layer.linears if f"{layer.path}.{one.name}" in adapted)
        for layer in tower.model.layer_kinds
    )


def _context(
    tower: Tower, layer: LayerSpec, setup: TrainSetup, flow: Flow, adapted: frozenset[str], tokens: int
) -> LayerContext:
    """What the terms of one layer of the tower, or of one of its projectors, need to know."""
    return LayerContext(
        setup=setup,
        flow=flow,
        adapted=frozenset(each.name for each in layer.linears if f"{layer.path}.{each.name}" in adapted),
        kernel="flash",
        tokens=tokens,
        hidden=layer.linears[0].in_features,
        traits=traits_of(tower.model),
    )


def projectors_saved(tower: Tower, setup: TrainSetup, flow: Flow, adapted: frozenset[str]) -> int:
    """Bytes that the networks between tower and text keep: no class checkpoints them."""
    total, frames = 0, setup.micro_batch_seqs
    for one in tower.projectors:
        context = _context(tower, one.layer, setup, flow, adapted, frames * one.tokens)
        total += one.num * layer_saved(one.layer, context).total
    return total


def _patches(tower: Tower, setup: TrainSetup) -> int:
    """Rows of all frames in the tower's layers."""
    return setup.micro_batch_seqs * tower.patches


def _seen(tower: Tower, setup: TrainSetup) -> int:
    """Rows of the micro-batch's pictures that come out of the first projector."""
    return setup.micro_batch_seqs * tower.projectors[0].tokens


def _mask(tower: Tower, setup: TrainSetup, flow: Flow) -> int:
    """Bytes of the mask that keeps joined frames apart, which all layers share; flash-attention takes their lengths.

    Source: transformers 5.23 `models/pixtral/modeling_pixtral.py` generate_block_attention_mask.
    """
    if not tower.joined or setup.attention == "flash-attention-2":
        return 0
    return SIZE_BYTES[flow.table] * _patches(tower, setup) ** 2


def _clamps(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes that the clamps around every matrix keep beside it: what they take, which no two matrices share behind
    them, and what the matrix gave.

    Source: transformers 5.23 `models/gemma4/modeling_gemma4.py` Gemma4ClippableLinear.
    """
    taken = context.flow.residual
    given = context.flow.linear_out(taken)
    width = sum(SIZE_BYTES[taken] * one.in_features + SIZE_BYTES[given] * one.out_features for one in layer.linears)
    return context.tokens * width


def tower_bytes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> TowerBytes:
    """What the pictures of a micro-batch add."""
    assert setup.images is not None
    tower = tower_of(model, setup.images)
    own, adapted = tower_setup(setup, tower), tower_adapted(model, setup)
    flow = step_flow(tower.model, own)
    if tower.convolves:
        return _convolved(model, tower, own, flow, adapted)
    costs = layer_costs(tower.model, gpu, own, flow, tower_names(tower, adapted))
    if tower.clipped:
        for layer, cost in zip(tower.model.layer_kinds, costs, strict=True):
            cost.saved.mlp += _clamps(layer, _context(tower, layer, own, flow, adapted, _patches(tower, own)))
    ground = groundwork(tower.model, gpu, own, costs, casts_adapters=False)  # the text's count those of both
    parts = activation_parts(tower.model, gpu, own, ground)
    inputs, mask = own.micro_batch_seqs * tower.input_bytes, _mask(tower, own, flow)
    row = SIZE_BYTES[flow.residual]
    outputs = row * (_patches(tower, own) * tower.model.hidden_size + _seen(tower, own) * model.hidden_size)
    if not asks_gradients(tower, setup, adapted):
        return TowerBytes(inputs=inputs, behind=outputs, forward=parts.forward_temp + mask)
    beside = 2 * row * model.hidden_size * setup.tokens_per_micro_batch * (setup.method != "full")
    if tower.looked_at:  # text is embedded after the tower has run, so that its gradients come back first
        beside += SIZE_BYTES[flow.table] * model.num_embedding_params * (setup.method == "full")
    return TowerBytes(
        inputs=inputs,
        stored=sum(parts.stored.values()) + parts.weight_casts[1],
        mask=mask,
        behind=outputs + parts.final_norm + projectors_saved(tower, own, flow, adapted),
        forward=parts.forward_temp,
        backward=tuple(moment.total + beside for moment in parts.layer_moments),
    )


def _convolved(model: ModelSpec, tower: Tower, own: TrainSetup, flow: Flow, adapted: frozenset[str]) -> TowerBytes:
    """Of a tower of convolutions: PEFT adapts none, so that it keeps something where it is trained itself, and all of
    it; the copies that autocast makes of fp32 weights too."""
    narrow = SIZE_BYTES[flow.autocast or flow.table]
    frames, sizes = own.micro_batch_seqs, PICTURE_BYTES[narrow, 4 if flow.autocast else narrow]
    widened = replace(flow, residual="fp32" if flow.autocast else flow.residual)
    features = SIZE_BYTES[flow.linear_out(flow.residual)] * _seen(tower, own) * model.hidden_size
    found = TowerBytes(
        inputs=frames * tower.input_bytes,
        behind=features + (projectors_saved(tower, own, widened, adapted) if own.method == "full" or adapted else 0),
        forward=frames * sizes.idle,
    )
    if own.method != "full":
        return found
    casts = SIZE_BYTES[flow.autocast] * tower.num_other_params if flow.autocast and flow.table == "fp32" else 0
    return replace(found, stored=frames * sizes.kept + casts, forward=0, backward=(frames * sizes.backward,))


def with_tower(parts: ActivationParts, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ActivationParts:
    """The text's activations with those of the pictures."""
    return parts._replace(tower=tower_bytes(model, gpu, setup))
