"""What is refused by name: models split as nobody tried here, and attention whose memory nobody here knows."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from probes.phantom.cuda import refusing
from probes.phantom.imports import Hook

_ATTENTION = re.compile(r"flash_attn\w*_func|memory_efficient_attention\w*")


def hooks(stack: ExitStack) -> dict[str, Hook]:
    """Module -> what is refused of it once it is imported."""

    def refuse(names: Callable[[str], Any], why: str) -> Hook:
        def hook(module: Any) -> None:
            for name in [attribute for attribute in vars(module) if names(attribute)]:
                refusal = refusing(f"{module.__name__}.{name}: {why}")
                stack.enter_context(mock.patch.object(module, name, refusal))

        return hook

    def sharded(module: Any) -> None:
        refusal = refusing("FullyShardedDataParallel cannot be followed")
        stack.enter_context(mock.patch.object(module.FullyShardedDataParallel, "__init__", refusal))

    kernel = refuse(_ATTENTION.fullmatch, "the buffers of this package's kernels are not known here; SDPA is followed")
    split = refuse(
        {"parallelize_module", "distribute_tensor"}.__contains__, "this way to split a model was not tried here"
    )
    return {
        "torch.distributed.tensor.parallel": split,
        "transformers.distributed.expert_parallel": split,
        "deepspeed": refuse({"initialize"}.__contains__, "DeepSpeed's engine allocates outside PyTorch's operators"),
        "torch.distributed.fsdp": sharded,
        "torch.nn.attention.flex_attention": refuse(
            {"flex_attention"}.__contains__, "it runs eagerly here and would hold the scores; SDPA is followed"
        ),
        "flash_attn.flash_attn_interface": kernel,
        "flash_attn.cute.interface": kernel,
        "flash_attn_interface": kernel,
        "xformers.ops.fmha": kernel,
    }
