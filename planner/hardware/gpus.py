"""The GPU table: 64 accelerators as sourced facts, found by key, marketing name or what the driver reports.

`planner/data/gpus.csv` holds one device per row. A name matches when it is equal to the key, the name, the driver's
name or an alias of exactly one row, whatever its case, spacing, punctuation and vendor prefix; anything else is an
error with the closest keys, never a silent guess.
"""

import csv
import math
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from planner.errors import ConfigError, EnvironmentProblem, UnknownGpuError
from planner.hardware.driver import VISIBLE, SeenGpu, device_index, nvml, seen_gpu, visible_names
from planner.hardware.gpu import GpuSpec
from planner.units import GIB, MIB

_PATH = Path(__file__).parents[1] / "data" / "gpus.csv"
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

# Words that tell nothing apart, dropped before names are compared.
_PREFIXES = ("nvidia", "amd", "apple", "geforce", "tesla", "instinct", "radeon", "quadro")
_FAMILIES = {
    "GeForce": ("geforce", "rtx"),
    "Apple": ("apple", "mac", "macbook", "macbookpro", "macstudio", "mps", "metal"),
    "AMD": ("amd", "radeon", "instinct", "rocm"),
}
"""What people say for any card of a maker or line, by the word that its name or maker begins with."""
LIKE_ENOUGH = 0.5


def normalized(name: str) -> str:
    """A name without case, spacing, punctuation and vendor words: "NVIDIA GeForce RTX 4090" gives "rtx4090"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    while len(words) > 1 and words[0] in _PREFIXES:
        del words[0]
    return "".join(words)


def _number(text: str) -> float | None:
    return float(text) if text else None


def _flops(text: str) -> float | None:
    return float(text) * 1e12 if text else None


def _memory(row: dict[str, str]) -> tuple[int, str]:
    """Usable memory in bytes and where the figure comes from, the best evidence first."""
    evidence = f" ({row['memory_source']})" if row["memory_source"] else ""
    if row["torch_mib"]:
        return int(row["torch_mib"]) * MIB, f"torch total_memory, lowest seen{evidence}"
    if row["driver_mib"]:
        total = int(row["driver_mib"])
        reserve = round(RESERVE_MIB + RESERVE_FRACTION * total)
        basis = f"driver total {total} MiB less about {reserve} MiB that torch does not show{evidence}"
        return (total - reserve) * MIB, basis
    sizes = [float(one) for one in row["marketing_gib"].split("|")]
    usable = smallest = min(sizes)
    basis = "marketing memory: no reading by torch or the driver is known"
    if row["vendor"] == "Apple":
        share = next(share for limit, share in METAL_SHARES if smallest <= limit)
        usable = smallest * share
        basis = f"what Metal recommends of {smallest:g} GiB unified memory ({share:.0%})"
    if len(sizes) > 1:
        basis += f"; smallest of {', '.join(f'{size:g}' for size in sizes)} GiB, --memory-gib for the others"
    return int(usable * GIB), basis


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
    return GpuSpec(
        key=row["key"],
        name=row["name"],
        driver_name=row["driver_name"],
        vendor=row["vendor"],
        arch=row["arch"],
        compute_capability=(int(major), int(minor)) if major else None,
        memory_bytes=memory_bytes,
        memory_basis=memory_basis,
        bf16_flops_per_s=_flops(row["bf16_tflops"]),
        fp16_flops_per_s=_flops(row["fp16_tflops"]),
        fp32_flops_per_s=_flops(row["fp32_tflops"]),
        tf32_flops_per_s=_flops(row["tf32_tflops"]),
        memory_bandwidth_bytes_per_s=float(row["bandwidth_gb_per_s"]) * 1e9 * left,
        nvlink_bytes_per_s=(_number(row["nvlink_gb_per_s"]) or 0.0) * 1e9,
        pcie=row["pcie"],
        sm_count=int(sm_count) if sm_count is not None else None,
        l2_bytes=int(l2_mib * MIB) if l2_mib is not None else None,
        tdp_w=_number(row["tdp_w"]),
        flash_attention_2=row["flash_attention_2"] in ("yes", "rocm-ck"),
        source=row["source"],
        unsourced=tuple(one.strip() for one in row["unsourced"].split(",") if one.strip()),
        note=row["note"],
    )


@cache
def _rows() -> dict[str, dict[str, str]]:
    """The file's rows by their keys."""
    with _PATH.open(newline="", encoding="utf-8") as file:
        return {row["key"]: row for row in csv.DictReader(file)}


