"""Several plans side by side, on the terminal and as Markdown."""

from collections.abc import Sequence

from rich.console import Console

from planner.plan import Plan
from planner.units import gib
from reports.compare import Named, comparison_rows, comparison_view, plan_labels
from reports.costs import cost_words
from reports.markdown import bullets, document
from reports.markdown import table as markdown_table
from reports.page import Page
from reports.setup_text import setup_words
from reports.text import fit_word, memory_mark, speed_mark


def render_comparison(named: Sequence[Named], console: Console) -> None:
    """The plans in the order given, with what differs between them."""
    page = Page(console)
    view = comparison_view(named, [""] * len(named))
    page.line(view["title"], style="bold")
    for sentence in view["sentences"]:
        page.line(sentence)
    page.line()
    header = ("plan", "fits", "peak", "budget", "tokens/s", "$/M tokens")
    table = page.table(*header, right=header[2:])
    labels = plan_labels(named)
    for label, (_, plan) in zip(labels, named, strict=True):
        candidate = plan.subject
        speed = f"{candidate.tokens_per_s:,.0f}" if isinstance(plan, Plan) and candidate.tokens_per_s else "-"
        page.row(
            table,
            label,
            fit_word(candidate) if isinstance(plan, Plan) else "no",
            gib(candidate.memory_evidence.peak_device_bytes),
            gib(candidate.budget_bytes),
            speed,
            cost_words(plan).removeprefix("$"),
        )
    console.print(table)
    for label, (_, plan) in zip(labels, named, strict=True):
        page.line()
        page.line(label, style="bold")
        if isinstance(plan, Plan):
            memory, speed = memory_mark(plan.chosen.memory_evidence), speed_mark(plan.chosen.speed_evidence)
            page.line(f"{setup_words(plan.chosen.setup)} (memory: {memory}; speed: {speed})", indent=2)
        else:
            page.line(f"nothing fits: {gib(plan.missing_bytes)} missing", indent=2)


def comparison_markdown(named: Sequence[Named]) -> str:
    """The comparison as Markdown."""
    view = comparison_view(named, [""] * len(named))
    return document(view["title"], bullets(view["sentences"]), markdown_table(*comparison_rows(named)))
