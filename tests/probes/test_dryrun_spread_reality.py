"""The dry run of a rank in a fake group of two against two real processes (gloo, CPU tensors): the same allocations."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.probes.dryrun_small import peaks
from tests.probes.layout_rank import traced
from tests.whole import these

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {
    "num_gpus": 2, "seq_len_tokens": 48, "micro_batch_seqs": 2, "lora_rank": 4, "attention": "eager",
    "optimizer": "sgd",
}  # fmt: skip
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
SOME = (
    "ddp full, accumulation", "fsdp2 nf4", "tensor, tied, pure bf16, accumulation",
)  # fmt: skip
"""Each engine and method once."""

PATIENCE_S = 900.0
"""A job that shows nothing for this long hangs: nothing here waits for a fixed time, a slow machine is only slow."""

Job = Callable[[str, dict[str, Any], Path], dict[str, int]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, warm_programs: Path) -> Iterator[Job]:
    """Runs a real job of two processes; rank 0's peaks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = tmp_path_factory.mktemp("ranks") / "words"
    with (
        words.open("w") as errors,
        subprocess.Popen(
            [str(warm_programs / "python"), "-m", "tests.probes.layout_rank", "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        ) as forker,
    ):
        assert forker.stdin is not None
        assert forker.stdout is not None

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(forker.pid, signal.SIGKILL)

        def job(model_type: str, fields: dict[str, Any], store: Path) -> dict[str, int]:
            watchdog = threading.Timer(PATIENCE_S, end)
            watchdog.start()
            try:
                forker.stdin.write(json.dumps([str(store), model_type, fields]) + "\n")
                forker.stdin.flush()
                answer = forker.stdout.readline()
            finally:
                watchdog.cancel()
            assert answer, words.read_text()[-3000:]
            peaks: dict[str, int] = json.loads(answer)
            assert isinstance(peaks, dict), f"{peaks}\n{words.read_text()[-3000:]}"
            return peaks

        try:
            yield job
        finally:
            end()


@pytest.mark.slow
@pytest.mark.parametrize("name", these(SOME, [*CASES]))
def test_dry_run_of_a_rank_equals_real_processes(name: str, real: Job, tmp_path: Path) -> None:
    model_type, fields = CASES[name]
    fields = {**TINY, **fields}
    seen = real(model_type, fields, tmp_path / "store")
    dry = peaks(traced(model_type, fields, "meta"))
    assert {"load", "forward", "loss", "backward", "step"} <= set(seen)
    if fields["parallel"] == "ddp":
        # DDP writes the order of its new buckets into host tensors, as the second step begins: on a CPU they lie on
        # the followed device (one block of 512 bytes), on a GPU not
        assert seen.pop("forward") - dry.pop("forward") in (0, 512)
    assert dry == seen
