"""Replacing linear layers by bitsandbytes' quantized ones, module by module: the 16-bit model never exists.

On meta the packed weight and its statistics are made by hand, with the sizes that `quantize_4bit` and
`int8_vectorwise_quant` give; on a real device random weights are really quantized.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from planner.models.stored import is_kept
from probes.stack.dtypes import DTYPES

_BLOCK = 64
_NESTED_BLOCK = 256


def quantizable(model: nn.Module) -> list[str]:
    """Names of the modules that transformers hands to bitsandbytes: every linear except the output head and what the
    published checkpoint keeps in 16 bits.

    Source: transformers, integrations/bitsandbytes.py `replace_with_bnb_linear` (nn.Linear itself, none of its
    children, such as FalconLinear and routers, and Conv1D) and
    `get_keys_to_not_convert` (the output embedding and tied modules stay).
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept_modules = tuple(getattr(getattr(model, "config", None), "kept_modules", ()))
    names = [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and module is not head
        and not is_kept(name, kept_modules)
    ]
    last_modules = [name for name, _ in model.named_children()]
    keep = last_modules[-1] if head is None and last_modules else None
    return [name for name in names if keep is None or name.partition(".")[0] != keep or "." in name]


def quantize_modules(
    model: nn.Module,
    quantization: str,
    compute_dtype: str,
    storage_dtype: torch.dtype,
    *,
    packed_dtype: torch.dtype = torch.uint8,
) -> None:
    """Replaces every quantizable module of `model`, which is on meta; the packed weights stay there (`materialize`).

    Args:
        packed_dtype: type in which NF4 codes lie (bitsandbytes' quant_storage): one of the weights' own types where
            FSDP2 or ZeRO-3 shall cut them.
    """
    import bitsandbytes as bnb

    nested = quantization == "nf4-double"
    for name in quantizable(model):
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name) if parent_name else model
        old = getattr(parent, leaf)
        if hasattr(old, "in_features"):
            rows, cols = int(old.out_features), int(old.in_features)
        else:  # Conv1D stores [in, out]; transformers turns it into a Linear
            cols, rows = map(int, old.weight.shape)
        new: Any
        if quantization == "int8":
            with torch.device("meta"):
                new = bnb.nn.Linear8bitLt(cols, rows, old.bias is not None, has_fp16_weights=False, threshold=6.0)
                codes = torch.empty((rows, cols), dtype=torch.int8)
                scales = torch.empty(rows, dtype=torch.float32)
            new.weight = bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
        else:
            with torch.device("meta"):
                new = bnb.nn.Linear4bit(
                    cols,
                    rows,
                    old.bias is not None,
                    DTYPES[compute_dtype],
                    compress_statistics=nested,
                    quant_type="nf4",
                    quant_storage=packed_dtype,
                )
            options = {"dtype": storage_dtype, "module": new, "packed_dtype": packed_dtype}
            new.weight = meta_params4bit(rows, cols, nested=nested, **options)
        if old.bias is not None:
            new.bias = old.bias
        for key in ("is_hf_initialized", "_is_hf_initialized"):
            if hasattr(old, key):
                setattr(new, key, getattr(old, key))
        new.training = old.training
        new.requires_grad_(False)
        setattr(parent, leaf, new)
    setattr(model, "is_loaded_in_8bit" if quantization == "int8" else "is_loaded_in_4bit", True)
    model.is_quantized = True


