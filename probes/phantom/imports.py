"""Doing something to a module as soon as the program has imported it."""

import importlib.abc
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]
Around = Callable[[], AbstractContextManager[Any]]


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: "Watcher") -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        with self._finder.around.get(module.__name__, nullcontext)():
            self._loader.exec_module(module)
        for hook in self._finder.hooks.get(module.__name__, ()):
            hook(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Watcher(importlib.abc.MetaPathFinder):
    """Sees modules being imported; `hooks` may be filled in later, also while a module is still being imported.

    Attributes:
        first: what is done before the first of them is imported.
        hooks: module -> what is done once it is imported.
        around: module -> the context in which it is imported.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.first: Callable[[], Any] | None = None
        self.hooks: dict[str, list[Hook]] = {}
        self.around: dict[str, Around] = {}
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if name not in self._names:
            return None
        if self.first is not None and name != "torch":
            first, self.first = self.first, None
            first()
        for finder in sys.meta_path:
            if finder is not self and not isinstance(finder, Watcher):
                spec = finder.find_spec(name, path, None)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self)
                    return spec
        return None

    def add(self, hooks: dict[str, list[Hook]], around: dict[str, Around]) -> None:
        """From now on each hook runs once its module is imported; at once where it is imported already."""
        assert self._names >= {*hooks, *around}, {*hooks, *around} - self._names
        self.around.update(around)
        for name, each in hooks.items():
            self.hooks.setdefault(name, []).extend(each)
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                for hook in each:
                    hook(module)

    def watch(self) -> None:
        """Begins."""
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Ends."""
        sys.meta_path.remove(self)


WATCHED = (
    "torch",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.nn.attention.flex_attention",
    "deepspeed",
    "flash_attn.flash_attn_interface",
    "flash_attn.cute.interface",
    "flash_attn_interface",
    "xformers.ops.fmha",
    "transformers.integrations.moe",
    "transformers.modeling_utils",
    "transformers.configuration_utils",
    "transformers.generation.utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.processing_auto",
    "bitsandbytes",
    "datasets",
    "tiktoken",
    "trl",
    "triton.runtime.jit",
    "triton.runtime.autotuner",
    "triton.runtime.driver",
)
"""Every module that something is done to."""
