"""Traces programs that others ran and measured, and holds the phantom GPU against their figures.

    python -m benchmarks.trace_published [--write]

The measurements: DaoyuanLi2816/can-i-finetune-this@053ce9e benchmarks/results/*.json (RTX 4080, Windows 11, torch
2.6.0+cu124, transformers 5.8.1, peft 0.19.1, bitsandbytes 0.49.2; highest `torch.cuda` figures after the run). The
program: that repository's `canifinetune bench`, a plain loop that keeps `outputs` alive through the backward. The loop
below does in the same order what its `run_bench` does; the program itself was traced once from a checkout: 3.12 GiB,
as measured.
Results: benchmarks/data/trace_published.json.
"""

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.planning.trace_result import TraceResult
from probes.phantom.card import card_of

OUT = Path(__file__).parent / "data" / "trace_published.json"
GPU = "rtx-4080"
QWEN = "Qwen/Qwen2.5-{}-Instruct"


class Run(NamedTuple):
    """One published run and what it measured.

    Attributes:
        allocated_gib: `torch.cuda.max_memory_allocated` / 2**30 after the run, as published.
        reserved_gib: `torch.cuda.max_memory_reserved` likewise.
    """

    size: str
    method: str
    num_tokens: int
    num_seqs: int
    checkpointing: bool
    num_steps: int
    allocated_gib: float
    reserved_gib: float

    @property
    def name(self) -> str:
        off = "" if self.checkpointing else ", no checkpointing"
        return f"Qwen2.5-{self.size} {self.method} {self.num_seqs} x {self.num_tokens}{off}"


RUNS = (
    Run("0.5B", "lora", 1024, 1, True, 3, 3.0324, 3.7949),
    Run("0.5B", "qlora", 1024, 1, True, 3, 3.1158, 3.3027),
    Run("0.5B", "qlora", 2048, 1, True, 3, 5.522, 6.2812),
    Run("1.5B", "qlora", 1024, 1, True, 3, 4.0413, 4.3574),
    Run("1.5B", "qlora", 1024, 1, False, 3, 9.3413, 9.5527),
    Run("1.5B", "qlora", 1024, 2, True, 2, 6.5311, 6.8809),
    Run("1.5B", "qlora", 2048, 1, True, 3, 6.5324, 7.0977),
    Run("1.5B", "qlora", 4096, 1, True, 2, 11.5068, 13.5566),
    Run("1.5B", "qlora", 512, 1, True, 3, 2.7943, 2.9062),
    Run("3B", "qlora", 1024, 1, True, 2, 5.1719, 5.5371),
    Run("7B", "qlora", 1024, 1, True, 2, 10.0023, 11.2324),
)


def plain_loop(run: Run) -> None:
    """A program: adapters on the attention, a paged 8-bit optimizer, `outputs` alive until the next step's."""
    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    name = QWEN.format(run.size)
    if run.method == "qlora":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
        )
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": 0}
        )
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=run.checkpointing)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to("cuda")
        model.gradient_checkpointing_enable()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    optimizer = bnb.optim.PagedAdamW8bit(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=2e-4
    )
    model.train()
    for _ in range(run.num_steps):
        ids = torch.randint(0, model.config.vocab_size, (run.num_seqs, run.num_tokens)).to("cuda")
        mask, labels = torch.ones_like(ids), ids.clone()
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        loss = outputs.loss
        loss.detach().item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def traced(run: Run) -> TraceResult:
    from probes.phantom.session import phantom_gpu
    from probes.phantom.summary import summary

    with phantom_gpu(card_of(find_gpu(GPU))) as phantom:
        plain_loop(run)
        return summary(phantom, "ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows: dict[str, Any] = {}
    for run in RUNS:
        began = time.process_time()
        trace = traced(run)
        row = {
            "measured_allocated_gib": run.allocated_gib,
            "traced_allocated_gib": round(trace.peak_allocated_bytes / GIB, 4),
            "measured_reserved_gib": run.reserved_gib,
            "traced_reserved_gib": round(trace.peak_reserved_bytes / GIB, 4),
        }
        row["error_fraction"] = round(row["traced_allocated_gib"] / run.allocated_gib - 1, 4)
        row["reserved_error_fraction"] = round(row["traced_reserved_gib"] / run.reserved_gib - 1, 4)
        rows[run.name] = row
        print(
            f"{run.name:45s} allocated {row['measured_allocated_gib']:8.4f} traced {row['traced_allocated_gib']:8.4f} "
            f"({100 * row['error_fraction']:+.2f} %)  reserved {row['measured_reserved_gib']:8.4f} traced "
            f"{row['traced_reserved_gib']:8.4f} ({100 * row['reserved_error_fraction']:+.2f} %)  "
            f"{time.process_time() - began:.1f} CPU s",
            flush=True,
        )
    for what in ("error_fraction", "reserved_error_fraction"):
        errors = sorted(abs(row[what]) for row in rows.values())
        print(f"{what}: median {100 * statistics.median(errors):.2f} %, worst {100 * errors[-1]:.2f} %")
    if arguments.write:
        OUT.write_text(json.dumps({"gpu": GPU, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
