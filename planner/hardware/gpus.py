"""The GPU table: 184 accelerators as sourced facts, found by key, marketing name or what the driver reports.

`planner/data/gpus.csv` holds one device per row. A name matches when it is equal to the key, the name, the driver's
name or an alias of exactly one row, whatever its case, spacing, punctuation and vendor prefix, with its memory or
without. Of a family of which one is by far the usual, that one is taken and it is said (`USUAL`); anything else is an
error with the closest keys, never a silent guess. What people put around a name ("2 x RTX 3090", "MacBook Pro M3 Max
64GB") is taken apart first.
"""

import csv
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from planner.core import plugins
from planner.core.errors import ConfigError, EnvironmentProblem, UnknownGpuError, UsageError
from planner.core.shipped import DATA
from planner.core.units import GIB, MIB
from planner.hardware import mig
from planner.hardware.driver import VISIBLE, SeenGpu, device_index, nvml, seen_gpu, visible_names
from planner.hardware.gpu import GpuSpec
from planner.hardware.instances import cards_of

MAX_NAME = 200
_COUNT = r"[1-9]\d{0,2}"
_COUNTED = (
    re.compile(rf"({_COUNT})\s*[x×*]\s*(?=[a-z]|\d{{3}})(.+)", re.IGNORECASE),
    re.compile(r"([1-9]\d?)\s+(?=[a-z])(.+)", re.IGNORECASE),
)
_COUNT_LAST = re.compile(rf"(.+?)(?:\s+[x×*]\s*|\s*:\s*)({_COUNT})", re.IGNORECASE)
_MEMORY = re.compile(r"(?<![a-z\d.])(\d{1,4}(?:\.\d+)?)[\s_-]*g(?:i?b)?(?![a-z\d])", re.IGNORECASE)
_MACHINES = re.compile(r"\b(?:mac\s*book\s*(?:pro|air)?|mac(?:\s*(?:studio|mini|pro))?|imac)\b")
_WORDS = re.compile(r"[a-z0-9]+").findall
_MAKERS = ("nvidia", "amd", "apple", "intel", "geforce", "tesla", "instinct", "radeon", "arc")
"""Words that tell nothing apart at the head of a name."""
_NOISE = frozenset({
    "r", "tm", "gpu", "card", "graphics", "vram", "ram", "memory", "unified", "desktop", "generation",
    "colab", "kaggle", "google", "free",
})  # fmt: skip
_SAME = {"mobile": "laptop", "notebook": "laptop"}


def normalized(name: str) -> str:
    """A name without case, spacing, punctuation and words that tell nothing apart: "NVIDIA GeForce RTX 4090" gives
    "rtx4090"."""
    text = name.lower()
    without = _WORDS(_MACHINES.sub(" ", text)) if "mac" in text else ()
    words = [_SAME.get(word, word) for word in without or _WORDS(text)]
    while len(words) > 1 and words[0] in _MAKERS:
        del words[0]
    return "".join([word for word in words if word not in _NOISE] or words)


def size_alone(name: str) -> float | None:
    """The memory in GiB, where a name is nothing else: "16GB", "24 GB GPU"."""
    sizes = _MEMORY.findall(name)
    rest = set(_WORDS(_MEMORY.sub(" ", name.lower())))
    return float(sizes[0]) if len(sizes) == 1 and rest <= {*_MAKERS, *_NOISE} else None


def words_of(name: str) -> frozenset[str]:
    """The words of a name that tell something, without its size."""
    return frozenset(_WORDS(_MEMORY.sub(" ", name.lower().replace("-", " ")))) - {*_MAKERS, *_NOISE}


def counted(text: str) -> tuple[int | None, str]:
    """(how many cards a name asks for, the card): (8, "H100") of "8xH100", (None, "RTX 4090") of "RTX 4090"."""
    text = text.strip()[:MAX_NAME]
    if size_alone(text) is not None:  # "24 GB" is no 24 of a GB200
        return None, text
    if parts := _kinds(text):  # each with a number of its own
        with suppress(UnknownGpuError):
            for part in parts:
                find_gpus(part)
            return None, text
    for pattern in _COUNTED:
        if match := pattern.fullmatch(text):
            return int(match[1]), match[2]
    trailing = _COUNT_LAST.fullmatch(text) if text.count(":") < 2 else None
    return (int(trailing[2]), trailing[1]) if trailing is not None else (None, text)