@cache
def _keys() -> dict[str, str]:
    """The key of every normalised name.

    Raises:
        ConfigError: a name stands for two rows (a fault of the table).
    """
    found: dict[str, str] = {}
    for key, row in _rows().items():
        aliases = row["aliases"].split("|") if row["aliases"] else []
        for name in {normalized(one) for one in (key, row["name"], row["driver_name"], *aliases)}:
            if name in found:
                raise ConfigError(f"gpus.csv: the name {name!r} stands for {found[name]} and {key}")
            found[name] = key
    return found


@cache
def _gpu(key: str) -> GpuSpec:
    """One row; a plan asks for one of many."""
    return _spec(_rows()[key])


def all_gpus() -> tuple[GpuSpec, ...]:
    """Every row of the table, in its order."""
    return tuple(map(_gpu, _rows()))


def find_gpu(name: str) -> GpuSpec:
    """The GPU that a key, a marketing name or a driver's name stands for; "local" asks this machine.

    Raises:
        UnknownGpuError: no row or more than one could be meant; the hint lists the closest keys.
        EnvironmentProblem: "local", and there is no GPU.
    """
    if name.strip().lower() == LOCAL:
        return local_gpu()
    wanted = normalized(name)
    found = _keys().get(wanted) or _keys().get(f"rtx{wanted}")
    with_size = re.compile(rf"(rtx)?{re.escape(wanted)}\d+gb")
    sizes = [key for key, row in _rows().items() if with_size.fullmatch(normalized(row["name"]))]
    # "4090" is a GeForce RTX 4090, "a6000" an RTX A6000; the driver does not say a 4060 Ti's size.
    if found is not None and (len(sizes) < 2 or name == _gpu(found).driver_name):
        return _gpu(found)
    could_be = sizes if found is not None else [spec.key for spec in all_gpus() if wanted and _may_mean(wanted, spec)]
    if could_be:
        error = UnknownGpuError(
            f"GPU {name!r} is not one exact device", hint=f"say which: {', '.join(could_be[:8])}; or --gpu local"
        )
        error.could_be = tuple(could_be)
        raise error
    shown = name if len(name) <= 60 else name[:57] + "..."
    close = _closest(wanted)
    raise UnknownGpuError(
        f"GPU {shown!r} is not in the table",
        hint=(f"closest: {', '.join(close)}; " if close else "")
        + "`plan gpus` lists all, --gpu local asks this machine",
    )


def _may_mean(wanted: str, spec: GpuSpec) -> bool:
    """Whether the name is the beginning of a row's name ("h100"), holds its number ("4090") or names its family."""
    if any(wanted in words and family in (spec.vendor, spec.name.split()[0]) for family, words in _FAMILIES.items()):
        return True
    names = [normalized(one) for one in (spec.key, spec.name, spec.driver_name)]
    return len(wanted) >= 2 and any(one.startswith(wanted) or (wanted.isdigit() and wanted in one) for one in names)


def _closest(wanted: str, num: int = 4) -> list[str]:
    from difflib import SequenceMatcher  # late: the formula path does not need it

    def likeness(spec: GpuSpec) -> float:
        return max(
            SequenceMatcher(None, wanted, normalized(one)).ratio() for one in (spec.key, spec.name, spec.driver_name)
        )

    return [spec.key for spec in sorted(all_gpus(), key=likeness, reverse=True)[:num] if likeness(spec) > LIKE_ENOUGH]


