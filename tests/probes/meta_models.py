"""Real models of transformers built on meta from a configuration: no weights, no GPU, well under a second."""

import copy
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

from planner.models import catalogue
from planner.models.spec import READ_BOTH_WAYS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


HALVES = ("encoder_layers", "decoder_layers")
INITIALISERS = ("kaiming_uniform_", "normal_", "uniform_", "zeros_", "ones_")
"""On meta there is nothing to set, but each is computed."""


def auto_config(given: Mapping[str, Any]) -> Any:
    """The configuration object that transformers makes of a config.json."""
    config = copy.deepcopy(dict(given))  # AutoConfig changes nested dicts
    model_type = config.pop("model_type")
    return transformers.AutoConfig.for_model(model_type, **config)


def of_causal_types() -> tuple[catalogue.CatalogueEntry, ...]:
    """The catalogue's models that predict next tokens by a class of their type's own: the trees of the others, encoders
    and what sees, are held against transformers in test_module_tree.py."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "t5", "whisper"} - READ_BOTH_WAYS
    return tuple(entry for entry in catalogue.entries() if entry.model_type in names)


def build_on_meta(given: Mapping[str, Any]) -> "torch.nn.Module":
    """What AutoModelForCausalLM (or Seq2Seq) builds from the configuration."""
    config = auto_config(given)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    if config.model_type == "whisper":
        auto = transformers.AutoModelForSpeechSeq2Seq
    unset: dict[str, Any] = dict.fromkeys(INITIALISERS, lambda tensor, *_, **__: tensor)
    with torch.device("meta"), mock.patch.multiple(torch.nn.init, **unset):
        return auto.from_config(config)


def shallow(config: Mapping[str, Any], num_layers: int = 4) -> dict[str, Any]:
    """The same model with fewer layers, its pattern of layers kept at the beginning."""
    small = copy.deepcopy(dict(config))
    text = small.get("text_config", small)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", *HALVES):
        if name in text:
            text[name] = min(text[name], num_layers)
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:num_layers]
        if small["model_type"] == "gemma4":
            text["layer_types"][-1] = "full_attention"
            text["num_kv_shared_layers"] = 0
    if "attention_types" in text:
        text["attention_types"] = [[["global", "local"], num_layers // 2]]
    for encoder in ("vision_config", "audio_config"):
        if small.get(encoder) and "num_hidden_layers" in small[encoder]:
            small[encoder]["num_hidden_layers"] = 2
    return small
