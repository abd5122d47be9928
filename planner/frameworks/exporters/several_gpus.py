"""How a job spreads over GPUs and machines, where several targets say it alike: refusals, settings, launch commands."""

from planner.frameworks.exporters.text import Line
from planner.frameworks.exporters.types import ExportRequest
from planner.memory.engines import why_not
from planner.memory.trained import unused_bytes
from planner.models.spec import ModelSpec
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup

PER_NODE = "On every node, with NODE_RANK (0, 1, ...), MASTER_ADDR and MASTER_PORT (of node 0) set."
BY_ACCELERATE = ("trl", "hf", "accelerate")
CPU_THREADS = 12
"""Threads of each process's optimizer on the CPU, which is one where nobody says: under FSDP by Accelerate (1.15
`prepare_multi_gpu_env`), and by torchrun where it starts several. Judgement: the virtual CPUs beside each A100 of
AWS p4d, Azure ND96asr and GCP a2-highgpu; what they gain was not measured.

Measured: PyTorch 2.13's fused AdamW moves 3.4 GB/s in fp32 by one thread of a Xeon, 124 a node are predicted.
"""
THREADS_NOTE = (
    "OMP_NUM_THREADS: threads of the optimizer on the CPU, one where nothing is said: give each process its share "
    "of the machine's cores."
)


def launched(setup: TrainSetup) -> bool:
    """Whether a launcher starts it: more than one process, or one whose engine keeps something on the host."""
    return not setup.single_gpu and setup.parallel not in ("dp", "device-map")


def split_refusal(setup: TrainSetup, tool: str) -> str:
    """Why a tool that only copies or shards a whole model cannot run this setup, "" when it can."""
    if setup.pipeline_degree > 1:
        return f"{tool} has no pipeline parallelism (torchtitan has)"
    if setup.tensor_degree > 1:
        return f"{tool} has no tensor parallelism (hf, trl, axolotl and torchtitan have)"
    if setup.context_degree > 1:
        return context_refusal(setup, tool)
    if setup.expert_degree > 1:
        return f"{tool} is not written with expert parallelism (hf, trl and torchtitan are)"
    if setup.parallel == "dp":
        return f"one process for all GPUs (nn.DataParallel) is not {tool}'s way; ddp holds less and is faster"
    return ""


def context_refusal(setup: TrainSetup, tool: str, *, ring: bool = False, ulysses: bool = False) -> str:
    """Why a tool cannot cut sequences over GPUs as this setup does, "" when it can or nothing is cut.

    Args:
        ring: it takes PyTorch's context parallelism; ulysses: DeepSpeed's.

    Source: trl 1.16 `SFTTrainer.__init__` (packing is refused with `cp_size`).
    """
    if setup.context_degree == 1:
        return ""
    if setup.packing and tool != "torchtitan":
        return f"{tool} keeps packed samples apart by a mask, which cut sequences drop: use --no-packing"
    if ring if setup.uses_ring_attention else ulysses:
        return ""
    if setup.uses_ring_attention:
        return f"{tool} is not written with PyTorch's context parallelism (trl, hf and torchtitan are)"
    return f"{tool} is not written with DeepSpeed's Ulysses (trl and hf are)"


def tensor_refusal(setup: TrainSetup, tool: str) -> str:
    """Why transformers' tensor parallelism under `tool` cannot run this setup, "" when it can or is not asked to.

    Source: transformers 5.23 `DistributedConfig`; run on two and four CPU processes, tests/launch/test_spread.py.
    """
    if setup.pipeline_degree > 1:
        return f"{tool} has no pipeline parallelism that trains (torchtitan has)"
    if setup.tensor_degree == 1:
        return ""
    if setup.method != "full":
        return "peft 0.21's adapters fail on matrices that tensor parallelism cuts by their inputs (o_proj, down_proj)"
    if setup.parallel == "ddp":
        return "tensor parallelism beside plain DDP is refused (accelerate 1.15 ParallelismConfig): use fsdp2"
    if setup.zero:
        return "transformers' tensor parallelism goes with FSDP2, not with DeepSpeed"
    if setup.parallel == "fsdp2" and not setup.reshard_after_forward:
        return "beside tensor parallelism, transformers' FSDP2 plan always frees a layer's weights after its forward"
    if setup.parallel == "fsdp2" and setup.autocast_dtype == "fp16":
        return "beside tensor parallelism, transformers' FSDP2 mixes precision in bf16 only"
    if setup.compile:
        return "torch.compile over tensor parallelism's DTensor hooks is not written"
    return ""


