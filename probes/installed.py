"""Which versions of libraries are installed."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed(names: Iterable[str]) -> dict[str, str]:
    """Name -> version; what is not installed is left out."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
