"""What single libraries need on a phantom GPU, and what of them is refused by name, done as each is imported."""

import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

from probes.dryrun.metaops import grouped_mm, in_place_updates, int8_matmul
from probes.dryrun.workspaces import temporaries
from probes.patching import nothing
from probes.phantom.claims import truly_meta
from probes.phantom.copies import ready
from probes.phantom.cuda import refusing
from probes.phantom.generation import shortened
from probes.phantom.imports import Hook, Patch
from probes.phantom.loading import config_of_catalogue, generation_without_files, load_without_weights
from probes.phantom.mode import Phantom
from probes.phantom.repeats import repeated_once
from probes.phantom.texts import (
    NUM_BATCHES,
    data_sets_stand_in,
    encoding_stands_in,
    metrics_stand_in,
    processor_stands_in,
    tokenizer_stands_in,
    whispers_parts_stand_in,
)

_WHISPERS = {"processing": "processor", "feature_extraction": "feature_extractor", "tokenization": "tokenizer"}
"""Of Whisper's modules, what is made by them."""
_ATTENTION = re.compile(r"flash_attn\w*_func|memory_efficient_attention\w*")


def hooks(phantom: Phantom, stack: ExitStack) -> dict[str, Hook]:
    def patch(owner: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, value))

    def of(*changes: Callable[[Phantom, Any, Patch], None]) -> Hook:
        def hook(module: Any) -> None:
            for change in changes:
                change(phantom, module, patch)

        return hook

    return {
        "evaluate": of(metrics_stand_in),
        "safetensors": of(_open_saved),
        "safetensors.torch": of(_save_nothing),
        "tiktoken": of(encoding_stands_in),
        "transformers.generation.utils": of(generation_without_files, shortened),
        "transformers.models.auto.tokenization_auto": of(tokenizer_stands_in),
        "transformers.models.auto.processing_auto": of(processor_stands_in),
        "datasets": of(data_sets_stand_in),
        **{
            f"transformers.models.whisper.{file}_whisper": of(partial(whispers_parts_stand_in, which))
            for file, which in _WHISPERS.items()
        },
        "transformers.integrations.moe": lambda module: patch(module, "_grouped_mm", grouped_mm),
        "bitsandbytes": of(_kernels_do_nothing),
        "transformers.modeling_utils": of(load_without_weights),
        "transformers.configuration_utils": of(config_of_catalogue),
        "transformers.trainer": of(repeated_once),
        "torch.utils.data": of(_one_process, _batches_full),
        **_refused(stack),
    }


def _refused(stack: ExitStack) -> dict[str, Hook]:
    """Models split as nobody tried here, and attention whose memory nobody here knows."""

    def refuse(names: Callable[[str], Any], why: str) -> Hook:
        def hook(module: Any) -> None:
            for name in [attribute for attribute in vars(module) if names(attribute)]:
                refusal = refusing(f"{module.__name__}.{name}: {why}")
                stack.enter_context(mock.patch.object(module, name, refusal))

        return hook

    def sharded(module: Any) -> None:
        refusal = refusing("FullyShardedDataParallel cannot be followed")
        stack.enter_context(mock.patch.object(module.FullyShardedDataParallel, "__init__", refusal))

    kernel = refuse(_ATTENTION.fullmatch, "the buffers of this package's kernels are not known here; SDPA is followed")
    split = refuse(
        {"parallelize_module", "distribute_tensor"}.__contains__, "this way to split a model was not tried here"
    )
    return {
        "torch.distributed.tensor.parallel": split,
        "transformers.distributed.expert_parallel": split,
        "deepspeed": refuse({"initialize"}.__contains__, "DeepSpeed's engine allocates outside PyTorch's operators"),
        "torch.distributed.fsdp": sharded,
        "torch.nn.attention.flex_attention": refuse(
            {"flex_attention"}.__contains__, "it runs eagerly here and would hold the scores; SDPA is followed"
        ),
        "flash_attn.flash_attn_interface": kernel,
        "flash_attn.cute.interface": kernel,
        "flash_attn_interface": kernel,
        "xformers.ops.fmha": kernel,
    }


def _kernels_do_nothing(phantom: Phantom, module: Any, patch: Patch) -> None:
    """bitsandbytes' Python runs, its launches count."""
    in_place_updates()
    has_operators = hasattr(torch.ops.bitsandbytes, "int8_linear_matmul")
    patch(module, "matmul", int8_matmul if has_operators else _int8_matmul_before_046)
    patch(module.optim.GlobalOptimManager, "_instance", None)  # it knows parameters by their index and number
    patch(module.functional, "lib", _Kernels(phantom))
    for name, stand_in in _paged(phantom).items():
        if hasattr(module.functional, name):  # from 0.39 on
            patch(module.functional, name, stand_in)
    phantom.temporaries = {**phantom.temporaries, **temporaries()}


def _int8_matmul_before_046(a: torch.Tensor, b: Any, *, bias: Any = None, state: Any = None, **_: Any) -> Any:
    """The same of bitsandbytes that turns the codes into a layout of the card's at the first call.

    Source: bitsandbytes 0.38 autograd/_functions.py `MatMul8bitLt.forward`.
    """
    if state.CxB is None:
        state.CxB, state.SB = torch.empty_like(state.CB), (state.CB.shape, state.formatB)
    row_major = types.SimpleNamespace(CB=state.CxB if state.CB is None else state.CB, SCB=state.SCB)
    return int8_matmul(a, b, state=row_major, bias=bias)


