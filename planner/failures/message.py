"""The figures of an out-of-memory message, and the frames of its traceback, in every form that logs hold them.

PyTorch's message has had three forms (c10/cuda/CUDACachingAllocator.cpp before 1.4, before 2.1 and since); frames are
Python's own, IPython's old and new ones, pytest's, rich's boxes, or a chain of calls written by hand.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence

from planner.records import dataclass
from planner.units import GIB, KIB, MIB

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": KIB, "MB": MIB, "GB": GIB}
_SIZE = r"(\d{1,18}(?:\.\d{1,9})?) (bytes|[KMG]i?B)"
_PREFIX = re.compile(
    r"(?:> ?){0,3}\s{0,40}(?:\[(?:rank)?\d{1,6}\]:?|\(\w{1,60} (?:pid|rank)=[^)\n]{1,80}\)|\[[^\]\n]{1,60}\]:"
    r"|\d{1,3}(?:\.\d{1,3}){3}:|> ?)[ \t]?"
)
"""What torchrun, Ray, pdsh, job logs or a quoting mail put before a line."""
_EDGE = r" {1,120}(?:│ {0,40}\n {0,40}│ {1,4})?"
"""Between two words of a rich box, where its width may end a line."""
_FRAMES = (
    # Python's own; IPython's since 8; rich's boxes; IPython's before 8; pytest's, and chains with arrows
    re.compile(
        r"(?:File \"|(?m:^)[ \t]{0,8})(?P<file>[^\"\n]{1,400})\", line (?P<line>\d{1,9}), in (?P<name>[^\s(]{1,200})"
        r"[^\n]{0,200}(?:\n(?![ \t]{0,60}File )[ \t]{0,60}(?P<code>[^\n]{1,300}))?"
    ),
    re.compile(r"File (?P<file>[^\"\s][^\n]{0,400}?):(?P<line>\d{1,9}), in (?P<name>[\w.<>]{1,200})"),
    re.compile(rf"│ (?P<file>\S[^\n│]{{0,300}}?):(?P<line>\d{{1,9}}){_EDGE}in{_EDGE}(?P<name>[\w<>]{{1,200}})"),
    re.compile(
        r"^\[?(?P<file>[^\s\]]{1,300}\.py|<ipython-input[^>\n]{1,60}>)(?:\]\([^)\n]{0,200}\))? in "
        r"(?P<name>[\w<>]{1,200})",
        re.MULTILINE,
    ),
    re.compile(
        r"(?<![\w./\\-])(?P<file>[\w./\\-]{1,300}\.py):(?P<line>\d{1,9})(?:: in)? (?P<name>\w{1,200})[ \t]*(?:->|$)",
        re.MULTILINE,
    ),
)
_IN_ENGINE = re.compile(
    r"^ {1,4}(?P<file>/[^\s(]{1,300}\.py)\((?P<line>\d{1,9})\): ?(?P<name>\w{0,200})$", re.MULTILINE
)
"""Python's calls inside autograd's engine, which pybind11 lists after the message, the innermost first."""
_ARROW = re.compile(
    r"^-{1,12}> {0,8}(?P<line>\d{1,9}) (?P<code>[^\n]{1,300})|❱ {0,8}\d{1,9} │(?P<boxed>[^\n]{1,300})", re.MULTILINE
)
"""The line that was run, as IPython and rich mark it."""
_OTHER = re.compile(rf"Process \d{{1,10}} has {_SIZE} memory in use")
_FIGURES = {
    "tried_bytes": re.compile(rf"Tried to allocate {_SIZE}"),
    "total_bytes": re.compile(rf"(?:total capac\w{{1,5}} of |GPU \d{{1,4}}; ){_SIZE}"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free|allocated; {_SIZE} free"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated_bytes": re.compile(
        rf"allocated memory {_SIZE} is allocated by PyTorch|capacity; {_SIZE} already allocated"
    ),
    "unallocated_bytes": re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    "reserved_bytes": re.compile(rf"free; {_SIZE} reserved in total by PyTorch"),
    "cached_bytes": re.compile(rf"free; {_SIZE} cached"),
    "graphs_bytes": re.compile(rf"with {_SIZE} allocated in private pools"),
}
_DEVICE_ERRORS = re.compile(
    r"(?:CUDA|HIP|XPU|GPU)[: ]{1,2}(?:error: )?out[- ]of[- ](?:the )?memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|MPS backend out of memory|OutOfMemoryError|(?-i:Tried) to allocate \d|Failed to CUDA calloc"
    r"|^Allocation on device\b|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)
_SHARED_ERRORS = re.compile(r"killed by signal: Bus error|out of shared memory|No space left on device.{0,80}/dev/shm")
_HOST_ERRORS = re.compile(
    r"can't allocate memory|Cannot allocate memory|\bMemoryError|oom-kill|SIGKILL|OOMKilled|killed by signal: Killed"
    r"|out of memory: Killed process|(?:exit ?|return |run )code {0,4}[:=]? {0,2}-9\b|running low on memory"
    r"|ray-oom-prevention|\b(?:CPU|RAM|host|node)\b.{0,8}\bOOM\b",
    re.IGNORECASE,
)
_IN_WORDS = re.compile(
    r"out[- _]of[- _]memory|(?<![a-z])ooms?(?![a-z])|显存(?:不够|不足|溢出|爆)|爆显存|\bmemory crash", re.IGNORECASE
)
"""As people say it, where no error's own text was pasted."""
_TOLD = re.compile(
    rf"{_IN_WORDS.pattern}|{_DEVICE_ERRORS.pattern}|\bcrash|\b(?:solved|fixed|resolved)\b", re.IGNORECASE
)
_OTHER_ERRORS = re.compile(r"^\W{0,20}[A-Za-z_][\w.]{0,100}(?:Error|Exception)\b(?!.{0,20}Traceback)")
CONTEXT_BYTES = GIB
"""What CUDA and its libraries take beside PyTorch's own memory, at most: messages before 2.1 do not count it."""
MAX_FRAMES = 400
MAX_SENTENCE = 1000
MAX_LINE = 20_000
"""Of a longer line the end is read."""
MAX_TRACEBACK = 1_000_000
"""Letters before the error in which its traceback stands."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A call of the traceback, with the source line that was run where the text has it."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What the text says. Sizes in bytes, None where it does not say them.

    Attributes:
        where: "device", "host", "shared" (the host's /dev/shm), or "" where the text tells of none running out.
        frames: the last traceback's, the innermost last.
        code: the source line before the error, which is pasted alone often.
        tried_bytes: the allocation that failed.
        other_bytes: what other processes hold on the card, where the message counts them.
        unallocated_bytes: what PyTorch holds in cached blocks of the wrong size.
    """

    where: str
    frames: tuple[Frame, ...] = ()
    code: str = ""
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
    raw = [line[-MAX_LINE:] for line in text.splitlines()]
    lines = [_PREFIX.sub("", line, count=1) if _PREFIX.match(line) else line for line in raw]
    where, at = _error(lines)
    if at is None:
        return Message(where="", frames=frames_of(lines))
    frames = _frames_of_process(raw, lines, at) or frames_of(lines[: at + 1]) or frames_of(lines)
    inner = tuple(_frames(_IN_ENGINE, "\n".join(lines[at + 1 : at + MAX_FRAMES])))[::-1]
    return Message(
        where=where,
        frames=(*frames, *inner)[-MAX_FRAMES:],
        code=_code(lines, at),
        **_figures(lines[at : at + 6]),
    )


