"""The pictures of a micro-batch as the model's forward takes them, and what lets a tower run on meta tensors."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from planner.models.spec import ModelSpec
from planner.models.towers import Tower, tower_of
from planner.setup import TrainSetup

_ON_DEVICE = (
    "get_vision_position_ids",
    "get_vision_window_index",
    "get_vision_interpolation_indices_and_weights",
)
"""transformers' functions that compute positions from the grid's values: meta tensors have none, so the grid stays on
the host and what comes out goes to the device."""


def tower_for(setup: TrainSetup, config: Any) -> Tower:
    """The tower of a built model's configuration for the setup's pictures."""
    assert setup.images is not None
    text = config.get_text_config()
    raw = config.to_dict()
    spec = ModelSpec(
        model_id=config.model_type,
        model_type=config.model_type,
        built_class="",
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        max_position_embeddings=None,
        layer_kinds=(),
        layer_order=(),
        embeddings=(),
        head=None,
        tied=False,
        config=raw,
    )
    return tower_of(spec, setup.images)


def pixel_shape(setup: TrainSetup, config: Any, tower: Tower) -> tuple[int, ...]:
    """Of `pixel_values` of one micro-batch."""
    assert setup.images is not None
    num = setup.micro_batch_seqs * setup.images.num
    if config.model_type.startswith("qwen"):
        rows = tower.grid[0] * tower.grid[1]
        return num * rows, tower.pixels // rows
    side = int(config.vision_config.image_size)
    return num, 3, side, side


def image_inputs(setup: TrainSetup, config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """What pictures add to a micro-batch's inputs; their tokens are written to the start of every sequence of `ids`.

    Source: transformers 5.23 processors; positions in three dimensions are the model's own, made from the grid.
    """
    assert setup.images is not None
    tower, device = tower_for(setup, config), ids.device
    num = setup.images.num * tower.tokens
    ids[:, :num] = int(config.image_token_id)
    shape = pixel_shape(setup, config, tower)
    found: dict[str, Any] = {"pixel_values": torch.zeros(shape, dtype=torch.float32, device=device)}
    if config.model_type.startswith("qwen"):
        grid = torch.tensor([(1, *tower.grid)], dtype=torch.int64).repeat(setup.micro_batch_seqs * setup.images.num, 1)
        found["image_grid_thw"] = grid
        found["position_ids"] = torch.zeros((3, *ids.shape), dtype=torch.int64, device=device)
    elif config.model_type == "gemma3":
        kinds = torch.zeros(ids.shape, dtype=torch.int64, device=device)
        kinds[:, :num] = 1
        found["token_type_ids"] = kinds
    return found


def waiting_pixels(setup: TrainSetup, config: Any, device: torch.device | str, *, beside: int) -> list[torch.Tensor]:
    """The pixels of a step's further micro-batches, which lie on the device from its beginning on.

    Source: transformers 5.23 `Trainer.get_batch_samples`, which takes the batches of all micro-batches at once.
    """
    if setup.images is None:
        return []
    shape = pixel_shape(setup, config, tower_for(setup, config))
    more = setup.accumulation_steps - beside
    return [torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(more)]


@contextmanager
def seeing(model: Any, setup: TrainSetup) -> Iterator[None]:
    """Within it, a model whose pictures lie on meta runs its tower."""
    device = next(model.parameters()).device
    if setup.images is None or device.type == "cuda":
        yield
        return
    tower = tower_for(setup, model.config)
    rows = setup.micro_batch_seqs * setup.images.num * tower.tokens
    with ExitStack() as stack:
        module = importlib.import_module(type(model).__module__)
        for name in _ON_DEVICE:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, _moved(getattr(module, name), device)))
        for one in model.modules():
            if device.type == "meta" and hasattr(one, "_deepstack_process"):
                stack.enter_context(mock.patch.object(one, "_deepstack_process", _deepstack(rows)))
        yield


def _moved(function: Any, device: torch.device) -> Any:
    """The same function with its tensors on `device`, but for lengths, which are asked for their values."""

    def on_device(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            found = function(*args, **kwargs)
            if isinstance(found, tuple):
                found = tuple(_ends(one) if one.dtype is torch.int32 else one for one in found)
        if isinstance(found, torch.Tensor):
            return found.to(device)
        return tuple(one if one.dtype is torch.int32 else one.to(device) for one in found)

    def _ends(lengths: torch.Tensor) -> torch.Tensor:
        """Of windows on meta the first and last edge: one call instead of hundreds takes as many bytes."""
        return lengths[[0, -1]] if device.type == "meta" else lengths

    return on_device


def _deepstack(rows: int) -> Any:
    """Qwen3-VL's addition of inner features to the pictures' `rows`, without a look at where they are.

    Source: transformers 5.23 `Qwen3VLTextModel._deepstack_process`.
    """

    def process(hidden: torch.Tensor, places: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        features = features.to(hidden.device, hidden.dtype)
        hidden = hidden.clone()
        local = hidden.view(-1, hidden.shape[-1])[:rows].clone() + features
        hidden.view(-1, hidden.shape[-1])[:rows] = local
        return hidden

    return process


def deep_layers(setup: TrainSetup, config: Any) -> int:
    """Decoder layers at the start that are given features of the tower's inner layers, and so behave otherwise."""
    if setup.images is None:
        return 0
    vision: Mapping[str, Any] = config.vision_config.to_dict()
    return len(vision.get("deepstack_visual_indexes") or ())
