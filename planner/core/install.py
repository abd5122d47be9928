"""The command that installs what is missing, as it works on this machine: from where this came, into where it runs."""

import json
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "finetune-planner"


def install_command(extra: str) -> str:
    """The command that adds the libraries of one extra ("torch", "search", "train", "cluster", "report").

    An environment that `uvx` or `pipx run` made for one call is not added to: the command makes another with the extra.
    uv's environments have no pip. Source: `uv` in pyvenv.cfg, and CACHEDIR.TAG in what either tool makes for one call.
    """
    *flags, what = _source(f"[{extra}]")
    return _one_call(what) or shlex.join([*_pip(), *flags, what])


def packages_command(*requirements: str) -> str:
    """The command that adds packages which no extra has to where this runs; as for an extra."""
    added = [word for requirement in requirements for word in ("--with", requirement)]
    return _one_call(_source("")[-1], *added) or shlex.join([*_pip(), *requirements])


def _by_uv() -> bool:
    config = Path(sys.prefix) / "pyvenv.cfg"
    return config.is_file() and any(line.startswith("uv =") for line in config.read_text("utf-8").splitlines())


def _pip() -> list[str]:
    start = ["uv", "pip", "install", "--python", sys.executable]
    return start if _by_uv() else [sys.executable, "-m", "pip", "install"]


def _one_call(what: str, *added: str) -> str:
    """The call anew with more in its environment, where that was made for one call; else "".

    Source: `uvx --help`, `pipx run --help` (1.18): both take --with.
    """
    if not (Path(sys.prefix) / "CACHEDIR.TAG").exists():
        return ""
    command = ["uvx", *added, "--from"] if _by_uv() else ["pipx", "run", *added, "--spec"]
    return f"{shlex.join([*command, what])} plan ..."


def _source(extra: str) -> list[str]:
    """What an installer is given: the checkout (editable), the wheel, or the name, with "[EXTRA]" or "".

    Source: PEP 610, direct_url.json.
    """
    pattern = f"{DISTRIBUTION.replace('-', '_')}-*.dist-info/direct_url.json"  # importlib.metadata loads a mail reader
    direct_url = next((file for folder in sys.path if folder for file in Path(folder).glob(pattern)), None)
    address = json.loads(direct_url.read_text("utf-8")).get("url", "") if direct_url is not None else ""
    path = Path(unquote(urlsplit(address).path)) if address.startswith("file:") else None
    if path is not None and (path / "pyproject.toml").is_file():
        return ["-e", f"{path}{extra}"]
    if path is not None and path.suffix == ".whl" and path.is_file():
        return [f"{DISTRIBUTION}{extra} @ {address}"]
    return [f"{DISTRIBUTION}{extra}"]


def installed(names: Iterable[str]) -> dict[str, str]:
    """Name -> version; what is not installed is left out."""
    from importlib.metadata import PackageNotFoundError, version  # late: it loads a mail reader

    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
