"""`--memory-gib` is the limit that a dry run's allocations are replayed under, in every command that runs one."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from finetune_planner.cli.app import run
from planner.core.units import GIB
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
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


@pytest.mark.parametrize("limit", [7.5, None])
def test_memory_gib_reaches_the_dry_run_of_every_command(
    cards: list[GpuSpec], limit: float | None, tmp_path: Path
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps({"model_name_or_path": MODEL, "use_peft": True, "per_device_train_batch_size": 1}))
    more = ["--memory-gib", str(limit)] if limit else []
    for words in (["estimate", MODEL, "--micro-batch", "1"], [MODEL, "--method", "lora"], ["check", str(config)]):
        run([*words, "--gpu", "rtx-4090", *more, "--json=full"])
        assert {card.memory_bytes for card in cards} == {
            int(limit * GIB) if limit else find_gpu("rtx-4090").memory_bytes
        }
        cards.clear()
