"""What several ranks answer: one breakdown for every distinct rank."""

from dataclasses import dataclass

from planner.memory.types import MemoryBreakdown


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
