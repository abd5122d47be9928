"""Hints that install something name a command that works here: from the checkout, or from an index."""

import shlex
from pathlib import Path

import pytest

from planner import install


class _Installed:
    def __init__(self, text: str | None) -> None:
        self.text = text

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.text


def test_a_checkout_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    text = f'{{"url": "{folder.as_uri()}", "dir_info": {{"editable": true}}}}'
    monkeypatch.setattr(install, "distribution", lambda name: _Installed(text))
    words = shlex.split(install.install_command("torch"))
    assert words[1:] == ["-m", "pip", "install", "-e", f"{folder}[torch]"]
    (folder / "pyproject.toml").unlink()  # a checkout that is gone
    assert shlex.split(install.install_command("torch"))[-1] == "finetune-planner[torch]"


def test_what_came_from_an_index_is_named_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "distribution", lambda name: _Installed(None))
    assert install.install_command("search").endswith("-m pip install 'finetune-planner[search]'")
