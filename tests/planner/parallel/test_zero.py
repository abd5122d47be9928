"""ZeRO's terms against DeepSpeed 0.19.8 itself: two CPU ranks over gloo (DS_ACCELERATOR=cpu), every tensor storage of
rank 0 followed by a dispatch mode, second and third step. A Llama of 21.37 M parameters, 6 layers, hidden 512, 1 x 8
tokens, bf16, fused AdamW, so that states and buffers are all there is. Measured in November 2026;
ZeRO-3's figures in a group that forgets a collective's buffers when it is over (gloo's own thread may keep them a
little, which earlier figures had in them).
"""

from typing import Any

import pytest

from planner.core.errors import SetupError
from planner.core.units import GIB, MIB
from planner.hardware.gpus import find_gpu
from planner.memory.engines import engine_of
from planner.memory.model import rank_memories
from planner.memory.rank_part import rank_parts
from planner.memory.workspace import cublas_workspace_bytes
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.options.zero_buffers import AUTO, SHIPPED, ZeroBuffers
from planner.setup import TrainSetup
from tests.planner.helpers import loaded

GPU = find_gpu("a100-80gb")
SMALL_BUCKET = 4_000_000
NEAR_MIB = 3.5
"""What is not states or buffers here: activations of 8 tokens and one parameter's gradient (1 to 3 MiB)."""
COPY_MIB = 8 + NEAR_MIB
"""With several buckets the flattened copy (7.6 MiB) is only made where a bucket spans two ranks' parts, which the
traced rank's peak did not meet; the formula is the worst rank's."""


def _llama() -> ModelSpec:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 2048,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    }
    return spec_from_config(config, model_id="tiny", source="a test")


def _phases(parallel: str, steps: int = 1, **buffers: Any) -> dict[str, float]:
    setup = TrainSetup(
        method="full",
        precision="bf16-mixed",
        lora_rank=0,
        num_gpus=2,
        parallel=parallel,
        seq_len_tokens=8,
        accumulation_steps=steps,
        checkpointing=0,
        zero_buffers=ZeroBuffers(**buffers) if buffers else None,
    )
    (rank,) = rank_memories(_llama(), GPU, setup)
    return {
        phase: (size - cublas_workspace_bytes(GPU)) / MIB for phase, size in rank.breakdown.phase_bytes.items() if size
    }


def test_the_model_is_the_measured_one() -> None:
    assert _llama().num_params == pytest.approx(21.37e6, rel=1e-3)


@pytest.mark.parametrize(
    ("parallel", "steps", "backward_mib", "step_mib"),
    [
        ("zero1", 1, 244.71, 245.20),
        ("zero2", 1, 244.70, 245.20),
        ("zero3", 1, 246.59, 264.96),
        ("zero1", 2, 247.76, 245.20),
        ("zero2", 2, 265.58, 245.20),
    ],
)
def test_phases_are_deepspeeds(parallel: str, steps: int, backward_mib: float, step_mib: float) -> None:
    """One bucket for all gradients, DeepSpeed's default at this size."""
    phases = _phases(parallel, steps)
    assert phases["backward"] == pytest.approx(backward_mib, abs=NEAR_MIB)
    assert phases["step"] == pytest.approx(step_mib, abs=NEAR_MIB)


def test_zero3_forward_gathers_the_prefetched_bucket_beside_its_parameters() -> None:
    """286.60 MiB measured: all weights fit into one prefetch, whose flat buffer stands beside what is copied out."""
    assert _phases("zero3")["forward"] == pytest.approx(286.60, abs=NEAR_MIB)


@pytest.mark.parametrize(("parallel", "backward_mib"), [("zero1", 225.70), ("zero2", 193.69), ("zero3", 212.92)])
def test_several_buckets(parallel: str, backward_mib: float) -> None:
    """The same run with reduce_bucket_size 4e6."""
    predicted_mib = _phases(parallel, reduce_bucket_elements=SMALL_BUCKET)["backward"]
    assert backward_mib - NEAR_MIB <= predicted_mib <= backward_mib + COPY_MIB


