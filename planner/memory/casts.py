"""16-bit copies that autocast makes of fp32 adapters and matrices."""

from typing import NamedTuple

from planner.memory.dtypes import DtypePolicy
from planner.memory.trained import decoder_alone, frozen_below, trained_parameters
from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


class AdapterCasts(NamedTuple):
    """Copies of fp32 adapters.

    Attributes:
        always_bytes: kept by the graph whatever is recomputed.
        copied: elements whose copies the graph keeps in layers that are not recomputed; cached: of them, those that
            autocast's cache keeps until the forward ends in layers that are.
    """

    always_bytes: int = 0
    copied: int = 0
    cached: int = 0

    def at(self, share: float) -> tuple[int, int]:
        """Bytes (kept by the graph, kept by autocast's cache) where this share of the layers is not recomputed."""
        return self.always_bytes + int(2 * self.copied * share), int(2 * self.cached * (1 - share))


NO_ADAPTER_CASTS = AdapterCasts()


def adapter_casts(model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy) -> AdapterCasts:
    """Those of a setup."""
    if setup.method == "full" or not dtypes.autocast or dtypes.adapter != "fp32":
        return NO_ADAPTER_CASTS
    network = 2 * 3 * model.hidden_size**2 if setup.adapter == "p-tuning" else 0
    if setup.kind.form != "low-rank":
        return AdapterCasts(network)
    adapters_only = setup.replace_trusted(modules_to_save=()) if setup.modules_to_save else setup
    trained = trained_parameters(model, adapters_only)
    # fused functions cast by themselves, past autocast's cache
    fused = "lora" in setup.fused_parts(model.model_type)
    return AdapterCasts(network, trained.num, 0 if fused else trained.num - trained.stacked)


class WeightCasts(NamedTuple):
    """Copies of fp32 matrices.

    Attributes:
        size_bytes: of all matrices, of those that train alone where others do not.
        frozen_bytes: of those beside them, which only the graph keeps.
        trained: whether they are cached until the forward ends; else only the graph keeps them.
        gone: whether none of them outlives the forward, whichever layers keep their activations.
    """

    size_bytes: int = 0
    frozen_bytes: int = 0
    trained: bool = False
    gone: bool = False

    def at(self, kept: int, layers: int) -> tuple[int, int]:
        """Bytes alive in (forward and loss, backward) where so many of the layers keep their activations."""
        if self.gone:
            return self.size_bytes, 0
        of_kept, frozen = (size * kept // max(1, layers) for size in (self.size_bytes, self.frozen_bytes))
        return frozen + (self.size_bytes if self.trained else of_kept), frozen + of_kept


def weight_casts(model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy) -> WeightCasts:
    """Those of a setup.

    Trained ones are cached until the forward ends and kept by the graph where nothing is recomputed; frozen ones are
    not cached, but the graph keeps each of them. The head's copy belongs to the loss chain. Grouped multiplication of
    stacked experts is not on autocast's list; Llama 4's batched one is: its frozen copies are in `moe_saved`, as a
    recomputed layer holds them too.

    Source: PyTorch `aten/src/ATen/autocast_mode.cpp`, cached_cast.
    """
    if setup.widens_trained:
        return WeightCasts(2 * trained_parameters(model, setup).num, trained=True, gone=setup.checkpointing > 0)
    trained = setup.method == "full"
    batched = traits_of(model).dense_experts and trained
    if dtypes.autocast is None or setup.quantized or dtypes.table != "fp32":
        return WeightCasts()
    copied = decoder_alone(model) if setup.frozen_encoder else model
    each = [
        2 * sum(one.num_weights for one in layer.linears if one.module != "parameter" or batched)
        for layer in copied.layer_kinds
    ]
    if trained and setup.trained_layers:
        reached = copied.layer_order[frozen_below(model, setup) :]
        frozen = sum(each[kind] for kind in reached if copied.layer_kinds[kind].frozen)
        return WeightCasts(sum(each[kind] for kind in reached) - frozen, frozen, trained=True)
    return WeightCasts(sum(each[kind] for kind in copied.layer_order), trained=trained)
