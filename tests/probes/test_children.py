"""No command runs what lies in the current folder: people `cd` into model folders that they downloaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.core import children
from probes import doctor
from tests.whole import WHOLE

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PLANTED = ("torch", "json", "sitecustomize", "usercustomize", "transformers", "probes", "planner", "typing_extensions")
PLAN = [sys.executable, "-P", "-c", "from finetune_planner.cli import main; main()"]
"""As the console script: the import path begins with no folder of the user's."""
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
PROBE = ["probe", ".", "--device", "cpu", "--method", "full", "--precision", "fp32", "--attention", "eager"]
PROBE += ["--seq-len", "16", "--micro-batch", "1", "--measure-seconds", "0.1", "--full-depth", "--json=full", "--again"]
PROBE += ["--limit", "600"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder that plants modules; each leaves a mark when it is imported."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    for name in PLANTED:
        (model / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    return model


def ran(folder: Path) -> str:
    mark = folder.parent / "ran"
    return mark.read_text() if mark.exists() else ""


def plan(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder.parent / "data"), **environment}
    return subprocess.run(
        [*PLAN, *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=600, check=False
    )


def test_planted_modules_would_run_without_safe_path(folder: Path) -> None:
    """The trap works."""
    subprocess.run([sys.executable, "-c", "import json, torch"], cwd=folder, capture_output=True, check=False)
    assert "torch" in ran(folder)


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="4 CPU seconds; every child starts by one function (below; TESTS_WHOLE=1)")
@pytest.mark.parametrize("more", [[], ["--gpus", "2", "--parallel", "ddp"]], ids=str)
def test_probe_runs_nothing_of_the_current_folder(folder: Path, more: list[str]) -> None:
    done = plan(folder, *PROBE, *more)
    assert ran(folder) == ""
    assert json.loads(done.stdout)["outcome"].get("step_times_s"), done.stdout + done.stderr


def test_commands_that_read_run_nothing_of_the_current_folder(folder: Path) -> None:
    (folder / "train.py").write_text("from trl import SFTTrainer\nSFTTrainer('.').train()\n")
    (folder / "trl.yaml").write_text("model_name_or_path: .\nmax_length: 64\n")
    card = ["--gpu", "rtx-4090"]
    commands = [
        [".", *card, "--no-dry-run", "--out", "out"],
        ["estimate", ".", *card, "--no-dry-run"],
        ["check", ".", *card],
        ["check", "train.py", *card, "--no-dry-run"],
        ["check", "trl.yaml", *card, "--no-dry-run", "--fix"],
        ["report", "out"],
        ["compare", "out", "out"],
        ["store", "export", "x.jsonl"],
        ["trace", *card, "--", "true"],
        ["which-model", *card, "--model", "."],
        ["compare-adapters", ".", *card, "--out", "adapters"],
        ["which-cluster", ".", *card, "--max-gpus", "2", "--tokens", "1M", "--method", "lora", "--out", "clusters"],
        ["which-gpu", ".", "--vendor", "Intel", "--method", "lora", "--out", "cards"],
        ["ui", "--model", ".", *card, "--static", "page"],
        ["confirm", "out", "--device", "cuda:9"],
    ]
    script = f"from finetune_planner.cli.app import run\nprint([run(words) for words in {commands!r}], flush=True)"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder.parent / "data")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    codes = json.loads(done.stdout.strip().splitlines()[-1])
    assert codes[0] == codes[1] == 0, done.stderr
    assert 70 not in codes, done.stderr
    assert ran(folder) == ""


def test_doctor_runs_nothing_of_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that tries torch, here with a torch of ours that the user put on PYTHONPATH."""
    user_folder = folder.parent / "own"
    user_folder.mkdir()
    (user_folder / "torch.py").write_text("__version__ = 'own'\nraise ImportError('mine')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f":{user_folder}:")
    monkeypatch.setattr(doctor, "TORCH_CHECK_S", 600.0)
    report = doctor.ask_torch()
    assert ran(folder) == ""
    assert report["problems"]["gpus"] == "ImportError: mine"


def test_children_of_children_keep_the_current_folder_out(folder: Path) -> None:
    """torchrun, submitit and the inductor start `python -m` of their own."""
    inner_script = "import json, importlib.util as known; print(known.find_spec('torch').origin, flush=True)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner_script!r}], check=False)"
    variables = {**children.child_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*children.python_argv("-c", script)], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    assert ran(folder) == ""
    assert "site-packages" in done.stdout


def test_submitted_job_runs_nothing_of_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    from probes.gpu.executors import SubmititExecutor

    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)
    with SubmititExecutor(folder.parent / "jobs", cluster="local") as executor:
        assert executor.environment("cpu", None).device == "cpu"
    assert ran(folder) == ""


def test_nothing_else_starts_a_python() -> None:
    """`sys.executable` is started in one place, shown in two others; a trace looks beside it for programs."""
    users = {
        path.relative_to(ROOT).as_posix()
        for room in ("planner", "probes", "search", "reports")
        for path in (ROOT / room).rglob("*.py")
        if "sys.executable" in path.read_text(encoding="utf-8")
    }
    assert users == {
        "planner/core/children.py",
        "planner/core/install.py",
        "probes/doctor.py",
        "probes/phantom/runner.py",
    }
    assert "import subprocess" not in (ROOT / "planner/core/install.py").read_text(encoding="utf-8")
    assert "Path(sys.executable).parent" in (ROOT / "probes/phantom/runner.py").read_text(encoding="utf-8")
    assert (ROOT / "probes/doctor.py").read_text(encoding="utf-8").count("sys.executable") == 1
