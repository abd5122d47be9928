"""A refusal ends with the nearest thing that works."""

import pytest

from planner.core.errors import UsageError
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.options.images import Images
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan, Plan
from planner.planning.predict import predict
from planner.setup import TrainSetup
from tests.planner.helpers import loaded, plan_request, planned, refusal_of

LLAMA = "meta-llama/Llama-3.1-8B"


def test_another_method_at_a_shorter_length() -> None:
    """LoRA's weights alone are more than the card, and 4 bits do not fit at 65,536 tokens either."""
    refused = refusal_of(plan_request(LLAMA, "rtx-3060", fixed={"method": ("lora",)}, seq_len=65536))
    assert refused.suggestions[0].action == "leave --method out, --seq-len 16384: 4-bit QLoRA fits"


def test_smaller_pictures() -> None:
    pictures = {"images": (Images(width=4096, height=4096),)}
    refused = refusal_of(plan_request("Qwen/Qwen2.5-VL-7B-Instruct", "rtx-3060", fixed=pictures))
    assert refused.suggestions[0].action == "--image-size 1024x1024: 4-bit QLoRA fits"


def test_the_same_card_with_more_memory() -> None:
    refused = refusal_of(plan_request("Qwen/Qwen3-8B", "apple-m3"))
    assert refused.suggestions[0].action == "--gpu apple-m3-16gb"
    assert isinstance(plan_workload(plan_request("Qwen/Qwen3-8B", "apple-m3-16gb"), explained=False), Plan)


def test_a_host_that_holds_the_states() -> None:
    """Weights, gradients and two states of 8.03 B parameters: 62.9 GiB as pinned; 90 % of 64 are 57.6."""
    whole = {"method": ("full",), "offload": ("optimizer", "parameters"), "optimizer": ("adamw-fused",)}
    with pytest.raises(UsageError, match=r"62\.92 GiB of states would lie there, at most 57\.60") as problem:
        plan_workload(plan_request(LLAMA, "rtx-4090", fixed=whole, host_gib=64))
    assert (problem.value.hint or "").startswith("--host-memory 70 holds them")
    assert not isinstance(plan_workload(plan_request(LLAMA, "rtx-4090", fixed=whole, host_gib=70)), NoPlan)


def test_a_superchip_is_known_to_have_its_hosts_memory() -> None:
    """Golden: a 70B in 16 bits, LoRA, on a GH200 480GB. Before: nothing fits."""
    workload = plan_request("meta-llama/Llama-3.3-70B-Instruct", "gh200", fixed={"method": ("lora",)})
    assert workload.host_bytes == 480e9
    assert planned(workload, explained=False).chosen.setup.offload == "parameters"


def test_memory_that_is_the_hosts_too_takes_nothing_off_the_gpu() -> None:
    """A DGX Spark's 128 GB are all that it has, and eight of them are eight machines."""
    spark = find_gpu("gb10")
    assert make_cluster(spark, 8).num_nodes == 8
    arguments = {"cluster": make_cluster(spark, 2), "fixed": {"method": ("full",)}}
    refused = refusal_of(plan_request("Qwen/Qwen2.5-32B", "gb10", **arguments))
    assert not any("host" in suggestion.action for suggestion in refused.suggestions)
    assert refused.nearest.setup.offload == "none"
    alone = plan_workload(plan_request("Qwen/Qwen2.5-32B", "gb10", fixed={"method": ("full",)}), helped=False)
    assert "paged" not in alone.nearest.setup.optimizer
    whole = {"method": ("full",), "offload": ("optimizer",)}
    with pytest.raises(UsageError, match="the host's memory is the GPU's own"):
        plan_workload(plan_request(LLAMA, "gb10", fixed=whole, host_gib=512))
    with pytest.raises(UsageError, match="paged-adamw-8bit moves states"):
        plan_request(LLAMA, "gb10", fixed={"optimizer": ("paged-adamw-8bit",)})
    model, setup = loaded(LLAMA), TrainSetup(method="full", lora_rank=0, optimizer="adamw-8bit")
    paged = setup.replace(optimizer="paged-adamw-8bit")
    assert predict(model, spark, paged).peak_device_bytes == predict(model, spark, setup).peak_device_bytes
    card = find_gpu("h100-sxm")
    assert predict(model, card, paged).peak_device_bytes < predict(model, card, setup).peak_device_bytes


@pytest.mark.parametrize(("host_gib", "offloads"), [(None, True), (20, True), (15, False)])
def test_offloaded_checkpoints_find_room_in_the_host(host_gib: float | None, *, offloads: bool) -> None:
    """16 GiB of 65,536 tokens x 4,096 bf16 numbers x 32 layers, in nine tenths of a machine's memory."""
    answer = plan_workload(
        plan_request(LLAMA, "rtx-4090", host_gib=host_gib, seq_len=65_536, fixed={"method": ("qlora",)}),
        explained=False,
    )
    assert isinstance(answer, Plan) == offloads
    assert not offloads or answer.chosen.setup.activation_offload


def test_a_smaller_model_of_another_type_where_nothing_else_helps() -> None:
    """GRPO of DeepSeek-V3, which is not planned over several GPUs, had no way out on any card."""
    fixed = {
        "objective": ("grpo",), "method": ("lora",), "lora_targets": ("attention",), "optimizer": ("adamw-fused",),
        "checkpointing": (1,), "attention": ("sdpa",), "kernels": ("eager",), "precision": ("bf16-autocast",),
        "micro_batch_seqs": (8,),
    }  # fmt: skip
    (suggestion,) = refusal_of(plan_request("deepseek-ai/DeepSeek-V3", "rtx-4090", fixed=fixed)).suggestions
    words, model_id, _ = suggestion.action.split(": ")
    assert (words, model_id.startswith("deepseek-ai/")) == ("a smaller model", True)
    assert isinstance(plan_workload(plan_request(model_id, "rtx-4090", fixed=fixed), explained=False), Plan)


def test_the_smallest_host_of_several_gpus() -> None:
    """Before: the host of the first spread looked at, 134.6 GiB."""
    arguments = {"fixed": {"method": ("full",)}, "cluster": make_cluster(find_gpu("rtx-4090"), 2)}
    refused = refusal_of(plan_request(LLAMA, "rtx-4090", host_gib=64, **arguments))
    larger = [suggestion.action for suggestion in refused.suggestions if suggestion.action.startswith("--host-memory")]
    assert larger == ["--host-memory 70: --offload parameters fits with 62.92 GiB in every node's host"]
