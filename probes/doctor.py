"""What this machine can do, and how to mend what is missing. Never raises: every check becomes a `Finding`."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from planner.core.children import child_environment, python_argv
from planner.core.install import install_command, installed, packages_command
from planner.core.units import GIB, gib
from planner.hardware.amd import AmdSmi
from planner.hardware.driver import device_handle, nvml
from planner.hardware.driver import text as text_of
from planner.speed.roofline.local import REFERENCE_ISSUE_S
from planner.speed.roofline.rented import HOST_SPREAD
from probes.gpu.environment import device_status
from probes.gpu.executors import local_devices
from probes.gpu.topology import topology

Level = Literal["ok", "warning", "missing"]

# Versions this project was run with; the ranges stand in pyproject.toml. Outside them nothing is known to be wrong.
TESTED_RANGES = {
    "torch": ("2.9", "3"),
    "transformers": ("5.17", "6"),
    "peft": ("0.19", "1"),
    "bitsandbytes": ("0.48", "1"),
    "accelerate": ("1.10", "2"),
}
OPTIONAL = {"bitsandbytes": "QLoRA and 8-bit optimizers"}
MIN_DISK_BYTES = 2 * GIB
TORCH_CHECK_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: what it is, how it is, and what would mend it."""

    name: str
    level: Level
    text: str
    mend: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def _judged(
    name: str, good: bool, text: str, mend: str, *, level: Level = "warning", details: dict[str, Any] | None = None
) -> Finding:
    return Finding(name=name, level="ok" if good else level, text=text, mend="" if good else mend, facts=details or {})


def _ok(name: str, text: str, **details: Any) -> Finding:
    return Finding(name=name, level="ok", text=text, facts=details)


def examine() -> list[Finding]:
    """Everything the planner may want of a machine, looked at one by one."""
    findings = [*_python(), *_driver(), *_versions()]
    if installed(("torch",)):  # else its absence is said, and nothing of what it does can be asked
        torch_facts = ask_torch()
        findings += [*torch_findings(torch_facts), *several_gpus(torch_facts, local_devices())]
    return [*findings, *_disk(), *_caches()]


def can_probe(findings: list[Finding]) -> bool:
    """Whether GPU probes can run here."""
    levels = {finding.name: finding.level for finding in findings}
    needed = ("torch", "transformers", "peft", "torch on the GPU")
    driver = any(levels.get(name) == "ok" for name in ("NVIDIA driver", "AMD driver"))
    return driver and all(levels.get(name) in ("ok", "warning") for name in needed)


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield _judged(
        "Python",
        sys.version_info >= (3, 11),
        f"{version} ({sys.executable})",
        "Python 3.11 or newer is needed",
        level="missing",
        details={"version": version},
    )


def _driver() -> Iterator[Finding]:
    with nvml() as module:
        if module is None:
            installed = importlib.util.find_spec("pynvml") is not None
            yield Finding(
                name="NVIDIA driver",
                level="missing",
                text="no driver answers" if installed else "cannot be asked: nvidia-ml-py is not installed",
                mend=(
                    "install the NVIDIA driver, or start the container with --gpus all (AMD: install ROCm's amdsmi for "
                    "Python); without a GPU everything but probes works"
                    if installed
                    else packages_command("nvidia-ml-py")
                ),
            )
            return
        if isinstance(module, AmdSmi):
            try:
                driver = module.nvmlSystemGetDriverVersion()
            except module.NVMLError:
                driver = "version unknown"
            coverage = "memory, neighbours and power limit are read; why clocks are held down and how GPUs are linked"
            yield _ok("AMD driver", f"{driver} (amdsmi): {coverage} are not", driver=driver)
        else:
            driver, cuda = text_of(module.nvmlSystemGetDriverVersion()), int(module.nvmlSystemGetCudaDriverVersion())
            cuda_text = f"{cuda // 1000}.{cuda % 1000 // 10}"
            yield _ok("NVIDIA driver", f"{driver}, for CUDA up to {cuda_text}", driver=driver, cuda=cuda_text)
    for device in local_devices():
        yield _gpu(device)


def _gpu(device: str) -> Finding:
    status = device_status(device)
    if status is None:
        return Finding(
            name=f"GPU {device}",
            level="warning",
            text="the driver does not tell about it",
            mend="check `nvidia-smi`; in a container, MIG and permissions",
        )
    used = status.used_bytes
    details: dict[str, Any] = {"name": status.name, "total_bytes": status.total_bytes, "used_bytes": used}
    text = f"{status.name}, {gib(status.total_bytes)}, {gib(used)} in use"
    with nvml() as module:
        if module is not None:
            try:
                limit_w = module.nvmlDeviceGetPowerManagementLimit(device_handle(module, device)) / 1000.0
                details["power_limit_w"] = limit_w
                text += f", {limit_w:.0f} W limit"
            except (module.NVMLError, LookupError):
                pass  # hidden in some containers
    mend = "end what runs on it (nvidia-smi lists it): probes on a shared GPU measure the neighbours too"
    return _judged(f"GPU {device}", used <= GIB, text, mend, details=details)


