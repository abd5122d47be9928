"""What pictures add to the memory of a micro-batch: the tower's activations, its inputs, what it hands to the text."""

from dataclasses import replace

from planner.gpu import GpuSpec
from planner.memory.activations import layer_saved
from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.layer_context import LayerContext
from planner.memory.layer_costs import layer_costs
from planner.memory.micro_batch import ActivationParts, TowerBytes, activation_parts, step_flow
from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.models.towers import FP32_BYTES, Tower, tower_of
from planner.setup import TrainSetup


def tower_setup(setup: TrainSetup, tower: Tower) -> TrainSetup:
    """The same setup of the tower alone: its pictures are its sequences."""
    assert setup.images is not None
    targets = {} if setup.method == "full" else {"lora_targets": "all-linear"}  # names of the text mean nothing here
    return setup.trusted_with(
        **targets, images=None, micro_batch_seqs=setup.micro_batch_seqs * setup.images.num, seq_len_tokens=tower.patches
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


def projectors_saved(tower: Tower, setup: TrainSetup, flow: Flow, adapted: frozenset[str]) -> int:
    """Bytes that the networks between tower and text keep: no class checkpoints them."""
    total, images = 0, setup.micro_batch_seqs
    for one in tower.projectors:
        context = LayerContext(
            setup=setup,
            flow=flow,
            adapted=frozenset(each.name for each in one.layer.linears if f"{one.layer.path}.{each.name}" in adapted),
            kernel="flash",
            tokens=images * one.tokens,
            hidden=one.layer.linears[0].in_features,
            traits=traits_of(tower.model),
        )
        total += one.num * layer_saved(one.layer, context).total
    return total


def _around(tower: Tower, setup: TrainSetup, flow: Flow) -> int:
    """Bytes kept before the layers and behind them: the patches' embeddings that a hook made a leaf, and what is
    averaged (in fp32 where autocast's LayerNorm comes before)."""
    rows = setup.micro_batch_seqs * tower.patches * tower.model.hidden_size
    leaf = tower.named_embeddings and setup.checkpointing and setup.method != "full"
    pooled = SIZE_BYTES["fp32" if flow.autocast else flow.residual] if tower.pooled else 0
    return rows * (SIZE_BYTES[flow.table] * bool(leaf) + pooled)


def held_outputs(model: ModelSpec, tower: Tower, setup: TrainSetup, flow: Flow) -> int:
    """Bytes of what the model's forward holds of its tower until it ends: the last layer's output (of every layer where
    the class asks for all), and the features of the pictures before and after they are put among the text's.

    Source: transformers 5.23 `mm_encoder_outputs` of every class's forward.
    """
    images = setup.micro_batch_seqs
    size = SIZE_BYTES[flow.residual]
    states = (tower.model.num_layers + 1) if tower.keeps_states else 1
    features = sum(one.num for one in tower.projectors) * tower.tokens * model.hidden_size
    return images * size * (states * tower.patches * tower.model.hidden_size + features)


def tower_bytes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> TowerBytes:
    """What the pictures of a micro-batch add."""
    assert setup.images is not None
    tower = tower_of(model, setup.images)
    own, adapted = tower_setup(setup, tower), tower_adapted(model, setup)
    flow = step_flow(tower.model, own)
    costs = layer_costs(tower.model, gpu, own, flow, tower_names(tower, adapted))
    parts = activation_parts(tower.model, gpu, own, costs, casts_adapters=False)  # the text's count those of both
    inputs = FP32_BYTES * own.micro_batch_seqs * tower.pixels
    if not asks_gradients(tower, setup, adapted):
        return TowerBytes(inputs=inputs, held=held_outputs(model, tower, own, flow), forward=parts.forward_temp)
    casts = parts.weight_casts
    return TowerBytes(
        inputs=inputs,
        stored=sum(parts.stored.values())
        + casts[1]
        + parts.final_norm
        + _around(tower, own, flow)
        + projectors_saved(tower, own, flow, adapted),
        held=held_outputs(model, tower, own, flow) + casts[0] - casts[1],
        forward=parts.forward_temp,
        backward=tuple(moment.total for moment in parts.layer_moments),
    )


def with_tower(parts: ActivationParts, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ActivationParts:
    """The text's activations with those of the pictures."""
    return replace(parts, tower=tower_bytes(model, gpu, setup))
