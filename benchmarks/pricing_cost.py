"""What noting and pricing operators adds to a dry run: the same runs with and without, in turn.

python -m benchmarks.pricing_cost [--rounds 5]        # needs the torch extra; CPU seconds of one process
"""

import argparse
import time
from collections import defaultdict
from statistics import median
from typing import Any
from unittest.mock import patch

from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.setup import TrainSetup
from planner.speed.run import run_speed
from probes.dryrun.api import report_for_config
from probes.dryrun.report import DryRunReport
from probes.dryrun.startup import load_libraries

GPU = find_gpu("h200")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "8B LoRA, checkpointing, Liger": ("Qwen/Qwen3-8B", {"method": "lora", "kernels": "liger", "checkpointing": 1}),
    "8B QLoRA": ("Qwen/Qwen3-8B", {"method": "qlora", "quantization": "nf4"}),
    "1B full, AdamW": ("meta-llama/Llama-3.2-1B", {"method": "full", "lora_rank": 0}),
}


def spent(name: str, fields: dict[str, Any], *, priced: bool) -> float:
    """CPU seconds of one dry run."""
    model = catalogue.load(name)
    assert model is not None
    setup = TrainSetup(**fields, seq_len_tokens=2048, micro_batch_seqs=2)
    capability = GPU.compute_capability or (9, 0)
    started = time.process_time()
    report = report_for_config(model.config, capability, setup)
    assert isinstance(report, DryRunReport)
    if priced:
        assert report.program is not None
        run_speed(report.program, GPU, setup)
    return time.process_time() - started


def main() -> None:
    """Times the cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    load_libraries()
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        for case, (name, fields) in CASES.items():
            for priced in (False, True) if turn % 2 else (True, False):
                if priced:
                    seconds = spent(name, fields, priced=True)
                else:
                    with patch("probes.dryrun.trace.OperatorLog", lambda: None):
                        seconds = spent(name, fields, priced=False)
                if turn:  # the first warms up
                    found[case, priced].append(seconds)
    for case in CASES:
        without, priced_s = (median(found[case, priced]) for priced in (False, True))
        print(f"{case:32} {without:.3f} s without, {priced_s:.3f} s with: {priced_s / without - 1:+.1%}")


if __name__ == "__main__":
    main()
