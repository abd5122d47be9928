"""What other adapters than LoRA add to a layer: what they keep for the backward, and what they make for a moment.

LoRA's own terms stand in `planner.memory.activations` and `planner.memory.transient`; those kinds whose step is LoRA's
(`Adapter.like_lora`) never come here. Every function speaks of bytes.

Measured: benchmarks/adapter_kinds.py, docs/adapters.md.
"""

from collections.abc import Sequence

from planner.choices.adapters import block_size
from planner.memory.dtypes import SIZE_BYTES, Flow, promote
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


@dataclass(frozen=True, kw_only=True, slots=True)
class NormBytes:
    """Bytes of finding the norms of one matrix with DoRA.

    Attributes:
        largest: at most: the product of its two thin matrices, by way of an identity [in, in], and that product scaled
            and added to the matrix, all in the type of what the adapter is handed.
        left: of it, until the adapter's result is there.
    """

    largest: int
    left: int


def norm_bytes(linear: LinearSpec, flow: Flow, handed: str, *, graph: bool) -> NormBytes:
    """What DoRA makes to find the norms of one matrix.

    Args:
        handed: type of what the adapter is handed, to which the matrix and the product are cast.
        graph: whether autograd follows (not in the forward of a checkpointed layer), which keeps the identity.

    Source: peft 0.21 `tuners/lora/dora.py` forward, get_lora_weight, get_weight_norm.
    """
    size, adapter = SIZE_BYTES[handed], SIZE_BYTES[flow.adapter]
    multiplied = SIZE_BYTES[flow.autocast or flow.adapter]
    matrix = linear.in_features * linear.out_features
    identity = linear.in_features**2
    cast = multiplied * identity if multiplied != adapter else 0
    copies = 1 + (flow.quantized or flow.table != handed)  # the product, and the matrix itself where it is no parameter
    kept = multiplied * identity if graph else 0
    made = adapter * identity + max(cast, multiplied * matrix + (cast if graph else 0))
    return NormBytes(
        largest=max(made, kept + (copies + 2) * size * matrix),
        left=kept + copies * size * matrix,
    )


def weighed_bytes(linear: LinearSpec, flow: Flow, handed: str, input_dtype: str, *, whole: bool = True) -> int:
    """Bytes per token at most when DoRA weighs one matrix's two results: the base's and LoRA's, each by the magnitude
    over the norm, LoRA's scaled (or both and their sum); and the result itself where a bias is taken off it first.

    Args:
        whole: whether it comes to that; else the base's alone.

    Source: peft 0.21 `tuners/lora/dora.py` forward.
    """
    returned, magnitude = flow.linear_out(input_dtype), promote(flow.adapter, handed)
    base = SIZE_BYTES[promote(magnitude, returned)]
    product = SIZE_BYTES[promote(magnitude, flow.autocast or flow.adapter)]
    largest = base + (product + max(base, product)) * whole
    return (largest + SIZE_BYTES[returned] * linear.bias) * linear.out_features


def waiting_bytes(linear: LinearSpec, setup: TrainSetup, flow: Flow, handed: str, input_dtype: str) -> int:
    """Bytes per token of gradients that wait while a forward is recomputed that ends at one adapted matrix: that of its
    adapter's product, DoRA's in the type of the weighed results, and scaled.

    It ends before DoRA weighs LoRA's result, and where OFT hands the rotated input on.
    """
    returned, multiplied = flow.linear_out(input_dtype), flow.autocast or flow.adapter
    size = SIZE_BYTES[multiplied]
    if setup.adapter == "dora":
        wide = promote(promote(flow.adapter, handed), returned)
        size = SIZE_BYTES[wide] * (1 + (wide != returned))
    if setup.adapter == "adalora":
        size = SIZE_BYTES["fp32"]
    if setup.kind.form == "shared":
        size = SIZE_BYTES[promote(multiplied, flow.adapter)]
    if setup.kind.form == "rotations":  # of the matrix's own product
        size *= multiplied != returned
    return size * linear.out_features


