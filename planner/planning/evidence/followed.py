"""Which setups a dry run follows: a plan does not count on one where none is."""

from planner.setup import TrainSetup
from planner.setup.allowed import FLEX, XFORMERS

OWN_CODE = {"ddp": "PyTorch's DistributedDataParallel", "fsdp2": "PyTorch's FSDP2 as Accelerate wraps it"}

MAX_TOKENS_IN_PIECES = 1 << 23
"""A loss in pieces is walked piece by piece: so many tokens are 2,048 tiles of TRL's, two seconds each way. No card
holds a micro-batch of so many."""


def why_no_dry_run(setup: TrainSetup) -> str:
    """Why no dry run follows this setup of any model, "" where one does."""
    if setup.attention in (XFORMERS, FLEX):
        return f"the kernel of {setup.attention} is no operation of torch, which a dry run follows"
    if setup.compile:
        return "torch.compile plans its own buffers, which a dry run cannot see"
    if setup.use_cache:
        return "it runs without a key-value cache"
    if setup.trainer.steps_in_backward:
        return "its optimizer steps inside the backward, which only `plan trace` of the recipe itself follows"
    if setup.trainer.grouped_experts:
        return "experts4bit-qlora's kernels and loader are not installed here"
    if setup.quantize_experts and setup.quantization == "int8":
        return "bitsandbytes has no parametrization of stacked experts in 8 bits, Axolotl's own is not installed"
    pieces = setup.loss == "chunked" or bool(setup.trainer.loss_chunk_tokens)
    if pieces and setup.tokens_per_micro_batch > MAX_TOKENS_IN_PIECES:
        return (
            f"a micro-batch of {setup.tokens_per_micro_batch:,} tokens: a dry run follows each piece of the loss, of "
            f"{MAX_TOKENS_IN_PIECES:,} at most"
        )
    return "" if setup.single_gpu else why_not_traced(setup)


def why_not_traced(setup: TrainSetup) -> str:
    """Why no dry run follows this way to spread a job, "" where one does."""
    if setup.pipeline_degree > 1:
        return _why_no_pipeline(setup)
    if setup.parallel in ("device-map", "dp"):
        return "it does not follow one process that drives several GPUs (device_map, nn.DataParallel)"
    if setup.expert_degree > 1 and setup.parallel != "fsdp2":
        return "it runs transformers' own token dispatch, not DeepEP's"
    if setup.fsdp_version == 1:
        return "it runs PyTorch's FSDP2, not version 1"
    if setup.context_degree > 1 and not setup.uses_ring_attention:
        return "there is none of DeepSpeed's engine, nor of its Ulysses, which run on no meta tensors"
    if setup.stream_degree > 1:
        return "it runs transformers' own tensor parallelism, not torchtitan's, whose layers are not installed"
    if setup.zero:
        return "there is none of DeepSpeed's engine, which runs on no meta tensors"
    if setup.tensor_degree > 1 and setup.parallel not in ("none", "fsdp2"):
        return f"no engine of the launch files runs tensor parallelism beside {setup.parallel}"
    return ""


def _why_no_pipeline(setup: TrainSetup) -> str:
    """As `why_not_traced`, of a pipeline: what torchtitan runs."""
    if setup.tensor_degree > 1:
        return "it does not follow tensor parallelism in pipeline stages (torchtitan's layers are not installed)"
    if setup.parallel not in ("none", "fsdp2"):
        return f"torchtitan, the launch files' engine for pipelines, does not combine them with {setup.parallel}"
    if setup.offload != "none":
        return "it does not follow states in the host's memory under a pipeline"
    if setup.parallel == "none" and setup.autocast_dtype is not None:
        return "torchtitan mixes precision in a pipeline only inside FSDP2; bf16-pure is followed"
    if setup.pipeline_schedule == "1f1b" and setup.accumulation_steps < setup.pipeline_degree:
        return "PyTorch's 1F1B schedule needs at least as many micro-batches as stages"
    return ""


def traced_rank(setup: TrainSetup) -> int:
    """The rank that is followed: 0, and of a ring one in the middle. It merges earlier ranks' pieces whole and later
    ones' by halves, whose result it makes anew in another layout: the last rank does the one, the first the other."""
    return (setup.context_degree - 1) // 2 if setup.uses_ring_attention else 0


def rank_note(setup: TrainSetup) -> str:
    """What ran as one rank, one sentence."""
    rank = f"rank 0 of {setup.num_gpus}"
    if setup.pipeline_degree > 1:
        inside = " inside FSDP2 as torchtitan wraps it" if setup.parallel == "fsdp2" else ""
        return (
            f"a rank of {setup.num_gpus}: PyTorch's own {setup.pipeline_schedule} schedule ran transformers' layers as "
            f"a stage{inside}, in a fake process group"
        )
    if setup.tensor_degree > 1:
        inside = " inside its FSDP2" if setup.parallel == "fsdp2" else ""
        return f"{rank}: transformers' own tensor parallelism{inside} ran in a fake process group"
    if setup.expert_degree > 1:
        return f"{rank}: transformers' own FSDP2 and token dispatch ran in a fake process group, with balanced routing"
    if setup.uses_ring_attention:
        rank = f"rank {traced_rank(setup)} of {setup.num_gpus}, PyTorch's own ring of {setup.context_degree}"
    host = "; what lies in the host's memory is told apart by a mark" if setup.offload != "none" else ""
    return f"{rank}: {OWN_CODE[setup.parallel]} ran in a fake process group, collectives without communication{host}"
