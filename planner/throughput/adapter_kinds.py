"""The work that other adapters than LoRA add to a step: bytes, flops and kernels, counted from peft's own code.

No run with any of them was compared: what is counted here stands in the speed's band in full (`Family.unmeasured_s`).
"""

from typing import NamedTuple

from planner.choices.adapters import block_size
from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.trained import kind_linears, trained_parameters
from planner.models.spec import LinearSpec, ModelSpec
from planner.records import dataclass
from planner.setup import TrainSetup
from planner.throughput.counts import Moved, adapter_traffic
from planner.throughput.lora import adapted_linears

_NOTHING = Moved(forward_bytes=0.0, backward_bytes=0.0, forward_kernels=0.0, backward_kernels=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindWork:
    """What one kind of adapter adds.

    Attributes:
        moved: bytes per token and kernels per micro-batch.
        flops: of thin products in the forward, per token.
        passes: how often those are done: forward, the input's gradient, the trained matrices' gradients.
        constant_bytes: moved in every forward whatever the tokens (DoRA's norms).
        params: trained elements; `tensors`: trained tensors.
        calls: adapted modules, each as many as the Python around its operations is LoRA's.
        step_s: host seconds of its own work after every optimizer step.
    """

    moved: Moved
    flops: float
    passes: float
    constant_bytes: float
    params: float
    tensors: int
    calls: float
    step_s: float = 0.0


ALLOCATOR_S = 5.5e-5
"""Host seconds of AdaLoRA's rank allocator per trained tensor and step, ten operations outside autograd (peft 0.21
`tuners/adalora/layer.py` update_ipt): 25 us on a CPU on which LoRA's call takes 0.45 of what the constants say."""


def kind_work(model: ModelSpec, setup: TrainSetup, flow: Flow) -> KindWork:
    """The work of the setup's adapter.

    Source: peft 0.21 `tuners/lora/dora.py`, `tuners/adalora/layer.py`, `tuners/vera/layer.py`, `tuners/ia3/layer.py`,
    `tuners/oft/layer.py`: one read and one write per element-wise operation, in its own types. Operations are counted
    by running a layer of each under PyTorch's dispatch (LoRA's own: 6 and 8), the Python around them by CPU seconds.
    Not counted: the rotations' own small products (OFT), the network of P-tuning (once per step), copies of norms.
    """
    kind = setup.adapter
    params = float(trained_parameters(model, setup).num)
    if not setup.kind.adapts_matrices:
        return _of_no_matrices(params, 2 * model.num_layers if setup.kind.form == "norms" else 1)
    kind_linears(model, kind, setup.lora_targets)  # refuses stacked experts
    linears, _, modules, _ = adapted_linears(model, setup.lora_targets)
    added = _added(linears, setup, flow)
    lora = _NOTHING
    if kind in ("dora", "adalora"):
        lora = adapter_traffic(linears, flow, dropout=setup.lora_dropout > 0, fused=False)
    moved = Moved(
        forward_bytes=lora.forward_bytes + added.forward,
        backward_bytes=lora.backward_bytes + 2.0 * added.forward,
        forward_kernels=lora.forward_kernels + modules * added.operations[0],
        backward_kernels=lora.backward_kernels + modules * added.operations[1],
    )
    return KindWork(
        moved=moved,
        flops=added.flops,
        passes=added.passes,
        constant_bytes=added.constant,
        params=params,
        tensors=added.tensors * modules,
        calls=modules * added.python,
        step_s=ALLOCATOR_S * added.tensors * modules if kind == "adalora" else 0.0,
    )


def _of_no_matrices(params: float, tensors: int) -> KindWork:
    """Of what trains so many parameters outside the matrices: the optimizer's alone."""
    return KindWork(
        moved=_NOTHING, flops=0.0, passes=0.0, constant_bytes=0.0, params=params, tensors=tensors, calls=0.0
    )  # fmt: skip


class _Added(NamedTuple):
    """What a kind adds to the adapted matrices: bytes per token of the forward, operations per module forward and
    backward, the Python around them in multiples of LoRA's, flops per token, bytes whatever the tokens, how often its
    products are done, trained tensors per module."""

    forward: float
    operations: tuple[int, int]
    python: float = 1.0
    flops: float = 0.0
    constant: float = 0.0
    passes: float = 3.0
    tensors: int = 2


def _added(linears: tuple[tuple[LinearSpec, int], ...], setup: TrainSetup, flow: Flow) -> _Added:
    kind, rank = setup.adapter, setup.lora_rank
    narrow, wide = SIZE_BYTES[flow.autocast or flow.adapter], SIZE_BYTES[flow.adapter]
    inside = sum(count * one.in_features for one, count in linears)
    outside = sum(count * one.out_features for one, count in linears)
    thin = 2.0 * rank * (inside + outside)
    if kind == "dora":  # two products with a row, a scaling, two sums
        constant = sum(count * norm_bytes(one, flow) for one, count in linears)
        moved = outside * (4 * (narrow + wide) + 3 * wide)
        return _Added(moved, (12, 10), 3.8, flops=thin, constant=constant, tensors=3)
    if kind == "adalora":  # a scaling and a division into fp32
        return _Added(outside * (2 * narrow + 3 * 4), (2, 8), flops=thin, tensors=3)
    if kind == "vera":  # two thin products, each scaled by a vector
        constant = sum(count * rank * (one.in_features + one.out_features) * (4.0 + narrow) for one, count in linears)
        forward = outside * (4 * narrow + 3 * wide) + inside * 2 * narrow
        return _Added(forward, (7, 11), 1.1, flops=thin, constant=constant, passes=2.0)
    if kind == "ia3":
        scaled = sum(count * (one.in_features if one.role == "down" else one.out_features) for one, count in linears)
        return _Added(scaled * (2 * narrow + 3 * wide), (3, 5), 0.5, tensors=1)
    # oft: to the rotation's type and back, the rotation, its copy into the old order
    flops = 2.0 * sum(count * one.in_features * block_size(one.in_features, rank) for one, count in linears)
    return _Added(inside * (4 * (narrow + wide) * (wide != narrow) + 4 * narrow), (16, 22), 4.5, flops=flops, tensors=1)


def norm_bytes(linear: LinearSpec, flow: Flow) -> float:
    """Bytes that DoRA moves to find one matrix's norms: the identity made, cast and read, the product written, brought
    to the input's type, scaled, added to the weight and read again.

    Source: peft 0.21 `tuners/lora/dora.py` get_lora_weight, get_weight_norm.
    """
    size, narrow = SIZE_BYTES[flow.adapter], SIZE_BYTES[flow.autocast or flow.adapter]
    identity = linear.in_features**2 * (size + (size + narrow) * (size != narrow) + narrow)
    casts = 2 * (size + narrow) * (size != narrow)
    return float(identity + linear.in_features * linear.out_features * (narrow + casts + 6 * size))
