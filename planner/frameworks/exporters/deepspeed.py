"""DeepSpeed's own JSON, for the tools that take a path to one. DeepSpeed 0.19.

Bucket sizes are written out because the memory plan counts them (`planner.memory.engines.zero`).
"""

import json
from typing import Any

from planner.frameworks.exporters.common import differing
from planner.frameworks.exporters.several_gpus import sharding_refusal, split_refusal
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.memory.states import part_trained
from planner.models.spec import ModelSpec
from planner.options.zero_buffers import ZeroBuffers
from planner.setup import TrainSetup

TARGET = "deepspeed"
NAME = "deepspeed.json"
FILE = f"{TARGET}/{NAME}"
VALIDATED_WITH = {"deepspeed": "0.19.8"}
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
HOST = {"device": "cpu", "pin_memory": True}


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    """Settings that DeepSpeed runs otherwise than the setup says.

    It computes in bf16 only by its own switch, whatever type the weights were loaded in. Source: DeepSpeed 0.19
    engine.py `_configure_distributed_model`: bf16 casts the module and keeps fp32 masters; without it every parameter
    must be fp32.
    """
    if not setup.zero or setup.precision != "bf16-pure":
        return ()
    reason = "DeepSpeed trains bf16 weights with fp32 masters and only by its bf16 switch; there is no autocast in it"
    return differing(setup, {"precision": ("bf16-autocast", reason)})


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if reason := split_refusal(setup, "DeepSpeed's JSON") or sharding_refusal(setup, model):
        return reason
    if setup.parallel in STAGES:
        return ""
    return (
        "DeepSpeed shards over several GPUs with ZeRO 1 to 3, or fills the host's memory (--offload); this does neither"
    )


def config(request: ExportRequest) -> dict[str, object]:
    """The configuration as data. JSON has no comments: what a reader must know stands in the launch notes."""
    from planner.memory.engines.zero import own_buffers  # late: a plan writes none

    buffers = ZeroBuffers()
    if request.model is not None:
        buffers = own_buffers(part_trained(request.model, request.setup).num)
    return engine_config(request.setup, buffers, max_grad_norm=request.hyper.max_grad_norm)


def engine_config(setup: TrainSetup, buffers: ZeroBuffers, *, max_grad_norm: float) -> dict[str, Any]:
    """What DeepSpeed's engine is told, by the launch file and by the probe of the same setup alike."""
    stage = STAGES[setup.parallel]
    zero: dict[str, object] = {
        "stage": stage,
        "overlap_comm": stage == 3,  # on in stages 1 and 2 it would double the bucket
        "contiguous_gradients": True,
        "reduce_bucket_size": buffers.reduce_bucket_elements,
    }
    if stage < 3:
        zero["allgather_bucket_size"] = buffers.reduce_bucket_elements
    else:
        zero["stage3_prefetch_bucket_size"] = buffers.prefetch_elements
        zero["stage3_param_persistence_threshold"] = buffers.persistent_elements
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if setup.offload != "none":
        zero["offload_optimizer"] = HOST
    if setup.offload == "parameters":
        zero["offload_param"] = HOST
    return {
        # of cut sequences transformers and Accelerate count the copies each otherwise, and fill it in
        "train_batch_size": setup.global_batch_seqs if setup.context_degree == 1 else "auto",
        "train_micro_batch_size_per_gpu": setup.micro_batch_seqs,
        "gradient_accumulation_steps": setup.accumulation_steps,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": setup.compute_dtype == "bf16"},
        "fp16": {"enabled": setup.compute_dtype == "fp16"},
        "zero_optimization": zero,
    }


def config_file(request: ExportRequest, folder: str = TARGET) -> LaunchFile:
    """The file of a request, in the folder of the target that names it."""
    return LaunchFile(path=f"{folder}/{NAME}", text=json.dumps(config(request), indent=2) + "\n")


def config_files(request: ExportRequest, folder: str) -> list[LaunchFile]:
    """What a tool that takes DeepSpeed's JSON has in its folder."""
    return [config_file(request, folder)] if request.setup.parallel in STAGES else []


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """The JSON alone, as a target of its own."""
    nodes = f" --num_nodes {request.num_nodes}" if request.num_nodes > 1 else ""
    return Draft(
        files=(config_file(request),),
        complete=False,
        command=f"deepspeed{nodes} --num_gpus {request.gpus_per_node} SCRIPT  # with deepspeed= this file",
        notes=("holds batch, precision and sharding only: method and model stand in the hf target's script",),
    )
