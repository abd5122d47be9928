"""Generation of a step's completions, as transformers' `generate` does it: its first forward, and its last with the
whole cache. What lies between is smaller."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from planner.setup import TrainSetup

Tell = Callable[[str, int | None], None]


def generate(setup: TrainSetup, inner: Any, forward: Any, tell: Tell) -> None:
    """Every generation of an optimizer step is the same: one is run.

    Args:
        forward: the model's under the trainer's autocast, which peft's `generate` goes around.

    Source: trl 1.16 `GRPOTrainer._generate_single_turn`; transformers 5.23 `GenerationMixin._sample` without
    processors of logits (top_k 0, top_p 1).
    """
    from transformers import DynamicCache

    if setup.rollout_settings.generator != "transformers":
        return
    device = next(inner.parameters()).device
    vocab = int(inner.config.get_text_config().vocab_size)
    run = forward if setup.method == "full" else inner.__call__
    with torch.no_grad(), without_checkpointing(inner):
        ids = torch.randint(0, vocab, (setup.local_generation_seqs, setup.seq_len_tokens), device=device)
        cache = DynamicCache(config=inner.config)
        tell("forward", None)
        _next_token(run, ids[:, : setup.prompt_tokens], cache)
        for index, layer in enumerate(cache.layers):
            tell("forward", index)
            tokens, window = setup.seq_len_tokens - 2, getattr(layer, "sliding_window", None)
            length = min(tokens, window - 1) if window else tokens  # a layer with a window keeps that
            if hasattr(layer, "cumulative_length"):  # and its mask is of so many as it has seen
                layer.cumulative_length = tokens
            for name in ("keys", "values"):
                old = getattr(layer, name, None)
                if isinstance(old, torch.Tensor):
                    setattr(layer, name, old.new_zeros((*old.shape[:-2], length, old.shape[-1])))
                del old
        tell("forward", None)
        _next_token(run, ids[:, -1:], cache)


def _next_token(run: Any, ids: torch.Tensor, cache: Any) -> None:
    """One forward and the draw from its last token's logits."""
    seen = cache.get_seq_length()
    positions = torch.arange(seen, seen + ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)
    outputs = run(
        input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True
    )
    logits = outputs["logits"][:, -1, :].to(copy=True, dtype=torch.float32)
    del outputs
    torch.multinomial(torch.nn.functional.softmax(logits, dim=-1), num_samples=1)


@contextmanager
def without_checkpointing(inner: Any) -> Any:
    """Source: TRL 1.16 `disable_gradient_checkpointing`, `unwrap_model_for_generation`."""
    with ExitStack() as stack:
        for module in inner.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
                stack.callback(setattr, module, "gradient_checkpointing", True)
        yield
