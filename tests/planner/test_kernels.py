"""Which attention kernel runs where: the rules of PyTorch's SDPA, by card, data type, mask and head layout."""

from dataclasses import replace
from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.frameworks.exporters import EXPORTERS
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import (
    FLASH,
    attention_kernel,
    flash_refusal,
    masked,
    missing_kernels,
    supported_attentions,
)
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.planning.space import dimension_values
from planner.setup import TrainSetup
from tests.planner.helpers import loaded, planned
from tests.planner.launch_sweep import request


def kernel(name: str, gpu: str, dtype: str, **setup: object) -> str:
    model = loaded(name)
    attention = model.layer_kinds[0].attention
    assert attention is not None
    return attention_kernel(model, TrainSetup(**setup), find_gpu(gpu), attention, dtype)


XFORMERS = {"attention": "xformers", "stack": "axolotl", "packing": True, "precision": "fp16-autocast"}


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "setup", "expected"),
    [
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {}, "flash"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "fp32", {}, "math"),  # grouped heads are not expanded
        ("meta-llama/llama-2-7b-hf", "a100-80gb", "fp32", {}, "efficient"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {"packing": True}, "efficient"),  # a mask
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {"uneven": True, "micro_batch_seqs": 2}, "efficient"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {"uneven": True}, "flash"),  # one sequence has no padding
        ("meta-llama/llama-3.1-8b", "t4", "fp16", {"uneven": True, "micro_batch_seqs": 2}, "math"),  # full takes more
        ("meta-llama/llama-2-7b-hf", "t4", "fp16", {}, "efficient"),
        ("meta-llama/llama-2-7b-hf", "t4", "bf16", {}, "math"),
        ("meta-llama/llama-3.1-8b", "t4", "fp16", {}, "math"),
        ("meta-llama/llama-3.1-8b", "t4", "fp16", {"stack": "unsloth"}, "efficient"),  # by xformers, heads repeated
        ("meta-llama/llama-3.1-8b", "t4", "fp32", {"stack": "unsloth"}, "math"),
        ("meta-llama/llama-3.1-8b", "t4", "fp16", XFORMERS, "efficient"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {"attention": "eager"}, "eager"),
        ("meta-llama/llama-3.1-8b", "rx-7900-xtx", "bf16", {}, "flash"),
        ("meta-llama/llama-3.1-8b", "radeon-8060s", "bf16", {"packing": True}, "efficient"),
        ("meta-llama/llama-3.1-8b", "mi100", "bf16", {}, "math"),  # none for gfx908
        ("meta-llama/llama-3.1-8b", "mi100", "bf16", {"stack": "unsloth"}, "math"),
        ("meta-llama/llama-3.1-8b", "rx-9060-xt-16gb", "bf16", {}, "math"),  # experimental, off without the variable
        ("meta-llama/llama-3.1-8b", "rx-7800-xt", "bf16", {"stack": "unsloth"}, "flash"),  # which Unsloth sets
        ("meta-llama/llama-3.1-8b", "arc-a770", "bf16", {}, "math"),
        ("meta-llama/llama-3.1-8b", "arc-b580", "bf16", {}, "flash"),
        ("meta-llama/llama-3.1-8b", "arc-b580", "bf16", {"packing": True}, "math"),  # a mask
        ("meta-llama/llama-3.1-8b", "arc-b580", "fp32", {}, "math"),
        ("meta-llama/llama-3.1-8b", "a100-80gb", "bf16", {"attention": "flash-attention-2"}, "flash"),
        ("google/gemma-2-2b", "a100-80gb", "bf16", {}, "eager"),  # the class has no SDPA path
        ("tiiuae/falcon-7b", "a100-80gb", "bf16", {}, "math"),  # always masked, one key head
        ("tiiuae/falcon-40b", "a100-80gb", "bf16", {}, "efficient"),  # always masked, keys repeated
        ("deepseek-ai/deepseek-v3", "a100-80gb", "bf16", {}, "efficient"),  # head sizes 192 and 128 differ
        ("openai/gpt-oss-20b", "h100-sxm", "bf16", {"attention": "flash-attention-2"}, "flash"),  # sinks, forward only
        ("openai/gpt-oss-20b", "a100-80gb", "bf16", {"attention": "flash-attention-2"}, "eager"),  # no such kernel
    ],
)
def test_attention_kernel_follows_sdpa(
    model: str, gpu: str, dtype: str, setup: dict[str, object], expected: str
) -> None:
    assert kernel(model, gpu, dtype, **setup) == expected


