"""8-bit optimizers as transformers' Trainer sets them up: an embedding's states in 32 bits, at any depth."""

import pytest

torch = pytest.importorskip("torch")

from planner.hardware.gpus import find_gpu  # noqa: E402
from planner.memory.model import predict_memory  # noqa: E402
from planner.models.adapters import spec_from_config  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from tests.probes.dryrun_small import reported, small_config  # noqa: E402

FIELDS = {"method": "full", "lora_rank": 0, "precision": "bf16-pure", "optimizer": "adamw-8bit", "loss": "chunked"}


@pytest.mark.parametrize("stack", ["trl", "plain-loop"])
def test_states_of_the_table(stack: str) -> None:
    config = small_config("llama", num_hidden_layers=6, vocab_size=32_000)
    gpu, setup = find_gpu("rtx-4090"), TrainSetup(**FIELDS, stack=stack, seq_len_tokens=64)
    assert gpu.compute_capability is not None
    report = reported(config, gpu.compute_capability, setup)
    model = spec_from_config(config, model_id="tiny", source="test")
    formula = predict_memory(model, gpu, setup)
    traced, counted = (
        sum(term.size_bytes for term in terms if term.category == "optimizer")
        for terms in (report.prediction.terms, formula.terms)
    )
    assert counted == pytest.approx(
        traced, rel=0.03
    )  # small vectors stay in 32 bits everywhere, and blocks are rounded
