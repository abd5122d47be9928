"""Where a data set is on this machine: a path, or the hub's cache."""

from pathlib import Path

from planner.core.errors import ConfigError
from planner.samples.rows import loader_of


def path_of(name: str) -> Path | None:
    """The file or directory of that name, or what the hub's cache holds of the data set; None where there is none, and
    of an address.

    Raises:
        ConfigError: something that looks like a path and is not there.
    """
    path = Path(name)
    if path.exists():
        return path
    if "://" in name:
        return None
    if loader_of(path) or name.startswith((".", "/", "~")):
        raise ConfigError(f"no data set at {name}", hint="give a hub id, or a file or folder that exists")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None
