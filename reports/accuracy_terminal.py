"""The accuracy report on the terminal: one table per quantity, whole within 80 columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.accuracy import AccuracyTable, GroupStats
from reports.accuracy_text import NAMES

if TYPE_CHECKING:
    from rich.console import Console


def render_accuracy(tables: Sequence[AccuracyTable], console: "Console") -> None:
    """Errors per source, then what was said and seen about fitting."""
    from rich.table import Table

    for table in tables:
        title = f"{NAMES[table.what].capitalize()}, {table.rung}: error of the prediction"
        if table.overall is None:
            console.print(f"{title}: no recorded run could be compared")
            continue
        view = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
        view.add_column("source", no_wrap=True)
        for name in ("configs", "bias", "median", "90th", "95th", "worst", "noise"):
            view.add_column(name, justify="right", no_wrap=True)
        for one in table.groups:
            view.add_row(*_cells(one))
        view.add_row(*_cells(table.overall), style="bold")
        for one in table.exact if len(table.exact) > 1 else ():
            view.add_row(*_cells(one))
        console.print(view)
        if table.what != "tokens_per_s":
            fit = table.fit
            console.print(
                f"{fit.num_out_of_memory} runs went out of memory, {fit.num_false_fits} of them predicted to fit; "
                f"{fit.num_ran} ran, {fit.num_false_rejects} of them predicted not to fit."
            )
        if table.not_predicted:
            console.print(f"{len(table.not_predicted)} rows have no prediction (reasons: --json or --out).")
        console.print()


def _cells(one: GroupStats) -> tuple[str, ...]:
    errors = (one.median_error, one.p90_error, one.p95_error, one.worst_error)
    noise = "" if one.noise_median is None else f"{100 * one.noise_median:.1f} %"
    return (
        one.name.replace("known differences of the stack", "known differences"),
        str(one.num_configs),
        f"{100 * one.bias:+.1f} %",
        *(f"{100 * error:.1f} %" for error in errors),
        noise,
    )
