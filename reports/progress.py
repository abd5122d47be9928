"""Progress with the time left, on stderr: a live bar where a person watches, nothing in a pipe or a log."""

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")

QUIET_S = 0.5
"""Work that is done sooner shows no bar."""


def steps(items: Sequence[T], words: str, console: Console) -> Iterator[T]:
    """The items one by one, with a bar and the time left while they are worked on.

    The bar appears only on a terminal and only after half a second; it disappears when done, also after an exception.
    """
    if not console.is_terminal or len(items) < 2:
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    started = monotonic()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    shown = False
    task = bar.add_task(words, total=len(items))
    try:
        for number, item in enumerate(items):
            if not shown and monotonic() - started > QUIET_S:
                bar.start()
                shown = True
            bar.update(task, completed=number)
            yield item
    finally:
        if shown:
            bar.stop()
