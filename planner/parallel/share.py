"""What one rank of a spread holds beyond its activations: in which types an engine computes, and its `Share`.

Activations and the loss chain come from the one-GPU terms on the rank's own part, with the types of `engine_setup`.
"""

from dataclasses import replace

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.trained import Trained
from planner.parallel.fsdp import fsdp2
from planner.parallel.held import (
    COMPUTE,
    MOMENTS,
    Held,
    Share,
    gathered_head,
    part_trained,
    weights,
    whole_gradients,
)
from planner.parallel.rank import RankPart
from planner.parallel.zero import (
    ZERO3_PERSISTENT_ELEMENTS,
    ZERO3_PREFETCH_ELEMENTS,
    ZERO_BUCKET_ELEMENTS,
    zero3,
    zero12,
    zero_bucket_elements,
)
from planner.setup import SHARDED, TrainSetup

__all__ = [
    "MOMENTS",
    "ZERO3_PERSISTENT_ELEMENTS",
    "ZERO3_PREFETCH_ELEMENTS",
    "ZERO_BUCKET_ELEMENTS",
    "Share",
    "casts_to_half",
    "engine_setup",
    "part_trained",
    "share_of",
    "zero_bucket_elements",
]


def engine_setup(setup: TrainSetup) -> TrainSetup:
    """The one-GPU setup whose data types a rank really computes in.

    DDP wraps the same autocast model. FSDP2 under Accelerate never gets autocast: a mixed-precision policy gathers
    weights in 16 bit and computes there. DeepSpeed casts every floating parameter to 16 bit, adapters too, and keeps
    its own fp32 masters. Both therefore flow as pure 16 bit.

    Source: accelerate 1.15 `Accelerator._prepare_fsdp2` (no `prepare_model`), `FullyShardedDataParallelPlugin.
    set_mixed_precision`; native_amp is off for DeepSpeed; DeepSpeed 0.19 `engine.py` _configure_distributed_model.
    """
    plain = {
        "num_gpus": 1,
        "parallel": "none",
        "tensor_degree": 1,
        "pipeline_degree": 1,
        "pipeline_schedule": "1f1b",
        "shard_degree": 0,
        "reshard_after_forward": True,
        "offload": "none",
    }
    if not casts_to_half(setup):
        return setup.trusted_with(**plain)
    half = setup.compute_dtype
    if setup.tensor_degree > 1:  # transformers' FSDP2: weights gathered in 16 bit, and the Trainer's autocast on top
        return setup.trusted_with(**plain, precision=f"{half}-autocast")
    adapter = {} if setup.method == "full" else {"adapter_dtype": half}
    return setup.trusted_with(**plain, **adapter, precision=f"{half}-pure", kbit_fp32_cast=False)


def casts_to_half(setup: TrainSetup) -> bool:
    """Whether the engine computes in 16 bit without autocast, whatever type the weights are kept in."""
    if setup.parallel == "fsdp2":
        return setup.autocast_dtype is not None  # without mixed precision there is no policy
    return setup.parallel in SHARDED and setup.compute_dtype != "fp32"


def share_of(part: RankPart, setup: TrainSetup, *, accumulated: bool) -> Share:
    """The share of one rank that holds `part`.

    Args:
        accumulated: whether gradients of earlier micro-batches are alive while the next one runs.
    """
    inner = engine_setup(setup)
    trained = part_trained(part.model, inner)
    if setup.parallel == "fsdp2":
        return fsdp2(part, setup, inner, trained, accumulated)
    if setup.parallel in ("zero1", "zero2"):
        return zero12(part, setup, inner, trained, accumulated)
    if setup.parallel == "zero3":
        return zero3(part, setup, inner, trained, accumulated)
    return _replicated(part, setup, inner, trained, accumulated)


def _replicated(part: RankPart, setup: TrainSetup, inner: TrainSetup, trained: Trained, accumulated: bool) -> Share:
    """Everything whole on every rank; DDP adds its buckets, nn.DataParallel what GPU 0 collects.

    DDP's Reducer allocates one flat buffer per bucket at construction and keeps it: as many bytes as the trained
    parameters, beside the gradients themselves (gradient_as_bucket_view is off by default). nn.DataParallel copies the
    weights to every GPU for one step and adds all gradients up on GPU 0, which also runs the optimizer.

    Source: PyTorch 2.13 `csrc/distributed/c10d/reducer.cpp` initialize_buckets; accelerate 1.15
    `DistributedDataParallelKwargs`; `nn/parallel/replicate.py`, `_functions.py` ReduceAddCoalesced.
    """
    held = [*weights(part.model, inner)]
    if setup.method != "full":
        held.append(Held(category="adapters", name="LoRA matrices", size_bytes=trained.size_bytes))
    held += whole_gradients(part.model, inner, trained, accumulated and not part.follower)
    held += _split_tables(part, setup, trained, accumulated)
    held += gathered_head(part.model, setup, inner.weight_dtype)
    if setup.parallel == "ddp":
        held.append(Held(category="gradients", name="DDP's buckets", size_bytes=trained.size_bytes))
    if setup.parallel == "dp" and not part.follower:
        held.append(
            Held(
                category="gradients",
                name="sum of all GPUs' gradients",
                size_bytes=trained.size_bytes,
                moments=("last", "end"),
            )
        )
    if part.follower:  # its gradients are gone when GPU 0 has added them up
        held = [
            one if one.moments == MOMENTS else replace(one, moments=tuple(m for m in one.moments if m != "step"))
            for one in held
        ]
    local = trained if not part.follower else replace(trained, num=0, edge_sum=0, largest=0)
    return Share(part=part, setup=inner, trained=trained, local=local, optimizer_on_device=True, held=tuple(held))


def _split_tables(part: RankPart, setup: TrainSetup, trained: Trained, accumulated: bool) -> list[Held]:
    """What the gradient of a vocabulary-split table holds beyond a share: it is whole on every rank (its rows come from
    all tokens), and the optimizer takes a copy of its own rows.

    Measured: dry runs of transformers' own plan (docs/accuracy/spread-stages.md).
    """
    if setup.tensor_degree == 1 or setup.method != "full":
        return []
    model = part.model
    own = sum(table.num_params for table in model.embeddings) * SIZE_BYTES[trained.dtype]
    name = "a split table's whole gradient"
    if model.tied:  # added to the head's, which is split
        return [Held(category="gradients", name=name, size_bytes=(setup.tensor_degree - 1) * own, moments=("end",))]
    alive = (*COMPUTE, "end", "step") if accumulated else ("end", "step")
    return [
        Held(category="gradients", name=name, size_bytes=(setup.tensor_degree - 1) * own, moments=alive),
        Held(category="workspace", name="the optimizer's rows of it", size_bytes=own, moments=("step",)),
    ]