def summed_bytes(linear: LinearSpec, setup: TrainSetup, flow: Flow, handed: str, input_dtype: str) -> int:
    """Bytes per token at most while one matrix's result and its adapter's are added up, beside that result and what the
    adapter keeps: LoRA's product and it scaled, or that and the sum.

    Source: peft 0.21 `tuners/lora/layer.py`, `lora/bnb.py`, `vera/layer.py`, `adalora/layer.py` (the product is divided
    by an fp32 tensor; added in place) forward.
    """
    returned, multiplied = flow.linear_out(input_dtype), flow.autocast or flow.adapter
    if setup.adapter == "dora":
        return weighed_bytes(linear, flow, handed, input_dtype)
    if setup.adapter == "adalora":
        return (SIZE_BYTES[multiplied] + SIZE_BYTES["fp32"]) * linear.out_features
    if setup.kind.form not in ("low-rank", "shared"):
        return 0
    product = promote(multiplied, flow.adapter) if setup.kind.form == "shared" else multiplied
    return (SIZE_BYTES[product] + SIZE_BYTES[promote(product, returned)]) * linear.out_features


def rotated_bytes(flow: Flow, input_dtype: str) -> int:
    """Bytes per element of a matrix's input at most while OFT rotates it, beside the copy that the rotation keeps: the
    input, it in the rotation's type, the product, that in the order of the tokens, and cast back.

    Source: peft 0.21 `tuners/oft/layer.py` Linear.forward, OFTRotationModule.forward.
    """
    multiplied = flow.autocast or flow.adapter
    cast = SIZE_BYTES[flow.adapter] if flow.adapter != input_dtype else 0
    back = SIZE_BYTES[flow.adapter] if flow.adapter != multiplied else 0
    return SIZE_BYTES[input_dtype] + cast + 2 * SIZE_BYTES[multiplied] + back


def shared_bytes(setup: TrainSetup, linears: list[LinearSpec]) -> int:
    """VeRA's two frozen matrices, wide enough for every adapted one, in fp32 (peft casts buffers as well)."""
    widest = max(one.in_features for one in linears) + max(one.out_features for one in linears)
    return 4 * setup.lora_rank * widest


def unsummed_bytes(linear: LinearSpec, setup: TrainSetup, flow: Flow, input_dtype: str) -> int:
    """Bytes per token at most when the gradient of one adapted matrix's result comes back to its adapter, beside what
    that keeps: the gradient, in the type of the sum too, and the adapter's product's.

    VeRA multiplies the sum's with its vector and with the product; AdaLoRA divides it in fp32.

    Source: as `summed_bytes`; PyTorch derivatives.yaml (`mul`, `div`).
    """
    returned, multiplied = flow.linear_out(input_dtype), flow.autocast or flow.adapter
    wide = promote(multiplied, flow.adapter) if setup.kind.form == "shared" else multiplied
    size = SIZE_BYTES[returned] + SIZE_BYTES[wide] * ((wide != returned) + 1 + (setup.kind.form == "shared"))
    if setup.adapter == "adalora":
        size = SIZE_BYTES[returned] + SIZE_BYTES[multiplied] + SIZE_BYTES["fp32"] * (1 + (returned != "fp32"))
    return size * linear.out_features


def forward_bytes(linears: Sequence[LinearSpec], setup: TrainSetup, flow: Flow) -> int:
    """Bytes per token by which the largest moment of a layer's forward lies above LoRA's.

    Measured: slopes of the dry run's peak between 512 and 2,048 tokens.
    """
    wide = flow.adapter == "fp32" and flow.residual != "fp32"
    if setup.adapter == "oft" and wide:
        return 6 * max(one.in_features for one in linears)
    if setup.adapter == "adalora" and flow.residual != "fp32":
        return (2 if wide else 4) * max(one.out_features for one in linears)
    if setup.adapter == "ia3" and wide:
        return 3 * max((one.in_features for one in linears if one.role == "down"), default=0)
    return 0