def _kinds(text: str) -> list[str]:
    parts = re.split(r"\s*[+,&]\s*|\s+and\s+", text)
    return parts if len(parts) > 1 and all(parts) else []


def without_size(name: str) -> str:
    return normalized(_MEMORY.sub(" ", name))


Names = TypeVar("Names")
_PATH = DATA / "gpus.csv"
LOCAL = "local"
QUERY_LIMIT_S = 3.0

RESERVE_MIB = 400.0
RESERVE_FRACTION = 0.002
"""What torch's `total_memory` is below the driver's total on Linux: 400 MiB + 0.2 %.

Fitted on the rows that have both figures; the error stays within RESERVE_ERROR_MIB (tests/planner/test_gpus.py).
"""
RESERVE_ERROR_MIB = 410.0

ECC_SHARE = 1 / 16
"""Share of GDDR memory that ECC's bits take where they lie in it ("inline"), and of its bandwidth: they are read and
written with the data. The least that it takes: HBM has bits of its own and loses nothing.

Source: NVIDIA, CUDA C++ Best Practices Guide 12.9, 9.2.1 Theoretical Bandwidth Calculation (6.25 % of the memory; of
the bandwidth about 20 %, by the access pattern). Measured with ECC on: an A10 reads and writes 489 to 500 of 600 GB/s
(mixbench 0.04).
"""
ECC_SLACK = 0.001
"""How far a driver's total may lie from 15/16 of the nominal memory: it shows up to 12 of 46,080 MiB less."""

METAL_SHARES = ((32.0, 2 / 3), (math.inf, 3 / 4))
"""(up to so many GiB of unified memory, share that Metal recommends for the GPU): `torch.mps.recommended_max_memory`.

Source: recommendedMaxWorkingSetSize of 21,845 of 32,768 MiB (ollama issue 434), 49,152 of 65,536 (llama.cpp issue
1870), 73,728 of 98,304 (llama.cpp issue 3213). Beyond it command buffers fail or the system swaps.
"""

SERVICES = {"colab": "a t4 (paid: l4, a100-40gb, h100-sxm)", "kaggle": "2 x t4 or one p100"}
"""What is behind a name that is a service's, not a card's.

Source: mccormickml.com "Colab GPUs Features & Pricing", March 2026 (free: T4; paid: L4, A100, H100, G4); the choices of
Kaggle's notebooks, "GPU T4 x2 or P100".
"""
MAX_OF_SIZE = 8

_FAMILIES = {
    "GeForce": ("geforce", "rtx"),
    "Apple": ("apple", "mac", "macbook", "macbookpro", "macstudio", "mps", "metal"),
    "AMD": ("amd", "radeon", "instinct", "rocm"),
    "Intel": ("intel", "arc"),
}
"""What people say for any card of a maker or line, by the word that its name or maker begins with."""
USUAL = {
    "h100": ("h100-sxm", "h100-nvl", "h100-sxm-96gb"),
    "mi300": ("mi300x",),
    "rtx3050": ("rtx-3050-8gb", "rtx-3050-6gb", "rtx-3050-4gb"),
    "agxorin": ("jetson-agx-orin-64gb", "jetson-agx-orin-32gb"),
    "jetsonagxorin": ("jetson-agx-orin-64gb", "jetson-agx-orin-32gb"),
}
"""A name that several rows bear -> those that it stands for, the usual one first; a size in the name decides."""
SIZE_TOLERANCE_FRACTION = 0.07
"""How far a memory size in a name may lie from the card's: a B200 is sold as 180 and as 192 GB."""
LIKE_ENOUGH = 0.55
_DTYPES = ("bf16", "fp16", "fp32", "tf32")


def _number(text: str) -> float | None:
    return float(text) if text else None


def _flops(text: str) -> float | None:
    return float(text) * 1e12 if text else None


