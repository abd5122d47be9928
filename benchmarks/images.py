"""The formula against the dry run for models with eyes: memory of a step with pictures, over models, methods, sizes.

    python -m benchmarks.images [--write] [MODEL ...]

Each model and method with two of CASES in turn; Gemma 3n needs timm (`PYTHONPATH=.:.venv/timm` after `setup.sh
test`). `--write` puts the rows into benchmarks/data/images.jsonl, where those of models that were not named stay;
without it they are only printed. The last line is the median and the worst of all.
"""

import json
import statistics
import sys
from typing import Any

from benchmarks.image_models import configs
from benchmarks.shared import DATA, rows_so_far, write_rows
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.models.encoders import image_tokens, with_vision
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.models.stored import stored_refusal
from planner.options.images import Images, with_text
from planner.setup import TrainSetup
from probes.dryrun.api import dry_run_report
from probes.dryrun.report import DryRunReport

OUT = DATA / "images.jsonl"
GPU = "h100-sxm"
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora attention": {"lora_targets": "attention"},
    "lora, no checkpointing": {"checkpointing": 0},
    "qlora": {"method": "qlora", "quantization": "nf4-double"},
    "full": {"method": "full", "lora_rank": 0, "precision": "bf16-pure"},
}
CASES = ((1, 512, 1, 1), (1, 1024, 2, 1), (2, 768, 1, 2), (1, 1536, 1, 1), (3, 384, 2, 4))
"""(pictures of a sample, their side in pixels, micro-batch, accumulation)."""


def spec_of(name: str, config: dict[str, Any]) -> ModelSpec:
    for owner in ("google", "Qwen"):
        listed = catalogue.load(f"{owner}/{name}")
        if listed is not None and listed.config == config:
            return with_vision(listed)
    return with_vision(spec_from_config(config, model_id=name, source="benchmarks"))


def setup_of(model: ModelSpec, fields: dict[str, Any], case: tuple[int, int, int, int]) -> TrainSetup:
    """The setup of one case, with room for text beside its pictures."""
    num, side, micro, steps = case
    images = Images(num=num, width=side, height=side)
    length = max(1024, with_text(image_tokens(model, images)))
    sizes = {"micro_batch_seqs": micro, "accumulation_steps": steps, "seq_len_tokens": length}
    return TrainSetup(**fields, loss="chunked", images=images, **sizes)


def compared(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, case: dict[str, Any]) -> dict[str, Any]:
    """The row of a case, with formula and dry run in allocated bytes; printed with the formula's error."""
    report = dry_run_report(model, gpu, setup)
    assert isinstance(report, DryRunReport), report
    formula, real = predict_memory(model, gpu, setup).peak_allocated_bytes, report.prediction.peak_allocated_bytes
    row = {**case, "formula": formula, "dry_run": real}
    print(f"{formula / real - 1:+.2%}", json.dumps(row), flush=True)
    return row


def main() -> None:
    named = [word for word in sys.argv[1:] if not word.startswith("-")]
    stored = rows_so_far(OUT) if named else []
    rows, gpu, case_index = [row for row in stored if row["model"] not in named], find_gpu(GPU), 0
    for name, config in configs().items():
        if named and name not in named:
            case_index += len(METHODS)
            continue
        model = spec_of(name, config)
        for method, fields in METHODS.items():
            for case in (CASES[case_index % len(CASES)], CASES[(case_index + 2) % len(CASES)]):
                setup = setup_of(model, fields, case)
                if stored_refusal(setup, model):  # in 4 bits, Gemma 3n
                    continue
                rows.append(compared(model, gpu, setup, {"model": name, "method": method, "case": case}))
            case_index += 1
    errors = sorted(abs(row["formula"] / row["dry_run"] - 1) for row in rows)
    print(f"{len(errors)} cases: median {statistics.median(errors):.2%}, worst {errors[-1]:.2%}")
    if "--write" in sys.argv:
        write_rows(OUT, rows)


if __name__ == "__main__":
    main()
