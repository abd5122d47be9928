"""The step as older libraries compute it: today's, with what they did otherwise put back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from planner.setup import TrainSetup
from probes.stack.configs import layers_of
from probes.stack.dtypes import DTYPES
from probes.stack.step import inner_model


@contextmanager
def older_libraries(model: Any, setup: TrainSetup) -> Iterator[None]:
    """Within it the model's step is that of the packages that the setup names, where those are older than today's.

    Source: transformers 4.41 `MistralRotaryEmbedding` (a table of all positions in every layer), 4.45
    `LlamaForCausalLM.forward` (fp32 logits), 4.48 `loss/loss_utils.py` (a shifted copy of them), 4.53
    `integrations/sdpa_attention.py` (repeat_kv); bitsandbytes 0.43.1 `MatMul4Bit` (ctx.tensors = (A, B)).
    """
    inner = inner_model(model)
    if setup.before_transformers(4, 43):
        text, dtype = inner.config.get_text_config(), DTYPES[setup.weight_dtype]
        fraction = (text.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        width = int((getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) * fraction)
        for layer in layers_of(inner):
            table = torch.empty(2, text.max_position_embeddings, width, dtype=dtype, device=inner.device)
            layer.register_buffer("positions_table", table, persistent=False)
    if setup.trainer.one_kernel_gelu:  # another's own model code, not an older one
        for module in inner.modules():
            if type(module).__name__ == "NewGELUActivation":
                module.forward = partial(torch.nn.functional.gelu, approximate="tanh")
    with ExitStack() as stack:
        if setup.saves_four_bit_inputs:
            from bitsandbytes.autograd._functions import MatMul4Bit

            forward = staticmethod(_keeping_input(MatMul4Bit.forward))
            stack.enter_context(mock.patch.object(MatMul4Bit, "forward", forward))
        if setup.repeats_keys:
            place = "transformers.integrations.sdpa_attention.use_gqa_in_sdpa"
            stack.enter_context(mock.patch(place, lambda *_: False))  # noqa: PT008 - a Mock would keep its calls
        if setup.copies_logits:
            inner.loss_function = _shifting_loss
            if setup.before_transformers(4, 46):
                head = inner.get_output_embeddings()
                stack.callback(head.register_forward_hook(lambda _head, _inputs, logits: logits.float()).remove)
        yield


def _keeping_input(forward: Callable[..., Any]) -> Callable[..., Any]:
    def keeping(ctx: Any, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(ctx, rows, *args, **kwargs)
        if not ctx.is_empty and ctx.tensors[1] is not None:
            ctx.tensors = (rows, ctx.tensors[1])
        return output

    return keeping


def _shifting_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_kwargs: Any
) -> torch.Tensor:
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous().view(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = torch.nn.functional.cross_entropy(shifted.view(-1, vocab_size), targets, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
