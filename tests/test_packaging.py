"""What the wheel takes along."""

import importlib.util
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from finetune_planner.cli.app import run
from planner import __version__

ROOT = Path(__file__).parents[1]


def test_the_wheel_takes_every_file_that_a_package_reads() -> None:
    """An editable install hides what a wheel would leave out: each file that git knows in a package is asked for."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    taken = settings["package-data"]
    rooms = [name.rstrip("*") for name in settings["packages"]["find"]["include"]]
    listed = subprocess.run(["git", "ls-files", *rooms], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = [Path(line) for line in listed.splitlines()] or [
        path.relative_to(ROOT)
        for room in rooms
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert len(files) > 500
    missing = []
    for file in files:
        room, *rest = file.parts
        inside = "/".join(rest)
        patterns = [*taken.get("*", []), *taken.get(room, [])]
        if file.suffix != ".py" and not any(
            fnmatch(inside, pattern) and inside.count("/") == pattern.count("/") for pattern in patterns
        ):
            missing.append(str(file))
    assert missing == []


def test_in_a_wheel_nothing_is_named_from_the_top() -> None:
    """The build renames what names a module (`setup.py`): no import and no text of one is left."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "setup.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    room = f"(?:{'|'.join(build.ROOMS)})"
    module = rf"""["']{room}\.[a-z_]+[.:"'{{]"""
    left = re.compile(
        rf"""^ *import {room}\b|\bfrom {room}[\w.{{}}]* import|{module}|(?:files|PackageLoader)\(["']{room}""",
        re.MULTILINE,
    )
    files = [file for name in (build.TOP, *build.ROOMS) for file in (ROOT / name).rglob("*.py")]
    texts = {str(file): file.read_text() for file in files}
    assert sum(len(left.findall(text)) for text in texts.values()) > 1000
    named = {file: left.findall(build.renamed(text)) for file, text in texts.items()}
    assert {file: matches for file, matches in named.items() if matches} == {}


def test_every_tested_version_is_pinned_by_the_hashes_of_its_files() -> None:
    """`make lock` after a change of constraints.txt."""
    tested = [line for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line]
    lock = (ROOT / "requirements.lock").read_text()
    pinned = re.findall(r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)
    assert len(pinned) > 100
    assert sorted(pinned) == sorted(line.lower().replace("_", "-") for line in tested)


def test_the_version_says_the_commit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    commit = " \\([0-9a-f]{7,40}(-dirty)?\\)" if (ROOT / ".git").exists() else ""
    assert re.fullmatch(f"finetune-planner {re.escape(__version__)}({commit})?\n", capsys.readouterr().out)
