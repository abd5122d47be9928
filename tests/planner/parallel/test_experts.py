"""Experts that are distributed over GPUs: bytes and seconds by hand, refusals, what stays as it is."""

from typing import Any

import pytest

from planner.core.errors import SetupError, Undetermined
from planner.frameworks.exporters import EXPORTERS, ExportRequest
from planner.frameworks.hyperparameters import choose
from planner.frameworks.readers import FileContext, read_text
from planner.frameworks.readers.types import canonical
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.engines import why_not
from planner.memory.model import rank_memories
from planner.memory.workload import Workload
from planner.planning.decision.layouts import all_layouts, layout_name
from planner.setup import TrainSetup
from planner.speed.several_gpus.speed import EXPERT_PARALLEL_BAND, layout_step_time
from tests.planner.helpers import loaded

H100 = find_gpu("h100-sxm")
MIXTURE = "qwen/qwen3-30b-a3b"
MODEL = loaded(MIXTURE)
EXPERTS, LAYERS, EACH = 128, 48, 3 * 2048 * 768
"""Of that model: experts of a layer, layers, elements of an expert."""


def _setup(degree: int = 8, **fields: Any) -> TrainSetup:
    values = {"num_gpus": 8, "parallel": "fsdp2", "method": "full", "lora_rank": 0, "precision": "bf16-mixed", **fields}
    return TrainSetup(expert_degree=degree, **values)


