"""Mixtures whose 4-bit experts lie in the host's memory: experts4bit-qlora by Loggetta, against what its runs took.

Source: pjordanandrsn/loggetta@10cbf9ff docs/RESULTS.md (sections 3 and 5; TC3's and tp4's rows with the lengths that
bench/validate_register.py gives them). No constant is fitted: the formula is experts4bit-qlora's own sum, of its code.
"""

from typing import NamedTuple

import pytest

from planner.core.errors import SetupError
from planner.core.units import GIB
from planner.frameworks.exporters import TARGETS
from planner.hardware.gpus import find_gpu
from planner.memory.states import pinned_bytes, streamed_stacks
from planner.models import catalogue
from planner.planning.decision.node import Node, node_of_setup
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.allowed import EXPERT_TARGETS
from tests.planner.helpers import plan_request, planned

QWEN, OLMOE = "Qwen/Qwen3-30B-A3B", "allenai/OLMoE-1B-7B-0924"


class Row(NamedTuple):
    """A run: two of its sequences at once unless `seqs` says otherwise; allocated and device GiB, seconds of a step."""

    name: str
    model: str
    gpu: str
    stack: str
    recipe: str
    tokens: int
    allocated: float
    device: float = 0.0
    seconds: float = 0.0
    seqs: int = 2


RECIPES: dict[str, dict[str, object]] = {
    "field": {"method": "qlora", "quantization": "nf4-double", "lora_rank": 16, "adapter_dtype": "fp32",
              "optimizer": "adamw-8bit"},
    "defaults": {"method": "lora", "quantization": "none", "lora_rank": 8, "optimizer": "adamw"},
}  # fmt: skip
"""TC1's field recipe (attention in 4 bits), and QLoRASetup's defaults (in 16)."""
ROWS = (
    Row("TC3, 12 GB", QWEN, "rtx-a2000-12gb", "loggetta", "field", 555, 10.463e9 / GIB, seqs=1),
    Row("TC3, 24 GB", QWEN, "rtx-4090", "loggetta", "field", 555, 11.881e9 / GIB),
    Row("FP1, on the card", QWEN, "rtx-5090", "loggetta-resident", "defaults", 512, 21.91, 24.34, 0.70),
    Row("FP1, in the host", QWEN, "rtx-5090", "loggetta", "defaults", 512, 6.71, 9.41, 2.00),
    Row("tp4", QWEN, "rtx-5090", "loggetta-resident", "field", 555, 24.581e9 / GIB),
    Row("tp4", OLMOE, "rtx-5090", "loggetta-resident", "field", 555, 6.419e9 / GIB),
    Row("FP1", OLMOE, "rtx-5090", "loggetta-resident", "defaults", 512, 5.47, 6.90, 0.22),
    Row("R1", OLMOE, "rtx-a2000-12gb", "loggetta-resident", "defaults", 512, 5.47, 6.82, 2.16),
    Row("R3b", OLMOE, "rtx-a2000-12gb", "loggetta", "defaults", 512, 2.31, 3.33, 2.79),
)


def setup_of(row: Row) -> TrainSetup:
    return TrainSetup(
        precision="bf16-pure",
        quantize_experts=True,
        lora_targets=EXPERT_TARGETS,
        stack=row.stack,
        micro_batch_seqs=row.seqs,
        seq_len_tokens=row.tokens,
        expandable_segments=False,
        **RECIPES[row.recipe],  # type: ignore[arg-type]
    )


MOST = 0.14
"""Of allocated bytes: what experts4bit-qlora's own estimate errs by on these runs is 13 % too."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}, {row.model}")
def test_published_peaks(row: Row) -> None:
    prediction = predict(catalogue.load(row.model), find_gpu(row.gpu), setup_of(row))
    most = 0.1 if row.name in ("TC3, 12 GB", "FP1, on the card") else MOST
    assert prediction.peak_allocated_bytes / GIB == pytest.approx(row.allocated, rel=most)
    if row.name == "FP1, on the card":
        assert prediction.peak_device_bytes / GIB == pytest.approx(row.device, rel=0.1)


def test_host_bytes_of_a_published_run() -> None:
    """FP1's receipt (evidence/2026-10-04-fp1-rtx5090/raw/qwen3_host.json): 339,738,688 B staged, 21,743,271,936 pinned,
    32,614,914,048 over the link in a micro-batch."""
    model, setup = catalogue.load("Qwen/Qwen3-30B-A3B"), setup_of(ROWS[3])
    stacks = streamed_stacks(model, setup)
    assert stacks[0] == pytest.approx(339_738_688, rel=1e-4)
    assert 2 * sum(stacks) == pytest.approx(32_614_914_048, rel=1e-4)
    assert pinned_bytes(model, setup) == 21_743_271_936


def test_a_12_gb_card_gets_a_plan_and_its_file() -> None:
    model, gpu = catalogue.load("Qwen/Qwen3-30B-A3B"), find_gpu("rtx-3060")
    plan = planned(plan_request("Qwen/Qwen3-30B-A3B", "rtx-3060"), explained=False)
    assert plan.chosen.setup.stack == "loggetta"
    assert plan.chosen.formula.peak_device_bytes < gpu.memory_bytes
    assert any("of the host's memory, pinned" in note for note in plan.chosen.formula.notes)
    adapters = plan.chosen.setup.replace(method="lora", quantization="none")
    assert node_of_setup(plan.chosen.setup) is node_of_setup(adapters) is Node.FOUR_BIT  # most of the base is in 4 bits
    for name, target in TARGETS.items():
        assert target.expresses(plan.chosen.setup, model, gpu) == (name == "loggetta"), name


def test_adapters_on_experts_of_4_bits_are_loggettas() -> None:
    with pytest.raises(SetupError, match="has no adapters on experts"):
        TrainSetup(method="qlora", quantization="nf4", quantize_experts=True, lora_targets="attention-experts")
