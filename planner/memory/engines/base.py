"""`Engine`: what one way of working together must say about itself."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from planner.memory.rank_part import RankPart
from planner.memory.states import RankState
from planner.models.spec import ModelSpec
from planner.options.precisions import precision_of
from planner.setup import TrainSetup

ONE_GPU: dict[str, Any] = {
    "num_gpus": 1,
    "parallel": "none",
    "tensor_degree": 1,
    "expert_degree": 1,
    "pipeline_degree": 1,
    "pipeline_schedule": "1f1b",
    "shard_degree": 0,
    "reshard_after_forward": True,
    "offload": "none",
}


class Engine(ABC):
    """One value of `TrainSetup.parallel`.

    Attributes:
        name: for people ("FSDP2").
        tie_break: breaks ties in speed, smaller is simpler: what needs no gathering, then what needs no package beside
            PyTorch, then DeepSpeed's stages.
        shares: what of the states each GPU keeps only a part of, "" where nothing is cut.
        sends: what crosses the links, for people.
        reference: where TRL puts a frozen second copy of the weights under it, for people.
        keeps_fp32_masters: whether it keeps fp32 copies of 16-bit weights by itself.
        reduces_layers: whether a layer's gradients are whole until its backward is done.
    """

    name: ClassVar[str]
    tie_break: ClassVar[int]
    shares: ClassVar[str] = ""
    sends: ClassVar[str] = ""
    reference: ClassVar[str] = "whole on every GPU"
    keeps_fp32_masters: ClassVar[bool] = False
    reduces_layers: ClassVar[bool] = False

    @abstractmethod
    def state(self, part: RankPart, setup: TrainSetup, *, accumulated: bool) -> RankState:
        """What one rank that holds `part` holds beside its activations.

        Args:
            accumulated: whether gradients of earlier micro-batches are alive while the next one runs.
        """

    def equivalent_loss(self, model: ModelSpec, setup: TrainSetup, loss: str) -> str:
        """Of the losses with which a rank holds the same as with this one, always the same one."""
        return loss

    def refuses(self, model: ModelSpec, setup: TrainSetup) -> str:
        """One sentence why the engine does not run the setup, with the source; "" where it does."""
        return ""

    def casts_to_half(self, setup: TrainSetup) -> bool:
        """Whether it computes in 16 bit without autocast, whatever type the weights are kept in."""
        return False

    def computes(self, setup: TrainSetup) -> TrainSetup:
        """The one-GPU setup whose data types a rank really computes in; activations and the loss chain are its.

        DDP wraps the same autocast model. FSDP2 under Accelerate never gets autocast: a mixed-precision policy gathers
        weights in 16 bit and computes there. DeepSpeed casts every floating parameter to 16 bit, adapters too, and
        keeps its own fp32 masters. Both therefore flow as pure 16 bit.

        Source: accelerate 1.15 `Accelerator._prepare_fsdp2` (no `prepare_model`), `FullyShardedDataParallelPlugin.
        set_mixed_precision`; native_amp is off for DeepSpeed; DeepSpeed 0.19 `engine.py` _configure_distributed_model.
        """
        alone = _alone(setup)
        if not self.casts_to_half(setup):
            return setup.replace_trusted(**alone)
        half = setup.compute_dtype
        if (
            setup.sharded_at_loading
        ):  # transformers' FSDP2: weights gathered in 16 bit, and the Trainer's autocast on top
            return setup.replace_trusted(**alone, precision=precision_of(half, half))
        adapter = {} if setup.method == "full" else {"adapter_dtype": half}
        return setup.replace_trusted(**alone, **adapter, precision=precision_of(half, None), kbit_fp32_cast=False)


def _alone(setup: TrainSetup) -> dict[str, Any]:
    """The fields of a rank by itself; where it exchanges keys or tokens within a layer, or holds a part of the
    stream, with whom stays known."""
    if setup.expert_degree > 1:
        sharding = {"parallel": setup.parallel, "expert_degree": setup.expert_degree, "shard_degree": setup.shards}
        return {**ONE_GPU, **sharding}
    if setup.context_degree == 1:
        return ONE_GPU if setup.stream_degree == 1 else {**ONE_GPU, "tensor_degree": setup.tensor_degree}
    tokens = setup.seq_len_tokens // setup.context_degree
    return {**ONE_GPU, "parallel": setup.parallel, "seq_len_tokens": tokens}
