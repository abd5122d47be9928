"""plan.json: round trip, the same keys on every level, and damaged or hostile files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_planner.cli.app import run
from planner.core.errors import ConfigError, PlannerError
from planner.core.units import MIB
from planner.options.images import Images
from planner.options.rollouts import Rollout
from planner.planning.plan import Plan
from planner.setup.outcome import FailureKind, Fidelity, Measurement, ProbeFailure
from reports.charts import search_history
from reports.extras import (
    MAX_TENSORS,
    Extras,
    LaunchFile,
    LaunchTarget,
    PeakTensor,
    SensitivityPoint,
    Timeline,
    TimelinePhase,
    extras_from_dict,
    extras_to_dict,
    search_values,
    sensitivity,
    timeline_of,
)
from reports.plan_json import (
    LEVEL_KEYS,
    candidate_from_dict,
    candidate_to_dict,
    plan_from_dict,
    plan_to_dict,
    read_plan_json,
)
from tests.reports.factories import (
    make_candidate,
    make_failed_dry_run,
    make_no_plan,
    make_plan,
    make_setup,
    make_workload,
)


def through_json(document: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return text


@pytest.mark.parametrize("level", [Fidelity.FORMULA, Fidelity.DRY_RUN, Fidelity.PROBE])
def test_plan_json_round_trip(level: Fidelity) -> None:
    fixed = {"lora_targets": (("q_proj", "v_proj"),), "method": ("lora", "qlora"), "rollout": (Rollout(),)}
    workload = make_workload(fixed=fixed)
    plan = make_plan(workload, level=level, search={"trials": [1, 2], "stop": "budget"})
    back = plan_from_dict(through_json(plan_to_dict(plan)))
    assert isinstance(back, Plan)
    for name in ("workload", "chosen", "alternatives", "tree", "space", "notes"):
        assert getattr(back, name) == getattr(plan, name), name
    assert dict(back.search) == dict(plan.search)
    # Ranked candidates keep their totals per category, not each term.
    assert plan_to_dict(back)["ranked"] == plan_to_dict(plan)["ranked"]
    assert plan_to_dict(back) == plan_to_dict(plan)


def test_a_plan_of_pictures_comes_back_from_the_json_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pictures = ["--images-per-sample", "2", "--image-size", "640x480"]
    assert run(["google/gemma-3-4b-it", "--gpu", "l40s", "--no-dry-run", "--no-history", *pictures, "--json=full"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert plan_from_dict(document).workload.fixed["images"] == (Images(num=2, width=640, height=480),)


def test_plan_json_keeps_what_a_probe_measured_beside_its_peaks() -> None:
    """The rate of a copy tells a throttled card, the ranks' peaks an uneven job; plans of before have neither."""
    plain = make_candidate(level=Fidelity.PROBE)
    assert isinstance(plain.probe, Measurement)
    peaks = (("rank 1", 1, 9_000), ("rank 0", 1, 8_000))
    candidate = replace(plain, probe=replace(plain.probe, copy_bandwidth_bytes_per_s=3.9e12, rank_peaks=peaks))
    document = through_json(candidate_to_dict(candidate, "tiny", "h200", detail=True))
    assert candidate_from_dict(document).probe == candidate.probe
    for name in ("copy_bandwidth_bytes_per_s", "rank_peaks"):
        del document["probe"]["measured"][name]
    assert candidate_from_dict(document).probe == plain.probe


def test_no_plan_json_round_trip() -> None:
    no_plan = make_no_plan()
    assert plan_from_dict(through_json(plan_to_dict(no_plan))) == no_plan


def test_plan_json_same_keys_on_every_rung_and_for_failures() -> None:
    probed = make_candidate(level=Fidelity.PROBE)
    failed = make_candidate().__class__(
        setup=probed.setup, budget_bytes=probed.budget_bytes, formula=probed.formula, dry_run=make_failed_dry_run()
    )
    for candidate in (probed, failed):
        values = candidate_to_dict(candidate, "m", "g")
        assert set(values) == {"setup", "fits", "budget_bytes", "formula", "dry_run", "trace", "probe", "run"}
        for level in ("formula", "dry_run", "trace", "probe", "run"):
            assert values[level] is None or tuple(values[level]) == LEVEL_KEYS
        assert candidate_to_dict(candidate_from_dict(through_json(values)), "m", "g") == values


