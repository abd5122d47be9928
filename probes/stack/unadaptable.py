"""Which matrices of a model no adapter can stand in for."""

from typing import Any

import torch


def unadaptable_modules(model: Any) -> set[str]:
    """Names of the matrices whose place no adapter can take: what their class does is no product (routers that pick the
    experts themselves, products by groups), or PEFT refuses their name in a model of this type, whose code takes their
    weight without calling them.

    Source: peft 0.21 `tuners_utils.py` _check_lora_target_modules_mamba.
    """
    import peft
    from peft.tuners import tuners_utils

    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    refused = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if not _is_product(module):
            refused.add(name)
        elif check is not None:
            try:
                check(peft.LoraConfig(), model, name.rpartition(".")[2])
            except ValueError:
                refused.add(name)
    return refused


def _is_product(linear: torch.nn.Linear) -> bool:
    """Whether a matrix's class gives a row of its width for a row of its input's, tried on meta; bitsandbytes' do."""
    if not type(linear).__module__.startswith("transformers.models."):
        return True
    weights = {name: parameter.detach().to("meta") for name, parameter in linear.named_parameters()}
    row = torch.empty((1, 1, linear.in_features), dtype=linear.weight.dtype, device="meta")
    try:
        out = torch.func.functional_call(linear, weights, (row,))
    except Exception:  # whatever it stumbles over, it takes more than a row
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, 1, linear.out_features)