def _memory(row: dict[str, str], gib: float | None = None) -> tuple[int, str]:
    """Usable memory in bytes and where the figure comes from, the best evidence first; of the version with `gib`."""
    evidence = f" ({row['memory_source']})" if row["memory_source"] else ""
    if row["torch_mib"]:
        return int(row["torch_mib"]) * MIB, f"torch total_memory, lowest seen{evidence}"
    if row["driver_mib"]:
        total = int(row["driver_mib"])
        reserve = round(RESERVE_MIB + RESERVE_FRACTION * total)
        basis = f"driver total {total} MiB less about {reserve} MiB that torch does not show{evidence}"
        return (total - reserve) * MIB, basis
    sizes = _marketed_gib(row)
    size = min(sizes) if gib is None else gib
    usable, basis = int(size * GIB), "marketing memory: no reading by torch or the driver is known"
    if row["vendor"] == "NVIDIA":
        usable, basis = _less_reserve(size)
        basis = f"marketing memory, {basis}: no reading by torch or the driver is known"
    elif row["vendor"] == "Apple":
        share = next(share for limit, share in METAL_SHARES if size <= limit)
        usable = int(size * share * GIB)
        basis = f"what Metal recommends of {size:g} GiB unified memory ({share:.0%})"
    if len(sizes) > 1 and gib is None:
        basis += f"; smallest of {', '.join(f'{marketed:g}' for marketed in sizes)} GiB: name another with the card"
    return usable, basis


def _marketed_gib(row: dict[str, str]) -> list[float]:
    return [float(size) for size in row["marketing_gib"].split("|")]


def _less_reserve(gib: float) -> tuple[int, str]:
    """(bytes that torch shows of an NVIDIA card of so many GiB, the sentence that says so)."""
    reserve = round(RESERVE_MIB + RESERVE_FRACTION * gib * 1024)
    return int(gib * GIB) - reserve * MIB, f"{gib:g} GiB less about {reserve} MiB that torch does not show"


def _left_by_ecc(row: dict[str, str], driver_mib: float) -> float:
    """Share of a card's bandwidth that is left to data: below 1 where the driver shows 15/16 of its memory."""
    left = 1 - ECC_SHARE
    nominal_mib = 1024 * float(row["marketing_gib"].split("|")[0])
    return left if abs(driver_mib / (nominal_mib * left) - 1) <= ECC_SLACK else 1.0


def _spec(row: dict[str, str]) -> GpuSpec:
    major, _, minor = row["compute_capability"].partition(".")
    memory_bytes, memory_basis = _memory(row)
    sm_count = _number(row["sm_count"])
    l2_mib = _number(row["l2_mib"])
    left = _left_by_ecc(row, _number(row["driver_mib"]) or 0.0)
    rates: dict[str, Any] = {f"{dtype}_flops_per_s": _flops(row[f"{dtype}_tflops"]) for dtype in _DTYPES}
    return GpuSpec(
        key=row["key"],
        name=row["name"],
        driver_name=row["driver_name"],
        vendor=row["vendor"],
        arch=row["arch"],
        compute_capability=(int(major), int(minor)) if major else None,
        memory_bytes=memory_bytes,
        memory_basis=memory_basis,
        **rates,
        memory_bandwidth_bytes_per_s=float(row["bandwidth_gb_per_s"]) * 1e9 * left,
        nvlink_bytes_per_s=(_number(row["nvlink_gb_per_s"]) or 0.0) * 1e9,
        pcie=row["pcie"],
        sm_count=int(sm_count) if sm_count is not None else None,
        l2_bytes=int(l2_mib * MIB) if l2_mib is not None else None,
        tdp_w=_number(row["tdp_w"]),
        flash_attention_2=row["flash_attention_2"] in ("yes", "rocm-ck"),
        source=row["source"],
        unsourced=tuple(field.strip() for field in row["unsourced"].split(",") if field.strip()),
        note=row["note"],
        taken_as=_least_taken(row["name"], _marketed_gib(row)),
    )


def _least_taken(name: str, sizes: list[float]) -> str:
    """What a card without a size is planned with, where it is sold with several; "" elsewhere."""
    if len(sizes) == 1:
        return ""
    *fewer, most = (f"{size:g}" for size in sizes)
    unsaid = f'neither the name (--gpu "{name} {fewer[1] if len(fewer) > 1 else most}GB") nor --memory-gib says'
    return f"{name} is sold with {', '.join(fewer)} or {most} GB: the least is taken where {unsaid}"


@cache
def _rows() -> dict[str, dict[str, str]]:
    """The file's rows by their keys, and those of plug-ins."""
    with _PATH.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = {row["key"]: row for row in reader}
    for row in plugins.rows("gpus", tuple(reader.fieldnames or ())):
        if row["key"] in rows:
            raise ConfigError(f"a plug-in's card has a key of the table: {row['key']}", hint="give it another key")
        rows[row["key"]] = row
    return rows


