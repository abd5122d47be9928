"""`plan mcp`: starts the server of `finetune_planner.cli.agent_server`, whose SDK may be missing."""

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from planner.core.errors import EnvironmentProblem
from planner.core.install import install_command
from planner.core.shipped import DATA

SKILL = DATA / "SKILL.md"


def mcp(
    root: Annotated[
        list[Path] | None, typer.Option("--root", help="Folder whose files may be named; repeatable. Default: here.")
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=1.0, help="Seconds that one answer may take.")] = 120.0,
    no_dry_run: Annotated[bool, typer.Option("--no-dry-run", help="Formula only: each answer in a second.")] = False,
    allow_trace: Annotated[
        bool, typer.Option("--allow-trace", help="Also trace, which executes programs (docs/trace.md).")
    ] = False,
    skill: Annotated[bool, typer.Option("--skill", help="Print SKILL.md, what an agent should know, and end.")] = False,
) -> None:
    """Serve plans to coding agents over MCP (stdio)."""
    if skill:
        sys.stdout.write(SKILL.read_text(encoding="utf-8"))
        return
    gc.disable()  # what the SDK's import makes stays: looking through it is a tenth of the start
    try:
        import mcp  # noqa: F401

        from finetune_planner.cli.agent_server import CommandRunner, build_server
    except ImportError:
        raise EnvironmentProblem("plan mcp needs the MCP SDK", hint=install_command("mcp")) from None
    folders = root or [Path.cwd()]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise EnvironmentProblem(f"--root {missing[0]}: no such folder", hint="name folders that exist")
    server = build_server(CommandRunner(folders, limit, dry_run=not no_dry_run), allow_trace=allow_trace)
    gc.freeze()
    gc.enable()
    server.run("stdio")
