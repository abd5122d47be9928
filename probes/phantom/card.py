"""What the phantom GPU pretends to be: plain data that passes from the command line to the traced process."""

from dataclasses import dataclass

from planner.hardware.gpu import GpuSpec
from planner.memory.workspace import context_bytes


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU as PyTorch would describe it.

    Attributes:
        memory_bytes: what `torch.cuda.get_device_properties(0).total_memory` says.
        context_bytes: what the driver takes of it before PyTorch's first segment.
    """

    key: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    context_bytes: int
    num_sms: int
    l2_bytes: int
    nvlink: bool

    @property
    def limit_bytes(self) -> int:
        return self.memory_bytes - self.context_bytes

    @property
    def threads_per_sm(self) -> int:
        """Threads that one multiprocessor holds at once.

        Source: CUDA C++ Programming Guide 13.0, table "Technical Specifications per Compute Capability".
        """
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}.get(self.capability, 2048)


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How a program is followed.

    Attributes:
        num_steps: optimizer steps after which the program is stopped, None: never.
        num_tokens: length of the texts of stand-in data sets; image_size: width and height of their pictures, pixels;
            objective: what their rows are for, "" where nobody knows.
        every_micro_batch: runs also those that repeat the one before.
    """

    limited: bool = True
    num_steps: int | None = None
    num_tokens: int = 8192
    image_size: tuple[int, int] = (1024, 1024)
    objective: str = ""
    every_micro_batch: bool = False


def card_of(gpu: GpuSpec, memory_bytes: int | None = None) -> Card:
    """The card of a row of the GPU table; `memory_bytes` where the user knows better.

    Raises:
        ValueError: a GPU that runs no CUDA.
    """
    if gpu.compute_capability is None:
        raise ValueError(f"{gpu.name} runs no CUDA")
    return Card(
        key=gpu.key,
        name=gpu.driver_name or gpu.name,
        capability=gpu.compute_capability,
        memory_bytes=gpu.memory_bytes if memory_bytes is None else memory_bytes,
        context_bytes=context_bytes(gpu),
        num_sms=gpu.sm_count or 0,
        l2_bytes=gpu.l2_bytes or 0,
        nvlink=gpu.nvlink_bytes_per_s > 0,
    )
