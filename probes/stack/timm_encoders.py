"""Encoders that transformers builds of timm's models (Gemma 3n's MobileNet-V5), also where torchvision is not
installed.

timm binds names of torchvision while it is imported; its encoders call none of them. transformers takes timm for absent
without torchvision.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

WRAPPER = "transformers.models.timm_wrapper.modeling_timm_wrapper"


class _Finder(MetaPathFinder, Loader):
    """Finds every module of torchvision, with whatever name is asked of it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return mock.MagicMock()

    def exec_module(self, module: ModuleType) -> None:
        pass


def _timm() -> ModuleType:
    """timm, imported beside an empty torchvision that is gone afterwards."""
    if find_spec("timm") is None:
        raise ImportError("its encoder is built by timm, which is not installed (pip install timm)")
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [module_name for module_name in sys.modules if module_name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def timm_encoders(config: Any) -> Any:
    """Within it transformers builds an encoder of timm's, which is named by its architecture there.

    Raises:
        ImportError: timm is not installed.
    """
    from transformers.utils import is_timm_available

    of_timm = hasattr(getattr(config, "vision_config", None), "architecture")
    return nullcontext() if not of_timm or is_timm_available() else _without_torchvision()


@contextmanager
def _without_torchvision() -> Iterator[None]:
    timm, wrapper = _timm(), importlib.import_module(WRAPPER)
    with mock.patch.multiple(wrapper, create=True, timm=timm, requires_backends=lambda *_: None):
        yield
