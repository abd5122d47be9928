"""PyTorch's memory snapshot (`torch.cuda.memory._dump_snapshot`): what held the card, by the line that allocated it.

The file is a pickle of dictionaries, lists, numbers and texts. It is read by an unpickler that knows no class and calls
nothing: a file that names one is refused.
"""

import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from planner.core.errors import ConfigError
from planner.core.inputs import LARGEST
from planner.core.records import dataclass
from planner.planning.failures.message import MAX_FRAMES, Frame, Message, phase_of

MAX_FILE_BYTES = 400 * 1024**2
MAX_BLOCKS = 3_000_000
OBJECTS_PER_BYTE = 24
"""Bytes that a pickle's objects may take for each of its own: those of a snapshot take about 10."""
DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError,
    RecursionError, ImportError,
)  # fmt: skip
"""What the unpickler, and a document of another form, raise."""
MAX_STACKS = 20_000
NUM_HOLDERS = 6
_LIBRARIES = ("site-packages", "dist-packages", "torch/", "??", "python3", "lib/")
"""Parts of a path that is no program of the user's."""


Calls = tuple[tuple[Any, Any, Any], ...]
"""(file, line, function) of each call as a snapshot has them: the innermost first."""


class _DataOnly(pickle.Unpickler):
    """Knows no class: numbers, texts, lists and dictionaries alone."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ConfigError(
            f"this pickle names {module}.{name}: a memory snapshot holds data alone",
            hint="write it with torch.cuda.memory._dump_snapshot(FILE)",
        )


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Bytes that were allocated by one line, and the part of the run that it belongs to."""

    place: str
    phase: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a snapshot shows when it was taken: the figures as an error's message has them, with the frames of the last
    allocation that failed, and the lines that hold most, the largest first."""

    message: Message
    holders: tuple[Holder, ...]


def is_snapshot(head: bytes) -> bool:
    """Whether a file begins as a pickle."""
    return head[:1] == b"\x80" and head[1:2] <= bytes([pickle.HIGHEST_PROTOCOL])


def read_snapshot(path: Path) -> Snapshot:
    """What held memory, by line.

    Raises:
        ConfigError: no snapshot, a damaged one, one that is too large, or a pickle that names a class.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path.name}: larger than {MAX_FILE_BYTES >> 20} MiB", hint="record fewer events (max_entries)"
        )
    try:
        with path.open("rb") as file, _bounded_memory(path.stat().st_size):
            document = _DataOnly(file).load()
        return _snapshot(document)
    except ConfigError:
        raise
    except DAMAGED:
        raise ConfigError(
            f"{path.name} is no memory snapshot", hint="write it with torch.cuda.memory._dump_snapshot(FILE)"
        ) from None


@contextmanager
def _bounded_memory(file_bytes: int) -> Iterator[None]:
    """A pickle of ten bytes can ask for 64 GiB: CPython's unpickler clears its memo up to any index that is named."""
    if sys.platform != "linux":
        yield
        return
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = used + 1024**3 + OBJECTS_PER_BYTE * file_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound if soft == resource.RLIM_INFINITY else min(soft, bound), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _snapshot(document: Mapping[str, Any]) -> Snapshot:
    reserved = allocated = seen = 0
    stacks: Counter[Calls] = Counter()
    for segment in document["segments"]:
        reserved += _bytes(segment["total_size"])
        for block in segment["blocks"]:
            seen += 1
            if seen > MAX_BLOCKS:
                raise ValueError
            if block["state"] != "active_allocated":
                continue
            size = _bytes(block["size"])
            allocated += size
            stacks[_calls(block)] += size
    bytes_by_place: Counter[tuple[str, str]] = Counter()
    for stack, size in stacks.most_common(MAX_STACKS):
        frames = _frames(stack)
        phase = phase_of(frames)
        bytes_by_place[_place(frames), phase.name if phase else ""] += size
    frames, tried = _failed(document.get("device_traces") or [])
    message = Message(
        where="device",
        frames=frames,
        tried_bytes=tried,
        allocated_bytes=allocated,
        unallocated_bytes=max(0, reserved - allocated),
    )
    most = bytes_by_place.most_common(NUM_HOLDERS)
    holders = tuple(Holder(place=place, phase=phase, size_bytes=size) for (place, phase), size in most)
    return Snapshot(message=message, holders=holders)


def _bytes(value: Any) -> int:
    """A size; ValueError where no card has it."""
    size = int(value)
    if not 0 <= size < LARGEST:
        raise ValueError
    return size


def _failed(traces: Iterable[Any]) -> tuple[tuple[Frame, ...], int | None]:
    for events in traces:
        for event in reversed(events):
            if event["action"] == "oom":
                return _frames(_calls(event)), _bytes(event["size"])
    return (), None


def _calls(record: Mapping[str, Any]) -> Calls:
    """The calls of a block or an event, as a key: many blocks share them."""
    return tuple(
        (frame["filename"], frame["line"], frame["name"]) for frame in (record.get("frames") or [])[:MAX_FRAMES]
    )


def _frames(calls: Calls) -> tuple[Frame, ...]:
    """The same as a traceback has them: the innermost last."""
    return tuple(Frame(file=str(file), line=int(line), function=str(name)) for file, line, name in reversed(calls))


def _place(frames: Iterable[Frame]) -> str:
    """The innermost line of the user's own program; of a library's where there is none."""
    innermost = list(frames)[::-1]
    user_frames = [frame for frame in innermost if not any(part in frame.file for part in _LIBRARIES)]
    python = [frame for frame in innermost if frame.file.endswith(".py")]
    for frame in [*user_frames[:1], *python[:1]]:
        return f"{Path(frame.file).name}:{frame.line} ({frame.function})"
    return "no Python line was recorded"
