"""What FSDP2 gathers for the forward of a reference that an objective asks."""

from planner.memory.engines.gather import Groups
from planner.memory.states import state_bytes
from planner.memory.trained import Trained
from planner.setup import TrainSetup


def reference_bytes(setup: TrainSetup, groups: Groups, local: Trained, *, accumulated: bool) -> tuple[int, int]:
    """(gathered weights and buffers while a reference's layers run, beyond what is held at the loss; what more of them
    is there before a layer runs): of the policy what stays gathered, and where its adapters are off a block with its
    buffer, before that two blocks, the embedding or a wide root; of a copy all of it, and the buffer that it came in,
    which lives as long as its forward does: TRL makes one group of it. Kept gathered it is resident.

    Source: trl 1.16 `models/utils.py` prepare_fsdp; PyTorch 2.13 `FSDPState._post_forward` (all_gather_state).
    """
    if setup.copies_reference:
        whole = groups.whole
        if setup.reshard_after_forward:
            return 2 * whole, 0
        # its buffer is there once, before the first gradients and the optimizer's states
        later = state_bytes(local.num, local.dtype, setup.optimizer, matrix_edge_sum=local.edge_sum)
        later += local.size_bytes if accumulated else 0
        return max(0, whole - later), 0
    if not setup.reshard_after_forward:
        return 0, 0
    return 2 * groups.layer, max(groups.layer, 2 * (groups.embedding - groups.layer), groups.wide_root)
