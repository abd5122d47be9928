"""Which matrices carry adapters, as the speed model groups them."""

from typing import NamedTuple

from planner.models.spec import LinearSpec, ModelSpec
from planner.models.targets import lora_linears, lora_params


class Adapted(NamedTuple):
    """Adapters of one target set.

    Attributes:
        linears: the adapted matrices that text tokens pass through, with how many layers hold each.
        params_per_rank: trained elements at rank 1, idle encoders included.
        modules: adapted modules, idle encoders included; `apart`: of them, those at another length than the text.
    """

    linears: tuple[tuple[LinearSpec, int], ...]
    params_per_rank: int
    modules: int
    apart: int


def adapted_linears(model: ModelSpec, targets: str | tuple[str, ...]) -> Adapted:
    """The adapters of a target set, equal matrices merged."""
    idle = {id(layer) for layer, _ in model.idle_layers}
    merged: dict[LinearSpec, int] = {}
    params = modules = apart = 0
    for layer, repeats, linears in lora_linears(model, targets):
        for linear in linears:
            params += repeats * lora_params(linear, 1)
            modules += repeats * (1 if linear.module == "parameter" else linear.num)
            if layer.fixed_tokens or (linear.of_encoder and model.encoder_tokens):
                apart += repeats
            elif id(layer) not in idle:
                merged[linear] = merged.get(linear, 0) + repeats
    return Adapted(tuple(merged.items()), params, modules, apart)
