"""A mixture's stacked experts in 4 bits: bytes by hand, where they run, what the file says, who gets it."""

from dataclasses import replace

import pytest

from planner.core.errors import SetupError
from planner.core.units import GIB
from planner.frameworks.exporters import EXPORTERS
from planner.frameworks.readers import read_text
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import missing_kernels
from planner.memory.states import weight_bytes
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan, Plan
from planner.planning.predict import predict
from planner.planning.single_changes import single_changes
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict
from tests.planner.helpers import loaded, plan_request
from tests.planner.launch_sweep import request
from tests.whole import some

QWEN, GPU = "qwen/qwen3-30b-a3b", find_gpu("rtx-4090")
PACKED = TrainSetup(method="qlora", quantization="nf4", quantize_experts=True, lora_targets="attention")


@pytest.mark.parametrize(
    ("model", "gpu", "setup", "words"),
    [
        (QWEN, "rtx-4090", PACKED, ""),
        (QWEN, "mi300x", PACKED, "CUDA"),
        (QWEN, "rtx-4090", PACKED.replace(lora_targets="all-linear"), "--targets attention"),
        ("meta-llama/Llama-3.1-8B", "rtx-4090", PACKED, "no experts"),
    ],
)
def test_what_cannot_run_is_named(model: str, gpu: str, setup: TrainSetup, words: str) -> None:
    reason = missing_kernels(loaded(model), find_gpu(gpu), setup)
    assert words in reason
    assert bool(reason) == bool(words)


@pytest.mark.parametrize("fields", [{"kbit_fp32_cast": True}, {"method": "lora"}])
def test_impossible_combinations_cannot_be_built(fields: dict[str, object]) -> None:
    values = {"method": "qlora", "quantization": "nf4", **fields}
    if values["method"] == "lora":
        values["quantization"] = "none"
    with pytest.raises(SetupError, match="quantize_experts"):
        setup_from_dict({**values, "quantize_experts": True})
    assert "quantize_experts" not in setup_to_dict(TrainSetup())


def test_axolotl_writes_it_and_is_read_back_and_every_other_target_refuses_it_by_name() -> None:
    export_request = request(PACKED.replace(loss="chunked"), model=loaded(QWEN))
    text = EXPORTERS["axolotl"](export_request).files[0].text
    assert "quantize_moe_experts: true" in text
    assert read_text(text, "axolotl.yaml", model=loaded(QWEN)).setup.quantize_experts
    for target in ("trl", "hf", "llamafactory", "unsloth"):
        assert "Axolotl and Loggetta alone" in EXPORTERS[target](export_request).refused
    assert EXPORTERS["torchtitan"](export_request).refused


def test_a_mixture_that_fits_no_other_way_gets_a_plan_with_the_target_that_runs_it() -> None:
    """Published for Qwen3-30B-A3B QLoRA: 17.5 GB (Unsloth)."""
    plan = plan_workload(plan_request(QWEN))
    assert plan.chosen.setup.quantize_experts
    assert plan.workload.targets == ("axolotl",)
    assert plan.notes[0].startswith("nothing fits with the experts in 16 bits; in 4 bits Axolotl alone")
    for options in ({"fixed": {"quantize_experts": (False,)}}, {"targets": ("trl",)}):
        assert isinstance(plan_workload(plan_request(QWEN, **options), helped=False, explained=False), NoPlan)
    two = plan_workload(
        plan_request(QWEN, fixed={"method": ("qlora",), "parallel": ("ddp",)}, cluster=make_cluster(GPU, 2))
    )
    assert two.chosen.setup.quantize_experts
    roomy = plan_workload(plan_request(QWEN, "a100-80gb"), explained=False)
    assert not roomy.chosen.setup.quantize_experts


