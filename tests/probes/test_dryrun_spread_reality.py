"""The dry run of a rank in a fake group of two against two real processes (gloo, CPU tensors): the same allocations."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.probes.dryrun_small import peaks
from tests.probes.spread_rank import traced

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {
    "num_gpus": 2,
    "seq_len_tokens": 48,
    "micro_batch_seqs": 2,
    "lora_rank": 4,
    "attention": "eager",
    "optimizer": "sgd",
}
FULL: dict[str, Any] = {"method": "full", "lora_rank": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp lora": ("llama", {"parallel": "ddp"}),
    "ddp full, accumulation": (
        "qwen2",
        {**FULL, "parallel": "ddp", "precision": "bf16-mixed", "accumulation_steps": 2},
    ),
    "fsdp2 full": ("llama", {**FULL, "parallel": "fsdp2", "precision": "bf16-mixed"}),
    "fsdp2 full, pure bf16, kept, accumulation": (
        "qwen2",
        {
            **FULL,
            "parallel": "fsdp2",
            "precision": "bf16-pure",
            "reshard_after_forward": False,
            "accumulation_steps": 2,
            "checkpointing": 0,
        },
    ),
    "fsdp2 lora": ("llama", {"parallel": "fsdp2"}),
    "tensor": ("llama", {**FULL, "parallel": "none", "tensor_degree": 2, "precision": "bf16-mixed"}),
    "tensor, tied, pure bf16, accumulation": (
        "qwen3",
        {
            **FULL,
            "parallel": "none",
            "tensor_degree": 2,
            "precision": "bf16-pure",
            "accumulation_steps": 2,
            "checkpointing": 0,
        },
    ),
    "fsdp2 nf4": ("llama", {"parallel": "fsdp2", "method": "qlora", "quantization": "nf4-double"}),
}


def _real(model_type: str, fields: dict[str, Any], store: Path) -> dict[str, int]:
    """Rank 0's peaks of a real job of two processes. Nothing here waits for a fixed time: a slow machine is only slow,
    and a rank that dies ends the other (its connection closes)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.probes.spread_rank",
                str(rank),
                "2",
                str(store),
                model_type,
                json.dumps(fields),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-3000:] for _, error in outputs)
    found: dict[str, int] = json.loads(outputs[0][0].splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "fields"), CASES.values(), ids=CASES.keys())
def test_dry_run_of_a_rank_equals_real_processes(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    fields = {**TINY, **fields}
    real = _real(model_type, fields, tmp_path / "store")
    dry = peaks(traced(model_type, fields, "meta"))
    assert {"load", "forward", "loss", "backward", "step"} <= set(real)
    if fields["parallel"] == "ddp":
        # DDP writes the order of its new buckets into host tensors, as the second step begins: on a CPU they lie on
        # the followed device (one block of 512 bytes), on a GPU not
        assert real.pop("forward") - dry.pop("forward") in (0, 512)
    assert dry == real
