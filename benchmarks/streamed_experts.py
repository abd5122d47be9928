"""Mixtures beside 4-bit experts, on the card or in the host's memory: what experts4bit-qlora's runs took, against the
formula of the stacks `loggetta` and `loggetta-resident`.

    python -m benchmarks.streamed_experts

Source: pjordanandrsn/loggetta@10cbf9ff docs/RESULTS.md (sections 3 and 5; TC3's and tp4's rows with the lengths that
bench/validate_register.py gives them). No constant is fitted: the formula is experts4bit-qlora's own sum, of its code.
"""

from typing import NamedTuple

from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.allowed import EXPERT_TARGETS

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


def main() -> None:
    for row in ROWS:
        prediction = predict(resolve_model(row.model), find_gpu(row.gpu), setup_of(row))
        figures = [("allocated", prediction.peak_allocated_bytes / GIB, row.allocated)]
        figures += [("device", prediction.peak_device_bytes / GIB, row.device)] if row.device else []
        figures += [("seconds", prediction.step_time_s or 0.0, row.seconds)] if row.seconds else []
        words = "; ".join(
            f"{what} {predicted:.2f}, measured {ran:.2f}: {predicted / ran - 1:+.1%}"
            for what, predicted, ran in figures
        )
        print(f"{row.name:17} {row.model.partition('/')[2]:20} {row.gpu:15} {words}")


if __name__ == "__main__":
    main()
