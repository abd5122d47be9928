"""tools/cuda_build.py: which names it looks for, and that it notices one that is not there."""

import subprocess
from pathlib import Path

import pytest
import torch

from planner.core.children import ROOT, child_environment
from tools import cuda_build


def test_names_are_collected_from_the_code(tmp_path: Path) -> None:
    path = tmp_path / "meter.py"
    path.write_text(
        "torch.cuda.memory._snapshot()\nmodule.nvmlInit()\ntorch.cuda.is_available\nmeter.nvml()\nx.cuda.y\n"
    )
    assert set(cuda_build.names_used(path)) == {
        "torch.cuda.memory._snapshot",
        "torch.cuda.memory",
        "pynvml.nvmlInit",
        "torch.cuda.is_available",
    }


def test_the_code_uses_what_it_measures_with() -> None:
    names = cuda_build.every_name()
    assert {"torch.cuda.max_memory_reserved", "torch.cuda.Event", "pynvml.nvmlDeviceGetMemoryInfo"} <= set(names)
    assert "probes/gpu/meters.py" in names["torch.cuda.max_memory_reserved"]


def test_a_name_that_is_gone_is_told() -> None:
    """The public half of torch.cuda is there in a CPU build too; NVML's names are all in its package."""
    names = {name: files for name, files in cuda_build.every_name().items() if "._" not in name}
    assert list(cuda_build.missing(names)) == []
    gone = list(cuda_build.missing({"torch.cuda.max_memory_guessed": ["probes/x.py"]}))
    assert gone == ["torch.cuda.max_memory_guessed does not exist (probes/x.py)"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build with CUDA is looked at, not refused")
def test_a_build_without_cuda_is_refused(warm_programs: Path) -> None:
    done = subprocess.run(
        [str(warm_programs / "python"), str(ROOT / "tools" / "cuda_build.py")],
        capture_output=True, text=True, check=False, env=child_environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing can be said" in done.stderr