@pytest.mark.parametrize("parallel", ["zero1", "zero2"])
@pytest.mark.parametrize(("overlaps", "more_mib"), [(False, 54.60), (True, 149.97)])
def test_the_bucket_of_a_file_is_allocated_whole_and_twice_where_it_overlaps(
    parallel: str, overlaps: bool, more_mib: float
) -> None:
    """reduce_bucket_size 5e7 in place of all that is trained, overlap_comm off and on: what the backward takes more."""
    read = _phases(parallel, reduce_bucket_elements=50_000_000, overlaps=overlaps)["backward"]
    assert read - _phases(parallel)["backward"] == pytest.approx(more_mib, abs=0.5)


@pytest.mark.parametrize(
    ("live", "sub_group", "forward_mib", "backward_mib", "step_mib"),
    [(1_000_000_000, 1_000_000_000, 205.58, 207.47, None), (0, 0, 166.71, 170.12, 169.55)],
)
def test_zero3_with_the_sizes_of_others_files(
    live: int, sub_group: int, forward_mib: float, backward_mib: float, step_mib: float | None
) -> None:
    """Bucket, prefetch and persistence "auto" (of hidden size 512) as transformers fills them in, and with nothing
    gathered ahead and one parameter stepped after the other, as Axolotl's zero3 files have it."""
    auto = dict.fromkeys(("reduce_bucket_elements", "prefetch_elements", "persistent_elements"), AUTO)
    phases = _phases("zero3", **auto, live_elements=live, sub_group_elements=sub_group)
    assert phases["forward"] == pytest.approx(forward_mib, abs=1)
    assert phases["backward"] == pytest.approx(backward_mib, abs=NEAR_MIB)
    assert step_mib is None or phases["step"] == pytest.approx(step_mib, abs=NEAR_MIB)


def _catalogue_rank(model_id: str, **fields: object) -> dict[str, int]:
    """Bytes of the rank's terms that are alive in the loss, by name."""
    model = loaded(model_id)
    setup = TrainSetup(**{"parallel": "zero3", "num_gpus": 8, "seq_len_tokens": 512, **fields})  # type: ignore[arg-type]
    (rank,) = rank_memories(model, GPU, setup)
    return {term.name: term.size_bytes for term in rank.breakdown.terms if "loss" in term.phases}


@pytest.mark.parametrize(
    ("model_id", "pool_gib"),
    [("qwen/qwen2.5-7b", 3.07), ("meta-llama/llama-3.1-8b", 3.19), ("qwen/qwen2.5-14b", 3.75)],
)
def test_zero3_keeps_its_gathers_pool_beside_the_loss(model_id: str, pool_gib: float) -> None:
    """DeepSpeed 0.19's order of gathers and releases (`partitioned_param_coordinator.py`, sizes "auto") replayed in
    PyTorch's allocator on fixed segments, as all of them are made on a stream of their own: what it has reserved."""
    model = loaded(model_id)
    setup = TrainSetup(parallel="zero3", num_gpus=2, checkpointing=1, loss="full", zero_buffers=SHIPPED["zero3"])
    (part,) = rank_parts(model, setup)
    state = engine_of(setup).state(part, setup, accumulated=False)
    (at_loss,) = (
        each.size_bytes for each in state.allocations if each.name == "gathered weights" and "loss" in each.moments
    )
    assert (at_loss + state.holes_bytes) / GIB == pytest.approx(pool_gib, rel=0.12)


def test_4_bit_weights_stay_gathered_on_any_number_of_gpus() -> None:
    """Half a byte for each of 68 billion elements in the blocks, and the head (docs/multi-gpu.md)."""
    fields: dict[str, object] = {"method": "qlora", "quantization": "nf4-double"}
    few = _catalogue_rank("meta-llama/llama-3.1-70b", **fields)
    many = _catalogue_rank("meta-llama/llama-3.1-70b", **{**fields, "num_gpus": 64})
    assert few["gathered weights"] == many["gathered weights"] == pytest.approx(36e9, rel=0.05)


@pytest.mark.parametrize("values", [{"overlaps": "no"}, {"live_elements": AUTO}, {"sub_group_elements": AUTO}])
def test_buffers_of_another_kind_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="zero_buffers"):
        ZeroBuffers.read(values)
