"""`plan mcp`: the answers of this program as tools of the Model Context Protocol, over stdio.

Each call is the command line in a child of its own, in an empty folder and with a time limit; what it prints as JSON
comes back short with a handle, under which `details` gives the rest. Paths are taken only within the folders that the
server was started for; no file is executed unless the server was started with `--allow-trace`.
"""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune_planner.cli.agent_desk import Desk
from planner import __version__
from planner.core.errors import EnvironmentProblem
from planner.core.shipped import DATA

if TYPE_CHECKING:
    from mcp.server import MCPServer

SKILL = DATA / "SKILL.md"
INSTRUCTIONS = """Plans LLM fine-tuning: whether a setup fits a GPU, the fastest that does, its speed, and launch
configs. Every figure says its level (formula, profile, dry_run, ...) and band. Nothing is executed. `details` with a
call's handle gives what was left out of its answer."""


def build_server(desk: Desk, *, allow_trace: bool = False) -> "MCPServer[Any]":
    """The server with its tools; the schema of each follows from its signature."""
    from mcp.server import MCPServer

    from finetune_planner.cli.agent_tools import Tools

    server: MCPServer[Any] = MCPServer(
        "finetune-planner", instructions=INSTRUCTIONS, version=__version__, log_level="ERROR"
    )
    tools = Tools(desk)
    answers = (tools.plan, tools.estimate, tools.check, tools.oom, tools.which_gpu, tools.which_model, tools.explain)
    for tool in (*answers, tools.details):
        server.add_tool(tool)
    if allow_trace:
        server.add_tool(tools.trace)
    return server


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
    except ImportError:
        raise EnvironmentProblem("plan mcp needs the MCP SDK", hint="pip install 'finetune-planner[mcp]'") from None
    folders = root or [Path.cwd()]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise EnvironmentProblem(f"--root {missing[0]}: no such folder", hint="name folders that exist")
    server = build_server(Desk(folders, limit, dry_run=not no_dry_run), allow_trace=allow_trace)
    gc.freeze()
    gc.enable()
    server.run("stdio")
