"""Structures of layers: what two models share whose layers differ in sizes alone; the one's numbers as the other's.

A decoder whose sizes share no factor is run once (`tools.build_profiles --structures`): every dimension of its
operators and every allocation then says which sizes it is a product of, and is worked out anew for another model.
"""

import hashlib
import json
import math
from collections.abc import Mapping

from planner.models.spec import ModelSpec
from planner.models.targets import num_lora_params
from planner.options.losses import TRL_VOCAB_CHUNK

FEWEST_OUTSIDE_LAYERS = -6
"""Modules, tensors in lists or calls that come beside those of every layer: so many fewer, or up to as many more as a
model has layers (37 were run: up to 30, five lists of what five other modules have)."""
_LOADED = "bitsandbytes"
"""Whose packed weights are what loading in 4 or 8 bits makes of 16-bit ones."""
Sizes = dict[str, int]


def structure_of(model: ModelSpec) -> str | None:
    """16 hexadecimal digits that stand for a model's layers whatever their sizes; None where they are not all alike, or
    are none of plain attention and one MLP or as many experts."""
    return model.once("structure of layers", _structure_of)


def _structure_of(model: ModelSpec) -> str | None:
    packed = model.config.get("quantization_config") or {}
    method = packed.get("quant_method") or _LOADED if isinstance(packed, Mapping) else "another"
    if len(model.layer_kinds) != 1 or model.num_layers < 2 or method != _LOADED:
        return None  # also where weights are stored packed otherwise than they are loaded
    layer = model.layer_kinds[0]
    attention, mlp = layer.attention, layer.mlp
    if attention is None or attention.kind != "softmax" or mlp is None or layer.cross_attention:
        return None
    if attention.softcap or attention.sinks or attention.value_head_dim != attention.head_dim:
        return None
    whole, rest = divmod(model.vocab_size, TRL_VOCAB_CHUNK)
    config = model.config
    signature = [
        model.model_type, config.get("tie_word_embeddings"), whole, rest > 0, mlp.kind, mlp.activation,
        attention.num_heads > attention.num_kv_heads, attention.rotary, attention.rotary_fraction,
        attention.head_dim <= 128, layer.parallel_residual, layer.path, config.get("attention_dropout", 0) or 0,
        [(linear.name, linear.role, linear.bias, linear.num) for linear in layer.linears],
        [(norm.name, norm.kind, norm.bias, norm.weight) for norm in layer.norms],
    ]  # fmt: skip
    signature += [mlp.num_experts, mlp.num_active_experts, mlp.gated_experts] if mlp.num_experts else []
    rarer = {
        "window": attention.window_tokens is not None,  # a program is of samples that one holds
        "shared expert": mlp.shared_intermediate_size > 0,
        "norms behind": not config.get("do_layer_norm_before", True),
        "narrow embeddings": config.get("word_embed_proj_dim", model.hidden_size) != model.hidden_size,
    }
    signature += [name for name, there in rarer.items() if there]
    return hashlib.sha256(json.dumps(signature).encode()).hexdigest()[:16]


def sizes_of(model: ModelSpec) -> Sizes:
    """What a structure's numbers are products and sums of."""
    layer = model.layer_kinds[0]
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None
    assert mlp is not None
    pairs = sum(linear.in_features + linear.out_features for linear in layer.linears if linear.role in ("q", "v"))
    heads, groups = attention.num_kv_heads, attention.num_heads // attention.num_kv_heads
    return {
        "hidden": model.hidden_size, "embedding": model.config.get("word_embed_proj_dim", model.hidden_size),
        "intermediate": mlp.intermediate_size, "head": attention.head_dim,
        "kv heads": heads, "groups": groups, "shared": mlp.shared_intermediate_size,
        "vocabulary": model.vocab_size, "layers": model.num_layers,
        "rest": model.vocab_size % TRL_VOCAB_CHUNK, "weights": model.num_params,
        "adapters: all": num_lora_params(model, "all-linear", 1),
        "adapters: attention": num_lora_params(model, "attention", 1),
        "adapters: queries and values": model.num_layers * pairs,
        "queries, keys and values": (attention.num_heads + 2 * heads) * attention.head_dim,
    }  # fmt: skip


