"""Kernel libraries' own Python on meta tensors, their launches as no-ops."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import MethodType
from typing import Any
from unittest import mock

import torch

from planner.core.install import packages_command
from planner.core.shipped import model_types
from planner.setup import TrainSetup

# Kernels that no operator launches: stand-ins that compute nothing say here what would run, and whoever follows
# listens.


Listener = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
_LISTENERS: list[Listener] = []


def launched(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] = ()) -> None:
    """A kernel (a row of `planner.speed.prices`) would read `inputs` and write `outputs` now."""
    for listener in _LISTENERS:
        listener(name, inputs, outputs)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within it `listener` is told of every launch."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


# Kernel families on a built model: on meta their autograd functions by what they save and allocate, on a GPU the real.


OUT_OF_PLACE = model_types("liger_norms_apart")
"""Types whose norms' backward writes a tensor of its own, where others overwrite the gradient that comes."""
IN_PLACE_FINAL = model_types("liger_last_norm_in_place")
"""Of those, types whose last norm overwrites all the same."""
NEEDS = ("liger_kernel", "triton")


class KernelsMissing(ImportError):
    """A setup's kernels cannot run here for want of a package."""


def apply_kernels(model: Any, setup: TrainSetup) -> None:
    """Puts the setup's kernel family into a transformers model or a peft model, in place.

    Raises:
        KernelsMissing: a real device without the packages, or one that no Triton kernel runs on.
    """
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    parts = setup.fused_parts(inner.config.model_type, compiler=False)
    if not parts:
        return
    device = next(model.parameters()).device.type
    if device != "meta":  # Liger's own switch, as the Trainer throws it; the loss is the step's
        if setup.kernels == "fused":
            raise KernelsMissing("fused LoRA kernels run in Axolotl or Unsloth, not in a probe")
        if any(find_spec(name) is None for name in NEEDS):
            raise KernelsMissing(f"kernels 'liger' need liger-kernel and Triton: {packages_command('liger-kernel')}")
        if device == "cpu":
            raise KernelsMissing("kernels 'liger' are Triton's, which run on a GPU only")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        options = {"fused_linear_cross_entropy": False, "cross_entropy": False}
        if "gated" not in parts:
            options["swiglu"] = False
        _apply_liger_kernel_to_instance(model=inner, **options)
        return
    kind = inner.config.model_type
    for name, module in inner.named_modules():
        leaf = name.rpartition(".")[2]
        if type(module).__name__.endswith("RMSNorm"):
            of_head = leaf in ("q_norm", "k_norm")
            if ("head-norm" if of_head else "norm") in parts:
                last = name.count(".") < 2 and kind in IN_PLACE_FINAL
                module.forward = partial(_norm, module, kind not in OUT_OF_PLACE or last)
        elif "gated" in parts and hasattr(module, "down_proj") and leaf == "mlp":
            fused = "lora" in parts and all(_adapted(getattr(module, projection, None)) for projection in _MLP)
            if fused:
                module.forward = partial(_fused, _LoraMlp, [getattr(module, projection) for projection in _MLP])
            elif not setup.trainer.gates_with_lora:
                module.forward = MethodType(_gated_mlp, module)
        elif "lora" in parts and leaf == "self_attn":
            _fuse_attention(module)


_MLP = ("gate_proj", "up_proj", "down_proj")


@contextmanager
def running(inner: Any, setup: TrainSetup) -> Iterator[None]:
    """Within it the model class's module rotates queries and keys by the family's kernel (on meta)."""
    module = sys.modules[type(inner).__module__]
    rotary = "rotary" in setup.fused_parts(inner.config.model_type, compiler=False)
    if not rotary or not hasattr(module, "apply_rotary_pos_emb") or next(inner.parameters()).device.type != "meta":
        yield
        return
    with mock.patch.object(
        module, "apply_rotary_pos_emb", lambda q, k, cos, sin, *_, **__: _Rotary.apply(q, k, cos, sin)
    ):
        yield


