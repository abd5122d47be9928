"""What pictures add to the memory of a micro-batch: the tower's activations, its inputs, what it hands to the text."""

from dataclasses import replace

from planner.hardware.gpu import GpuSpec
from planner.memory.activations import layer_saved
from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.layer_context import LayerContext
from planner.memory.layer_costs import LayerCosts, layer_costs
from planner.memory.micro_batch import activation_parts, groundwork, step_flow
from planner.memory.parts import ActivationParts, TowerBytes
from planner.memory.traits import traits_of
from planner.memory.transient import at_last_matrix
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


def _before(tower: Tower, setup: TrainSetup, own: TrainSetup, flow: Flow) -> int:
    """Bytes of the patches' embeddings, which a hook made a leaf, where they are not the first layer's input, and of
    what a norm before the layers keeps of them."""
    hooked = tower.named_embeddings and not tower.embeds_whole and setup.checkpointing and setup.method != "full"
    norm = SIZE_BYTES["fp32" if flow.autocast else flow.table] * tower.norm_first
    return _rows(tower, own) * (SIZE_BYTES[flow.table] * bool(hooked) + norm)


def _rows(tower: Tower, setup: TrainSetup) -> int:
    """Numbers in one hidden state of all frames."""
    return setup.micro_batch_seqs * tower.patches * tower.model.hidden_size


def _seen(tower: Tower, setup: TrainSetup) -> int:
    """Rows of the micro-batch's pictures that come out of the first projector."""
    return setup.micro_batch_seqs * tower.projectors[0].tokens


def _mask(tower: Tower, setup: TrainSetup, flow: Flow) -> int:
    """Bytes of the mask that keeps joined frames apart, which all layers share; flash-attention takes their lengths.

    Source: transformers 5.23 `models/pixtral/modeling_pixtral.py` generate_block_attention_mask.
    """
    if not tower.joined or setup.attention == "flash-attention-2":
        return 0
    return SIZE_BYTES[flow.table] * (setup.micro_batch_seqs * tower.patches) ** 2


def held_outputs(model: ModelSpec, tower: Tower, setup: TrainSetup, flow: Flow) -> int:
    """Bytes of what the model's forward holds of its tower until it ends: the last layer's output (of every layer where
    the class asks for all), and the features of the pictures before and after they are put among the text's.

    Source: transformers 5.23 `mm_encoder_outputs` of every class's forward.
    """
    if tower.looked_at:
        return SIZE_BYTES[flow.residual] * _seen(tower, setup) * tower.answer_width
    states = (tower.model.num_layers + 1) if tower.keeps_states else 1
    features = sum(one.num * one.tokens for one in tower.projectors) * model.hidden_size
    return SIZE_BYTES[flow.residual] * (states * _rows(tower, setup) + setup.micro_batch_seqs * features)


def tower_costs(
    tower: Tower, gpu: GpuSpec, setup: TrainSetup, flow: Flow, adapted: frozenset[str]
) -> tuple[LayerCosts, ...]:
    """The tower's layers by the text's terms, and what a text's leave out since its peak lies elsewhere: here the end
    of a layer's forward can be the largest moment, with what its own vectors scale.

    Measured: benchmarks/data/images.jsonl; tests/probes/test_images.py where four layers make it more of the whole.
    """
    found = []
    costs = layer_costs(tower.model, gpu, setup, flow, tower_names(tower, adapted))
    residual = SIZE_BYTES[flow.residual] * _rows(tower, setup)
    for layer, cost in zip(tower.model.layer_kinds, costs, strict=True):
        context = _context(tower, layer, setup, flow, adapted, setup.micro_batch_seqs * tower.patches)
        if tower.clipped:
            cost.saved.mlp += _clamps(layer, context)
        end = context.tokens * at_last_matrix(layer, context, cost.saved)
        scaled = context.tokens * 3 * SIZE_BYTES[flow.compute] * tower.scaled_outputs * tower.model.hidden_size
        again = end + scaled + residual if end else 0  # by the layer's own vectors, both branches
        found.append(replace(cost, forward=max(cost.forward, end + scaled), moments=(*cost.moments, (again, 0))))
    return tuple(found)


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
    flow = tower_flow(tower, own)
    if tower.convolves:
        return _convolved(model, tower, own, flow, adapted)
    costs = tower_costs(tower, gpu, own, flow, adapted)
    ground = groundwork(tower.model, gpu, own, costs, casts_adapters=False)  # the text's count those of both
    parts = activation_parts(tower.model, gpu, own, ground)
    inputs, outputs = own.micro_batch_seqs * tower.input_bytes, held_outputs(model, tower, own, flow)
    answered = outputs if tower.answers_states else 0
    if tower.looked_at:
        answered = SIZE_BYTES[flow.linear_out(flow.residual)] * _seen(tower, own) * model.hidden_size
        outputs += answered
    if not asks_gradients(tower, setup, adapted):
        forward = parts.forward_temp + _mask(tower, own, flow)
        return TowerBytes(inputs=inputs, behind=answered, held=outputs - answered, forward=forward)
    casts, residual = parts.weight_casts, SIZE_BYTES[flow.residual] * _rows(tower, own)
    pooled = _rows(tower, own) * SIZE_BYTES["fp32" if flow.autocast else flow.residual] if tower.pooled else 0
    beside = _text_leaf(model, setup) + (residual if tower.pooled else 0)  # and one more gradient of what is averaged
    behind = parts.final_norm + pooled + projectors_saved(tower, own, flow, adapted) + answered
    moments = [moment.total for moment in parts.layer_moments]
    if tower.looked_at:  # text is embedded after the tower has run, so that its gradients come back first
        beside += SIZE_BYTES[flow.residual] * _seen(tower, own) * tower.answer_width
        beside += SIZE_BYTES[flow.table] * model.num_embedding_params * (setup.method == "full")
        moments.append(behind)  # at the projector: its input and the features' gradient, as large as they
    return TowerBytes(
        inputs=inputs,
        stored=sum(parts.stored.values()) + casts[1] + _before(tower, setup, own, flow),
        mask=_mask(tower, own, flow),
        behind=behind,
        held=outputs - answered + casts[0] - casts[1],
        forward=parts.forward_temp,
        backward=tuple(moment + beside for moment in moments),
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
        held=SIZE_BYTES[widened.residual] * _rows(tower, own),
        forward=frames * sizes.idle,
    )
    if own.method != "full":
        return found
    casts = SIZE_BYTES[flow.autocast] * tower.num_other_params if flow.autocast and flow.table == "fp32" else 0
    return replace(found, stored=frames * sizes.kept + casts, forward=0, backward=(frames * sizes.backward,))


def _text_leaf(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the text's embeddings, which a hook made a leaf, and of their gradient, which stays."""
    hooked = setup.checkpointing and setup.method != "full"
    size = SIZE_BYTES[step_flow(model, setup).table]
    return 2 * size * model.hidden_size * setup.tokens_per_micro_batch * bool(hooked)


def tower_flow(tower: Tower, own: TrainSetup) -> Flow:
    """As `step_flow`; a LayerNorm before the layers widens their stream under autocast (CLIP), pixels in fp32 a
    quantized one's (Gemma 4)."""
    flow = step_flow(tower.model, own)
    widens = (tower.norm_first and flow.autocast) or (tower.widens_quantized and flow.quantized)
    return replace(flow, residual="fp32") if widens else flow


def with_tower(parts: ActivationParts, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ActivationParts:
    """The text's activations with those of the pictures."""
    return parts._replace(tower=tower_bytes(model, gpu, setup))
