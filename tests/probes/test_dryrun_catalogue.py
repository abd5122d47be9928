"""Model types of the catalogue: the real step runs on meta tensors, and no weight is missing or counted twice.

One type of each way to build a decoder; with TESTS_WHOLE=1 every type."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.models import catalogue
from planner.setup import TrainSetup
from probes.dryrun.depths import plan_depth
from probes.dryrun.engine import full_trace
from probes.dryrun.startup import collection_paused
from probes.stack.configs import load_config
from tests.whole import these

SMALLEST = {entry.model_type: entry for entry in sorted(catalogue.entries(), key=lambda entry: -entry.num_params)}
FP32_KEPT = {"deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
"""Types with a few parameters that stay fp32 whatever the weights' type is."""
EACH_WAY = (
    "bloom",  # ALiBi, queries, keys and values in one matrix
    "deepseek_v3",  # latent attention
    "gpt_oss",  # sinks, experts in one matrix
    "t5",  # an encoder
    "whisper",  # one of another length, convolutions
)


def test_catalogue_has_58_types() -> None:
    assert len(SMALLEST) == 58


@pytest.mark.slow
@pytest.mark.parametrize("model_type", these(EACH_WAY, sorted(SMALLEST)))
def test_dry_run_completes_and_counts_every_weight(model_type: str) -> None:
    entry = SMALLEST[model_type]
    setup = TrainSetup(seq_len_tokens=64, lora_rank=8)
    plan = plan_depth(load_config(entry.config), checkpointing=setup.checkpointing, full_depth=False)
    with collection_paused():
        trace = full_trace(plan, (8, 0), setup).flat()
    weights = sum(
        trace.origins[number].size_bytes
        for number, (category, name) in trace.owners.items()
        if category == "weights" and name in trace.parameter_names
    )
    extra = weights - 2 * entry.num_params
    if model_type in FP32_KEPT:
        assert 0 <= extra < 1 << 20
    else:
        assert extra == 0
    assert any(origin.phase == "loss" for origin in trace.origins.values())
    assert any(category == "optimizer" for category, _ in trace.owners.values())
