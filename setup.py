"""What the build does beyond pyproject.toml: in a wheel all packages lie below `finetune_planner`, and `plan --version`
knows the commit.

The repository's folders planner, probes, search and reports would be four generic names in site-packages. A wheel has
them as `finetune_planner.planner` and so on: they are moved, and their names are changed where code says them (imports,
modules named in texts, `files("planner")`). A checkout and an editable install stay as they are.
"""

import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TOP, ROOMS = "finetune_planner", ("planner", "probes", "search", "reports")
_ROOM = f"({'|'.join(ROOMS)})"
NAMED = (
    re.compile(
        rf"(?<=\bfrom ){_ROOM}(?=[\w.{{}}]* import )"
    ),  # from planner.core.units import gib, f"from probes.{name} import"
    re.compile(
        rf"""(?<=["']){_ROOM}(?=\.(?:["']|[a-z_]+[.:"']))"""
    ),  # "probes.gpu.worker", f"finetune_planner.cli.{one}"
    re.compile(rf"""(?<=(?:files|oader)\(["']){_ROOM}(?=["'.])"""),  # files("planner.data"), PackageLoader("reports")
)


def renamed(text: str) -> str:
    """A file's text as it stands in a wheel."""
    for one in NAMED:
        text = one.sub(rf"{TOP}.\1", text)
    return text


class BuildPy(build_py):
    """Moves and renames what was built for a wheel."""

    def run(self) -> None:
        built = Path(self.build_lib)
        shutil.rmtree(built / TOP, ignore_errors=True)  # what an earlier wheel left
        super().run()
        if self.editable_mode:
            return
        for room in ROOMS:
            (built / room).rename(built / TOP / room)
        for file in built.glob(f"{TOP}/**/*.py"):
            file.write_text(renamed(file.read_text("utf-8")), "utf-8")
        if (ROOT / ".git").exists():
            words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
            found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
            (built / TOP / "planner/data/commit.txt").write_text(found.stdout, "utf-8")


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildPy})