def local_gpu(device: str = "cuda:0") -> GpuSpec:
    """The GPU that CUDA would use as `device` on this machine (a MIG slice where it is one), and of its memory what the
    driver shows as free here.

    Asks NVML where `pynvml` is installed, else `nvidia-smi`, for at most QUERY_LIMIT_S.

    Raises:
        EnvironmentProblem: no NVIDIA driver answers, or CUDA_VISIBLE_DEVICES names no GPU of this machine.
        UnknownGpuError: the driver reports a device that the table lacks.
    """
    seen = _ask_nvml(device) or _ask_nvidia_smi(device)
    if seen is None:
        raise EnvironmentProblem(
            "no GPU found on this machine: neither NVML nor nvidia-smi nor AMD's amdsmi answers",
            hint="name the GPU to plan for, for example --gpu rtx-4090; `plan gpus` lists all",
        )
    total_mib, held_mib = seen.total_bytes // MIB, -(-seen.held_bytes // MIB)
    key = _keys().get(normalized(seen.name))
    if key is None:
        raise UnknownGpuError(
            f"this machine's GPU {seen.name!r} ({total_mib} MiB) is not in the table",
            hint=f"plan for a close one, for example --gpu {(*_closest(normalized(seen.name)), 'rtx-4090')[0]} with "
            "--memory-gib",
        )
    spec = _gpu(key)
    reserve = 0 if spec.vendor == "AMD" else round(RESERVE_MIB + RESERVE_FRACTION * total_mib)
    basis = f"this machine's driver: {total_mib} MiB"
    if reserve:
        basis += f" less about {reserve} MiB that torch does not show"
    if held_mib:
        basis += f" and {held_mib} MiB that others hold now"
    memory_bytes = max(0, total_mib - reserve - held_mib) * MIB
    return replace(_slice(_with_ecc(spec, total_mib), seen), memory_bytes=memory_bytes, memory_basis=basis)


def _with_ecc(spec: GpuSpec, total_mib: int) -> GpuSpec:
    """The card with ECC on or off as its driver shows it here, whatever the table's was."""
    row = _rows()[spec.key]
    nominal = float(row["bandwidth_gb_per_s"]) * 1e9
    return replace(spec, memory_bandwidth_bytes_per_s=nominal * _left_by_ecc(row, total_mib))


def _slice(spec: GpuSpec, seen: SeenGpu) -> GpuSpec:
    """The part of the GPU that a MIG slice is: arithmetic by its multiprocessors, bandwidth and cache by its memory."""
    if seen.share == 1.0:
        return spec
    compute = seen.num_sms / spec.sm_count if seen.num_sms and spec.sm_count else seen.share

    def part(rate: float | None) -> float | None:
        return None if rate is None else rate * compute

    return replace(
        spec,
        name=f"{spec.name} (MIG slice)",
        bf16_flops_per_s=part(spec.bf16_flops_per_s),
        fp16_flops_per_s=part(spec.fp16_flops_per_s),
        fp32_flops_per_s=part(spec.fp32_flops_per_s),
        tf32_flops_per_s=part(spec.tf32_flops_per_s),
        memory_bandwidth_bytes_per_s=spec.memory_bandwidth_bytes_per_s * seen.share,
        nvlink_bytes_per_s=0.0,
        sm_count=seen.num_sms,
        l2_bytes=None if spec.l2_bytes is None else int(spec.l2_bytes * seen.share),
    )


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


def _ask_nvidia_smi(device: str) -> SeenGpu | None:
    """The device as `nvidia-smi` shows it, None where that is missing, fails or hangs, or the GPU is sliced.

    Raises:
        EnvironmentProblem: it answers, and CUDA_VISIBLE_DEVICES names no GPU of its.
    """
    import subprocess  # late: the formula path does not need it

    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.strip().splitlines()]
    rows = [row for row in rows if len(row) == len(_SMI_FIELDS) and row[2].isdecimal() and row[1]]
    if not rows:
        return None
    names = visible_names()
    place = device_index(device)
    if names is not None:
        wanted = names[place] if place < len(names) else ""
        known = [row[0] for row in rows if wanted and row[0].startswith(wanted)]
        place = rows.index(next(row for row in rows if row[0] == known[0])) if len(known) == 1 else -1
        place = int(wanted) if wanted.isdecimal() else place
        if wanted.startswith("MIG-"):
            return None
    if not 0 <= place < len(rows):
        raise _not_visible(f"{device} does not exist: nvidia-smi shows {len(rows)} GPU(s)")
    _, name, total, held, sliced = rows[place]
    if sliced == "Enabled":
        return None
    return SeenGpu(name=name, total_bytes=int(total) * MIB, held_bytes=int(held) * MIB if held.isdecimal() else 0)


_SMI_FIELDS = ("uuid", "name", "memory.total", "memory.used", "mig.mode.current")
