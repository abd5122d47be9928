"""A plug-in that is installed adds its card, price and target; one that fails is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune-planner-acme"


def plan(place: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """`plan` as a process that sees what is installed in a place."""
    code = "import sys; from finetune_planner.cli import main; main(sys.argv[1:])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built and installed by pip without a network."""
    place = tmp_path_factory.mktemp("plugins")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / EXAMPLE.name)
    words = [
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(place),
        str(source),
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place


def test_its_card_price_and_target_are_planned_with(installed: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    words = ["Qwen/Qwen2.5-0.5B", "--gpu", "acme a1 24gb", "--target", "acme", "--no-dry-run", "--json=full"]
    done = plan(installed, *words, "--out", str(out))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["workload"]["gpu"]["key"] == "acme-a1"
    assert document["workload"]["price_per_hour"] == 0.4
    assert "Acme's cluster" in document["workload"]["price_source"]
    job = json.loads((out / "launch" / "acme" / "job.json").read_text())
    planned = {key: value for key, value in document["chosen"]["setup"].items() if key not in ("model", "gpu")}
    assert job["setup"].items() <= planned.items()
    assert "acme-train launch/acme/job.json" in (out / "launch" / "run.sh").read_text()


def test_without_it_nobody_knows_the_card(tmp_path: Path) -> None:
    done = plan(tmp_path, "Qwen/Qwen2.5-0.5B", "--gpu", "acme-a1", "--no-dry-run")
    assert done.returncode == 2
    assert "hint: " in done.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no licence')", "no licence"),
        ("def gpus(): return [{'key': 'x', 'colour': 'red'}]", "no column 'colour'"),
        ("def gpus(): return [{'name': 'x'}]", "a row without 'key'"),
        ("gpus = 3", "TypeError"),
    ],
)
def test_one_that_fails_is_named(code: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "broken_cards.py").write_text(code)
    metadata = tmp_path / "finetune_planner_broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: finetune-planner-broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[finetune_planner.gpus]\ncards = broken_cards:gpus\n")
    done = plan(tmp_path, "Qwen/Qwen2.5-0.5B", "--gpu", "t4", "--no-dry-run")
    assert done.returncode == 3, done.stderr
    assert reason in done.stderr
    assert "hint: pip uninstall finetune-planner-broken, or mend it" in done.stderr