def expert_stacks(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, parameter's name) of every stack of experts."""
    return [
        (module, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim >= 3 and "expert" in f"{path}.{name}".lower()
    ]


def quantize_experts(model: nn.Module, *, nested: bool) -> None:
    """Puts every stacked expert parameter of `model`, which is on meta, into NF4 as bitsandbytes does, by its own
    parametrization.

    Source: Axolotl 0.21 `monkeypatch/moe_quant.py` (three dimensions and "expert" in the name); bitsandbytes 0.50
    `nn/parametrize.py` replace_parameter_4bit.
    """
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization, _register_parametrization_hooks
    from torch.nn.utils import parametrize

    for module, name in expert_stacks(model):
        old = getattr(module, name)
        packed = meta_params4bit(old.numel() // old.shape[-1], old.shape[-1], nested=nested, dtype=old.dtype)
        state = packed.quant_state
        state.shape = old.shape
        setattr(module, name, nn.Parameter(packed.data, requires_grad=False))
        parametrize.register_parametrization(module, name, Bnb4bitParametrization(state), unsafe=True)
        _register_parametrization_hooks(module, name)


def meta_params4bit(
    rows: int,
    cols: int,
    *,
    nested: bool,
    dtype: torch.dtype,
    module: Any = None,
    packed_dtype: torch.dtype = torch.uint8,
    device: str | torch.device = "meta",
    quant_type: str = "nf4",
) -> Any:
    """A packed 4-bit weight [rows, cols] on `device` (meta, or a phantom GPU) with the statistics that `quantize_4bit`
    would have made.

    Source: bitsandbytes 0.50 `functional.quantize_4bit`: half a byte per element, one fp32 absmax per 64 elements, or
    (nested) one byte per 64 with one fp32 per 256 of those, a 256-entry table and a scalar offset.
    """
    from bitsandbytes.functional import QuantState

    blocks, floats, second = -(-rows * cols // _BLOCK), partial(torch.empty, dtype=torch.float32), None
    with torch.device(device):
        packed = torch.empty(((rows * cols + 1) // 2 // packed_dtype.itemsize, 1), dtype=packed_dtype)
        code = floats(16)
        if nested:
            absmax = floats(-(-blocks // _NESTED_BLOCK))
            second = QuantState(absmax=absmax, code=floats(256), blocksize=_NESTED_BLOCK, dtype=torch.float32)
        state = QuantState(
            absmax=torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32),
            shape=torch.Size((rows, cols)),
            code=code,
            blocksize=_BLOCK,
            quant_type=quant_type,
            dtype=dtype,
            offset=floats(()) if nested else None,
            state2=second,
        )
    return _params4bit(packed, state, module)


def _params4bit(packed: torch.Tensor, state: Any, module: Any) -> Any:
    """bitsandbytes' parameter of a packed weight, whose statistics `module` holds too (None: nobody)."""
    import bitsandbytes as bnb

    if module is not None:
        module.quant_state = state
    return bnb.nn.Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=_BLOCK,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=packed.dtype,
        module=module,
        bnb_quantized=True,
    )


def quantized_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Statistics that a quantized module holds beside its parameters and buffers, as (name, tensor)."""
    weight = getattr(module, "weight", None)
    state = getattr(weight, "quant_state", None)
    if state is None:  # a weight that FSDP2 cut is another object; the module keeps the statistics, as stacks' own does
        state = getattr(module, "quant_state", None)
    tensors: list[tuple[str, torch.Tensor]] = []
    if state is not None:
        tensors = [("absmax", state.absmax), ("code", state.code)]
        if state.nested:
            tensors += [("offset", state.offset), ("nested_absmax", state.state2.absmax), ("map", state.state2.code)]
    for holder in (weight, getattr(module, "state", None)):
        scales = getattr(holder, "SCB", None)
        if isinstance(scales, torch.Tensor):
            tensors.append(("SCB", scales))
    return [(name, tensor) for name, tensor in tensors if isinstance(tensor, torch.Tensor)]


def is_nf4(module: Any) -> bool:
    """Whether a module is bitsandbytes' linear with NF4 weights (which need not be installed)."""
    return type(module).__module__.startswith("bitsandbytes.") and type(module).__name__ == "Linear4bit"


def random_nf4(
    module: Any, state: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, Any]:
    """(packed weight, its statistics) of a random matrix of the shape in `state`, which is all that is 16-bit of it."""
    import bitsandbytes as bnb

    plain = torch.empty(state.shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)
    made: tuple[torch.Tensor, Any] = bnb.functional.quantize_4bit(
        plain, blocksize=_BLOCK, compress_statistics=state.nested, quant_type="nf4", quant_storage=module.quant_storage
    )
    return made


def materialize_quantized(module: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> bool:
    """Gives a quantized module of `quantize_modules` real random weights on `device`; False when it is not one."""
    if not type(module).__module__.startswith("bitsandbytes."):
        return False  # bitsandbytes need not be installed where nothing is quantized
    import bitsandbytes as bnb

    if isinstance(module, bnb.nn.Linear4bit):
        state = module.weight.quant_state
        module.weight = _params4bit(*random_nf4(module, state, device, dtype, generator), module)
        return True
    if isinstance(module, bnb.nn.Linear8bitLt):
        plain = torch.empty(module.weight.shape, dtype=torch.float16, device=device)
        plain.normal_(0.0, 0.02, generator=generator)
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(plain)
        del plain
        module.weight = bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
        return True
    return False
