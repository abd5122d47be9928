"""The line of progress in a pipe: the first word at once, every change soon, and now and then that it is still so."""

import sys

import pytest

from finetune_planner.app import progress
from finetune_planner.app.progress import CHANGE_S, STEP_S, STILL_S, ProgressLine, steps


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made.monotonic)
    return made


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def follow(line: ProgressLine, clock: Clock, texts: list[tuple[float, str]]) -> None:
    """The runner's calls: each text for so many seconds, told every half second."""
    for length_s, text in texts:
        for _ in range(int(length_s / 0.5)):
            clock.now_s += 0.5
            line.event(text, clock.now_s - 1000.0)


def test_something_is_said_before_anything_has_happened(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    line.say("reading the model")
    assert told(capsys) == ["reading the model"]
    ProgressLine().event("", 0.0)  # a child that has not spoken yet
    assert told(capsys) == ["starting (0 ms)"]


def test_a_change_is_told_within_two_seconds_and_silence_is_broken(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert CHANGE_S + 0.5 <= 2.0
    line = ProgressLine()
    line.say("starting 2 ranks")
    follow(line, clock, [(4.0, "importing"), (0.5, "choosing depths"), (2 * STILL_S + 5, "building")])
    lines = told(capsys)
    assert [text.partition(" (")[0] for text in lines] == [
        "starting 2 ranks",
        "importing",
        "choosing depths",
        "building",
        "still building",
        "still building",
    ]


def test_two_probes_at_a_time_do_not_flood_a_log(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine(total=2)
    follow(line, clock, [(0.5, text) for _ in range(25) for text in ("timing 2 layers", "waiting for the device")])
    assert len(told(capsys)) <= 2 + 25 / STILL_S + 1
    line.advance("one done")
    follow(line, clock, [(2.0, "timing 2 layers")])
    assert told(capsys)[0] == "one done"


def test_a_terminal_gets_one_line_that_changes(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    line = ProgressLine()
    line.say("reading")
    line.event("building", 1.0)
    line.close()
    assert capsys.readouterr().err == "\r\033[Kreading\r\033[Kbuilding (1.0 s)\r\033[K"


def test_a_pipe_hears_now_and_then_how_far_it_is(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for number in steps([1, 2, 3, 4], "planning"):
        clock.now_s += STEP_S + 1 if number > 2 else 0
    assert capsys.readouterr().err == "[3 of 4, 1.7 s left] planning\n"
