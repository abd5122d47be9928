"""Whatever is read from a person's disk: regular files of bounded size, JSON of bounded depth, numbers that count.

Every reader of the project goes through here (YAML and TOML through `planner.frameworks.readers.loading`, which stands
on this): a named pipe hangs nobody, /dev/zero fills no memory, and what JSON allows but nothing here can mean (NaN, a
number of 5,000 digits, half a character) is an error that names its field.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator
from math import inf, isfinite
from pathlib import Path
from typing import Any, BinaryIO

from planner.core.errors import ConfigError

MAX_DEPTH = 64
MAX_VALUES = 4_000_000
"""Python takes some 70 bytes for each."""
LARGEST = 2**63
"""No byte count, token count or rate is above it."""


WITHIN = "FINETUNE_PLANNER_WITHIN"
"""Variable of a process for whose files somebody else gives the names (`plan mcp`): a JSON list of the folders in which
they may lie. A config that such a client sends names others in turn."""


def open_regular(path: Path, *, hint: str = "", follow: bool = True, trusted: bool = False) -> BinaryIO:
    """An open regular file; a pipe is not waited for, a device not opened for reading.

    Args:
        trusted: no input and no config names it: it may lie outside the folders of WITHIN.

    Raises:
        ConfigError: missing, not readable, a directory, a device or a pipe; a link where `follow` is False.
    """
    if not trusted and (given := os.environ.get(WITHIN)):
        place = os.path.realpath(path)
        if not any(Path(place).is_relative_to(folder) for folder in json.loads(given)):
            raise ConfigError(f"cannot read {path}: outside the folders that may be read", hint=hint)
    # O_NONBLOCK: opening a named pipe that nobody writes to would wait for ever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        if not follow and os.path.islink(path):
            raise ConfigError(f"{path} is a symbolic link", hint="give the file that it points to")
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {reason(error)}", hint=hint) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise ConfigError(f"cannot read {path}: it is {kind}", hint=hint)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, *, max_bytes: int, hint: str = "", follow: bool = True) -> bytes:
    """The content of a regular file of at most `max_bytes`.

    Raises:
        ConfigError: as `open_regular`; or it is larger.
    """
    with open_regular(path, hint=hint, follow=follow) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {reason(error)}", hint=hint) from error
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than the {max_bytes:,} bytes that are read of such a file", hint=hint)
    return content


def read_text(path: Path, *, max_bytes: int, hint: str = "", follow: bool = True) -> str:
    """The same as text; a byte order mark is left out.

    Raises:
        ConfigError: as `read_bytes`; or it is not UTF-8.
    """
    content = read_bytes(path, max_bytes=max_bytes, hint=hint, follow=follow)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", hint=hint or "save it as UTF-8") from error


def read_lines(file: BinaryIO, name: str, *, max_line_bytes: int, hint: str = "") -> Iterator[tuple[int, bytes]]:
    """(number, line) of every line that is not empty.

    Raises:
        ConfigError: a longer line.
    """
    number = 0
    while line := file.readline(max_line_bytes + 1):
        number += 1
        if len(line) > max_line_bytes:
            raise ConfigError(f"{name} line {number} is longer than {max_line_bytes:,} bytes", hint=hint)
        if line.strip():
            yield number, line


def parse_json(content: str | bytes, name: str, *, constant: Callable[[str], Any] | None = None, hint: str = "") -> Any:
    """The value of a JSON text, checked by `check_values`.

    Args:
        constant: what NaN, Infinity and -Infinity stand for, which no JSON has and Python writes; None refuses them.

    Raises:
        ConfigError: not JSON, too deep, or a value that cannot be meant.
    """
    if len(content) > MAX_VALUES and _num_marks(content) > 2 * MAX_VALUES:
        raise ConfigError(f"{name} has more than {MAX_VALUES:,} values", hint=hint)
    try:
        value = json.loads(content, parse_constant=constant or _refuse_constant)
    except RecursionError as error:
        raise ConfigError(f"{name} is not JSON: nested too deeply", hint=hint) from error
    except ValueError as error:  # also UnicodeDecodeError, and numbers of more digits than Python converts
        raise ConfigError(f"{name} is not JSON: {reason(error)}", hint=hint) from error
    check_values(value, name, hint=hint)
    return value


def parse_object(
    content: str | bytes, name: str, *, constant: Callable[[str], Any] | None = None, hint: str = ""
) -> dict[str, Any]:
    """`parse_json` of a JSON object.

    Raises:
        ConfigError: as there; or another JSON value.
    """
    value = parse_json(content, name, constant=constant, hint=hint)
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected a JSON object, got {type(value).__name__}", hint=hint)
    return value


def check_values(
    value: Any, name: str, *, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH, hint: str = ""
) -> None:
    """Refuses what no field can mean: nesting, sizes, numbers and text past all bounds.

    Raises:
        ConfigError: with the path of the field.
    """
    left = max_values
    waiting: list[tuple[Any, _Path]] = [(value, None)]
    while waiting:
        node, place = waiting.pop()
        left -= 1
        if left < 0 or (isinstance(node, (dict, list, tuple, set)) and len(node) > left):
            raise ConfigError(f"{name} expands to more than {max_values:,} values", hint=hint)
        problem = ""
        if isinstance(node, dict):
            for key, child in node.items():
                if isinstance(key, str) and not key.isascii() and not _is_text(key):
                    raise ConfigError(f"{name}: a name in {_words(place)} is no text: {key!a:.80}", hint=hint)
                waiting.append((child, (key, place)))
        elif isinstance(node, (list, tuple, set)):
            waiting.extend((child, (number, place)) for number, child in enumerate(node))
        elif isinstance(node, str):
            problem = "" if node.isascii() or _is_text(node) else "is no text (half of a surrogate pair)"
        elif isinstance(node, int):
            problem = "" if -LARGEST <= node <= LARGEST else "is no number of a reasonable size"
        elif isinstance(node, float):
            problem = "" if isfinite(node) else "is no number of a reasonable size"
        if problem:
            raise ConfigError(f"{name}: {_words(place)} {problem}", hint=hint)
        if isinstance(node, (dict, list, tuple, set)) and _depth(place) >= max_depth:
            raise ConfigError(f"{name} is nested too deeply: more than {max_depth} levels", hint=hint)


_Path = Any
"""(name, the place around it), or None at the top."""


def _num_marks(content: str | bytes) -> int:
    """Commas and opening brackets, those in texts counted too: at least as many as there are values, nearly."""
    if isinstance(content, str):
        return content.count(",") + content.count("[") + content.count("{")
    return content.count(b",") + content.count(b"[") + content.count(b"{")


def _depth(place: Any) -> int:
    depth = 0
    while place is not None:
        depth, place = depth + 1, place[1]
    return depth


def _words(place: Any) -> str:
    """The path of a field as a person writes it: blocks.0.models"""
    parts = []
    while place is not None:
        parts.append(ascii(place[0]).strip("'")[:80])
        place = place[1]
    return ".".join(reversed(parts)) or "the value"


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def reason(error: Exception) -> str:
    """What went wrong, in one short line."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def number(value: Any, name: str, *, least: float = -inf, above: float = -inf) -> float:
    """A finite number.

    Raises:
        ValueError: anything else, with the field's name.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > LARGEST or value != value:
        raise ValueError(f"{name} must be a finite number, got {value!r:.80}")
    if value < least or value <= above:
        bound = f"at least {least:g}" if value < least else f"above {above:g}"
        raise ValueError(f"{name} must be {bound}, got {value!r:.80}")
    return float(value)


def whole(value: Any, name: str, *, least: int = 0) -> int:
    """A whole number of at least `least`: bytes, tokens, counts.

    Raises:
        ValueError: anything else, with the field's name.
    """
    parsed = number(value, name, least=least)
    if parsed != int(parsed):
        raise ValueError(f"{name} must be a whole number, got {value!r:.80}")
    return int(value)
