"""`why_not`: whether existing engines can run a setup under its spread, and if not, the reason with its source.

Read in the installed sources (accelerate 1.15, transformers 5.23, peft 0.21, bitsandbytes 0.50, PyTorch 2.13,
DeepSpeed 0.19) and issue trackers; nothing here is a guess about speed or memory.
"""

from collections.abc import Callable

from planner.models.spec import ModelSpec
from planner.parallel.share import casts_to_half
from planner.setup import TrainSetup

ADAMW = ("adamw", "adamw-fused")
"""What DeepSpeedCPUAdam and PyTorch's CPU AdamW can step."""
DTENSOR_OPTIMIZERS = (*ADAMW, "sgd")
"""Optimizers that step DTensors; others mix them with plain state tensors and raise.
Measured: one-process `fully_shard` on CPU, PyTorch 2.13 (tests/planner/parallel/test_support.py)."""
_TENSOR_ROLES = frozenset({"q", "k", "v", "o", "gate", "up", "gate_up", "down", "router"})


def why_not(model: ModelSpec, setup: TrainSetup) -> str:
    """One sentence why no engine runs this setup under its spread, with the source; "" where one does.

    Not counted: whether it fits into memory, or is wise.
    """
    if setup.num_gpus == 1:
        return ""
    for rule in _RULES:
        reason = rule(model, setup)
        if reason:
            return reason
    return ""


def _data_parallel(model: ModelSpec, setup: TrainSetup) -> str:
    if setup.parallel == "dp" and setup.quantized:
        return (
            "nn.DataParallel cannot replicate bitsandbytes' quantized weights: the Trainer leaves such models on one "
            "GPU (transformers 5.23 Trainer._wrap_model)"
        )
    return ""


def _int8(model: ModelSpec, setup: TrainSetup) -> str:
    if setup.quantization != "int8":
        return ""
    if setup.parallel == "fsdp2":
        return (
            "FSDP cannot shard bitsandbytes' int8 weights, whose matrices and scales live outside the parameter "
            "(bitsandbytes 0.50 Int8Params; huggingface/peft issue 2833)"
        )
    if setup.parallel == "zero3":
        return (
            "ZeRO-3 cannot partition bitsandbytes' int8 weights: Int8Params keeps the whole matrix beside the "
            "parameter (bitsandbytes 0.50 Int8Params.CB)"
        )
    return ""


def _kbit_cast(model: ModelSpec, setup: TrainSetup) -> str:
    if not setup.kbit_fp32_cast or not casts_to_half(setup):
        return ""
    if setup.parallel == "fsdp2":
        return (
            "peft's k-bit cast to fp32 has no effect under FSDP2, whose mixed-precision policy computes in 16 bit "
            "(accelerate 1.15 FullyShardedDataParallelPlugin.set_mixed_precision)"
        )
    return (
        "peft's k-bit cast to fp32 has no effect under DeepSpeed, which casts every floating parameter to 16 bit "
        "(DeepSpeed 0.19 engine.py, _cast_module_mixed_precision)"
    )


def _fsdp2_optimizer(model: ModelSpec, setup: TrainSetup) -> str:
    if setup.parallel != "fsdp2" or setup.optimizer in DTENSOR_OPTIMIZERS:
        return ""
    if setup.optimizer == "adafactor":
        return (
            "transformers' Adafactor mixes plain tensors with FSDP2's DTensors and raises (transformers 5.23 "
            "optimization.py: zeros of the gradient's shape)"
        )
    return (
        f"bitsandbytes' {setup.optimizer} has no step for FSDP2's DTensors (bitsandbytes-foundation/bitsandbytes "
        "issue 1633)"
    )


def _offload_optimizer(model: ModelSpec, setup: TrainSetup) -> str:
    if setup.offload == "none" or setup.optimizer in ADAMW:
        return ""
    if setup.parallel == "fsdp2":
        return (
            f"{setup.optimizer} has no step on the CPU, where FSDP2's CPUOffloadPolicy leaves parameters and gradients"
            if setup.optimizer != "sgd"
            else ""
        )
    return (
        f"ZeRO-Offload steps on the CPU with DeepSpeedCPUAdam, not {setup.optimizer} (DeepSpeed 0.19 engine.py, "
        "zero_force_ds_cpu_optimizer)"
    )