@cache
def _keys() -> dict[str, str]:
    """The key of every normalised name.

    Raises:
        ConfigError: a name stands for two rows (a fault of the table).
    """
    keys: dict[str, str] = {}
    for key, row in _rows().items():
        for name in {normalized(spelling) for spelling in _names_of(key, row)}:
            if name in keys:
                raise ConfigError(f"gpus.csv: the name {name!r} stands for {keys[name]} and {key}")
            keys[name] = key
    return keys


def _names_of(key: str, row: dict[str, str]) -> tuple[str, ...]:
    return key, row["name"], row["driver_name"], *(alias for alias in row["aliases"].split("|") if alias)


@cache
def _keys_without_size() -> dict[str, tuple[str, ...]]:
    """The keys of every normalised name without the memory that stands in it."""
    by_name: dict[str, dict[str, None]] = {}
    for key, row in _rows().items():
        for name in {without_size(spelling) for spelling in _names_of(key, row)}:
            by_name.setdefault(name, {})[key] = None
    return {name: tuple(keys) for name, keys in by_name.items()}


@cache
def _gpu(key: str) -> GpuSpec:
    return _spec(_rows()[key])


def all_gpus() -> tuple[GpuSpec, ...]:
    return tuple(map(_gpu, _rows()))


def windows_memory_bytes(card: GpuSpec) -> int:
    """What torch tells as a card's memory on Windows, where it is the driver's total: 12.00 GiB of an RTX 3060."""
    row = _rows()[card.key]
    return int(float(row["driver_mib"] or 1024 * _marketed_gib(row)[0]) * MIB)


def find_gpu(name: str) -> GpuSpec:
    """The GPU that a name stands for; "local" asks this machine.

    Raises:
        UnknownGpuError: no row or more than one could be meant; the hint lists the closest keys.
        UsageError: it names several cards, or describes one with figures that cannot be read.
        EnvironmentProblem: "local", and there is no GPU.
    """
    card, num = find_gpus(name)
    if num not in (None, 1):
        raise UsageError(f"{name!r:.60} names {num} cards, this is about one", hint=f"--gpu {card.key}")
    return card


def find_gpus(name: str) -> tuple[GpuSpec, int | None]:
    """(the GPU that a name stands for, how many it names): "8xH100", "2 x RTX 3090"; None where it does not say.

    A name may hold the card's memory ("RTX 3060 12GB"), which must agree with the table's; a card that the table lacks
    is described (`described.FORM`).

    Raises:
        UnknownGpuError, UsageError, EnvironmentProblem: as `find_gpu`.
    """
    num, text = split_count(name)
    if text.lower() == LOCAL:
        return local_gpu(), num
    if text in _rows():
        return _gpu(text), num
    if profile := mig.PROFILE.search(text):
        return _slice_named(text, profile), num
    from planner.hardware.described import described_gpu, is_description  # late: a key needs none of it

    return described_gpu(text, _less_reserve) if is_description(text) else _named(text), num


def _slice_named(text: str, profile: re.Match[str]) -> GpuSpec:
    """The MIG slice of a card that a name holds: "A100 80GB 1g.10gb", "NVIDIA A100-SXM4-80GB MIG 1g.10gb".

    Raises:
        UnknownGpuError: no card, or one that has no such slice.
    """
    parts, size, whole = int(profile[1]), int(profile[2]), mig.PROFILE.sub(" ", text).strip(" -_")
    sized = whole in _rows() or _MEMORY.search(whole) is not None
    for share in mig.SHARES[parts]:
        with suppress(UnknownGpuError):
            spec = _named(whole if sized else f"{whole} {size / share:g}GB")
            nominal = _marketed_gib(_rows()[spec.key])[0]
            if mig.can_be_sliced(spec) and abs(size / share / nominal - 1) <= SIZE_TOLERANCE_FRACTION:
                break
    else:
        raise UnknownGpuError(
            f"no card of the table has the MIG slice {text!r:.60}",
            hint='name the card, then its profile: --gpu "A100 80GB 1g.10gb"; `plan gpus` lists the cards',
        )
    assert spec.sm_count is not None
    assert spec.compute_capability is not None
    total = int(mig.LEFT[share] * min(size, share * nominal) * GIB)
    num_sms = mig.num_sms(parts, spec.sm_count, spec.compute_capability)
    sliced = _slice(spec, SeenGpu(name=spec.name, total_bytes=total, used_bytes=0, num_sms=num_sms, share=share))
    memory_bytes, basis = _less_reserve(total / GIB)
    word = f"{parts}g.{size}gb"
    return replace(
        sliced,
        key=f"{spec.key}-mig-{word}",
        name=f"{spec.name} MIG {word}",
        memory_bytes=memory_bytes,
        memory_basis=f"MIG profile, {basis}",
    )


