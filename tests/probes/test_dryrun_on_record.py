"""What the dry run finds of five small models, as on record: no byte and no moment changes unnoticed.

Whether it is right other tests say (against CUDA's own rules, against runs of every layer, against measurements); this
one says that it changed. The libraries decide too: the record is of the tested set. `UPDATE_DOCS=1 pytest
tests/probes/test_dryrun_on_record.py` writes it anew: look at the difference before committing.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.setup import TrainSetup
from tests.probes.dryrun_small import reported, small_config

RECORD = Path(__file__).with_name("dryrun_on_record.json")
VERSIONS = {name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")}
FULL = {"method": "full", "lora_rank": 0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 8}, {"checkpointing": 2, "lora_dropout": 0.1, "loss": "liger"}),
    "gpt2": ("gpt2", {"n_layer": 4}, {**FULL, "attention": "eager", "checkpointing": 0, "optimizer": "adafactor"}),
    "mixtral": ("mixtral", {}, {"accumulation_steps": 2, "attention": "eager", "optimizer": "adamw-8bit"}),
    "gemma2": ("gemma2", {"num_hidden_layers": 6}, {"method": "qlora", "quantization": "int8", "loss": "chunked"}),
    "qwen2": ("qwen2", {"num_hidden_layers": 8}, {**FULL, "precision": "bf16-mixed", "checkpointing": 0}),
}


def told(name: str) -> dict[str, Any]:
    """One report, without what differs from run to run."""
    model_type, changes, fields = CASES[name]
    setup = TrainSetup(**{"seq_len_tokens": 64, "micro_batch_seqs": 2, "lora_rank": 4, **fields})
    report = reported(small_config(model_type, **changes), (9, 0), setup)
    return {
        "phases": dict(report.prediction.phase_peaks_bytes),
        "reserved": report.prediction.peak_reserved_bytes,
        "device": report.prediction.peak_device_bytes,
        "depth": [report.depth, report.num_layers],
        "kernels": dict(report.kernels),
        "parameters": report.parameter_bytes,
        "events": report.num_events,
        "timeline": [size for _, size in report.timeline][:: max(1, len(report.timeline) // 20)],
    }


def test_every_byte_of_a_dry_run_is_on_record() -> None:
    current = {"versions": {name: text.partition("+")[0] for name, text in VERSIONS.items()}}
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if recorded.get("versions") != current["versions"] and not os.environ.get("UPDATE_DOCS"):
        pytest.skip(f"the record is of {recorded.get('versions')}")
    current |= {name: json.loads(json.dumps(told(name))) for name in CASES}
    if os.environ.get("UPDATE_DOCS"):
        RECORD.write_text(json.dumps(current, indent=0, sort_keys=True) + "\n")
        recorded = current
    for name in CASES:
        for key, value in current[name].items():
            assert value == recorded[name][key], (name, key)
