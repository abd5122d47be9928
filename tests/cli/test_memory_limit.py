"""`--memory-gib` is the limit that a dry run's allocations are replayed under, in every command that runs one."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from finetune_planner.cli.app import run
from planner.core.units import GIB
from planner.hardware.gpu import GpuSpec
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, Fidelity, ProbeFailure

MODEL = "huggingfacetb/smollm-135m"


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[GpuSpec]:
    """The cards that dry runs were asked for; none is traced."""
    gpus: list[GpuSpec] = []

    def dry_run(model: object, gpu: GpuSpec, setup: TrainSetup, **options: object) -> ProbeFailure:
        gpus.append(gpu)
        return ProbeFailure(level=Fidelity.DRY_RUN, kind=FailureKind.UNSUPPORTED, message="not traced here")

    monkeypatch.setattr("probes.dryrun.dry_run", dry_run)
    return gpus


def test_memory_gib_reaches_the_dry_run_of_estimate_and_plan(cards: list[GpuSpec], tmp_path: Path) -> None:
    where = [MODEL, "--gpu", "rtx-4090", "--memory-gib", "7.5", "--json=full"]
    assert run(["estimate", *where, "--micro-batch", "1"]) == 0
    assert run([*where, "--method", "lora"]) == 0
    assert len(cards) >= 2
    assert {card.memory_bytes for card in cards} == {int(7.5 * GIB)}


def test_memory_gib_reaches_the_dry_run_of_check(cards: list[GpuSpec], tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps({"model_name_or_path": MODEL, "use_peft": True, "per_device_train_batch_size": 1}))
    run(["check", str(config), "--gpu", "rtx-4090", "--memory-gib", "7.5", "--json=full"])
    assert [card.memory_bytes for card in cards] == [int(7.5 * GIB)]


def test_without_the_flag_the_card_stands(cards: list[GpuSpec]) -> None:
    assert run(["estimate", MODEL, "--gpu", "rtx-4090", "--micro-batch", "1", "--json=full"]) == 0
    assert cards
    assert all(card.memory_bytes > 20 * GIB for card in cards)
