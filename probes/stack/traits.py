"""What transformers' classes do in their own way where it changes memory, seen by running them."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from planner.models.spec import ATTENTION_DROPOUTS, RESIDUAL_DROPOUTS, FrontEnd, NormKind, NormStyle, Traits

_TOKENS = 11
"""Of the run: a size that no model has."""


def norm_kind(module: nn.Module, size: int) -> NormKind:
    """Whether nothing is left of equal numbers: T5LayerNorm is an RMSNorm, CohereLayerNorm is none. A norm that takes
    more than one tensor goes by its name."""
    norm = _on_cpu(module, torch.float32)
    try:
        with torch.no_grad(), torch.device("cpu"):
            subtracts = bool(norm(torch.ones(1, size)).abs().max() < 0.5)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        subtracts = "LayerNorm" in type(module).__name__
    return "layer" if subtracts else "rms"


def norm_style(module: nn.Module, size: int) -> NormStyle:
    """How a norm works, by what its backward keeps of 16-bit rows: a norm of single operations keeps several tensors of
    fp32, an RMSNorm that multiplies before the cast back one more than others."""
    norm, saved = _on_cpu(module, torch.bfloat16), set[int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float32 and tensor.numel() == _TOKENS * size:
            saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    rows = torch.ones(_TOKENS, size, dtype=torch.bfloat16, device="cpu", requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.device("cpu"):
        norm(rows).sum()
    if norm_kind(module, size) == "rms":
        return "rms-fp32" if len(saved) > 1 else "rms"
    return "layer-composed" if len(saved) > 1 else "layer-cast-back" if saved else "layer"


def _on_cpu(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    replica = copy.deepcopy(module).to_empty(device="cpu").to(dtype)
    for name, parameter in replica.named_parameters():
        nn.init.constant_(parameter, float("bias" not in name))
    return replica.requires_grad_()


_MULTIPLY = (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor)


class _Watched(TorchDispatchMode):  # type: ignore[misc]
    """Sees whether a softmax over all tokens stays in 16 bits, nothing is joined to what was rotated, every expert
    takes every token (`every_row`: the shape of all tokens before all experts), and logits (`vocabulary` numbers a row)
    are multiplied. A class that asks for a number is told 0."""

    def __init__(self, every_row: tuple[int, ...], vocabulary: int) -> None:
        super().__init__()
        self._every_row, self._vocabulary = every_row, vocabulary
        self.plain_softmax = self.joins_rotated = self.dense_experts = self.scales_logits = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").tolist()
        if func is torch.ops.aten._softmax.default and args[0].shape[-1] == _TOKENS:
            self.plain_softmax |= args[0].dtype == torch.bfloat16
        elif func is torch.ops.aten.cat.default:
            self.joins_rotated |= any(not tensor.numel() for tensor in args[0])
        elif func is torch.ops.aten.bmm.default:
            self.dense_experts |= args[0].shape == self._every_row
        elif func in _MULTIPLY:
            self.scales_logits |= args[0].shape[-1:] == (self._vocabulary,)
        return func(*args, **(kwargs or {}))


def traits_of_model(
    model: Any,
    layers: Sequence[nn.Module],
    norms: list[tuple[nn.Module, int]],
    text: Any,
    front_end: FrontEnd | None,
) -> Traits:
    """The traits of a model on meta tensors, in 16 bits with eager attention; `norms` each with its size."""
    kinds = [norm_kind(*norm) for norm in norms]
    wanted: NormKind = "layer" if {*kinds} == {"layer"} else "rms"
    style: NormStyle = wanted
    for norm, kind in zip(norms, kinds, strict=True):
        if kind == wanted:
            with suppress(TypeError, AttributeError, RuntimeError):
                style = norm_style(*norm)
                break
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    if front_end is not None:
        ids = torch.zeros(1, front_end.mel_bins, front_end.frames, dtype=torch.bfloat16, device="meta")
    experts = getattr(text, "num_local_experts", 0) or getattr(text, "num_experts", 0)
    watched = _Watched((experts, _TOKENS, text.hidden_size), text.vocab_size)
    with _alike_once(layers), suppress(Exception), torch.no_grad(), watched:  # some class needs true values
        model(ids, **decoder)
    return Traits(
        norm=style,
        attention_dropout=_drops(text, ATTENTION_DROPOUTS),
        residual_dropout=_drops(text, RESIDUAL_DROPOUTS),
        plain_softmax=watched.plain_softmax,
        joins_rotated=watched.joins_rotated,
        dense_experts=watched.dense_experts,
        scales_logits=watched.scales_logits and not getattr(text, "final_logit_softcapping", None),
        extra_expert_copies=_extra_copies(model, text.hidden_size),
        position_bias=any(name.endswith("relative_attention_bias") for name, _ in model.named_modules()),
        streams=getattr(text, "altup_num_inputs", 1),
    )


def _drops(config: Any, names: tuple[str, ...]) -> bool:
    values = (getattr(config, name, None) for name in names)
    return next(
        (value > 0 for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)), False
    )


@contextmanager
def _alike_once(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Of layers that are built alike the first is run, the others give what it gave."""
    first: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        for layer in layers:
            given = first.get(repr(layer))
            if given is None:
                given = first[repr(layer)] = []
                stack.enter_context(layer.register_forward_hook(lambda *call, given=given: given.append(call[2])))
            elif "forward" not in vars(layer):
                layer.forward = lambda *_, given=given, **__: given[-1]
                stack.callback(delattr, layer, "forward")
        yield


def _extra_copies(model: Any, hidden: int) -> int:
    """Tensors of an expert's width that its activation keeps beside gate, activated gate and up: gpt-oss clamps, scales
    and shifts."""
    gate = next(
        (method for module in model.modules() if (method := getattr(module, "_apply_gate", None)) is not None), None
    )
    if gate is None:
        return 0
    saved = set[int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.numel() == _TOKENS * hidden:
            saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    both = torch.ones(_TOKENS, 2 * hidden, dtype=torch.bfloat16, device="cpu", requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.device("cpu"):
        gate(both)
    return len(saved - {both.untyped_storage().data_ptr()}) - 1
