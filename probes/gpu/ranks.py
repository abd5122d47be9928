"""A job of several ranks seen from outside: what went wrong in which of them.

No torch here: the runner decides from what the ranks and torchrun's agent told it.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planner.core.install import packages_command
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind
from probes.gpu.failures import classify_exit, is_peer_trouble

_TERMINATED = -15
"""How the agent ends the ranks that are left once one has failed: says nothing about the rank."""


def why_not_probed(setup: TrainSetup) -> str:
    """Why a spread over several GPUs is not measured by a probe, with what to do instead; "" where it is."""
    if setup.parallel == "dp":
        return "nn.DataParallel is not probed: it is never recommended; probe 'ddp' on the same GPUs"
    if setup.parallel == "device-map":
        return (
            "a device map is not probed: its GPUs take turns, each layer costs what it costs on one GPU; probe the "
            "setup on one GPU (--gpus 1, truncated depth) and read the peak of each GPU in `plan estimate`"
        )
    if setup.tensor_degree > 1:
        return "tensor parallelism is not probed: it needs the training engine itself (torchtitan, Megatron); run that"
    if setup.context_degree > 1:
        return "sequences cut over GPUs are not probed: `plan confirm` runs the emitted file itself"
    if setup.expert_degree > 1:
        return "experts distributed over GPUs are not probed: `plan confirm` runs the emitted file itself"
    if setup.pipeline_degree > 1:
        return "pipeline parallelism is not probed: it needs the training engine itself; probe one stage's layers alone"
    if setup.zero and importlib.util.find_spec("deepspeed") is None:
        return (
            f"ZeRO is probed through DeepSpeed, which is not installed here: {packages_command('deepspeed')}, or probe "
            "'fsdp2' (shards as zero3 does)"
        )
    return ""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This process's place in its job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def rank_info_of(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """The place that torchrun's variables give this process; alone where there are none."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return RankInfo()
    rank = int(environ["RANK"])
    return RankInfo(rank=rank, size=int(environ["WORLD_SIZE"]), local_rank=int(environ.get("LOCAL_RANK", rank)))


class RankFailure(NamedTuple):
    """What a rank said about its own end."""

    rank: int
    kind: FailureKind
    message: str


@dataclass(kw_only=True)
class RankReport:
    """Everything heard from the ranks of one job and from their agent, in the order it came.

    Attributes:
        progress: what each rank was last seen doing.
        failures: the ranks that could still say why they end.
        exits: (rank, status as `subprocess` gives it) of the ranks that the agent found dead.
    """

    progress: dict[int, str] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)

    def hear(self, event: Mapping[str, Any]) -> None:
        """One line of the status pipe; what is not about ranks is left alone.

        Raises:
            ValueError, TypeError, KeyError: a damaged line.
        """
        rank = event.get("rank")
        if rank is None:
            return
        if "progress" in event:
            self.progress[int(rank)] = str(event["progress"])
        if "failure" in event:
            failure = event["failure"]
            self.failures.append(RankFailure(int(rank), FailureKind(failure["kind"]), str(failure["message"])))
        if "exit" in event:
            self.exits[int(rank)] = int(event["exit"])

    @property
    def failed(self) -> bool:
        return bool(self.failures or self.exits)

    def doing(self, size: int) -> str:
        """What the job is doing, for a progress line: one text where all ranks do the same, else rank 0's and who does
        something else; "" before any rank spoke."""
        if not self.progress:
            return ""
        texts = [self.progress.get(rank, "starting") for rank in range(size)]
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            ranks.setdefault(text, []).append(rank)
        others = [f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items() if text != texts[0]]
        return f"{texts[0]} ({'; '.join(others)})" if others else texts[0]

    def last_seen(self) -> str:
        states = [f"rank {rank} {text!r}" for rank, text in sorted(self.progress.items())]
        return ", ".join(states) or "starting"

    def verdict(self, log_tail: str, *, size: int, oom_killed: bool) -> tuple[FailureKind, str] | None:
        """(kind, message) of the job: the cause, not what it did to the other ranks; None when nothing was heard.

        A rank that ran out of memory or refused the setup says so itself. A rank that was killed cannot: the agent saw
        its signal. What the others then say (a peer is gone, a collective timed out) counts only when there is nothing
        else; a collective that times out with every rank alive is a straggler.
        """
        causes = [failure for failure in self.failures if not is_peer_trouble(failure.message)]
        classified = [failure for failure in causes if failure.kind is not FailureKind.CRASHED]
        if classified:
            return classified[0].kind, self._of(classified[0].rank, size, classified[0].message)
        unasked = {rank: status for rank, status in self.exits.items() if status != _TERMINATED}
        signalled = [rank for rank, status in unasked.items() if status < 0]
        silent = [rank for rank in unasked if rank not in {failure.rank for failure in self.failures}]
        for rank in (*signalled, *(() if causes else silent)):
            kind, message = classify_exit(self.exits[rank], log_tail, oom_killed=oom_killed)
            return kind, self._of(rank, size, message)
        if causes:
            return causes[0].kind, self._of(causes[0].rank, size, causes[0].message)
        late = [failure for failure in self.failures if failure.kind is FailureKind.TIMEOUT]
        if late:
            words = f"{self._of(late[0].rank, size, late[0].message)}; last seen {self.last_seen()}"
            return FailureKind.TIMEOUT, f"a collective did not end in time: {words}"
        if self.failures:
            return FailureKind.CRASHED, self._of(self.failures[0].rank, size, self.failures[0].message)
        for rank, status in self.exits.items():  # ended from outside
            return FailureKind.CRASHED, self._of(rank, size, classify_exit(status, "", oom_killed=False)[1])
        return None

    @staticmethod
    def _of(rank: int, size: int, message: str) -> str:
        return f"rank {rank} of {size}: {message}"
