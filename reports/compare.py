"""Several plans side by side (models, GPUs, sequence lengths): on the terminal, as Markdown, for the page."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from planner.core.units import gib
from planner.planning.plan import NoPlan, Plan
from reports.charts import Chart, memory_bars, table_of
from reports.markdown import bullets, document
from reports.markdown import table as markdown_table
from reports.page import Page
from reports.plain import clean
from reports.setup_text import gpus_words, setup_words, short_setup_words
from reports.text import cost_per_million, cost_words, fit_word, memory_mark, rate, speed_mark

MAX_LONG_ROWS = 8
"""More plans than this are told apart by the short form of their setups."""

Named = tuple[str, Plan | NoPlan]


def plan_labels(named: Sequence[Named]) -> list[str]:
    """A short label for each plan: what differs between them (model, GPU, sequence length), or their names."""
    workloads = [plan.workload for _, plan in named]
    columns: list[list[str]] = [
        [clean(workload.model.model_id) for workload in workloads],
        [gpus_words(workload) for workload in workloads],
        [f"{workload.seq_len_tokens:,} tokens" for workload in workloads],
        [f"batch {workload.global_batch_seqs}" for workload in workloads],
    ]
    differing = [column for column in columns if len(set(column)) > 1]
    labels = [", ".join(parts) for parts in zip(*differing, strict=True)] if differing else [""] * len(named)
    if len(set(labels)) < len(labels):
        labels = [
            " · ".join(filter(None, (clean(name), label))) for (name, _), label in zip(named, labels, strict=True)
        ]
    if len(set(labels)) < len(labels):
        labels = [f"{number}. {label}" for number, label in enumerate(labels, 1)]
    return labels


def comparison_rows(named: Sequence[Named]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = ("plan", "fits", "peak", "budget", "from", "speed", "from ", "$ per million tokens", "setup")
    rows: list[tuple[str, ...]] = []
    for label, (_, plan) in zip(plan_labels(named), named, strict=True):
        candidate = plan.subject
        evidence = candidate.memory_evidence
        rows.append(
            (
                label,
                fit_word(candidate) if isinstance(plan, Plan) else f"no, {gib(plan.missing_bytes)} missing",
                gib(evidence.peak_device_bytes),
                gib(candidate.budget_bytes),
                memory_mark(evidence),
                rate(candidate.tokens_per_s) if isinstance(plan, Plan) else "-",
                speed_mark(candidate.speed_evidence) if isinstance(plan, Plan) else "",
                cost_words(plan),
                setup_words(candidate.setup) if len(named) <= MAX_LONG_ROWS else short_setup_words(candidate.setup),
            )
        )
    return header, rows


def comparison_view(named: Sequence[Named], targets: Sequence[str]) -> dict[str, Any]:
    """What comparison.html.j2 reads; `targets` are the ids of the plans' own sections, "" where there is none."""
    header, rows = comparison_rows(named)
    labels, charts = plan_labels(named), list[Chart]()
    plans = [(label, plan) for label, (_, plan) in zip(labels, named, strict=True) if isinstance(plan, Plan)]
    sentences = [f"{len(plans)} of {len(named)} fit."]
    if plans:
        label, best = max(plans, key=lambda item: item[1].chosen.tokens_per_s)
        mark = speed_mark(best.chosen.speed_evidence)
        sentences.append(f"Fastest: {label}, {rate(best.chosen.tokens_per_s)} ({mark}).")
        speeds = [plan.chosen.tokens_per_s for _, plan in plans]
        charts.append(
            bars("speed", "Speed", "tokens/s", [label for label, _ in plans], speeds, list(map(rate, speeds)))
        )
    priced = [(cost, label) for label, plan in plans if (cost := cost_per_million(plan)) is not None]
    if priced:
        cost, label = min(priced)
        sentences.append(f"Cheapest: {label}, ${cost:,.3f} per million tokens.")
        costs, names = [cost for cost, _ in priced], [label for _, label in priced]
        words = [f"${cost:,.3f}" for cost in costs]
        charts.append(bars("cost", "Cost of a million tokens", "US dollars", names, costs, words))
    candidates = [(label, plan.subject) for label, (_, plan) in zip(labels, named, strict=True)]
    charts.append(
        {
            **memory_bars(candidates, 1, 1, limit=len(named)),
            "id": "comparison-memory",
            "height": 160 + 34 * len(named),
            "memory_bytes": [plan.workload.memory_bytes for _, plan in named],
            "title": "Memory against each card",
        }
    )
    return {
        "title": f"{len(named)} plans compared",
        "sentences": sentences,
        "table": {"header": header},
        "rows": [{"target": target, "cells": row} for target, row in zip(targets, rows, strict=True)],
        "charts": charts,
    }


def bars(
    name: str, title: str, unit: str, labels: Sequence[str], values: Sequence[float], words: Sequence[str]
) -> Chart:
    return {
        "kind": "bars",
        "id": f"comparison-{name}",
        "title": title,
        "unit": unit,
        "height": 60 + 34 * len(labels),
        "labels": list(labels),
        "values": list(values),
        "words": list(words),
        "table": table_of(("plan", unit), zip(labels, words, strict=True)),
    }


def render_comparison(named: Sequence[Named], console: Console) -> None:
    """The plans in the order given, with what differs between them."""
    page = Page(console)
    view = comparison_view(named, [""] * len(named))
    page.line(view["title"], style="bold")
    for sentence in view["sentences"]:
        page.line(sentence)
    page.line()
    columns = ("plan", "fits", "peak", "budget", "tokens/s", "$/M tokens")
    _, rows = comparison_rows(named)
    short = [
        (label, fits.partition(",")[0], peak, budget, speed.removesuffix(" tokens/s"), cost.removeprefix("$"))
        for label, fits, peak, budget, _, speed, _, cost, _ in rows
    ]
    page.whole(columns, short, right=columns[2:])
    for label, fits, _, _, memory, _, speed, _, words in rows:
        page.line()
        page.line(label, style="bold")
        nothing = f"nothing fits: {fits.removeprefix('no, ')}"
        page.line(f"{words} (memory: {memory}; speed: {speed})" if speed else nothing, indent=2)


def comparison_markdown(named: Sequence[Named]) -> str:
    view = comparison_view(named, [""] * len(named))
    return document(view["title"], bullets(view["sentences"]), markdown_table(*comparison_rows(named)))
