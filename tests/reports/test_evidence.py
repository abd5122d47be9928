"""Dry runs and searches in the form of plan.json."""

import json

from planner.setup.outcome import FailureKind, Fidelity, ProbeFailure
from reports.charts import search_history
from reports.extras import MAX_TENSORS, search_values, timeline_of
from tests.reports.factories import make_candidate, make_setup


def test_timeline_of_finds_the_peak_and_the_largest_tensors() -> None:
    groups = {("loss", "logits"): 50, ("weights", "base"): 70, ("other", "nothing"): 0}
    timeline = timeline_of([(0, 100), (5, 300), (9, 200)], groups, "4 of 28 layers")
    assert timeline is not None
    assert (timeline.peak_event, timeline.peak_bytes) == (5, 300)
    assert [tensor.name for tensor in timeline.tensors] == ["base", "logits"]
    assert timeline.depth == "4 of 28 layers"


def test_timeline_of_nothing_is_none_and_many_tensors_are_cut() -> None:
    assert timeline_of([], {}) is None
    timeline = timeline_of([(0, 1)], {("other", str(size)): size for size in range(1, 100)})
    assert timeline is not None
    assert len(timeline.tensors) == MAX_TENSORS
    assert timeline.tensors[0].size_bytes == 99


def test_search_values_say_what_fits_and_why_not() -> None:
    probed = make_candidate(level=Fidelity.PROBE)
    assert probed.probe is not None
    failure = ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.OUT_OF_MEMORY, message="")
    setup = make_setup()
    budget = probed.budget_bytes
    trials = [
        (setup, "plan", probed.probe, ""),
        (setup, "ranked", failure, ""),
        (setup, "excluded", None, "the dry run says 2 GiB too much"),
    ]
    values = search_values(trials, "budget spent", budget)
    assert json.loads(json.dumps(values)) == values
    assert [row["feasible"] for row in values["trials"]] == [True, False, False]
    assert [row["reason"] for row in values["trials"]] == [
        "",
        "probe: out of memory",
        "the dry run says 2 GiB too much",
    ]
    assert search_values(trials[:1], "", 1)["trials"][0]["reason"] == "does not fit"
    chart = search_history(values)
    assert chart is not None
    assert [point["tokens_per_s"] for point in chart["points"]][1:] == [None, None]
