"""The command that installs what is missing, as it works on this machine: from where this came, into where it runs."""

import json
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "finetune-planner"


def install_command(extra: str) -> str:
    """The command that adds the libraries of one extra ("torch", "search", "train", "cluster", "report").

    An environment that `uvx` or `pipx run` made for one call is not added to: the command makes another with the extra.
    uv's environments have no pip. Source: `uv` in pyvenv.cfg, and CACHEDIR.TAG in what either tool makes for one call.
    """
    prefix = Path(sys.prefix)
    config = prefix / "pyvenv.cfg"
    by_uv = config.is_file() and any(line.startswith("uv =") for line in config.read_text("utf-8").splitlines())
    *flags, what = _source(extra)
    if (prefix / "CACHEDIR.TAG").exists():
        command = ["uvx", "--from"] if by_uv else ["pipx", "run", "--spec"]
        return f"{shlex.join([*command, what])} plan ..."
    pip = ["uv", "pip", "install", "--python", sys.executable] if by_uv else [sys.executable, "-m", "pip", "install"]
    return shlex.join([*pip, *flags, what])


def _source(extra: str) -> list[str]:
    """What an installer is given: the checkout (editable), the wheel, or the name, with the extra.

    Source: PEP 610, direct_url.json.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # late: it loads a mail reader, 20 modules

    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    address = json.loads(text).get("url", "") if text else ""
    path = Path(unquote(urlsplit(address).path)) if address.startswith("file:") else None
    if path is not None and (path / "pyproject.toml").is_file():
        return ["-e", f"{path}[{extra}]"]
    if path is not None and path.suffix == ".whl" and path.is_file():
        return [f"{DISTRIBUTION}[{extra}] @ {address}"]
    return [f"{DISTRIBUTION}[{extra}]"]
