"""The figures of an out-of-memory message, and the frames of its traceback, in every form that logs hold them.

PyTorch's message has had two forms (c10/cuda/CUDACachingAllocator.cpp before and since 2.1); frames are Python's own
or rich's boxes.
"""

import re
from collections.abc import Sequence

from planner.records import dataclass
from planner.units import GIB, KIB, MIB

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": KIB, "MB": MIB, "GB": GIB}
_SIZE = r"(\d{1,18}(?:\.\d{1,9})?) (bytes|[KMG]i?B)"
_RANK = re.compile(
    r"^\s{0,40}(?:\[(?:rank)?\d{1,6}\]:?|\(\w{1,60} (?:pid|rank)=[^)\n]{1,80}\)|\[[^\]\n]{1,60}\]:)[ \t]?"
)
"""What torchrun, Ray and job logs put before a line."""
_FRAME = re.compile(r"File \"([^\"\n]{1,400})\", line (\d{1,9}), in ([^\s(]{1,200})")
_BOXED = re.compile(r"│ (\S[^\n│]{0,300}?):(\d{1,9}) in ([\w<>]{1,200})")
_OTHER = re.compile(rf"Process \d{{1,10}} has {_SIZE} memory in use")
_FIGURES = {
    "tried_bytes": re.compile(rf"Tried to allocate {_SIZE}"),
    "total_bytes": re.compile(rf"(?:total capacity of |GPU \d{{1,4}}; ){_SIZE}"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free|allocated; {_SIZE} free"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated_bytes": re.compile(
        rf"allocated memory {_SIZE} is allocated by PyTorch|capacity; {_SIZE} already allocated"
    ),
    "unallocated_bytes": re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    "reserved_bytes": re.compile(rf"free; {_SIZE} reserved in total by PyTorch"),
    "graphs_bytes": re.compile(rf"with {_SIZE} allocated in private pools"),
}
_DEVICE_ERRORS = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|CUDA error: out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|MPS backend out of memory|OutOfMemoryError|Failed to CUDA calloc|cudaErrorMemoryAllocation"
)
_HOST_ERRORS = re.compile(
    r"can't allocate memory|Cannot allocate memory|\bMemoryError|oom-kill|exitcode {0,4}: -9|SIGKILL|OOMKilled"
    r"|Out of memory: Killed process"
)
MAX_FRAMES = 400


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A call of the traceback."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Message:
    """What the text says. Sizes in bytes, None where it does not say them.

    Attributes:
        where: "device", "host", or "" where the text tells of neither running out.
        frames: the last traceback's, the innermost last.
        tried_bytes: the allocation that failed.
        other_bytes: what other processes hold on the card, where the message counts them.
        unallocated_bytes: what PyTorch holds in cached blocks of the wrong size.
    """

    where: str
    frames: tuple[Frame, ...] = ()
    tried_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    graphs_bytes: int | None = None
    other_bytes: int | None = None


def read_message(text: str) -> Message:
    """The last out-of-memory error of a text, with the traceback before it."""
    lines = [_RANK.sub("", line) for line in text.splitlines()]
    at = _last(lines, _DEVICE_ERRORS)
    where = "device" if at is not None else ""
    if at is None:
        at = _last(lines, _HOST_ERRORS)
        where = "host" if at is not None else ""
    if at is None:
        return Message(where="", frames=frames_of(lines))
    said = " ".join(lines[at : at + 6])
    figures = {name: size for name, pattern in _FIGURES.items() if (size := _size(pattern, said)) is not None}
    reserved = figures.pop("reserved_bytes", None)
    if reserved is not None and "allocated_bytes" in figures:
        figures.setdefault("unallocated_bytes", max(0, reserved - figures["allocated_bytes"]))
    others = [_bytes(*found) for found in _OTHER.findall(said)]
    if others:
        figures["other_bytes"] = sum(others)
    elif {"total_bytes", "free_bytes", "process_bytes"} <= figures.keys():
        figures["other_bytes"] = max(0, figures["total_bytes"] - figures["free_bytes"] - figures["process_bytes"])
    return Message(where=where, frames=frames_of(lines[: at + 1]) or frames_of(lines), **figures)


def frames_of(lines: Sequence[str]) -> tuple[Frame, ...]:
    """The frames of the last traceback of these lines."""
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    text = "\n".join(lines[starts[-1] :] if starts else lines)
    found = _FRAME.findall(text) or _BOXED.findall(text)
    return tuple(Frame(file=file.strip(), line=int(line), function=name) for file, line, name in found[-MAX_FRAMES:])


def _last(lines: Sequence[str], said: re.Pattern[str]) -> int | None:
    """The last line that says so, with figures where any line has them."""
    found = [index for index, line in enumerate(lines) if said.search(line)]
    told = [index for index in found if "Tried to allocate" in lines[index]]
    return max(told or found, default=None)


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None:
        return None
    number, unit = (group for group in found.groups() if group is not None)
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
