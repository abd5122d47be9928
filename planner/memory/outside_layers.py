"""What the text's tokens keep before the layers and behind them."""

from planner.memory.activations import norm_saved
from planner.memory.dtypes import DtypePolicy
from planner.memory.layer_context import LayerContext
from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


def kept_by_outer_norms(model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy) -> tuple[int, int]:
    """Bytes that the norms around the layers keep of one forward: (before them, to the backward's end; the last one
    behind them)."""
    around = LayerContext(
        setup=setup.replace_trusted(method="lora") if setup.trained_layers else setup,
        dtypes=dtypes,
        adapted=frozenset(),
        kernel="flash",
        tokens=setup.forward_tokens,
        hidden=model.hidden_size,
        traits=traits_of(model),
        fused=setup.fused_parts(model.model_type),
    )
    before = [one for one in model.outer_norms if "embed" in one.name]
    behind = [one for one in model.outer_norms if "embed" not in one.name][-1:]
    kept, last = ([norm_saved(norm, around, dtypes.residual) for norm in norms] for norms in (before, behind))
    return sum(kept), sum(last)
