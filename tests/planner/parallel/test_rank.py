"""Parts of a model: stages, tensor shards, and golden figures: Megatron's activations, GPipe's and 1F1B's counts."""

import pytest

from planner.hardware.gpus import find_gpu
from planner.memory.micro_batch import activation_parts
from planner.memory.rank_part import in_flight, rank_parts, tensor_shard
from planner.setup import TrainSetup
from tests.planner.helpers import loaded


def _pipeline(degree: int, micro_batches: int, schedule: str = "1f1b", **more: object) -> TrainSetup:
    return TrainSetup(
        method="full",
        precision="bf16-mixed",
        lora_rank=0,
        num_gpus=degree,
        pipeline_degree=degree,
        pipeline_schedule=schedule,
        accumulation_steps=micro_batches,
    ).replace(**more)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_a_real_layer_keeps_megatrons_ten_whole_and_sixteen_cut(degree: int) -> None:
    """OPT-6.7B, pure bf16: the part that stays whole is Megatron's 10 s b h (norm inputs 4, matrix inputs 4, masks 2).
    Of the 24/t it keeps 16/t: its ReLU's output is what the next matrix keeps anyway, where the paper's GELU keeps its
    input (8). Eager scores cost 6 a s^2 b / t, not 5: an fp32 softmax and its 16-bit copy, but no dropout on it."""
    model = loaded("facebook/opt-6.7b")
    setup = TrainSetup(
        method="full", precision="bf16-pure", lora_rank=0, attention="eager", checkpointing=0, seq_len_tokens=2048
    )
    parts = activation_parts(tensor_shard(model, degree), find_gpu("a100-80gb"), setup)
    rows = 2048 * model.hidden_size
    stored = {name: size / model.num_layers / rows for name, size in parts.stored.items()}
    assert stored["norm"] + stored["attention"] + stored["mlp"] == pytest.approx(10 + 16 / degree, rel=1e-3)
    heads = 32
    assert stored["scores"] == pytest.approx(6 * heads * 2048 / model.hidden_size / degree)
    paper = rows * (10 + 24 / degree + 5 * heads * 2048 / model.hidden_size / degree)  # arXiv:2205.05198, equation 2
    assert sum(parts.stored.values()) / model.num_layers / paper == pytest.approx(1.06, abs=0.02)


def test_one_rank_is_the_model_itself() -> None:
    model = loaded("qwen/qwen2.5-1.5b")
    (part,) = rank_parts(model, TrainSetup(num_gpus=4, parallel="ddp"))
    assert part.model is model
    assert (part.num_ranks, part.first, part.last, part.in_flight) == (4, True, True, 1)


@pytest.mark.parametrize("degree", [2, 3, 5, 8])
def test_stages_hold_the_whole_model_once(degree: int) -> None:
    """Every parameter is on exactly one stage; the remainder of the layers goes to the first ones."""
    model = loaded("meta-llama/llama-3.1-8b")
    parts = rank_parts(model, _pipeline(degree, 8))
    assert sum(part.model.num_params for part in parts) == model.num_params
    assert sum(part.model.num_layers for part in parts) == model.num_layers
    sizes = [part.model.num_layers for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert [part.first for part in parts] == [True] + [False] * (degree - 1)
    assert [part.last for part in parts] == [False] * (degree - 1) + [True]


def test_a_tied_head_is_a_second_table_on_the_last_stage() -> None:
    model = loaded("qwen/qwen2.5-1.5b")
    first, last = rank_parts(model, TrainSetup(num_gpus=2, parallel="device-map"))
    assert model.tied
    assert not last.model.tied
    table = model.num_embedding_params
    assert first.model.num_params + last.model.num_params == model.num_params + table


def test_1f1b_holds_min_of_micro_batches_and_stages_left() -> None:
    """Megatron-LM section 2.2: stage s of p holds at most p - s micro-batches; GPipe all of them."""
    setup = _pipeline(4, 8)
    assert [in_flight(setup, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(setup, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    gpipe = _pipeline(4, 8, "gpipe")
    assert [in_flight(gpipe, stage, 8) for stage in range(4)] == [8, 8, 8, 8]
