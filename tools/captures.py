"""What a person sees, as pictures: docs/captures/plan-{80,120}-{light,dark}.svg, drawn by rich from the plan itself.

python tools/captures.py     writes them (so does UPDATE_DOCS=1 pytest tests/test_docs.py)
"""

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME

from finetune_planner.app.levels import answered
from finetune_planner.cli.answer import workload_for
from finetune_planner.cli.request_options import RequestOptions
from planner.planning.plan import Plan
from reports.terminal import render_plan

FOLDER = Path(__file__).parents[1] / "docs" / "captures"
MODEL, GPU = "meta-llama/Llama-3.1-8B", "rtx-4090"
WIDTHS = (80, 120)
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
NO_FONTS = re.sub(r"@font-face \{\{.*?\n    \}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""The picture asks the network for nothing: the reader's own monospaced font."""


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    plan = answered(workload_for(MODEL, GPU, RequestOptions()), dry_run=False)
    assert isinstance(plan, Plan)
    by_name = {}
    for width in WIDTHS:
        for name, theme in THEMES.items():
            console = Console(
                record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
            )
            render_plan(plan, console, show=frozenset())
            title = f"plan {MODEL} --gpu {GPU}"
            by_name[f"plan-{width}-{name}.svg"] = console.export_svg(
                title=title, theme=theme, code_format=NO_FONTS, unique_id=f"plan-{width}-{name}"
            )
    return by_name


def write() -> None:
    """All of them, where the pages look for them."""
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    write()
