"""What the wheel takes along."""

import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

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
            fnmatch(inside, one) and inside.count("/") == one.count("/") for one in patterns
        ):
            missing.append(str(file))
    assert missing == []
