"""Checkpoints that are published quantized: loaded in 16 bits by every file, never quantized a second time."""

import pytest
import yaml

from planner.cli.wish import workload
from planner.errors import UsageError
from planner.exporters import EXPORTERS
from planner.gpus import find_gpu
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.models.stored import dequantizing_class, stored_method
from planner.predict import predict
from planner.setup import TrainSetup
from planner.space import dimension_values
from tests.planner.launch_sweep import request

STORED = {"openai/gpt-oss-20b": "mxfp4", "openai/gpt-oss-120b": "mxfp4", "deepseek-ai/DeepSeek-V3": "fp8"}
LORA = TrainSetup(attention="eager", loss="full")


def load(name: str) -> ModelSpec:
    spec = catalogue.load(name)
    assert spec is not None
    return spec


def test_the_catalogue_says_which_models_are_published_quantized() -> None:
    found = {entry.model_id: method for entry in catalogue.entries() if (method := stored_method(load(entry.model_id)))}
    assert found == STORED


@pytest.mark.parametrize("name", STORED)
def test_every_file_loads_them_dequantized_or_is_refused(name: str) -> None:
    model = load(name)
    wanted = dequantizing_class(model)
    assert wanted in ("Mxfp4Config", "FineGrainedFP8Config")
    script = EXPORTERS["hf"](request(LORA, model=model)).files[0].text
    assert f"quantization = {wanted}(\n    dequantize=True," in script
    assert "quantization_config=quantization" in script
    values = yaml.safe_load(EXPORTERS["axolotl"](request(LORA, model=model)).files[0].text)
    assert values["model_quantization_config"] == wanted
    assert values["model_quantization_config_kwargs"] == {"dequantize": True}
    trl = EXPORTERS["trl"](request(LORA.with_(loss="chunked"), model=model)).refused
    assert wanted in trl  # YAML holds no object of a class, and transformers compares classes
    assert "hf target" in trl
    assert "conversions of its own" in EXPORTERS["unsloth"](request(LORA, model=model)).refused


def test_llama_factory_forces_a_kernel_without_gradients_of_sinks() -> None:
    """LLaMA-Factory 0.9.5 model_utils/attention.py takes vllm-flash-attn3 for gpt_oss whatever flash_attn says."""
    assert "attention sinks" in EXPORTERS["llamafactory"](request(LORA, model=load("openai/gpt-oss-20b"))).refused
    assert not EXPORTERS["llamafactory"](request(LORA, model=load("deepseek-ai/DeepSeek-V3"))).refused


@pytest.mark.parametrize("name", STORED)
def test_they_are_never_planned_with_a_quantized_base(name: str) -> None:
    model, gpu = load(name), find_gpu("h100-sxm")
    assert dimension_values(workload(model, gpu, fixed={}))["method"] == ("full", "lora")
    with pytest.raises(UsageError, match="cannot quantize again"):
        dimension_values(workload(model, gpu, fixed={"method": ["qlora"]}))
    qlora = LORA.with_(method="qlora", quantization="nf4-double")
    assert any("cannot run" in note for note in predict(model, gpu, qlora).notes)
    assert any("loaded dequantized" in note for note in predict(model, gpu, LORA).notes)
    for target in ("trl", "hf", "axolotl", "llamafactory", "unsloth"):
        assert EXPORTERS[target](request(qlora, model=model)).refused


def test_memory_counts_the_experts_in_16_bits() -> None:
    """20.9 B parameters: 38.96 GiB of bf16 weights, not the 12.8 GiB of the published file."""
    model = load("openai/gpt-oss-20b")
    terms = predict(model, find_gpu("h100-sxm"), LORA).terms
    weights = sum(term.size_bytes for term in terms if term.name.startswith("weights"))
    assert weights == pytest.approx(2 * model.num_params, rel=1e-3)
