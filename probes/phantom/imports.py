"""Doing something to a module as soon as the program has imported it."""

import importlib.abc
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from planner.core.children import ROOT

Hook = Callable[[ModuleType], None]
Patch = Callable[[Any, str, Any], None]
"""Owner, name, and what stands in its place until the end."""
Context = Callable[[], AbstractContextManager[Any]]


def sitecustomize(package: str, module: str) -> str:
    """The text of a `sitecustomize` that begins `probes.PACKAGE.MODULE` in every Python that finds it."""
    return f"import sys\nsys.path.append({str(ROOT)!r})\nfrom probes.{package} import {module}\n{module}.begin()\n"


def is_another_rank() -> bool:
    return int(os.environ.get("RANK") or 0) > 0 and int(os.environ.get("WORLD_SIZE") or 1) > 1


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
        absent: what is told of each (optional package, library) where a library looked for a package in vain.
        first: what is done before the first part of `LIBRARIES` is imported.
        hooks: module -> what is done once it is imported.
        around: module -> the context in which it is imported.
    """

    def __init__(self) -> None:
        self.absent: Callable[[str, str], None] = lambda package, library: None
        self.first: Callable[[], Any] | None = None
        self.hooks: dict[str, list[Hook]] = {}
        self.around: dict[str, Context] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in OPTIONAL:
            library = _who_asks()
            if library and not any(
                finder.find_spec(name, path) for finder in sys.meta_path if not isinstance(finder, Watcher)
            ):
                self.absent(name, library)
            return None
        if self.first is not None and name.partition(".")[0] in LIBRARIES:
            first, self.first = self.first, None
            first()
        if name not in self.hooks and name not in self.around:
            return None
        for finder in sys.meta_path:
            if finder is not self and not isinstance(finder, Watcher):
                spec = finder.find_spec(name, path, None)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self)
                    return spec
        return None

    def add(self, hooks: dict[str, list[Hook]], around: dict[str, Context]) -> None:
        """From now on each hook runs once its module is imported; at once where it is imported already."""
        self.around.update(around)
        for name, each in hooks.items():
            self.hooks.setdefault(name, []).extend(each)
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                for hook in each:
                    hook(module)

    def watch(self) -> None:
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        sys.meta_path.remove(self)


LIBRARIES = frozenset(
    (
        "bitsandbytes", "datasets", "deepspeed", "evaluate", "flash_attn", "flash_attn_interface", "safetensors",
        "tiktoken", "transformers", "trl", "triton", "xformers",
    )
)  # fmt: skip
"""Those to parts of which something is done."""
OPTIONAL = frozenset({"triton", "fla", "causal_conv1d", "mamba_ssm"})
"""Packages for GPUs with which libraries take another path, that needs another amount of memory."""
_INDIFFERENT = frozenset({"torch", "bitsandbytes"})
"""These look for Triton and need the same without it: the compiler's kernels and those for other makers' GPUs."""
_CHECKERS = ("import_utils.py", "imports.py")


def _who_asks() -> str:
    """The library, or the program's file, that looks for a package; "" where it makes no difference to it."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen") and f"{os.sep}importlib{os.sep}" not in file and not file.endswith(_CHECKERS):
            match = re.search(r"(?:site|dist)-packages[/\\](\w+)", file)
            library = match[1] if match else os.path.basename(file)
            return "" if library in _INDIFFERENT else library
        frame = frame.f_back
    return ""
