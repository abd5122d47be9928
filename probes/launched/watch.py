"""What a training program shows of itself: what torch.cuda, the driver and the clock say while it trains.

`site_folder` makes a `sitecustomize` that every Python of the run finds; the command and its files stay the user's own.
Nothing of CUDA is touched before the program does it. transformers' Trainer, on which most tools train, gets one more
callback: it notes every step, ends the training after the steps that were asked for, writes what was seen and ends the
process, so that nothing is saved.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from planner.core.outputs import write_whole
from planner.hardware.driver import device_handle, nvml
from probes.phantom.imports import Hook, Watcher, sitecustomize

VARIABLE = "FINETUNE_PLANNER_WATCH"
"""The order of every process of a watched run, as JSON: `folder` (where it writes), `num_steps`, `device`."""
PROGRESS = "progress"


def site_folder(folder: Path) -> Path:
    """A directory for PYTHONPATH whose Python processes are watched."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(sitecustomize("launched", "watch"), encoding="utf-8")
    return folder


def begin() -> None:
    if not os.environ.get(VARIABLE):
        return
    order = json.loads(os.environ[VARIABLE])

    def add_callback(trainer: Any) -> None:
        trainer.DEFAULT_CALLBACKS.append(callback_class(trainer.TrainerCallback, order))

    hooks: dict[str, list[Hook]] = {"transformers.trainer": [add_callback]}
    if order["device"] == "cpu":
        hooks["transformers.training_args"] = [_use_cpu]
    watcher = Watcher()
    watcher.add(hooks, {})
    watcher.watch()


def _use_cpu(training_args: Any) -> None:
    """A rehearsal without a GPU: the file's own settings are refused there otherwise (`bf16`)."""
    arguments = training_args.TrainingArguments
    before = arguments.__post_init__

    def after(self: Any) -> None:
        self.use_cpu = True
        before(self)

    arguments.__post_init__ = after


def callback_class(base: type, order: dict[str, Any]) -> type:
    class Watching(base):  # type: ignore[misc]
        """Notes the times of every step; at the end what memory was taken."""

        def __init__(self) -> None:
            self.began: list[float] = []
            self.ended: list[float] = []
            self.loaded_bytes = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch = sys.modules["torch"]
            self.loaded_bytes = int(torch.cuda.memory_allocated()) if torch.cuda.is_initialized() else 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch = sys.modules["torch"]
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.ended.append(time.perf_counter())
            Path(order["folder"], PROGRESS).write_text(str(len(self.ended)), encoding="utf-8")
            if len(self.ended) >= order["num_steps"]:
                control.should_training_stop = True
            control.should_save = False  # nothing of the run is kept

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen = {**step_times(self.began, self.ended), "loaded_bytes": self.loaded_bytes, **memory_seen()}
            write_whole(Path(order["folder"], f"seen-{os.getpid()}.json"), json.dumps(seen).encode())
            from probes.gpu.worker import leave

            leave(0)  # what the program does after training (saving gigabytes) is not asked for

    return Watching


def step_times(began: list[float], ended: list[float]) -> dict[str, list[float]]:
    """Seconds of every step, and of what the trainer did between the end of one and the begin of the next."""
    return {
        "step_s": [end - begin for begin, end in zip(began, ended, strict=False)],
        "between_s": [begin - end for end, begin in zip(ended, began[1:], strict=False)],
    }


def memory_seen() -> dict[str, Any]:
    """Peaks since the process began, what the driver shows, and the libraries that were used."""
    import resource  # not on native Windows, where nothing is run

    from planner.core.install import installed
    from probes.gpu.environment import LIBRARIES

    torch = sys.modules["torch"]
    memory: dict[str, Any] = {
        "device": "cpu",
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or torch.version.hip or "",
        "libraries": installed(LIBRARIES),
    }
    if not torch.cuda.is_initialized():
        return memory
    device = f"cuda:{torch.cuda.current_device()}"
    memory |= {
        "device": device,
        "gpu": torch.cuda.get_device_name(device),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "num_alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }
    with nvml() as module:
        if module is not None:
            handle = device_handle(module, device)
            memory["used_bytes"] = int(module.nvmlDeviceGetMemoryInfo(handle).used)
            running = module.nvmlDeviceGetComputeRunningProcesses(handle)
            memory["processes"] = [[int(process.pid), int(process.usedGpuMemory or 0)] for process in running]
    return memory
