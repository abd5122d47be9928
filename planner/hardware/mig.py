"""MIG slices by the names of their profiles: "A100 3g.40gb" has 3 of 7 parts of the multiprocessors and 40 GB.

Source: NVIDIA, MIG User Guide, "Supported MIG Profiles" (shares) and "List GPU Instance Profiles" (memory left, SMs).
"""

import re

from planner.hardware.gpu import GpuSpec

PROFILE = re.compile(r"[\s_-]*(?:\bmig[\s_-]*)?\b([1-47])g\.(\d{1,3})gb\b(?:[+-][a-z.]+)*", re.IGNORECASE)
"""(parts of the multiprocessors, GB) in a name."""
SHARES = {1: (1 / 8, 1 / 4), 2: (1 / 4, 1 / 2), 3: (1 / 2,), 4: (1 / 2, 1.0), 7: (1.0,)}
"""Parts of the multiprocessors -> what the memory may be of the GPU's: of a GPU in seven parts, of one in four (A30,
RTX PRO 6000) or of a profile with twice the memory (1g.20gb of 80)."""
LEFT = {1 / 8: 4.75 / 5, 1 / 4: 9.75 / 10, 1 / 2: 19.62 / 20, 1.0: 39.5 / 40}
"""Share of the memory -> what the driver shows of it: an A100-SXM4-40GB's; an H100 shows up to 3 % more."""
A30_SMS = 56
HOPPER_SMS = {1: 16, 2: 32, 3: 60, 4: 64, 7: 132}


def can_be_sliced(gpu: GpuSpec) -> bool:
    """Whether a card has MIG: A30, A100, H100, H200, B200, B300, RTX PRO 6000 and their kin."""
    return gpu.compute_capability in ((8, 0), (9, 0), (10, 0), (10, 3)) or gpu.name.startswith("RTX PRO 6000")


def num_sms(parts: int, sm_count: int, capability: tuple[int, int]) -> int:
    """Multiprocessors of a slice. An A100's and an A30's parts have 14; Blackwell's are taken as even parts, too."""
    if capability == (9, 0):
        return min(HOPPER_SMS[parts], sm_count)
    in_four = capability == (12, 0) or sm_count == A30_SMS
    return sm_count // (4 if in_four else 7) // 2 * 2 * parts
