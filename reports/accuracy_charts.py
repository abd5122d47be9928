"""Scatter plots of predicted against measured, as SVG files that do not change when nothing changed."""

from pathlib import Path

from planner.units import GIB
from reports.accuracy import AccuracyTable
from reports.accuracy_text import NAMES

MARKERS = "osD^vPX*<>"  # sources differ by shape as well as by colour


def scatter_svg(table: AccuracyTable, path: Path) -> None:
    """Write predicted over measured, one marker per source, with the diagonal and a band of 10 %.

    Raises:
        ImportError: matplotlib is not installed (the `report` extra).
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    scale = 1.0 if table.what == "tokens_per_s" else float(GIB)
    unit = "tokens/s" if table.what == "tokens_per_s" else "GiB"
    cases = [case for case in table.cases if case.measured is not None]
    with rc_context({"svg.hashsalt": "finetune-planner", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 6.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for number, group in enumerate(sorted({case.row.group for case in cases})):
            points = [case for case in cases if case.row.group == group]
            measured = [(case.measured or 0.0) / scale for case in points]
            predicted = [case.predicted / scale for case in points]
            marker = MARKERS[number % len(MARKERS)]
            axes.scatter(measured, predicted, s=22, alpha=0.7, marker=marker, label=f"{group} ({len(points)})")
        if cases:
            values = [value / scale for case in cases for value in (case.measured or 0.0, case.predicted)]
            ends = [0.8 * min(values), 1.25 * max(values)]
            axes.plot(ends, ends, color="0.3", linewidth=1.0, label="exact")
            axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="0.5", alpha=0.15)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(*ends)
            axes.set_ylim(*ends)
            axes.legend(fontsize=8, frameon=False)
        axes.set_xlabel(f"measured, {unit}")
        axes.set_ylabel(f"predicted ({table.rung}), {unit}")
        axes.set_title(NAMES[table.what].capitalize(), fontsize=11)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "finetune-planner"})
