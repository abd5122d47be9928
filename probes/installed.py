"""Which versions of libraries are installed."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed(names: Iterable[str]) -> dict[str, str]:
    """Name -> version; what is not installed is left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
