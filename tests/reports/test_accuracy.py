"""The accuracy report: statistics by hand, real baselines on the recorded rows, files."""

import csv
from pathlib import Path

import pytest

from benchmarks.accuracy import AccuracyTable, accuracy_table, page, scatter_svg, write_csv
from benchmarks.measured import MeasuredRow
from benchmarks.published_examples import against_rivals
from benchmarks.shared import DATA, percentile, rows_of
from planner.core.errors import UnknownModelError
from planner.core.units import GIB
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, Fidelity, Prediction, ProbeFailure

SETUP = TrainSetup(method="lora", lora_rank=16)
MODEL = "Qwen/Qwen2.5-0.5B"


def a_row(**changes: object) -> MeasuredRow:
    values: dict[str, object] = {
        "id": "x-1",
        "group": "x",
        "stack": "hf-trainer",
        "source": "owner/repo@commit:path",
        "status": "ok",
        "method": "lora",
        "config_id": "c1",
        "model": MODEL,
        "gpu": "t4",
        "setup": SETUP,
        "allocated_bytes": 10 * GIB,
    }
    return MeasuredRow(**(values | changes))  # type: ignore[arg-type]


def oom_row(**changes: object) -> MeasuredRow:
    return a_row(**({"status": "oom", "allocated_bytes": None} | changes))


def answer(allocated_bytes: float, tokens_per_s: float | None = None) -> Prediction:
    return Prediction(
        level=Fidelity.FORMULA,
        peak_allocated_bytes=round(allocated_bytes),
        peak_reserved_bytes=round(1.05 * allocated_bytes),
        peak_device_bytes=round(1.05 * allocated_bytes) + GIB // 2,
        peak_phase="loss",
        phase_peaks_bytes={},
        terms=(),
        memory_band_fraction=0.1,
        tokens_per_s=tokens_per_s,
    )


def table_of(rows: list[MeasuredRow], allocated_gib: float = 11.0) -> AccuracyTable:
    return accuracy_table(rows, lambda *_: answer(allocated_gib * GIB), what="allocated", level="constant")


def test_statistics_count_each_configuration_once() -> None:
    # c1: errors 11/10, 11/11, 11/12.5 -> +10 %, 0, -12 %: median 0. c2: 11/8 = +37.5 %. c3: 11/22 = -50 %.
    rows = [a_row(id=f"a{size}", allocated_bytes=round(size * GIB)) for size in (10, 11, 12.5)]
    rows += [a_row(id="b", config_id="c2", allocated_bytes=8 * GIB)]
    rows += [a_row(id="c", config_id="c3", group="y", allocated_bytes=22 * GIB, differs=("other loss",))]
    table = table_of(rows)
    assert (table.overall.num_cases, table.overall.num_configs) == (5, 3)
    assert table.overall.median_error == pytest.approx(0.375)
    assert table.overall.bias == pytest.approx(0.0, abs=1e-9)
    assert (table.overall.worst_id, table.overall.worst_error) == ("c", pytest.approx(0.5))
    x, y = table.groups
    assert (x.name, x.num_configs, y.name, y.num_configs) == ("x", 2, "y", 1)
    assert x.median_error == pytest.approx(0.1875)
    assert x.noise_median == pytest.approx(2.5 / 11)
    assert y.noise_median is None
    assert [group.name for group in table.exact] == ["expressed fully", "known differences of the stack"]
    assert [case.row.id for case in table.worst(2)] == ["c", "b"]


def test_false_fits_and_false_rejects() -> None:
    rows = [oom_row(id="o1"), oom_row(id="o2", gpu="a100-80gb", config_id="c2"), a_row(id="r")]
    # 11 GiB allocated is 12.05 on the device: fits a T4 (false for o1), and an A100 (false for o2).
    table = table_of(rows)
    assert (table.false_fits, table.false_rejects) == ((2, 2), (1, 0))
    assert table.false_fit_fraction == pytest.approx(2 / 3)
    table = table_of(rows, allocated_gib=20)  # too much for the T4, fits the A100
    assert (table.false_fits, table.false_rejects) == ((2, 1), (1, 1))


