"""`plan report`, `plan compare`, `plan which-gpu` as a person calls them, on plan.json files and the real planner."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from finetune_planner.cli.output import FULL
from finetune_planner.cli.report import compare, report
from finetune_planner.cli.tables import which_gpu
from planner.core.errors import ConfigError, UsageError
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Data
from planner.options.objectives import OBJECTIVES
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan, Plan
from planner.planning.useful import job_s
from planner.samples.dataset import DatasetStats, LengthChoice, choose_length, measure
from planner.samples.rows import num_held_out
from reports.html import plan_files
from tests.planner.helpers import plan_request
from tests.reports.factories import make_gpu, make_plan, make_workload

CARDS = ("mi300x", "mi100", "rx-9060-xt-16gb", "rx-7900-xtx")
"""By tokens/s the second is faster than the third, by the time of the data set below slower."""


@pytest.fixture
def app() -> typer.Typer:
    commands = typer.Typer(rich_markup_mode=None)
    commands.command("report")(report)
    commands.command("compare")(compare)
    commands.command("which-gpu")(which_gpu)
    return commands


@pytest.fixture(autouse=True)
def few_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole table takes ten seconds."""
    monkeypatch.setattr("finetune_planner.cli.tables.all_gpus", lambda: [find_gpu(key) for key in CARDS])


def call(app: typer.Typer, *words: str) -> Result:
    token = FULL.set(True)
    try:
        return CliRunner().invoke(app, list(words), catch_exceptions=False)
    finally:
        FULL.reset(token)


def saved(folder: Path, plan: Plan | NoPlan) -> Path:
    folder.mkdir()
    for name, text in plan_files(plan, html=False).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def two_plans(folder: Path) -> tuple[str, str]:
    first = saved(folder / "a", make_plan())
    second = saved(folder / "b", make_plan(make_workload(gpu=make_gpu("h200", "H200", 139.8))))
    return str(first), str(second)


def test_report_is_written_anew_from_plan_json_alone(app: typer.Typer, tmp_path: Path) -> None:
    folder = saved(tmp_path / "plan", make_plan())
    before = (folder / "report.md").read_text()
    (folder / "report.md").unlink()
    result = call(app, "report", str(folder))
    assert result.exit_code == 0
    assert (folder / "report.md").read_text() == before
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert result.stdout == ""
    assert f"wrote {folder / 'report.html'}" in result.stderr


def test_report_of_several_plans_compares_them(app: typer.Typer, tmp_path: Path) -> None:
    result = call(app, "report", *two_plans(tmp_path), "--out", str(tmp_path / "both"))
    assert result.exit_code == 0
    assert "2 plans compared" in (tmp_path / "both" / "report.md").read_text()
    assert "comparison-speed" in (tmp_path / "both" / "report.html").read_text()


def test_compare_on_the_terminal_and_as_json(app: typer.Typer, tmp_path: Path) -> None:
    plans = two_plans(tmp_path)
    shown = call(app, "compare", *plans).stdout
    assert "RTX 4090" in shown
    assert "H200" in shown
    documents = json.loads(call(app, "compare", *plans, "--json").stdout)
    assert [document["name"] for document in documents] == ["a", "b"]
    assert all(document["kind"] == "plan" for document in documents)


