"""`plan compare-adapters MODEL --gpu GPU`: every kind of adapter in the place of LoRA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli import options
from planner.cli.flags import takes_options
from planner.cli.output import show_table
from planner.cli.wish_options import SpaceOptions
from planner.decision.kinds import compare_kinds
from planner.errors import EXIT_NOTHING_FITS, UsageError
from planner.hardware.gpus import find_gpu
from planner.plan import NoPlan
from planner.planning.answer import plan_workload
from planner.setup import TrainSetup
from planner.wish import Wish
from planner.workload import Workload
from reports.adapters import AdaptersSheet


@takes_options
def compare_adapters(
    model: options.Model,
    gpu: options.Gpu,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    *,
    space: SpaceOptions,
    memory: options.Memory,
    lookup: options.Lookup,
    out: Annotated[Path | None, typer.Option(help="Write the table to this directory.")] = None,
    as_json: options.Json = False,
) -> None:
    """Trained parameters, memory and speed of every kind of adapter, and what was published of their quality.

    Formula rung: plan MODEL --gpu GPU --adapter KIND then plans one of them and dry-runs it.
    """
    card, fixed = find_gpu(gpu), space.fixed()
    _check_compared(fixed)
    asked = Wish(
        fixed={"method": ("lora", "qlora"), **fixed},
        seq_len=seq_len,
        global_batch=global_batch,
        memory_gib=memory.memory_gib,
        headroom_gib=memory.headroom,
    )
    wish = asked.workload(lookup.model(model), card)
    lora = _planned(wish, f"plan {model} --gpu {gpu}")
    rows = compare_kinds(wish, lora)
    show_table(out, as_json, AdaptersSheet(rows, wish, lora))


def _planned(wish: Workload, command: str) -> TrainSetup:
    """The LoRA that a plan chooses; where none fits, it is said and the command ends."""
    plan = plan_workload(wish)
    if isinstance(plan, NoPlan):
        typer.echo(f"no LoRA of {wish.model.model_id} fits on {wish.gpu.name}: {command} says why", err=True)
        raise typer.Exit(EXIT_NOTHING_FITS)
    return plan.chosen.setup


def _check_compared(fixed: Mapping[str, tuple[Any, ...]]) -> None:
    if "adapter" in fixed:
        raise UsageError("compare-adapters compares all of them, got --adapter", hint="leave --adapter out")
    if "full" in fixed.get("method", ()):
        raise UsageError("compare-adapters compares adapters, got --method full", hint="use --method lora or qlora")