class _Norm(torch.autograd.Function):  # type: ignore[misc]
    """LigerRMSNormFunction: keeps the input as it is, the weight and one fp32 per row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        rows = rows.contiguous()
        flat = rows.view(-1, rows.shape[-1])
        out = torch.empty_like(flat)
        launched("liger.rms_norm", [flat, weight], [out])
        ctx.in_place = in_place
        ctx.save_for_backward(flat, weight, torch.empty(flat.shape[0], dtype=torch.float32, device=rows.device))
        return out.view(rows.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradient = grads[0].contiguous()
        flat, weight, _ = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            partial = torch.empty((NUM_SMS, weight.shape[0]), dtype=torch.float32, device=weight.device)
        of_rows = gradient if ctx.in_place else torch.empty_like(gradient)
        launched("liger.rms_norm_backward", [flat, gradient, weight], [of_rows])
        if ctx.needs_input_grad[1]:
            of_weight = partial.sum(dim=0).to(weight.dtype)
        return of_rows, of_weight, None


NUM_SMS = 132
"""Rows of the partial sums of a trained norm's gradient: a card's multiprocessors (an H100's; 2 MB at 4,096)."""


def _norm(module: Any, in_place: bool, hidden_states: torch.Tensor) -> Any:
    return _Norm.apply(hidden_states, module.weight, in_place)


class _Rotary(torch.autograd.Function):  # type: ignore[misc]
    """LigerRopeFunction: rotates where queries and keys lie (in a copy, where they are not contiguous)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        launched("liger.rope", [q, k, cos, sin], [q, k])
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dq, dk = (grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads)
        launched("liger.rope", [dq, dk, *ctx.saved_tensors], [dq, dk])
        return dq, dk, None, None


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    """LigerSiLUMulFunction and LigerGELUMulFunction: keeps both inputs and writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        launched("liger.swiglu", [gate, up], [out])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        launched("liger.swiglu_backward", [grads[0].contiguous(), gate, up], [gate, up])
        return gate, up


def _gated_mlp(self: Any, x: torch.Tensor) -> Any:
    if hasattr(self, "gate_up_proj"):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    else:
        gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(_Gated.apply(gate, up))


def _adapted(module: Any) -> bool:
    return bool(getattr(module, "lora_A", None))


def _parts(module: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(base layer, A, B) of an adapted matrix."""
    adapter = module.active_adapters[0]
    return module.base_layer, module.lora_A[adapter].weight, module.lora_B[adapter].weight


def _dense(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """The frozen matrix to multiply with: unpacked for the moment where it is quantized.

    Of a weight that FSDP2 cut the module keeps the statistics here, the gathered weight itself in Axolotl.
    Source: Axolotl 0.21 `monkeypatch/fsdp2_qlora.py` apply_init_unsharded_param_patch.
    """
    state = getattr(base.weight, "quant_state", None) or getattr(base, "quant_state", None)
    if state is None:
        weight: torch.Tensor = base.weight.detach()
        return weight if weight.dtype is dtype else weight.to(dtype)
    import bitsandbytes.functional as bnb

    return bnb.dequantize_4bit(base.weight.data, state)


def _multiply(x: torch.Tensor, base: Any, a: torch.Tensor, b: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """x W + s x A B [+ bias] (back: with the transposed matrices), with the temporaries that this takes."""
    weight = _dense(base, x.dtype)
    out = torch.matmul(x, weight if back else weight.t())
    del weight
    first, second = (b, a) if back else (a.t(), b.t())
    inner = torch.matmul(torch.empty_like(x), first.to(x.dtype))  # s * x is a tensor of its own
    out += torch.matmul(inner, second.to(x.dtype))
    if base.bias is not None and not back:
        out += base.bias
    return out


def _adapter_gradients(x: torch.Tensor, gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """(d A, d B, gradient times B)."""
    through = torch.matmul(gradient, b.to(gradient.dtype))
    of_a = torch.mm(x.t(), through)
    of_b = torch.mm(torch.mm(a.to(x.dtype), x.t()), gradient)
    return of_a.t(), of_b.t(), through


def _to_input(into: torch.Tensor, gradient: torch.Tensor, base: Any, *, first: bool) -> None:
    """Adds a matrix's share to the gradient of its input, which lies in the input's own place."""
    weight = _dense(base, gradient.dtype)
    if first:
        torch.mm(gradient, weight, out=into)
    else:
        into += torch.mm(gradient, weight)


class _LoraLinears(torch.autograd.Function):  # type: ignore[misc]
    """LoRA_QKV and LoRA_O: matrices that share an input, each with its adapter; keeps the input and 16-bit adapters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bases: Any, *adapters: torch.Tensor) -> Any:
        flat = x.view(-1, x.shape[-1])
        pairs = list(zip(bases, adapters[0::2], adapters[1::2], strict=True))
        outs = [_multiply(flat, base, a, b) for base, a, b in pairs]
        ctx.bases, ctx.in_place = bases, len(bases) > 1
        ctx.save_for_backward(x, *(adapter.to(x.dtype) for adapter in adapters))
        return tuple(out.view(*x.shape[:-1], -1) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *adapters = ctx.saved_tensors
        flat = x.view(-1, x.shape[-1])
        flat_grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        pairs = list(zip(ctx.bases, adapters[0::2], adapters[1::2], flat_grads, strict=True))
        adapter_grads: list[torch.Tensor] = []
        for _, a, b, gradient in pairs:
            of_a, of_b, _ = _adapter_gradients(flat, gradient, a, b)
            adapter_grads += [of_a, of_b]
        if not ctx.needs_input_grad[0]:
            return None, None, *adapter_grads
        into = flat if ctx.in_place else torch.empty_like(flat)
        for number, (base, _, _, gradient) in enumerate(pairs):
            _to_input(into, gradient, base, first=number == 0)
        return into.view(x.shape), None, *adapter_grads


def _fused(function: Any, modules: list[Any], x: torch.Tensor) -> Any:
    parts = [_parts(module) for module in modules]
    return function.apply(x, tuple(part[0] for part in parts), *(adapter for part in parts for adapter in part[1:]))


def _fuse_attention(attention: Any) -> None:
    """Queries, keys and values by one function where all carry adapters, which the queries' turn runs; the output by
    one of its own."""
    together: list[Any] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    ready: dict[int, torch.Tensor] = {}

    def queries(self: Any, x: torch.Tensor) -> Any:
        out, ready[1], ready[2] = _fused(_LoraLinears, together, x)
        return out

    if all(map(_adapted, together)):
        together[0].forward = MethodType(queries, together[0])
        for place, projection in enumerate(together[1:], 1):
            projection.forward = MethodType(lambda self, x, place=place: ready.pop(place), projection)
    output: Any = getattr(attention, "o_proj", None)
    if _adapted(output):
        output.forward = MethodType(lambda self, x: _fused(_LoraLinears, [self], x)[0], output)


class _LoraMlp(torch.autograd.Function):  # type: ignore[misc]
    """LoRA_MLP: keeps the input, gate, up and 16-bit adapters; the product is computed anew in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bases: Any, *adapters: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        gate = _multiply(flat, bases[0], adapters[0], adapters[1])
        up = _multiply(flat, bases[1], adapters[2], adapters[3])
        out = _multiply(torch.empty_like(gate), bases[2], adapters[4], adapters[5])
        ctx.bases = bases
        ctx.save_for_backward(x, gate, up, *(adapter.to(x.dtype) for adapter in adapters))
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, gate, up, *adapters = ctx.saved_tensors
        flat, gradient = x.view(-1, x.shape[-1]), grads[0].reshape(-1, grads[0].shape[-1])
        product = _multiply(gradient, ctx.bases[2], adapters[4], adapters[5], back=True)
        down = _adapter_gradients(product, gradient, adapters[4], adapters[5])
        second = _adapter_gradients(flat, up, adapters[2], adapters[3])
        first = _adapter_gradients(flat, gate, adapters[0], adapters[1])
        _to_input(flat, up, ctx.bases[1], first=True)
        _to_input(flat, gate, ctx.bases[0], first=False)
        return x, None, *first[:2], *second[:2], *down[:2]
