"""Splits of the model itself, whatever the engine: what tensor parallelism holds more, and what no engine splits.

The parts are cut by `planner.memory.rank_part`.
"""

from planner.core.shipped import model_types
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.rank_part import RankPart
from planner.memory.states import COMPUTE, Allocation, gradient_allocation, weight_allocation
from planner.memory.trained import Trained
from planner.models.spec import ModelSpec
from planner.options.losses import LOSSES
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup

_TENSOR_ROLES = frozenset({"q", "k", "v", "o", "gate", "up", "gate_up", "down", "router"})


def split_tables(part: RankPart, setup: TrainSetup, trained: Trained, accumulated: bool) -> list[Allocation]:
    """What the gradient of a vocabulary-split table holds beyond a share: it is whole on every rank (its rows come from
    all tokens), and the optimizer takes a copy of its own rows.

    Measured: dry runs of transformers' own plan (docs/accuracy/spread-formula-vs-dry-run.md).
    """
    if setup.tensor_degree == 1 or setup.method != "full":
        return []
    model = part.model
    table_bytes = sum(table.num_params for table in model.embeddings) * SIZE_BYTES[trained.dtype]
    name = "a split table's whole gradient"
    if model.tied:  # added to the head's, which is split
        return [gradient_allocation(name, (setup.tensor_degree - 1) * table_bytes, "end")]
    alive = (*COMPUTE, "end", "step") if accumulated else ("end", "step")
    return [
        gradient_allocation(name, (setup.tensor_degree - 1) * table_bytes, *alive),
        Allocation(category="workspace", name="the optimizer's rows of it", size_bytes=table_bytes, moments=("step",)),
    ]


def gathered_head(model: ModelSpec, setup: TrainSetup, weight_dtype: str) -> list[Allocation]:
    """The whole head that TRL's chunked loss gathers from a head split by tensor parallelism.

    Source: trl 1.16 trainer/utils.py (`full_tensor`).
    """
    if setup.tensor_degree == 1 or setup.loss != "chunked" or model.head is None:
        return []
    head_params = model.num_embedding_params if model.tied else model.num_head_params
    size = setup.tensor_degree * head_params * SIZE_BYTES[weight_dtype]
    return [weight_allocation("gathered head", size, "loss")]


def split_refuses(model: ModelSpec, setup: TrainSetup) -> str:
    """Why no engine splits this model so; "" where one does, or nothing is split."""
    refused = context_refuses(model, setup) or experts_refuse(model, setup)
    return refused or tensor_refuses(model, setup) or pipeline_refuses(model, setup)


def tensor_refuses(model: ModelSpec, setup: TrainSetup) -> str:
    """Why no engine splits this model's matrices so; "" where one does, or nothing is split."""
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
    if setup.zero:
        return (
            "tensor parallelism here comes from transformers' and Accelerate's DTensor plans, which go with FSDP2, "
            "not with DeepSpeed (accelerate 1.15 ParallelismConfig)"
        )
    if setup.method != "full":
        return (
            "LoRA fails under tensor parallelism: adapters of matrices that are split by rows raise in their first "
            "forward (peft 0.21 with transformers 5.23, tried on two CPU processes)"
        )
    if not OPTIMIZERS[setup.optimizer].steps_dtensors:
        return f"{setup.optimizer} has no step for tensor parallelism's DTensors (bitsandbytes issue 1633)"
    if model.is_encoder_decoder:
        return f"transformers has no tensor-parallel plan for {model.model_type} (base_model_tp_plan)"
    return _layers_refuse(model, degree)


def _layers_refuse(model: ModelSpec, degree: int) -> str:
    for layer in model.layer_kinds:
        for unit in layer.linears:
            if unit.role not in _TENSOR_ROLES:
                return (
                    f"{model.model_type}'s {unit.leaf} is not split by transformers' tensor-parallel plans, which know "
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


def context_refuses(model: ModelSpec, setup: TrainSetup) -> str:
    """Why no engine cuts this model's sequences so; "" where one does, or nothing is cut."""
    degree = setup.context_degree
    if degree == 1:
        return ""
    if model.is_encoder_decoder:
        return "sequences are cut for decoders alone: an encoder's attention is not causal"
    for layer in model.layer_kinds:
        attention = layer.attention
        if attention is None or attention.kind == "linear":
            return (
                f"{model.model_type} has layers that carry a state along the sequence, which a cut one would lose "
                "(accelerate 1.15 _refuse_recurrent_layers_under_sequence_parallelism)"
            )
        if setup.uses_ring_attention and attention.window_tokens:
            return (
                f"{model.model_type} has layers with a sliding window, and context parallelism knows causal attention "
                "alone (accelerate 1.15 _attach_context_parallel_hooks)"
            )
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        # key-value heads are distributed, or each is repeated for the GPUs that share it
        divide = heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
        if not setup.uses_ring_attention and not divide:
            return (
                f"{heads} heads and {kv_heads} key-value heads cannot be distributed over "
                f"{degree} GPUs (DeepSpeed 0.19 UlyssesSPAttentionHF)"
            )
    return ""


def experts_refuse(model: ModelSpec, setup: TrainSetup) -> str:
    """Why no engine distributes this model's experts so; "" where one does, or none are distributed."""
    degree = setup.expert_degree
    if degree == 1 or setup.parallel == "ddp":  # DeepEP's, of setups that are read
        return ""
    if setup.method != "full":
        return (
            "expert parallelism is planned for full fine-tuning: peft's adapters come when transformers has sharded "
            "the model already (transformers 5.23 distributed/fsdp.py)"
        )
    stacks = model.expert_stacks
    if not stacks:
        return f"{model.model_type} has no stacked experts that could be distributed over GPUs"
    if model.model_type not in model_types("expert_plan"):
        return (
            f"transformers has no plan that dispatches {model.model_type}'s tokens to experts elsewhere (5.23 "
            "base_model_ep_plan)"
        )
    if model.model_type in model_types("dense_expert_plan"):
        return (
            f"transformers' expert plan of {model.model_type} also splits dense matrices over the experts' GPUs, which "
            "its FSDP2 cannot shard again (5.23, tried: overlapping meshes)"
        )
    if uneven := next((num for num in stacks if num % degree), 0):
        return f"{uneven} experts cannot be distributed evenly over {degree} GPUs (transformers 5.23 MoEParamShard)"
    if not OPTIMIZERS[setup.optimizer].steps_dtensors:
        return f"{setup.optimizer} has no step for the DTensors of distributed experts (bitsandbytes issue 1633)"
    return ""


def pipeline_refuses(model: ModelSpec, setup: TrainSetup) -> str:
    """Why no engine cuts this model into these stages; "" where one does, or nothing is cut."""
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
    if not LOSSES[setup.loss].whole_logits:
        return f"the {setup.loss} loss patches a whole model's forward (TRL, Liger); a last stage computes full logits"
    if setup.parallel in ("zero2", "zero3"):
        return "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism (DeepSpeed 0.19 pipe/engine.py)"
    if setup.parallel == "zero1":
        return "DeepSpeed's pipeline needs the model rewritten as a PipelineModule (DeepSpeed 0.19 pipe/engine.py)"
    if setup.parallel == "ddp":
        return "torchtitan's DDP does not combine with a pipeline: use fsdp2"
    if setup.parallel == "none" and setup.autocast_dtype is not None:
        return "torchtitan mixes precision in a pipeline only inside FSDP2; --precision bf16-pure runs without"
    if not OPTIMIZERS[setup.optimizer].steps_dtensors:
        return f"torchtitan's pipelines know AdamW, not {setup.optimizer}"
    return ""
