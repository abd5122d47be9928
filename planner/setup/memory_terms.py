"""`MemoryTerm` and `MemoryBreakdown`: what memory is made of, and why the peak is not the sum of everything."""

from collections.abc import Iterable
from functools import cached_property
from typing import Literal

from planner.core.records import dataclass

Phase = str
PHASES: tuple[Phase, ...] = ("load", "forward", "loss", "backward", "step")
"""The phases of one training step, in order; "load" is what loading the model left or needs."""

Category = Literal[
    "weights", "adapters", "gradients", "optimizer", "activations", "loss", "workspace", "dequantization", "other"
]


Term = tuple[Category, str, int]
"""(category, name, bytes) of one part of memory at one moment."""


def total_bytes(terms: Iterable[Term]) -> int:
    return sum([term[2] for term in terms])


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerm:
    """One part of memory: its bytes, and in which phases they are alive (all of PHASES: resident)."""

    category: Category
    name: str
    size_bytes: int
    phases: tuple[Phase, ...] = PHASES

    @property
    def resident(self) -> bool:
        return len(self.phases) == len(PHASES)


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """All terms of one setup. Peak = resident terms + the largest phase, never the sum of everything.

    `allocator_gap_bytes` is what the caching allocator holds beyond live tensors at the peak; `context_bytes` is what
    the driver holds outside PyTorch's count. `profiled`: they come from the structure's step profile, not from closed
    forms.
    """

    terms: tuple[MemoryTerm, ...]
    allocator_gap_bytes: int
    context_bytes: int
    profiled: bool = False

    @cached_property
    def phase_bytes(self) -> dict[str, int]:
        totals: dict[str, int] = dict.fromkeys(PHASES, 0)
        for term in self.terms:
            for phase in term.phases:
                totals[phase] += term.size_bytes
        return totals

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak falls (the first of equals)."""
        return max(PHASES, key=self.phase_bytes.__getitem__)

    @property
    def peak_allocated_bytes(self) -> int:
        """What `torch.cuda.max_memory_allocated` would report."""
        return self.phase_bytes[self.peak_phase]

    @property
    def peak_reserved_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved` would report."""
        return self.peak_allocated_bytes + self.allocator_gap_bytes

    @property
    def peak_device_bytes(self) -> int:
        """What the driver would report for this process."""
        return self.peak_reserved_bytes + self.context_bytes

    def at_peak(self) -> tuple[MemoryTerm, ...]:
        """The terms alive in the peak's phase, largest first."""
        peak_phase = self.peak_phase
        alive = [term for term in self.terms if peak_phase in term.phases and term.size_bytes]
        return tuple(sorted(alive, key=lambda term: -term.size_bytes))


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of the GPUs that hold the same part of the job.

    Attributes:
        name: for people ("every rank", "stage 1 of 4", "GPU 0").
        num_ranks: how many GPUs of the job are alike.
    """

    name: str
    num_ranks: int
    breakdown: MemoryBreakdown
