"""Which ways to spread a job a dry run follows. No torch here: a refusal and a cached answer need none."""

from planner.setup import TrainSetup

OWN_CODE = {"ddp": "PyTorch's DistributedDataParallel", "fsdp2": "PyTorch's FSDP2 as Accelerate wraps it"}
MODELLED = {"zero1": "DeepSpeed's ZeRO-1", "zero2": "DeepSpeed's ZeRO-2", "zero3": "DeepSpeed's ZeRO-3"}


def why_not_traced(setup: TrainSetup) -> str:
    """Why no dry run follows this way to spread a job, "" where one does."""
    if setup.pipeline_degree > 1 or setup.parallel == "device-map":
        return "it does not follow a model cut into stages"
    if setup.tensor_degree > 1 and setup.parallel not in ("none", "fsdp2"):
        return f"no engine of the launch files runs tensor parallelism beside {setup.parallel}"
    if setup.tensor_degree == 1 and setup.parallel not in OWN_CODE and setup.parallel not in MODELLED:
        return f"it does not follow parallel {setup.parallel!r}"
    return ""


def rank_note(setup: TrainSetup) -> str:
    """What ran as one rank and what was only modelled, one sentence."""
    rank = f"rank 0 of {setup.num_gpus}"
    if setup.tensor_degree > 1:
        inside = " inside its FSDP2" if setup.parallel == "fsdp2" else ""
        return f"{rank}: transformers' own tensor parallelism{inside} ran in a fake process group"
    if setup.parallel in OWN_CODE:
        host = "; what lies in the host's memory is told apart by a mark" if setup.offload != "none" else ""
        return (
            f"{rank}: {OWN_CODE[setup.parallel]} ran in a fake process group, collectives without communication{host}"
        )
    return (
        f"{rank}: the model's step and the optimizer on the rank's partition ran; {MODELLED[setup.parallel]} buckets, "
        "copies and partitions are modelled after its source (0.19), as its engine runs on no meta tensors"
    )
