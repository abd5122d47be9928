"""Which of setups that are as fast is the simplest: what runs in more tools, needs fewer packages and loses less."""

from functools import lru_cache

from planner.choices.kernels import KERNELS
from planner.choices.losses import LOSSES
from planner.choices.optimizers import OPTIMIZERS
from planner.choices.rollouts import GENERATORS
from planner.choices.stacks import DEFAULT
from planner.decision.layouts import layout_order
from planner.setup import TrainSetup

SIMPLE_FIRST = {
    "precision": ("bf16-autocast", "bf16-mixed", "fp16-autocast", "fp16-mixed", "fp32", "bf16-pure"),
    "attention": ("sdpa", "flash-attention-2", "eager"),
    "quantization": ("none", "nf4-double", "nf4", "int8"),
}
"""Values in the order of what runs in more tools, needs fewer extra packages and loses less; values not listed come
last."""


def lossiness(setup: TrainSetup) -> int:
    """How much a setup gives up of what its class could train: its precision, the optimizer's states, the base."""
    return OPTIMIZERS[setup.optimizer].tie_break + _place(setup, "precision") + _place(setup, "quantization")


def tie_break(setup: TrainSetup) -> int:
    """How far a setup is from the simplest, summed over the dimensions; smaller is simpler."""
    return (
        layout_order(setup)
        + LOSSES[setup.loss].tie_break
        + KERNELS[setup.kernels].tie_break
        + (setup.stack != DEFAULT)  # another program than the plan's usual one
        + 5 * setup.compile  # which nothing here can prove before it runs
        + setup.activation_offload
        + (setup.checkpointing > 1)  # not every tool can, and a little memory alone is no reason
        + setup.selective_checkpointing
        + _place(setup, "attention")
        + (GENERATORS.index(setup.rolls.generator) if setup.aim.rolls_out else 0)
    )


def _place(setup: TrainSetup, name: str) -> int:
    values = SIMPLE_FIRST[name]
    return values.index(getattr(setup, name)) if getattr(setup, name) in values else len(values)


@lru_cache(maxsize=1 << 14)
def point_tie_break(shared: TrainSetup, attention: str, loss: str, optimizer: str) -> tuple[int, int]:
    """(lossiness, tie_break) of a walked point, which are asked for again and again."""
    setup = shared.replace_trusted(attention=attention, loss=loss, optimizer=optimizer)
    return lossiness(setup), tie_break(setup)
