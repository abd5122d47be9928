"""The trainers' own loss kernels, where the libraries are installed and a GPU is there to run them.

The forms in `probes.stack.losses` need the same memory but not the same time: a probe that measures speed runs these.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

from planner.options.losses import TRL_VOCAB_CHUNK
from planner.setup import TrainSetup

_MODULES = {"chunked": ("trl", "datasets"), "liger": ("liger_kernel", "triton")}
"""trl imports datasets in its backward."""


def loss_is_emulated(setup: TrainSetup) -> bool:
    """Whether a GPU would run this setup's loss by this project's own form, for want of the library."""
    return setup.loss != "full" and real_loss(setup.loss) is None


@cache
def real_loss(kind: str) -> Any | None:
    """The library's function with the arguments of the form in `losses`; None where the library is missing.

    "chunked": (hidden, weight, bias, targets) -> log-probabilities, entropy, is_top1; "liger": the same arguments ->
    loss.

    Source: trl 1.16 `trl.kernels.ChunkedLogProbFunction`, as `SFTTrainer` calls it; liger-kernel 0.8
    `liger_kernel.transformers.functional.liger_fused_linear_cross_entropy`.
    """
    if any(find_spec(name) is None for name in _MODULES[kind]):
        return None
    try:
        if kind == "chunked":
            from trl.kernels import ChunkedLogProbFunction
        else:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:  # an older or newer library that keeps its kernel elsewhere
        return None

    def chunked(hidden: Any, weight: Any, bias: Any, targets: Any) -> Any:
        outputs = ("entropy", "is_top1")
        values = ChunkedLogProbFunction.apply(hidden, weight, bias, targets, 1.0, TRL_VOCAB_CHUNK, None, 1.0, outputs)
        return values[0], values[1], values[4]

    def liger(hidden: Any, weight: Any, bias: Any, targets: Any) -> Any:
        loss = liger_fused_linear_cross_entropy(hidden, weight, targets, bias=bias)
        return loss[0] if isinstance(loss, tuple) else loss

    return chunked if kind == "chunked" else liger
