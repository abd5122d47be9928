"""Planned speed over that of the rivals' published defaults, by our own formula: a prediction until a GPU has run it.

    python -m benchmarks.rivals [--json] [--rival TRL] [--dry-run]

Each rival is a launch file as its project publishes it, read by `plan check`'s readers with the tool's own defaults. Of
every pair of model and card the same work is compared: sequences of SEQ_LEN tokens, GLOBAL_BATCH of them per step (the
rival's micro-batch kept, its accumulation made up), the rival's rank and matrices, its bits or more. A rival that does
not fit gets its micro-batch halved; one of 16-bit weights of which no sequence fits takes its project's own 4-bit
example ("4-bit" in the row). The plan is the fastest of the engines that launch files are written for, each within its
own limits (`--target` is named in the row), with its full rows said to be packed or not. With `--dry-run` every plan is
proven as `plan` does it where torch is installed, by a dry run whose band is narrower, so that less is kept in reserve;
the speeds are the same formula's. "Bound" is the rival's step over its matrices', attention's and loss's seconds alone:
what a plan of no recomputing, no adapters and no elementwise kernels, on a card of any memory, would gain.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from benchmarks.shared import loaded
from finetune_planner.app.levels import answered
from finetune_planner.cli.race import PUBLISHED
from planner.core.errors import PlannerError
from planner.frameworks.readers import read_text
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.models.spec import ModelSpec
from planner.planning.option_values import default_headroom_bytes
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.speed import speed_profile
from planner.speed.roofline import step_time

SEQ_LEN, GLOBAL_BATCH = 2048, 32
PAIRS = (
    ("HuggingFaceTB/SmolLM2-1.7B", "t4"),
    ("meta-llama/Llama-3.2-1B", "rtx-3060"),
    ("meta-llama/Llama-3.2-3B", "rtx-4070-ti-super"),
    ("meta-llama/Llama-3.1-8B", "t4"),
    ("meta-llama/Llama-3.1-8B", "rtx-4070-ti-super"),
    ("meta-llama/Llama-3.1-8B", "rtx-3090"),
    ("meta-llama/Llama-3.1-8B", "rtx-4090"),
    ("meta-llama/Llama-3.1-8B", "l4"),
    ("meta-llama/Llama-3.1-8B", "a100-80gb"),
    ("meta-llama/Llama-3.1-8B", "h100-sxm"),
    ("Qwen/Qwen2.5-32B", "h100-sxm"),
    ("meta-llama/Llama-3.3-70B-Instruct", "h100-sxm"),
)
ENGINES = ("trl", "hf", "axolotl", "unsloth")
RIVALS = {
    "TRL": ("trl", "trl-4bit"),
    "TRL, float32": ("trl-fp32", "trl-fp32-4bit"),
    "Axolotl": ("axolotl", "axolotl-4bit"),
    "LLaMA-Factory": ("llamafactory", "llamafactory-4bit"),
    "Unsloth": ("unsloth", "unsloth"),
}
"""Rival -> what it publishes, and the 4-bit form of it (`finetune_planner.cli.race`)."""


class Row(NamedTuple):
    """One pair against one rival: tokens/s of both, and what is not comparable."""

    model: str
    gpu: str
    rival: str
    planned: float
    engine: str
    theirs: float
    bound: float
    remarks: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.planned / self.theirs


def theirs(rival: str, model: ModelSpec, gpu: GpuSpec) -> tuple[TrainSetup | None, tuple[str, ...]]:
    """The rival's setup on this work, None where one sequence does not fit; what was changed."""
    budget = gpu.memory_bytes - default_headroom_bytes(gpu.memory_bytes)
    for bits, name in zip((16, 4), RIVALS[rival], strict=True):
        config = PUBLISHED[name]
        setup, remarks = _on(read_text(config.text("m", SEQ_LEN), config.file, model=model).setup, gpu)
        if bits == 4:
            remarks.append("4-bit")
        micro = setup.micro_batch_seqs
        while micro:
            tried = setup.replace(micro_batch_seqs=micro, accumulation_steps=GLOBAL_BATCH // micro)
            if predict_memory(model, gpu, tried).peak_device_bytes <= budget:
                if micro != setup.micro_batch_seqs:
                    remarks.append(f"micro-batch {micro} of {setup.micro_batch_seqs}")
                return tried, tuple(remarks)
            micro //= 2
    return None, (*remarks, "does not fit")


def _on(setup: TrainSetup, gpu: GpuSpec) -> tuple[TrainSetup, list[str]]:
    """The rival's setup with the work's length, and what the card lacks replaced."""
    changes: dict[str, Any] = {"seq_len_tokens": SEQ_LEN, "packing": False, "uneven": True}
    remarks = []
    if not gpu.bf16:
        changes |= {"precision": "fp16-autocast", "adapter_dtype": "fp32"}
        remarks.append("fp16")
    if setup.attention == "flash-attention-2" and not gpu.flash_attention_2:
        changes["attention"] = "sdpa"
        remarks.append("SDPA")
    return setup.replace(**changes), remarks


def ours(
    model: ModelSpec, gpu: GpuSpec, rival: TrainSetup, *, dry_run: bool = False
) -> tuple[float, str, TrainSetup] | None:
    """Tokens/s, engine and setup of the fastest plan that loses no more than the rival's method. Rows are planned as
    packed too where SDPA has no flash kernel: with packing's mask it takes one that holds no scores."""
    methods = ("qlora", "lora") if rival.method == "qlora" else (rival.method,)
    packings = (False,) if gpu.flash_attention_2 else (False, True)
    plans = []
    for method, packing, engine in product(methods, packings, ENGINES):
        fixed = {"method": method, "packing": packing, "lora_rank": rival.lora_rank, "lora_targets": rival.lora_targets}
        plans.append(_planned(model, gpu, engine, tuple(fixed.items()), dry_run))
    return max((plan for plan in plans if plan is not None), key=lambda plan: plan[0], default=None)


@cache
def _planned(
    model: ModelSpec, gpu: GpuSpec, engine: str, fixed: tuple[tuple[str, Any], ...], dry_run: bool
) -> tuple[float, str, TrainSetup] | None:
    request = PlanRequest(
        fixed={name: (value,) for name, value in fixed},
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        targets=(engine,),
        prefer="speed",
    ).workload(model, gpu)
    try:
        plan = answered(request, dry_run=dry_run, history=False)
    except PlannerError:
        return None
    if not isinstance(plan, Plan) or not plan.chosen.fits:
        return None
    setup = plan.chosen.setup.replace(uneven=request.uneven)
    return predict(model, gpu, setup).tokens_per_s or 0.0, engine, plan.chosen.setup


def bound(model: ModelSpec, gpu: GpuSpec, rival: TrainSetup) -> float:
    """Step time of the rival over the seconds of its matrices, attention and loss alone, at the best micro-batch."""
    bare = rival.replace(checkpointing=0, activation_offload=False, kernels="eager", lora_dropout=0.0)
    least = math.inf
    for micro in (1, 2, 4, 8, 16, 32):
        setup = bare.replace(micro_batch_seqs=micro, accumulation_steps=GLOBAL_BATCH // micro)
        parts = step_time(model, gpu, setup).parts_s
        least = min(least, sum(parts[name] for name in ("matmul", "attention", "loss")))
    return step_time(model, gpu, rival).step_time_s / least


def rows(rivals: Iterable[str] = tuple(RIVALS), *, dry_run: bool = False) -> list[Row]:
    """Every pair against every of these rivals that fits."""
    compared = []
    for name, key in PAIRS:
        model, gpu = loaded(name), find_gpu(key)
        for rival in rivals:
            setup, remarks = theirs(rival, model, gpu)
            if setup is None:
                print(f"{name} {key} {rival}: {', '.join(remarks)}", file=sys.stderr)
                continue
            mine = ours(model, gpu, setup, dry_run=dry_run)
            if mine is None:
                continue
            speed = speed_profile(model, gpu, setup).at(setup.micro_batch_seqs, setup.accumulation_steps)[1]
            remarks += (f"adapts {setup.lora_targets}",) * (setup.lora_targets != "all-linear")
            remarks += ("packed",) * mine[2].packing
            remarks += (f"planned as {mine[2].method}",) * (mine[2].method != setup.method)
            most = bound(model, gpu, setup)
            compared.append(Row(name, key, rival, mine[0], mine[1], speed, most, remarks))
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rival", choices=RIVALS, action="append", help="repeatable; default all")
    parser.add_argument("--dry-run", action="store_true", help="prove every plan by a dry run, as `plan` does")
    arguments = parser.parse_args()
    rivals = arguments.rival or list(RIVALS)
    compared = rows(rivals, dry_run=arguments.dry_run)
    if arguments.json:
        print(json.dumps([{**row._asdict(), "ratio": row.ratio} for row in compared], indent=1))
        return
    for row in compared:
        print(
            f"{row.model:36} {row.gpu:18} {row.rival:14} {row.planned:8.0f} ({row.engine:7}) / {row.theirs:8.0f} = "
            f"{row.ratio:5.2f} of {row.bound:4.2f}  {', '.join(row.remarks)}"
        )
    for rival in rivals:
        ratios = [row.ratio for row in compared if row.rival == rival]
        print(
            f"over {rival}: {statistics.geometric_mean(ratios):.2f} (geometric mean of {len(ratios)} pairs, "
            f"{min(ratios):.2f} to {max(ratios):.2f}); bound "
            f"{statistics.geometric_mean([row.bound for row in compared if row.rival == rival]):.2f}"
        )
    print("Speeds are the formula's predictions: no GPU has run these.", file=sys.stderr)


if __name__ == "__main__":
    main()
