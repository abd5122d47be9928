"""The recorded measurements: every row is complete, sourced, and its setup one that can exist."""

import json
from collections import Counter

import pytest

from benchmarks import gathered, own_runs
from benchmarks.measured import MeasuredRow, load_rows, own_rows, version_noise
from planner.core.units import GIB
from planner.hardware.gpus import all_gpus, find_gpu
from planner.models import catalogue
from planner.planning.predict import predict

SINGLE = load_rows()
MULTI = load_rows("multi")


def a_row(**changes: object) -> MeasuredRow:
    values: dict[str, object] = {
        "id": "x-1",
        "group": "x",
        "stack": "hf-trainer",
        "source": "owner/repo@commit:path",
        "status": "ok",
        "method": "lora",
        "config_id": "c1",
        "allocated_bytes": 10 * GIB,
    }
    return MeasuredRow(**(values | changes))  # type: ignore[arg-type]


def test_rows_are_there_and_distinct() -> None:
    assert len(SINGLE) > 800
    assert len(MULTI) > 900
    for rows in (SINGLE, MULTI):
        assert max(Counter(row.id for row in rows).values()) == 1


@pytest.mark.parametrize("rows", [SINGLE, MULTI], ids=["single", "multi"])
def test_rows_have_a_source_a_figure_and_a_place(rows: tuple[MeasuredRow, ...]) -> None:
    cards = {card.key for card in all_gpus()}
    names = {entry.model_id for entry in catalogue.entries()}
    for row in rows:
        measured_here = row.source.startswith("measured for this project: ")
        assert measured_here or "/" in row.source, row.id  # owner/name@commit:path, or an address
        assert "/work" not in row.source
        assert row.gpu is None or row.gpu in cards, row.id
        assert row.model is None or row.model in names, row.id
        assert (row.setup is None) == bool(row.unmapped), row.id
        if row.status == "ok":
            assert row.allocated_bytes or row.reserved_bytes or row.tokens_per_s, row.id
        else:
            assert row.allocated_bytes is row.reserved_bytes is row.tokens_per_s is None
        assert row.setup is None or row.setup.num_gpus == row.num_gpus


def test_memory_figures_are_plausible_for_their_card() -> None:
    capacity = {card.key: card.memory_bytes for card in all_gpus()}
    for row in SINGLE:
        for figure in (row.allocated_bytes, row.reserved_bytes):
            if figure is not None and row.gpu is not None:
                assert 0.2 * GIB < figure <= capacity[row.gpu], row.id


def test_kinds_select_what_they_say() -> None:
    assert all(row.status == "oom" for row in load_rows("oom"))
    assert all(row.tokens_per_s for row in load_rows("speed"))
    assert set(load_rows("memory")) == set(load_rows("allocated")) | set(load_rows("reserved"))
    assert {row.num_gpus for row in SINGLE} == {1}
    assert 1 not in {row.num_gpus for row in MULTI}


def test_enough_rows_can_be_compared_for_an_accuracy_report() -> None:
    for what, least in (("allocated", 120), ("reserved", 70), ("tokens_per_s", 130)):
        assert sum(row.comparable(what) and row.status == "ok" for row in SINGLE) >= least  # type: ignore[arg-type]
    assert sum(row.comparable("allocated") for row in load_rows("oom")) >= 70


def test_fms_full_fine_tuning_is_five_copies_of_the_weights() -> None:
    """Golden: Mistral-7B (7,241,732,096 parameters, 13.49 GiB in bf16) peaks at 67.46 GiB whatever the micro-batch."""
    rows = [row for row in SINGLE if row.group == "fms_acceleration" and row.comparable("allocated")]
    full = [row for row in rows if row.method == "full" and row.model == "mistralai/Mistral-7B-v0.1"]
    figures = [row.allocated_bytes for row in full if row.status == "ok" and row.versions]
    assert figures
    for figure in figures:
        assert figure == pytest.approx(5 * 2 * 7_241_732_096, rel=0.01)


def test_speed_setup_uses_the_mean_length() -> None:
    rows = [row for row in load_rows("speed") if row.group == "peft_metamathqa" and row.setup is not None]
    assert rows
    for row in rows:
        assert (row.setup.seq_len_tokens, row.speed_setup.seq_len_tokens) == (768, 210)


def test_version_noise_is_the_spread_of_repeats() -> None:
    rows = [a_row(id=str(n), allocated_bytes=n * GIB) for n in (10, 11, 12)]
    rows.append(a_row(id="alone", config_id="c2", allocated_bytes=50 * GIB))
    assert version_noise(rows, "allocated") == (pytest.approx(2 / 11),)
    assert version_noise(rows[:1], "allocated") == ()


def test_comparable_needs_setup_card_and_figure() -> None:
    assert not a_row().comparable("allocated")  # no setup
    whole = next(row for row in SINGLE if row.comparable("allocated") and row.status == "ok")
    assert not whole.comparable("reserved") or whole.reserved_bytes is not None


def test_gathered_rows_have_a_first_look_and_half_is_kept_out() -> None:
    """benchmarks/gathered.py: each row that a setup expresses was looked at once; repeats share one lot."""
    rows = gathered.rows()
    first = json.loads(gathered.FIRST.read_text(encoding="utf-8"))
    figures = [row for row in rows if any(row.comparable(what) and row.measured(what) for what in gathered.METRICS)]
    assert len(rows) == len({row.id for row in rows}) >= 280
    runs = [
        (row.group, row.model, row.gpu, row.setup, row.date, *map(row.measured, gathered.METRICS)) for row in figures
    ]
    assert len(runs) == len(set(runs))  # a file under two names is one run
    assert {row.id for row in figures} <= set(first)
    assert 0.35 < sum(map(gathered.kept_out, rows)) / len(rows) < 0.65


def test_own_runs_count_the_tokens_and_the_seconds_that_predictions_count() -> None:
    """What lies between two steps, and both sequences of a pair."""
    timed = [row for row in own_rows() if row.setup is not None]
    assert len(timed) == 32
    for row in timed:
        assert row.step_time_s is not None
        assert row.between_steps_s is not None
        taken_s = row.step_time_s + row.between_steps_s
        assert row.tokens_per_s == pytest.approx(row.setup.tokens_per_step / taken_s, rel=1e-4), row.id


def test_the_formula_keeps_its_aims_on_the_h200() -> None:
    """`python -m benchmarks.own_runs --judge` shows each figure, and the dry run's."""
    for row in own_rows():
        model = catalogue.load(row.model or "")
        if row.group != "h200" or row.setup is None or model is None:
            continue
        prediction = predict(model, find_gpu("h200"), row.setup)
        for what, predicted in (
            ("allocated", prediction.peak_allocated_bytes),
            ("reserved", prediction.peak_reserved_bytes),
        ):
            tolerance = own_runs.AIMS["formula", what]
            assert predicted == pytest.approx(row.measured(what), rel=tolerance), (row.id, what)
        speed = pytest.approx(row.tokens_per_s, rel=own_runs.AIMS["formula", "speed"])
        assert prediction.tokens_per_s == speed, row.id
