"""Every term of the formula over points of every model type, as on record: no figure moves unnoticed.

Whether a figure is right other tests say (by hand, against dry runs, against measurements); this one says that it
moved, of which type, in which term, by how much. `UPDATE_DOCS=1 pytest tests/planner/test_on_record.py` writes the
record anew: look at the difference, and name it under "Predictions changed" in CHANGELOG.md.
"""

import json
import os
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks import frozen
from planner.hardware.gpus import find_gpu
from planner.memory.model import rank_memories
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict
from planner.speed import speed_profile
from planner.speed.roofline import CURRENT, Conditions, step_time
from tests.planner.helpers import loaded

RECORD = Path(__file__).with_name("on_record.jsonl")
EVERY = 8
"""Of the 3,082 points, which were drawn at random, so many are left out between two."""
OTHERS = {"adapters": 20, "objectives": 8, "drawn": 20, "experts": 10, "context": 10, "stages": 10, "ranks": 20}
"""Of the other sets of dry runs likewise: what the first one does not vary."""
ROUNDING = 1e-6
"""Of seconds: another library's pow and log may differ in the last digits. Bytes are exact."""
TIMES = ("time: ", "GFLOP", "parts per million")
FULL: dict[str, Any] = {"method": "full", "lora_rank": 0, "num_gpus": 8, "accumulation_steps": 8}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"num_gpus": 8, "parallel": "ddp"},
    {**FULL, "parallel": "fsdp2"},
    {"num_gpus": 8, "parallel": "fsdp2", "reshard_after_forward": False, "checkpointing": 0},
    {**FULL, "parallel": "zero1", "offload": "optimizer"},
    {**FULL, "parallel": "zero2"},
    {**FULL, "parallel": "zero3", "offload": "parameters"},
    {"num_gpus": 8, "parallel": "fsdp2", "tensor_degree": 4},
    {**FULL, "parallel": "none", "tensor_degree": 8},
    {**FULL, "parallel": "ddp", "pipeline_degree": 4},
    {**FULL, "parallel": "none", "pipeline_degree": 8, "pipeline_schedule": "gpipe"},
    {"num_gpus": 8, "parallel": "fsdp2", "context_degree": 4},
    {**FULL, "parallel": "zero3", "context_degree": 8, "attention": "flash-attention-2"},
    {"num_gpus": 8, "parallel": "device-map"},
    {"num_gpus": 4, "parallel": "dp", "loss": "full"},
)

EXPERT_PARALLEL = TrainSetup(
    **FULL, parallel="fsdp2", expert_degree=4, precision="bf16-mixed", micro_batch_seqs=2, seq_len_tokens=2048
)


def points() -> list[tuple[str, ModelSpec, str, TrainSetup]]:
    """(group, model, GPU, setup): random ones of every model type and of what other sets vary; one model and a mixture
    over eight GPUs."""
    rows = [("", row) for row in frozen.rows("grid")[::EVERY]]
    rows += [(name, row) for name, step in OTHERS.items() for row in frozen.rows(name)[::step]]
    sampled = [
        (name or frozen.model_of(row["model"]).model_type, frozen.model_of(row["model"]), row["gpu"],
         setup_from_dict(row["setup"]))
        for name, row in rows
    ]  # fmt: skip
    llama, mixture = loaded("meta-llama/llama-3.1-8b"), loaded("qwen/qwen3-30b-a3b")
    for gpu in ("a100-80gb", "rtx-4090"):
        for layout in LAYOUTS:
            setup = TrainSetup(**layout, micro_batch_seqs=2, seq_len_tokens=2048)
            sampled.append((f"spread: {layout['parallel']}", llama, gpu, setup))
    return [*sampled, ("spread: experts", mixture, "h100-sxm", EXPERT_PARALLEL)]


def figures() -> dict[str, dict[str, float]]:
    """By group and term: bytes, or microseconds, summed over its points; later points weigh more, so that what one
    loses another cannot make up."""
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    every = points()
    for weight, (group, model, card, setup) in enumerate(every, start=1):
        gpu = find_gpu(card)
        amounts: dict[str, float] = defaultdict(float)
        for rank in rank_memories(model, gpu, setup):
            for term in rank.breakdown.terms:
                amounts[f"{term.category}: {term.name} ({len(term.phases)})"] += rank.num_ranks * term.size_bytes
            amounts["allocator gap"] += rank.breakdown.allocator_gap_bytes
            amounts["context"] += rank.breakdown.context_bytes
        speed = speed_profile(model, gpu, setup).step_time(setup)
        amounts |= {f"time: {part}": 1e6 * seconds for part, seconds in speed.parts_s.items()}
        amounts |= {"GFLOP": speed.flops / 1e9, "parts per million of MFU": 1e6 * speed.mfu_fraction}
        amounts["parts per million of the band"] = 1e6 * speed.band_fraction
        for term_name, amount in amounts.items():
            sums[group][term_name] += weight * amount
    for condition in fields(Conditions):  # other stacks, which calibration and holdout measure
        value = 0.5 if condition.name == "optimizer_part" else not getattr(CURRENT, condition.name)
        for weight, (_, model, card, setup) in enumerate(every[: len(frozen.rows("grid")) // EVERY : 30], start=1):
            speed = step_time(model, find_gpu(card), setup, conditions=Conditions(**{condition.name: value}))
            for part, seconds in speed.parts_s.items():
                sums[f"stack: {condition.name}"][f"time: {part}"] += weight * 1e6 * seconds
    return {group: dict(sorted(terms.items())) for group, terms in sorted(sums.items())}


def test_every_figure_of_the_formula_is_on_record() -> None:
    current = figures()
    if os.environ.get("UPDATE_DOCS"):
        lines = [
            json.dumps({"of": group, **{name: round(value) for name, value in terms.items()}})
            for group, terms in current.items()
        ]
        RECORD.write_text("\n".join(lines) + "\n")
    recorded = {row.pop("of"): row for row in map(json.loads, RECORD.read_text().splitlines())}
    moved = [
        f"{group}, {name}: {now / was - 1:+.3%}"
        if (was := recorded.get(group, {}).get(name))
        else f"{group}, {name}: new"
        for group, terms in current.items()
        for name, now in terms.items()
        if now != pytest.approx(recorded.get(group, {}).get(name, 0), rel=ROUNDING * name.startswith(TIMES), abs=1)
    ]
    gone = [
        f"{group}, {name}: gone"
        for group, terms in recorded.items()
        for name in terms
        if name not in current.get(group, {})
    ]
    assert not moved + gone, "\n".join([*moved, *gone][:40]) + f"\n({__doc__})"
