"""Evaluating, saving and merging by the trainers themselves, on a GPU that computes nothing, against the formula.

    python -m benchmarks.trace_evaluation [--layers 4]

TRL's and transformers' Trainer train two steps of a truncated Llama-3.2-1B at one sequence, then evaluate four batches
of several, save, and merge. The formula's figures (`planner.memory.around`) are upper bounds; the logits that
`compute_metrics` keeps are exact.
"""

import argparse
import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trace_vs_dryrun import GPU, config_of
from planner.hardware.gpus import find_gpu
from planner.memory.around import between_steps_bytes, evaluation_bytes, logits_bytes
from planner.memory.model import predict_memory
from planner.models.adapters import spec_from_config
from planner.setup import TrainSetup
from probes.phantom.card import TraceOptions, card_of

NUM_BATCHES = 4


@dataclass(frozen=True)
class Case:
    """One trainer with one way of evaluating; `accumulation` is eval_accumulation_steps."""

    tool: str
    method: str
    seqs: int
    metrics: bool = False
    accumulation: int | None = None


CASES = (
    Case("trl", "lora", 8),
    Case("hf", "full", 4),
    Case("hf", "lora", 4),
    Case("trl", "lora", 2, metrics=True, accumulation=1),
    Case("hf", "lora", 4, metrics=True, accumulation=1),
    Case("trl", "lora", 2, metrics=True),
    Case("hf", "lora", 4, metrics=True),
)


def setup_of(case: Case, tokens: int) -> TrainSetup:
    """The setup that the trainer runs."""
    return TrainSetup(
        method=case.method,
        precision="bf16-mixed" if case.method == "full" else "bf16-autocast",
        lora_rank=0 if case.method == "full" else 16,
        loss="chunked" if case.tool == "trl" else "full",
        checkpointing=1,
        accumulation_steps=2,
        seq_len_tokens=tokens,
        optimizer="adamw-fused",
    )


def predicted(case: Case, config: dict[str, Any], tokens: int) -> dict[str, int]:
    """Allocated bytes by the formula: at most for the evaluation's batch, plus the logits that stay."""
    model, gpu, setup = (
        spec_from_config(config, model_id="cut", source="benchmark"),
        find_gpu(GPU),
        setup_of(case, tokens),
    )
    beside = [
        predict_memory(model, gpu, one)
        for one in (setup.replace(micro_batch_seqs=case.seqs, accumulation_steps=1), setup)
    ]
    outside = [one.peak_device_bytes - one.peak_allocated_bytes for one in beside]
    evaluating = evaluation_bytes(model, gpu, setup, case.seqs, logits=case.metrics) - outside[0]
    between = between_steps_bytes(model, gpu, setup) - beside[1].context_bytes
    if case.metrics and case.accumulation is None:  # joined at the end, all of them twice
        evaluating = max(evaluating, between + 2 * NUM_BATCHES * case.seqs * logits_bytes(model, setup))
    return {"evaluation": evaluating, "saving": between}


def traced(case: Case, config: dict[str, Any], tokens: int) -> dict[str, int]:
    """Peak allocated bytes of each occasion on the phantom GPU."""
    import torch
    from accelerate.state import AcceleratorState

    from probes.phantom.session import phantom_gpu

    card, found = card_of(find_gpu(GPU)), {}
    with (
        tempfile.TemporaryDirectory() as name,
        phantom_gpu(card, TraceOptions(limited=False), expandable_segments=True),
    ):
        AcceleratorState._reset_state(True)
        (Path(name) / "config.json").write_text(json.dumps(config))
        trainer = _trainer(case, Path(name), tokens)

        def peak(label: str, act: Callable[[], Any]) -> None:
            torch.cuda.reset_peak_memory_stats()
            act()
            found[label] = torch.cuda.max_memory_allocated()

        trainer.train()
        peak("evaluation", trainer.evaluate)
        peak("saving", trainer.save_model)
        if case.method == "lora":
            peak("merging", trainer.model.merge_and_unload)
    return found


def _trainer(case: Case, folder: Path, tokens: int) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
    from trl import SFTConfig, SFTTrainer

    dtype = torch.float32 if case.method == "full" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    lora = LoraConfig(r=16, target_modules="all-linear") if case.method == "lora" else None
    common: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": case.seqs,
        "gradient_accumulation_steps": 2,
        "eval_accumulation_steps": case.accumulation,
        "gradient_checkpointing": True,
        "bf16": True,
        "optim": "adamw_torch_fused",
        "max_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    metrics: Any = (lambda found: {}) if case.metrics else None
    row = {"input_ids": list(range(tokens))}
    if case.tool == "trl":
        rows = Dataset.from_list([row] * case.seqs * NUM_BATCHES)
        arguments = SFTConfig(max_length=tokens, **common)
        return SFTTrainer(
            model, args=arguments, train_dataset=rows, eval_dataset=rows, peft_config=lora, compute_metrics=metrics
        )
    if lora is not None:
        model = get_peft_model(model, lora)
        model.enable_input_require_grads()
    rows = Dataset.from_list([row | {"labels": row["input_ids"]}] * case.seqs * NUM_BATCHES)
    return Trainer(
        model,
        TrainingArguments(remove_unused_columns=False, **common),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=default_data_collator,
        compute_metrics=metrics,
    )


def compare(case: Case, config: dict[str, Any], tokens: int) -> dict[str, tuple[int, int]]:
    """Occasion -> (traced, predicted) bytes."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = traced(case, config, tokens)
    wanted = predicted(case, config, tokens)
    return {name: (found[name], wanted[name]) for name in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    warnings.simplefilter("ignore")
    config = config_of(parser.parse_args().layers)
    for case in CASES:
        for name, (was, bound) in compare(case, config, 512).items():
            print(
                f"{case}  {name}: traced {was / 2**20:,.1f} MiB, formula {bound / 2**20:,.1f}, {bound / was - 1:+.1%}"
            )


if __name__ == "__main__":
    main()