def split_count(name: str) -> tuple[int | None, str]:
    """(how many cards a name asks for, the card): (8, "H100") of "8xH100", (None, "rtx-4090") of "rtx-4090",
    (4, "a10g") of "g5.12xlarge"."""
    if not isinstance(name, str):  # of a caller in Python
        raise UnknownGpuError(f"a GPU is named by a string, got {name!r:.60}", hint="for example rtx-4090")
    text = name.strip()
    if text in _rows() or text.lower() == LOCAL:
        return None, text
    num, card = counted(text)
    machine = cards_of(card)
    if machine is not None and (num or 1) > 1 and machine[0] != 8:  # as many as a node is taken to have
        raise UsageError(
            f"{name!r:.60} is {num} machines, of {machine[0]} cards each",
            hint=f"--gpu {machine[1]} --gpus {(num or 1) * machine[0]} --nodes {num}",
        )
    return (num, card) if machine is None else ((num or 1) * machine[0], machine[1])


def card_and_count(gpu: str, gpus: int | None) -> tuple[str, int | None]:
    """(the card's name, how many of them), where the name may hold the number and `gpus` says it apart.

    Raises:
        UsageError: they contradict each other, or this machine's cards, of which so many are meant, are not alike.
    """
    num, card = split_count(gpu)
    if num is None:
        if card.lower() == LOCAL and gpus is not None and gpus > 1:
            _refuse_unlike(gpus)
        return gpu, gpus
    if gpus not in (None, num):
        raise UsageError(f"--gpu {gpu!r:.60} names {num} cards, --gpus {gpus}", hint="leave one of the two numbers out")
    return card, num


def of_one_kind(cards: Sequence[tuple[str, int, int]], here: str = "") -> UsageError:
    """What a job of several cards (name, bytes, how many) is answered with."""
    names = ", ".join(f"{num} x {name}" for name, _, num in cards)
    least, total = min(cards, key=lambda card: card[1])[0], sum(num for *_, num in cards)
    return UsageError(
        f"a job is planned on cards of one kind, got {names:.160}",
        hint=f"as many of the smallest: --gpu {shlex.quote(least)} --gpus {total}{here}",
    )


def of_kinds(names: Iterable[str]) -> UsageError:
    """The same of names of cards.

    Raises:
        UnknownGpuError: one is no card.
    """
    return of_one_kind([(card.key, card.memory_bytes, num or 1) for card, num in map(find_gpus, names)])


def _refuse_unlike(num: int) -> None:
    """The first so many of this machine's cards, or all where it has fewer, have to be of one kind.

    Raises:
        UsageError: they are not.
    """
    cards = []
    with suppress(EnvironmentProblem):  # fewer than asked for, or none: said where the card itself is asked for
        for seen in _seen_here(f"cuda:{index}" for index in range(num)):
            if seen is None:
                break
            cards.append((_row_of(seen) or seen.name, seen.total_bytes, 1))
    if len({name for name, *_ in cards}) > 1:
        raise of_one_kind(cards, f"; or one alone: --gpu {LOCAL} without --gpus ({VISIBLE} says which)")


