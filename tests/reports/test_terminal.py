"""The terminal reports: golden pages at 80 and 120 columns, and the promises about pipes, colour and hostile text."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

from finetune_planner.cli.app import MAIN_COMMAND, build_app
from planner.core.units import GIB, count, gib
from planner.memory.workload import MIN_RANK_GIVEN, PRICE_GIVEN, Data
from planner.models.catalogue import load
from planner.models.spec import ModelSpec
from planner.options.rollouts import Rollout
from planner.planning.option_values import default_headroom_bytes, memory_and_headroom
from planner.planning.plan import Alternative, with_trades
from planner.setup.outcome import Candidate, Fidelity
from planner.setup.packages import unpackaged
from reports.command import default_next_command
from reports.html import Entry, plan_markdown, report_html
from reports.page import Page
from reports.rows import breakdown, compared
from reports.terminal import render_estimate, render_gpus, render_models, render_plan
from tests.reports.factories import (
    make_candidate,
    make_failed_dry_run,
    make_gpu,
    make_model,
    make_no_plan,
    make_plan,
    make_setup,
    make_workload,
    printed,
)
from tests.reports.golden import assert_golden

HOSTILE = "evil/[bold red]x[/]\x1b[2J\x07\n<script>alert(1)</script>"


def failed_candidate() -> Candidate:
    candidate = make_candidate(level=Fidelity.FORMULA)
    return Candidate(
        setup=candidate.setup,
        budget_bytes=candidate.budget_bytes,
        formula=candidate.formula,
        dry_run=make_failed_dry_run(),
    )


PAGES: dict[str, Callable[[Console], None]] = {
    "plan_formula": lambda console: render_plan(make_plan(), console),
    "plan_probe": lambda console: render_plan(
        make_plan(
            make_workload(data=Data(epoch_tokens=12_000_000), price_per_hour=0.69, price_source="RunPod 2026-11"),
            level=Fidelity.PROBE,
        ),
        console,
        next_command="plan confirm my-plan",
    ),
    "no_plan": lambda console: render_plan(make_no_plan(), console),
    "estimate_probe": lambda console: render_estimate(
        make_candidate(level=Fidelity.PROBE), make_model(), make_gpu(), console
    ),
    "estimate_failed": lambda console: render_estimate(failed_candidate(), make_model(), make_gpu(), console),
    "gpus": lambda console: render_gpus([make_gpu(), make_gpu("t4", "T4", 14.56, bf16_flops_per_s=None)], console),
    "models": lambda console: render_models([load("Qwen/Qwen2.5-7B"), load("bigscience/bloom-560m")], console),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", PAGES)
def test_terminal_golden(name: str, width: int) -> None:
    assert_golden(f"{name}_{width}.txt", printed(PAGES[name], width))


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("name", PAGES)
def test_terminal_no_line_is_wider_than_the_console(name: str, width: int) -> None:
    """Except commands to copy, which must not be broken."""
    for line in printed(PAGES[name], width).splitlines():
        assert len(line) <= width or line.startswith("  plan "), line


@pytest.mark.parametrize("name", PAGES)
def test_terminal_same_words_with_and_without_colour(name: str) -> None:
    plain = printed(PAGES[name])
    coloured = printed(lambda console: PAGES[name](console), force_terminal=True, color_system="truecolor")
    assert "\x1b[" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_terminal_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = printed(PAGES["plan_formula"], force_terminal=True)
    assert "\x1b[3" not in shown
    assert "\x1b[9" not in shown


@pytest.mark.parametrize("name", PAGES)
def test_terminal_ascii_only_output(name: str, tmp_path: Path) -> None:
    """An output that takes ASCII only gets ASCII, and no figure is lost."""
    path = tmp_path / "page.txt"
    with path.open("w", encoding="ascii") as stream:
        PAGES[name](Console(file=stream, width=80))
    assert "?" not in path.read_text().replace("sequence?", "").replace("whole?", "").replace("enough?", "")


def test_terminal_hostile_model_name_is_only_text() -> None:
    model: ModelSpec = make_model(HOSTILE)
    shown = printed(lambda console: render_plan(make_plan(make_workload(model=model)), console), force_terminal=True)
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "[bold red]x[/]" in shown
    assert default_next_command(make_plan(make_workload(model=model))).startswith("plan 'evil/[bold red]x[/]")


def test_terminal_says_when_the_error_band_reaches_past_the_budget() -> None:
    workload = make_workload()
    setup = make_setup(micro_batch_seqs=8, accumulation_steps=2)
    candidate = make_candidate(setup, workload)
    peak = candidate.formula.peak_device_bytes
    tight = Candidate(setup=setup, budget_bytes=int(peak * 1.01), formula=candidate.formula)
    roomy = Candidate(setup=setup, budget_bytes=int(peak * 1.2), formula=candidate.formula)
    words = "the error band reaches past it"
    flat = " ".join(printed(lambda console: render_plan(make_plan(chosen=tight), console)).split())
    assert words in flat
    flat = " ".join(printed(lambda console: render_plan(make_plan(chosen=roomy), console)).split())
    assert words not in flat
    # only the upper side decides
    low = replace(candidate.formula, memory_band_fraction=0.13, bands={"needed": (0.13, 0.005)})
    assert replace(tight, formula=low).verdict == "fits"
    assert replace(tight, formula=replace(low, memory_band_fraction=0.2)).verdict == "tight"  # widened since


def test_next_command_repeats_the_request() -> None:
    fixed = {
        "method": ("lora", "qlora"),
        "lora_rank": (64,),
        "lora_targets": (("q_proj", "v_proj"),),
        "checkpointing": (2,),
        "packing": (False,),
        "attention": ("sdpa",),
    }
    options = {"min_rank": 32, "min_rank_reason": MIN_RANK_GIVEN, "price_per_hour": 0.5, "price_source": PRICE_GIVEN}
    workload = make_workload(fixed=fixed, memory_bytes=20 * GIB, data=Data(epoch_tokens=5_000_000), **options)
    words = default_next_command(make_plan(workload))
    assert words == (
        "plan Qwen/Qwen2.5-7B --gpu rtx-4090 --seq-len 2048 --global-batch 16 --method lora --method qlora --rank 64 "
        "--targets q_proj,v_proj --checkpoint-every 2 --no-packing --attention sdpa --memory-gib 20 "
        "--headroom 1 --min-rank 32 --dataset-tokens 5000000 --price 0.5 --out my-plan"
    )
    bare = unpackaged() | {"loss": ("full",)}
    assert "--global-batch 16 --no-extra-packages --loss full --headroom 1 --out" in default_next_command(
        make_plan(make_workload(fixed=bare))
    )
    rolls = Rollout(num_generations=4, completion_tokens=256, generator="vllm", reference=True)
    other = {"quantize_experts": (True,), "selective_checkpointing": (False,), "rollout": (rolls,)}
    words = default_next_command(
        make_plan(make_workload(fixed=other, prefer="speed", num_epochs=2.0, learning_rate=1e-4, targets=("axolotl",)))
    )
    flags = "--quantize-experts --no-selective-checkpointing --num-generations 4 --completion-len 256 --generator vllm"
    assert f"{flags} --reference" in words
    assert words.endswith("--prefer speed --epochs 2 --lr 0.0001 --target axolotl --out my-plan")
    made: Any = get_command(build_app([MAIN_COMMAND]))
    parameters = {
        word
        for parameter in made.commands[MAIN_COMMAND].params
        for word in (*parameter.opts, *parameter.secondary_opts)
    }
    assert not {word for word in words.split() if word.startswith("--")} - parameters
    usual = make_workload(headroom_bytes=default_headroom_bytes(workload.memory_bytes), memory_bytes=20 * GIB)
    assert "--headroom" not in default_next_command(make_plan(usual))


def test_next_command_is_read_as_the_same_wish() -> None:
    """Numbers in as many digits as they were given; no option that nobody could give."""
    given = {"price_per_hour": 0.123456789, "price_source": PRICE_GIVEN, "learning_rate": 0.00012345678}
    sizes = {"memory_bytes": int(21.3333333 * GIB), "headroom_bytes": int(1.23456789 * GIB)}
    plan = make_plan(make_workload(fixed={"adapter": ("ia3",), "lora_rank": (0,)}, num_epochs=2.0, **given, **sizes))
    words = default_next_command(plan, ("--revision", "v1.1", "--dataset", "who/what")).split()
    assert "--rank" not in words
    assert words[-6:-2] == ["--revision", "v1.1", "--dataset", "who/what"]
    values = {option: float(words[words.index(option) + 1]) for option in ("--price", "--lr", "--epochs")}
    assert values == {"--price": 0.123456789, "--lr": 0.00012345678, "--epochs": 2.0}
    read = memory_and_headroom(
        plan.workload.gpu, *(float(words[words.index(option) + 1]) for option in ("--memory-gib", "--headroom"))
    )
    assert read == (plan.workload.memory_bytes, plan.workload.headroom_bytes)


def test_every_report_refuses_a_choice_that_a_higher_rung_refuted() -> None:
    """A plan whose chosen setup does not fit is never recommended, by none of the reports."""
    candidate = make_candidate(level=Fidelity.DRY_RUN)
    refuted = Candidate(
        setup=candidate.setup,
        budget_bytes=candidate.formula.peak_device_bytes + 1,
        formula=candidate.formula,
        dry_run=candidate.dry_run,
    )
    plan = make_plan(chosen=refuted)
    assert not refuted.fits
    html = report_html([Entry(plan=plan)])
    shown = printed(lambda console: render_plan(plan, console, next_command="trl sft --config x"))
    assert "trl sft" not in shown
    headroom_gib = float(shown.split("--headroom ")[1].split()[0])
    missing = refuted.memory_evidence.peak_device_bytes - refuted.budget_bytes
    assert headroom_gib * GIB >= plan.workload.headroom_bytes + missing
    for text in (printed(lambda console: render_plan(plan, console)), plan_markdown(plan), html):
        assert "Train with" not in text
        assert "Do not run this yet, it does not fit" in text


def test_terminal_plan_without_walk_alternatives_or_notes() -> None:
    bare = make_plan(tree=(), alternatives=(), notes=())
    shown = printed(lambda console: render_plan(bare, console))
    assert "Train with QLoRA" in shown
    assert "Beside it" not in shown


def test_breakdown_slices_join_and_fill_the_card() -> None:
    workload = make_workload()
    for level in (Fidelity.FORMULA, Fidelity.DRY_RUN, Fidelity.PROBE):
        candidate = make_candidate(workload=workload, level=level)
        for max_terms in (None, 3, 20):
            parts = breakdown(candidate, workload.memory_bytes, max_terms=max_terms)
            position = 0
            for row in parts.rows:
                assert row.start_bytes == position
                position = row.end_bytes
            assert position == workload.memory_bytes
            used = [row for row in parts.rows if row.category not in ("headroom", "free")]
            assert used[-1].end_bytes == candidate.memory_evidence.peak_device_bytes


def test_alternative_of_another_rung_names_both_rungs() -> None:
    chosen = make_candidate(level=Fidelity.PROBE)
    other = Alternative(label="same, predicted", candidate=make_candidate(), trade="")
    shown = printed(lambda console: render_plan(make_plan(chosen=chosen, alternatives=(other,)), console))
    assert "probe ±0.4 %" in shown
    assert "formula ±8 %" in shown


def test_terminal_import_is_light() -> None:
    """The formula path must start fast: rich pieces only, nothing scientific, no template engine."""
    code = "import sys, reports.terminal; print(*sorted(m for m in sys.modules if '.' not in m))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    ).stdout.split()
    heavy = {"numpy", "jinja2", "matplotlib", "torch", "scipy", "optuna", "asyncio", "email", "http", "yaml"}
    assert not heavy & set(shown)


def test_alternatives_are_compared_on_one_rung_and_differ_as_their_figures_do() -> None:
    plan = make_plan(level=Fidelity.DRY_RUN)
    rows = compared(replace(plan, alternatives=with_trades(plan.chosen, plan.alternatives)))
    assert plan.chosen.memory_evidence.level is Fidelity.DRY_RUN
    assert {row.peak.level for row in rows} == {row.speed.level for row in rows} == {Fidelity.FORMULA}
    for row in rows[1:]:
        delta = row.peak.peak_device_bytes - rows[0].peak.peak_device_bytes
        assert f"{'+' if delta >= 0 else '-'}{gib(abs(delta))}" in row.trade


def test_a_trade_says_no_zero_percent() -> None:
    plan = make_plan()
    same = replace(plan.alternatives[0], candidate=plan.chosen)
    assert with_trades(plan.chosen, [same])[0].trade == "as fast, as much memory"


def test_what_the_formula_noted_survives_the_rungs_above_it() -> None:
    plan = make_plan(level=Fidelity.DRY_RUN)
    formula = replace(plan.chosen.formula, notes=("54 GiB of the experts stay 16-bit",))
    noted = replace(plan, chosen=replace(plan.chosen, formula=formula))
    assert "54 GiB of the experts stay 16-bit" in printed(lambda console: render_plan(noted, console), 120)
    assert "54 GiB of the experts stay 16-bit" in plan_markdown(noted)
    assert "54 GiB of the experts stay 16-bit" in report_html([Entry(plan=noted)])


@pytest.mark.parametrize(
    ("number", "words"), [(999.6e6, "1 B"), (999.4e6, "999 M"), (999_600, "1 M"), (999, "999"), (1.5437e9, "1.54 B")]
)
def test_a_count_is_never_in_powers_of_ten(number: float, words: str) -> None:
    assert count(number) == words


def test_a_narrow_terminal_keeps_the_words() -> None:
    """Before: the terms of a sum were cut to eight letters."""
    terms = re.findall(r"^  (\w.*?) +\d+\.\d+ [GM]iB  ", printed(PAGES["estimate_failed"], 120), re.MULTILINE)
    assert len(terms) > 3
    shown = printed(PAGES["estimate_failed"], 40)
    assert all(re.search(rf"^  {re.escape(term)} ", shown, re.MULTILINE) for term in terms if len(term) < 24)


@pytest.mark.parametrize("width", [20, 60, 120])
def test_no_figure_of_a_table_is_cut_where_the_terminal_is_narrow(width: int) -> None:
    """A cut figure is a wrong one (63 as 6), a cut key cannot be typed: rows are longer then, and words wrap."""
    out = io.StringIO()
    page = Page(Console(file=out, width=width, color_system=None))
    rows = [("rtx-4060-ti-8gb", "a card of many words", "194,907", "63"), ("t4", "short", "1", "64")]
    page.whole(("--gpu", "name", "tokens/s", "#"), rows, right=("tokens/s", "#"), fixed=("--gpu",))
    first = out.getvalue().splitlines()[1].split()
    assert (first[0], *first[-2:]) == ("rtx-4060-ti-8gb", "194,907", "63")
    assert " ".join(out.getvalue().split()).endswith("64")
    assert all(word in out.getvalue() for word in ("card", "many", "words", "tokens/s"))
