"""The micro-benchmark runs on any device; here on the CPU, with a budget of a moment."""

import json

import pytest

torch = pytest.importorskip("torch")

from planner.core.errors import EnvironmentProblem  # noqa: E402
from planner.speed.roofline import load_calibration  # noqa: E402
from planner.speed.roofline.local import gpu_from_microbench, microbench_from_dict, with_microbench  # noqa: E402
from probes.gpu import microbench  # noqa: E402


def test_microbenchmark_measures_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbench, "CPU_COPY_BYTES", 1 << 22)
    figures = microbench.microbenchmark("cpu", budget_s=0.2)
    assert json.loads(json.dumps(figures)) == figures
    assert figures["matmul_flops_per_s"]["fp32"] > 1e8
    assert figures["copy_bytes_per_s"] > 1e7
    assert 1e-8 < figures["issue_s"] < 1e-2
    bench = microbench_from_dict(figures)
    card = gpu_from_microbench(bench)
    calibration = with_microbench(load_calibration(), card, bench)
    assert calibration.fp32_share_for(card) == pytest.approx(1.0)


def test_microbenchmark_names_a_device_that_does_not_work() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(EnvironmentProblem, match="cuda:0"):
        microbench.microbenchmark("cuda:0")


@pytest.mark.gpu
def test_microbenchmark_measures_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    figures = microbench.microbenchmark("cuda:0")
    assert figures["matmul_flops_per_s"]["fp16"] > figures["matmul_flops_per_s"]["fp32"]
    assert figures["copy_bytes_per_s"] > 1e10
