"""Which attention kernel runs where: the rules of PyTorch's SDPA, by card, data type, mask and head layout."""

from typing import Any

import pytest

from planner.gpus import find_gpu
from planner.kernels import attention_kernel, masked, missing_kernels, supported_attentions
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


def load(name: str) -> ModelSpec:
    spec = catalogue.load(name)
    assert spec is not None
    return spec


def kernel(name: str, gpu: str, dtype: str, **setup: object) -> str:
    model = load(name)
    attention = model.layer_kinds[0].attention
    assert attention is not None
    return attention_kernel(model, TrainSetup(**setup), find_gpu(gpu), attention, dtype)


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "setup", "expected"),
    [
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {}, "flash"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "fp32", {}, "math"),  # grouped heads are not expanded
        ("meta-llama/llama-2-7b-hf", "a100-80gb", "fp32", {}, "efficient"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {"packing": True}, "efficient"),  # a mask
        ("meta-llama/llama-2-7b-hf", "t4", "fp16", {}, "efficient"),
        ("meta-llama/llama-2-7b-hf", "t4", "bf16", {}, "math"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {"attention": "eager"}, "eager"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {"attention": "flash-attention-2"}, "flash"),
        ("google/gemma-2-2b", "a100-80gb", "bf16", {}, "eager"),  # the class has no SDPA path
        ("tiiuae/falcon-7b", "a100-80gb", "bf16", {}, "math"),  # always masked, one key head
        ("tiiuae/falcon-40b", "a100-80gb", "bf16", {}, "efficient"),  # always masked, keys repeated
        ("deepseek-ai/deepseek-v3", "a100-80gb", "bf16", {}, "efficient"),  # head sizes 192 and 128 differ
    ],
)
def test_attention_kernel_follows_sdpa(
    model: str, gpu: str, dtype: str, setup: dict[str, object], expected: str
) -> None:
    assert kernel(model, gpu, dtype, **setup) == expected


def test_masked_when_packed_or_the_window_is_no_longer_than_the_sequence() -> None:
    """transformers skips the mask only where the keys are fewer than the window (`_ignore_causal_mask_sdpa`)."""
    attention = next(
        layer.attention
        for layer in load("google/gemma-3-1b-it").layer_kinds
        if layer.attention is not None and layer.attention.window_tokens == 512
    )
    assert not masked(TrainSetup(seq_len_tokens=511), attention)
    assert masked(TrainSetup(seq_len_tokens=512), attention)
    assert masked(TrainSetup(seq_len_tokens=256, packing=True), attention)


def test_supported_attentions_follow_the_class_and_the_card() -> None:
    llama, t4, a100 = load("meta-llama/llama-3.1-8b"), find_gpu("t4"), find_gpu("a100-80gb")
    assert supported_attentions(llama, a100) == ("sdpa", "flash-attention-2", "eager")
    assert supported_attentions(llama, t4) == ("sdpa", "eager")
    assert supported_attentions(load("google/gemma-2-2b"), a100) == ("flash-attention-2", "eager")
    assert supported_attentions(load("bigscience/bloom-560m"), a100) == ("eager",)


def test_apple_gpus_train_with_the_math_kernel() -> None:
    """PyTorch's `_fused_sdp_choice_mps` chooses math for every shape."""
    assert kernel("meta-llama/llama-3.1-8b", "apple-m3-max", "bf16") == "math"
    assert kernel("meta-llama/llama-2-7b-hf", "apple-m2-ultra", "fp32") == "math"
    assert kernel("meta-llama/llama-2-7b-hf", "apple-m2-ultra", "bf16", attention="eager") == "eager"


@pytest.mark.parametrize(
    ("gpu", "setup", "word"),
    [
        ("apple-m3-max", {"optimizer": "paged-adamw-8bit"}, "bitsandbytes"),
        ("apple-m3-max", {"optimizer": "lion-8bit"}, "bitsandbytes"),
        ("apple-m3-max", {"loss": "liger"}, "Triton"),
        ("apple-m3-max", {"optimizer": "adamw-fused", "loss": "chunked"}, ""),
        ("p100", {"loss": "liger"}, "Triton"),
        ("t4", {"attention": "flash-attention-2"}, "flash-attention 2"),
        ("a100-80gb", {"attention": "flash-attention-2"}, ""),
        ("p100", {"optimizer": "paged-adamw-8bit"}, ""),
        ("t4", {"loss": "liger"}, ""),
        ("mi300x", {"loss": "liger", "optimizer": "paged-adamw-8bit"}, ""),
    ],
)
def test_what_has_no_kernel_on_a_card_is_named(gpu: str, setup: dict[str, Any], word: str) -> None:
    reason = missing_kernels(find_gpu(gpu), TrainSetup(**setup))
    assert word in reason
    assert bool(reason) == bool(word)