FLASH_2: dict[str, Any] = {"attention": "flash-attention-2"}


def test_flash_attention_checks_the_width_of_every_layer() -> None:
    """Gemma 4: local layers have heads of 256, global ones of 512; flash_api.cpp refuses above 256."""
    gemma, gpu = loaded("google/gemma-4-31B-it"), find_gpu("h100-sxm")
    specs = {layer.attention for layer in gemma.layer_kinds if layer.attention is not None}
    kernels = {
        attention.head_dim: attention_kernel(gemma, TrainSetup(**FLASH_2), gpu, attention, "bf16")
        for attention in specs
    }
    assert kernels == {256: "flash", 512: "eager"}
    assert "head size 256; google/gemma-4-31B-it has layers with 512" in flash_refusal(gemma)
    assert supported_attentions(gemma, gpu) == ("sdpa", "eager")


def test_attention_sinks_need_a_kernel_with_their_gradient() -> None:
    """FA2 has none, vLLM's FA3 forward only; FA4 has it (flash_attn/cute/interface.py _flash_attn_bwd)."""
    oss = loaded("openai/gpt-oss-20b")
    assert [name for name in FLASH if not flash_refusal(oss, name)] == ["flash_attention_4"]
    assert supported_attentions(oss, find_gpu("h100-sxm")) == ("eager",)
    assert "sinks" in missing_kernels(oss, find_gpu("h100-sxm"), TrainSetup(**FLASH_2))


@pytest.mark.parametrize(("model", "attention"), [("google/gemma-4-31B-it", "flash-attention-2"),
                                                  ("openai/gpt-oss-20b", "flash-attention-2"),
                                                  ("google/gemma-2-2b", "sdpa")])  # fmt: skip
def test_an_attention_that_cannot_train_the_model_cannot_be_asked_for(model: str, attention: str) -> None:
    spec, gpu = loaded(model), find_gpu("a100-80gb")
    with pytest.raises(UsageError, match="--attention cannot be kept"):
        dimension_values(PlanRequest(fixed={"attention": [attention]}).workload(spec, gpu))


def test_no_plan_of_the_catalogue_has_an_attention_that_cannot_train_it() -> None:
    for entry in catalogue.entries():
        model = loaded(entry.model_id)
        for gpu in ("t4", "rtx-4090", "h100-sxm"):
            for attention in supported_attentions(model, find_gpu(gpu)):
                assert not missing_kernels(model, find_gpu(gpu), TrainSetup(attention=attention))
        widest = max(layer_attention.head_dim for layer in model.layer_kinds if (layer_attention := layer.attention))
        assert ("flash-attention-2" in supported_attentions(model, find_gpu("h100-sxm"))) == (
            "flash-attention-2" in model.attentions
            and widest <= 256
            and model.model_type not in ("falcon", "gpt_neo", "gpt_oss", "gptj")
        )


def test_masked_when_packed_or_the_window_is_no_longer_than_the_sequence() -> None:
    """transformers skips the mask only where the keys are fewer than the window (`_ignore_causal_mask_sdpa`)."""
    attention = next(
        layer.attention
        for layer in loaded("google/gemma-3-1b-it").layer_kinds
        if layer.attention is not None and layer.attention.window_tokens == 512
    )
    assert not masked(TrainSetup(seq_len_tokens=511), attention)
    assert masked(TrainSetup(seq_len_tokens=512), attention)
    assert masked(TrainSetup(seq_len_tokens=256, packing=True), attention)


