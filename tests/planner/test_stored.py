"""Checkpoints that are published quantized: loaded in 16 bits by every file, never quantized a second time."""

import pytest
import yaml

from planner.core.errors import UsageError
from planner.frameworks.exporters import EXPORTERS
from planner.hardware.gpus import find_gpu
from planner.memory.states import weight_bytes
from planner.models import catalogue
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.models.stored import dequantizing_class, stored_method
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.planning.space import dimension_values
from planner.setup import TrainSetup
from tests.planner.helpers import loaded, planned
from tests.planner.launch_sweep import request

STORED = {"openai/gpt-oss-20b": "mxfp4", "openai/gpt-oss-120b": "mxfp4", "deepseek-ai/DeepSeek-V3": "fp8"}
LORA = TrainSetup(attention="eager", loss="full")


def test_the_catalogue_says_which_models_are_published_quantized() -> None:
    methods = {
        entry.model_id: method for entry in catalogue.entries() if (method := stored_method(loaded(entry.model_id)))
    }
    assert methods == STORED


@pytest.mark.parametrize("name", STORED)
def test_every_file_loads_them_dequantized_or_is_refused(name: str) -> None:
    model = loaded(name)
    wanted = dequantizing_class(model)
    assert wanted in ("Mxfp4Config", "FineGrainedFP8Config")
    script = EXPORTERS["hf"](request(LORA, model=model)).files[0].text
    assert f"quantization = {wanted}(\n    dequantize=True," in script
    assert "quantization_config=quantization" in script
    values = yaml.safe_load(EXPORTERS["axolotl"](request(LORA, model=model)).files[0].text)
    assert values["model_quantization_config"] == wanted
    assert values["model_quantization_config_kwargs"] == {"dequantize": True}
    trl = EXPORTERS["trl"](request(LORA.replace(loss="chunked"), model=model)).refused
    assert wanted in trl  # YAML holds no object of a class, and transformers compares classes
    assert "hf target" in trl
    assert "conversions of its own" in EXPORTERS["unsloth"](request(LORA, model=model)).refused


def test_llama_factory_forces_a_kernel_without_gradients_of_sinks() -> None:
    """LLaMA-Factory 0.9.5 model_utils/attention.py takes vllm-flash-attn3 for gpt_oss whatever flash_attn says."""
    assert "attention sinks" in EXPORTERS["llamafactory"](request(LORA, model=loaded("openai/gpt-oss-20b"))).refused
    other = EXPORTERS["llamafactory"](request(LORA, model=loaded("deepseek-ai/DeepSeek-V3"))).refused
    assert "attention sinks" not in other


@pytest.mark.parametrize("name", STORED)
def test_they_are_never_planned_with_a_quantized_base(name: str) -> None:
    model, gpu = loaded(name), find_gpu("h100-sxm")
    assert dimension_values(PlanRequest().workload(model, gpu))["method"] == ("full", "lora")
    with pytest.raises(UsageError, match="cannot quantize again"):
        dimension_values(PlanRequest(fixed={"method": ["qlora"]}).workload(model, gpu))
    qlora = LORA.replace(method="qlora", quantization="nf4-double")
    assert any("cannot run" in note for note in predict(model, gpu, qlora).notes)
    assert any("loaded dequantized" in note for note in predict(model, gpu, LORA).notes)
    for target in ("trl", "hf", "axolotl", "llamafactory", "unsloth"):
        assert EXPORTERS[target](request(qlora, model=model)).refused


def test_memory_counts_the_experts_in_16_bits() -> None:
    """20.9 B parameters: 38.96 GiB of bf16 weights, not the 12.8 GiB of the published file."""
    model = loaded("openai/gpt-oss-20b")
    terms = predict(model, find_gpu("h100-sxm"), LORA).terms
    weights = sum(term.size_bytes for term in terms if term.name.startswith("weights"))
    assert weights == pytest.approx(2 * model.num_params, rel=1e-3)


DYNAMIC = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_skip_modules": [
        "lm_head",
        "model.layers.1.mlp",
        "model.layers.2.self_attn.o_proj",
        "multi_modal_projector",
    ],
}
"""A "dynamic" checkpoint's own list (unsloth/DeepSeek-R1-Distill-Llama-8B-unsloth-bnb-4bit names one MLP so:
https://github.com/vllm-project/vllm/pull/12974), and one matrix more."""


