"""Kernel families in the dry run: the same tensors as the formula counts, and as Liger's own code keeps under the
phantom tracer."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from planner.hardware.gpus import find_gpu  # noqa: E402
from planner.memory.model import predict_memory  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from planner.setup.outcome import FailureKind  # noqa: E402
from probes.gpu.failures import classify_exception  # noqa: E402
from probes.stack.build import build_model  # noqa: E402
from probes.stack.kernels import KernelsMissing  # noqa: E402
from tests.planner.helpers import loaded  # noqa: E402
from tests.probes.dryrun_small import dried, small_config  # noqa: E402

TRACED = Path(__file__).parents[2] / "benchmarks/data/trace_liger_vs_dryrun.json"
AGREES = 0.002
"""Of the whole peak; both count the same storages but for a few small tensors that a trainer holds."""
SAVED_AGREES = 0.015
"""Of what a family saves, where nothing is checkpointed: the eager formula counts 8 MiB of 13 GiB too much."""


def test_the_dry_run_saves_what_the_formula_says() -> None:
    model, gpu = loaded("meta-llama/llama-3.2-1b"), find_gpu("a100-80gb")
    peaks = {}
    for kernels in ("eager", "liger", "fused"):
        setup = TrainSetup(kernels=kernels, checkpointing=0, loss="chunked", seq_len_tokens=1024, micro_batch_seqs=2)
        prediction = dried(model, gpu, setup)
        formula = predict_memory(model, gpu, setup).peak_allocated_bytes
        peaks[kernels] = (prediction.peak_allocated_bytes, formula)
    for kernels in ("liger", "fused"):
        saved = [eager - peak for eager, peak in zip(peaks["eager"], peaks[kernels], strict=True)]
        assert saved[1] == pytest.approx(saved[0], rel=SAVED_AGREES), (kernels, peaks)


def test_the_dry_run_keeps_what_ligers_own_code_keeps() -> None:
    """Recorded: `trl sft` and a plain script on a phantom A100, liger-kernel 0.8.5's own Python
    (benchmarks/trace_vs_dryrun.py --kernels liger)."""
    rows = json.loads(TRACED.read_text())["rows"]
    compared = [row["error_fraction"] for row in rows.values() if "error_fraction" in row]
    assert len(compared) >= 7
    assert max(map(abs, compared)) < AGREES, rows


@pytest.mark.parametrize(
    ("kernels", "there", "words"),
    [("fused", True, "Axolotl or Unsloth"), ("liger", False, "pip install"), ("liger", True, "on a GPU only")],
)
def test_a_real_device_that_cannot_run_the_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, kernels: str, there: bool, words: str
) -> None:
    monkeypatch.setattr("probes.stack.kernels.find_spec", lambda name: object() if there else None)
    setup = TrainSetup(kernels=kernels, seq_len_tokens=64)
    with pytest.raises(KernelsMissing, match=words) as missing:
        build_model(small_config("llama"), setup, device="cpu")
    assert classify_exception(missing.value)[0] is FailureKind.UNSUPPORTED  # what may be installed later is no crash
