"""`from_pretrained` of transformers 4, replaced whole: what it builds of a configuration, on the CPU; and pairs."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from probes.phantom.loading import _older
from probes.phantom.texts import columns_of

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 16),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2),
    "vocab_size": 32,
}


def built(cls: Any = LlamaForCausalLM, tied: bool = False, **given: Any) -> Any:
    notes: list[str] = []
    phantom: Any = SimpleNamespace(origins=SimpleNamespace(loads=nullcontext), note=notes.append)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied, dtype="bfloat16")
    model = _older(phantom, cls, "a/model", config=config, **given)
    assert notes == [f"{cls.__name__}: built from its configuration; no weights were read"]
    assert not model.training
    return model


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, torch.float32),
        ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "float16", "low_cpu_mem_usage": True}, torch.float16),
        ({"device_map": "cpu", "torch_dtype": torch.bfloat16, "use_safetensors": True}, torch.bfloat16),
    ],
)
def test_weights_lie_on_the_cpu_in_the_asked_type_and_float32_unless_asked(given: Any, dtype: torch.dtype) -> None:
    model = built(**given)
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("cpu", dtype)}
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())


def test_what_is_tied_stays_tied_and_other_classes_are_built_too() -> None:
    tied = built(tied=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert built().lm_head.weight is not built().model.embed_tokens.weight
    assert built(LlamaForSequenceClassification).score.weight.shape == (2, 16)


@pytest.mark.parametrize("name", ["glue mrpc", "nyu-mll/glue", "SetFit/mrpc"])
def test_one_text_of_a_pair_is_short_as_the_tokenizer_keeps_every_pair_of_what_it_cuts(name: str) -> None:
    row = columns_of(name, 4096)
    assert len(row["sentence2"]) < len(row["sentence1"]) // 8
    assert len(columns_of("sentence-transformers/all-nli", 4096)["sentence2"]) == 8192  # each is tokenized by itself
