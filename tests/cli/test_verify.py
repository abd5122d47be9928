"""`plan MODEL --out DIR --verify TARGET`: what a trace of the launch file changes, and when none is made."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_planner.cli.app import run
from planner.core.units import GIB
from probes.phantom.runner import Ended, TraceOrder
from tests.reports.factories import make_trace

DEVICE_BYTES = 11 * GIB // 2


def ended(status: str, num_steps: int, error: str = "") -> Ended:
    return Ended(exit_code=0, results=(make_trace(status=status, error=error, num_steps=num_steps),))


def plan(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[TraceOrder], Ended],
    *,
    words: tuple[str, ...] = (),
    code: int = 0,
) -> tuple[dict[str, object], TraceOrder]:
    """The launch of plan.json, and what was traced for it."""
    orders: list[TraceOrder] = []

    def run_traced(order: TraceOrder) -> Ended:
        orders.append(order)
        return answer(order)

    monkeypatch.setattr("probes.phantom.runner.run_traced", run_traced)
    arguments = ["gpt2", "--gpu", "t4", "--no-dry-run", "--no-history", "--out", str(out), "--target", "hf", *words]
    assert run([*arguments, "--verify", "hf"]) == code
    (launch,) = json.loads((out / "plan.json").read_text())["launch"]
    (order,) = orders
    return launch, order


def test_the_trace_of_the_launch_file_stands_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch, order = plan(tmp_path, monkeypatch, lambda order: ended("done", 2))
    assert (order.folder, order.options.limited, order.options.objective) == (tmp_path, False, "sft")
    assert order.card.key == "t4"
    assert order.command[0] == "python"
    assert (tmp_path / order.command[1]).is_file()
    assert (launch["level"], launch["peak_device_bytes"]) == ("trace", DEVICE_BYTES)
    out = " ".join(capsys.readouterr().out.split())
    assert "5.50 GiB on the device" in out
    chosen = json.loads((tmp_path / "plan.json").read_text())["chosen"]
    assert (chosen["trace"]["peak_device_bytes"], chosen["fits"]) == (DEVICE_BYTES, True)
    assert "Fits. Full fine-tuning: 5.50 GiB" in out
    reports = [(tmp_path / name).read_text() for name in ("report.md", "report.html")]
    assert all("It fits: 5.50 GiB" in text for text in reports)
    for text in (out, *reports):
        assert "trace ±3 %" in text
        assert "more than the error bands explain" in text  # GPT-2's formula says less than half of it
    assert "5.50 GiB of 14.56 GiB (trace)" in (tmp_path / order.command[1]).read_text()
    assert "5.50 GiB of 14.56 GiB (trace)" in (tmp_path / "launch" / "README.md").read_text()


def test_a_plan_that_the_trace_refutes_says_so_and_keeps_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch, _ = plan(tmp_path, monkeypatch, lambda order: ended("done", 2), words=("--memory-gib", "4"), code=1)
    out = " ".join(capsys.readouterr().out.split())
    assert "Do not run this yet, it does not fit" in out
    assert "Not written for hf: PREDICTED OUT OF MEMORY" in out
    assert launch["files"] == []
    assert not (tmp_path / "launch" / "hf" / "train_hf.py").exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ended("refused", 1, "a CUDA graph"), "a CUDA graph"),
        (ended("failed", 1, "KeyError: 'text'"), "KeyError"),
        (ended("ended", 0), "without an optimizer step"),
    ],
)
def test_a_launch_file_that_cannot_be_traced_keeps_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Ended, message: str
) -> None:
    launch, _ = plan(tmp_path, monkeypatch, lambda order: answer)
    out = " ".join(capsys.readouterr().out.split())
    assert launch["level"] != "trace"
    assert "not possible" in out
    assert message in out


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [("axolotl", 3, "not installed here"), ("deepspeed", 2, "cannot be traced"), ("nosuch", 2, "must be one of")],
)
def test_a_target_that_cannot_be_traced_here_is_refused_before_planning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("shutil.which", lambda *args, **kwargs: None)
    assert run(["gpt2", "--gpu", "t4", "--out", str(tmp_path / "out"), "--verify", target]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
