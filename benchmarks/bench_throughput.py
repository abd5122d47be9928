"""Cost of the speed model: one setup once its operators are known (at most 100 microseconds), and a whole walk.

python -m benchmarks.bench_throughput
"""

import sys
import time
from itertools import product

from planner.hardware.gpus import find_gpu
from planner.models.catalogue import load
from planner.setup import TrainSetup
from planner.setup_fields import LOSSES
from planner.throughput import speed_model, step_time, throughput_profile

LIMIT_S = 100e-6
BASES = (
    {"method": "full", "lora_rank": 0, "precision": "bf16-pure"},
    {"method": "full", "lora_rank": 0, "precision": "bf16-mixed"},
    {"precision": "bf16-autocast"},
    {"precision": "bf16-pure"},
    {"method": "qlora", "quantization": "nf4-double"},
    {"method": "qlora", "quantization": "nf4-double", "kbit_fp32_cast": True},
    {"method": "qlora", "quantization": "int8"},
)


def space() -> list[TrainSetup]:
    """About six thousand setups: methods, ranks, targets, optimizers, checkpointing, losses, micro-batches."""
    setups = []
    for base in BASES:
        adapters = (
            (("all-linear", 0),) if base.get("method") == "full" else product(("attention", "all-linear"), (8, 32, 64))
        )
        for targets, rank in adapters:
            for optimizer, every, loss, micro in product(
                ("adamw", "adamw-fused", "adamw-8bit", "paged-adamw-8bit"), (0, 1, 2), LOSSES, (1, 2, 4, 8, 16)
            ):
                fields = {"lora_rank": rank, "lora_targets": targets, **base}
                setups.append(
                    TrainSetup(
                        **fields,
                        optimizer=optimizer,
                        checkpointing=every,
                        loss=loss,
                        micro_batch_seqs=micro,
                        accumulation_steps=16 // micro,
                    )
                )
    return setups


def main() -> None:
    """Prints the figures; exits 1 where one setup costs more than the limit."""
    model, gpu = load("mistralai/Mistral-7B-v0.1"), find_gpu("a100-80gb")
    assert model is not None
    setups = space()
    speed_model(model, gpu)  # loads the calibration, counts the model's operators
    start = time.perf_counter()
    for setup in setups:
        throughput_profile(model, gpu, setup).at(setup.micro_batch_seqs, setup.accumulation_steps)
    walk_s = time.perf_counter() - start
    profiles = [(throughput_profile(model, gpu, setup), setup) for setup in setups]
    start = time.perf_counter()
    for profile, setup in profiles:
        profile.at(setup.micro_batch_seqs, setup.accumulation_steps)
    known_s = (time.perf_counter() - start) / len(setups)
    start = time.perf_counter()
    for setup in setups:
        step_time(model, gpu, setup)
    whole_s = (time.perf_counter() - start) / len(setups)
    each = 1e6 * walk_s / len(setups)
    print(f"walk of {len(setups)} setups, nothing remembered: {1e3 * walk_s:.0f} ms, {each:.1f} us each")
    print(f"profile.at, operators known: {1e6 * known_s:.2f} us")
    print(f"step_time with its parts, operators known: {1e6 * whole_s:.1f} us (limit {1e6 * LIMIT_S:.0f})")
    sys.exit(0 if whole_s <= LIMIT_S else 1)


if __name__ == "__main__":
    main()