def sentences_of(text: str) -> Iterator[str]:
    """Sentences in which people speak of the error, or of what ended it."""
    for line in text.splitlines():
        if len(line) <= MAX_SENTENCE and not line.startswith(("    ", "  File", "│")):
            yield from filter(_TOLD.search, re.split(r"(?<=[.!?;])\s|(?<=[。！？])", line))


def _error(lines: Sequence[str]) -> tuple[str, int | None]:
    """Where memory ran out, and the line that says so."""
    for where, said in (("device", _DEVICE_ERRORS), ("shared", _SHARED_ERRORS), ("host", _HOST_ERRORS)):
        at = _last(lines, said)
        if at is not None:
            return where, at
    if any(_OTHER_ERRORS.match(line) for line in lines):
        return "", None
    at = _last(lines, _IN_WORDS)
    return ("device" if at is not None else ""), at


def _figures(lines: Sequence[str]) -> dict[str, int]:
    """The sizes of a message, which a terminal may have cut between any two letters."""
    spaced, joined = " ".join(lines), "".join(lines)
    sizes = {name: _size(pattern, spaced) or _size(pattern, joined) for name, pattern in _FIGURES.items()}
    zero = {name for name, pattern in _FIGURES.items() if sizes[name] is None and _size(pattern, spaced) == 0}
    figures = {name: size for name, size in sizes.items() if size is not None} | dict.fromkeys(zero, 0)
    allocated = figures.get("allocated_bytes", 0)
    reserved, cached = figures.pop("reserved_bytes", None), figures.pop("cached_bytes", None)
    if cached is not None:
        reserved = allocated + cached
    if reserved is not None and allocated:
        figures.setdefault("unallocated_bytes", max(0, reserved - allocated))
    if not figures.get("process_bytes"):  # a container hides the process's own number: "0 bytes"
        figures.pop("process_bytes", None)
    total, free = figures.get("total_bytes"), figures.get("free_bytes")
    if reserved is None and allocated and "unallocated_bytes" in figures:
        reserved = allocated + figures["unallocated_bytes"]
    processes = [size for size in (_bytes(*found) for found in _OTHER.findall(spaced)) if size]
    if processes and ("process_bytes" in figures or reserved is not None):
        mine = min((size for size in processes if size >= (reserved or 0)), default=0)
        # in a container the message counts the process itself with the others
        figures["other_bytes"] = sum(processes) - (0 if "process_bytes" in figures else mine)
    elif total is not None and free is not None and "process_bytes" in figures:
        figures["other_bytes"] = max(0, total - free - figures["process_bytes"])
    elif total is not None and free is not None and reserved is not None:
        figures["other_bytes"] = max(0, total - free - reserved - CONTEXT_BYTES)
    return figures