def test_compare_sends_configs_to_the_race(app: typer.Typer, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_model: gpt2\n")
    with pytest.raises(UsageError, match="takes plans"):
        call(app, "compare", str(tmp_path / "a.yaml"), str(tmp_path / "a.yaml"))


def test_compare_of_one_plan_is_a_mistake(app: typer.Typer, tmp_path: Path) -> None:
    folder = saved(tmp_path / "plan", make_plan())
    with pytest.raises(UsageError, match="at least two"):
        call(app, "compare", str(folder))


def test_report_of_a_directory_without_a_plan(app: typer.Typer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no plan\.json") as caught:
        call(app, "report", str(tmp_path))
    assert "--out" in caught.value.hint


def test_which_gpu_ranks_cards_and_json_says_the_same(app: typer.Typer, tmp_path: Path) -> None:
    words = ("which-gpu", "openai-community/gpt2", "--seq-len", "512", "--global-batch", "8")
    shown = call(app, *words, "--out", str(tmp_path))
    rows = json.loads(call(app, *words, "--json").stdout)["cards"]
    assert shown.exit_code == 0
    assert [row["memory_bytes"] for row in rows] == sorted(row["memory_bytes"] for row in rows)
    assert all(row["fits"] for row in rows)
    assert sorted(row["speed_place"] for row in rows) == list(range(1, len(rows) + 1))
    fastest = min(rows, key=lambda row: row["speed_place"])
    assert fastest["tokens_per_s"] == max(row["tokens_per_s"] for row in rows)
    for row in rows:
        line = next(line for line in shown.stdout.splitlines() if line.startswith(row["gpu"] + " "))
        assert f"{row['tokens_per_s']:,.0f}" in line
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "report.md").exists()


def test_which_gpu_gives_the_time_and_the_cost_of_a_data_set(app: typer.Typer, tmp_path: Path) -> None:
    """On every card those of `plan` itself, ranked by them; a card without a known price says so."""
    data = tmp_path / "chats.jsonl"
    row = {"question": "why " * 20, "answer": "so " * 90}
    data.write_text("".join(json.dumps(row | {"answer": "so " * (30 + at % 90)}) + "\n" for at in range(600)))
    words = ("which-gpu", "gpt2", "--method", "full", "--dataset", str(data))
    rows = {row["gpu"]: row for row in json.loads(call(app, *words, "--json").stdout)["cards"]}
    (stats, lengths), card = measured(str(data)), rows["mi300x"]
    workload = plan_request(
        "gpt2", "mi300x", fixed={"method": ("full",), "packing": (lengths.packing,)}, seq_len=lengths.seq_len_tokens,
        data=Data(
            epoch_tokens=lengths.epoch_tokens, epoch_seqs=lengths.epoch_seqs, samples_per_seq=lengths.samples_per_seq,
            real_fractions=lengths.real_fractions, kind=stats.columns,
        ),
    )  # fmt: skip
    plan = plan_workload(workload)
    assert card["duration_s"] == pytest.approx(job_s(workload, plan.chosen))
    assert card["duration_s"] != pytest.approx(workload.epochs * lengths.epoch_tokens / card["tokens_per_s"])  # padding
    assert card["duration_s"] == pytest.approx(workload.epochs * lengths.epoch_tokens / card["samples_tokens_per_s"])
    assert card["cost_usd"] == pytest.approx(card["duration_s"] / 3600 * card["usd_per_hour"])
    assert card["price_date"][:5] == "2026-"
    assert card["price_date"] in card["price_source"]
    assert rows["mi100"]["cost_usd"] is rows["mi100"]["price_date"] is None
    by_time = sorted(rows.values(), key=lambda row: row["duration_s"])
    assert [row["speed_place"] for row in by_time] == list(range(1, len(rows) + 1))
    shown = call(app, *words).stdout
    assert f"chats.jsonl, {workload.epochs:g} epochs" in " ".join(shown.split())
    assert "cards without a known price" in shown
    assert "time and cost: of the samples' own tokens" in " ".join(shown.split())
    assert "Prices of 2026-" in shown


def measured(file: str) -> tuple[DatasetStats, LengthChoice]:
    stats = measure(Path(file), tokenizer=None, columns={}, kinds=OBJECTIVES["sft"].data)
    held_out = num_held_out(stats.num_samples)
    return stats, choose_length(stats, max_tokens=1024, held_out=held_out)


def test_which_gpu_where_nothing_fits_exits_1(app: typer.Typer) -> None:
    result = call(app, "which-gpu", "meta-llama/Llama-3.1-405B", "--method", "full")
    assert result.exit_code == 1
    assert "No card fits. Nearest:" in result.stdout


def test_which_gpu_works_out_no_suggestion_that_it_does_not_show(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of cards that do not fit nor of the 16-bit copy that is tried there: they take most of the time."""
    monkeypatch.setattr("finetune_planner.cli.tables.MAX_FULL_PLANS", len(CARDS) - 1)
    monkeypatch.setattr("planner.planning.decision.alternatives._suggestions", None)
    result = call(app, "which-gpu", "openai/gpt-oss-20b", "--vendor", "AMD", "--seq-len", "512", "--out", str(tmp_path))
    assert result.exit_code == 0
    title, *sentences = re.findall(r"<(?:h1|p)[^>]*>(.+?)</", (tmp_path / "report.html").read_text())[1:3]
    assert title.startswith("Which GPU for openai/gpt-oss-20b")
    assert title in (tmp_path / "report.md").read_text()
    assert all(sentence in (tmp_path / "report.md").read_text() for sentence in sentences)


def test_which_gpu_leaves_out_and_names_cards_without_the_kernel(app: typer.Typer) -> None:
    words = ("which-gpu", "gpt2", "--attention", "flash-attention-2", "--seq-len", "512", "--json")
    result = call(app, *words)
    assert "rx-7900-xtx" not in {row["gpu"] for row in json.loads(result.stdout)["cards"]}
    assert "rx-7900-xtx" in result.stderr


def test_which_gpu_refuses_unknown_words(app: typer.Typer) -> None:
    with pytest.raises(UsageError, match="--sort must be one of"):
        call(app, "which-gpu", "openai-community/gpt2", "--sort", "colour")
    with pytest.raises(UsageError, match="no card of 'Nvidea'") as caught:
        call(app, "which-gpu", "openai-community/gpt2", "--vendor", "Nvidea")
    assert "AMD" in caught.value.hint
