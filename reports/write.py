"""The texts of a plan's directory: plan.json, report.md, report.html. Pure; the caller writes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from planner.planning.plan import NoPlan, Plan
from reports.compare import comparison_markdown
from reports.extras import Extras, extras_from_dict, extras_to_dict
from reports.html import Entry, report_html
from reports.markdown import plan_markdown
from reports.plan_json import plan_from_dict, plan_to_dict


def plan_files(plan: Plan | NoPlan, extras: Extras | None = None, *, html: bool = True) -> dict[str, str]:
    """File name -> text of one plan's directory.

    Raises:
        EnvironmentProblem: `html` is wanted and jinja2 is not installed.
    """
    entry = Entry(plan=plan, extras=extras or Extras())
    document = plan_to_dict(plan, extras=extras_to_dict(entry.extras))
    return {"plan.json": json.dumps(document, indent=1, allow_nan=False) + "\n", **report_files([entry], html=html)}


def entry_of(document: Mapping[str, Any], name: str = "") -> Entry:
    """A plan.json document as an entry of a report.

    Raises:
        ConfigError: not a plan.json of this version.
    """
    return Entry(plan=plan_from_dict(document), extras=extras_from_dict(document), name=name)


def report_files(entries: Sequence[Entry], *, html: bool = True) -> dict[str, str]:
    """report.md and report.html for one plan, or for a comparison of several."""
    if len(entries) == 1:
        texts = {"report.md": plan_markdown(entries[0].plan, entries[0].extras)}
    else:
        texts = {"report.md": comparison_markdown([(entry.name, entry.plan) for entry in entries])}
    if html:
        texts["report.html"] = report_html(entries)
    return texts
