"""Where output goes: a reader that went away, links and devices."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from planner.cli.app import run
from planner.cli.output import write_text


class Gone(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.parametrize("arguments", [["gpus"], ["gpus", "--json"], ["models", "smollm"], ["--help"]], ids=str)
def test_a_reader_that_went_away_is_no_error(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan ... | head -1` under pipefail: 1 would mean that nothing fits."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", errors)
    assert run(arguments) == 0


def test_a_link_is_written_through_and_stays(tmp_path: Path) -> None:
    real, link, device = tmp_path / "real", tmp_path / "link", tmp_path / "device"
    real.write_text("old")
    link.symlink_to(real)
    device.symlink_to(os.devnull)
    for path in (link, device):
        write_text(path, "new")
        assert path.is_symlink()
    assert real.read_text() == "new"
    assert Path(os.devnull).is_char_device()


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    write_text(path, "first")
    before = path.stat().st_ino
    write_text(path, "second")
    assert path.read_text() == "second"
    assert path.stat().st_ino != before
    assert [one.name for one in path.parent.iterdir()] == ["plan.json"]
