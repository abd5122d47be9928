"""Copies of the catalogue's models that others publish: the original's layers, in the type that the name says."""

import pytest

from planner.models import catalogue, copies
from planner.models.stored import stored_bits


@pytest.mark.parametrize(
    ("name", "original", "bits"),
    [
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "meta-llama/Llama-3.1-8B", "nf4-double"),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B", "nf4-double"),
        ("unsloth/mistral-7b-v0.3-bnb-4bit", "mistralai/Mistral-7B-v0.3", "nf4-double"),
        ("NousResearch/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B", ""),
    ],
)
def test_a_copy_has_its_originals_layers(name: str, original: str, bits: str) -> None:
    copy, plain = copies.load(name), catalogue.load(original)
    assert copy is not None
    assert plain is not None
    assert (copy.model_id, copy.layer_kinds, copy.num_params) == (plain.model_id, plain.layer_kinds, plain.num_params)
    assert stored_bits(copy) == bits


@pytest.mark.parametrize(
    "name",
    ["someone/Llama-3.1-8B-bnb-4bit", "unsloth/Llama-3.1-8B-unsloth-bnb-4bit", "unsloth/no-such-bnb-4bit", "gpt2"],
)
def test_no_other_name_is_a_copy(name: str) -> None:
    """Of a "dynamic" copy its config.json alone says which layers are in 4 bits."""
    assert copies.load(name) is None