class _Kernels:
    """bitsandbytes' CUDA library, which others call by its names: a launch does nothing."""

    compiled_with_cuda = True

    def __init__(self, phantom: Phantom) -> None:
        self._phantom = phantom

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def launch(*args: Any) -> None:
            self._phantom.kernels[name] += 1

        setattr(self, name, launch)
        return launch


def _paged(phantom: Phantom) -> dict[str, Any]:
    """bitsandbytes' functions for paged optimizer states: unified memory, which PyTorch's allocator does not count."""

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        phantom.note(
            "paged optimizer states lie in unified memory: PyTorch does not count them, and the card holds them as far "
            "as it has room"
        )
        made: Any = phantom.unfilled(shape, dtype)
        made.is_paged = True
        return cast(torch.Tensor, made)

    return {"get_paged": get_paged, "fill": nothing, "prefetch_tensor": nothing}


AROUND = {"bitsandbytes": lambda: mock.patch.object(torch.cuda, "is_available", return_value=False)}
"""Module -> the context in which it is imported: bitsandbytes looks for its CUDA library then, which cannot be loaded
without a driver."""


def _save_nothing(phantom: Phantom, safetensors: Any, patch: Patch) -> None:
    """Weights are not written: there are none, and the library would read them at their addresses. What is saved are
    PyTorch's names, shapes and types, which `load_file` and `safe_open` give back."""
    true_file, true_bytes, true_load = safetensors.save_file, safetensors.save, safetensors.load_file

    def without_values(tensors: Any) -> bool:
        return any(isinstance(tensor, torch.Tensor) and truly_meta(tensor) for tensor in tensors.values())

    def save_file(tensors: Any, filename: Any, metadata: Any = None, *args: Any, **kwargs: Any) -> None:
        if not without_values(tensors):
            true_file(tensors, ready(filename), metadata, *args, **kwargs)
            return
        phantom.note("what the program saved has no weights in it: the files hold names, shapes and types alone")
        torch.save(dict(tensors), filename)

    def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        return _saved(filename, device) if _is_ours(filename) else true_load(filename, device, **kwargs)

    def save(tensors: Any, metadata: Any = None, *args: Any, **kwargs: Any) -> Any:
        return b"" if without_values(tensors) else true_bytes(tensors, metadata, *args, **kwargs)

    patch(safetensors, "save_file", save_file)
    patch(safetensors, "save", save)
    patch(safetensors, "load_file", load_file)


def _is_ours(filename: Any) -> bool:
    path = Path(filename)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _saved(filename: Any, device: Any) -> dict[str, torch.Tensor]:
    with Path(filename).open("rb") as file:  # by its name torch.load would ask safetensors again
        return cast(dict[str, torch.Tensor], torch.load(file, map_location=torch.device(device), weights_only=True))


class _Opened(nullcontext["_Opened"]):
    """What `safe_open` gives of a file that a traced program saved."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(self)
        self.get_tensors = lambda: tensors
        self.keys = self.offset_keys = lambda: list(tensors)
        self.get_tensor = self.get_slice = tensors.__getitem__
        self.metadata = lambda: {"format": "pt"}


def _open_saved(phantom: Phantom, safetensors: Any, patch: Patch) -> None:
    true = safetensors.safe_open

    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
        if _is_ours(filename):
            return _Opened(_saved(filename, device))
        return true(filename, framework=framework, device=device, **kwargs)

    patch(safetensors, "safe_open", safe_open)


def _one_process(phantom: Phantom, module: Any, patch: Patch) -> None:
    """Data loaders read in the program's own process: workers would not see the phantom GPU."""
    loader = module.DataLoader
    true = loader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("num_workers"):
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
                kwargs.pop(name, None)
            kwargs["num_workers"] = 0
            phantom.note("data loader workers were replaced by the program's own process")
        kwargs["pin_memory"] = False
        true(self, *args, **kwargs)

    patch(loader, "__init__", init)


def _batches_full(phantom: Phantom, module: Any, patch: Patch) -> None:
    """Stand-in rows are fewer than many programs put into a batch, and alike, so that samplers leave them out."""
    batches_of = module.DataLoader._index_sampler.fget

    def full(self: Any) -> Any:
        size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        if not phantom.stand_in_rows or self._dataset_kind != module.dataloader._DatasetKind.Map or not size:
            return batches_of(self)
        return _Full(batches_of(self), size, len(self.dataset))

    patch(module.DataLoader, "_index_sampler", property(full))


@dataclass(frozen=True)
class _Full:
    """A sampler's batches, rows repeated up to the size that the program gives, and enough of them to accumulate."""

    batches: Any
    size: int
    num_rows: int

    def __len__(self) -> int:
        return max(len(self.batches), NUM_BATCHES)

    def __iter__(self) -> Iterator[list[Any]]:
        first, count = [*range(self.num_rows)], 0
        for count, batch in enumerate(self.batches, 1):
            first = first if count > 1 else [*batch]
            yield [*islice(cycle(batch), self.size)]
        for _ in range(count, NUM_BATCHES):
            yield [*islice(cycle(first), self.size)]
