"""Tensor parallelism against Megatron-LM's weak scaling: the only published tensor-parallel runs that a setup can say.

Source: NVIDIA ADLR, MegatronLM's supercharged V1.0, https://nv-adlr.github.io/MegatronLMV1, table 1: models of 1.2,
2.0, 4.2 and 8.7 billion parameters on 1, 2, 4 and 8 GPUs of a DGX-2H (V100, NVSwitch), batch 8: 100, 90.7, 86.5 and
79.6 % of linear. The shapes are those of Shoeybi et al. 2019, arXiv:1909.08053 (from memory; their 1.2, 2.5, 4.2 and
8.3 billion parameters agree), the length GPT-2's; assumed: fp16 autocast, eager attention, every layer checkpointed.
"""

from typing import Any

from benchmarks.speed_points import inline_model
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.setup import TrainSetup
from planner.speed.roofline import step_time
from planner.speed.several_gpus.speed import layout_step_time

SHAPES = ((1, 1536, 16, 40), (2, 1920, 20, 54), (4, 2304, 24, 64), (8, 3072, 32, 72))
"""GPUs, width, heads, layers."""
PUBLISHED = {2: 0.907, 4: 0.865, 8: 0.796}
BATCH, TOKENS = 8, 1024


def config_of(width: int, heads: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": TOKENS,
        "vocab_size": 51200, "activation_function": "gelu",
    }  # fmt: skip


def weak_scaling() -> dict[int, float]:
    """Predicted share of linear scaling by tensor degree: floating-point rate of a GPU relative to one GPU alone."""
    gpu = find_gpu("v100-32gb")
    rates: dict[int, float] = {}
    for degree, width, heads, layers in SHAPES:
        model = inline_model(config_of(width, heads, layers), f"gpt-{width}")
        setup = TrainSetup(
            method="full", lora_rank=0, precision="fp16-mixed", attention="eager", micro_batch_seqs=BATCH,
            seq_len_tokens=TOKENS, num_gpus=degree, tensor_degree=degree,
        )  # fmt: skip
        if degree == 1:
            seconds = step_time(model, gpu, setup).step_time_s
        else:
            seconds = layout_step_time(model, gpu, setup, make_cluster(gpu, degree)).step_time_s
        rates[degree] = model.num_params / degree / seconds
    return {degree: rate / rates[1] for degree, rate in rates.items() if degree > 1}
