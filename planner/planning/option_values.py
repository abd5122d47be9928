"""Values that a person gave for options, checked: one of the allowed, a count, a size."""

import math
import re
from collections.abc import Callable, Sequence

from planner.core.close import close_names
from planner.core.errors import UsageError
from planner.core.units import GIB, gib
from planner.hardware.gpu import GpuSpec
from planner.options.absent import known_unplanned
from planner.setup import allowed as fields

HEADROOM_FRACTION = 0.04
"""Default reserve as a share of the card: what the formula's error and other processes may take. See docs/accuracy."""
HEADROOM_FLOOR_BYTES = GIB // 2


def default_headroom_bytes(memory_bytes: int) -> int:
    """The reserve where nobody says one."""
    return max(int(HEADROOM_FRACTION * memory_bytes), min(HEADROOM_FLOOR_BYTES, memory_bytes // 8))


_AMOUNT = re.compile(r"(\d[\d,_]*(?:\.\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
_THOUSANDS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}


def amount(text: str | int) -> int:
    """A number as people write it: "20M", "1.5B", "300k", "20,000,000".

    Raises:
        UsageError: anything else, or a part of one.
    """
    return _whole(text, 1000, "20000000, 20M or 1.5B")


def length(text: str | int) -> int:
    """A sequence's tokens as people write them: "8192", "8,192", or "8k", which is 8,192 as models' contexts are named.

    Raises:
        UsageError: as `amount`.
    """
    return _whole(text, 1024, "2048 or 8k")


def _whole(text: str | int, thousand: int, usual: str) -> int:
    from decimal import Decimal  # late: few sizes are typed

    value = Decimal("0.5")
    if match := _AMOUNT.fullmatch(str(text).strip()):
        number = match[1].replace(",", "").replace("_", "")
        value = Decimal(number) * thousand ** _THOUSANDS[match[2].lower()]
    if value != int(value):
        raise UsageError(f"expected a positive whole number, got {str(text)!a:.60}", hint=f"for example {usual}")
    return int(value)


def named(name: str, parse: Callable[[str], int]) -> Callable[[str], int]:
    """`amount` or `length`, whose error names the option."""

    def parsed(text: str) -> int:
        try:
            return parse(text)
        except UsageError as error:
            raise UsageError(f"--{name}: {error.message}", hint=error.hint) from None

    parsed.__name__ = parse.__name__  # how --help calls such a value
    return parsed


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def duration_s(name: str, text: str, *, unit: str) -> float:
    """Seconds of "90s", "9m", "24h", "3d" or "1.5w"; a bare number is in `unit`s.

    Raises:
        UsageError: anything else, or nothing.
    """
    text = text.strip()
    number, unit = (text[:-1], text[-1]) if text[-1:] in _SECONDS else (text, unit)
    try:
        value = float(number) * _SECONDS[unit]
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise UsageError(f"--{name} must be a time such as 90s, 9m, 1.5h or 3d; got {text!r}", hint=f"--{name} 2h")
    return value


def choices(name: str, values: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Values of a repeatable option, each one of `allowed` in any case; comma-separated lists are taken apart.

    Raises:
        UsageError: a value that is not allowed.
    """
    spelled = {name.lower(): name for name in allowed} | {name: name for name in allowed}
    parts = [part.strip() for value in values for part in value.split(",") if part.strip()]
    chosen = tuple(dict.fromkeys(spelled.get(part, spelled.get(part.lower(), part)) for part in parts))
    if not chosen:
        raise UsageError(f"--{name} is empty", hint=f"for example --{name} {allowed[0]}")
    for value in chosen:
        if value not in allowed:
            if explanation := known_unplanned(f"--{name}", value):
                raise UsageError(explanation[0], hint=explanation[1])
            raise UsageError(
                f"--{name} must be one of {', '.join(allowed)}; got {value!r}",
                hint=f"for example --{name} {(*close_names(value, allowed, num=1), allowed[0])[0]}",
            )
    return chosen


def parse_targets(value: str) -> str | tuple[str, ...]:
    """`attention`, `all-linear`, or a comma-separated list of module names."""
    if value in (*fields.TARGET_SETS, fields.EXPERT_TARGETS):
        return value
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    if odd := [name for name in names if name not in fields.TARGET_SETS and not re.fullmatch(r"[A-Za-z0-9_.]+", name)]:
        raise UsageError(
            f"--targets must be attention, all-linear or module names; got {odd[0]!r}", hint="for example q_proj,v_proj"
        )
    if not names:
        raise UsageError("--targets is empty", hint="attention, all-linear, or names such as q_proj,v_proj")
    if sets := [name for name in names if name in fields.TARGET_SETS]:
        others = ",".join(name for name in names if name not in sets)
        saved = f"--targets {sets[0]} --modules-to-save {others} of `plan estimate`"
        whole = others and all(name in fields.SAVED_MODULES for name in others.split(","))
        raise UsageError(
            f"--targets takes {sets[0]} alone, or names of modules; got both",
            hint=f"{saved} trains these whole beside the adapters" if whole else f"--targets {sets[0]}",
        )
    return names


def positive(name: str, value: int | None, *, least: int = 1, maximum: int = 1 << 40) -> int | None:
    """A count from the command line, at least 1 (`least`).

    Raises:
        UsageError: less, or beyond any sense.
    """
    if value is not None and not least <= value <= maximum:
        raise UsageError(
            f"--{name} must be at least {least} and at most {maximum}, got {value}",
            hint=f"give --{name} a {'positive ' * (least > 0)}whole number",
        )
    return value


def between(name: str, value: float | None, most: float, usual: str) -> float | None:
    """A positive number from the command line.

    Raises:
        UsageError: not finite, not positive, or beyond any sense.
    """
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        raise UsageError(
            f"--{name} must be above 0 and at most {most:g}, got {value}", hint=f"for example --{name} {usual}"
        )
    return value


def memory_and_headroom(gpu: GpuSpec, memory_gib: float | None, headroom_gib: float | None) -> tuple[int, int]:
    """(usable memory, reserve) in bytes from the flags or the defaults.

    Raises:
        UsageError: not finite, negative, or a reserve as large as the memory.
    """
    for name, value, usual in (("memory-gib", memory_gib, 20), ("headroom", headroom_gib, 1)):
        if value is not None and not (math.isfinite(value) and 0 <= value <= 1e6):
            raise UsageError(
                f"--{name} must be a size in GiB from 0 to 1,000,000, got {value}", hint=f"for example --{name} {usual}"
            )
    memory = gpu.memory_bytes if memory_gib is None else int(memory_gib * GIB)
    if memory < GIB // 4:
        raise UsageError(
            f"--memory-gib must be at least 0.25, got {memory_gib}", hint="usable memory in GiB, for example 23.5"
        )
    headroom = default_headroom_bytes(memory) if headroom_gib is None else int(headroom_gib * GIB)
    if headroom >= memory:
        raise UsageError(
            f"--headroom {headroom_gib} leaves nothing of {gib(memory)}", hint="give a reserve smaller than the card"
        )
    return memory, headroom
