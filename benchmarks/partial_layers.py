"""Formula against dry run where only some layers train: allocated peaks of random cells of a grid.

python -m benchmarks.partial_layers --num 120    # needs the torch extra; two minutes
"""

import argparse
import random
import statistics
from itertools import product
from typing import Any

from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction

MODELS = (
    "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "google/gemma-2-2b", "HuggingFaceTB/SmolLM2-360M",
    "openai-community/gpt2",
)  # fmt: skip
LAYERS: tuple[int | tuple[int, ...], ...] = (4, -4, -1, (0, 4, 8), (3,), (2, 3, 9), (1, 3, 5, 7, 9, 11))
WHOLE = {"method": "full", "lora_rank": 0}
METHODS: tuple[dict[str, Any], ...] = (
    {**WHOLE, "precision": "bf16-pure"},
    {**WHOLE, "precision": "bf16-mixed"},
    {**WHOLE, "precision": "bf16-autocast", "stack": "llamafactory"},
    {"lora_rank": 16},
    {"lora_rank": 16, "precision": "bf16-pure", "adapter_dtype": "fp32"},
    {"lora_rank": 16, "lora_targets": "attention"},
    {"method": "qlora", "quantization": "nf4-double", "lora_rank": 16},
)
SIZES = ((1, 512), (4, 1024))


def error(model: str, layers: int | tuple[int, ...], fields: dict[str, Any]) -> float | None:
    """Formula over dry run less 1; None where the dry run refuses."""
    from probes.dryrun import dry_run

    spec, card = catalogue.load(model), find_gpu("a100-80gb")
    assert spec is not None
    setup = TrainSetup(trained_layers=layers, **fields)
    traced = dry_run(spec, card, setup)
    if not isinstance(traced, Prediction):
        return None
    return predict(spec, card, setup).peak_allocated_bytes / traced.peak_allocated_bytes - 1


def main() -> None:
    """Prints the worst cells and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    grid = list(product(MODELS, LAYERS, METHODS, (0, 1, 3), ("full", "chunked"), SIZES))
    errors = []
    for model, layers, method, every, loss, (seqs, tokens) in random.Random(asked.seed).sample(grid, asked.num):
        size = {"micro_batch_seqs": seqs, "seq_len_tokens": tokens}
        found = error(model, layers, {**method, **size, "checkpointing": every, "loss": loss})
        if found is not None:
            errors.append(
                (abs(found), f"{found:+.2%} {model} {layers} {method} every {every}, {loss}, {seqs} x {tokens}")
            )
    errors.sort(reverse=True)
    print(*(line for _, line in errors[:8]), sep="\n")
    sizes = sorted(size for size, _ in errors)
    tail = sizes[int(0.95 * len(sizes))]
    print(f"{len(sizes)} of {asked.num}: median {statistics.median(sizes):.2%}, 95th {tail:.2%}, worst {sizes[-1]:.2%}")


if __name__ == "__main__":
    main()
