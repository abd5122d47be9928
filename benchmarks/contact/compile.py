"""torch.compile against eager on one model: what compiling takes, and what a step takes and holds afterwards.

A probe has no time for it (compiling takes longer than measuring), so this is a reading with a slot of its own. As the
trainer does (`torch_compile: true`): the whole model, mode "default". Source: accelerate 1.15
`Accelerator.prepare_model`, `TorchDynamoPlugin`.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from planner.setup import TrainSetup
from probes.gpu.request import ProbeRequest
from probes.gpu.run import attention_name
from probes.stack.batch import make_batch
from probes.stack.build import build_model
from probes.stack.configs import load_config, num_layers
from probes.stack.optimizers import optimizer_of
from probes.stack.step import inner_model, make_trainer, train_step

MODEL = "Qwen/Qwen2.5-1.5B"
DEPTH, WARMUP_STEPS, TIMED_STEPS = 8, 3, 10
"""Of its layers so many: compile time grows with them, the gain per layer does not."""
SETUPS: Mapping[str, dict[str, Any]] = {
    "lora": {"method": "lora", "lora_rank": 16, "precision": "bf16-autocast"},
    "full": {"method": "full", "lora_rank": 0, "precision": "bf16-pure"},
}
"""LoRA compiles first: where the slot ends, it has ended with a pair."""
_SHAPE: dict[str, Any] = {"micro_batch_seqs": 4, "checkpointing": 0, "attention": "sdpa", "optimizer": "adamw-fused"}


def compared(config: Mapping[str, Any], device: str, seq_len_tokens: int = 2048) -> Iterator[dict[str, Any]]:
    """Two lines per setup, eager and compiled: seconds of every step from the first on, and the allocated peak after
    the first; what cannot be compiled here is a line that says why."""
    for name, fields in SETUPS.items():
        setup = TrainSetup(**{**_SHAPE, **fields, "seq_len_tokens": seq_len_tokens})
        for compiled in (False, True):
            line = {"step": name, "compiled": compiled, "setup": fields, "depth": DEPTH, "tokens": seq_len_tokens}
            try:
                yield {**line, **_timed(config, setup, device, compiled=compiled)}
            except Exception as error:  # the eager pair stands, and the reason is a reading too
                yield {**line, "problem": f"{type(error).__name__}: {str(error)[:500]}"}
            torch._dynamo.reset()
            gc.collect()
            if device != "cpu":
                torch.cuda.empty_cache()


def _timed(config: Mapping[str, Any], setup: TrainSetup, device: str, *, compiled: bool) -> dict[str, Any]:
    """Seconds of WARMUP_STEPS + TIMED_STEPS steps, each waited for."""
    where, gpu = torch.device(device), device != "cpu"
    counters = torch._dynamo.utils.counters
    counters.clear()
    request = ProbeRequest(model_id=MODEL, config=config, setup=setup, device=device)
    layers = min(DEPTH, num_layers(load_config(config)))
    model = build_model(config, setup, device=where, num_layers=layers, attention=attention_name(request), seed=0)
    if compiled:  # a CPU rehearses all but the code generation
        model.compile(backend="inductor" if gpu else "aot_eager")
    trainer = make_trainer(model, setup, optimizer_of(model, setup))
    batches = [make_batch(setup, inner_model(model).config, device=where)]
    seconds: list[float] = []
    for index in range(WARMUP_STEPS + TIMED_STEPS if gpu else 2):
        if gpu and index == WARMUP_STEPS:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        train_step(trainer, batches)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - began, 5))
    return {
        "step_seconds": seconds,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "graphs": int(counters["stats"]["unique_graphs"]),
        "graph_breaks": int(sum(counters["graph_break"].values())),
    }
