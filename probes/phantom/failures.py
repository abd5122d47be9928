"""Whose failure it is: the program's own, or one that it has only on the phantom GPU."""

import errno
import traceback
from pathlib import Path
from types import TracebackType

from probes.phantom.cuda import Refused

_ROOMS = tuple(str(Path(__file__).parent.parent / name) for name in ("phantom", "dryrun", "stack"))
_OFFLINE = ("connect to 'https://huggingface.co'", "outgoing traffic has been disabled")
_WORDS = (
    "meta tensor",
    "no fake impl",
    "on device meta",
    "'meta' backend",
    "device type meta",
    "meta and cpu",
    "set_data",
    "cpu-only version",
    "data-dependent",
    "data dependent",
    "datadependentoutput",
    "torch not compiled with cuda enabled",
    "no nvidia driver",
    "error building extension",
    "flash-attn build",
    *_OFFLINE,
)
_PACKAGES = {
    "flash_attn": "flash-attention",
    "FlashAttention": "flash-attention",
    "xformers": "xformers",
    "deepspeed": "DeepSpeed",
    "DeepSpeed": "DeepSpeed",
    "vllm": "vLLM",
    "kernels": "Hugging Face's kernels",
    "triton": "Triton (it comes with PyTorch for CUDA)",
}


_OF_ROWS = (KeyError, IndexError, ValueError)
"""What a program raises over rows of another form or length than its own."""
NO_PADDING = "Asking to pad but the tokenizer does not have a padding token"
of_copies = {errno.EROFS, errno.EXDEV, errno.EOVERFLOW, errno.ENOSPC}
"""What private copies cannot do that files can: see "What it cannot harm" in docs/trace.md."""


def status_of(error: BaseException, trace: TracebackType | None, stand_in_rows: str = "") -> str:
    """refused, untraceable or failed: what a program that ended with `error` says of itself."""
    if isinstance(error, Refused):
        return "refused"
    if isinstance(error, ImportError) and missing_package(error):
        return "untraceable"
    if stand_in_rows and isinstance(error, _OF_ROWS):
        return "untraceable"
    if isinstance(error, OSError) and error.errno in of_copies:
        return "untraceable"
    cause: BaseException | None = error
    while cause is not None:
        if _ours(cause, trace if cause is error else cause.__traceback__):
            return "untraceable"
        cause = cause.__cause__
    return "failed"


def missing_package(error: BaseException) -> str:
    """The package for GPUs that is not installed here and may be on the program's own machine; "" where none."""
    text = f"{getattr(error, 'name', '') or ''} {error}"
    return next((name for word, name in _PACKAGES.items() if word in text), "")


def error_text(error: BaseException, stand_in_rows: str = "") -> str:
    """What is said of `error`, with the way to get what it misses: a package for GPUs, or the rows of a data set."""
    text = f"{type(error).__name__}: {error}"
    if NO_PADDING in text:
        text += (
            " [a stand-in for a tokenizer that is not on this machine pads where transformers' class of it does: set a "
            "token as the message says, or run it where the tokenizer's files are]"
        )
    elif stand_in_rows and isinstance(error, _OF_ROWS):
        text += (
            f" [its rows were stand-ins, as {stand_in_rows} is not on this machine: run it where the data set is, or "
            "with --network, or with another --seq-len]"
        )
    if any(phrase in text.lower() for phrase in _OFFLINE):
        text += " [a file of the hub is not on this machine, and the network is off: --network allows it]"
    if isinstance(error, OSError) and error.errno in of_copies:
        text += " [it works on copies of your files, which cannot do all that files can: docs/trace.md]"
    missing = missing_package(error) if isinstance(error, ImportError) else ""
    hint = "; pip install triton" if "Triton" in missing else ""
    return f"{text} [{missing} is not installed in this environment{hint}]" if missing else text


def _ours(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether a stand-in of ours, or a tensor without values, is the reason.

    An operator's own complaint (shapes that do not match) ends in PyTorch's files and is the program's.
    """
    text = f"{type(error).__name__}: {error}".lower()
    if any(word in text for word in _WORDS):
        return True
    if isinstance(error, AttributeError) and type(error.obj).__module__.startswith("probes."):
        return True
    frames = traceback.extract_tb(trace)
    return bool(frames) and frames[-1].filename.startswith(_ROOMS)
