"""What single libraries need on a phantom GPU, done as each is imported."""

import importlib.util
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from probes.phantom.cuda import Refused
from probes.phantom.imports import Hook
from probes.phantom.loading import config_of_catalogue, generation_without_files, load_without_weights
from probes.phantom.mode import Phantom
from probes.phantom.texts import data_sets_stand_in, encoding_stands_in, processor_stands_in, tokenizer_stands_in


def hooks(phantom: Phantom, stack: ExitStack) -> dict[str, Hook]:
    """Module -> what is done to it."""

    def patch(owner: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, value))

    def moe(module: Any) -> None:
        from probes.dryrun.metaops import grouped_mm

        patch(module, "_grouped_mm", grouped_mm)

    def bitsandbytes(module: Any) -> None:
        from probes.dryrun.fastmeta import register_in_place
        from probes.dryrun.metaops import int8_matmul
        from probes.dryrun.workspaces import temporaries

        register_in_place(
            torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default,
            torch.ops.bitsandbytes.optimizer_update_32bit.default,
        )
        patch(module, "matmul", int8_matmul)
        phantom.temporaries = temporaries()

    def modeling(module: Any) -> None:
        load_without_weights(phantom, module, patch)

    def configuration(module: Any) -> None:
        config_of_catalogue(phantom, module, patch)

    def data(module: ModuleType) -> None:
        _one_process(phantom, patch)

    def generation(module: Any) -> None:
        generation_without_files(module, patch)

    def tokenization(module: Any) -> None:
        tokenizer_stands_in(phantom, module, patch)

    def processing(module: Any) -> None:
        processor_stands_in(phantom, module, patch)

    def data_sets(module: Any) -> None:
        data_sets_stand_in(phantom, module, patch, phantom.num_tokens)

    before_the_program = "trl" in sys.modules  # imported by who traces within his own process, not by the program

    def trl(module: Any) -> None:
        if importlib.util.find_spec("triton") is None and not before_the_program:
            raise Refused(
                "TRL computes its loss with Triton on a GPU and holds more without it; triton comes with PyTorch for "
                "CUDA and is not installed here (pip install triton)"
            )

    def encoding(module: Any) -> None:
        encoding_stands_in(phantom, module, patch)

    found: dict[str, Hook] = {
        "tiktoken": encoding,
        "trl": trl,
        "transformers.generation.utils": generation,
        "transformers.models.auto.tokenization_auto": tokenization,
        "transformers.models.auto.processing_auto": processing,
        "datasets": data_sets,
        "transformers.integrations.moe": moe,
        "bitsandbytes": bitsandbytes,
        "transformers.modeling_utils": modeling,
        "transformers.configuration_utils": configuration,
        "torch.utils.data": data,
    }
    return found


def _without_cuda() -> Any:
    """bitsandbytes looks for its CUDA library, which cannot be loaded without a driver, while it is imported."""
    return mock.patch.object(torch.cuda, "is_available", return_value=False)


AROUND = {"bitsandbytes": _without_cuda}
"""Module -> the context in which it is imported."""


def _one_process(phantom: Phantom, patch: Any) -> None:
    """Data loaders read in the program's own process: workers would not see the phantom GPU."""
    loader = torch.utils.data.DataLoader
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
