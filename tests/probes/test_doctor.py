"""`plan doctor`: every finding says how to mend it, and a broken library is a finding, not a traceback."""

import json
import subprocess
from typing import Any

import pytest
import torch

from finetune_planner.cli.app import run
from planner.core.install import install_command
from probes import doctor, doctor_torch


@pytest.mark.slow
def test_doctor_finds_this_machine_and_says_how_to_mend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "TORCH_CHECK_S", 600.0)
    code = run(["doctor", "--json=full"])
    document = json.loads(capsys.readouterr().out)
    assert document["can_probe"] == torch.cuda.is_available()
    assert code == (0 if document["can_probe"] else 3)
    by_name = {finding["name"]: finding for finding in document["findings"]}
    assert {"Python", "NVIDIA driver", "torch", "torch on the GPU", "bitsandbytes NF4", "flash-attn"} <= set(by_name)
    assert {finding["level"] for finding in document["findings"]} <= {"ok", "warning", "missing"}
    assert all(finding["mend"] for finding in document["findings"] if finding["level"] != "ok")
    assert by_name["torch"]["text"] == torch.__version__


def test_without_torch_nothing_of_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be installed is said once, and no driver or kernel is blamed for it."""
    monkeypatch.setattr(doctor, "installed", lambda names: {})
    monkeypatch.setattr(doctor, "ask_torch", lambda: pytest.fail("asked"))
    findings = doctor.examine()
    assert not doctor.can_probe(findings)
    by_name = {finding.name: finding for finding in findings}
    assert by_name["torch"].mend == install_command("torch")
    assert not {"torch on the GPU", "bitsandbytes NF4", "flash-attn", "NCCL"} & set(by_name)
    assert {"Python", "NVIDIA driver", "temporary directory", "Hugging Face cache"} <= set(by_name)


def done(stdout: str = "", stderr: str = "", code: int = 0) -> Any:
    return lambda *args, **kwargs: subprocess.CompletedProcess(args, code, stdout, stderr)


def hang(*args: Any, **kwargs: Any) -> Any:
    raise subprocess.TimeoutExpired("python", 1.0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (done(stderr="Segmentation fault", code=-11), "status -11: Segmentation fault"),
        (done(stderr="", code=1), "no output"),
        (hang, "driver hangs"),
        (done(stdout='DOCTOR{"torch": "2.9", "built_for": "", "gpus": [], "problems": {}}'), "without CUDA"),
        (done(stdout='DOCTOR{"torch": "2.9", "built_for": "13.0", "gpus": [], "problems": {}}'), "finds no GPU"),
    ],
)
def test_torch_that_is_broken_is_a_finding(answer: Any, words: str) -> None:
    findings = list(doctor.torch_findings(doctor.ask_torch(answer)))
    assert findings[0].level == "missing"
    assert words in findings[0].text
    assert findings[0].mend


def test_torch_that_sees_a_gpu_is_reported_with_its_facts() -> None:
    report = {
        "gpus": [{"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 150 << 30}],
        "bf16": True,
        "issue_s": 22.8e-6,
        "nf4": True,
        "adam8bit": None,
        "flash": None,
        "problems": {
            "adam8bit": "RuntimeError: no kernel",
            "flash": "ModuleNotFoundError: No module named 'flash_attn'",
        },
    }
    by_name = {finding.name: finding for finding in doctor.torch_findings(report)}
    assert "capability 9.0, 150.00 GiB" in by_name["torch on the GPU"].text
    assert by_name["bf16"].level == "ok"
    assert by_name["CPU"].text == "issues a kernel in 22.8 microseconds, 3.00 times the host that speeds assume"
    assert (by_name["CPU"].level, "calibrate" in by_name["CPU"].mend) == ("warning", True)
    assert by_name["bitsandbytes NF4"].text.startswith("kernels work on the GPU")
    assert by_name["bitsandbytes AdamW 8-bit"].text == "RuntimeError: no kernel"
    assert by_name["flash-attn"].level == "warning"


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"
GPU = '"gpus": [{"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 1}]'


def test_what_torch_says_about_the_driver_is_shown() -> None:
    """NVML answers, torch cannot use the driver."""
    answer = done(stdout=f'DOCTOR{{"torch": "2.11", "built_for": "13.0", "gpus": [], "driver_says": "{TOO_OLD}"}}')
    finding = next(doctor.torch_findings(doctor.ask_torch(answer)))
    assert finding.level == "missing"
    assert TOO_OLD in finding.text


@pytest.mark.parametrize(
    ("code", "stderr", "hung"), [(-11, "Segmentation fault", False), (0, "", True)], ids=["crash", "hang"]
)
def test_a_check_that_kills_or_hangs_the_child_loses_nothing_before_it(code: int, stderr: str, hung: bool) -> None:
    lines = [
        f'DOCTOR{{"torch": "2.11", "built_for": "13.0", {GPU}, "seconds": {{"gpus": 1}}}}',
        'DOCTOR{"bf16": true, "seconds": {"bf16": 0.1}}',
        'DOCTOR{"problems": {"triton": "RuntimeError: Failed to find C compiler"}, "seconds": {"triton": 0.2}}',
    ]

    def answer(*args: Any, **kwargs: Any) -> Any:
        if hung:
            raise subprocess.TimeoutExpired("python", 1.0, output="\n".join(lines).encode())
        return subprocess.CompletedProcess(args, code, "\n".join(lines), stderr)

    by_name = {finding.name: finding for finding in doctor.torch_findings(doctor.ask_torch(answer))}
    assert by_name["torch on the GPU"].level == "ok"
    assert by_name["bf16"].level == "ok"
    assert by_name["Triton"].text == "RuntimeError: Failed to find C compiler"
    assert "gcc" in by_name["Triton"].mend
    words = "driver hangs" if hung else "Segmentation fault"
    assert words in by_name["bitsandbytes NF4"].text


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU all checks run")
def test_the_childs_checks_are_told_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine: no GPU, no kernel is tried, and bitsandbytes is not imported for nothing."""
    doctor_torch.main()
    lines = [json.loads(line.removeprefix("DOCTOR")) for line in capsys.readouterr().out.splitlines()]
    assert [list(line["seconds"]) for line in lines] == [["gpus"], ["ranks"]]
    assert lines[0]["torch"] == torch.__version__
    broken = doctor_torch.tell(doctor_torch.triton)
    assert "triton" in broken["problems"]


@pytest.mark.parametrize(
    ("version", "low", "high", "inside"),
    [
        ("2.13.0+cpu", "2.9", "3", True),
        ("2.8.1", "2.9", "3", False),
        ("3.0.0", "2.9", "3", False),
        ("0.50.2", "0.48", "1", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, low: str, high: str, inside: bool) -> None:
    assert (doctor.at_least(version, low) and not doctor.at_least(version, high)) == inside