def published(name: str, stored: dict[str, object]) -> ModelSpec:
    config = {**loaded(name).config, "quantization_config": stored}
    return spec_from_config(config, model_id=f"{name}-bnb-4bit", source="a test")


def test_what_a_4_bit_checkpoint_keeps_in_16_bits_weighs_16_bits() -> None:
    """Llama-3-8B: one MLP of 3 x 4096 x 14336 and one matrix of 4096 x 4096, at 2 bytes instead of 4.127 bits."""
    plain = published("meta-llama/Llama-3.1-8B", {**DYNAMIC, "llm_int8_skip_modules": ["lm_head"]})
    dynamic = published("meta-llama/Llama-3.1-8B", DYNAMIC)
    setup = TrainSetup(method="qlora", quantization="nf4-double")
    more = weight_bytes(dynamic, setup)["layers"] - weight_bytes(plain, setup)["layers"]
    weights = 3 * 4096 * 14336 + 4096 * 4096
    assert more == pytest.approx(weights * (2 - 4.127 / 8), rel=1e-3)
    assert dynamic.num_params == plain.num_params
    assert len(dynamic.layer_kinds) == 3
    assert [index for index, kind in enumerate(dynamic.layer_order) if kind] == [1, 2]
    assert weight_bytes(plain, setup) == weight_bytes(loaded("meta-llama/Llama-3.1-8B"), setup)


def test_a_name_is_no_part_of_a_number() -> None:
    """ "model.layers.1.mlp" leaves layers 10 to 19 alone."""
    dynamic = published("meta-llama/Llama-3.1-8B", DYNAMIC)
    assert dynamic.layer_order[10] == dynamic.layer_order[0]


def test_a_4_bit_checkpoint_is_planned_as_what_it_is() -> None:
    model = published("meta-llama/Llama-3.1-8B", DYNAMIC)
    plan = planned(PlanRequest().workload(model, find_gpu("h100-sxm")))
    assert plan.chosen.setup.quantization == "nf4-double"
    assert any("3 % of its matrices in 16 bits" in note for note in plan.chosen.formula.notes)
    with pytest.raises(UsageError, match="loads as that"):
        dimension_values(PlanRequest(fixed={"method": ("lora",)}).workload(model, find_gpu("h100-sxm")))
    assert "16-bit copy" in EXPORTERS["hf"](request(LORA, model=model)).refused


def test_a_base_of_which_nothing_is_quantized_is_not_planned_quantized() -> None:
    """Falcon's layers are a class of its own, which bitsandbytes leaves in 16 bits."""
    falcon, gpu = loaded("tiiuae/falcon-7b"), find_gpu("rtx-4090")
    assert dimension_values(PlanRequest().workload(falcon, gpu))["quantization"] == ("none",)
    with pytest.raises(UsageError, match="quantizes no matrix of falcon"):
        dimension_values(PlanRequest(fixed={"method": ("qlora",)}).workload(falcon, gpu))


@pytest.mark.parametrize("names", [None, "lm_head", [], [1, None, ""], ["(a+)+$"] * 6000])
def test_a_strange_list_is_no_list(names: object) -> None:
    model = published("meta-llama/Llama-3.1-8B", {**DYNAMIC, "llm_int8_skip_modules": names})
    assert model.layer_kinds == loaded("meta-llama/Llama-3.1-8B").layer_kinds


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"bits": 4, "group_size": 64},  # MLX
    ],
    ids=lambda stored: stored.get("quant_method", "mlx"),
)
def test_no_file_names_a_checkpoint_that_loads_packed(stored: dict[str, object]) -> None:
    """The plan is of 16-bit weights; the file would load others, by a package that nothing installs."""
    config = {**loaded("meta-llama/Llama-3.2-1B").config, "quantization_config": stored}
    model = spec_from_config(config, model_id="./packed", source="a test")
    for target in ("trl", "hf", "axolotl", "llamafactory", "unsloth"):
        assert "name the original model" in EXPORTERS[target](request(LORA, model=model)).refused
