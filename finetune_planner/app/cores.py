"""Work on all cores: by forks of this process, which hold what it has imported and read."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from planner.core.errors import EnvironmentProblem

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_WORK: list[Any] = []
"""In a fork: what is done, and with what, which it has from its parent."""


def on_cores(work: Callable[[Item], Answer], items: Sequence[Item], *, alone: bool = False) -> Iterator[Answer]:
    """The answers as they come: in the items' order where one process does it all.

    Args:
        alone: one process, whose memory of what it did each item needs.

    Raises:
        Exception: of `work`; what is under way ends first.
        EnvironmentProblem: a fork was killed.
    """
    num = min(len(items), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if num < 2 or alone:
        yield from map(work, items)
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    with ProcessPoolExecutor(num, get_context("fork"), _WORK.extend, ((work, items),)) as pool:
        try:
            for answer in as_completed([pool.submit(_nth, place) for place in range(len(items))]):
                yield answer.result()
        except BrokenProcessPool as error:
            raise EnvironmentProblem(
                "a process of this command was ended by the system, perhaps for want of memory", hint="call it again"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _nth(place: int) -> Any:
    work, items = _WORK
    return work(items[place])
