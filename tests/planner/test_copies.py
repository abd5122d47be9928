"""Copies of the catalogue's models that others publish: the original's layers, in the type that the name says."""

import pytest

from planner.core.errors import UnknownModelError
from planner.models import catalogue, copies
from planner.models.resolve import resolve_model
from planner.models.stored import stored_bits
from planner.models.targets import num_lora_params


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("name", "original", "bits"),
    [
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "meta-llama/Llama-3.1-8B", "nf4-double"),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B", "nf4-double"),
        ("unsloth/mistral-7b-v0.3-bnb-4bit", "mistralai/Mistral-7B-v0.3", "nf4-double"),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "Qwen/Qwen3-14B", "nf4-double"),
        ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", "openai/gpt-oss-20b", "nf4-double"),
        ("unsloth/gpt-oss-20b", "openai/gpt-oss-20b", ""),
        ("NousResearch/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B", ""),
        ("unsloth/tinyllama-bnb-4bit", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "nf4-double"),
        ("unsloth/DeepSeek-R1-0528-Qwen3-8B", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", ""),
        ("unsloth/functiongemma-270m-it", "google/functiongemma-270m-it", ""),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507", ""),
        ("unsloth/Qwen3-VL-8B-Thinking-unsloth-bnb-4bit", "Qwen/Qwen3-VL-8B-Instruct", "nf4-double"),
    ],
)
def test_a_copy_has_its_originals_layers(name: str, original: str, bits: str) -> None:
    copy, plain = resolve_model(name), catalogue.load(original)
    assert (copy.model_id, copy.layer_kinds, copy.num_params) == (name, plain.layer_kinds, plain.num_params)
    assert original.rpartition("/")[2].lower() in copy.taken_as.lower()
    assert ("in 4 bits" in copy.taken_as) == bool(bits)
    assert copy.taken_as.endswith(copies.DYNAMIC_MORE) == name.endswith(copies.DYNAMIC)
    assert stored_bits(copy) == bits


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("unsloth/Phi-4", "llama"),
        ("unsloth/phi-4-unsloth-bnb-4bit", "llama"),
        ("unsloth/Phi-3.5-mini-instruct", "llama"),
        ("unsloth/Phi-3-medium-4k-instruct-bnb-4bit", "llama"),
        ("unsloth/Phi-4-mini-instruct", "phi3"),
    ],
)
def test_unsloths_phi_has_llamas_layers(name: str, model_type: str) -> None:
    """Its notebook's seven targets of rank 16 are 65,536,000 parameters of Phi-4 (of the fused class o and down)."""
    copy, original = resolve_model(name), catalogue.load(f"microsoft/{copies.plain_name(name)[0].partition('/')[2]}")
    assert (copy.model_type, copy.num_params) == (model_type, original.num_params)
    seven = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    if name.partition("/")[2] == "Phi-4":
        assert num_lora_params(copy, seven, 16) == 65_536_000


def test_of_a_dynamic_copy_a_run_of_its_config_is_not_made_up() -> None:
    """Its config.json alone says which matrices are in 4 bits."""
    assert copies.mirrored("unsloth/Llama-3.1-8B-unsloth-bnb-4bit") == (None, {})


@pytest.mark.parametrize("name", ["someone/Llama-3.1-8B-bnb-4bit", "unsloth/no-such-bnb-4bit"])
def test_no_other_name_is_a_copy(name: str) -> None:
    assert copies.mirrored(name) == (None, {})
    with pytest.raises(UnknownModelError):
        resolve_model(name)


def test_a_copy_that_does_not_say_its_size_is_none_that_is_known() -> None:
    assert copies.mirrored("unsloth/Llama-3.2") == (None, {})