def _frames_of_process(raw: Sequence[str], lines: Sequence[str], at: int) -> tuple[Frame, ...]:
    """The frames of the process that ran out, where several write into one log, each with its prefix."""
    prefix = _PREFIX.match(raw[at])
    if prefix is None:
        return ()
    return frames_of([line for line, whole in zip(lines[: at + 1], raw, strict=False) if whole.startswith(prefix[0])])


def _code(lines: Sequence[str], at: int) -> str:
    """The source line before the error, and what stands before the error on its own line."""
    before = _DEVICE_ERRORS.split(lines[at], maxsplit=1)[0][:1000] if "Warning: " in lines[at] else ""
    for line in reversed(lines[max(0, at - 12) : at]):
        marked = _ARROW.search(line)
        if marked:
            return f"{marked['code'] or marked['boxed']} {before}"
        if "│" not in line and line.strip(" \t^~╯╰─-") and not line.startswith(" " * 3 + "  "):
            return f"{line.strip()[:300]} {before}"
    return before


def frames_of(lines: Sequence[str]) -> tuple[Frame, ...]:
    """The frames of the last traceback of these lines."""
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    text = "\n".join(lines[starts[-1] :] if starts else lines)[-MAX_TRACEBACK:]
    return next((found for pattern in _FRAMES if (found := tuple(_frames(pattern, text)))), ())


def _frames(pattern: re.Pattern[str], text: str) -> Iterator[Frame]:
    for found in deque(pattern.finditer(text), maxlen=MAX_FRAMES):
        parts = found.groupdict()
        line, code = parts.get("line"), parts.get("code") or ""
        if "code" not in parts:
            marked = _ARROW.search(text, found.end(), found.end() + 4000)
            if marked:
                line, code = line or marked["line"], marked["code"] or marked["boxed"]
        name = parts["name"].rpartition(".")[2]
        yield Frame(file=parts["file"].strip(), line=int(line or 0), function=name, code=code.strip())


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
