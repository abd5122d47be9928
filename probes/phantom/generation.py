"""Generation on a phantom GPU: the first and the last tokens are followed, the cache grows to its length in between.

Every token of a batch runs the same operators; what grows is the cache of keys and values. Nobody knows where a
sequence would end, so all are as long as the program allows.
"""

from collections.abc import Callable
from typing import Any

import torch

from probes.phantom.cuda import Refused
from probes.phantom.imports import Patch
from probes.phantom.mode import Phantom

_FOLLOWED = 4
"""Tokens that run: from the prompt, one with a short cache, two with the cache of the full length."""
_GROWTH = 1.25
_FIRST_TOKEN = 40


class _Run:
    """One call: how many tokens are left, and how many of them are skipped once two ran."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self.num_to_skip = max(0, num_tokens - _FOLLOWED)
        self.has_skipped = False
        self._ran = 0

    def next(self, outputs: Any) -> bool:
        """Another token ran; whether now is the time to skip, and the cache has grown."""
        self.num_left -= 1
        self._ran += 1
        if self._ran == 2 and self.num_to_skip and _grow(outputs, self.num_to_skip):
            self.num_left -= self.num_to_skip
            self.has_skipped = True
            return True
        return False


def shortened(phantom: Phantom, generation: Any, patch: Patch) -> None:
    """Makes `generate` of transformers skip the tokens in the middle.

    Source: transformers 5.23 generation/utils.py `_sample`.
    """
    mixin = generation.GenerationMixin
    if not hasattr(mixin, "_has_unfinished_sequences"):  # transformers before 4.39: every token is run
        return
    update, unfinished = mixin._update_model_kwargs_for_generation, mixin._has_unfinished_sequences
    running: list[_Run] = []

    def _update(self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if running and running[0].next(outputs):
            kwargs["num_new_tokens"] = 1 + running[0].num_to_skip
        return update(self, outputs, model_kwargs, *args, **kwargs)

    def _unfinished(self: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(not running or running[0].num_left > 0) and bool(unfinished(self, *args, **kwargs))

    patch(mixin, "_sample", _sampling(phantom, mixin._sample, running))
    patch(mixin, "_update_model_kwargs_for_generation", _update)
    patch(mixin, "_has_unfinished_sequences", _unfinished)


def _sampling(phantom: Phantom, true: Callable[..., Any], running: list[_Run]) -> Callable[..., Any]:
    """`_sample`, during which `running` holds the call that is followed."""

    def _sample(
        self: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if input_ids.device.type != "cuda" or running:
            return true(self, input_ids, logits_processor, stopping_criteria, *args, **kwargs)
        length = stopping_criteria.max_length
        if length is None:
            raise Refused("generation without a maximum length cannot be followed: only the GPU knows where it ends")
        run = _Run(length - input_ids.shape[1])
        if getattr(kwargs.get("generation_config"), "return_dict_in_generate", False):
            run.num_to_skip = 0  # what is kept of every token is part of the answer
        running.append(run)
        try:
            output = true(self, input_ids, logits_processor, stopping_criteria, *args, **kwargs)
        finally:
            running.clear()
        phantom.note(
            "generation: no sequence ends before the program's maximum"
            + run.has_skipped * "; its first and last tokens were followed, reserved memory is a lower bound there"
        )
        return _with_values(phantom, self, input_ids, output, length) if isinstance(output, torch.Tensor) else output

    return _sample


def _with_values(
    phantom: Phantom, model: Any, prompt: torch.Tensor, sequences: torch.Tensor, length: int
) -> torch.Tensor:
    """The sequences with values: prompts, then a token that ends nothing, so that masks and lengths are whole."""
    special: set[Any] = set()
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(model.generation_config, name, None)
        special |= set(value) if isinstance(value, list) else {value}
    token = next(token_id for token_id in range(_FIRST_TOKEN, _FIRST_TOKEN + 8) if token_id not in special)
    ids = torch.full((sequences.shape[0], length), token, dtype=torch.int64)
    before = phantom.values.real(prompt)
    if before is not None:
        ids[:, : prompt.shape[1]] = before
    return ids.to(sequences.device)


def _grow(outputs: Any, num_tokens: int) -> bool:
    """Makes the cache longer, layer by layer; False where it is of a kind that does not grow by whole sequences."""
    places = _places(getattr(outputs, "past_key_values", None))
    if not places:
        return False
    at = places[0][0][places[0][1]].shape[-2]
    end = at + num_tokens
    while at < end:
        at = min(end, max(at + 1, int(at * _GROWTH)))
        for owner, name in places:
            old = owner[name]
            owner[name] = old.new_empty((*old.shape[:-2], at, old.shape[-1]))
    return True


def _places(cache: Any) -> list[tuple[Any, Any]]:
    """Where a cache holds its keys and values (what holds them, by which name); none of one of another kind."""
    from transformers import cache_utils

    layers = getattr(cache, "layers", None)
    if hasattr(cache_utils, "DynamicLayer"):
        plain = layers and all(type(layer) is cache_utils.DynamicLayer for layer in layers)
        return [(vars(layer), name) for layer in layers or () for name in ("keys", "values")] if plain else []
    if type(cache) is not cache_utils.DynamicCache:  # transformers before 4.54: lists
        return []
    return [(tensors, index) for tensors in (cache.key_cache, cache.value_cache) for index in range(len(tensors))]
