"""The data types of a rank are decided once: memory, compute and the wires take the same."""

from itertools import product

import pytest

from planner.core.errors import SetupError
from planner.hardware.gpus import find_gpu
from planner.memory.dtypes import dtype_policy_of
from planner.memory.engines import engine_of
from planner.memory.rank_part import rank_parts
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed.roofline.calibration import load_calibration
from planner.speed.roofline.types import CURRENT, Conditions
from planner.speed.several_gpus.compute import Rank
from tests.planner.helpers import loaded

PRECISIONS = ("bf16-pure", "bf16-autocast", "bf16-mixed", "fp16-autocast", "fp16-mixed")
METHODS = {
    "full": {"method": "full", "lora_rank": 0},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora", "quantization": "nf4-double"},
}


def llama() -> ModelSpec:
    return loaded("meta-llama/llama-3.1-8b")


def setups() -> list[TrainSetup]:
    valid_setups = []
    for parallel, precision, method in product(("ddp", "zero2", "zero3", "fsdp2"), PRECISIONS, METHODS.values()):
        try:
            valid_setups.append(TrainSetup(num_gpus=4, parallel=parallel, precision=precision, **method))
        except SetupError:
            continue
    valid_setups.append(TrainSetup(num_gpus=4, parallel="fsdp2", tensor_degree=2, method="full", lora_rank=0))
    return valid_setups


@pytest.mark.parametrize("setup", setups(), ids=lambda setup: f"{setup.parallel}-{setup.precision}-{setup.method}")
def test_memory_and_speed_take_the_same_types(setup: TrainSetup) -> None:
    """Seven such setups were tried when memory and speed had a rule each; five disagreed."""
    model = llama()
    part = rank_parts(model, setup)[0]
    memory = dtype_policy_of(engine_of(setup).state(part, setup, accumulated=True).setup)
    rank = Rank(part.model, find_gpu("a100-80gb"), setup, load_calibration(), CURRENT)
    assert rank.profile.family.dtypes == memory == dtype_policy_of(engine_of(setup).computes(setup))


def test_fsdp_1_keeps_its_autocast() -> None:
    """Accelerate wraps FSDP 1 after `prepare_model`; only runs measured elsewhere used it."""
    setup = TrainSetup(num_gpus=4, parallel="fsdp2", precision="bf16-mixed", method="full", lora_rank=0)
    rank = Rank(llama(), find_gpu("a100-80gb"), setup, load_calibration(), Conditions(fsdp_1=True))
    assert rank.profile.family.dtypes.autocast == "bf16"
    assert dtype_policy_of(engine_of(setup).computes(setup)).autocast is None
