"""Which attention kernel the target GPU would run, and what it allocates.

transformers' own attention functions run unchanged; only `torch.nn.functional.scaled_dot_product_attention` (whose
choice depends on the device) and the flash-attention package (absent here) are stood in for.
"""

import importlib.util
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from planner.memory.attention_kernels import STAND_INS, XE2_HEAD_DIM
from probes.patching import Replacement, replaced
from probes.stack.autocast import State, cached_cast, without_casts

FLASH_NAME = "planner_fa2"
"""Our name for flash-attention 2 in transformers' registry; one with "flash" in it would ask for the package."""


@dataclass(kw_only=True)
class KernelLog:
    """What was chosen, how often, and the largest matrix that a math fallback kept."""

    capability: tuple[int, int]
    ring: Any = None
    """The process group over which every sequence is cut, None where none is."""
    xformers: bool = False
    """Whether attention without a mask runs by xformers on cards before Ampere (`brings_xformers`)."""
    chosen: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    math_matrix_bytes: int = 0

    def note(self, kernel: str, reason: str = "") -> None:
        self.chosen[kernel] += 1
        if reason:
            self.reasons.setdefault(kernel, reason)


class Attention(NamedTuple):
    """A call of `scaled_dot_product_attention`: its arguments by their names there.

    Shapes: query [seqs, heads, tokens, head size], key and value with their own heads.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def under_autocast(self) -> "Attention":
        """In the types that autocast casts its arguments to, where it is on."""
        if not State.enabled:
            return self
        query, key, value = (cached_cast(tensor, State.dtype) for tensor in self[:3])
        mask = self.attn_mask
        if mask is not None and mask.is_floating_point():
            mask = cached_cast(mask, State.dtype)
        return self._replace(query=query, key=key, value=value, attn_mask=mask)


def choose_sdpa_kernel(call: Attention, capability: tuple[int, int]) -> tuple[str, str]:
    """("flash", "efficient" or "math", why the faster ones were refused). Without `enable_gqa` no fused kernel takes
    fewer heads of keys than of queries (timm's multi-query attention).

    Source: PyTorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: `can_use_flash_attention`,
    `can_use_mem_efficient_attention`, order flash, efficient, math. cuDNN's kernel, which newer builds prefer on Hopper
    and data-centre Blackwell, keeps the same tensors as flash.
    """
    if capability == STAND_INS["unfused"]:
        return "math", "no fused kernel is built for this card"
    flash = _flash_refusal(call, capability)
    if not call.enable_gqa and call.query.shape[1] != call.key.shape[1]:
        flash = f"{call.query.shape[1]} heads of queries, {call.key.shape[1]} of keys"
    if not flash:
        return "flash", ""
    efficient = _efficient_refusal(call.query, call.key, call.value, capability)
    if not efficient:
        return "efficient", f"no flash kernel: {flash}"
    return "math", f"no flash kernel: {flash}; no memory-efficient kernel: {efficient}"


def _flash_refusal(call: Attention, capability: tuple[int, int]) -> str:
    head = call.query.shape[-1]
    xe2 = capability == STAND_INS["xe2"]
    if capability < (8, 0) and not xe2:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"data type {str(call.query.dtype).removeprefix('torch.')}"
    if call.attn_mask is not None:
        return "an attention mask is given"
    if not head == call.key.shape[-1] == call.value.shape[-1]:
        return f"head sizes differ ({head}, {call.key.shape[-1]}, {call.value.shape[-1]})"
    if head > (limit := XE2_HEAD_DIM if xe2 else 256):
        return f"head size {head} is above {limit}"
    ada = capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    if ada and (192 < head <= 224 or (head > 224 and call.dropout_p > 0)):
        return f"no backward for head size {head} on compute capability {capability[0]}.{capability[1]}"
    return ""


def _efficient_refusal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]) -> str:
    if capability == STAND_INS["xe2"]:
        return "none is built for this card"
    if query.dtype is torch.bfloat16 and capability < (8, 0):
        return "bf16 needs compute capability 8.0"
    if query.shape[1] != key.shape[1]:
        return "grouped-query heads are not expanded"
    size = 4 if query.dtype is torch.float32 else 8
    if capability < (8, 0) and query.dtype is torch.float32:
        size = 1
    elif capability < (7, 5) and query.dtype is torch.float16:
        size = 4
    if query.shape[-1] % size or value.shape[-1] % size:
        return f"head size {query.shape[-1]} is no multiple of {size}"
    return ""


def sdpa_of(log: KernelLog) -> Any:
    """`scaled_dot_product_attention` as the GPU of `log.capability` runs it."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = Attention(*args, **kwargs).under_autocast()
        with without_casts():
            return _attended(call, log)

    return scaled_dot_product_attention


def _attended(call: Attention, log: KernelLog) -> torch.Tensor:
    half = call.query.dtype in (torch.float16, torch.bfloat16)
    older = (1, 0) <= log.capability < (8, 0)  # NVIDIA's
    if log.xformers and older and call.attn_mask is None and half:
        heads = call.query.shape[1]
        call = call._replace(key=_to_all_heads(call.key, heads), value=_to_all_heads(call.value, heads))
    query, key, value, mask, dropout, causal, scale, grouped = call
    kernel, reason = choose_sdpa_kernel(call, log.capability)
    log.note(kernel, reason)
    if log.ring is not None:  # causal whatever mask was given, as Accelerate's hook makes it
        from probes.dryrun.fakeworld import RingAttention  # late: its imports are for cut sequences alone

        if kernel == "math":
            raise ValueError("PyTorch's context parallelism has no math kernel")
        return RingAttention.apply(query, key, value, kernel, scale, log.ring)
    if mask is not None and mask.dtype is torch.bool:  # at every call: attention.cpp `convert_boolean_attn_mask`
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    if kernel == "flash":
        return _flash_padded(query, key, value, dropout, causal, scale)
    if kernel == "efficient":
        if mask is not None:  # aligned to 16 columns, expanded to batch and heads (attention.cpp `preprocess_mask`)
            columns = mask.shape[-1]
            if columns % 16:
                mask = torch.nn.functional.pad(mask, (0, 16 - columns % 16))[..., :columns]
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, torch.is_grad_enabled(), dropout, causal, scale=scale
        )[0]
    rows, columns = query.shape[-2], key.shape[-2]
    log.math_matrix_bytes = max(log.math_matrix_bytes, query.shape[0] * query.shape[1] * rows * columns * 4)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=grouped
    )[0]


