"""A launch file's own run, watched from inside: what torch.cuda, the driver and the clock say while the emitted file
trains. `site_folder` makes a `sitecustomize` that every Python of the run finds; the command stays the user's own.

Nothing of CUDA is touched before the program itself does: PyTorch's memory history begins with its CUDA initialisation,
in whatever process that is, and the trainer's callback writes what was seen when training ends.
"""

import gzip
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "FINETUNE_PLANNER_WATCH"
"""Where the training process writes `watched.json` and `snapshot.pickle.gz`."""
MAX_ENTRIES = 150_000
"""Of PyTorch's history, the newest: about 20 bytes each when compressed."""
MAX_SNAPSHOT_BYTES = 8 << 20
_SITE = """import sys
sys.path.append({root!r})
from benchmarks.contact import launched
launched.begin()
"""


def site_folder(folder: Path) -> Path:
    """A directory for PYTHONPATH whose Python processes are watched."""
    folder.mkdir(parents=True, exist_ok=True)
    root = str(Path(__file__).resolve().parents[2])
    (folder / "sitecustomize.py").write_text(_SITE.format(root=root), encoding="utf-8")
    return folder


def begin() -> None:
    """Waits for the program to import torch and transformers' trainer."""
    if not os.environ.get(VARIABLE):
        return
    from probes.phantom.imports import Watcher

    watcher = Watcher()
    watcher.add({"torch": [_record_from_the_start], "transformers.trainer": [_add_callback]}, {})
    watcher.watch()


def _record_from_the_start(torch: Any) -> None:
    if torch.backends.cuda.is_built() and not torch.version.hip:
        torch.cuda._lazy_call(
            lambda: torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, context=None, stacks="python")
        )


def _add_callback(trainer: Any) -> None:
    trainer.DEFAULT_CALLBACKS.append(callback_class(trainer.TrainerCallback))


def callback_class(base: type) -> type:
    """transformers' callback that writes what the run showed."""

    class Watching(base):  # type: ignore[misc]
        """Notes the times of every step; at the end what memory was taken."""

        def __init__(self) -> None:
            self.began: list[float] = []
            self.ended: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _synchronize()
            self.ended.append(time.perf_counter())

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            write_seen(Path(os.environ[VARIABLE]), step_ends(self.began, self.ended))

    return Watching


def step_ends(began: list[float], ended: list[float]) -> dict[str, list[float]]:
    """Seconds of every step, and of what the trainer did between the end of one and the begin of the next."""
    return {
        "step_s": [end - begin for begin, end in zip(began, ended, strict=False)],
        "between_s": [begin - end for end, begin in zip(ended, began[1:], strict=False)],
    }


def _synchronize() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def write_seen(folder: Path, times: dict[str, list[float]]) -> None:
    """`watched.json`, and the memory snapshot where there is a GPU."""
    torch = sys.modules["torch"]
    found: dict[str, Any] = {**times, "device": "cpu", "torch": torch.__version__}
    if torch.cuda.is_initialized():
        from planner.hardware.driver import device_handle, nvml

        device = f"cuda:{torch.cuda.current_device()}"
        found |= {
            "device": device,
            "gpu": torch.cuda.get_device_name(device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "num_alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
        }
        with nvml() as module:
            if module is not None:
                found["used_bytes"] = int(module.nvmlDeviceGetMemoryInfo(device_handle(module, device)).used)
        snapshot = torch.cuda.memory._snapshot()
        found["history"] = [len(entries) for entries in snapshot["device_traces"]]
        found["snapshot_bytes"] = write_snapshot(snapshot, folder / "snapshot.pickle.gz")
    (folder / "watched.json").write_text(json.dumps(found), encoding="utf-8")


def write_snapshot(snapshot: Any, path: Path, limit_bytes: int = MAX_SNAPSHOT_BYTES) -> int:
    """PyTorch's snapshot as its viewer reads it (pytorch.org/memory_viz, once unpacked), of its history the newest that
    fit into `limit_bytes`; the bytes written."""
    while True:
        data = gzip.compress(pickle.dumps(snapshot), 6)
        longest = max((len(one) for one in snapshot["device_traces"]), default=0)
        if len(data) <= limit_bytes or not longest:
            path.write_bytes(data)
            return len(data)
        snapshot = {**snapshot, "device_traces": [one[(len(one) + 1) // 2 :] for one in snapshot["device_traces"]]}
