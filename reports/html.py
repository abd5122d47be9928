"""report.html: one self-contained page per plan or comparison. It opens offline and asks the network for nothing.

Pictures are drawn by Apache ECharts (its file is in templates/, see templates/README.md) from the values that
`reports.charts` takes from the plan; text comes from the same functions as the terminal and report.md.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib.resources import files
from typing import Any

from planner import __version__
from planner.core.errors import EnvironmentProblem
from planner.core.install import packages_command
from planner.core.records import dataclass
from planner.core.units import count, gib, percent, seconds
from planner.planning.plan import NoPlan, Plan
from planner.planning.useful import epoch_s
from planner.setup.interchange import request_form
from planner.setup.outcome import Candidate
from reports import text
from reports.charts import (
    accuracy_chart,
    accuracy_rows,
    memory_bars,
    phase_peaks,
    search_history,
    sensitivity_charts,
    speed_memory,
    table_of,
    time_parts,
    timeline_chart,
)
from reports.compare import comparison_markdown, comparison_view
from reports.extras import Extras, extras_from_dict, extras_to_dict
from reports.markdown import bullets, document, escape, fenced, table
from reports.plain import clean, joined
from reports.plan_json import plan_from_dict, plan_to_dict
from reports.rows import (
    COMPARED_RIGHT,
    SOURCE_HEADER,
    best_terms,
    breakdown,
    chosen_and_alternatives,
    compared,
    compared_cells,
    compared_words,
    failures,
    level_table,
    notes_of,
    source_rows,
)
from reports.setup_text import gpus_words, layout_words, method_words, setup_difference, workload_words

ECHARTS_VERSION = "6.1.0"
BAR_HEIGHT_PX, CHART_HEIGHT_PX = 38, 380
MAX_FULL_PLANS = 6
"""A comparison of more plans shows only the comparison, so that the page stays small and quick."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One plan of a report, with what came beside it in plan.json; `name` is its directory."""

    plan: Plan | NoPlan
    extras: Extras = field(default_factory=Extras)
    name: str = ""