def _to_all_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values as Unsloth hands them to xformers, whose kernel SDPA's memory-efficient one is: a copy for every
    head of queries.

    Source: unsloth 2026.10.9 utils/attention_dispatch.py run_attention (`K_mod.reshape` where a gradient is wanted).
    """
    return rows if rows.shape[1] == heads else rows.repeat_interleave(heads // rows.shape[1], dim=1)


def _flash_padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    """PyTorch's flash kernel, head size padded to a multiple of 8 as attention.cpp `pad_last_dim` does."""
    head = query.shape[-1]
    scale = 1.0 / math.sqrt(head) if scale is None else scale
    if head % 8:
        pad = (0, 8 - head % 8)
        query, key, value = (torch.nn.functional.pad(tensor, pad) for tensor in (query, key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return out[..., :head] if head % 8 else out


def _flash_unpadded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The output [seqs, tokens, heads, head size] of the package's kernel. With a mask of padding the real tokens are
    taken into rows of their own, and padded again: here all of them, the most that a micro-batch can hold.

    Source: transformers 5.23 `modeling_flash_attention_utils.py` `_upad_input`, `_pad_input`.
    """
    if attention_mask is None:
        return _flash_padded(query, key, value, dropout, causal, scale).transpose(1, 2)
    rows, real = query.shape[0], torch.arange(query.shape[0] * query.shape[2], device=query.device)
    query, key, value = (
        tensor.transpose(1, 2).flatten(0, 1)[real].unflatten(0, (rows, -1)).transpose(1, 2)
        for tensor in (query, key, value)
    )
    out = _flash_padded(query, key, value, dropout, causal, scale).transpose(1, 2).flatten(0, 1)
    padded = torch.zeros_like(out)
    padded[real] = out
    return padded.unflatten(0, (rows, -1))


def flash_attention_2(log: KernelLog) -> Any:
    """transformers' `flash_attention_forward` around the package's kernel.

    fp32 queries are cast to the weights' or autocast's type, values padded to the head size of the queries; packed
    batches use the variable-length form, which keeps the same tensors.

    Source: transformers 5.23 integrations/flash_attention.py, modeling_flash_attention_utils.py; flash-attn 2.8
    flash_attn_interface.py `FlashAttnFunc` (head size padded to a multiple of 8).
    """

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        head, value_head = query.shape[-1], value.shape[-1]
        if value_head != head:
            value = torch.nn.functional.pad(value, [0, head - value_head])
        if query.dtype is torch.float32:
            config: Any = module.config
            if State.enabled:
                dtype = State.dtype
            elif hasattr(config, "_is_quantized") and config.dtype is not None:
                dtype = config.dtype
            else:
                dtype = next(part for part in module.modules() if isinstance(part, torch.nn.Linear)).weight.dtype
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        log.note("flash-attention-2")
        out = _flash_unpadded(query, key, value, attention_mask, dropout, bool(causal), scaling)
        return (out[..., :value_head] if value_head != head else out), None

    return forward


def _legacy_flash(log: KernelLog) -> Any:
    """`_flash_attention_forward` as the oldest model classes call it: [seqs, tokens, heads, head size] in and out."""

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        query_length: int,
        is_causal: bool = True,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> torch.Tensor:
        log.note("flash-attention-2")
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return _flash_unpadded(query, key, value, attention_mask, dropout, is_causal, kwargs.get("softmax_scale"))

    return forward


def kernels_of(log: KernelLog, config: Any) -> AbstractContextManager[None]:
    """Within it, attention on meta (or CPU) tensors runs what the GPU of `log.capability` would run, for the model
    class of `config`."""
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(FLASH_NAME, flash_attention_2(log))
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(
        FLASH_NAME, lambda *args, attention_mask=None, **kwargs: attention_mask
    )
    replacements: list[Replacement] = [
        (torch.nn.functional, "scaled_dot_product_attention", sdpa_of(log)),
        (masking_utils, "set", _InOrder),
    ]
    parts = (config, config.get_text_config())  # the text's model class may be another
    names = dict.fromkeys(type(part).__module__.replace(".configuration_", ".modeling_") for part in parts)
    for modeling in (importlib.import_module(name) for name in names if importlib.util.find_spec(name)):
        replacements.append((modeling, "set", _InOrder))
        for attribute, classes in vars(modeling).items():
            if attribute.endswith("_ATTENTION_CLASSES") and "flash_attention_2" in classes:
                replacements.append((modeling, attribute, {**classes, FLASH_NAME: classes["flash_attention_2"]}))
                replacements.append((modeling, "_flash_attention_forward", _legacy_flash(log)))
    return replaced(replacements, create=True)


class _InOrder(set[Any]):
    """A set that is walked through in the same order in every process: transformers makes masks and rotary tables for
    each kind of layer (`for layer_type in set(config.layer_types)`), and which comes first decides where they lie."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))
