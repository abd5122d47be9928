"""A worker that imports no torch and misbehaves as its request says (`config["fault"]`): the real
`probes.gpu.worker` main with another measuring function, run by the real runner in a real child process."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from planner.setup.codec import Outcome
from planner.setup.outcome import Environment, Measurement
from probes.gpu import device, worker
from probes.gpu.failures import MachineFault
from probes.gpu.request import ProbeRequest, StatusPipe


def measured(request: ProbeRequest, step_s: float = 0.5) -> Measurement:
    """A whole measurement of a made-up machine."""
    return Measurement(
        level=request.level,
        peak_allocated_bytes=3_000,
        peak_reserved_bytes=4_096,
        peak_device_bytes=8_192,
        phase_peaks_bytes={"load": 1_000, "forward": 2_000, "loss": 3_000, "backward": 2_500, "step": 2_200},
        step_times_s=(step_s, step_s, step_s),
        tokens_per_step=request.setup.tokens_per_step,
        layers_measured=(2, 4),
        environment=Environment(
            gpu_name="none", gpu_key=None, driver="", cuda="", python="3", platform="test", libraries={}, device="cpu"
        ),
        extrapolation_error_fraction=0.0,
    )


def meet(folder: Path, num: int, patience_s: float) -> None:
    """Returns when so many workers are here at the same time; raises when they are not."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / str(os.getpid())
    mine.touch()
    deadline = time.monotonic() + patience_s
    while len(list(folder.iterdir())) < num:
        if time.monotonic() > deadline:
            mine.unlink()
            raise RuntimeError("nobody else came")
        time.sleep(0.01)


def fail_as(fault: str) -> None:
    """What needs nothing of the request."""
    if fault == "hang":
        time.sleep(600)
    elif fault == "hang-in-c":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        ctypes.CDLL(None).sleep(600)
    elif fault == "segv":
        ctypes.string_at(0)
    elif fault == "abort":
        os.abort()
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "memory":
        device.limit_cpu_memory(64 << 20)
        len(bytearray(512 << 20))
    elif fault == "bitsandbytes-oom":
        print("Error out of memory at line 12 in file ops.cu", flush=True)
        os._exit(1)
    elif fault in ("exit", "silent"):
        os._exit({"exit": 3, "silent": 0}[fault])
    elif fault in ERRORS:
        raise ERRORS[fault]


ERRORS = {
    "illegal": RuntimeError(
        "CUDA error: an illegal memory access was encountered\nout of memory may be reported later"
    ),
    "no-driver": MachineFault("torch 2.11 finds no usable driver"),
    "unsupported": NotImplementedError("no such kernel"),
    "bug": KeyError("a bug of ours"),
}


def misbehave(request: ProbeRequest, status: StatusPipe) -> Outcome:
    """Does what `config["fault"]` names."""
    fault = request.config.get("fault", "ok")
    status.progress(f"about to {fault}")
    print(f"light worker, pid {os.getpid()}, fault {fault}", flush=True)
    pid_file = request.config.get("pid_file")
    if pid_file:
        Path(pid_file).write_text(str(os.getpid()))
    if fault == "ok":
        time.sleep(float(request.config.get("seconds", 0.0)))
    elif fault == "meet":
        meet(Path(request.config["folder"]), int(request.config["num"]), float(request.config["seconds"]))
    elif fault == "wait-for-turn":
        status.waiting(True)
        status.progress("waiting")
        while not Path(request.config["turn"]).exists():
            time.sleep(0.01)
        status.waiting(False)
    elif fault == "starting":
        status.starting(True)
        status.progress("importing")
        while not Path(request.config["go"]).exists():
            time.sleep(0.01)
        status.starting(False)
    elif fault == "grandchild":
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(request.config["pid_file"]).write_text(str(grandchild.pid))
    elif fault == "crash-after-result":
        worker.deliver(measured(request), Path(sys.argv[2]), StatusPipe(None))
        os.abort()
    elif fault == "garbage":
        Path(sys.argv[2]).write_text("{half a resu")
        os._exit(0)
    elif fault == "wrong-schema":
        Path(sys.argv[2]).write_text(json.dumps({"schema": 99}))
        os._exit(0)
    elif fault == "chatter":
        for _ in range(1024):  # more than any limit that a test sets; not the disk, however late the runner looks
            os.write(1, b"x" * 65536 + b"\n")
        time.sleep(600)
    fail_as(fault)
    return measured(request)


if __name__ == "__main__":
    status = worker.main(measure=misbehave)
    if json.loads(Path(sys.argv[1]).read_text())["config"].get("fault") == "hang-at-exit":
        time.sleep(600)
    worker.leave(status)