def test_gpt_oss_is_planned_for_its_sixteen_bit_copy_where_it_does_not_fit() -> None:
    """The published MXFP4 weights do not train and are not quantized again (planner.models.stored)."""
    plan = plan_workload(plan_request("openai/gpt-oss-20b"))
    assert plan.workload.model.model_id == "unsloth/gpt-oss-20b-BF16"
    assert plan.workload.model == loaded("unsloth/gpt-oss-20b-bf16")
    assert plan.workload.targets == ("axolotl",)
    assert plan.chosen.setup.quantize_experts
    assert plan.chosen.verdict == "fits"
    assert "planned for its 16-bit copy unsloth/gpt-oss-20b-BF16" in plan.notes[0]
    asked = plan_workload(plan_request("openai/gpt-oss-20b", fixed={"method": ("qlora",)}))  # as which-cluster asks
    assert asked.chosen == plan.chosen
    roomy = plan_workload(plan_request("openai/gpt-oss-20b", "a100-80gb"), explained=False)
    assert isinstance(roomy, Plan)
    assert roomy.workload.model.model_id == "openai/gpt-oss-20b"
    for card, kind in (("a100-80gb", Plan), ("t4", NoPlan)):  # TRL's command unpacks nothing
        by_trl = plan_workload(plan_request("openai/gpt-oss-20b", card, targets=("trl",)), helped=False)
        assert isinstance(by_trl, kind)
        assert by_trl.workload.model.model_id == "unsloth/gpt-oss-20b-BF16"
        assert "the named target does not unpack: planned for its 16-bit copy" in by_trl.notes[0]
    other = plan_request("openai/gpt-oss-20b")
    refused = plan_workload(replace(other, model=replace(other.model, model_id="./gpt-oss")))
    assert any("16-bit copy" in suggestion.action and suggestion.fits for suggestion in refused.suggestions)


def test_a_larger_card_is_one_on_which_the_experts_fit_in_4_bits() -> None:
    """gpt-oss-120b in 16 bits needs 217 GiB, so B300 alone; its 16-bit copy with 4-bit experts 66, which cheaper ones
    hold."""
    refused = plan_workload(plan_request("openai/gpt-oss-120b"))
    actions = [suggestion.action for suggestion in refused.suggestions if suggestion.action.startswith("--gpu ")]
    assert len(actions) == 2
    for action in actions:
        card = action.split()[1].rstrip(",")
        assert card != "b300"
        assert isinstance(plan_workload(plan_request("openai/gpt-oss-120b", card), explained=False), Plan)


def test_axolotl_holds_stacks_in_fp32_beside_a_quantized_base_and_is_planned_with_them_quantized() -> None:
    """By hand as above. Axolotl's docs: GLM-4.7-Flash takes about 127 GiB so, 23 with quantize_moe_experts."""
    model = loaded(QWEN)
    experts = 48 * 128 * (1536 * 2048 + 2048 * 768)
    plain = PACKED.replace(quantize_experts=False)
    wide = plain.replace(stack="axolotl")
    here, there = (weight_bytes(model, setup)["layers"] for setup in (plain, wide))
    assert there - here == 2 * experts
    cut = wide.replace(parallel="zero3", num_gpus=8)
    assert weight_bytes(model, cut)["layers"] == here
    assert "--quantize-experts" in EXPORTERS["axolotl"](request(plain, model=model)).refused
    assert "fp32" in "".join(predict(model, find_gpu("h200"), wide).notes)
    assert ("experts in nf4 too", PACKED.replace(stack="axolotl"), True) in single_changes(wide, GPU, model)
    plan = plan_workload(plan_request(QWEN, "h200", targets=("axolotl",), fixed={"method": ("qlora",)}))
    assert plan.chosen.setup.quantize_experts


@pytest.mark.parametrize(
    ("name", "gpu", "model", "most_gib"),
    some(
        [
            (
                "openai/gpt-oss-20b",
                "rtx-3060",
                "unsloth/gpt-oss-20b-BF16",
                5,
            ),  # 31 as published, or with 16-bit experts
            ("mistralai/Mixtral-8x22B-v0.1", "rtx-4090", "mistralai/Mixtral-8x22B-v0.1", 55),
        ],
        2,
    ),
)
def test_what_is_missing_is_missing_of_the_nearest_form_of_the_weights(
    name: str, gpu: str, model: str, most_gib: float
) -> None:
    refused = plan_workload(plan_request(name, gpu))
    assert isinstance(refused, NoPlan)
    assert refused.workload.model.model_id == model
    assert refused.nearest.setup.quantize_experts
    assert 0 < refused.missing_bytes < most_gib * GIB
    assert any("host-memory" in each.action for each in refused.suggestions)  # what helps of the published form too
