"""Formula against dry run for Whisper: sizes x methods x micro-batch x checkpointing x length of the text.

    python -m benchmarks.sound [MODEL ...]    # one line a case, then median and worst; --write keeps them
    python -m benchmarks.sound --published    # batch sizes that others say fit, or do not, against the dry run

The dry run runs transformers' own class on meta tensors. Cases take turns, so that each method meets each of them.
"""

import statistics
import sys
from typing import Any

from benchmarks.images import compared
from benchmarks.shared import DATA, loaded, write_rows
from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.setup import TrainSetup
from probes.dryrun.api import dry_run_report
from probes.dryrun.report import DryRunReport

OUT = DATA / "sound.jsonl"
MODELS = (
    "openai/whisper-tiny", "openai/whisper-base", "openai/whisper-small", "openai/whisper-medium",
    "openai/whisper-large-v2", "openai/whisper-large-v3", "openai/whisper-large-v3-turbo",
    "distil-whisper/distil-large-v3",
)  # fmt: skip
QV = {"lora_targets": ("q_proj", "v_proj"), "lora_rank": 32, "lora_dropout": 0.05}
FULL = {"method": "full", "lora_rank": 0}
METHODS: dict[str, dict[str, Any]] = {
    "full fp16": {**FULL, "precision": "fp16-mixed"},
    "full bf16, frozen encoder": {**FULL, "precision": "bf16-mixed", "frozen_encoder": True},
    "full 16 bits": {**FULL, "precision": "bf16-pure", "optimizer": "adamw-8bit"},
    "lora q, v": {"precision": "fp16-autocast", **QV},
    "lora all": {},
    "int8 q, v (PEFT)": {
        "method": "qlora", "quantization": "int8", "precision": "fp16-autocast", "kbit_fp32_cast": True, **QV,
    },
    "qlora all": {"method": "qlora", "quantization": "nf4-double"},
}  # fmt: skip
CASES = (
    ("rtx-4090", 1, 0, 225, 1), ("t4", 8, 1, 225, 1), ("rtx-4090", 16, 1, 48, 2), ("a100-80gb", 4, 0, 448, 2),
    ("rtx-4090", 4, 2, 128, 4),
)  # fmt: skip
"""(card, micro-batch, checkpointing, tokens of text, accumulation)."""


OLD = {"reentrant_checkpointing": True, "expandable_segments": False, "optimizer": "adamw"}
"""transformers 4's own, under which the published batch sizes were found."""
EVENT = (
    "github.com/huggingface/community-events, whisper-fine-tuning-event/README.md, Recommended Training Configurations"
)
FAST = "github.com/Vaibhavs10/fast-whisper-finetuning README.md, benchmarks on a free Colab T4"
PUBLISHED = (
    ("openai/whisper-small", "full fp16", "v100-16gb", 16, True, EVENT),
    ("openai/whisper-medium", "full fp16", "v100-16gb", 2, True, EVENT),
    ("openai/whisper-small", "full fp16", "a100-40gb", 64, True, EVENT),
    ("openai/whisper-medium", "full fp16", "a100-40gb", 32, True, EVENT),
    ("openai/whisper-small", "full fp16", "t4", 16, True, "huggingface.co/blog/fine-tune-whisper"),
    ("openai/whisper-large-v2", "int8 q, v (PEFT)", "t4", 24, True, FAST),
    ("openai/whisper-large-v2", "int8 q, v (PEFT)", "t4", 32, False, FAST),
    ("openai/whisper-large-v2", "full fp16", "t4", 1, False, FAST),
    ("openai/whisper-large", "full fp16", "rtx-3090", 1, False, "github.com/huggingface/transformers/issues/20348"),
)
"""(model, method, card, micro-batch, whether it fits, source), all with checkpointing; none says how long texts are."""
COMMON_VOICE = 100
"""Tokens of its longer sentences; judgement."""


def published() -> None:
    """Prints what the dry run says of each, at Common Voice's lengths and at twice."""
    for name, method, card, micro, fits, source in PUBLISHED:
        model, gpu, peaks = loaded(name), find_gpu(card), []
        for tokens in (COMMON_VOICE, 2 * COMMON_VOICE):
            setup = setup_of(METHODS[method], ("", micro, 1, tokens, 1)).replace(**OLD)
            report = dry_run_report(model, gpu, setup)
            assert isinstance(report, DryRunReport), report
            peaks.append(report.prediction.peak_device_bytes / GIB)
        observed, shown = "fits" if fits else "does not", " and ".join(f"{peak:.1f}" for peak in peaks)
        of = f"{shown} of {gpu.memory_bytes / GIB:.1f}"
        print(f"| {name} | {method} | {gpu.name} | {micro} | {observed} | {of} | {source} |")


def setup_of(fields: dict[str, Any], case: tuple[str, int, int, int, int]) -> TrainSetup:
    """The setup of one case; a T4 has no bf16."""
    card, micro, every, tokens, steps = case
    setup = TrainSetup(**fields, stack="hf", micro_batch_seqs=micro, checkpointing=every).replace(
        seq_len_tokens=tokens, accumulation_steps=steps
    )
    half = {"bf16-mixed": "fp16-mixed", "bf16-autocast": "fp16-autocast"}
    return setup.replace(precision=half.get(setup.precision, setup.precision)) if card == "t4" else setup


def main() -> None:
    if "--published" in sys.argv:
        published()
        return
    named = [word for word in sys.argv[1:] if not word.startswith("-")] or MODELS
    rows, case_index = [], 0
    for name in named:
        model = loaded(name)
        for method, fields in METHODS.items():
            case = CASES[case_index % len(CASES)]
            case_index += 1
            gpu, setup = find_gpu(case[0]), setup_of(fields, case)
            rows.append(compared(model, gpu, setup, {"model": name, "method": method, "case": case}))
    for name in (*named, ""):
        errors = sorted(abs(row["formula"] / row["dry_run"] - 1) for row in rows if row["model"] == name or not name)
        print(f"| {name or 'all'} | {len(errors)} | {statistics.median(errors):.2%} | {errors[-1]:.2%} |")
    if "--write" in sys.argv:
        write_rows(OUT, rows)


if __name__ == "__main__":
    main()
