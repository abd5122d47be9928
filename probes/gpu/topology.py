"""How this machine's GPUs are connected, as the driver tells it (NVML). Never raises: what is not told is left out."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from types import ModuleType
from typing import Any

from planner.hardware.driver import device_handle, nvml

_ANCESTORS = {
    "NVML_TOPOLOGY_INTERNAL": "one board",
    "NVML_TOPOLOGY_SINGLE": "PCIe, one switch",
    "NVML_TOPOLOGY_MULTIPLE": "PCIe, several switches",
    "NVML_TOPOLOGY_HOSTBRIDGE": "PCIe, one host bridge",
    "NVML_TOPOLOGY_NODE": "PCIe, one processor",
    "NVML_TOPOLOGY_SYSTEM": "PCIe, across processors",
}
"""NVML's nearest common ancestor of two GPUs, near to far. Source: nvml.h `nvmlGpuTopologyLevel_t`."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The connections between some GPUs.

    Attributes:
        nvlinks: active NVLinks of each; None where the driver does not say.
        pairs: (first, second) -> "NVLink" or the PCIe path; pairs that the driver does not tell about are left out.
    """

    devices: tuple[str, ...]
    nvlinks: tuple[int | None, ...]
    pairs: dict[tuple[str, str], str]

    def text(self) -> str:
        """One line for a person: each kind of connection and how many pairs have it."""
        if len(self.devices) < 2:
            return "one GPU, nothing to connect" if self.devices else "no GPU"
        kinds = Counter(self.pairs.values())
        parts = [f"{kind} ({num} pair{'s' if num > 1 else ''})" for kind, num in kinds.most_common()]
        links = {num for num in self.nvlinks if num}
        if links:
            parts.append(
                f"{min(links)} NVLinks on each" if len(links) == 1 else f"{min(links)} to {max(links)} NVLinks"
            )
        return "; ".join(parts) or "the driver does not tell how they are connected"


def topology(devices: Sequence[str]) -> Topology:
    with nvml() as module:
        if module is None:
            return Topology(devices=tuple(devices), nvlinks=(None,) * len(devices), pairs={})
        handles: dict[str, Any] = {}
        for device in devices:
            with suppress(module.NVMLError, LookupError):
                handles[device] = device_handle(module, device)
        pairs = {}
        for first, second in combinations(handles, 2):
            kind = _connection(module, handles[first], handles[second])
            if kind:
                pairs[first, second] = kind
        nvlinks = tuple(_nvlinks(module, handles[name]) if name in handles else None for name in devices)
    return Topology(devices=tuple(devices), nvlinks=nvlinks, pairs=pairs)


def _nvlinks(module: ModuleType, handle: Any) -> int:
    """Active NVLinks of one GPU; 0 on a card without."""
    active = 0
    for link in range(int(getattr(module, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            active += int(module.nvmlDeviceGetNvLinkState(handle, link) == module.NVML_FEATURE_ENABLED)
        except module.NVMLError:  # no such link, or no NVLink at all
            break
    return active


def _connection(module: ModuleType, first: Any, second: Any) -> str:
    with suppress(module.NVMLError):  # not told in some containers; the PCIe path may be
        if module.nvmlDeviceGetP2PStatus(first, second, module.NVML_P2P_CAPS_INDEX_NVLINK) == module.NVML_P2P_STATUS_OK:
            return "NVLink"
    with suppress(module.NVMLError):
        level = module.nvmlDeviceGetTopologyCommonAncestor(first, second)
        return next((text for name, text in _ANCESTORS.items() if getattr(module, name, None) == level), "")
    return ""
