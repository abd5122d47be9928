"""Traces emitted launch files of several GPUs as `accelerate launch` starts them, and holds the dry run against them.

    python -m benchmarks.trace_shards [NAME ...]

A truncated Llama-3.2-1B on A100s: the command of the launch file runs whole, with all its processes; rank 0 is
followed. Results: benchmarks/data/trace_shards.json, by name; cases that were not named stay.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.trace_vs_dryrun import GPU, SEQ_LEN, config_of, prepared
from planner.hardware.gpus import find_gpu
from planner.setup import TrainSetup
from probes.dryrun.api import report_for_config
from probes.dryrun.report import DryRunReport

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "data" / "trace_shards.json"
NUM_LAYERS = 4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full bf16-autocast, 4 GPUs, trl": ("trl", {"method": "full", "loss": "chunked"}),
    "lora bf16-autocast, 4 GPUs, trl": ("trl", {"method": "lora", "loss": "chunked"}),
    "lora bf16-autocast, 4 GPUs, no checkpointing, hf": ("hf", {"method": "lora", "loss": "full", "checkpointing": 0}),
    "full bf16-pure, 2 GPUs, hf": (
        "hf",
        {"method": "full", "loss": "full", "precision": "bf16-pure", "num_gpus": 2},
    ),
    "full bf16-autocast, parameters offloaded, 4 GPUs, trl": (
        "trl",
        {"method": "full", "loss": "chunked", "offload": "parameters"},
    ),
    "full bf16-autocast, tensor parallel, 2 GPUs, hf": (
        "hf",
        {"method": "full", "loss": "full", "parallel": "none", "num_gpus": 2, "tensor_degree": 2},
    ),
}


def setup_of(changes: dict[str, Any]) -> TrainSetup:
    """The setup of a case."""
    common = {"parallel": "fsdp2", "num_gpus": 4, "precision": "bf16-autocast", "checkpointing": 1, "kernels": "eager"}
    rank = 0 if changes["method"] == "full" else 16
    sizes = {"micro_batch_seqs": 4, "accumulation_steps": 2, "seq_len_tokens": SEQ_LEN, "lora_rank": rank}
    return TrainSetup(**{**common, **sizes, **changes})


def traced(tool: str, setup: TrainSetup) -> dict[str, Any]:
    """What `plan trace` answers about the launch file's command."""
    with tempfile.TemporaryDirectory() as name, prepared(tool, setup, config_of(NUM_LAYERS), Path(name)) as words:
        environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(ROOT)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        while "=" in words[0]:
            variable, _, value = words.pop(0).partition("=")
            environment[variable] = value
        plan = [sys.executable, "-c", "from finetune_planner.cli import main; main()"]
        done = subprocess.run(
            [*plan, "trace", "--gpu", GPU, "--yes", "--json=full", "--", *words],
            cwd=name, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not done.stdout:
            raise RuntimeError(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def main() -> None:
    """Runs the cases and prints both figures of each."""
    capability = find_gpu(GPU).compute_capability
    assert capability is not None
    for name in sys.argv[1:] or CASES:
        tool, changes = CASES[name]
        setup = setup_of(changes)
        found = traced(tool, setup)
        report = report_for_config(config_of(NUM_LAYERS), capability, setup)
        assert isinstance(report, DryRunReport), report
        dry = report.prediction
        row = {
            "traced_bytes": found["peak_allocated_bytes"],
            "dry_run_bytes": dry.peak_allocated_bytes,
            "traced_phases": found["phase_peaks_bytes"],
            "dry_run_phases": dict(dry.phase_peaks_bytes),
        }
        table = json.loads(OUT.read_text()) if OUT.exists() else {}
        OUT.write_text(json.dumps({**table, name: row}, indent=1) + "\n")
        error = row["dry_run_bytes"] / row["traced_bytes"] - 1
        print(f"{name:50s} traced {row['traced_bytes']:,} dry run {row['dry_run_bytes']:,} ({100 * error:+.2f} %)")


if __name__ == "__main__":
    main()