def _named(text: str) -> GpuSpec:
    sizes, words = _MEMORY.findall(text), without_size(text)
    gib = float(sizes[0]) if len(sizes) == 1 and words else None
    exact, same = _first(_keys(), text), _first(_keys_without_size(), words) or ()
    if exact is not None:
        verbatim = normalized(text) == normalized(exact) or text == _rows()[exact]["driver_name"]
        name = _rows()[exact]["name"]
        if verbatim or gib or len(same) < 2 or normalized(name) == without_size(name):
            return _gpu(exact)
    usual = [key for key in _first(USUAL, words) or () if _agrees(key, gib)]
    letters = "".join(letter for letter in text.lower() if letter.isalpha())
    service = next((f"{name.title()} gives {cards}" for name, cards in SERVICES.items() if name in letters), "")
    could_be = same or tuple(spec.key for spec in all_gpus() if words and not service and _may_mean(text, words, spec))
    agreeing = [key for key in could_be if _agrees(key, gib)]
    if len(agreeing) == 1 and same:
        return _with_size(agreeing[0], gib)
    if usual or (len(agreeing) == 1 and (gib or len(words_of(text)) > 1)):  # "laptop 4060": no other has these words
        key = (usual or agreeing)[0]
        spec, others = _with_size(key, gib), ", ".join(candidate for candidate in could_be if candidate != key)[:120]
        return replace(spec, taken_as=f"{text!r}: taken as {spec.name}, {key}" + (f" (not {others})" if others else ""))
    if could_be and not agreeing:
        has = "; ".join(
            f"{key} has {' or '.join(f'{size:g}' for size in _marketed_gib(_rows()[key]))} GB" for key in could_be[:4]
        )
        raise UnknownGpuError(
            f"no {text!r:.60}: {has}",
            hint=f"leave the size out; for a modified card --gpu {could_be[0]} --memory-gib {gib or 0:g}",
        )
    if agreeing:
        error = UnknownGpuError(
            f"GPU {text!r} is not one exact device", hint=f"say which: {', '.join(agreeing[:8])}; or --gpu local"
        )
        error.could_be = tuple(agreeing)
        raise error
    if parts := _kinds(text):
        with suppress(UnknownGpuError):  # of one that is no card the whole text is said
            raise of_kinds(parts)
    from planner.hardware.described import FORM, MEANING

    shown = text if len(text) <= 60 else text[:57] + "..."
    near = service or _of_size(text) or (f"closest: {', '.join(close)}" if (close := _closest(text)) else "")
    raise UnknownGpuError(
        f"GPU {shown!r} is not in the table",
        hint=(f"{near}; " if near else "")
        + f"`plan gpus` lists all, `plan which-gpu MODEL` ranks those to rent or buy, --gpu local asks this machine; "
        f"any card can be described: --gpu {FORM} ({MEANING})",
    )


def _first(index: Mapping[str, Names], name: str) -> Names | None:
    """What an index has under a name: "4090" is a GeForce RTX 4090, "7900 xtx" a Radeon RX 7900 XTX, "Quadro RTX A6000"
    an RTX A6000, "H100s" are H100."""
    wanted = normalized(name)
    spellings = (wanted, f"rtx{wanted}", f"rx{wanted}", wanted.removeprefix("quadro"), wanted.removesuffix("s"))
    return next((index[spelling] for spelling in spellings if spelling in index), None)


def _agrees(key: str, gib: float | None) -> bool:
    """Whether a card is sold, or shown, with so much memory."""
    row = _rows()[key]
    shown = [int(row[column]) / 1024 for column in ("torch_mib", "driver_mib") if row[column]]
    return gib is None or any(
        abs(gib / size_gib - 1) <= SIZE_TOLERANCE_FRACTION for size_gib in (*_marketed_gib(row), *shown)
    )


def _with_size(key: str, gib: float | None) -> GpuSpec:
    """The row, of the version with the memory that was named."""
    spec, row = _gpu(key), _rows()[key]
    sizes = _marketed_gib(row)
    if gib is None or len(sizes) == 1:
        return spec
    size = min(sizes, key=lambda sold_gib: abs(sold_gib - gib))
    memory_bytes, basis = _memory(row, size)
    return replace(spec, key=f"{key}-{size:g}gb", memory_bytes=memory_bytes, memory_basis=basis, taken_as="")


def larger_versions(gpu: GpuSpec) -> list[GpuSpec]:
    """The same card as it is sold with more memory."""
    rows = [(key, row) for key, row in _rows().items() if row["name"] == gpu.name]
    versions = [_with_size(key, size) for key, row in rows for size in _marketed_gib(row)]
    return [version for version in versions if version.memory_bytes > gpu.memory_bytes]