def unused_line(request: ExportRequest) -> Line | None:
    """The Trainer's setting of DDP's search for parameters without a gradient, which costs time where there are none.

    Source: trl 1.16 `SFTTrainer.__init__` (a text-only data set leaves an encoder of pictures without gradients).
    """
    if request.setup.parallel != "ddp":
        return None
    unused = request.model is not None and unused_bytes(request.model, request.setup) > 0
    why = "text gives no gradient to what sees or hears: the second step would stop" if unused else ""
    return Line("ddp_find_unused_parameters", unused, why)


def sync_lines(setup: TrainSetup) -> list[Line]:
    """The Trainer's setting that makes FSDP2 cut gradients after every micro-batch, where there are several.

    Without it the whole model's gradients stay on every GPU until the last one: `planner.memory.engines.fsdp2` counts
    on it.

    Source: transformers 5.23 `Trainer._inner_training_loop`; accelerate 1.15 `Accelerator.no_sync`.
    """
    if setup.parallel != "fsdp2" or setup.tensor_degree > 1 or setup.accumulation_steps == 1:
        return []
    kwargs = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return [Line("accelerator_config", kwargs, "else whole gradients wait for the last micro-batch")]


def distributed_config(setup: TrainSetup) -> dict[str, object]:
    """transformers' `DistributedConfig` as plain values, of a setup that is sharded at loading."""
    config: dict[str, object] = {"tp_size": setup.tensor_degree} if setup.tensor_degree > 1 else {}
    if setup.parallel == "fsdp2":
        config["fsdp_size"] = setup.shards
        if setup.shards < setup.data_degree:
            config["dp_replicate_size"] = setup.data_degree // setup.shards
        if setup.offload == "parameters":
            config["fsdp_cpu_offload"] = True
        if setup.autocast_dtype == "bf16":
            config["fsdp_mixed_precision"] = True
        if setup.expert_degree > 1:
            config["ep_size"] = setup.expert_degree
    return config


def cpu_threads(request: ExportRequest, target: str) -> dict[str, str]:
    """What an offloaded plan's processes start with, so that their optimizer has more than one thread."""
    setup = request.setup
    single_thread = request.gpus_per_node > 1 or (setup.parallel == "fsdp2" and target in BY_ACCELERATE)
    return {"OMP_NUM_THREADS": str(CPU_THREADS)} if setup.offload != "none" and single_thread else {}


def torchrun(request: ExportRequest, script: str) -> str:
    """The torchrun command of one node: the same on every node."""
    return f"torchrun {torchrun_flags(request)} {script}"


def torchrun_flags(request: ExportRequest) -> str:
    """torchrun's flags; of several nodes with the rendezvous named by environment variables."""
    if request.num_nodes == 1:
        return f"--standalone --nproc-per-node {request.gpus_per_node}"
    return (
        f"--nnodes {request.num_nodes} --nproc-per-node {request.gpus_per_node} --rdzv-id finetune "
        "--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT"
    )


def accelerate_flags(request: ExportRequest) -> str:
    """What `accelerate launch` must be told on every node beside the config file; "" on one node.

    The rendezvous is a flag because the flag's own default wins over `rdzv_backend` in the config file.
    """
    if request.num_nodes == 1:
        return ""
    return (
        " --rdzv_backend c10d --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
    )


def sharding_refusal(setup: TrainSetup, model: ModelSpec | None) -> str:
    """Why no engine shards or offloads this setup, "" when one does. The model's own reasons where it is known."""
    if model is not None and (reason := why_not(model, setup)):
        return reason
    if setup.quantization == "int8" and setup.parallel in ("zero3", "fsdp2"):
        return f"{setup.parallel} cannot shard bitsandbytes' int8 weights"
    if setup.parallel == "fsdp2" and not OPTIMIZERS[setup.optimizer].steps_dtensors:
        return f"{setup.optimizer} has no step for FSDP2's DTensors"
    if setup.zero and setup.offload != "none" and not OPTIMIZERS[setup.optimizer].steps_on_cpu:
        return f"ZeRO-Offload steps on the CPU with DeepSpeedCPUAdam, not {setup.optimizer}"
    return ""
