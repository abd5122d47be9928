"""amdsmi for tests: GPUs of AMD behind the names, shapes and units of amdsmi 7.0.2 (MiB, microwatts, dictionaries)."""

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class AmdSmiException(Exception):
    """Base of amdsmi's errors."""


@dataclass(eq=False)
class Card:
    """One GPU."""

    name: str = "AMD Instinct MI300X"
    serial: str = "0x4B2C1A9F8D3E6F7A"
    total_mib: int = 196592
    used_mib: Callable[[], int] = lambda: 285
    processes: list[tuple[int, int]] = field(default_factory=list)


def amdsmi_module(cards: Sequence[Card], *, initialises: bool = True) -> Any:
    """An `amdsmi` of these GPUs."""
    module: Any = types.ModuleType("amdsmi")

    def init() -> None:
        if not initialises:
            raise AmdSmiException("Error code:\n\t34 | AMDSMI_STATUS_DRIVER_NOT_LOADED")

    def asic(card: Card) -> dict[str, Any]:
        return {"market_name": card.name, "asic_serial": card.serial, "target_graphics_version": "gfx942"}

    def processes(card: Card) -> list[dict[str, Any]]:
        return [
            {
                "name": "python3",
                "pid": pid,
                "mem": num_bytes,
                "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": num_bytes},
            }
            for pid, num_bytes in card.processes
        ]

    module.AmdSmiException = AmdSmiException
    module.amdsmi_init = init
    module.amdsmi_shut_down = lambda: None
    module.amdsmi_get_processor_handles = lambda: list(cards)
    module.amdsmi_get_gpu_asic_info = asic
    module.amdsmi_get_gpu_vram_usage = lambda card: {"vram_total": card.total_mib, "vram_used": card.used_mib()}
    module.amdsmi_get_gpu_process_list = processes
    module.amdsmi_get_gpu_driver_info = lambda card: {
        "driver_name": "amdgpu",
        "driver_version": "6.14.14",
        "driver_date": "2026/05/01",
    }
    module.amdsmi_get_power_cap_info = lambda card: {"power_cap": 750_000_000, "default_power_cap": 750_000_000}
    return module