def test_it_pays_where_gathering_experts_takes_longer_than_moving_tokens() -> None:
    model, cluster = MODEL, make_cluster(H100, 8)

    def tokens_per_s(degree: int, seqs: int) -> float:
        setup = _setup(degree, precision="bf16-pure", seq_len_tokens=512, micro_batch_seqs=seqs)
        step = layout_step_time(model, H100, setup, cluster)
        assert step.uncertainty.judged == EXPERT_PARALLEL_BAND * (degree > 1)
        return step.tokens_per_s

    assert tokens_per_s(8, 1) > 1.05 * tokens_per_s(1, 1)  # the host sets much of either's pace
    assert tokens_per_s(8, 32) < tokens_per_s(1, 32)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parallel": "zero3"}, "beside fsdp2 alone"),
        ({"num_gpus": 16, "tensor_degree": 2}, "beside fsdp2 alone"),
        ({"num_gpus": 12}, "does not divide the 12 GPUs"),
        ({"num_gpus": 16, "shard_degree": 4}, "does not divide the 4 GPUs"),
        ({"reshard_after_forward": False}, "gathered weights that stay"),
        ({"offload": "parameters"}, "offloading"),
        ({"precision": "fp16-mixed"}, "bf16 only"),
        ({"compile": True}, "torch.compile"),
        ({"num_gpus": 1, "parallel": "none"}, "need more than one GPU"),
    ],
)
def test_what_cannot_be_built(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        _setup(**fields)


@pytest.mark.parametrize(
    ("name", "setup", "words"),
    [
        (MIXTURE, _setup(), ""),
        (MIXTURE, _setup(method="lora", lora_rank=16, precision="bf16-autocast"), "full fine-tuning"),
        (MIXTURE, _setup(optimizer="adamw-8bit"), "DTensors"),
        ("meta-llama/llama-3.1-8b", _setup(), "no stacked experts"),
        ("qwen/qwen1.5-moe-a2.7b", _setup(), "60 experts"),
        ("qwen/qwen1.5-moe-a2.7b", _setup(4), ""),
        ("meta-llama/llama-4-scout-17b-16e", _setup(), "no plan that dispatches"),
        ("google/gemma-4-26b-a4b-it", _setup(), "also splits dense matrices"),
    ],
)
def test_models_and_setups_that_no_engine_runs(name: str, setup: TrainSetup, words: str) -> None:
    reason = why_not(loaded(name), setup)
    assert (words in reason) if words else not reason


def test_mixtures_are_tried_unasked_and_others_are_not() -> None:
    def names(model: str, **fixed: tuple[Any, ...]) -> set[str]:
        workload = Workload(
            model=loaded(model), gpu=H100, memory_bytes=H100.memory_bytes, headroom_bytes=0, seq_len_tokens=2048,
            global_batch_seqs=8, cluster=make_cluster(H100, 8), fixed=fixed,
        )  # fmt: skip
        return {layout.name for layout in all_layouts(workload) if "experts" in layout.name and not layout.reason}

    assert names(MIXTURE) == {"experts 8 under FSDP2"}
    assert names("qwen/qwen1.5-moe-a2.7b") == {"experts 4 under FSDP2"}
    assert names("meta-llama/llama-3.1-8b") == set()
    assert names(MIXTURE, parallel=("fsdp2",)) == set()
    assert names(MIXTURE, expert_degree=(2, 4), parallel=("fsdp2",)) == {
        f"experts {degree} under FSDP2" for degree in (2, 4)
    }
    assert layout_name(_setup(8, num_gpus=16, shard_degree=8)) == "experts 8 under FSDP2 in groups of 8"


@pytest.mark.parametrize("target", ["hf", "trl", "torchtitan"])
@pytest.mark.parametrize("fields", [{}, {"num_gpus": 16, "shard_degree": 8, "accumulation_steps": 2}])
def test_files_say_the_degree_and_are_read_back(target: str, fields: dict[str, Any], tmp_path: Any) -> None:
    setup = _setup(4, loss="full", **fields)
    request = ExportRequest(
        model_id="Qwen/Qwen3-30B-A3B", setup=setup, hyper=choose(setup), model=MODEL, num_nodes=setup.num_gpus // 8
    )
    launch = EXPORTERS[target](request)
    assert not launch.refused
    (file,) = [file for file in launch.files if "ep_size" in file.text or "expert_parallel_degree" in file.text]
    back = read_text(file.text, file.path, around=FileContext(num_gpus=setup.num_gpus, roots=(tmp_path,)))
    assert canonical(back.setup).layout == setup.layout
    assert back.setup.parallel == "fsdp2"
    assert not [note for note in back.approximations if "expert" in note]


TITAN = """
[model]
name = "qwen3"
flavor = "30B-A3B"
hf_assets_path = "Qwen/Qwen3-30B-A3B"
[training]
seq_len = 4096
[parallelism]
expert_parallel_degree = 4
"""


@pytest.mark.parametrize(
    ("more", "counted"), [("", True), ("tensor_parallel_degree = 2\n", False), ("[compile]\nenable = true\n", False)]
)
def test_what_cannot_be_counted_so_is_said(more: str, counted: bool) -> None:
    back = read_text(TITAN + more, "train.toml", around=FileContext(num_gpus=8))
    assert back.setup.expert_degree == (4 if counted else 1)
    assert any("experts" in note for note in back.approximations) != counted


@pytest.mark.parametrize("target", ["axolotl", "llamafactory", "accelerate", "deepspeed"])
def test_other_tools_refuse(target: str) -> None:
    setup = _setup(8, loss="full")
    request = ExportRequest(model_id="Qwen/Qwen3-30B-A3B", setup=setup, hyper=choose(setup), model=MODEL)
    launch = EXPORTERS[target](request)
    assert launch.refused or "ep_size" not in "".join(file.text for file in launch.files)


@pytest.mark.parametrize(
    ("adapter", "gradients"), [("", True), ("adapter: lora\nlora_r: 8\nlora_target_linear: true\n", False)]
)
def test_deep_ep_deals_experts_out_beside_whole_copies_of_the_rest(adapter: str, gradients: bool) -> None:
    model = loaded(MIXTURE)
    text = f"base_model: {model.model_id}\nmicro_batch_size: 1\nsequence_len: 2048\nexpert_parallel_size: 4\n{adapter}"
    setup = read_text(text, "a.yaml", model=model, around=FileContext(num_gpus=4)).setup
    assert (setup.parallel, setup.expert_degree, why_not(model, setup)) == ("ddp", 4, "")
    stacks = sum(
        count * linear.num_weights for layer, count in model.layer_counts for linear in layer.linears if linear.is_stack
    )
    terms = rank_memories(model, H100, setup)[0].breakdown.terms
    weights = sum(term.size_bytes for term in terms if term.category == "weights")
    assert weights == pytest.approx(2 * (model.num_params - stacks * 3 / 4), rel=0.01)
    buckets = sum(term.size_bytes for term in terms if term.name == "DDP's buckets")
    assert not gradients or buckets == pytest.approx(2 * (model.num_params - stacks), rel=0.01)
    with pytest.raises(Undetermined, match="mesh of 4 GPUs, of 1"):
        read_text(text, "a.yaml", model=model)
