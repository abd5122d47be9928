"""Weights of FSDP2 are made after they are cut: every rank's codes are its part of one matrix, statistics are whole."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.setup import TrainSetup
from probes.stack import parallelize
from probes.stack.build import build_model
from probes.stack.parallelize import layout_model
from probes.stack.quantize import is_nf4, random_nf4
from probes.stack.step import inner_model

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
NUM_RANKS = 2
CPU = torch.device("cpu")
SETUP = TrainSetup(method="qlora", quantization="nf4-double", num_gpus=NUM_RANKS, parallel="fsdp2", lora_rank=4)


def test_a_rank_keeps_its_part_of_the_codes_and_all_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two ranks, in a group that answers without communicating."""
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(*args: Any) -> Any:
        packed, state = random_nf4(*args)
        whole.append((packed.clone(), state.absmax.clone()))
        return packed, state

    monkeypatch.setattr(parallelize, "random_nf4", watched)
    assert parallelize.shards_first(SETUP)
    dist.init_process_group("fake", store=FakeStore(), rank=NUM_RANKS - 1, world_size=NUM_RANKS)
    try:
        model = build_model(LLAMA, SETUP, device="meta")
        assert parallelize.whole_quantized_bytes(model) == 2 * (64 * (64 + 64 + 32 + 32) + 3 * 64 * 160) // 2
        layout_model(model, SETUP, device=CPU)
        parallelize.fill_shards(model, CPU, SETUP)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        quantized = [module for module in inner_model(model).modules() if is_nf4(module)]
        assert len(quantized) == len(whole) == 2 * 7
        for module, (packed, absmax) in zip(quantized, whole, strict=True):
            (rank,) = module.weight.device_mesh.get_coordinate()
            mine = packed.chunk(NUM_RANKS)[rank]
            assert torch.equal(module.weight._local_tensor.view(torch.uint8), mine.view(torch.uint8))
            assert len(mine.view(torch.uint8).unique()) > 100  # nearly all pairs of 4-bit codes
            assert torch.equal(module.quant_state.absmax, absmax)
    finally:
        dist.destroy_process_group()
