"""Whether this project's GPU code fits a CUDA build of PyTorch, on a machine without a GPU.

    bash tools/cuda_build.sh FOLDER [VERSION]     makes a venv with that build (about 5 GB, some minutes) and runs this
    python tools/cuda_build.py                    with whatever torch is installed

Looked at: every name of torch.cuda, torch._C and NVML that the code uses exists there; every environment variable that
it sets is read by the libraries; what torch says without a driver is called the machine's fault; doctor and a probe of
cuda:0 end as they should. Exit 0: all of it, 1: something is missing, 2: a build without CUDA.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GUARDED = {"torch._C._cuda_clearCublasWorkspaces"}
"""Asked for by `getattr` with a default."""
ROOMS = ("torch.cuda", "torch._C", "torch.version", "torch.backends.cuda")
VARIABLES = {
    "PYTORCH_ALLOC_CONF": "c10",
    "PYTORCH_CUDA_ALLOC_CONF": "c10",
    "expandable_segments": "c10",
    "TRITON_CACHE_DIR": "triton",
}
"""Name -> where it must occur: in torch's libraries, or in Triton's sources."""
PROBE = """
import json, sys
from planner.setup.outcome import ProbeFailure
from planner.setup import TrainSetup
from probes.gpu.request import ProbeRequest
from probes.gpu.runner import run_probe
config = json.loads(sys.argv[1])
found = run_probe(ProbeRequest(model_id="tiny", config=config, setup=TrainSetup(seq_len_tokens=64), device="cuda:0"))
print("OUTCOME", found.kind.value if isinstance(found, ProbeFailure) else "measured", getattr(found, "message", ""))
"""


def names_used(path: Path) -> Iterator[str]:
    """Dotted names below `ROOMS`, and `nvml...` of whatever module, that a file uses."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", name) and name.startswith(tuple(f"{room}." for room in ROOMS)):
                yield name
            elif re.match(r"nvml[A-Z]", node.attr) and isinstance(node.value, ast.Name):
                yield f"pynvml.{node.attr}"


def every_name() -> dict[str, list[str]]:
    """Name -> the files that use it."""
    from benchmarks.last_run import cuda_files

    by_name: dict[str, list[str]] = {}
    for file in cuda_files(ROOT):
        if file != "planner/hardware/amd.py":
            for name in names_used(ROOT / file):
                by_name.setdefault(name, []).append(file)
    return by_name


def missing(names: dict[str, list[str]]) -> Iterator[str]:
    import importlib

    for name, files in sorted(names.items()):
        package, *parts = name.split(".")
        place: Any = importlib.import_module(package)
        for part in parts:
            place = getattr(place, part, LookupError)
            if place is LookupError:
                if name not in GUARDED:
                    yield f"{name} does not exist ({', '.join(sorted(set(files)))})"
                break


def unread_variables() -> Iterator[str]:
    """Environment variables and settings that no library names."""
    import torch

    libraries = [path.read_bytes() for path in sorted(Path(torch.__file__).parent.glob("lib/libc10*.so"))]
    for name, where in VARIABLES.items():
        if where == "c10":
            is_read = any(name.encode() in data for data in libraries)
        else:
            import triton

            is_read = any(
                name in path.read_text(errors="ignore") for path in Path(triton.__file__).parent.rglob("*.py")
            )
        if not is_read:
            yield f"{name} is read by nothing in {where}"


def without_driver() -> Iterator[str]:
    """What happens where there is no GPU, held against what should."""
    import torch

    from benchmarks.contact.steps import REHEARSED
    from probes.gpu.failures import classify_exception

    if torch.cuda.is_available():
        return
    try:
        torch.empty(1, device="cuda")
        yield "an allocation on cuda without a driver succeeded"
    except (RuntimeError, AssertionError) as error:
        kind, message = classify_exception(error)
        print(f"  torch without a driver: {message}: {kind.value}")
        if kind.value != "machine":
            yield f"no driver is called {kind.value}: {message}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    doctor = subprocess.run(
        [sys.executable, "-c", "from finetune_planner.cli.app import main; main()", "doctor", "--json=full"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if doctor.returncode != 3 or json.loads(doctor.stdout)["can_probe"]:
        yield f"doctor ended with {doctor.returncode}: {doctor.stderr[-500:]}"
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(REHEARSED)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    outcome = next((line for line in probe.stdout.splitlines() if line.startswith("OUTCOME")), probe.stderr[-500:])
    print(f"  a probe of cuda:0: {outcome}")
    if not outcome.startswith("OUTCOME machine"):
        yield f"a probe without a driver is no machine fault: {outcome}"


def main() -> int:
    import torch

    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")
    if not torch.version.cuda:
        print("a build without CUDA: nothing can be said", file=sys.stderr)
        return 2
    names = every_name()
    problems = [*missing(names), *unread_variables(), *without_driver()]
    print(f"  {len(names)} names of torch.cuda, torch._C and NVML, {len(VARIABLES)} variables looked for")
    for problem in problems:
        print(f"  {problem}")
    print("wrong" if problems else "all there")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
