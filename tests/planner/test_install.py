"""Hints that install something name a command that works here: from the checkout, or from an index."""

import shlex
from pathlib import Path

import pytest

from planner.core import install


def _installed(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """As pip leaves it in a folder of packages (PEP 610)."""
    (dist_info := folder / "packages" / "finetune_planner-0.1.0.dist-info").mkdir(parents=True)
    if text is not None:
        (dist_info / "direct_url.json").write_text(text, "utf-8")
    monkeypatch.setattr(install.sys, "path", ["", str(folder / "none"), str(dist_info.parent)])


def test_a_checkout_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    text = f'{{"url": "{folder.as_uri()}", "dir_info": {{"editable": true}}}}'
    _installed(tmp_path, monkeypatch, text)
    words = shlex.split(install.install_command("torch"))
    assert words[1:] == ["-m", "pip", "install", "-e", f"{folder}[torch]"]
    (folder / "pyproject.toml").unlink()  # a checkout that is gone
    assert shlex.split(install.install_command("torch"))[-1] == "finetune-planner[torch]"


def test_what_came_from_an_index_is_named_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(tmp_path, monkeypatch, None)
    assert install.install_command("search").endswith("-m pip install 'finetune-planner[search]'")


@pytest.mark.parametrize(
    ("config", "one_call", "command", "more"),
    [
        (
            "version = 3.12.1\n", False,
            f"{install.sys.executable} -m pip install WHAT", f"{install.sys.executable} -m pip install a 'b>=2'",
        ),
        (
            "uv = 0.13.9\n", False,
            f"uv pip install --python {install.sys.executable} WHAT",
            f"uv pip install --python {install.sys.executable} a 'b>=2'",
        ),
        ("uv = 0.13.9\n", True, "uvx --from WHAT plan ...", "uvx --with a --with 'b>=2' --from WHAT plan ..."),
        (
            "version = 3.12.1\n", True,
            "pipx run --spec WHAT plan ...", "pipx run --with a --with 'b>=2' --spec WHAT plan ...",
        ),
    ],
)  # fmt: skip
def test_a_wheel_is_named_as_the_tool_of_its_environment_takes_it(
    config: str, one_call: bool, command: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `uvx --from WHEEL plan` and `pipx run --spec WHEEL plan` leave on the disk (uv 0.13.9, pipx 1.18)."""
    wheel = tmp_path / "finetune_planner-0.1.0-py3-none-any.whl"
    wheel.touch()
    (tmp_path / "pyvenv.cfg").write_text(config, "utf-8")
    if one_call:
        (tmp_path / "CACHEDIR.TAG").touch()
    monkeypatch.setattr(install.sys, "prefix", str(tmp_path))
    _installed(tmp_path, monkeypatch, f'{{"url": "{wheel.as_uri()}"}}')
    line = install.install_command("torch")
    assert shlex.split(line) == shlex.split(command.replace("WHAT", f"'finetune-planner[torch] @ {wheel.as_uri()}'"))
    line = install.packages_command("a", "b>=2")
    assert shlex.split(line) == shlex.split(more.replace("WHAT", f"'finetune-planner @ {wheel.as_uri()}'"))
