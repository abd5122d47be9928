"""`plan which-model --gpu GPU`: what can be fine-tuned on a card, to what length, how fast."""

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import options
from planner.cli.flags import takes_options
from planner.cli.output import console, show_table
from planner.cli.wish_options import SpaceOptions
from planner.decision.reach import longest_tokens
from planner.errors import EXIT_NOTHING_FITS, UsageError
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.wish import Wish
from planner.workload import Workload
from reports.progress import steps
from reports.which_model import ModelChoice, ModelsSheet


@takes_options
def which_model(
    gpu: options.Gpu,
    match: Annotated[str, typer.Argument(help="Only models whose names contain this.")] = "",
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    *,
    space: SpaceOptions,
    memory: options.Memory,
    every: Annotated[bool, typer.Option("--all", help="Show models that do not fit too.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the whole table to this directory.")] = None,
    as_json: options.Json = False,
) -> None:
    """What can be fine-tuned on this card, to what length, and how fast: the catalogue, largest model first.

    Formula rung: plan MODEL --gpu GPU then looks closer at one model.
    """
    asked = Wish(
        fixed=space.fixed(),
        seq_len=seq_len,
        global_batch=global_batch,
        memory_gib=memory.memory_gib,
        headroom_gib=memory.headroom,
    )
    rows, wish = _rows(asked, find_gpu(gpu), match)
    show_table(out, as_json, ModelsSheet(rows, wish, every))
    if not any(one.fits for one in rows):
        raise typer.Exit(EXIT_NOTHING_FITS)


def _rows(asked: Wish, card: GpuSpec, match: str) -> tuple[list[ModelChoice], Workload]:
    """A row for each model whose name contains `match`, largest first; and the wish for the longest context of them,
    which is what was asked for: models of a shorter one differ.

    Raises:
        UsageError: there is none.
    """
    names = [name for name in catalogue.names() if match.lower() in name.lower()]
    if not names:
        raise UsageError(f"no model of the catalogue has {match!r} in its name", hint="`plan models` lists all")
    rows, wishes = [], []
    for name in steps(names, "planning", console(stderr=True)):
        spec = catalogue.load(name)
        assert spec is not None
        if spec.front_end is not None and not match:  # whose length is another thing: asked for by name
            continue
        wish = asked.workload(spec, card)
        wishes.append(wish)
        longest = longest_tokens(wish)
        within = any(tokens >= wish.seq_len_tokens for tokens in longest.values())
        rows.append(ModelChoice(model=spec, longest_tokens=longest, answer=plan_workload(wish) if within else None))
    rows.sort(key=lambda one: (-one.model.num_params, one.model.model_id))
    return rows, max(wishes, key=lambda one: one.seq_len_tokens)
