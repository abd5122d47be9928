"""The dry run of pipeline stages: as two real processes, truncated depth as full depth, refusals."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.planning.evidence.followed import why_not_traced
from planner.setup import TrainSetup
from probes.dryrun import DryRunReport
from tests.probes.dryrun_small import assert_same_figures, peaks, reported, small_config
from tests.probes.stage_rank import traced
from tests.whole import some

ROOT = Path(__file__).resolve().parents[2]
AMPERE = (8, 0)
DEEP = 12
PIPELINE: dict[str, Any] = {
    "method": "full", "lora_rank": 0, "parallel": "none", "precision": "bf16-pure", "seq_len_tokens": 48,
    "micro_batch_seqs": 2,
}  # fmt: skip
TWO = PIPELINE | {"num_gpus": 2, "pipeline_degree": 2, "accumulation_steps": 3, "attention": "eager"}
REAL = some(
    [
        TWO | {"optimizer": "sgd", "checkpointing": 0, "pipeline_schedule": "gpipe"},
        TWO | {"optimizer": "sgd", "checkpointing": 1},
    ],
    2,
)


def _real(python: Path, store: Path) -> list[list[dict[str, int]]]:
    """Peaks of both stages, setup by setup, of a real job of two processes."""
    done = subprocess.run(
        [str(python), "-m", "tests.probes.stage_rank", str(store), "llama", json.dumps(REAL)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [[json.loads(line) for line in Path(f"{store}{stage}").read_text().splitlines()] for stage in (0, 1)]
    return [list(pair) for pair in zip(*lines, strict=True)]


@pytest.mark.slow
@pytest.mark.processes
def test_dry_run_of_pipeline_stages_equals_real_processes(tmp_path: Path, warm_programs: Path) -> None:
    dry = [[peaks(traced("llama", fields, "meta", stage)) for stage in (0, 1)] for fields in REAL]
    assert {"forward", "forward/0", "backward/0", "step"} <= set(dry[0][0])
    assert "loss" in dry[0][1]
    assert dry == _real(warm_programs / "python", tmp_path / "store")


def _report(fields: dict[str, Any], **options: Any) -> DryRunReport:
    return reported(small_config("llama", num_hidden_layers=DEEP), AMPERE, TrainSetup(**fields), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    some([{"checkpointing": 1}, {"checkpointing": 0, "pipeline_schedule": "gpipe", "optimizer": "adamw"}], 2),
    ids=str,
)
def test_stage_of_repeated_depth_equals_full_depth(fields: dict[str, Any]) -> None:
    setup = PIPELINE | {"num_gpus": 3, "pipeline_degree": 3, "accumulation_steps": 3} | fields
    short, full = _report(setup), _report(setup, full_depth=True)
    assert_same_figures(short, full)
    assert short.prediction.notes == full.prediction.notes


def test_pipeline_names_its_stages_and_what_ran() -> None:
    report = _report(PIPELINE | {"num_gpus": 4, "pipeline_degree": 4, "accumulation_steps": 4})
    notes = " ".join(report.prediction.notes)
    assert "1f1b schedule ran" in notes
    assert all(f" {stage}: " in notes for stage in (1, 2, 4))
    assert ("activations", "stage boundary buffers") in report.phase_groups["backward"]


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_stages() -> None:
    def peak(schedule: str, micro_batches: int) -> int:
        fields = {"pipeline_schedule": schedule, "accumulation_steps": micro_batches, "checkpointing": 0}
        return _report(PIPELINE | {"num_gpus": 2, "pipeline_degree": 2} | fields).prediction.peak_allocated_bytes

    growth = peak("1f1b", 4) - peak("1f1b", 3)  # from the second on, gradients are alive beside what is in flight
    many = peak("gpipe", 3) - peak("gpipe", 2)
    assert 0 <= 10 * growth < many


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"precision": "bf16-mixed"}, "only inside FSDP2"),
        ({"accumulation_steps": 1}, "at least as many micro-batches"),
        ({"num_gpus": 4, "parallel": "ddp"}, "does not combine"),
        ({"num_gpus": 8, "tensor_degree": 2, "parallel": "fsdp2"}, "tensor parallelism in"),
    ],
    ids=str,
)
def test_pipelines_that_no_engine_runs_are_refused(fields: dict[str, Any], words: str) -> None:
    setup = TrainSetup(**(TWO | fields))
    assert words in why_not_traced(setup)
