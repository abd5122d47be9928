"""A quick start of the libraries, and a run without garbage collection.

Of a cold dry run most is imports. Two of them are not needed until somebody calls what they are for: PyTorch's
compiler, which bitsandbytes' decorators load (0.9 s), and scipy's optimizers, which transformers' detection losses load
(0.2 s). Both are put off to that first call. Python's garbage collector, which walks the libraries' million objects
again and again while they are loaded and while events are recorded, takes a third of the time; it pauses.
"""

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def collection_paused() -> Iterator[None]:
    """Within it nothing is collected; at its end what was made within it is looked through once.

    Tensors are released by reference counts, so pausing changes no figure; cycles only die later. Where PyTorch was
    loaded within it, looking through the libraries' million objects takes 0.2 s: as they stay, it is spared for good.
    """
    enabled, loaded = gc.isenabled(), "torch" in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            if loaded:
                gc.collect(0)
            else:
                gc.freeze()


def load_libraries() -> None:
    """Imports bitsandbytes and transformers' losses, without PyTorch's compiler and scipy where they are not loaded."""
    if "bitsandbytes" not in sys.modules:
        from unittest import mock  # late: it loads asyncio and ssl, which no stored answer needs

        import torch

        with mock.patch.object(torch, "compile", _compile_later(torch.compile)):
            importlib.import_module("bitsandbytes")
    if "transformers.models" not in sys.modules:
        _import_models()
    if "transformers.loss.loss_utils" not in sys.modules and importlib.util.find_spec("scipy") is not None:
        with _scipy_later():
            importlib.import_module("transformers.loss.loss_utils")


def _import_models() -> None:
    """Imports `transformers.models`, which asks for the names in all of its three thousand files just after the package
    itself has asked (0.25 s each time): the first answer is given again."""
    from unittest import mock

    import transformers
    from transformers.utils import import_utils

    ask = import_utils.define_import_structure
    folder = Path(transformers.__file__).parent / "models"

    def answer(module_path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path) != folder / "__init__.py":
            return ask(module_path, prefix)
        structure = ask(folder, prefix="models")  # kept by transformers, which has put other modules' names beside them
        return {
            needs: {
                name.removeprefix("models."): exports for name, exports in part.items() if name.startswith("models.")
            }
            for needs, part in structure.items()
        }

    with mock.patch.object(import_utils, "define_import_structure", answer):
        importlib.import_module("transformers.models")


def _compile_later(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return lambda decorated: decorate(decorated, **options)
        compiled: list[Callable[..., Any]] = []

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(compile_now(function, **options))
            return compiled[0](*args, **kwargs)

        return call

    return decorate


@contextmanager
def _scipy_later() -> Iterator[None]:
    """Within it, `from scipy.optimize import NAME` binds a function that imports scipy's when it is called."""
    name = "scipy.optimize"
    if name in sys.modules:
        yield
        return
    importlib.import_module("scipy")
    stand_in = ModuleType(name)

    def put_off(attribute: str) -> Callable[..., Any]:
        if attribute.startswith("__"):  # what the import system asks of a module
            raise AttributeError(attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(name), attribute)(*args, **kwargs)

        call.__name__ = attribute
        return call

    stand_in.__getattr__ = put_off  # type: ignore[method-assign]
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
