"""Whether the code that touches a GPU is still the one that ran on one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from benchmarks import last_run
from planner.core.children import ROOT


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "probes/meter.py": "torch.cuda.synchronize()",
        "probes/plain.py": "x = 1",
        "planner/hardware/driver.py": "nvml()",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_before_any_run_the_summary_says_that_none_was(tmp_path: Path) -> None:
    assert "no CUDA line of this project has ever run" in last_run.words(tmp_path / "nothing.json")


def test_what_changed_since_the_run_is_named(project: Path) -> None:
    path = project / "last_gpu_run.json"
    path.write_text(json.dumps(last_run.describe_run("NVIDIA H100, driver 580", project)))
    assert "is the one that ran on NVIDIA H100, driver 580" in last_run.words(path, project)
    (project / "probes" / "plain.py").write_text("x = 2")
    assert "is the one that ran" in last_run.words(path, project)
    (project / "probes" / "meter.py").write_text("torch.cuda.empty_cache()")
    text = last_run.words(path, project)
    assert text.startswith("replayed, not run since NVIDIA H100, driver 580")
    assert text.endswith("probes/meter.py changed")
    (project / "planner" / "hardware" / "driver.py").unlink()
    assert "planner/hardware/driver.py, probes/meter.py changed" in last_run.words(path, project)


def test_every_file_that_measures_a_gpu_is_watched() -> None:
    """Named by what they say; the few that say nothing of it are listed by hand and exist."""
    files = set(last_run.cuda_files())
    assert {"probes/gpu/measure.py", "probes/gpu/meters.py", "planner/hardware/driver.py", *last_run.ALWAYS} <= files
    assert not any(name.startswith(("probes/phantom", "probes/dryrun")) for name in files)
    assert all((ROOT / name).exists() for name in files)


def test_the_summary_of_a_test_run_says_so(pytestconfig: pytest.Config) -> None:
    from tests.conftest import pytest_terminal_summary

    lines: list[str] = []

    class Reporter:
        stats: Mapping[str, Sequence[object]] = MappingProxyType({})

        def write_line(self, text: str) -> None:
            lines.append(text)

    pytest_terminal_summary(Reporter())  # type: ignore[arg-type]
    assert lines == [f"GPU: {last_run.words()}"]
