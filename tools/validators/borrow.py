"""Links distributions of the running Python, with all that they need, into a folder: borrow.py FOLDER NAME...

A venv that has the folder on its path finds them installed: torch is downloaded and unpacked once, not once per tool.
"""

import re
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def closure(names: list[str]) -> set[str]:
    """These distributions and what they require, as far as it is installed here."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name in found:
            continue
        with suppress(PackageNotFoundError):  # for another system
            wanted = [line.partition(";") for line in distribution(name).requires or []]
            found.add(name)
            names += [re.split(r"[^\w.-]", line)[0].lower() for line, _, marker in wanted if "extra" not in marker]
    return found


def link(folder: Path, name: str) -> None:
    """The top of everything that the distribution installed beside its own description."""
    files = distribution(name).files
    if files is None:
        raise PackageNotFoundError(name)
    for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
        (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)  # links only, perhaps of another version
    target.mkdir(parents=True)
    for one in sorted(closure(sys.argv[2:])):
        link(target, one)
