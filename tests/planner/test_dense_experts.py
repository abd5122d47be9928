"""Llama 4's class multiplies every token with every expert, by zero where it was not routed."""

from planner.hardware.gpus import find_gpu
from planner.setup import TrainSetup
from planner.speed.roofline import step_time
from planner.speed.roofline.counts import inventory
from tests.planner.helpers import loaded


def test_every_expert_multiplies_every_token() -> None:
    model = loaded("meta-llama/Llama-4-Scout-17B-16E")
    stacks = [group.linear for group in inventory(model).groups if group.linear.num > 1]
    assert stacks
    assert {(stack.num, stack.num_active) for stack in stacks} == {(16, 16)}
    setup = TrainSetup(method="lora", lora_targets="attention", seq_len_tokens=2048)
    weights = sum(
        linear.num_weights for layer, num in model.layer_counts for linear in num * layer.linears if linear.num > 1
    )
    peak = find_gpu("b300").bf16_flops_per_s
    assert peak is not None
    assert (
        step_time(model, find_gpu("b300"), setup).step_time_s > 4 * weights * 2048 / peak
    )  # forward, and the gradient of its input