def report_html(entries: Sequence[Entry], *, title: str = "", sentences: Sequence[str] = ()) -> str:
    """The page for one plan, or the comparison of several; `title`, `sentences`: its first lines, where the terminal
    has others than a comparison's own.

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
        comparison["title"] = title = title or comparison["title"]
        comparison["sentences"] = sentences or comparison["sentences"]
    title = workload_words(entries[0].plan.workload) if single else title
    return _page(title, entries[0].extras.planner_version, plans, comparison)


def comparison_html(comparison: dict[str, Any]) -> str:
    """The page of a comparison alone (what comparison.html.j2 reads).

    Raises:
        EnvironmentProblem: jinja2 is not installed.
    """
    return _page(comparison["title"], __version__, [], comparison)


def _page(title: str, version: str, plans: Sequence[dict[str, Any]], comparison: dict[str, Any] | None) -> str:
    drawn = [*(comparison["charts"] if comparison else ()), *(chart for view in plans for chart in view["drawn"])]
    charts = {chart["id"]: {key: value for key, value in chart.items() if key != "table"} for chart in drawn}
    page: str = _template().render(
        title=title,
        version=version,
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
        links = [{"target": view["id"], "words": view["short"]} for view in plans]
        return [{"target": "comparison-title", "words": "Comparison"}, *links]
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


def plan_view(plan: Plan | NoPlan, extras: Extras, name: str, *, single: bool) -> dict[str, Any]:
    chosen, workload = plan.subject, plan.workload
    parts = breakdown(chosen, workload.memory_bytes, max_terms=40)
    charts = _charts(plan, extras, name)
    terms = (
        (row.label, gib(row.size_bytes), percent(row.size_bytes / workload.memory_bytes, 1), gib(row.end_bytes))
        for row in parts.rows
    )
    named, ranks = text.memory_mark(parts.terms_evidence), text.rank_peaks_rows(chosen)
    view: dict[str, Any] = {
        "id": name,
        "single": single,
        "plan": plan,
        "launch": extras.launch,
        "written": [launch for launch in extras.launch if launch.files],
        "refused": [launch for launch in extras.launch if not launch.files],
        "found": isinstance(plan, Plan),
        "title": workload_words(workload),
        "short": f"{clean(workload.model.model_id)} on {gpus_words(workload)}, {workload.seq_len_tokens:,} tokens",
        "charts": charts,
        "moved": [chart for key, chart in charts.items() if key.startswith("sensitivity")],
        "drawn": list(filter(None, charts.values())),
        "setup_json": json.dumps(
            {"model": workload.model.model_id, "gpu": workload.gpu.key, **request_form(chosen.setup)}
        ),
        "levels": table_of(*level_table(chosen)),
        "failures": failures(chosen),
        "terms": table_of(("term", "size", "of the card", "up to"), terms),
        "terms_note": f"Peak: {text.memory_mark(parts.peak_evidence)}. Terms: {named}.",
        "ranks": table_of(("GPUs", "number", "peak", "of the fullest"), ranks) if ranks else None,
        "leaf": joined((method_words(chosen.setup), layout_words(chosen.setup) if chosen.setup.num_gpus > 1 else "")),
        "notes": notes_of(plan),
        "environment": table_of(SOURCE_HEADER, source_rows(plan, extras), figures=False),
        "tiles": _tiles(plan, chosen),
        "beside": compared(plan) if isinstance(plan, Plan) and plan.alternatives else [],
        "beside_note": compared_words(plan, compared(plan)) if isinstance(plan, Plan) else "",
        "suggestions": None,
    }
    if isinstance(plan, NoPlan):
        view["suggestions"] = table_of(text.SUGGESTION_HEADER, text.suggestion_rows(plan))
    view["sections"] = _sections(view)
    return view


def _charts(plan: Plan | NoPlan, extras: Extras, name: str) -> dict[str, Any]:
    """Name -> chart, None where there is nothing to draw; one for each value that was moved."""
    chosen, workload = plan.subject, plan.workload
    labelled = (
        [(label, candidate) for label, candidate, _ in chosen_and_alternatives(plan)] if isinstance(plan, Plan) else []
    )
    bars = memory_bars(labelled or [("nearest", chosen)], workload.memory_bytes, workload.budget_bytes)
    speed = speed_memory(plan) if isinstance(plan, Plan) else None
    timeline = extras.timeline if extras.timeline is not None and extras.timeline.points else None
    time, measured = time_parts(chosen), accuracy_rows(plan)
    moved = sensitivity_charts(extras, workload.budget_bytes) if isinstance(plan, Plan) else []
    sized = {
        "memory": (bars, 160 + BAR_HEIGHT_PX * len(bars["labels"])),
        "phases": (phase_peaks(chosen), 240),
        "speed": (speed if speed and speed["points"] else None, 460),
        "timeline": (timeline_chart(timeline, workload.memory_bytes) if timeline else None, CHART_HEIGHT_PX),
        "time": (time if time["labels"] else None, 60 + BAR_HEIGHT_PX * len(time["labels"])),
        "search": (search_history(plan.search) if isinstance(plan, Plan) else None, CHART_HEIGHT_PX),
        "accuracy": (accuracy_chart(measured) if measured else None, 110 + 2 * BAR_HEIGHT_PX * len(measured)),
        **{f"sensitivity-{number}": (chart, 340) for number, chart in enumerate(moved, 1)},
    }
    return {
        key: None if chart is None else {**chart, "height": height, "id": f"{name}-chart-{key}"}
        for key, (chart, height) in sized.items()
    }


def _sections(view: dict[str, Any]) -> list[tuple[str, str]]:
    charts = view["charts"]
    sections = (
        ("suggestions", "What would help", view["suggestions"]),
        ("memory", "Memory", True),
        ("launch", "Run it" if view["launch"] else "The setup", True),
        ("why", "Why", view["plan"].tree),
        ("beside", "Alternatives", view["beside"]),
        ("sensitivity", "If one thing moved", view["moved"]),
        ("time", "Time", charts["time"]),
        ("accuracy", "Predicted and measured", charts["accuracy"]),
        ("search", "Search", charts["search"]),
        ("notes", "Notes", view["notes"]),
        ("environment", "Sources", True),
    )
    return [(key, words) for key, words, there in sections if there]


def _tiles(plan: Plan | NoPlan, chosen: Candidate) -> list[dict[str, Any]]:
    workload, memory = plan.workload, chosen.memory_evidence
    tiles: list[tuple[str, str, tuple[str, ...]]] = [
        (
            "Peak on the device",
            gib(memory.peak_device_bytes),
            (f"of {gib(chosen.budget_bytes)}", text.memory_mark(memory)),
        )
    ]
    speed = chosen.speed_evidence
    if speed.tokens_per_s and speed.step_time_s:
        mark = text.speed_mark(speed)
        per_second = text.rate(speed.tokens_per_s).removesuffix(" tokens/s")
        tiles += [("Tokens per second", per_second, (mark,)), ("Optimizer step", seconds(speed.step_time_s), (mark,))]
        if speed.mfu_fraction:
            tiles.append(("Of the GPU's peak", percent(speed.mfu_fraction), (mark,)))
        if workload.data.epoch_tokens:
            tiles.append(
                ("One epoch", seconds(epoch_s(workload, chosen)), (f"{count(workload.data.epoch_tokens)} tokens", mark))
            )
        if isinstance(plan, Plan) and workload.price_per_hour is not None:
            price = f"{text.dollars(workload.price_per_hour)} per GPU hour"
            tiles.append(("Million tokens", text.cost_words(plan), (price, mark)))
    return [{"name": name, "value": value, "mark": mark} for name, value, mark in tiles]


def plan_markdown(plan: Plan | NoPlan, extras: Extras | None = None) -> str:
    """report.md: what the page says, without its pictures."""
    extras = extras or Extras()
    view, chosen = plan_view(plan, extras, "plan", single=True), plan.subject
    memory = [f"## Memory at the peak of a {gib(plan.workload.memory_bytes)} card", _numbers(view["terms"])]
    memory += [escape(f"The peak falls in the {best_terms(chosen).peak_phase} phase. {view['terms_note']}")]
    memory += [_numbers(view["ranks"])]
    tree = []
    for number, answer in enumerate(plan.tree, 1):
        tree += [f"{number}. {escape(answer.question)} **{escape(answer.choice)}**", f"   {escape(answer.reason)}"]
        if words := text.needs_words(answer.needed_bytes, answer.budget_bytes):
            tree.append(f"   ({words})")
        tree += [f"   - cut: {escape(text.cut_words(cut, answer))}" for cut in answer.cuts]
    if isinstance(plan, Plan):
        blocks = [f"**{escape(text.verdict_sentence(plan))}**", bullets(text.plan_sentences(plan)), *memory]
        blocks += _launch(extras)
    else:
        blocks = [f"**Nothing fits: {gib(plan.missing_bytes)} missing.**"]
        blocks += [f"{escape(text.nearest_sentence(plan))} {escape(text.memory_sentence(chosen))}"]
        blocks += ["## What would make it fit, smallest change first"]
        blocks += [_numbers(view["suggestions"]) if plan.suggestions else "No single change is enough.", *memory]
    blocks += ["## Why: the decision tree", "\n".join(tree)] if tree else []
    if isinstance(plan, Plan) and plan.alternatives:
        header = ("", "difference", "tokens/s", "from", "peak", "from ", "rank", "fits", "what it costs or buys")
        cells = [compared_cells(plan, row) for row in view["beside"]]
        rows = [[row[column] for column in header] for row in cells]
        blocks += ["## Beside it", table(header, rows, right=COMPARED_RIGHT), escape(view["beside_note"])]
    moved = [_numbers(chart["table"]) for chart in view["moved"]]
    blocks += ["## If one thing moved", *moved] if moved else []
    blocks += [escape(text.space_sentence(plan)), "## Every level of the chosen setup", _numbers(view["levels"])]
    blocks += [bullets(view["failures"]), *(["## Notes", bullets(view["notes"])] if view["notes"] else ())]
    blocks += ["## Where this comes from", _numbers(view["environment"])]
    return document(view["title"], *blocks)


def _numbers(shown: Mapping[str, Any] | None) -> str:
    """A table of the page as Markdown."""
    if shown is None:
        return ""
    return table(shown["header"], shown["rows"], right=shown["header"][1:] if shown["figures"] else ())


def _launch(extras: Extras) -> list[str]:
    if not extras.launch:
        return []
    written = [launch for launch in extras.launch if launch.files]
    blocks = ["## Launch", "In the directory of this plan:" if written else ""]
    for launch in written:
        files = ", ".join(escape(file.path) for file in launch.files)
        start = fenced(clean(launch.run or launch.command), "sh") if launch.command else ""
        blocks += [f"**{escape(launch.target)}** ({files})", start, bullets(launch.notes)]
    refused = [f"{launch.target}: {'; '.join(launch.notes)}" for launch in extras.launch if not launch.files]
    return [*blocks, *(["Not written:", bullets(refused)] if refused else ())]


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
