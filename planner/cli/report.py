"""`plan report`, `plan compare` and `plan which-gpu`: answers side by side, from plan.json alone."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli import cluster_options, options
from planner.cli.completion import complete_gpu
from planner.cli.flags import takes_options
from planner.cli.output import console, print_json, show_table, write_text
from planner.cli.setup_flags import MAX_GPUS
from planner.cli.wish_options import SpaceOptions
from planner.errors import EXIT_NOTHING_FITS, EnvironmentProblem, UsageError
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import all_gpus
from planner.option_values import positive
from planner.plan import NoPlan, Plan
from planner.planning.answer import NUM_RANKED, plan_workload
from planner.planning.runs import Known
from planner.records import dataclass
from planner.wish import Wish
from reports.compare import render_comparison
from reports.html import Entry, report_html
from reports.plan_json import plan_to_dict, read_plan_json
from reports.progress import steps
from reports.which_gpu import SORTS, GpusSheet, rank_gpus
from reports.write import entry_of, report_files

Directories = Annotated[
    list[Path],
    typer.Argument(help="Directories that `plan ... --out DIR` wrote, or plan.json files.", show_default=False),
]
Out = Annotated[Path | None, typer.Option("--out", help="Directory for report.md and report.html.")]


def report(plans: Directories, out: Out = None) -> None:
    """Write report.html and report.md anew from plan.json; several directories give one report that compares them."""
    entries = _entries(plans)
    folder = out or (plans[0] if plans[0].is_dir() else plans[0].parent) if len(plans) == 1 else out or Path()
    _write(folder, report_files(entries, html=False))
    _write_html(folder, entries)


def compare(
    plans: Annotated[
        list[Path], typer.Argument(help="Plan directories, or training configs (with --gpu).", show_default=False)
    ],
    out: Out = None,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU that training configs are compared on.", autocompletion=complete_gpu)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of configs that name none.")] = None,
    as_json: options.Json = False,
) -> int:
    """Several plans, or several training configs on one GPU, side by side."""
    if any(path.is_file() and path.name != "plan.json" for path in plans):
        from planner.cli.check import compare_configs

        if gpu is None:
            raise UsageError("training configs are compared on a GPU", hint="plan compare A.yaml B.yaml --gpu rtx-4090")
        return compare_configs(plans, gpu, model=model, as_json=as_json)

    if len(plans) < 2:
        raise UsageError("plan compare needs at least two plans", hint="plan compare DIR DIR ...")
    entries = _entries(plans)
    if out is not None:
        _write(out, report_files(entries, html=False))
        _write_html(out, entries)
    if as_json:
        print_json([{"name": entry.name, **plan_to_dict(entry.plan)} for entry in entries])
    else:
        render_comparison([(entry.name, entry.plan) for entry in entries], console())
    return 0


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Which cards are shown, and in which order."""

    vendor: Annotated[str | None, typer.Option(help="Only cards of this maker.")] = None
    sort: Annotated[str, typer.Option(help="size (smallest that fits first), speed or cost.")] = "size"
    fitting: Annotated[bool, typer.Option("--fitting", help="Leave out cards that do not fit.")] = False

    def cards(self) -> list[GpuSpec]:
        """The cards.

        Raises:
            UsageError: no such order, or no such maker.
        """
        if self.sort not in SORTS:
            raise UsageError(f"--sort must be one of {', '.join(SORTS)}; got {self.sort!r}", hint="use --sort size")
        cards = [one for one in all_gpus() if self.vendor is None or one.vendor.lower() == self.vendor.lower()]
        if not cards:
            known = ", ".join(sorted({card.vendor for card in all_gpus()}))
            raise UsageError(f"no card of {self.vendor!r} in the GPU table", hint=f"makers: {known}")
        return cards


@takes_options
def which_gpu(
    model: options.Model,
    *,
    gathering: cluster_options.Gathering,
    seq_len: options.SeqLen = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per optimizer step.")] = None,
    space: SpaceOptions,
    headroom: options.Headroom = None,
    table: TableOptions,
    out: Out = None,
    lookup: options.Lookup,
    as_json: options.Json = False,
) -> None:
    """Rank the GPU table for MODEL by tokens/s and by cost per million tokens, smallest card that fits first.

    Formula rung: plan MODEL --gpu GPU then looks closer at one card. With --gpus every card stands for so many of them,
    over a coarse choice of setups (DDP and FSDP2).
    """
    cards, fixed, spec = table.cards(), space.fixed(), lookup.model(model)
    if (positive("gpus", gathering.gpus, maximum=MAX_GPUS) or 1) > 1:
        fixed = {**_coarse(), **fixed}
    wish = Wish(fixed=fixed, seq_len=seq_len, global_batch=global_batch, headroom_gib=headroom)
    answers = _plans(spec, cards, wish, gathering.of, charts=out is not None)
    choices = rank_gpus(answers, sort=table.sort)
    show_table(out, as_json, GpusSheet(choices, table.fitting))
    if out is not None:
        _write_html(out, [Entry(plan=one.answer, name=one.gpu.key) for one in choices])
    if not any(one.fits for one in choices):
        raise typer.Exit(EXIT_NOTHING_FITS)


def _coarse() -> dict[str, tuple[Any, ...]]:
    """What is tried of several GPUs where nothing is said."""
    from planner.decision.clusters import COARSE, COARSE_SPREADS

    coarse = {name: COARSE[name] for name in ("optimizer", "loss", "checkpointing", "kbit_fp32_cast")}
    return {**coarse, "parallel": COARSE_SPREADS}


def _plans(
    spec: Any, cards: list[Any], wish: Wish, cluster: Callable[[GpuSpec], Cluster | None], *, charts: bool
) -> list[Plan | NoPlan]:
    """One plan per card; a card on which the options contradict each other (no kernel for them) is left out.

    Args:
        charts: the plans are drawn, with their runners-up.

    Raises:
        UsageError: on every card.
    """
    answers: list[Plan | NoPlan] = []
    problem: UsageError | None = None
    left_out = []
    memory = Known()
    for card in steps(cards, "planning", console(stderr=True)):
        try:
            asked = wish.workload(spec, card, cluster(card))
            answers.append(plan_workload(asked, known=memory, num_ranked=NUM_RANKED if charts else 1))
        except UsageError as error:
            problem = error
            left_out.append(card.key)
    if not answers:
        assert problem is not None
        raise problem
    if left_out:
        print(f"left out, where the options cannot be kept: {', '.join(left_out)}", file=sys.stderr)
    return answers


def _entries(plans: list[Path]) -> list[Entry]:
    return [entry_of(read_plan_json(path), name=path.resolve().name if path.is_dir() else path.stem) for path in plans]


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        write_text(folder / name, text)
        typer.echo(f"wrote {folder / name}", err=True)


def _write_html(folder: Path, entries: list[Entry]) -> None:
    """report.html, or a word on stderr where jinja2 is missing: report.md is there in any case."""
    try:
        page = report_html(entries)
    except EnvironmentProblem as error:
        typer.echo(f"report.html left out: {error.message} ({error.hint})", err=True)
        return
    _write(folder, {"report.html": page})
