"""What is being done, told on stderr to whoever watches."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from planner.core.units import seconds

CHANGE_S, STEP_S, STILL_S = 1.5, 4.0, 15.0
"""In a pipe, a change is told when the last line is so old, one more of many alike, and what goes on unchanged."""
T = TypeVar("T")


def printable(text: str) -> str:
    """Text for a terminal: what would move its cursor, change its title or hide what follows is shown as an escape.

    Names of files, columns and settings come from strangers.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )


def say(text: str) -> None:
    """One line for a person, on stderr."""
    print(printable(text), file=sys.stderr)


class ProgressLine:
    """What is being done, on stderr: one line that changes where a person watches; in a pipe or a log file a line for
    every change, and now and then one that says it is still so."""

    def __init__(
        self, *, total: int | None = None, budget_s: float | None = None, started_s: float | None = None
    ) -> None:
        self._watched = sys.stderr.isatty()
        self._total, self._budget_s = total, budget_s
        self._started = time.monotonic() if started_s is None else started_s
        self._done = 0
        self._printed: set[str] = set()  # of the probe at hand; probes at the same time take turns to speak
        self._printed_at = 0.0

    def say(self, text: str) -> None:
        """This command is at `text`."""
        (self._show if self._watched else self._tell)(f"{self._head()}{text}")

    def event(self, text: str, elapsed_s: float) -> None:
        """A probe is at `text`, `elapsed_s` after its start; told every half second."""
        text = text or "starting"
        shown = f"{text} ({seconds(elapsed_s)})"
        if self._watched:
            self._show(self._head() + shown)
            return
        silent_s = time.monotonic() - self._printed_at
        if text not in self._printed and silent_s >= CHANGE_S:
            self._printed.add(text)
            self._tell(self._head() + shown)
        elif silent_s >= STILL_S:
            self._tell(f"{self._head()}still {shown}")

    def step(self, text: str) -> None:
        """One of many alike begins."""
        if self._watched:
            self._show(self._head() + text)
        elif time.monotonic() - max(self._started, self._printed_at) > STEP_S:
            self._tell(self._head() + text)

    def _tell(self, line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)
        self._printed_at = time.monotonic()

    def advance(self, line: str = "") -> None:
        """One probe is answered; `line` stays on the screen (also in a pipe)."""
        self._done += 1
        self._printed.clear()
        self.close()
        if line:
            self.note(line)

    def note(self, line: str) -> None:
        self.close()
        print(printable(line), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves a clean line."""
        if self._watched:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def _head(self) -> str:
        spent = time.monotonic() - self._started
        if self._budget_s is not None:
            return f"[{self._done} done, {seconds(max(0.0, self._budget_s - spent))} left] "
        if self._total is not None and self._done:
            left = spent / self._done * (self._total - self._done)
            return f"[{self._done} of {self._total}, {seconds(left)} left] "
        return f"[{self._done} of {self._total}] " if self._total is not None else ""

    def _show(self, text: str) -> None:
        sys.stderr.write(f"\r\033[K{printable(text[:150])}")
        sys.stderr.flush()


def steps(items: Iterable[T], words: str, *, num: int | None = None) -> Iterator[T]:
    """The items one by one, with how far it is and the time left while they are worked on; `num` of them, where they do
    not know it themselves."""
    line = ProgressLine(total=len(items) if isinstance(items, Sized) else num or 0)
    try:
        for item in items:
            line.step(words)
            yield item
            line.advance()
    finally:
        line.close()
