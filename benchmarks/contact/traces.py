"""Ten setups' allocator traces, with torch.cuda's statistics and the driver's at every mark of the meter.

Two layers of a real model, two optimizer steps each, in one process: small files that say whether the allocator's model
and the meter are right on this card. On the CPU the same steps run with the statistics of the allocator's model
(`benchmarks.contact.played_cuda`): a rehearsal of the recording, no evidence about any GPU.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from benchmarks.contact.played_cuda import Modelled
from benchmarks.contact.recording import encode, events_of_trace, meter_result
from planner.setup import TrainSetup
from probes.allocator.events import Event
from probes.dryrun.tracker import Tracker
from probes.gpu.failures import classify_exception
from probes.gpu.meters import CudaMeter
from probes.gpu.request import ProbeRequest
from probes.gpu.run import attention_name
from probes.stack.autocast import emulation_installed
from probes.stack.batch import make_batch
from probes.stack.build import build_model
from probes.stack.configs import load_config, num_layers
from probes.stack.optimizers import optimizer_of
from probes.stack.step import inner_model, make_trainer, train_step

MODEL = "Qwen/Qwen2.5-0.5B"
DEPTH, STEPS = 2, 2
MAX_ENTRIES = 200_000
"""Of PyTorch's history: two layers make some thousands."""
_LORA: dict[str, Any] = {"method": "lora", "lora_rank": 16, "precision": "bf16-autocast", "optimizer": "adamw-fused"}
_QLORA = {**_LORA, "method": "qlora", "quantization": "nf4-double", "optimizer": "adamw-8bit"}
_FULL: dict[str, Any] = {"method": "full", "lora_rank": 0, "precision": "bf16-pure", "optimizer": "adamw-fused"}
SETUPS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("lora", _LORA, True),
    ("lora-kept", {**_LORA, "checkpointing": 0}, True),
    ("lora-chunked", {**_LORA, "loss": "chunked"}, True),
    ("lora-eager", {**_LORA, "attention": "eager"}, True),
    ("qlora", _QLORA, True),
    ("full", _FULL, True),
    ("full-mixed", {**_FULL, "precision": "bf16-mixed", "optimizer": "adamw"}, True),
    ("full-8bit", {**_FULL, "optimizer": "adamw-8bit"}, True),
    ("full-accumulated", {**_FULL, "accumulation_steps": 2, "loss": "liger"}, True),
    ("full-segments", _FULL, False),
)
"""(name, fields, expandable segments)."""
_SHAPE: dict[str, Any] = {"micro_batch_seqs": 2, "seq_len_tokens": 512, "checkpointing": 1, "attention": "sdpa"}


def setup_of(fields: Mapping[str, Any]) -> TrainSetup:
    """One of `SETUPS`."""
    return TrainSetup(**{**_SHAPE, "loss": "full", **fields})


class TapedMeter(CudaMeter):
    """A `CudaMeter` that writes down what torch.cuda and the driver say before it looks at them itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[dict[str, Any]] = [self._now(None)]

    def mark(self, phase: str, layer: int | None = None) -> None:
        """As `CudaMeter.mark`; layers within a phase are no marks of it."""
        if phase != self._phase:
            self.rows.append(self._now(phase))
        super().mark(phase, layer)

    def result(self) -> dict[str, Any]:
        """The meter's answers, after a last row."""
        self.rows.append(self._now(None))
        return meter_result(self)

    def _now(self, mark: str | None) -> dict[str, Any]:
        where = self._torch_device
        return {
            "mark": mark,
            "allocated_bytes": int(torch.cuda.memory_allocated(where)),
            "max_allocated_bytes": int(torch.cuda.max_memory_allocated(where)),
            "reserved_bytes": int(torch.cuda.memory_reserved(where)),
            "max_reserved_bytes": int(torch.cuda.max_memory_reserved(where)),
            "num_alloc_retries": self._stat("num_alloc_retries"),
            "used_bytes": self._nvml.used_bytes() if self._nvml is not None else 0,
        }


def traces(config: Mapping[str, Any], device: str, base_used_bytes: int | None) -> Iterator[dict[str, Any]]:
    """One line per setup; what cannot be run here is a line that says why.

    Args:
        config: the model's `config.json`.
        device: "cuda:0", or "cpu" to rehearse.
        base_used_bytes: what the driver showed in use before this process touched the device.
    """
    for name, fields, expandable in SETUPS:
        line = {"step": name, "setup": fields, "depth": DEPTH, "expandable_segments": expandable, "paged": False}
        try:
            yield {**line, **_recorded(config, fields, device, expandable, base_used_bytes)}
        except Exception as error:  # this setup cannot be had here: the next one may
            yield {**line, "problem": classify_exception(error)[1]}
        _tidy(device)


def _recorded(
    config: Mapping[str, Any], fields: Mapping[str, Any], device: str, expandable: bool, base: int | None
) -> dict[str, Any]:
    setup = setup_of(fields)
    request = ProbeRequest(model_id=MODEL, config=config, setup=setup, device=device)
    with ExitStack() as resources:
        history = resources.enter_context(_rehearsed(expandable) if device == "cpu" else _history(device, expandable))
        meter = TapedMeter("cuda:0" if device == "cpu" else device, resources, base)
        _run(request, meter.mark)
        result = meter.result()
        events, calls, cut = history()
    return {
        "base_used_bytes": base,
        "rows": meter.rows,
        "result": result,
        "driver_calls": calls,
        "cut": cut,
        "events": encode(events),
    }


def _run(request: ProbeRequest, mark: Callable[..., None]) -> None:
    setup, device = request.setup, torch.device(request.device)
    layers = min(DEPTH, num_layers(load_config(request.config)))
    model = build_model(
        request.config, setup, device=device, num_layers=layers, attention=attention_name(request), seed=0
    )
    optimizer = optimizer_of(model, setup)
    trainer = make_trainer(model, setup, optimizer)
    batches = [make_batch(setup, inner_model(model).config, device=device) for _ in range(setup.accumulation_steps)]
    for _ in range(STEPS):
        train_step(trainer, batches, mark)


History = Callable[[], tuple[list[Event], int, bool]]
"""(events, calls to the driver, whether the oldest were overwritten) so far."""


@contextmanager
def _history(device: str, expandable: bool) -> Iterator[History]:
    """PyTorch's own history of its allocator."""
    memory = torch.cuda.memory
    memory._set_allocator_settings(f"expandable_segments:{expandable}")
    torch.cuda.init()
    memory._record_memory_history(max_entries=MAX_ENTRIES, context=None, stacks="python", clear_history=True)

    def so_far() -> tuple[list[Event], int, bool]:
        entries = memory._snapshot()["device_traces"][torch.device(device).index or 0]
        return *events_of_trace(entries), len(entries) >= MAX_ENTRIES

    try:
        yield so_far
    finally:
        memory._record_memory_history(None)


@contextmanager
def _rehearsed(expandable: bool) -> Iterator[History]:
    """The CPU's tensors, as the allocator's model would hold them."""
    tracker = Tracker("cpu")
    played = Modelled(tracker, expandable_segments=expandable)
    with emulation_installed(), played.installed(), tracker:
        yield lambda: (played.events(), played.driver_calls, False)


def _tidy(device: str) -> None:
    gc.collect()
    if device != "cpu":
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
