"""What other adapters than LoRA add to a layer: what they keep for the backward, and what they make for a moment.

LoRA's own terms stand in `planner.memory.activations` and `planner.memory.transient`; those kinds whose step is LoRA's
(`Adapter.like_lora`) never come here. Every function speaks of bytes.

Measured: benchmarks/adapter_kinds.py, docs/adapters.md.
"""

from collections.abc import Sequence

from planner.choices.adapters import block_size
from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.models.spec import LinearSpec
from planner.records import dataclass
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What one adapted matrix keeps: bytes per token, bytes whatever the tokens, whether it keeps a copy of its input
    (as LoRA does)."""

    per_token: int = 0
    constant: int = 0
    input_copy: bool = False


def kept_by_matrix(linear: LinearSpec, setup: TrainSetup, flow: Flow, input_dtype: str) -> Kept:
    """What one adapted matrix keeps for its backward.

    DoRA keeps the matrix's own result and LoRA's beside what LoRA keeps, for the gradient of the magnitude; with
    dropout it multiplies the base again and keeps its weight in the multiplied type. VeRA keeps its inner product, the
    result that its vector scales, and 16-bit copies of the slices of its two frozen matrices, but no input. IA3 keeps
    what it scales as it comes, the input of the MLP's last matrix in its vector's type (bitsandbytes': as it comes).
    OFT keeps its input, and of the rotation the skew matrix, its powers and their sum.

    Source: peft 0.21 `tuners/lora/dora.py`, `tuners/adalora/layer.py`, `tuners/vera/layer.py`, `tuners/ia3/layer.py`
    and `bnb.py`, `tuners/oft/layer.py` _cayley_batch; PyTorch derivatives.yaml (`mul` keeps both factors).
    """
    out, inside, rank = linear.out_features, linear.in_features, setup.lora_rank
    multiplied = SIZE_BYTES[flow.autocast or flow.adapter]
    returned = SIZE_BYTES[flow.linear_out(input_dtype)]
    kind = setup.adapter
    if kind == "dora":
        again = multiplied * inside * out if setup.lora_dropout else 0
        base = multiplied if setup.lora_dropout else returned
        return Kept(per_token=multiplied * rank + (base + multiplied) * out, constant=again, input_copy=True)
    if kind == "adalora":
        casts = SIZE_BYTES["bf16"] * rank * inside if flow.autocast else 0
        return Kept(per_token=multiplied * rank, constant=casts, input_copy=True)
    if kind == "vera":
        copies = multiplied * rank * (inside + out) if flow.autocast else 0
        return Kept(per_token=multiplied * (rank + out), constant=copies)
    if kind == "ia3":
        if linear.role != "down":  # the product of two types keeps both factors as they come
            return Kept(per_token=returned * out)
        return Kept(per_token=SIZE_BYTES[input_dtype if flow.quantized else flow.adapter] * inside)
    if kind == "oft":
        blocks = inside * block_size(inside, rank)
        rotation = (6 if flow.autocast and flow.adapter == "fp32" else 4) * multiplied
        return Kept(constant=rotation * blocks, input_copy=True)
    return Kept()


def norm_moment(linear: LinearSpec, flow: Flow, *, graph: bool) -> int:
    """Bytes that DoRA makes to find the norms of one matrix: the product of its two thin ones, by way of an identity
    [in, in], and three more tensors of the matrix's own size.

    Args:
        graph: whether autograd follows (not in the forward of a checkpointed layer), which keeps the identity.

    Source: peft 0.21 `tuners/lora/dora.py` get_lora_weight, get_weight_norm.
    """
    size, multiplied = SIZE_BYTES[flow.adapter], SIZE_BYTES[flow.autocast or flow.adapter]
    identity = linear.in_features**2
    matrix = linear.in_features * linear.out_features
    cast = multiplied if multiplied != size else 0
    if graph:
        return max((size + cast) * identity + multiplied * matrix, multiplied * identity + 4 * size * matrix)
    return max((size + cast) * identity, 4 * size * matrix)


def shared_bytes(setup: TrainSetup, linears: list[LinearSpec]) -> int:
    """VeRA's two frozen matrices, wide enough for every adapted one, in fp32 (peft casts buffers as well)."""
    widest = max(one.in_features for one in linears) + max(one.out_features for one in linears)
    return 4 * setup.lora_rank * widest


def gradient_bytes(linears: Sequence[LinearSpec], setup: TrainSetup, flow: Flow) -> int:
    """Bytes per token by which the largest moment of a layer's backward lies above LoRA's.

    The gradients of what a vector scales are in the vector's type, those of AdaLoRA's product (divided by a tensor) are
    fp32, and OFT takes the gradient of its rotated input to its rotation's type and back; of each a multiple of the
    widest matrix stands beside the gradients of the MLP, less what is gone by then.

    Measured: slopes of the dry run's peak between 512 and 2,048 tokens, benchmarks/adapter_kinds.py.
    """
    widest_in, widest_out = max(one.in_features for one in linears), max(one.out_features for one in linears)
    narrow = min(widest_in, *(one.out_features for one in linears if one.role == "down"), widest_out)
    wide = flow.adapter == "fp32" and flow.residual != "fp32"
    if setup.adapter == "vera" and wide:
        return 4 * widest_out - 2 * narrow
    if setup.adapter == "oft" and wide:
        return 8 * widest_in - 4 * narrow
    if setup.adapter == "adalora" and flow.residual != "fp32":
        return 4 * widest_out - (6 * narrow if wide else 0)
    if setup.adapter == "ia3":
        return SIZE_BYTES[flow.adapter] * max((one.in_features for one in linears if one.role == "down"), default=0)
    return 0


def forward_bytes(linears: Sequence[LinearSpec], setup: TrainSetup, flow: Flow) -> int:
    """Bytes per token by which the largest moment of a layer's forward lies above LoRA's.

    Measured: as `gradient_bytes`.
    """
    wide = flow.adapter == "fp32" and flow.residual != "fp32"
    if setup.adapter == "oft" and wide:
        return 6 * max(one.in_features for one in linears)
    if setup.adapter == "adalora" and flow.residual != "fp32":
        return (2 if wide else 4) * max(one.out_features for one in linears)
    if setup.adapter == "ia3" and wide:
        return 3 * max((one.in_features for one in linears if one.role == "down"), default=0)
    return 0
