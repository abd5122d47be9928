"""`plan table`: every configuration x card x length x method to Parquet, on all cores, resumable."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from finetune_planner.app.bulk import Grid, configs_of, parquet_writer, rows_of, write_rows
from finetune_planner.app.cores import on_cores
from finetune_planner.app.progress import steps
from finetune_planner.cli import options
from finetune_planner.cli.output import print_json
from planner.core.errors import EnvironmentProblem
from planner.hardware.gpus import all_gpus, find_gpu
from planner.planning.option_values import choices, length, positive


def table(
    out: Annotated[Path, typer.Option(help="Directory of the Parquet files; call again to go on.")],
    configs: Annotated[
        Path | None,
        typer.Option(help="Directory of config.json files. Default: the catalogue."),
    ] = None,
    match: Annotated[str, typer.Option(help="Only configurations whose names contain this.")] = "",
    gpus: Annotated[str, typer.Option(help="Cards, comma-separated; 'all': all but laptops and modules.")] = "all",
    seq_lens: Annotated[str, typer.Option(help="Tokens per sequence, comma-separated.")] = "1024,2048,4096,8192",
    methods: Annotated[str, typer.Option(help="Of full, lora, qlora.")] = "full,lora,qlora",
    global_batch: options.GlobalBatch = None,
    as_json: options.Json = False,
) -> None:
    """Plan every configuration on every card, at every length, by every method (formula level), and write Parquet.

    A row is what `plan MODEL --gpu GPU --seq-len N --method M --no-dry-run` chooses.
    """
    lengths = [positive("seq-lens", length(word)) for word in _words(seq_lens)]
    separate = [card for card in all_gpus() if not card.is_built_in]
    grid = Grid(
        cards=tuple(separate if gpus == "all" else dict.fromkeys(find_gpu(name) for name in _words(gpus))),
        seq_lens=tuple(dict.fromkeys(filter(None, lengths))),
        methods=choices("methods", [methods], ("full", "lora", "qlora")),
        global_batch=positive("global-batch", global_batch),
    )
    configurations = configs_of(configs, match)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {out}: {error.strerror}", hint="choose another --out directory"
        ) from error
    left = [config for config in configurations if not (out / config.file_name(grid)).exists()]
    if len(left) < len(configurations):
        print(
            f"{len(configurations) - len(left)} of {len(configurations)} configurations are in {out} already",
            file=sys.stderr,
        )
    parquet_writer()  # not missed after an hour
    # planned in forks, which lack pyarrow's threads; written here
    answers = on_cores(lambda config: (config, list(rows_of(config, grid))), left)
    bar = steps(answers, f"planning {grid.num_plans} times each", num=len(left))
    rows = sum(write_rows(config, rows, grid, out) for config, rows in bar)
    if as_json:
        print_json({"out": str(out), "configurations": len(configurations), "planned": len(left), "rows": rows})
    else:
        print(f"{rows:,} plans of {len(left)} configurations written to {out}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
