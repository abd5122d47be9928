"""Fields of a setup that are records of their own: an object in its JSON."""

from collections.abc import Collection
from dataclasses import fields
from typing import Any, TypeVar

from planner.core.errors import SetupError

Record = TypeVar("Record")


def read_record(kind: type[Record], values: Any, name: str, *, required: Collection[str] = (), **usual: Any) -> Record:
    """A record from JSON values, or one as it is.

    Args:
        name: of the setup's field.
        required: keys that must be there; `usual`: values of keys that are not.

    Raises:
        SetupError: an unknown key or a wrong value.
    """
    if isinstance(values, kind):
        return values
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(values, dict) or set(values) - set(names) or not set(required) <= set(values):
        raise SetupError(f"{name} must be an object of {', '.join(names)}; got {values!r:.80}")
    return kind(**{**usual, **values})


def values_of(record: Any) -> dict[str, Any]:
    """Its fields as they are written."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
