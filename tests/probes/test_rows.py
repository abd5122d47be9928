"""Token mixers that walk through their tokens in Python: short rows say what a long one takes."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from planner.hardware.gpus import find_gpu
from planner.setup import TrainSetup
from probes.dryrun import DryRunReport, dry_run_report, rows
from probes.dryrun.rows import shorter, walks_through_tokens
from probes.module_tree import spec_of_tree
from tests.whole import paired

H100 = find_gpu("h100-sxm")
SIZES = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3}
MAMBA = {"model_type": "mamba", **SIZES, "state_size": 4}
HYBRID = {
    "model_type": "recurrent_gemma", **SIZES, "num_attention_heads": 4, "num_key_value_heads": 1, "lru_width": 64,
    "intermediate_size": 256, "attention_window_size": 512, "block_types": ["recurrent", "attention"],
}  # fmt: skip
"""Attention with a mask among the recurrences: bytes that grow with the square of the row."""
CHUNKED = {"model_type": "mamba2", **SIZES, "num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 4}
SHORT = ({"micro_batch_seqs": 2}, {"checkpointing": 0, "method": "full", "lora_rank": 0, "precision": "fp32"})


@pytest.mark.parametrize(("config", "fields"), paired((MAMBA, HYBRID), SHORT, 1))
def test_short_rows_say_what_a_long_one_takes(
    config: dict[str, Any], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "SHORTEST", {"linear": 8, "softmax": 8})
    spec = spec_of_tree(config, model_id="m", source="s")
    setup = TrainSetup(seq_len_tokens=128, attention="eager", **fields)  # flash attention pads such short rows
    carried = dry_run_report(spec, H100, setup, use_cache=False)
    direct = dry_run_report(replace(spec, from_tree=False), H100, setup, use_cache=False)
    assert isinstance(carried, DryRunReport), carried
    assert isinstance(direct, DryRunReport), direct
    assert any("rows of 8, 16, 32 tokens" in note for note in carried.prediction.notes)
    assert not any("rows of" in note for note in direct.prediction.notes)
    prediction, true = carried.prediction, direct.prediction
    assert prediction.peak_allocated_bytes == pytest.approx(true.peak_allocated_bytes, rel=0.005)
    assert prediction.step_time_s == pytest.approx(true.step_time_s, rel=0.02)
    assert sum(term.size_bytes for term in prediction.terms) == pytest.approx(
        prediction.peak_allocated_bytes, rel=0.001
    )


@pytest.mark.parametrize(("config", "walks"), [(MAMBA, True), (HYBRID, True), (CHUNKED, False)])
def test_what_walks_through_its_tokens_is_seen(config: dict[str, Any], walks: bool) -> None:
    assert walks_through_tokens(config) == walks


def test_rows_hold_as_many_tokens() -> None:
    spec = spec_of_tree(MAMBA, model_id="m", source="s")
    setup = TrainSetup(seq_len_tokens=2048, micro_batch_seqs=3)
    short = shorter(spec, setup)
    assert [(variant.seq_len_tokens, variant.micro_batch_seqs) for variant in short] == [(64, 96), (128, 48), (256, 24)]
    assert shorter(spec, setup.replace(seq_len_tokens=512)) == ()  # too short to gain anything
    assert shorter(spec, setup.replace(seq_len_tokens=2047, micro_batch_seqs=1)) == ()  # 23 x 89 have no such rows
    assert shorter(spec, setup.replace(packing=True)) == ()
    windowed = spec_of_tree(HYBRID, model_id="m", source="s")
    assert shorter(windowed, setup) == ()  # a mask of 512 tokens, which shorter rows have not
    assert shorter(windowed, setup.replace(seq_len_tokens=4096)) == ()