def test_extras_round_trip() -> None:
    extras = Extras(
        planner_version="0.1.0",
        created="2026-11-21T07:00:00Z",
        command="plan x",
        environment={"python": "3.11.2"},
        launch=(
            LaunchTarget(
                target="trl",
                command="trl sft --config trl.yaml",
                files=(LaunchFile(path="launch/trl.yaml", text="a: 1\n"),),
                notes=("packing: planned on, runs as off (reason)",),
            ),
        ),
        timeline=Timeline(
            points=((0, 10), (1, 20)),
            phases=(TimelinePhase(name="forward", start=0, end=1),),
            peak_event=1,
            peak_bytes=20,
            tensors=(PeakTensor(name="logits", category="loss", size_bytes=5 * MIB),),
        ),
        sensitivity=sensitivity(make_candidate(), make_candidate),
    )
    document = through_json(plan_to_dict(make_plan(), extras=extras_to_dict(extras)))
    assert extras_from_dict(document) == extras
    assert extras_from_dict(plan_to_dict(make_plan())) == Extras()


def test_sensitivity_keeps_the_effective_batch_and_marks_the_plan() -> None:
    seen = []

    def predict(setup: Any) -> Any:
        seen.append(setup)
        return make_candidate(setup)

    chosen = make_candidate(make_setup(micro_batch_seqs=4, accumulation_steps=3))
    points = sensitivity(chosen, predict)
    assert {setup.global_batch_seqs for setup in seen} == {12}
    assert [point.value for point in points if point.parameter == "micro_batch_seqs"] == [1, 2, 4]
    assert [point.value for point in points if point.parameter == "lora_rank"] == [8, 16, 32, 64, 128, 256, 512]
    assert sum(point.chosen for point in points) == 3
    assert all(isinstance(point, SensitivityPoint) for point in points)
    full = make_setup(method="full", quantization="none", lora_rank=0)
    assert "lora_rank" not in {point.parameter for point in sensitivity(make_candidate(full), make_candidate)}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "plan"}', "\xff", "[" * 100_000, '{"kind": "plan", "schema_version": 99}']
)
def test_read_plan_json_refuses_what_is_no_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        plan_from_dict(read_plan_json(tmp_path))
    assert caught.value.hint


def test_timeline_of_finds_the_peak_and_the_largest_tensors() -> None:
    groups = {("loss", "logits"): 50, ("weights", "base"): 70, ("other", "nothing"): 0}
    phases = (("load", 0), ("forward", 0), ("backward", 4))
    timeline = timeline_of([(0, 100), (5, 300), (9, 200)], groups, "4 of 28 layers", phases=phases)
    assert [(phase.name, phase.start, phase.end) for phase in timeline.phases] == [
        ("forward", 0, 4),
        ("backward", 4, 9),
    ]
    assert (timeline.peak_event, timeline.peak_bytes) == (5, 300)
    assert [tensor.name for tensor in timeline.tensors] == ["base", "logits"]
    assert timeline.depth == "4 of 28 layers"


def test_timeline_of_nothing_is_none_and_many_tensors_are_cut() -> None:
    assert timeline_of([], {}) is None
    timeline = timeline_of([(0, 1)], {("other", str(size)): size for size in range(1, 100)})
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
        (setup, "plan", None, ""),  # the budget ended in its probe
    ]
    values = search_values(trials, "budget spent", budget)
    assert json.loads(json.dumps(values)) == values
    assert [row["feasible"] for row in values["trials"]] == [True, False, False, None]
    assert [row["reason"] for row in values["trials"]] == [
        "",
        "probe: out of memory",
        "the dry run says 2 GiB too much",
        "not measured",
    ]
    assert search_values(trials[:1], "", 1)["trials"][0]["reason"] == "does not fit"
    chart = search_history(values)
    assert [point["tokens_per_s"] for point in chart["points"]][1:] == [None, None, None]
    assert [row[2] for row in chart["table"]["rows"]] == ["yes", "no", "no", ""]


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.just([]), st.just({}), st.just([[1]]))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_plan_from_dict_damaged_anywhere_is_a_config_error_or_still_a_plan(data: st.DataObject) -> None:
    """Any value of the document replaced by junk: a ConfigError (or SetupError), never another exception."""
    document = through_json(plan_to_dict(make_plan(level=Fidelity.PROBE)))
    node: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 5)):
            node = node[key]
            continue
        node[key] = data.draw(JUNK)
        break
    try:
        plan = plan_from_dict(document)
    except PlannerError:
        return
    assert plan.kind in ("plan", "no_plan")
