"""DeepSpeed's own JSON, for the tools that take a path to one. DeepSpeed 0.19."""

import json

from planner.exporters.spread import split_refusal
from planner.exporters.types import ExportRequest, Launch, LaunchFile
from planner.hyperparameters import Hyperparameters
from planner.setup import TrainSetup

TARGET = "deepspeed"
NAME = "deepspeed.json"
FILE = f"{TARGET}/{NAME}"
VALIDATED_WITH = {"deepspeed": "0.19.8"}
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def config(setup: TrainSetup, hyper: Hyperparameters) -> dict[str, object]:
    """The configuration as data. JSON has no comments: what a reader must know stands in the launch notes."""
    stage = STAGES[setup.parallel]
    zero: dict[str, object] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if setup.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if setup.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    replicas = setup.data_degree
    return {
        "train_batch_size": setup.micro_batch_seqs * setup.accumulation_steps * replicas,
        "train_micro_batch_size_per_gpu": setup.micro_batch_seqs,
        "gradient_accumulation_steps": setup.accumulation_steps,
        "gradient_clipping": hyper.max_grad_norm,
        "bf16": {"enabled": setup.compute_dtype == "bf16"},
        "fp16": {"enabled": setup.compute_dtype == "fp16"},
        "zero_optimization": zero,
    }


def config_file(request: ExportRequest, folder: str = TARGET) -> LaunchFile:
    """The file of a request, in the folder of the target that names it."""
    return LaunchFile(path=f"{folder}/{NAME}", text=json.dumps(config(request.setup, request.hyper), indent=2) + "\n")


def export(request: ExportRequest) -> Launch:
    """The JSON alone, as a target of its own."""
    if reason := split_refusal(request.setup, "DeepSpeed's JSON alone"):
        return Launch(target=TARGET, refused=reason)
    if request.setup.parallel not in STAGES:
        return Launch(target=TARGET, refused="DeepSpeed shards with ZeRO 1 to 3 on several GPUs; this setup does not")
    return Launch(
        target=TARGET,
        files=(config_file(request),),
        command=f"deepspeed --num_gpus {request.setup.num_gpus} launch/hf/train_hf.py  # with deepspeed= this file",
        notes=("holds batch, precision and sharding only: method and model stand in the hf target's script",),
        validated_with=VALIDATED_WITH,
    )
