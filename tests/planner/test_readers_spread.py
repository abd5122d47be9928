"""Configs that people write for several GPUs, read into the fields of a layout."""

from importlib.resources import files
from pathlib import Path

import pytest

from planner.core.errors import Undetermined
from planner.core.units import GIB
from planner.frameworks.readers import FileContext, ReadConfig, read_text
from planner.memory.states import loading_refusal
from planner.options.zero_buffers import AUTO, ZeroBuffers
from planner.setup import TrainSetup
from tests.planner.helpers import loaded

BASE = TrainSetup(method="full", lora_rank=0, precision="bf16-autocast")
AXOLOTL = "base_model: x\nmicro_batch_size: 1\ngradient_accumulation_steps: 2\nsequence_len: 512\nbf16: true\n"
CASES = {
    "hybrid shards": (
        "fsdp_version: 2\ndp_shard_size: 4\ndp_replicate_size: 2\n"
        "fsdp_config: {reshard_after_forward: false, offload_params: true}\n",
        {"parallel": "fsdp2", "shard_degree": 4, "reshard_after_forward": False, "offload": "parameters"},
    ),
    "tensor parallelism": (
        "tensor_parallel_size: 4\ndp_shard_size: 2\nfsdp_config: {fsdp_version: 2}\n",
        {"parallel": "fsdp2", "tensor_degree": 4},
    ),
    "tensor parallelism alone": ("tensor_parallel_size: 8\n", {"parallel": "none", "tensor_degree": 8}),
    "ZeRO-2, optimizer offloaded": (
        "deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}\n",
        {"parallel": "zero2", "offload": "optimizer"},
    ),
    "ZeRO-3, all offloaded": (
        "deepspeed:\n zero_optimization: {stage: 3, offload_optimizer: {device: nvme}, offload_param: {device: cpu}}\n",
        {"parallel": "zero3", "offload": "parameters"},
    ),
    "a list of words is FSDP 1's": (
        "fsdp: [full_shard, auto_wrap]\n",
        {"fsdp_version": 1, "transformers_version": "4.57"},
    ),
    "torchao's 8-bit states, which FSDP2 steps, as an AdamW that it steps": (
        "optimizer: adamw_torch_8bit\nfsdp_config: {fsdp_version: 2}\n",
        {"optimizer": "adamw"},
    ),
    "bitsandbytes' are what they are": (
        "optimizer: adamw_bnb_8bit\nfsdp_config: {fsdp_version: 2}\n",
        {"optimizer": "adamw-8bit"},
    ),
    "its version too": (
        "fsdp_config: {version: 2, offload_params: true}\n",
        {"fsdp_version": 2, "offload": "parameters"},
    ),
    "ZeRO-2's own bucket, twice": (
        "deepspeed: {zero_optimization: {stage: 2, overlap_comm: true, reduce_bucket_size: 2e8}}\n",
        {"zero_buffers": ZeroBuffers(reduce_bucket_elements=200_000_000, overlaps=True)},
    ),
    "ZeRO-3's sizes by the model": (
        "deepspeed: {zero_optimization: {stage: 3, reduce_bucket_size: auto, sub_group_size: 0}}\n",
        {"zero_buffers": ZeroBuffers(reduce_bucket_elements=AUTO, sub_group_elements=0)},
    ),
    "ZeRO-2's parameters stay": (
        "deepspeed: {zero_optimization: {stage: 2, offload_param: {device: cpu}}}\n",
        {"parallel": "zero2", "offload": "none"},
    ),
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 2
num_processes: 16
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_offload_params: true
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 8
"""


def read(text: str, *, num_gpus: int = 8) -> ReadConfig:
    return read_text(AXOLOTL + text, "config.yaml", around=FileContext(num_gpus=num_gpus))


STAGED, UNSTAGED = "axolotl", "axolotl-unstaged"
"""Of a base that stays in the host's memory: as launch files here have it, and otherwise."""


@pytest.mark.parametrize(("staged", "settings"), [(True, ""), (False, "qlora_sharded_model_loading: false\n")])
def test_a_base_that_axolotl_stages_on_the_host_may_be_larger_than_a_card(staged: bool, settings: str) -> None:
    """Before: "cannot run", of a file in Axolotl's own examples (llama-3/qlora-fsdp-70b.yaml)."""
    loading = "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true\n"
    text = f"{loading}{settings}fsdp_config: {{fsdp_cpu_ram_efficient_loading: true, reshard_after_forward: true}}\n"
    setup = read(text, num_gpus=4).setup
    assert (setup.stack == "axolotl-staged", setup.fsdp_version) == (staged, 2)
    llama = loaded("meta-llama/Llama-3.3-70B-Instruct")
    assert bool(loading_refusal(llama, setup, 24 * GIB)) != staged
    assert loading_refusal(llama, setup.replace(parallel="zero3", sync_each_batch=True), 24 * GIB), (
        "DeepSpeed does not load so"
    )
    offloaded = text.replace("reshard", "offload_params: true, reshard")
    setup = read(offloaded, num_gpus=1).setup
    assert (setup.stack, bool(loading_refusal(llama, setup, 24 * GIB))) == (
        (STAGED, False) if staged else (UNSTAGED, True)
    )


def test_llama_factory_loads_in_fp32_on_the_gpu_what_zero_2_halves() -> None:
    """8B and its optimizer on the host: 24 GiB a step on four cards, but 30 in fp32 before it (LLaMA-Factory#4133)."""
    llama = loaded("meta-llama/Llama-3.1-8B")
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-mixed", num_gpus=4, parallel="zero2")
    setup = setup.replace(offload="optimizer", stack="llamafactory")
    assert "29.92 GiB" in loading_refusal(llama, setup, 24 * GIB)
    assert not loading_refusal(llama, setup, 32 * GIB)
    for change in ({"precision": "bf16-pure"}, {"parallel": "zero3"}, {"stack": "trl"}):
        assert not loading_refusal(llama, setup.replace(**change), 24 * GIB)


@pytest.mark.parametrize("name", CASES)
def test_axolotls_ways_of_spreading(name: str) -> None:
    text, expected = CASES[name]
    setup = read(text).setup
    assert {field: getattr(setup, field) for field in expected} == expected
    assert setup.num_gpus == 8


def test_what_is_only_nearly_counted_is_said() -> None:
    assert any("NVMe" in approximation for approximation in read(CASES["ZeRO-3, all offloaded"][0]).approximations)
    assert any("only in stage 3" in assumption for assumption in read(CASES["ZeRO-2's parameters stay"][0]).assumptions)
    alone = read(CASES["ZeRO-2, optimizer offloaded"][0], num_gpus=1)
    assert (alone.setup.parallel, alone.setup.offload) == ("zero2", "optimizer")
    assert any("one GPU" in assumption for assumption in alone.assumptions)


def test_a_mesh_of_another_size_than_the_run_is_asked_about() -> None:
    text = "tensor_parallel_size: 2\n" + CASES["hybrid shards"][0]
    with pytest.raises(Undetermined, match="mesh of 2 x 4 x 2 = 16 GPUs, of 8") as caught:
        read(text)
    assert "--gpus 16" in caught.value.hint
    assert read(text, num_gpus=16).setup.shard_degree == 4
    stands = read(CASES["torchao's 8-bit states, which FSDP2 steps, as an AdamW that it steps"][0])
    assert any("adamw_torch_8bit has no memory model" in text and "as adamw," in text for text in stands.approximations)


def test_accelerates_mesh_and_block_are_followed() -> None:
    setup = read_text(ACCELERATE, "accelerate.yaml", base=BASE).setup
    assert (setup.num_gpus, setup.parallel, setup.shard_degree) == (16, "fsdp2", 8)
    assert (setup.reshard_after_forward, setup.offload, setup.checkpointing) == (False, "parameters", 1)


@pytest.mark.parametrize("name", ["fsdp2", "multi_gpu", "zero1", "zero2", "zero3"])
def test_the_configs_that_trl_ships(name: str) -> None:
    text = files("trl.accelerate_configs").joinpath(f"{name}.yaml").read_text()
    setup = read_text(text, "accelerate.yaml", base=BASE).setup
    assert setup.parallel == ("ddp" if name == "multi_gpu" else name)
    assert setup.num_gpus == 8
    assert setup.layout == {}


@pytest.mark.parametrize(("setting", "version"), [("", 1), ("  fsdp_version: 2\n", 2), ("  fsdp_version: 1\n", 1)])
def test_accelerates_fsdp_is_version_1_unless_said(setting: str, version: int) -> None:
    """accelerate 1.15 FullyShardedDataParallelPlugin: FSDP_VERSION is "1" by default."""
    text = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n" + setting
    config = read_text(text, "accelerate.yaml")
    assert (config.setup.fsdp_version, config.setup.reshard_after_forward) == (version, False)
    assert any("version 1" in assumption for assumption in config.assumptions) == (version == 1)


def test_accelerate_follows_deepspeeds_own_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},'
        ' "offload_optimizer": {"device": "cpu"}}}'
    )
    text = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: configs/ds.json}\n"
    text += "parallelism_config: {parallelism_config_sp_size: 2}\n"
    setup = read_text(text, "accelerate.yaml", base=BASE, around=FileContext(roots=(tmp_path,))).setup
    assert (setup.num_gpus, setup.parallel, setup.offload, setup.context_degree) == (4, "zero3", "parameters", 2)


@pytest.mark.parametrize(
    "arguments",
    [
        'distributed_config={"tp_size": 2, "fsdp_size": 4}',
        "distributed_config=DistributedConfig(tp_size=2, fsdp_size=4)",
    ],
)
def test_scripts_that_shard_while_loading(arguments: str) -> None:
    text = (
        "from transformers import *\nfrom transformers.distributed import DistributedConfig\n"
        f'model = AutoModelForCausalLM.from_pretrained("x", dtype="bfloat16", {arguments})\n'
        "args = TrainingArguments(per_device_train_batch_size=2, bf16=True)\n"
    )
    setup = read_text(text, "train.py", around=FileContext(num_gpus=8)).setup
    assert (setup.parallel, setup.tensor_degree, setup.data_degree) == ("fsdp2", 2, 4)
    plan = text.replace(arguments, 'tp_plan="auto"')
    assert read_text(plan, "train.py", around=FileContext(num_gpus=8)).setup.tensor_degree == 8