def _of_size(name: str) -> str:
    """The rented or sold cards of a memory size, where nothing but a size is said: "16GB"."""
    gib = size_alone(name)
    sized = [key for key, row in _rows().items() if gib is not None and gib in _marketed_gib(row)]
    return f"cards of {gib:g} GB: {', '.join(sized[:MAX_OF_SIZE])}" if sized else ""


def _may_mean(text: str, wanted: str, spec: GpuSpec) -> bool:
    """Whether the name is the beginning of a row's name ("h100"), holds its number ("4090"), has some of its words
    ("jetson orin") or names its family."""
    given_words = words_of(text)
    if len(given_words) > 1 and given_words <= words_of(f"{spec.key} {spec.name}"):
        return True

    if any(wanted in words and family in (spec.vendor, spec.name.split()[0]) for family, words in _FAMILIES.items()):
        return True
    names = [normalized(spelling) for spelling in (spec.key, spec.name, spec.driver_name)]
    inside = len(wanted) >= (3 if wanted.isdigit() else 4)  # "12" is no number of a card
    return len(wanted) >= 2 and any(name.startswith(wanted) or (inside and wanted in name) for name in names)


def _closest(name: str) -> list[str]:
    from planner.core.close import close_names

    names = {
        normalized(spelling): key for key, row in _rows().items() for spelling in (key, row["name"], row["driver_name"])
    }
    return list(
        dict.fromkeys(names[spelling] for spelling in close_names(normalized(name), names, num=8, cutoff=LIKE_ENOUGH))
    )[:4]


def local_gpu(device: str = "cuda:0") -> GpuSpec:
    """The GPU that CUDA would use as `device` on this machine (a MIG slice where it is one), and of its memory what the
    driver shows as free here.

    Asks NVML where `pynvml` is installed, else `nvidia-smi`, for at most QUERY_LIMIT_S.

    Raises:
        EnvironmentProblem: no NVIDIA driver answers, or CUDA_VISIBLE_DEVICES names no GPU of this machine.
        UnknownGpuError: the driver reports a device that the table lacks.
    """
    seen = next(_seen_here([device]))
    if seen is None:
        raise EnvironmentProblem(
            "no GPU found on this machine: neither NVML nor nvidia-smi nor AMD's amdsmi answers",
            hint="name the GPU to plan for, for example --gpu rtx-4090; `plan gpus` lists all",
        )
    total_mib, held_mib = seen.total_bytes // MIB, -(-seen.used_bytes // MIB)
    key = _row_of(seen)
    if key is None and seen.properties is None:
        raise UnknownGpuError(
            f"this machine's GPU {seen.name!r} ({total_mib} MiB) is not in the table",
            hint=f'install nvidia-ml-py, which can ask its driver; or describe it: --gpu "{seen.name}:'
            f'{total_mib / 1024:.3g}GiB:BANDWIDTHGB/s:RATETFLOPS"',
        )
    if key is not None:
        row = _rows()[key]  # with ECC on or off as the driver shows it, whatever the table's was
        bandwidth = float(row["bandwidth_gb_per_s"]) * 1e9 * _left_by_ecc(row, total_mib)
        spec = replace(_gpu(key), memory_bandwidth_bytes_per_s=bandwidth, taken_as="")
    else:
        from planner.hardware.described import unlisted_gpu  # late: most cards have a row

        spec = unlisted_gpu(seen)
    reserve = 0 if spec.vendor == "AMD" else round(RESERVE_MIB + RESERVE_FRACTION * total_mib)
    basis = f"this machine's driver: {total_mib} MiB"
    if reserve:
        basis += f" less about {reserve} MiB that torch does not show"
    if held_mib:
        basis += f" and {held_mib} MiB that others hold now"
    memory_bytes = max(0, total_mib - reserve - held_mib) * MIB
    return replace(_slice(spec, seen), memory_bytes=memory_bytes, memory_basis=basis)


def _row_of(seen: SeenGpu) -> str | None:
    """The row of a device that the driver shows: of several that it calls alike, the one with the nearest memory."""
    key = _keys().get(normalized(seen.name))
    alike = _keys_without_size().get(without_size(seen.name), ())
    if key is None or len(alike) < 2 or not any(_rows()[candidate]["driver_mib"] for candidate in alike):
        return key
    total = seen.total_bytes / GIB / seen.share
    return min(alike, key=lambda candidate: min(abs(total - size) for size in _marketed_gib(_rows()[candidate])))


