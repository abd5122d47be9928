"""`dataclass`: the standard library's, of which all classes share the methods that say, compare and hash.

The library compiles six methods for each class, 0.5 ms; a plan imports 140 classes (CPU seconds of one without torch:
0.40, so 0.35). Here it compiles the one that sets the fields. That nobody sets a field of a frozen one is for mypy to
say, which reads the library's own decorator.
"""

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, repr=True, **options):
        """As `dataclasses.dataclass`."""
        if cls is None:
            return lambda plain: dataclass(plain, frozen=frozen, eq=eq, repr=repr, **options)
        defined = cls.__dict__
        cls.__doc__ = cls.__doc__ or cls.__name__  # else the library writes the signature there, which it looks up
        made = dataclasses.dataclass(repr=False, eq=False, **options)(cls)
        if repr and "__repr__" not in defined:
            made.__repr__ = _repr
        if eq:
            names = [field.name for field in dataclasses.fields(made) if field.compare]
            made._compared = attrgetter(*names) if names else type
            made.__eq__ = defined.get("__eq__", _eq)
            made.__hash__ = defined.get("__hash__") or (_hash if frozen else None)
        return made


def _repr(self: Any) -> str:
    values = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(values)})"


def _eq(self: Any, other: Any) -> Any:
    return self._compared(self) == other._compared(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._compared(self))
