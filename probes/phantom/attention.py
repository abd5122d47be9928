"""Attention as the card runs it: SDPA's kernel is chosen for the card, flash attention stands in by its shapes."""

from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from probes.dryrun.kernels import sdpa_of
from probes.patching import replaced
from probes.phantom.mode import Phantom


def chosen(phantom: Phantom) -> AbstractContextManager[None]:
    """Within it SDPA on the phantom GPU runs the kernel that the card would choose."""
    functional = torch.nn.functional
    true = functional.scaled_dot_product_attention
    on_card = sdpa_of(phantom.log)

    @wraps(true)  # Unsloth reads in its docstring what it can do
    def scaled_dot_product_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.device.type != "cuda":
            return true(query, *args, **kwargs)
        return on_card(query, *args, **kwargs)

    return replaced([(functional, "scaled_dot_product_attention", scaled_dot_product_attention)])