def test_failures_are_listed_not_hidden() -> None:
    def fail(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Prediction | ProbeFailure | None:
        if setup.lora_rank == 8:
            return None
        return ProbeFailure(
            level=Fidelity.DRY_RUN, kind=FailureKind.UNSUPPORTED, message="operator x has no meta kernel"
        )

    rows = [a_row(id="a"), a_row(id="b", setup=SETUP.replace(lora_rank=8))]
    table = accuracy_table(rows, fail, what="allocated", level="dry run")
    assert table.overall is None
    assert table.not_predicted == (("a", "operator x has no meta kernel"), ("b", "no prediction"))
    text = page([table], title="T", command="c")
    assert "No recorded run could be compared." in text


def test_a_model_that_only_torch_reads_is_a_row_without_a_prediction() -> None:
    def without_torch(*_: object) -> None:
        raise UnknownModelError("its module tree cannot be read: torch not installed")

    table = accuracy_table([a_row()], without_torch, what="allocated", level="formula")
    assert table.not_predicted == (("x-1", "its module tree cannot be read: torch not installed"),)


def test_rows_that_cannot_be_compared_are_skipped() -> None:
    rows = [a_row(setup=None, unmapped="GPTQ"), a_row(gpu=None), a_row(unmapped_memory="lengths unknown")]
    assert table_of(rows).cases == ()


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 2), (0.9, 4), (0.95, 4), (0.25, 1), (0.0, 1)])
def test_percentile_is_nearest_rank(fraction: float, expected: float) -> None:
    assert percentile([1, 2, 3, 4], fraction) == expected


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.5)


def test_markdown_golden() -> None:
    rows = [a_row(id="a"), a_row(id="b", config_id="c2", allocated_bytes=11 * GIB, differs=("other loss",)), oom_row()]
    text = page([table_of(rows)], title="Accuracy of a constant", command="python -m benchmarks.accuracy")
    assert text == (Path(__file__).parent / "golden" / "accuracy.md").read_text()


def test_the_csv_holds_every_case(tmp_path: Path) -> None:
    write_csv(table_of([a_row(id="a"), oom_row(id="b", config_id="c2")]), tmp_path / "a.csv")
    lines = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [line["id"] for line in lines] == ["a", "b"]
    assert (lines[0]["error_percent"], lines[1]["measured"], lines[1]["ran"]) == ("10.0", "", "False")


def test_scatter_is_the_same_file_twice(tmp_path: Path) -> None:
    table = table_of([a_row(id="a"), a_row(id="b", group="y", allocated_bytes=5 * GIB)])
    first, two = tmp_path / "one.svg", tmp_path / "two.svg"
    scatter_svg(table, first)
    scatter_svg(table, two)
    assert first.read_bytes() == two.read_bytes()
    text = first.read_text()
    assert "measured, GiB" in text
    assert "x (1)" in text
    assert "y (1)" in text


def test_scatter_of_nothing_is_an_empty_frame(tmp_path: Path) -> None:
    scatter_svg(table_of([]), tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").stat().st_size > 1000


def test_rivals_are_judged_on_what_they_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten GiB for the first config and nothing for the second."""
    names = ("ministral-small-qlora", "plano-4b-qlora")
    rows = [row for row in rows_of(DATA / "published_examples.jsonl") if Path(row["path"]).stem in names]
    python = tmp_path / "python"
    answer = '{"name": "fake 1.0", "seconds": 0.5, "answers": [10.0, "ValueError: no"]}'
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    against_rivals(rows, tmp_path, python)
    formula, rival = capsys.readouterr().out.splitlines()[2:]
    assert formula.startswith("| formula | 2 | 0 |")
    assert rival == f"| fake 1.0 | 1 | 1 | {10 / 8.76 - 1:.1%} | {10 / 8.76 - 1:.1%} | 0% | 0.50 |"
