"""What a training stack does that no field of `TrainSetup` says: fused kernels, checkpoint flavour, expert loops."""

from functools import cache

from planner.choices.stacks import STACKS
from planner.records import dataclass
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The software around a setup; the defaults are transformers 5, TRL 1 and peft 0.21 on the PyTorch of the
    measured runs; CURRENT has today's.

    Attributes:
        fused_norm_rope: norm, rotary and gated-MLP kernels are fused (Liger, fms fast kernels): one pass over memory.
        fused_loss: log-softmax and its gradient in one kernel over materialised logits (a Triton cross-entropy).
        padded_head: head and loss are compiled together, the head's matrices padded to aligned sizes.
        single_operations: softmax, activation, loss and matrices are single operations in Python
            (`planner.throughput.counts.SINGLE_HOST`).
        fused_lora: LoRA and its base matrix run as one autograd function (Unsloth, fms): fewer kernels, fewer passes.
        reentrant_checkpointing: old default; the recomputation runs the whole layer instead of stopping early.
        loop_experts: experts run one after another (transformers before 5) instead of one grouped matmul.
        gradient_clipping: the trainer computes the gradient norm and scales (the default of every trainer here).
        trainer_overhead: count the trainer's constant per step and per micro-batch; False for a bare loop.
        masked_attention: batches are really padded. SDPA then gets an explicit mask and skips no causal half;
            flash attention unpads in each layer, which waits for the GPU.
        rented_host: the host is a rented virtual machine's (`planner.throughput.rented`); else that of the published
            runs, as fast as fitted, no trainer counted around their micro-batches.
        cudnn_attention: SDPA takes cuDNN's kernels on Hopper and data-centre Blackwell: PyTorch 2.13, cuDNN above 9.15.
        torch_nf4: matrices in 4 bits are unpacked by operations of torch's, not by one kernel.
        flash_1: attention is the first FlashAttention (before July 2023) or its Triton form.
        optimizer_part: share of the optimizer step that this GPU does (0: none runs; 1/n: sharded over n).
        fp32_reduction: gradients travel between GPUs in fp32 although weights are gathered in 16 bit.
        fsdp_1: FSDP version 1: its flat buffers and rate limiter hide less communication, and with PEFT every adapter
            matrix is a unit of its own that is gathered and freed.
    """

    fused_norm_rope: bool = False
    fused_loss: bool = False
    padded_head: bool = False
    single_operations: bool = False
    fused_lora: bool = False
    reentrant_checkpointing: bool = False
    loop_experts: bool = False
    gradient_clipping: bool = True
    trainer_overhead: bool = True
    masked_attention: bool = False
    rented_host: bool = False
    cudnn_attention: bool = False
    torch_nf4: bool = False
    flash_1: bool = False
    optimizer_part: float = 1.0
    fp32_reduction: bool = False
    fsdp_1: bool = False


CURRENT = Conditions(cudnn_attention=True, rented_host=True)


def conditions_of(setup: TrainSetup) -> Conditions:
    """The conditions of a setup's stack (`planner.choices.stacks`): CURRENT for trainers on transformers."""
    return _conditions_of(setup.stack, setup.reentrant_checkpointing, setup.compiled, setup.fsdp_version)


@cache
def _conditions_of(stack: str, reentrant: bool, compiled: bool, fsdp_version: int) -> Conditions:
    by = STACKS[stack]
    found = Conditions(
        fused_norm_rope=by.fused,
        fused_loss=(by.in_place_loss and not by.shifted_loss) or (compiled and by.compiles_loss),
        padded_head=compiled and by.compiles_loss,
        single_operations=by.single_operations and not compiled,
        fused_lora=by.fused,
        reentrant_checkpointing=reentrant,
        gradient_clipping=by.clips_gradients,
        trainer_overhead=by.trainer_overhead,
        rented_host=by.trainer_overhead,
        torch_nf4=by.torch_nf4 and not compiled,
        cudnn_attention=True,
        fsdp_1=fsdp_version == 1,
    )
    return CURRENT if found == CURRENT else found
