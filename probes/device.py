"""The GPU between two probes: taking turns, and starting clean.

Probes of one GPU take turns through a file lock, also between runners of different programs. The driver is asked before
and after: the next probe starts on a clean device, or the outcome says that it did not.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from planner.outcome import Measurement
from planner.units import MIB
from probes.environment import DeviceStatus, device_status
from probes.outcomes import Outcome

CLEAN_WAIT_S = 15.0
CLEAN_TOLERANCE_BYTES = 64 * MIB
"""Memory that may remain in use after a probe: other processes breathe, the driver keeps page tables."""


@contextlib.contextmanager
def device_turn(device: str) -> Iterator[None]:
    """One probe per GPU at a time, between all runners of this user's machine; the CPU is not waited for."""
    if device == "cpu":
        yield
        return
    status = device_status(device)
    name = status.uuid if status is not None else device.replace(":", "-")
    path = Path(tempfile.gettempdir()) / f"finetune-planner-{os.getuid()}-{name}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # no place for a lock: measure without
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def wait_until_clean(
    device: str,
    before: DeviceStatus | None,
    *,
    limit_s: float = CLEAN_WAIT_S,
    read: Callable[[str], DeviceStatus | None] = device_status,
) -> DeviceStatus | None:
    """Waits until the device holds no more than before the probe (plus a tolerance), at most `limit_s`.

    The driver frees a killed process's memory a little after the process is gone.
    """
    if before is None:
        return None
    deadline = time.monotonic() + limit_s
    while True:
        status = read(device)
        if status is None or status.used_bytes <= before.used_bytes + CLEAN_TOLERANCE_BYTES:
            return status
        if time.monotonic() >= deadline:
            return status
        time.sleep(0.05)


def with_device_notes(outcome: Outcome, before: DeviceStatus | None, after: DeviceStatus | None) -> Outcome:
    """Flags a device that was not ours alone, or that was left unclean."""
    if before is None:
        return outcome
    flags, notes = [], []
    if before.process_ids:
        flags.append("device-shared")
        notes.append(
            f"other processes ({', '.join(map(str, before.process_ids))}) held {before.used_bytes // MIB} MiB of the "
            "GPU before the probe: speed and the largest batch are not the machine's best"
        )
    if after is not None and after.used_bytes > before.used_bytes + CLEAN_TOLERANCE_BYTES:
        flags.append("device-not-clean-after")
        notes.append(
            f"{(after.used_bytes - before.used_bytes) // MIB} MiB of the GPU were not given back after the probe"
        )
    if not flags:
        return outcome
    if isinstance(outcome, Measurement):
        return replace(outcome, flags=(*outcome.flags, *flags), notes=(*outcome.notes, *notes))
    return replace(outcome, message="; ".join((outcome.message, *notes)))
