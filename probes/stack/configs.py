"""From a raw configuration to transformers' own, and truncated copies of it that keep the pattern of the layers."""

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from planner.models.config_file import with_floats
from planner.models.stored import kept_names
from probes.patching import errors_only

DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LISTS_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "attention_layers", "layers_block_type")
_NOT_PER_LAYER = re.compile(r"^_|token_id|section|shape|mlp_only_layers|moe_layers|cross_attention_layers")
"""Lists that may be as long as there are layers and have another meaning."""
_LISTS_OF_INDICES = ("mlp_only_layers", "moe_layers", "cross_attention_layers")
_NO_TEXT = ("vision", "audio", "visual")


def load_config(config: Mapping[str, Any]) -> Any:
    """transformers' configuration object for a raw `config.json` (fields that begin with "_" are notes of ours)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {key: copy.deepcopy(with_floats(value)) for key, value in config.items() if not key.startswith("_")}
    model_type = raw.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError("the configuration names no model_type")
    kept_modules = kept_names(config)
    raw.pop("quantization_config", None)  # the setup says how weights are stored, not the published checkpoint
    raw.pop("dtype", None)
    raw.pop("torch_dtype", None)
    with errors_only("transformers"):  # not: this value is a legacy one
        loaded = AutoConfig.for_model(model_type, **raw)
    loaded.use_cache = False
    if kept_modules:
        loaded.kept_modules = kept_modules
    if loaded.is_encoder_decoder and not has_audio(loaded) and type(loaded) in AutoModelForCausalLM._model_mapping:
        loaded.is_encoder_decoder, loaded.is_decoder = False, True  # its decoder alone, as that class builds it
    if loaded.is_encoder_decoder and getattr(loaded, "decoder_start_token_id", None) is None:
        loaded.decoder_start_token_id = getattr(loaded, "pad_token_id", None) or 0
    text = loaded.get_text_config()
    text.use_cache = False
    return loaded


def depth_field(text_config: Any) -> str:
    """The name of the field that holds the number of layers, or of the list that has one entry for each.

    Raises:
        ValueError: no field does (a model of several stacks).
    """
    fields = text_config.to_dict()
    mapped = getattr(text_config, "attribute_map", {}).get("num_hidden_layers")
    half = ("decoder_layers", "num_decoder_layers") if getattr(text_config, "is_decoder", False) else ()
    for name in (*half, mapped, *DEPTH_FIELDS, *_LISTS_PER_LAYER):
        if name and fields.get(name) is not None:
            return str(name)
    raise ValueError(f"{text_config.model_type}: no field tells the number of layers")


def num_layers(config: Any) -> int:
    """Layers of the (text) decoder; for an encoder-decoder, of each half together."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return sum(int(getattr(config, name)) for name in _half_fields(config))
    depth = getattr(text, depth_field(text))
    return len(depth) if isinstance(depth, (list, tuple)) else int(depth)


def _half_fields(config: Any) -> tuple[str, str]:
    """The names of the fields that hold the layers of an encoder-decoder's halves.

    Raises:
        ValueError: there are none (halves with configurations of their own).
    """
    for pair in (("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers")):
        if all(isinstance(getattr(config, name, None), int) for name in pair):
            return pair
    raise ValueError(f"{config.model_type}: no fields tell the layers of both halves")


def unequal_halves(config: Any) -> bool:
    """Whether an encoder-decoder's halves have different numbers of layers, so that no pairs can be left out."""
    return bool(config.is_encoder_decoder and len({getattr(config, name) for name in _half_fields(config)}) > 1)


def has_audio(config: Any) -> bool:
    """Whether the model takes sound (`planner.models.spec.FrontEnd`)."""
    return bool(config.is_encoder_decoder and hasattr(config, "num_mel_bins"))


