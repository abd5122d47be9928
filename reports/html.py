"""report.html: one self-contained page per plan or comparison. It opens offline and asks the network for nothing.

Pictures are drawn by Apache ECharts (its file is in templates/, see templates/README.md) from the values that
`reports.charts` takes from the plan; text comes from the same functions as the terminal and report.md.
"""

import json
from collections.abc import Sequence
from dataclasses import field
from functools import cache
from importlib.resources import files
from typing import Any

from planner.errors import EnvironmentProblem
from planner.install import packages_command
from planner.plan import NoPlan, Plan
from planner.records import dataclass
from planner.units import gib
from reports import text
from reports.compare import comparison_view
from reports.extras import Extras
from reports.html_plan import plan_view
from reports.plain import clean
from reports.setup_text import setup_difference, workload_words

ECHARTS_VERSION = "6.1.0"
MAX_FULL_PLANS = 6
"""A comparison of more plans shows only the comparison, so that the page stays small and quick."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One plan of a report, with what came beside it in plan.json; `name` is its directory."""

    plan: Plan | NoPlan
    extras: Extras = field(default_factory=Extras)
    name: str = ""


def report_html(entries: Sequence[Entry], *, version: str = "") -> str:
    """The page for one plan, or the comparison of several.

    Raises:
        EnvironmentProblem: jinja2 is not installed.
        ValueError: no entry.
    """
    if not entries:
        raise ValueError("a report needs at least one plan")
    single = len(entries) == 1
    shown = entries if len(entries) <= MAX_FULL_PLANS else ()
    plans = [plan_view(entry.plan, entry.extras, f"plan-{n}", single=single) for n, entry in enumerate(shown, 1)]
    comparison = None
    if not single:
        targets = [view["id"] for view in plans] or [""] * len(entries)
        comparison = comparison_view([(entry.name, entry.plan) for entry in entries], targets)
    drawn = [*(comparison["charts"] if comparison else ()), *(chart for view in plans for chart in view["drawn"])]
    charts = {one["id"]: {key: value for key, value in one.items() if key != "table"} for one in drawn}
    page: str = _template().render(
        title=workload_words(entries[0].plan.workload) if single else f"{len(entries)} plans compared",
        version=version or entries[0].extras.planner_version,
        echarts_version=ECHARTS_VERSION,
        plans=plans,
        comparison=comparison,
        links=_links(plans, comparison),
        charts_json=_markup(json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")),
        css=_markup(_asset("style.css")),
        js=_markup(_asset("report.js")),
        echarts=_markup(_asset("echarts.common.min.js")),
    )
    return page


def _links(plans: Sequence[dict[str, Any]], comparison: dict[str, Any] | None) -> list[dict[str, str]]:
    if comparison:
        own = [{"target": view["id"], "words": view["short"]} for view in plans]
        return [{"target": "comparison-title", "words": "Comparison"}, *own]
    return [{"target": f"{plans[0]['id']}-{key}", "words": words} for key, words in plans[0]["sections"]]


@cache
def _asset(name: str) -> str:
    return (files("reports") / "templates" / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        hint = f"{packages_command('jinja2')}, or use report.md"
        raise EnvironmentProblem("the HTML report needs jinja2", hint=hint) from error
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"text": text, "gib": gib, "clean": clean, "setup_difference": setup_difference}
    return environment.get_template("report.html.j2")


def _markup(trusted: str) -> Any:
    from markupsafe import Markup

    return Markup(trusted)  # our own assets, and JSON whose "<" is written as \u003c