def test_supported_attentions_follow_the_class_and_the_card() -> None:
    llama, t4, a100 = loaded("meta-llama/llama-3.1-8b"), find_gpu("t4"), find_gpu("a100-80gb")
    assert supported_attentions(llama, a100) == ("sdpa", "flash-attention-2", "eager")
    assert supported_attentions(llama, t4) == ("sdpa", "eager")
    assert supported_attentions(loaded("google/gemma-2-2b"), a100) == ("flash-attention-2", "eager")
    assert supported_attentions(loaded("bigscience/bloom-560m"), a100) == ("eager",)


def test_apple_gpus_train_with_the_math_kernel() -> None:
    """PyTorch's `_fused_sdp_choice_mps` chooses math for every shape."""
    assert kernel("meta-llama/llama-3.1-8b", "apple-m3-max", "bf16") == "math"
    assert kernel("meta-llama/llama-2-7b-hf", "apple-m2-ultra", "fp32") == "math"
    assert kernel("meta-llama/llama-2-7b-hf", "apple-m2-ultra", "bf16", attention="eager") == "eager"


@pytest.mark.parametrize(
    ("gpu", "setup", "word"),
    [
        ("apple-m3-max", {"optimizer": "paged-adamw-8bit"}, "bitsandbytes"),
        ("apple-m3-max", {"optimizer": "lion-8bit"}, "bitsandbytes"), ("apple-m3-max", {"loss": "liger"}, "Triton"),
        ("apple-m3-max", {"optimizer": "adamw-fused", "loss": "chunked"}, ""), ("p100", {"loss": "liger"}, "Triton"),
        ("t4", {"attention": "flash-attention-2"}, "flash-attention 2"),
        ("a100-80gb", {"attention": "flash-attention-2"}, ""), ("p100", {"optimizer": "paged-adamw-8bit"}, ""),
        ("t4", {"loss": "liger"}, ""), ("mi300x", {"loss": "liger", "optimizer": "paged-adamw-8bit"}, ""),
        ("t4", {"kernels": "liger"}, ""), ("v100-16gb", {"kernels": "fused"}, ""),
        ("p100", {"kernels": "liger"}, "Triton"), ("apple-m3-max", {"kernels": "liger"}, "Triton"),
        ("mi300x", {"kernels": "liger"}, ""), ("mi300x", {"kernels": "fused"}, "NVIDIA"),
        ("rtx-4090", {"kernels": "fused"}, ""),
    ],
)  # fmt: skip
def test_what_has_no_kernel_on_a_card_is_named(gpu: str, setup: dict[str, Any], word: str) -> None:
    reason = missing_kernels(loaded("meta-llama/llama-3.1-8b"), find_gpu(gpu), TrainSetup(**setup))
    assert word in reason
    assert bool(reason) == bool(word)


@pytest.mark.parametrize("target", ["trl", "hf", "axolotl", "llamafactory"])
def test_no_launch_file_names_an_attention_that_cannot_train_the_model(target: str) -> None:
    for entry in {entry.model_type: entry for entry in catalogue.entries()}.values():
        model = loaded(entry.model_id)
        for attention in ("eager", "sdpa", "flash-attention-2"):
            setup = TrainSetup(attention=attention, loss="chunked")
            refused = EXPORTERS[target](request(setup, model=model)).refused
            assert refused or attention in supported_attentions(model, find_gpu("h100-sxm")), (
                entry.model_id,
                attention,
            )


