"""What the text's tokens keep before the layers and behind them."""

from planner.memory.activations import norm_saved
from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.layer_context import LayerContext
from planner.memory.streams import kept_around_the_layers, kept_by_embedders
from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.setup import TrainSetup


def kept_outside(model: ModelSpec, setup: TrainSetup, flow: Flow) -> tuple[dict[str, int], int]:
    """(Bytes kept to the backward's end by part, bytes of the norm behind the layers)."""
    tokens = setup.forward_tokens
    streams, joined = kept_around_the_layers(model, flow, tokens, traits_of(model).streams)
    if embedders := [one for one, _ in model.idle_layers if one.kind == "embedder"]:
        names = _adapted_parts(model, setup)
        found = [(one, one.path in names) for one in embedders]
        streams += kept_by_embedders(found, flow, tokens, trained=setup.method == "full")
    before, behind = _outer_norms(model, setup, flow, tokens)
    return {"streams": streams, "norm": before}, behind + joined


def _adapted_parts(model: ModelSpec, setup: TrainSetup) -> frozenset[str]:
    """Paths of the layers of which some matrix has an adapter."""
    if setup.method == "full" or not setup.kind.adapts_matrices:
        return frozenset()
    return frozenset(layer.path for layer, _, linears in lora_linears(model, setup.lora_targets) if linears)


def _outer_norms(model: ModelSpec, setup: TrainSetup, flow: Flow, tokens: int) -> tuple[int, int]:
    """Bytes that the norms around the layers keep of one forward: (before them, to the backward's end; the last one
    behind them)."""
    around = LayerContext(
        setup=setup.trusted_with(method="lora") if setup.trained_layers else setup,
        flow=flow,
        adapted=frozenset(),
        kernel="flash",
        tokens=tokens,
        hidden=model.hidden_size,
        traits=traits_of(model),
        fused=setup.fused_parts(model.model_type),
    )
    before = [one for one in model.outer_norms if "embed" in one.name]
    behind = [one for one in model.outer_norms if "embed" not in one.name][-1:]
    kept, last = ([norm_saved(norm, around, flow.residual) for norm in norms] for norms in (before, behind))
    return sum(kept), sum(last)
