"""How a job spreads over GPUs, as far as several targets say it in the same words: refusals first."""

from planner.setup import TrainSetup


def split_refusal(setup: TrainSetup, tool: str) -> str:
    """Why a tool that only copies or shards a whole model cannot run this setup, "" when it can."""
    if setup.pipeline_degree > 1:
        return f"no pipeline parallelism is written for {tool}"
    if setup.tensor_degree > 1:
        return f"no tensor parallelism is written for {tool}"
    if setup.parallel == "dp":
        return "one process for all GPUs (nn.DataParallel) is only the plain script's; ddp holds less and is faster"
    return ""