def _versions() -> Iterator[Finding]:
    versions = installed(TESTED_RANGES)
    for name, (low, high) in TESTED_RANGES.items():
        version = versions.get(name)
        if version is None:
            optional = OPTIONAL.get(name)
            yield Finding(
                name=name,
                level="warning" if optional else "missing",
                text="not installed" + (f" (needed for {optional})" if optional else ""),
                mend=install_command("torch"),
            )
            continue
        inside = at_least(version, low) and not at_least(version, high)
        text = version if inside else f"{version}, tested from {low} to below {high}"
        yield _judged(name, inside, text, packages_command(f"{name}>={low},<{high}"), details={"version": version})


def at_least(version: str, bound: str) -> bool:
    """Whether a version is not older than a bound, compared number by number."""
    mine, least = ([int(part) for part in re.findall(r"\d+", text.split("+")[0])] for text in (version, bound))
    return mine >= least


def ask_torch(run: Callable[..., Any] = subprocess.run) -> dict[str, Any]:
    """What torch, Triton, bitsandbytes and flash-attn really do here (`probes.doctor_torch`), tried in a child: it may
    crash or hang, and what it had found by then counts."""
    report: dict[str, Any] = {"problems": {}, "seconds": {}}
    problem = ""
    try:
        done = run(
            python_argv("-m", "probes.doctor_torch"),
            capture_output=True,
            text=True,
            timeout=TORCH_CHECK_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
        output = done.stdout
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            problem = f"the check ended with status {done.returncode}: {last[:300]}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        problem = f"no answer within {TORCH_CHECK_S:.0f} s: the driver hangs"
    for line in output.splitlines():
        if line.startswith("DOCTOR"):
            answer = json.loads(line.removeprefix("DOCTOR"))
            for name in ("problems", "seconds"):
                report[name].update(answer.pop(name, {}))
            report.update(answer)
    if problem:
        checks = (
            ("gpus", "bf16", "host", "expandable", "triton", "nf4", "adam8bit", "flash", "ranks")
            if report.get("gpus")
            else ("gpus",)
        )
        report["problems"].update({name: problem for name in checks if name not in report["seconds"]})
    return report


def torch_findings(report: dict[str, Any]) -> Iterator[Finding]:
    """What `ask_torch` came back with, judged."""
    problems: dict[str, str] = report.get("problems", {})
    yield _gpus_finding(report, problems)
    if report.get("bf16") is not None:
        text = "runs on the hardware" if report["bf16"] else "emulated: slow on this GPU"
        yield _judged("bf16", bool(report["bf16"]), text, "use --precision fp16-mixed or fp16-autocast")
    if issue_s := report.get("issue_s"):
        times = issue_s / REFERENCE_ISSUE_S
        text = f"issues a kernel in {1e6 * issue_s:.1f} microseconds, {times:.2f} times the host that speeds assume"
        mend = "small models are planned too fast or too slow: plan calibrate --measure teaches the plans this host"
        usual = 1 / HOST_SPREAD <= times <= HOST_SPREAD
        yield _judged("CPU", usual, text, mend, details={"issue_s": issue_s, "host_scale": times})
    yield from _kernel_findings(report, problems)
    if report.get("rocm"):
        grows = bool(report.get("expandable"))
        text = f"{report.get('built_for')}: probes run through torch.cuda"
        if not grows:
            text += "; this torch ignores expandable_segments, more memory is lost to fragments"
        mend = "torch 2.12 or newer for ROCm 7 or newer grows segments"
        yield _judged("ROCm", grows, text, mend, details={"expandable_segments": grows})
    works = bool(report.get("flash"))
    text = "kernels work" if works else problems.get("flash", "needs a GPU of compute capability 8.0 or newer")
    mend = "optional: pip install flash-attn --no-build-isolation; SDPA is used otherwise"
    yield _judged("flash-attn", works, text, mend)
    for extra in ("liger-kernel", "trl"):
        version = installed((extra,)).get(extra)
        if version is not None:
            yield _ok(extra, version, version=version)


def _gpus_finding(report: dict[str, Any], problems: dict[str, str]) -> Finding:
    if gpus := report.get("gpus"):
        text = "; ".join(
            f"{gpu['name']}, capability {gpu['capability'][0]}.{gpu['capability'][1]}, {gib(gpu['memory_bytes'])}"
            for gpu in gpus
        )
        return _ok("torch on the GPU", text, gpus=gpus)
    built = report.get("built_for", "")
    driver_warning = report.get("driver_says", "")
    if "gpus" in problems:
        text, mend = problems["gpus"], "update the driver, or install a torch built for the driver's CUDA version"
    elif report.get("rocm"):
        text = f"torch for ROCm {built} finds no GPU" + (f": {driver_warning}" if driver_warning else "")
        mend = "check amd-smi, HIP_VISIBLE_DEVICES and the user's groups (render, video)"
    elif report.get("torch") and not built:
        text = f"torch {report['torch']} is a build without CUDA"
        mend = "install a CUDA build: https://pytorch.org/get-started/locally/ (the dry run works without)"
    else:
        text = "torch finds no GPU" + (f": {driver_warning}" if driver_warning else "")
        mend = "check nvidia-smi and CUDA_VISIBLE_DEVICES; install a torch built for the driver's CUDA version"
    return Finding(name="torch on the GPU", level="missing", text=text, mend=mend)


KERNELS = (
    ("triton", "Triton", "install a C compiler (gcc): liger-kernel and trl's chunked loss need Triton"),
    ("nf4", "bitsandbytes NF4", "install a newer bitsandbytes (only QLoRA setups need it)"),
    ("adam8bit", "bitsandbytes AdamW 8-bit", "install a newer bitsandbytes (only 8-bit setups need it)"),
)
"""(what `ask_torch` calls it, what people do, how to mend it)."""


def _kernel_findings(report: dict[str, Any], problems: dict[str, str]) -> Iterator[Finding]:
    gpus = report.get("gpus")
    for key, name, mend in KERNELS:
        works = bool(report.get(key))
        untried = problems.get(key, "wrong results" if gpus else "kernels are tried on a GPU only")
        seconds = report.get("seconds", {}).get(key)
        text = f"kernels work on the GPU ({seconds or 0:.1f} s)" if works else untried
        yield _judged(name, works or not gpus, text, mend, details={"seconds": seconds})


def several_gpus(report: dict[str, Any], devices: tuple[str, ...]) -> Iterator[Finding]:
    """How many GPUs a job may have here, how they are connected, and what their ranks would speak through."""
    links = topology(devices)
    here = f"{len(devices)} here: {links.text()}" if devices else "no GPU here; --device cpu rehearses jobs over gloo"
    connections = [[*pair, kind] for pair, kind in sorted(links.pairs.items())]
    nvlinks = list(links.nvlinks)
    yield _ok("several GPUs", here, num_gpus=len(devices), nvlinks=nvlinks, connections=connections)
    ranks = report.get("ranks") or {}
    nccl, gloo = str(ranks.get("nccl", "")), bool(ranks.get("gloo"))
    problem = report.get("problems", {}).get("ranks", "this build of torch has none")
    missing = len(devices) > 1 and not nccl
    text = (nccl or f"not there ({problem})") + (", gloo for the CPU" if gloo else ", and no gloo for the CPU")
    mend = "install a torch with CUDA, NCCL and gloo: jobs on several GPUs need them"
    yield _judged("NCCL", gloo and not missing, text, mend, details={"nccl": nccl, "gloo": gloo})
    deepspeed = installed(("deepspeed",)).get("deepspeed")
    absent = f"not installed: ZeRO setups are planned but not probed ({packages_command('deepspeed')})"
    yield _ok("deepspeed", deepspeed or absent, version=deepspeed)


def _disk() -> Iterator[Finding]:
    for name, path in (("temporary directory", Path(tempfile.gettempdir())), ("working directory", Path.cwd())):
        free = shutil.disk_usage(path).free
        writable = os.access(path, os.W_OK)
        text = f"{path}: {gib(free)} free" + ("" if writable else ", not writable")
        mend = "free some space, or set TMPDIR / change the directory"
        details = {"free_bytes": free, "writable": writable}
        yield _judged(name, writable and free >= MIN_DISK_BYTES, text, mend, details=details)


def _caches() -> Iterator[Finding]:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    exists = home.is_dir()
    text = f"{home}" + ("" if exists else " (not there yet; planning needs no weights)")
    yield _ok("Hugging Face cache", text, path=str(home), exists=exists)


def findings_to_dict(findings: list[Finding]) -> dict[str, Any]:
    """The examination as JSON values."""
    return {
        "schema_version": 1,
        "can_probe": can_probe(findings),
        "findings": [asdict(finding) for finding in findings],
    }
