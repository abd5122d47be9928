"""The command that installs what is missing, as it works on this machine: from the checkout, or by the name."""

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "finetune-planner"


def install_command(extra: str) -> str:
    """`pip install ...` with the libraries of one extra ("torch", "search", "train", "cluster", "report")."""
    source = _checkout()
    what = DISTRIBUTION if source is None else str(source)
    editable = "-e " if source is not None else ""
    return f"{shlex.quote(sys.executable)} -m pip install {editable}{shlex.quote(f'{what}[{extra}]')}"


def _checkout() -> Path | None:
    """The folder that this was installed from, None where it came from an index or is not installed.

    Source: PEP 610, direct_url.json.
    """
    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    address = json.loads(text).get("url", "") if text else ""
    folder = Path(unquote(urlsplit(address).path)) if address.startswith("file:") else None
    return folder if folder is not None and (folder / "pyproject.toml").is_file() else None
