"""`GpuSpec`: facts about one accelerator, as one row of the GPU table. Fitted constants live in `calibration`."""

from dataclasses import field

from planner.core.records import dataclass

GRACE_BYTES = {
    "NVIDIA GH200 480GB": 480 * 10**9,
    "NVIDIA GH200 144G HBM3e": 480 * 10**9,
    "NVIDIA GB200": 240 * 10**9,
    "NVIDIA GB300": 240 * 10**9,
}
"""Name by the driver -> LPDDR5X of the Grace CPU for each GPU: 480 GB for one Hopper or two Blackwells at most.

Source: NVIDIA's pages of GH200 ("up to 480 GB") and GB200 NVL72, GB300 NVL72 (17 TB for 72 GPUs)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """One GPU, facts only; every figure with its unit, dense rates with fp32 accumulation.

    Attributes:
        key: the table's key ("rtx-4090").
        name: marketing name.
        driver_name: what the driver or torch reports ("NVIDIA GeForce RTX 4090").
        vendor: "NVIDIA", "AMD", "Apple" or "Intel".
        arch: "Ada", "Hopper", ...
        compute_capability: (major, minor), None where the vendor has no such thing.
        memory_bytes: usable memory as torch reports it (`total_memory`), not marketing.
        memory_basis: where `memory_bytes` was read.
        bf16_flops_per_s: None where the hardware has no bf16 units (torch then emulates it slowly).
        memory_bandwidth_bytes_per_s: of device memory, less what ECC takes of it (`planner.hardware.gpus.ECC_SHARE`).
        nvlink_bytes_per_s: 0 where there is none.
        flash_attention_2: whether the flash-attn 2 kernels run on it.
        measured_context_bytes: what a training process was seen to hold beside PyTorch's segments on this very card;
            None of a card that nobody here has measured (`planner.memory.workspace` then estimates it).
        source: where the facts come from; `unsourced` names fields from memory.
        taken_as: which card another name than its own was taken for, one sentence; "" for its own.
    """

    key: str
    name: str
    driver_name: str
    vendor: str
    arch: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int
    memory_basis: str
    bf16_flops_per_s: float | None
    fp16_flops_per_s: float | None
    fp32_flops_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    memory_bandwidth_bytes_per_s: float
    nvlink_bytes_per_s: float = 0.0
    pcie: str = ""
    sm_count: int | None = None
    l2_bytes: int | None = None
    tdp_w: float | None = None
    flash_attention_2: bool
    source: str
    unsourced: tuple[str, ...] = ()
    note: str = ""
    measured_context_bytes: int | None = None
    taken_as: str = field(compare=False, default="")

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ValueError(f"memory_bytes must be positive, got {self.memory_bytes} ({self.key})")
        if self.memory_bandwidth_bytes_per_s <= 0:
            raise ValueError(f"memory bandwidth must be positive ({self.key})")

    @property
    def bf16(self) -> bool:
        """Whether bf16 runs on the hardware's own units."""
        return self.bf16_flops_per_s is not None

    @property
    def host_bytes(self) -> int:
        """A GPU's share of the CPU's memory on a superchip; 0 of other cards."""
        return 0 if self.is_slice else GRACE_BYTES.get(self.driver_name, 0)  # slices share it

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice."""
        return "MIG" in self.name

    @property
    def shares_host_memory(self) -> bool:
        """Whether the system's memory is its own, so that nothing is offloaded, and a machine has one of it (DGX Spark,
        Jetson, Apple, Ryzen AI Max)."""
        return self.vendor == "Apple" or "shared with the host" in self.note

    @property
    def is_built_in(self) -> bool:
        """Whether it comes with the machine around it: a laptop's, a Jetson module's."""
        return "Laptop" in self.name or "Jetson" in self.name
