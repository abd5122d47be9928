"""How the GPUs of a job work together: one small final class per engine behind `Engine`.

An engine says what a rank holds beside its activations, in which types it computes, what it leaves waiting for the
links, and which setups it refuses. One GPU is an engine too (`whole.SingleGpu`) and loads no other. Splits of the model
itself (tensor, pipeline) go with several engines: `planner.memory.rank_part` cuts, `splits` refuses.
"""

from functools import cache
from importlib import import_module

from planner.memory.engines.base import Engine
from planner.models.spec import ModelSpec
from planner.options.sound import WITH_SOUND
from planner.setup import TrainSetup

__all__ = ["ENGINES", "Engine", "engine_named", "engine_of", "why_not"]

ENGINES = {
    "none": "whole.SingleGpu",
    "ddp": "whole.Ddp",
    "dp": "whole.OneProcess",
    "device-map": "whole.DeviceMap",
    "fsdp2": "fsdp2.Fsdp2",
    "zero1": "zero.Zero1",
    "zero2": "zero.Zero2",
    "zero3": "zero.Zero3",
}
"""The class of every value of `TrainSetup.parallel`, loaded when it is first asked for."""


def engine_of(setup: TrainSetup) -> Engine:
    """The engine of a setup."""
    return engine_named(setup.parallel)


@cache
def engine_named(parallel: str) -> Engine:
    """The engine of one value of `TrainSetup.parallel`."""
    module, name = ENGINES[parallel].split(".")
    engine = getattr(import_module(f"planner.memory.engines.{module}"), name)()
    assert isinstance(engine, Engine)
    return engine


def why_not(model: ModelSpec, setup: TrainSetup) -> str:
    """One sentence why no engine runs this setup under its layout, with the source; "" where one does.

    Read in the installed sources (accelerate 1.15, transformers 5.23, peft 0.21, bitsandbytes 0.50, PyTorch 2.13,
    DeepSpeed 0.19) and issue trackers; nothing here is a guess about speed or memory.

    Not counted: whether it fits into memory, or is wise.
    """
    if setup.single_gpu:
        return ""
    if model.front_end is not None and setup.parallel not in WITH_SOUND["parallel"]:
        return (
            f"{model.model_type} is planned on one GPU or with ddp: how {setup.parallel} gathers its convolutions and "
            "an encoder's output that all layers share is not modelled"
        )
    from planner.memory.engines.splits import split_refuses  # one GPU never needs it

    return engine_of(setup).refuses(model, setup) or split_refuses(model, setup)
