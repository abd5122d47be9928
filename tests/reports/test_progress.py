"""Progress: a bar for a person, a line now and then in a pipe or a log."""

import io
import itertools

import pytest
from rich.console import Console

from reports import page as page_room
from reports.page import steps


def test_progress_is_silent_where_nobody_watches() -> None:
    stream = io.StringIO()
    assert list(steps([1, 2, 3], "dry runs", Console(file=stream))) == [1, 2, 3]
    assert stream.getvalue() == ""


def test_progress_shows_count_and_time_left_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_room, "QUIET_S", -1.0)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    assert list(steps([1, 2, 3], "dry [runs]", console)) == [1, 2, 3]
    shown = stream.getvalue()
    assert "dry [runs]" in shown
    assert "/3" in shown
    assert ":" in shown  # the time left


def test_progress_quick_work_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_room, "monotonic", itertools.count(0.0, page_room.QUIET_S / 4).__next__)
    stream = io.StringIO()
    assert list(steps([1, 2], "x", Console(file=stream, force_terminal=True))) == [1, 2]
    assert stream.getvalue() == ""


def test_progress_leaves_the_terminal_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_room, "QUIET_S", -1.0)
    stream = io.StringIO()
    items = steps([1, 2], "x", Console(file=stream, force_terminal=True))
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert stream.getvalue().rstrip().endswith("\x1b[2K") or "\x1b[?25h" in stream.getvalue()


def test_a_pipe_hears_now_and_then_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 5.0, 5.0, 6.0, 10.0, 10.0])
    monkeypatch.setattr("reports.page.monotonic", lambda: next(clock))
    stream = io.StringIO()
    assert list(steps(["a"] * 5, "planning", Console(file=stream, width=80))) == ["a"] * 5
    assert stream.getvalue().splitlines() == ["planning: 2 of 5, 7.5 s left", "planning: 4 of 5, 2.5 s left"]
