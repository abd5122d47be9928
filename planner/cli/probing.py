"""Flags that the measuring commands share."""

from pathlib import Path
from typing import Annotated

import typer

from planner.app.machine import STORE_VARIABLE

StorePath = Annotated[
    Path | None, typer.Option("--store", help=f"Store of measurements (default: ${STORE_VARIABLE} or the user's data).")
]
Device = Annotated[str | None, typer.Option("--device", help="cuda:N, or cpu (tiny models). Default: every GPU.")]
Slurm = Annotated[
    Path | None, typer.Option("--slurm", help="Run as cluster jobs through submitit; its folder (shared).")
]
Partition = Annotated[str | None, typer.Option("--partition", help="Slurm partition (with --slurm).")]
