"""The GPU between two probes: taking turns, and starting clean. Runs in the child, before it touches the device.

Probes of one GPU take turns through a file lock, so that the next child can already import its libraries while the
present one measures, also under runners of different programs. The lock ends with the process that holds it, however
that dies; what a killed process left on the device is waited for.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.core.locks import NO_LINK, OPEN_FLAGS, lock
from planner.core.outputs import user_id
from planner.core.units import MIB
from probes.gpu.environment import DeviceStatus, device_status

SHARED_BYTES = 1024 * MIB
"""What somebody else may hold before speed and memory are no longer the machine's own: a desktop holds less."""
RESTING_SLACK_BYTES = 16 * MIB
"""Readings of an idle GPU differ by less than this; a process's context is thirty times as large."""
STABLE_S = 1.0
TEARDOWN_S = 5.0
"""What is above the least ever seen at rest may be a predecessor's context, which the driver takes down last: only what
stays this long is somebody else's."""
CLEAN_WAIT_S = 15.0
POLL_S = 0.05

ReadStatus = Callable[[str], DeviceStatus | None]


@dataclass(frozen=True, kw_only=True)
class DeviceLease:
    """A device that is ours until this process ends.

    Attributes:
        descriptor: of the lock, None for the CPU or where no lock could be made.
        before: the driver's view before we touched the device.
        shared_bytes: what others hold on it; 0 on a clean device.
    """

    descriptor: int | None
    before: DeviceStatus | None
    shared_bytes: int = 0


def lease_device(device: str, waiting: Callable[[bool], None], *, read: ReadStatus = device_status) -> DeviceLease:
    """Waits for the device's lock and then for a clean device; `waiting` is told when the wait for others begins and
    ends, so that it does not count against the probe's own time."""
    if device == "cpu":
        return DeviceLease(descriptor=None, before=None)
    return clean_lease(device, descriptor=_acquire(_lock_name(device, read), waiting), read=read)


@contextlib.contextmanager
def lease_all(
    devices: Sequence[str], waiting: Callable[[bool], None], *, read: ReadStatus = device_status
) -> Iterator[None]:
    """Within it all devices of a job are ours: waits for their locks in one order for everybody, so that two jobs never
    wait for each other. Whether each device is clean its own rank looks (`clean_lease`)."""
    names = {_lock_name(device, read) for device in devices if device != "cpu"}
    descriptors = [_acquire(name, waiting) for name in sorted(names)]
    try:
        yield
    finally:
        for descriptor in descriptors:
            if descriptor is not None:
                os.close(descriptor)


def _lock_name(device: str, read: ReadStatus) -> str:
    status = read(device)
    return status.uuid if status is not None else device.replace(":", "-")


def _acquire(name: str, waiting: Callable[[bool], None]) -> int | None:
    """The descriptor of a device's lock, once it is ours; None where there is no place for one."""
    descriptor = _open_lock(name)
    if descriptor is not None:
        waiting(True)
        lock(descriptor)
        waiting(False)
    return descriptor


def clean_lease(device: str, *, descriptor: int | None = None, read: ReadStatus = device_status) -> DeviceLease:
    """The turn of a process whose lock is held already (`descriptor`, or its agent's), on a clean device."""
    if device == "cpu":
        return DeviceLease(descriptor=descriptor, before=None)
    resting = _read_resting(descriptor)
    before = wait_until_clean(device, resting_bytes=resting, read=read)
    if before is None:
        return DeviceLease(descriptor=descriptor, before=None)
    if before.used_bytes != resting and descriptor is not None:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, str(before.used_bytes).encode())
    neighbours = bool(set(before.process_ids) - {os.getpid()})
    shared = before.used_bytes if neighbours or before.used_bytes > SHARED_BYTES else 0
    return DeviceLease(descriptor=descriptor, before=before, shared_bytes=shared)


def _read_resting(descriptor: int | None) -> int | None:
    """What the driver showed in use when the last probe of this device found it clean; the lock's file keeps it."""
    if descriptor is None:
        return None
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        return int(os.read(descriptor, 32))
    except (OSError, ValueError):
        return None


def lock_path(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"finetune-planner-{user_id()}-{name}.lock"


def _open_lock(name: str) -> int | None:
    try:
        return os.open(lock_path(name), os.O_RDWR | os.O_CREAT | NO_LINK | OPEN_FLAGS, 0o600)
    except OSError:  # no place for a lock: measure without
        return None


def wait_until_clean(
    device: str, *, resting_bytes: int | None = None, read: ReadStatus = device_status
) -> DeviceStatus | None:
    """The driver's view once no more is in use than at rest, or once what is there has stopped shrinking, at most
    CLEAN_WAIT_S.

    The driver gives a killed process's memory back a little after the process is gone, its context last. What stays is
    waited for STABLE_S where nothing is known of this device, TEARDOWN_S where it was seen with less.

    Args:
        resting_bytes: what was in use when the device was last found clean.
    """
    stable_s = STABLE_S if resting_bytes is None else TEARDOWN_S
    deadline = time.monotonic() + CLEAN_WAIT_S
    lowest, since = None, time.monotonic()
    while True:
        status = read(device)
        now = time.monotonic()
        if status is None or now >= deadline:
            return status
        if resting_bytes is not None and status.used_bytes <= resting_bytes + RESTING_SLACK_BYTES:
            return status
        if lowest is None or status.used_bytes < lowest:
            lowest, since = status.used_bytes, now
        elif now - since >= stable_s:
            return status
        time.sleep(POLL_S)


def limit_cpu_memory(extra_bytes: int) -> None:
    """Lets this process map at most `extra_bytes` more than it has mapped now."""
    import resource  # not on native Windows, where no probe runs

    with open("/proc/self/statm", encoding="utf-8") as handle:
        mapped = int(handle.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + extra_bytes
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
