"""The pictures of a micro-batch as the model's forward takes them, and what lets an encoder run on meta tensors."""

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from planner.core.shipped import by_model_type
from planner.models.encoders import encoder_of
from planner.models.spec import ModelSpec
from planner.models.vision_encoders.encoder import Encoder
from planner.setup import TrainSetup
from probes.patching import Replacement, nothing, replaced

_ON_DEVICE = ("get_vision_position_ids", "get_vision_window_index", "get_vision_interpolation_indices_and_weights")
"""transformers' functions that compute positions from the grid's values: meta tensors have none, so the grid stays on
the host and what comes out goes to the device."""

SEPARATE: set[tuple[int, ...]] = set()
"""Shapes of what attends in a call of `_Windows` that stands for as many calls as its first dimension."""


def encoder_for(setup: TrainSetup, config: Any) -> Encoder:
    """The encoder of a built model's configuration for the setup's pictures."""
    assert setup.images is not None
    text = config.get_text_config()
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
        config=config.to_dict(),
    )
    return encoder_of(spec, setup.images)


def image_inputs(setup: TrainSetup, config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """What pictures add to a micro-batch's inputs; their tokens are written to the start of every sequence of `ids`.

    Source: transformers 5.23 processors; positions in three dimensions are the model's own, made from the grid.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_CLASSES

    assert setup.images is not None
    encoder, device = encoder_for(setup, config), ids.device
    num = setup.images.num * encoder.tokens
    ids[:, :num] = int(config.image_token_id)
    inputs = pixels(setup, encoder, device)
    all_images = setup.micro_batch_seqs * setup.images.num
    takes = signature(getattr(transformers, IMAGE_CLASSES[config.model_type]).forward).parameters
    if "image_grid_thw" in takes:
        inputs["image_grid_thw"] = torch.tensor([(1, *encoder.grid)], dtype=torch.int64).repeat(all_images, 1)
        inputs["position_ids"] = torch.zeros((3, *ids.shape), dtype=torch.int64, device=device)
    elif kinds := [name for name in ("token_type_ids", "mm_token_type_ids") if name in takes]:
        seen = bool(by_model_type("seen_both_ways").get(config.model_type, 1))  # PaliGemma's pictures' are 0
        inputs[kinds[0]] = torch.full(ids.shape, not seen, dtype=torch.int64, device=device)
        inputs[kinds[0]][:, :num] = seen
    elif encoder.joined:
        inputs["image_sizes"] = [encoder.shape[1:]] * all_images
    elif "aspect_ratio_ids" in takes:
        tiles = (setup.micro_batch_seqs, setup.images.num, encoder.shape[0])
        inputs["aspect_ratio_ids"] = torch.ones(tiles[:2], dtype=torch.int64, device=device)
        inputs["aspect_ratio_mask"] = torch.ones(tiles, dtype=torch.int64, device=device)
        inputs["cross_attention_mask"] = torch.ones((*ids.shape, *tiles[1:]), dtype=torch.int64, device=device)
    return inputs


def pixels(setup: TrainSetup, encoder: Encoder, device: torch.device | str) -> dict[str, Any]:
    """The pixels of one micro-batch and, where the processor makes one, their mask. They are no zeros: frames of zeros
    are left out as padding (Idefics 3)."""
    assert setup.images is not None
    samples, frames = setup.micro_batch_seqs, setup.images.num * encoder.frames
    apart = encoder.masked_pixels or len(encoder.shape) == 4  # of tiles
    shape: tuple[int, ...] = (samples, frames, *encoder.shape) if apart else (samples * frames, *encoder.shape)
    if encoder.positions:
        shape = (samples * frames, *encoder.shape)
    elif len(encoder.shape) == 2:
        shape = (samples * frames * encoder.shape[0], encoder.shape[1])
    inputs = {"pixel_values": torch.ones(shape, dtype=torch.float32, device=device)}
    if encoder.masked_pixels:
        inputs["pixel_attention_mask"] = torch.ones((*shape[:2], *shape[3:]), dtype=torch.int64, device=device)
    if encoder.positions:
        inputs["image_position_ids"] = torch.zeros((*shape[:2], 2), dtype=torch.int64, device=device)
    return inputs


@contextmanager
def seeing(model: Any, setup: TrainSetup) -> Iterator[None]:
    """Within it, a model whose pictures lie on meta runs its tower."""
    device = next(model.parameters()).device
    if setup.images is None or device.type == "cuda":
        yield
        return
    encoder = encoder_for(setup, model.config)
    rows = setup.micro_batch_seqs * setup.images.num * encoder.tokens
    module = importlib.import_module(type(model).__module__)
    names = [name for name in _ON_DEVICE if hasattr(module, name)]
    replacements = [(module, name, _moved(getattr(module, name), device)) for name in names]
    if device.type == "meta":
        replacements += _without_values(model, module, encoder, rows)
    with replaced(replacements):
        yield
    SEPARATE.clear()


def _without_values(model: Any, module: Any, encoder: Encoder, rows: int) -> Iterator[Replacement]:
    """In the place of what looks at values that meta tensors have not."""
    for submodule in model.modules():
        if hasattr(submodule, "fullatt_block_indexes"):
            windows = _Windows(module.ALL_ATTENTION_FUNCTIONS)
            yield module, "ALL_ATTENTION_FUNCTIONS", windows
            for index, block in enumerate(submodule.blocks):
                if index not in submodule.fullatt_block_indexes:
                    yield block.attn, "forward", partial(windows.attend, block.attn.forward)
        if hasattr(submodule, "_deepstack_process"):
            yield submodule, "_deepstack_process", partial(_deepstack, rows)
        if encoder.masked_pixels and hasattr(submodule, "connector"):
            yield submodule, "get_image_features", partial(_idefics_features, submodule)
    if encoder.masked_pixels:
        yield module, "create_bidirectional_mask", nothing  # what a mask of ones becomes
    if encoder.joined:
        yield module, "torch", _HostNumbers()
    if encoder.positions:
        yield from _padded_frames(model, module, encoder)


def _padded_frames(model: Any, module: Any, encoder: Encoder) -> Iterator[Replacement]:
    """What Gemma 4's encoder and model ask of the padding's values: which averages are whole, how many of each picture,
    and the picture's places in the sequence, which they count by copying them."""
    inner = next(submodule for submodule in model.modules() if hasattr(submodule, "embed_vision"))
    pooler = inner.vision_tower.pooler
    pool = pooler.forward

    def pooled(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        hidden, _ = pool(*args, **kwargs)
        rows = torch.zeros(hidden.shape[0] * encoder.tokens, dtype=torch.int64, device=hidden.device)
        return hidden, (rows, rows.clone())

    def mask(config: Any, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        if not encoder.model.layer_kinds[0].attention.padded:  # type: ignore[union-attr]
            return None
        frames, patches = inputs_embeds.shape[:2]
        return torch.ones((frames, 1, patches, patches), dtype=torch.bool, device=inputs_embeds.device)

    def features(pixels: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> Any:
        output = inner.vision_tower(pixel_values=pixels, pixel_position_ids=positions)
        output.pooler_output = inner.embed_vision(inputs_embeds=output.last_hidden_state).split(encoder.tokens)
        return output

    yield pooler, "forward", pooled
    yield inner, "get_image_features", features
    yield module, "create_bidirectional_mask", mask
    yield module, "torch_compilable_check", nothing
    yield torch.fx.experimental._config, "meta_nonzero_assume_all_nonzero", True


def _moved(function: Any, device: torch.device) -> Any:
    """The same function with its tensors on `device`, but for lengths, which are asked for their values."""

    def on_device(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            outputs = function(*args, **kwargs)
        if isinstance(outputs, torch.Tensor):
            return outputs.to(device)
        return tuple(tensor if tensor.dtype is torch.int32 else tensor.to(device) for tensor in outputs)

    return on_device


class _Windows:
    """transformers' attention functions, by which a layer whose patches attend within windows attends to all windows of
    one length in one call: as many bytes and products as in hundreds of calls, in a hundredth of the time."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self._lengths: list[int] = []

    def attend(self, forward: Any, hidden: torch.Tensor, cu_seqlens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`forward` of a layer's attention, the windows between the edges `cu_seqlens` in the order of their lengths.

        Source: transformers 5.23 `Qwen2_5_VLVisionAttention.forward`: flash attention takes all windows in one call,
        others one after another.
        """
        with _disable_current_modes():
            counts = Counter(cu_seqlens.diff().tolist())
            edges = torch.tensor([0, *accumulate(length * num for length, num in counts.items())], dtype=torch.int32)
        self._lengths = list(counts)
        output: torch.Tensor = forward(hidden, cu_seqlens=edges, **kwargs)
        return output

    def get_interface(self, name: str, default: Any) -> Any:
        """transformers' function of that name; within `attend` with a window for each row."""
        function = self._functions.get_interface(name, default)

        def within(module: Any, *states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, Any]:
            if not self._lengths:
                output: tuple[torch.Tensor, Any] = function(module, *states, **kwargs)
                return output
            length = self._lengths.pop(0)
            rows = [tensor[0].unflatten(1, (-1, length)).transpose(0, 1) for tensor in states]
            if name == "sdpa":
                SEPARATE.add(tuple(rows[0].shape))
            attended, weights = function(module, *rows, **kwargs)
            return attended.flatten(0, 1)[None], weights

        return within


def _deepstack(rows: int, hidden: torch.Tensor, places: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Qwen3-VL's addition of inner features to the pictures' `rows`, without a look at where they are.

    Source: transformers 5.23 `Qwen3VLTextModel._deepstack_process`.
    """
    features = features.to(hidden.device, hidden.dtype)
    hidden = hidden.clone()
    local = hidden.view(-1, hidden.shape[-1])[:rows].clone() + features
    hidden.view(-1, hidden.shape[-1])[:rows] = local
    return hidden


class _HostNumbers:
    """torch, but the sizes of pictures stay on the host, where the code asks for their values."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def as_tensor(values: Any, device: Any = None) -> torch.Tensor:
        with _disable_current_modes():
            return torch.as_tensor(values)


def _idefics_features(model: Any, pixels: torch.Tensor, mask: torch.Tensor, **kwargs: Any) -> Any:
    """The features of pictures of which none is padding.

    Source: transformers 5.23 `Idefics3Model.get_image_features`, SmolVLM's is the same.
    """
    samples, frames = pixels.shape[:2]
    pixels = pixels.to(model.dtype).flatten(0, 1)
    pixels = pixels.clone()  # the frames that are no padding
    mask = mask.flatten(0, 1).clone()
    patch = model.config.vision_config.patch_size
    grid = mask.unfold(1, patch, patch).unfold(2, patch, patch)
    seen = (grid.sum(dim=(-1, -2)) > 0).bool()
    output = model.vision_model(pixel_values=pixels, patch_attention_mask=seen, return_dict=True)
    features = model.connector(output.last_hidden_state)
    output.pooler_output = [sample.reshape(-1, sample.shape[-1]) for sample in features.split([frames] * samples)]
    return output


def deep_layers(setup: TrainSetup, config: Any) -> int:
    """Decoder layers at the start that are given features of the encoder's inner layers, and so behave otherwise."""
    if setup.images is None:
        return 0
    return len(config.vision_config.to_dict().get("deepstack_visual_indexes") or ())