def _tensor(model: ModelSpec, setup: TrainSetup) -> str:
    degree = setup.tensor_degree
    if degree == 1:
        return ""
    if setup.quantized:
        return (
            "tensor parallelism shards plain weights as DTensors; bitsandbytes' packed weights and their scales have "
            "no plan (transformers 5.23 distributed/tensor_parallel.py)"
        )
    if setup.parallel == "ddp":
        return (
            "tensor parallelism beside plain DDP is refused: the copies must be FSDP2 shards (accelerate 1.15 "
            "ParallelismConfig)"
        )
    if setup.parallel.startswith("zero"):
        return (
            "tensor parallelism here comes from transformers' and Accelerate's DTensor plans, which go with FSDP2, "
            "not with DeepSpeed (accelerate 1.15 ParallelismConfig)"
        )
    if setup.method != "full":
        return (
            "LoRA fails under tensor parallelism: adapters of matrices that are split by rows raise in their first "
            "forward (peft 0.21 with transformers 5.23, tried on two CPU processes)"
        )
    if setup.optimizer not in DTENSOR_OPTIMIZERS:
        return f"{setup.optimizer} has no step for tensor parallelism's DTensors (bitsandbytes issue 1633)"
    if model.is_encoder_decoder:
        return f"transformers has no tensor-parallel plan for {model.model_type} (base_model_tp_plan)"
    for layer in model.layer_kinds:
        for one in layer.linears:
            if one.role not in _TENSOR_ROLES:
                return (
                    f"{model.model_type}'s {one.leaf} is not split by transformers' tensor-parallel plans, which know "
                    "separate q, k, v, o and MLP matrices (base_model_tp_plan)"
                )
        attention = layer.attention
        if attention is not None and (attention.num_heads % degree or attention.num_kv_heads % degree):
            return (
                f"{attention.num_heads} heads and {attention.num_kv_heads} key-value heads cannot be split over "
                f"{degree} GPUs (transformers 5.23 get_kv_heads_per_rank)"
            )
        if layer.mlp is not None and layer.mlp.intermediate_size % degree:
            return f"an intermediate size of {layer.mlp.intermediate_size} cannot be split over {degree} GPUs"
    return ""


def _pipeline(model: ModelSpec, setup: TrainSetup) -> str:
    degree = setup.pipeline_degree
    if degree == 1:
        return ""
    if setup.method != "full":
        return (
            "the pipeline engines (torchtitan, torch.distributed.pipelining, Megatron-LM) cut plain models; none of "
            "them takes peft's adapters"
        )
    if degree > model.num_layers:
        return f"{model.num_layers} layers cannot be cut into {degree} stages"
    if model.tied:
        return (
            f"{model.model_id} ties its head to the embeddings, which would live on two stages (torchtitan: weight "
            "tying is not supported with pipeline parallel)"
        )
    if model.is_encoder_decoder:
        return "encoder-decoders have no pipeline in torchtitan or Megatron-LM that takes transformers' weights"
    if setup.loss != "full":
        return f"the {setup.loss} loss patches a whole model's forward (TRL, Liger); a last stage computes full logits"
    if setup.parallel in ("zero2", "zero3"):
        return "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism (DeepSpeed 0.19 pipe/engine.py)"
    if setup.parallel == "zero1":
        return "DeepSpeed's pipeline needs the model rewritten as a PipelineModule (DeepSpeed 0.19 pipe/engine.py)"
    if setup.parallel == "ddp":
        return "torchtitan's DDP does not combine with a pipeline: use fsdp2"
    if setup.parallel == "none" and setup.autocast_dtype is not None:
        return "torchtitan mixes precision in a pipeline only inside FSDP2; --precision bf16-pure runs without"
    if setup.optimizer not in DTENSOR_OPTIMIZERS:
        return f"torchtitan's pipelines know AdamW, not {setup.optimizer}"
    return ""


def _device_map(model: ModelSpec, setup: TrainSetup) -> str:
    if setup.parallel == "device-map" and setup.num_gpus > model.num_layers:
        return f"{model.num_layers} layers cannot be spread over {setup.num_gpus} GPUs (accelerate device_map)"
    return ""


_RULES: tuple[Callable[[ModelSpec, TrainSetup], str], ...] = (
    _data_parallel,
    _int8,
    _kbit_cast,
    _fsdp2_optimizer,
    _offload_optimizer,
    _tensor,
    _pipeline,
    _device_map,
)
