"""Streams, events and the device context of a GPU on which everything has happened already."""

from typing import Any

from probes.phantom.claims import CUDA


class Stream:
    """A stream on which everything has happened."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 1
    priority = 0

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

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """There is nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """There is nothing to wait for."""


class Event:
    """An event that has happened; between two of them no time passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CUDA

    def record(self, stream: Any = None) -> None:
        """It has happened."""

    def wait(self, stream: Any = None) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""

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
