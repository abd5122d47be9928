"""`plan compare-adapters`: one row per kind, whose LoRA is what `plan` proposes with kernels that all kinds have."""

import json
from pathlib import Path

import pytest

from finetune_planner.cli.app import run
from planner.options.adapters import ADAPTERS


def test_every_kind_has_a_row_and_lora_is_the_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    card = ["smollm2-360m", "--gpu", "rtx-3060", "--seq-len", "1024"]
    assert run(["compare-adapters", *card, "--json=full", "--out", str(tmp_path)]) == 0
    rows = {row["adapter"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(ADAPTERS)
    alike = ["--method", "lora", "--method", "qlora", "--kernels", "liger,eager"]  # which run with every kind
    assert run([*card, *alike, "--no-dry-run", "--no-history", "--json=full"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert rows["lora"]["candidate"]["setup"] == plan["chosen"]["setup"]
    assert rows["lora"]["predicted_peak_device_bytes"] == rows["rslora"]["predicted_peak_device_bytes"]
    assert rows["dora"]["num_trained_params"] > rows["lora"]["num_trained_params"] > rows["ia3"]["num_trained_params"]
    assert rows["dora"]["tokens_per_s"] < rows["lora"]["tokens_per_s"]
    assert rows["dora"]["time_band_fraction"] > rows["lora"]["time_band_fraction"]
    assert "quantization" in rows["loftq"]["refused"]
    report = (tmp_path / "report.md").read_text()
    assert "2402.09353" in report
    assert "nothing is cited here" in report


def test_one_kind_is_not_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare-adapters", "smollm2-360m", "--gpu", "t4", "--adapter", "dora"]) == 2
    assert "compares all of them" in capsys.readouterr().err
    assert run(["smollm2-360m", "--gpu", "t4", "--adapter", "boft"]) == 2
    assert "oft" in capsys.readouterr().err


def test_a_kind_that_does_not_fit_in_loras_place_may_fit_in_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """DoRA beside LoRA without checkpointing: the table says what to ask, and asking finds it."""
    plan_request = ["Qwen/Qwen2.5-3B", "--gpu", "l4", "--seq-len", "3072", "--method", "lora"]
    assert run(["compare-adapters", *plan_request, "--json=full"]) == 0
    rows = {row["adapter"]: row for row in json.loads(capsys.readouterr().out)}
    assert not rows["dora"]["fits"]
    assert run(["compare-adapters", *plan_request]) == 0
    assert "plan --adapter KIND looks for a setup of its own" in " ".join(capsys.readouterr().out.split())
    assert run([*plan_request, "--adapter", "dora", "--no-dry-run"]) == 0
