"""`trl sft --config` on the emitted file really trains, with the plan's batch, accumulation and adapters; with
TESTS_WHOLE=1 started as a user starts it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.frameworks.exporters import EXPORTERS
from planner.setup import TrainSetup
from tests.launch.conftest import Run, export_request, num_saved, write_launch

pytestmark = pytest.mark.processes

HIDDEN, INTERMEDIATE, KV, LAYERS = 64, 128, 32, 2


def lora_params(rank: int) -> int:
    """Trained parameters of all-linear LoRA on the tiny model, by hand: rank x (in + out) of seven matrices."""
    attention = (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + (HIDDEN + HIDDEN)
    mlp = 3 * (HIDDEN + INTERMEDIATE)
    return LAYERS * rank * (attention + mlp)


@pytest.mark.slow
def test_trl_trains_the_tiny_model_as_planned(place: Path, launch_cold: Callable[..., Run]) -> None:
    setup = TrainSetup(
        precision="fp32", loss="chunked", lora_rank=4, micro_batch_seqs=2, accumulation_steps=3, seq_len_tokens=64
    )
    request = export_request(setup, steps=8, rate=0.05, path="./chats/train.jsonl")
    emitted = EXPORTERS["trl"](request)
    assert not emitted.unsupported
    write_launch(place, emitted)
    run = launch_cold(emitted.command)
    assert len(run.losses) == 8
    assert run.losses[-1] < 0.95 * run.losses[0]
    assert run.state["global_step"] == 8
    assert run.state["train_batch_size"] == setup.micro_batch_seqs
    # 8 steps x 6 sequences of 24 conversations are two epochs: the effective batch is the plan's
    assert run.state["epoch"] == pytest.approx(8 * setup.global_batch_seqs / 24)
    adapter = json.loads((place / "outputs" / "adapter_config.json").read_text())
    assert adapter["r"] == 4
    assert adapter["lora_alpha"] == request.hyper.lora_alpha
    assert num_saved(place / "outputs") == lora_params(4)
