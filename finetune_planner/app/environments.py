"""Environments of other versions, made by uv and kept: what `plan diff --trace` runs a program in."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from finetune_planner.app.progress import say
from planner.core.errors import EnvironmentProblem

NO_TORCH = 'torch ; python_version < "0"\n'
"""An override that no Python satisfies: uv then installs no torch, whoever asks for it."""


def environment(requirements: Sequence[str]) -> Path:
    """The Python of an environment with these, made by uv where none is kept.

    It sees this environment's torch, and what that needs, behind its own packages, unless a torch is among the
    requirements: a build of PyTorch is gigabytes. Told before it starts.

    Raises:
        EnvironmentProblem: no uv, or it finds no such packages.
    """
    words = sorted(dict.fromkeys(requirements))
    own_torch = any(_name(requirement) == "torch" for requirement in words)
    borrowed = "" if own_torch else _version("torch")
    key = hashlib.sha256(json.dumps([words, sys.version, sys.prefix, borrowed]).encode()).hexdigest()[:16]
    from platformdirs import user_cache_path  # late: few make one

    folder = user_cache_path("finetune-planner") / "environments" / key
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    torch_note = "" if own_torch else f", beside torch {borrowed} of this one"
    say(f"plan diff: uv makes an environment of {', '.join(words)}{torch_note}: {folder} (kept)")
    shutil.rmtree(folder, ignore_errors=True)
    _uv("venv", "--quiet", "--python", sys.executable, str(folder))
    override = []
    if not own_torch:
        (folder / "override.txt").write_text(NO_TORCH)
        override = ["--override", str(folder / "override.txt")]
    _uv("pip", "install", "--quiet", "--python", str(python), *override, *words)
    if not own_torch:
        link(folder / "torch" / "site-packages", ["torch"])  # so named, its lines are a library's
        site = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
        Path(site, "zz_torch.pth").write_text(str(folder / "torch" / "site-packages"))
        file = python.with_name("torchrun")  # a command that a package which is only seen would have brought
        file.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
        file.chmod(0o755)
    ready.touch()
    return python


def _uv(*words: str) -> None:
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if uv is None:
        raise EnvironmentProblem(
            "plan diff --trace makes two environments by uv, which is not here", hint="pip install uv"
        )
    done = subprocess.run([uv, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblem(
            f"uv made no environment: {done.stderr.strip()}",
            hint="--with 'PACKAGE<VERSION' holds what it needs besides",
        )


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement.strip())[0].lower().replace("_", "-")


def _version(name: str) -> str:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        raise EnvironmentProblem(f"{name} is not installed here", hint=f"pip install {name}") from None


def closure(names: Sequence[str]) -> set[str]:
    """These distributions and what they require, as far as it is installed here."""
    distributions: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in distributions:
            continue
        with suppress(PackageNotFoundError):  # for another system
            wanted = [line.partition(";") for line in distribution(name).requires or []]
            distributions.add(name)
            left += [_name(line) for line, _, marker in wanted if "extra" not in marker]
    return distributions


def link(folder: Path, names: Sequence[str]) -> None:
    """Links the top of everything that these, and what they need, installed beside their own descriptions: an
    environment that has the folder on its path finds them installed."""
    shutil.rmtree(folder, ignore_errors=True)  # links only, perhaps of another version
    folder.mkdir(parents=True)
    for name in sorted(closure(names)):
        files = distribution(name).files
        if files is None:
            raise PackageNotFoundError(name)
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))
