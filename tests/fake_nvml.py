"""A driver for tests: GPUs with UUIDs, MIG slices and memory that others hold, behind the names of pynvml."""

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.core.units import MIB


class NvmlError(Exception):
    """NVML's error."""


@dataclass(eq=False)
class Card:
    """One GPU, or one slice of it (`parent`)."""

    name: str
    uuid: str
    total_mib: int
    used: Callable[[], int] = lambda: 0
    slices: list["Card"] = field(default_factory=list)
    sms: int = 132
    parent: "Card | None" = None
    reserved_mib: int = 600
    pids: list[int] = field(default_factory=list)
    capability: tuple[int, int] | None = None
    num_cores: int = 0
    clocks_mhz: tuple[int, int] = (0, 0)
    """(multiprocessors, memory)."""
    bus_bits: int = 0

    def sliced(self, profile: str, uuid: str, total_mib: int, sms: int) -> "Card":
        """This GPU with one more slice."""
        name = f"{self.name} MIG {profile}"
        self.slices.append(Card(name=name, uuid=uuid, total_mib=total_mib, sms=sms, parent=self))
        return self


def nvml_module(cards: Sequence[Card], driver: str = "580.0") -> Any:
    """A `pynvml` of these GPUs; `used` of a card is asked at every reading, in bytes."""
    module: Any = types.ModuleType("pynvml")

    def by_index(index: int) -> Card:
        if index >= len(cards):
            raise NvmlError("Invalid Argument")
        return cards[index]

    def slice_of(card: Card, index: int) -> Card:
        if index >= len(card.slices):
            raise NvmlError("Not Found")
        return card.slices[index]

    def memory(card: Card, version: int = 1) -> Any:
        allocated, reserved = card.used(), card.reserved_mib * MIB
        used = allocated if version == 2 else allocated + reserved
        return types.SimpleNamespace(total=card.total_mib * MIB, used=used, reserved=reserved)

    def mig_mode(card: Card) -> tuple[int, int]:
        return (1, 1) if card.slices else (0, 0)

    def processes(card: Card) -> list[Any]:
        return [types.SimpleNamespace(pid=pid) for pid in card.pids]

    def capability(card: Card) -> tuple[int, int]:
        if card.capability is None:
            raise NvmlError("Not Supported")
        return card.capability

    module.NVMLError = NvmlError
    module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM = 0, 1
    module.nvmlDeviceGetMaxClockInfo = lambda card, kind: card.clocks_mhz[kind]
    module.nvmlDeviceGetCudaComputeCapability = capability
    module.nvmlDeviceGetNumGpuCores = lambda card: card.num_cores
    module.nvmlDeviceGetMemoryBusWidth = lambda card: card.bus_bits
    module.nvmlMemory_v2 = 2
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: len(cards)
    module.nvmlDeviceGetHandleByIndex = by_index
    module.nvmlDeviceGetName = lambda card: card.name
    module.nvmlDeviceGetUUID = lambda card: card.uuid.encode()
    module.nvmlDeviceGetMemoryInfo = memory
    module.nvmlDeviceGetMigMode = mig_mode
    module.nvmlDeviceGetMaxMigDeviceCount = lambda card: 7
    module.nvmlDeviceGetMigDeviceHandleByIndex = slice_of
    module.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = lambda card: card.parent
    module.nvmlDeviceGetAttributes = lambda card: types.SimpleNamespace(multiprocessorCount=card.sms)
    module.nvmlDeviceGetComputeRunningProcesses = processes
    module.nvmlSystemGetDriverVersion = lambda: driver
    module.nvmlSystemGetCudaDriverVersion = lambda: 13000
    module.nvmlDeviceGetPowerManagementLimit = lambda card: 700_000
    module.nvmlDeviceGetCurrentClocksThrottleReasons = lambda card: 0
    return module
