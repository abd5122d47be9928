"""Doing something to a module as soon as the program has imported it."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]
Around = Callable[[], AbstractContextManager[Any]]


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, hooks: Sequence[Hook], around: Around) -> None:
        self._loader = loader
        self._hooks = hooks
        self._around = around

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        with self._around():
            self._loader.exec_module(module)
        for hook in self._hooks:
            hook(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, hooks: dict[str, list[Hook]], around: dict[str, Around]) -> None:
        self._hooks = hooks
        self._around = around
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self._hooks or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = _found(name, path)
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Loader(spec.loader, self._hooks[name], self._around.get(name, nullcontext))
        return spec


def _found(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder):
            spec = finder.find_spec(name, path, None)
            if spec is not None:
                return spec
    return None


@contextmanager
def after_import(hooks: dict[str, list[Hook]], around: dict[str, Around]) -> Iterator[None]:
    """Within it each hook runs once its module is imported; at once where it is imported already.

    Args:
        around: module -> the context in which it is imported.
    """
    for name, each in hooks.items():
        module = sys.modules.get(name)
        if module is not None:
            for hook in each:
                hook(module)
    finder = _Finder({name: each for name, each in hooks.items() if name not in sys.modules}, around)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
