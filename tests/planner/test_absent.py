"""Names that people know and no plan has are answered with the reason, not with a list of other names."""

import pytest

from finetune_planner.cli.writing import known_targets
from planner.core.errors import PlannerError
from planner.frameworks.exporters import EXPORTERS
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.options.absent import ABSENT
from planner.options.objectives import OBJECTIVES
from planner.planning.answer import plan_workload
from planner.planning.option_values import choices
from planner.planning.plan_request import PlanRequest
from planner.setup import TrainSetup
from planner.setup import allowed as fields

TAKEN = {*OBJECTIVES, *EXPORTERS, *fields.QUANTIZATIONS, *fields.OPTIMIZERS, *fields.ATTENTIONS, *fields.METHODS}


def test_absent_names_are_no_values_of_any_option() -> None:
    assert not TAKEN & set(ABSENT)


@pytest.mark.parametrize(
    ("name", "words", "instead"),
    [
        ("fp8", "10 % in full fine-tuning", "bf16"), ("NVFP4", "16 bits", "nf4-double"),
        ("muon", "what is optimized", "adamw-fused"), ("galore", "what is optimized", "adamw-8bit"),
        ("flash_attention_3", "cuDNN", "sdpa"), ("distillation", "teacher", "sft"), ("Houlsby", "peft", "lora"),
        ("adamw_torchao_8bit", "compile", "adamw-8bit"), ("ScatterMoE", "experts", "quantize-experts"),
        ("SimPO", "CPOTrainer", "orpo"), ("WSD", "neither memory nor speed", "warmup_stable_decay"),
        ("linear probing", "frozen layers", "trained-layers 1"), ("torchtune", "plan check", "axolotl"),
    ],
)  # fmt: skip
def test_an_absent_value_is_refused_with_its_reason_and_what_to_use(name: str, words: str, instead: str) -> None:
    with pytest.raises(PlannerError, match="is not planned") as error:
        choices("option", [name], ["other"])
    assert words in error.value.message
    assert instead in (error.value.hint or "")
    assert "must be one of" not in error.value.message


def test_absent_targets_and_fields_of_a_setup_say_the_same() -> None:
    with pytest.raises(PlannerError, match="nothing here predicts its step"):
        known_targets(["megatron"])
    with pytest.raises(PlannerError, match="nothing here predicts its step"):
        known_targets(["verl"])
    with pytest.raises(PlannerError, match="is not planned"):
        TrainSetup(optimizer="muon")


def test_what_no_layer_and_no_engine_can_train_is_said() -> None:
    model, gpu = catalogue.load("qwen/qwen3-8b"), find_gpu("h100-sxm")
    assert model is not None
    with pytest.raises(PlannerError, match="linear probing"):
        PlanRequest(fixed={"trained_layers": (0,)}).workload(model, gpu)
    grpo = PlanRequest(fixed={"objective": ("grpo",), "parallel": ("zero3",)})
    with pytest.raises(PlannerError, match="under zero3 is not modelled"):
        plan_workload(grpo.workload(model, gpu, make_cluster(gpu, 4)))
