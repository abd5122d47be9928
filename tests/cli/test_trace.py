"""`plan trace`: the child process, its exit codes and its answer.

The first starts as a user starts it; the others are forked from a process that has imported the libraries, outside of
any protection, and therefore without it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune_planner.cli.app import run

LOOP = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(50):
    out = model(torch.randn({rows}, 1024, device="cuda"))
    out.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit("trained to the end")
"""

CAUGHT = """
import torch
torch.zeros(1).cuda()
try:
    torch.cuda.CUDAGraph()
except Exception:
    raise SystemExit(1)
"""
CHILDREN = f"import subprocess, sys\nLOOP = {LOOP.format(rows=8)!r}\n"


@pytest.fixture
def warm_python(warm_programs: Path) -> str:
    """A Python that has imported torch when it starts."""
    return str(warm_programs / "python")


def trace(tmp_path: Path, program: str, *options: str, python: str = sys.executable) -> int:
    script = tmp_path / "train.py"
    script.write_text(program)
    if python != sys.executable:
        options = (*options, "--unsafe-writes")
    return run(["trace", "--gpu", "rtx-4090", *options, "--", python, str(script)])


def test_a_loop_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(rows=1024))
    # a Python that ignores all that it is told, whose program would have a GPU
    words = ["sh", "-c", f"env -i CUDA_VISIBLE_DEVICES=0 {sys.executable} -I {tmp_path}/train.py --hub_token s3cr3t-a"]
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-b")
    monkeypatch.setenv("PWD", str(tmp_path))  # no secret
    words += ["--password", "s3cr3t-c", "postgresql://me:s3cr3t-d@host/", "s3cr3t-b"]
    code = run(["trace", "--gpu", "rtx-4090", "--yes", "--json=full", "--out", str(tmp_path / "out"), "--", *words])
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    written = (path.read_text() for path in (tmp_path / "out").iterdir())
    assert not any("s3cr3t" in text for text in (captured.out, captured.err, *written))
    assert (code, answer["verdict"], answer["status"], answer["num_steps"]) == (0, "fits", "done", 2)
    weights = 2 * 1024 * 4096 * 4 + (4096 + 1024) * 4
    assert answer["peak_allocated_bytes"] > 4 * weights
    assert answer["peak_device_bytes"] == answer["peak_reserved_bytes"] + answer["context_bytes"]
    assert sum(row["size_bytes"] for row in answer["by_category"]) == pytest.approx(
        answer["peak_allocated_bytes"], rel=0.01
    )
    lines = {row["name"] for row in answer["by_line"]}
    assert {f"{tmp_path}/train.py:{number}" for number in (4, 7, 8)} <= lines
    assert json.loads((tmp_path / "out" / "trace.json").read_text()) == answer


def test_a_loop_that_does_not_fit_names_the_line_and_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], warm_python: str
) -> None:
    code = trace(tmp_path, LOOP.format(rows=1 << 20), "--yes", python=warm_python)
    out = " ".join(capsys.readouterr().out.split())
    assert code == 1
    assert "It does not fit: " in out
    assert "train.py:7 (forward): asked for 16.00 GiB" in out


def test_it_never_runs_a_program_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    assert trace(tmp_path, f"open({str(mark)!r}, 'w')") == 2
    assert "--yes" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("print('no torch')", 3, "without PyTorch"),
        ("import torch", 3, "without putting anything on the GPU"),
        ("import torch; torch.zeros(1).cuda(); raise ValueError('mine')", 2, "ValueError: mine"),
        ("import torch; torch.zeros(1).cuda(); torch.cuda.current_stream().nothing()", 3, "as it may do here alone"),
        (CAUGHT, 3, "CUDA graph"),  # also where the program goes on
        (f"{CHILDREN}[subprocess.run([sys.executable, '-c', LOOP]) for _ in range(2)]", 3, "2 of its processes"),
        ("import socket; socket.create_connection(('192.0.2.1', 80), 1)", 2, "no network"),
    ],
)
def test_what_cannot_be_traced_is_no_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], warm_python: str, program: str, code: int, message: str
) -> None:
    python = warm_python if "torch" in program.replace("'no torch'", "") else sys.executable
    assert trace(tmp_path, program, "--yes", python=python) == code
    output = capfd.readouterr()
    assert output.out == ""
    assert message in output.err


def test_an_unknown_program_is_the_users_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--gpu", "rtx-4090", "--yes", "--", "no-such-program"]) == 2
    assert run(["trace", "--gpu", "rtx-4090", "--yes", "--image-size", "1024", "--", "python"]) == 2
    errors = capsys.readouterr().err
    assert "expected WIDTHxHEIGHT" in errors
    assert "no program 'no-such-program'" in errors


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


WAITS = """
import os, sys, time
from pathlib import Path
Path("pid.part").write_text(str(os.getpid()))
Path("pid.part").rename("pid")
time.sleep(600)
"""


@pytest.mark.processes
def test_a_trace_that_is_terminated_takes_its_program_along(tmp_path: Path, warm_python: str) -> None:
    """As Slurm and `timeout` end it; the program has a session of its own."""
    (tmp_path / "train.py").write_text(WAITS)
    words = ["trace", "--gpu", "rtx-4090", "--yes", "--unsafe-writes", "--", warm_python, "train.py"]
    code = f"from finetune_planner.cli.app import run; raise SystemExit(run({words!r}))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    planner = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "pid").exists():
            assert planner.poll() is None
            time.sleep(0.02)
        program = int((tmp_path / "pid").read_text())
        planner.send_signal(signal.SIGTERM)
        assert planner.wait(timeout=300) == 128 + signal.SIGTERM
    finally:
        planner.kill()
    while alive(program):  # its server ends it, when the client that the trace started is gone
        time.sleep(0.02)


def test_a_trainer_that_is_not_installed_is_no_fault_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import axolotl.cli.train\n")
    code = run(["trace", "--gpu", "rtx-4090", "--yes", "--", sys.executable, str(tmp_path / "train.py")])
    errors = capsys.readouterr().err
    assert code == 3
    assert "needs axolotl, which is not installed here" in errors
    assert f"plan check {tmp_path / 'train.py'}" in errors