_SUMS = (
    "weights", "vocabulary", "rest", "adapters: all", "adapters: attention", "adapters: queries and values",
    "queries, keys and values",
)  # fmt: skip
_WITH_WIDTH = (("vocabulary", "hidden"), ("vocabulary", "embedding"), ("queries, keys and values", "hidden"))
_LEAST = 14
"""Powers of two that the smallest share of a size is below it."""
_NEARLY = 0.01
"""Rows of features that are so much more: of a tile of the loss and what a last one has beside."""
_FACTORS = ("hidden", "embedding", "intermediate", "head", "kv heads", "groups", "shared")


def _odd(number: int) -> int:
    while number and number % 2 == 0:
        number //= 2
    return number


class Resizer:
    """Numbers of one model as another's.

    Args:
        source: sizes of the model that was run, each with an odd factor that no other has; of one group there is none.
    """

    def __init__(self, source: Mapping[str, int], other: Mapping[str, int]) -> None:
        self._source, self._target = source, other
        self._tags = [(name, tag) for name in _FACTORS if (tag := _odd(source.get(name, 1))) > 1]

    def size(self, number: float) -> float:
        """A dimension, or the factor of one."""
        for name in _SUMS:
            if source_size := self._source.get(name):
                ratio = number / source_size
                if 2**-_LEAST <= ratio <= 8 and _is_power(ratio):
                    return self._target[name] * ratio
        rest, factor = self._divided(number * 2**_LEAST)  # also of packed weights, two of them a byte, and of scales
        either = _is_power(rest) or _is_power(rest / 3)  # queries, keys and values of as many heads are three
        return rest * factor / 2**_LEAST if either else number

    def product(self, number: float) -> float:
        """Bytes, or their factor: also a matrix with the vocabulary or of queries, keys and values together, and a
        product with what no size has (experts, constants)."""
        for name, across in _WITH_WIDTH:
            if across in self._source and _is_power(ratio := number / (self._source[name] * self._source[across])):
                return self._target[name] * self._target[across] * ratio
        resized = self.size(number)
        if resized != number:
            return resized
        rest, factor = self._divided(number)
        width, constant = number / self._source["hidden"], _is_power(number) or _is_power(number / 3)
        if factor == 1.0 and width > 0 and not constant and abs(width / 2.0 ** round(math.log2(width)) - 1) < _NEARLY:
            factor = self._target["hidden"] / self._source["hidden"]
        return rest * factor

    def _divided(self, number: float) -> tuple[float, float]:
        """A number without the sizes that it is a product of, and by how much those are more of the other model."""
        rest, factor = number, 1.0
        for name, tag in self._tags:
            while rest % tag == 0:
                rest, factor = rest / tag, factor * self._target[name] * tag / self._source[name]
        return rest, factor

    def count(self, number: int) -> int:
        """How many there are of something in all layers and beside them."""
        layers = self._source["layers"]
        each, extra = divmod(number - FEWEST_OUTSIDE_LAYERS, layers)
        return each * self._target["layers"] + extra + FEWEST_OUTSIDE_LAYERS


def _is_power(ratio: float) -> bool:
    """Of two."""
    numerator, denominator = float(ratio).as_integer_ratio()
    return numerator & (numerator - 1) == 0 and denominator & (denominator - 1) == 0


_LENGTH_DECIDES = ("longrope", "dynamic", "su")
"""Rotary scalings whose angles depend on the sample's length.

Source: transformers 5.23 `modeling_rope_utils.dynamic_rope_update`; "su" is longrope's older name."""


def changes(model: ModelSpec) -> list[int]:
    """Lengths from which on a model does otherwise, rising: of its windows, and where its rotary angles change."""
    lengths = {layer.attention.window_tokens for layer in model.layer_kinds if layer.attention is not None} - {None}
    text = model.config.get("text_config") or model.config
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) in _LENGTH_DECIDES:
        ends = {section.get("original_max_position_embeddings") for section in (text, scaling)}
        lengths |= {int(length) + 1 for length in ends if length}
    return sorted(length for length in lengths if length)