def truncated_config(config: Any, depth: int) -> Any:
    """A deep copy of `config` with its first `depth` layers. See `config_of_layers`.

    Raises:
        ValueError: more layers than the model has, or fewer than one.
    """
    full = num_layers(config)
    if not 1 <= depth <= full:
        raise ValueError(f"depth must be between 1 and {full}, got {depth}")
    if not config.is_encoder_decoder:
        return config_of_layers(config, range(depth))
    short = copy.deepcopy(config)
    if depth < full:
        if depth % 2:
            raise ValueError("an encoder-decoder is truncated by whole pairs of layers")
        for name in _half_fields(config):
            setattr(short, name, min(depth // 2, getattr(config, name)))
    return short


def config_of_layers(config: Any, layers: Sequence[int]) -> Any:
    """A deep copy of a decoder's `config` with some of its layers (ascending), every per-layer list cut alike.

    The caller compares the layers that come out with those of the full model (`layer_signatures`): this function only
    edits fields, it does not know every architecture's rules.
    """
    full = num_layers(config)
    short = copy.deepcopy(config)
    if len(layers) == full:
        return short
    text = short.get_text_config()
    if isinstance(getattr(text, field := depth_field(text)), int):
        setattr(text, field, len(layers))
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == full and not _NOT_PER_LAYER.search(name):
            setattr(text, name, [value[layer] for layer in layers])
    for name in _LISTS_OF_INDICES:
        value = getattr(text, name, None)
        if isinstance(value, (list, tuple)):
            setattr(text, name, [place for place, layer in enumerate(layers) if layer in value])
    if hasattr(text, "attention_types"):  # GPT-Neo's
        text.attention_types = [[[kind], 1] for kind in text.attention_layers]
    overrides = vars(text).get("_heterogeneity_spec")
    if overrides is not None:  # Gemma 4's global layers
        of = overrides.per_layer_overrides
        overrides.per_layer_overrides = {place: of[layer] for place, layer in enumerate(layers) if layer in of}
    dense = getattr(text, "first_k_dense_replace", None)
    if dense:
        text.first_k_dense_replace = sum(layer < dense for layer in layers)
    shared = getattr(text, "num_kv_shared_layers", None)
    if shared:
        text.num_kv_shared_layers = sum(layer >= full - shared for layer in layers)
    return short


def layers_of(model: Any) -> list[Any]:
    """The decoder layers of a built model in order; for an encoder-decoder, encoder then decoder."""
    from torch import nn

    if model.config.is_encoder_decoder:
        parts = [
            getattr(half, "layers", getattr(half, "block", ())) for half in (model.get_encoder(), model.get_decoder())
        ]
        if not all(parts):
            raise ValueError(f"{model.config.model_type}: no list of layers in both halves")
        return [layer for part in parts for layer in part]
    lists: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not any(part in name for part in _NO_TEXT)
    ]
    with suppress(ValueError):
        depth = num_layers(model.config)
        alike = [module for _, module in lists if len(module) == depth]
        if alike:
            return list(alike[0])
    names = {name for name, _ in lists}
    outermost = [module for name, module in lists if not any(name.startswith(f"{other}.") for other in names)]
    if not outermost:
        raise ValueError(f"{model.config.model_type}: no list of layers in the module tree")
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in outermost]
    return list(outermost[sizes.index(max(sizes))])


_SCALARS = (bool, int, float, str, type(None))
_POSITIONS = ("layer_idx", "layer_id", "layer_number")


def layer_signature(layer: Any) -> tuple[Any, ...]:
    """What makes one layer's memory behaviour: classes, shapes and flags of all its modules, its position left out."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        flags = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, _SCALARS) and not key.startswith("_") and key not in _POSITIONS
        )
        shapes = tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False))
        parts.append((name, type(module).__name__, flags, shapes))
    return tuple(parts)


_NUMBERS: dict[tuple[Any, ...], int] = {}


def layer_signatures(model: Any) -> tuple[int, ...]:
    """One number per layer in order; equal numbers mean layers that behave alike."""
    return tuple(_NUMBERS.setdefault(layer_signature(layer), len(_NUMBERS)) for layer in layers_of(model))


def period_of(signatures: tuple[int, ...]) -> tuple[int, int]:
    """(prefix, period): after `prefix` layers the rest repeats every `period` layers; the shortest such pair.

    A suffix that breaks the pattern makes the period as long as the rest, and the caller then runs full depth.
    """
    total = len(signatures)
    best = (0, total)
    for prefix in range(min(total, 8)):
        rest = signatures[prefix:]
        for period in range(1, len(rest) + 1):
            if all(rest[i] == rest[i - period] for i in range(period, len(rest))):
                if prefix + period < sum(best):
                    best = (prefix, period)
                break
    return best
