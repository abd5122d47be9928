"""The HTML report without a browser: self-contained, small, escaped, built from plan.json alone, quick enough."""

import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest

from planner.core.errors import EnvironmentProblem
from planner.core.units import gib
from planner.setup.outcome import Fidelity
from reports import html
from reports.charts import accuracy_rows, memory_bars, pareto_front, search_history, speed_memory
from reports.extras import Extras
from reports.html import ECHARTS_VERSION, Entry, report_html
from reports.rows import chosen_and_alternatives
from tests.reports.factories import (
    make_candidate,
    make_many,
    make_model,
    make_no_plan,
    make_plan,
    make_setup,
    make_workload,
)

ECHARTS_SHA256 = "61f13280aba3161f77fc801bf5f9c786f55f10432153a0683fc5cc0700b013d5"
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Checker(HTMLParser):
    """Collects tags, addresses and ids, and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "srcset", "poster"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    return checker


def charts_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    charts: dict[str, Any] = json.loads(match[1])
    return charts


def test_echarts_is_the_published_file() -> None:
    data = (files("reports") / "templates" / "echarts.common.min.js").read_bytes()
    assert hashlib.sha256(data).hexdigest() == ECHARTS_SHA256
    assert f'version="{ECHARTS_VERSION}"'.encode() in data


@pytest.mark.parametrize("level", [Fidelity.FORMULA, Fidelity.DRY_RUN, Fidelity.PROBE])
def test_page_is_well_formed_and_self_contained(level: Fidelity) -> None:
    page = report_html([Entry(plan=make_plan(level=level))])
    checker = checked(page)
    assert all(address.startswith(("#", "data:")) for address in checker.addresses)
    assert {address[1:] for address in checker.addresses if address.startswith("#")} <= set(checker.ids)
    assert set(charts_of(page)) <= set(checker.ids)
    assert len(page.encode()) < 2_000_000


def test_comparison_of_many_plans_shows_only_the_comparison() -> None:
    entries = [Entry(plan=make_plan(make_workload(seq_len_tokens=512 * n)), name=f"p{n}") for n in range(1, 56)]
    page = report_html([*entries, Entry(plan=make_no_plan(), name="t4")])
    checked(page)
    assert "<article" not in page
    assert len(charts_of(page)["comparison-memory"]["labels"]) == 56


def test_page_without_entries_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one plan"):
        report_html([])


def test_missing_jinja_is_said_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    html._template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(EnvironmentProblem, match="jinja2") as caught:
        report_html([Entry(plan=make_plan())])
    assert "pip install" in caught.value.hint


def test_script_in_chart_data_cannot_end_the_script_element() -> None:
    name = "</script><script>alert(1)</script>"
    page = report_html([Entry(plan=make_plan(make_workload(model=make_model(name))))])
    checked(page)
    assert "<script>alert(1)" not in page


def test_memory_bars_add_up_to_the_device_peak_of_one_rung() -> None:
    plan = make_plan(level=Fidelity.PROBE)
    chart = memory_bars([(label, candidate) for label, candidate, _ in chosen_and_alternatives(plan)], 1, 1)
    sums = [sum(values) for values in zip(*(series["bytes"] for series in chart["series"]), strict=True)]
    assert sums == chart["device_bytes"]
    assert chart["measured_bytes"][1:] == [None] * 4
    assert plan.chosen.probe is not None
    for row, label in zip(chart["table"]["rows"], chart["labels"], strict=True):
        assert row[0] == label
        assert row[-2] == gib(chart["device_bytes"][chart["labels"].index(label)])


def test_pareto_front_is_what_brute_force_finds() -> None:
    candidates = list(make_many(300).ranked)
    front = pareto_front(candidates)
    expected = [
        candidate
        for candidate in candidates
        if not any(
            other.memory_evidence.peak_device_bytes <= candidate.memory_evidence.peak_device_bytes
            and other.tokens_per_s >= candidate.tokens_per_s
            and (other.memory_evidence.peak_device_bytes, other.tokens_per_s)
            != (candidate.memory_evidence.peak_device_bytes, candidate.tokens_per_s)
            for other in candidates
        )
    ]
    places = {(candidate.memory_evidence.peak_device_bytes, candidate.tokens_per_s) for candidate in expected}
    assert {(candidate.memory_evidence.peak_device_bytes, candidate.tokens_per_s) for candidate in front} == places
    assert len(front) == len(places)
    peaks = [candidate.memory_evidence.peak_device_bytes for candidate in front]
    assert peaks == sorted(peaks)


def test_speed_memory_names_each_candidate_once() -> None:
    plan = make_many(50)
    points = speed_memory(plan)["points"]
    assert len(points) == 50
    assert points[0]["difference"] == "the plan"
    assert len({point["difference"] for point in points}) == 50


def test_accuracy_rows_only_where_something_was_measured() -> None:
    assert accuracy_rows(make_plan()) == []
    plan = make_plan(level=Fidelity.PROBE)
    rows = accuracy_rows(plan)
    assert [row["level"] for row in rows] == ["formula ±8 %", "dry run ±1.5 %"]
    for row in rows:
        assert row["memory_error_fraction"] == pytest.approx(row["predicted_bytes"] / row["measured_bytes"] - 1)
    assert rows[1]["speed_error_fraction"] is None


def test_accuracy_rows_count_a_measured_ranked_candidate_once() -> None:
    chosen = make_candidate(level=Fidelity.PROBE)
    other = make_candidate(make_setup(lora_rank=8), level=Fidelity.PROBE)
    rows = accuracy_rows(make_plan(chosen=chosen, alternatives=(), ranked=(chosen, other)))
    assert [row["label"] for row in rows] == ["chosen", "chosen", "ranked 2", "ranked 2"]


@pytest.mark.parametrize("trials", [None, [], "many", [1, 2], [None]])
def test_search_history_is_left_out_where_there_is_none(trials: object) -> None:
    assert search_history({"trials": trials}) is None


def test_search_history_best_never_falls() -> None:
    speeds = [100.0, None, 90.0, 250.0, "x", True]
    chart = search_history({"trials": [{"tokens_per_s": speed} for speed in speeds]})
    assert [point["best"] for point in chart["points"]] == [100.0, 100.0, 100.0, 250.0, 250.0, 250.0]


def test_page_says_where_the_numbers_come_from() -> None:
    page = report_html(
        [Entry(plan=make_plan(), extras=Extras(command="plan x --gpu y", environment={"torch": "2.13.0"}))]
    )
    for words in ("plan x --gpu y", "2.13.0", "formula ±8 %", "formula ±20 %"):
        assert words in page
