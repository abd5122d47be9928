"""Streams, events and the device context of a GPU on which everything has happened already."""

from typing import Any

from probes.patching import nothing
from probes.phantom.claims import CUDA


class Stream:
    """A stream on which everything has happened."""

    cuda_stream = stream_id = device_index = priority = 0
    device_type = 1
    synchronize = wait_event = wait_stream = nothing

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = CUDA

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is recorded."""
        return False


class Event:
    """An event that has happened; between two of them no time passes."""

    record = wait = synchronize = nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CUDA

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """A millisecond, as divisions by it are common."""
        return 1.0


class Device:
    """`torch.cuda.device`."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        pass
