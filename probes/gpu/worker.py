"""The child of a probe: `python -m probes.gpu.worker REQUEST.json RESULT.json [--status-fd N]`.

Reads one request, runs it, writes one tagged result beside and renames it. Whatever happens inside Python becomes a
`ProbeFailure`; what kills the process outright (a signal, the kernel) is named by the runner. If the disk is full the
result goes through the status pipe instead.

Of a job of several ranks (started by `probes.gpu.agent`) this is one: rank 0 writes the job's measurement, a rank that
fails says so through the pipe, and the runner names the job's outcome.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.core.outputs import write_whole
from planner.setup.codec import Outcome, evidence_to_dict
from planner.setup.outcome import ProbeFailure
from probes.gpu.failures import MachineFault, classify_exception, one_line
from probes.gpu.ranks import rank_info_of
from probes.gpu.request import ProbeRequest, StatusPipe

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_NO_RESULT = 71  # the result could be delivered nowhere
EXIT_RANK_FAILED = 72  # torchrun ends the other ranks


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent dies, so that no orphan ever holds the GPU."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


class TolerantLog(io.TextIOBase):
    """A text stream over a descriptor that a full disk does not turn into an exception: the log may lose lines, the
    measurement goes on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Writes what can be written; always claims all of it."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode("utf-8", "replace"))
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True


Measure = Callable[[ProbeRequest, StatusPipe], Outcome]


def run(request: ProbeRequest, measure: Measure, status: StatusPipe) -> Outcome:
    """The outcome of one request: whatever `measure` raises is named and becomes a `ProbeFailure`."""
    try:
        return measure(request, status)
    except BaseException as error:
        # Ctrl-C goes to the runner (another process group); everything else that unwinds here is this probe's outcome.
        kind, message = classify_exception(error)
        with contextlib.suppress(MemoryError):
            traceback.print_exc()
        return ProbeFailure(level=request.level, kind=kind, message=message)


def deliver(outcome: Outcome, result: Path, status: StatusPipe) -> bool:
    """Writes the result file, or sends it through the pipe where the disk will not take it."""
    values = evidence_to_dict(outcome)
    try:
        write_whole(result, json.dumps(values).encode(), sync=True)
    except OSError as error:
        print(f"cannot write {result}: {error}; sending the result through the pipe", file=sys.stderr)
        return status.send("result", values)
    return True


def real_measure(request: ProbeRequest, status: StatusPipe) -> Outcome:
    """The real thing; imported late so that a broken torch is an outcome too.

    Without garbage collection, which takes a fifth of the imports, until the first depth is built.
    """
    gc.disable()
    status.starting(True)
    status.progress("importing torch and transformers")
    try:
        from probes.gpu.measure import measure
    except (ImportError, OSError) as error:
        raise MachineFault(f"torch and transformers cannot be imported: {one_line(error)}") from error
    return measure(request, status, alone=True)


def begin(argv: Sequence[str] | None, description: str) -> tuple[ProbeRequest, argparse.Namespace]:
    """What every child does first: reads its arguments, ties its life to its parent's, makes its log tolerant and reads
    the request.

    Returns:
        The request, and the arguments: `request` and `result` (paths), `status_fd` (None where nobody listens).
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("request", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--status-fd", type=int, default=None)
    parser.add_argument("--parent", type=int, default=None)
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    sys.stdout, sys.stderr = TolerantLog(1), TolerantLog(2)
    faulthandler.enable()
    return ProbeRequest.from_dict(json.loads(args.request.read_text(encoding="utf-8"))), args


def main(argv: list[str] | None = None, measure: Measure = real_measure) -> int:
    """Runs one request; 0 when a result was delivered, whatever it says."""
    request, args = begin(argv, __doc__)
    rank = rank_info_of().rank if request.num_ranks > 1 else None
    status = StatusPipe(args.status_fd, rank)
    outcome = run(request, measure, status)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if limits[0] != limits[1]:  # room again to write the answer
        resource.setrlimit(resource.RLIMIT_AS, (limits[1], limits[1]))
    if rank is not None:
        if isinstance(outcome, ProbeFailure):
            # short enough to reach the pipe in one piece
            status.send("failure", {"kind": outcome.kind.value, "message": outcome.message[:1000]})
            return EXIT_RANK_FAILED
        if rank > 0:
            return 0
    if not deliver(outcome, args.result, status):
        return EXIT_NO_RESULT
    if rank is not None:
        status.send("delivered", True)
    return 0


def leave(code: int) -> None:
    """Ends the process at once: tearing down CUDA, threads and gigabytes of tensors takes time and may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # the request itself cannot be read: say so in the log, the runner names it
        traceback.print_exc()
        status = 1
    leave(status)