@pytest.mark.parametrize(("card", "suggested"), [("t4", True), ("apple-m2-ultra", False)])
def test_a_card_without_a_kernel_for_grouped_queries_is_told_what_packing_brings(card: str, suggested: bool) -> None:
    """Llama-3.1-8B QLoRA by Axolotl on a T4: 478 tokens/s, of packed rows 638 (`python -m benchmarks.rivals`)."""
    model, gpu = loaded("meta-llama/Llama-3.1-8B"), find_gpu(card)
    notes = predict(model, gpu, TrainSetup(precision="fp16-autocast")).notes
    fallback = next(note for note in notes if "math kernel" in note)
    assert ("--packing" in fallback) == suggested
    packed = predict(model, gpu, TrainSetup(precision="fp16-autocast", packing=True)).notes
    assert any("math kernel" in note for note in packed) != suggested


def test_xformers_is_axolotls_on_cards_before_ampere_with_packed_rows() -> None:
    """Axolotl docs/attention.qmd: recommended for Turing GPUs or below; SDPA has a mask there, or holds scores."""
    model, gpu = loaded("meta-llama/llama-3.1-8b"), find_gpu("t4")
    fixed = {"packing": (True,), "method": ("qlora",)}
    workload = PlanRequest(fixed=fixed, seq_len=2048, global_batch=32, targets=("axolotl",)).workload(model, gpu)
    assert "xformers" in dimension_values(workload)["attention"]
    unpacked = PlanRequest(fixed={"method": ("qlora",)}, targets=("axolotl",)).workload(model, gpu)
    ampere = PlanRequest(fixed=fixed, targets=("axolotl",)).workload(model, find_gpu("rtx-3090"))
    assert not any("xformers" in dimension_values(other)["attention"] for other in (unpacked, ampere))
    by_xformers = TrainSetup(method="qlora", quantization="nf4", **XFORMERS)
    by_sdpa = by_xformers.replace(attention="sdpa")
    unmasked, masked = (predict(model, gpu, setup) for setup in (by_xformers, by_sdpa))
    assert unmasked.peak_device_bytes < masked.peak_device_bytes
    assert unmasked.tokens_per_s > masked.tokens_per_s
    long = planned(PlanRequest(fixed={"packing": (True,)}, seq_len=8192).workload(model, gpu))
    assert (long.chosen.setup.attention, long.chosen.setup.selective_checkpointing) == ("xformers", False)
    files = EXPORTERS["axolotl"](request(by_xformers, model=model)).files
    assert any("attn_implementation: xformers" in file.text for file in files)
    assert "axolotl alone" in EXPORTERS["trl"](request(by_xformers, model=model)).refused


def test_flex_attention_is_for_sinks_and_holds_no_scores() -> None:
    """Unsloth publishes for LoRA of gpt-oss-20b on 80 GB: about 9K tokens by eager attention, 60K by FlexAttention."""
    gpt_oss, gpu = loaded("openai/gpt-oss-20b"), find_gpu("h100-sxm")
    fixed = {"attention": ("flex-attention",)}
    long = planned(PlanRequest(fixed=fixed, seq_len=60_000, global_batch=8).workload(gpt_oss, gpu))
    assert long.chosen.setup.attention == "flex-attention"
    fewer = {"method": ("lora",), "parallel": ("ddp",)}
    of_two = PlanRequest(seq_len=16_384, fixed=fewer).workload(gpt_oss, gpu, make_cluster(gpu, 2))
    refused = plan_workload(of_two)
    assert "--attention flex-attention" in refused.suggestions[0].action
    short = planned(replace(of_two, seq_len_tokens=1024))
    (why,) = (answer.reason for answer in short.tree if answer.question == "Which attention kernel?")
    assert "no gradient of attention sinks" in why
    assert "--attention flex-attention" in why
    with pytest.raises(UsageError, match="attention sinks"):
        plan_workload(PlanRequest(fixed=fixed).workload(loaded("meta-llama/llama-3.1-8b"), gpu))
    launch = EXPORTERS["hf"](request(long.chosen.setup, model=gpt_oss))
    assert any("flex_attention" in file.text for file in launch.files)
