"""Streams and their events as a rank's program uses them, and what it exchanges on them, for the log of its operators.

The model's stream is the device; what runs on another one matters where a collective is issued there, and where the
model's stream waits for that.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from planner.speed.operators import COLLECTIVE, GRADIENT, JOIN, MARK, Operator

if TYPE_CHECKING:
    from probes.dryrun.operators import OperatorLog

LONG_AGO = 16
"""Marks and collectives that lie further back have been reached: no engine looks ahead by more than a few."""


class Exchanges:
    """What a log is told of streams, each by how many ago the other end was, so that equal layers are told alike."""

    def __init__(self, log: "OperatorLog") -> None:
        self.marks = self.collectives = 0
        self._log = log

    def mark(self) -> int:
        """The model's stream records an event: the number of this mark, from 1."""
        self._log.noted(Operator(MARK))
        self.marks += 1
        return self.marks

    def join(self, collective: int) -> None:
        """The model's stream waits for a collective."""
        ago = self.collectives - collective + 1
        if collective and 1 <= ago <= LONG_AGO:
            self._log.noted(Operator(JOIN, numbers=(float(ago),)))

    def gradient(self, parameter: torch.Tensor) -> None:
        """DistributedDataParallel has the gradient of a parameter."""
        self._log.noted(Operator(GRADIENT, numbers=(float(parameter.numel() * parameter.element_size()),)))

    def collective(self, name: str, size_bytes: int, ranks: list[int], after: int = -1) -> int:
        """A collective of `ranks` is issued, after a mark, or on the model's stream: its number, from 1."""
        if after >= 0:
            ago = self.marks - after + 1
            after = ago if after and ago <= LONG_AGO else 0
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        numbers = (float(size_bytes), float(len(ranks)), float(stride), float(after))
        self._log.noted(Operator(f"{COLLECTIVE}{name}", numbers=numbers))
        self.collectives += 1
        return self.collectives

    def bucket(self, gradients: torch.Tensor) -> None:
        """DistributedDataParallel reduces gradients beside the rest of the backward, whose end waits for them."""
        ranks = list(range(torch.distributed.get_world_size()))
        number = self.collective("allreduce_", gradients.numel() * gradients.element_size(), ranks, self.mark())
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.join(number))

    def ran(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether an operator that ran is a collective: on the stream that it was issued on. What is waited for at its
        first use, as DTensor's are, counts as on the model's."""
        if not name.startswith(("c10d.", "_c10d_functional", "_dtensor.shard_dim")):
            return False
        from torch.distributed import get_process_group_ranks
        from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

        if func not in collective_ops or func in sync_ops:
            return True
        ranks = get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        size, stream = CollectiveOp.get_comm_tensor_size(func, out, args, kwargs), Stream.current
        if func in CollectiveOp.COMM_TENSOR_ARG_0_AND_RES:  # which counts what is sent and what is received
            size //= 2
        kind = name.partition(".")[2].partition(".")[0]
        if stream is Stream.main or not name.startswith("c10d."):
            self.collective(kind, size, ranks)
        else:
            stream.collective = self.collective(kind, size, ranks, stream.mark)
        return True


class Event:
    """An event: the last mark of the model's stream, and the last collective, that were issued before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mark = self.collective = 0

    def record(self, stream: "Stream | None" = None) -> None:
        (stream or Stream.current).record_event(self)

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or Stream.current).wait_event(self)

    def synchronize(self) -> None:
        Stream.main.wait_event(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """A millisecond, as divisions by it are common."""
        return 1.0


class Stream:
    """A stream, entered to issue on it.

    Attributes:
        exchanges: what is told of what this process issues, None: nothing.
        main: the model's stream; current: the one that is issued on.
        mark, collective: as an event that is recorded now would have them.
    """

    exchanges: ClassVar[Exchanges | None] = None
    main: ClassVar["Stream"]
    current: ClassVar["Stream"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mark = self.collective = 0
        self._before: list[Stream] = []

    def __enter__(self) -> "Stream":
        self._before.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *exception: object) -> None:
        Stream.current = self._before.pop()

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        if self is Stream.main and self.exchanges is not None:
            self.mark = self.exchanges.mark()
        event.mark, event.collective = self.mark, self.collective
        return event

    def wait_event(self, event: Event) -> None:
        if self is not Stream.main:
            self.mark, self.collective = max(self.mark, event.mark), max(self.collective, event.collective)
        elif self.exchanges is not None:
            self.exchanges.join(event.collective)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        if self is not Stream.main:
            Stream.main.wait_stream(self)

    def query(self) -> bool:
        return True


Stream.main = Stream.current = Stream()