def _slice(spec: GpuSpec, seen: SeenGpu) -> GpuSpec:
    """The part of the GPU that a MIG slice is: arithmetic by its multiprocessors, bandwidth and cache by its memory."""
    if seen.share == 1.0:
        return spec
    compute = seen.num_sms / spec.sm_count if seen.num_sms and spec.sm_count else seen.share

    rates = {f"{dtype}_flops_per_s": getattr(spec, f"{dtype}_flops_per_s") for dtype in _DTYPES}
    parts: dict[str, Any] = {name: None if rate is None else rate * compute for name, rate in rates.items()}
    return replace(
        spec,
        name=f"{spec.name} (MIG slice)",
        **parts,
        memory_bandwidth_bytes_per_s=spec.memory_bandwidth_bytes_per_s * seen.share,
        nvlink_bytes_per_s=0.0,
        sm_count=seen.num_sms,
        l2_bytes=None if spec.l2_bytes is None else int(spec.l2_bytes * seen.share),
    )


def _seen_here(devices: Iterable[str]) -> Iterator[SeenGpu | None]:
    """Each device as a driver shows it; None where none answers."""
    rows: list[list[str]] | None = None
    for device in devices:
        seen = _ask_nvml(device)
        if seen is None:
            rows = _ask_nvidia_smi() if rows is None else rows
            seen = _shown_in(rows, device) if rows else None
        yield seen


def _ask_nvml(device: str) -> SeenGpu | None:
    """The device as NVML shows it, None where NVML is not installed or does not tell.

    Raises:
        EnvironmentProblem: the driver answers, and this process sees no such device.
    """
    with nvml() as module:
        if module is None:
            return None
        try:
            return seen_gpu(module, device)
        except LookupError as error:
            raise _not_visible(str(error.args[0])) from error
        except module.NVMLError:
            return None


def _not_visible(message: str) -> EnvironmentProblem:
    given = os.environ.get(VISIBLE)
    return EnvironmentProblem(
        message + (f" ({VISIBLE}={given})" if given is not None else ""),
        hint=f"`nvidia-smi -L` lists GPUs and UUIDs; correct or unset {VISIBLE}, or name the GPU to plan for",
    )


def _ask_nvidia_smi() -> list[list[str]]:
    """A row of _SMI_FIELDS for every GPU that `nvidia-smi` shows; none where that is missing, fails or hangs."""
    import subprocess  # late: the formula path does not need it

    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.strip().splitlines()]
    return [row for row in rows if len(row) == len(_SMI_FIELDS) and row[1]]


def _shown_in(rows: list[list[str]], device: str) -> SeenGpu:
    """The device in nvidia-smi's rows.

    Raises:
        EnvironmentProblem: CUDA_VISIBLE_DEVICES names no GPU of its, or it does not tell the memory of what is used:
            a MIG slice's, a Jetson's.
    """
    names = visible_names()
    place = device_index(device)
    if names is not None:
        wanted = names[place] if place < len(names) else ""
        uuids = [row[0] for row in rows if wanted and row[0].startswith(wanted)]
        place = rows.index(next(row for row in rows if row[0] == uuids[0])) if len(uuids) == 1 else -1
        place = int(wanted) if wanted.isdecimal() else place
        if wanted.startswith("MIG-"):
            place = next((number for number, row in enumerate(rows) if row[4] == "Enabled"), place)
    if not 0 <= place < len(rows):
        raise _not_visible(f"{device} does not exist: nvidia-smi shows {len(rows)} GPU(s)")
    _, name, total, used, sliced = rows[place]
    if sliced == "Enabled" or not total.isdecimal():
        what = "its MIG slices" if sliced == "Enabled" else "its memory"
        raise EnvironmentProblem(
            f"nvidia-smi shows this machine's {name!r}, and nothing of {what}: NVML would tell",
            hint="install nvidia-ml-py, or name what is used: "
            + (f'--gpu "{name} MIG 1g.10gb"' if sliced == "Enabled" else "`plan gpus` lists all"),
        )
    return SeenGpu(name=name, total_bytes=int(total) * MIB, used_bytes=int(used) * MIB if used.isdecimal() else 0)


_SMI_FIELDS = ("uuid", "name", "memory.total", "memory.used", "mig.mode.current")
