"""`dataclass`: the standard library's, of whose methods only an `__init__` that is called often is compiled.

Python compiles six methods of every frozen class while it imports it: half a millisecond a class, an eighth of a plan,
which loads a hundred classes and calls few of their methods. Here `dataclasses` itself makes the class (`fields`,
`replace`, `asdict` and type checkers know it), but without methods: they are one function for all classes, and do what
the standard library's do.

Not taken: `order`, `unsafe_hash` and `InitVar`, which nothing here uses. A frozen class and its bases are made by the
same decorator: either refuses a base of the other's.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


_OFTEN = 20
"""Objects of a class that are made before its `__init__` is compiled, which takes a sixth of a millisecond."""


class _Init:
    """`__init__` of a class, which is compiled and takes this one's place when it is called often."""

    def __init__(self, owner: type) -> None:
        self.owner, self.calls = owner, 0
        self.fields: tuple[dataclasses.Field[Any], ...] | None = None
        self.positional: list[str] = []

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        self.calls += 1
        if instance is not None and self.calls <= _OFTEN:
            return partial(self.seldom, instance)
        return self.compiled().__get__(instance, owner)

    def compiled(self) -> Any:
        """The compiled method, which is the class's from now on."""
        namespace: dict[str, Any] = {}
        exec(_init(self.owner, namespace), namespace)
        method = self.owner.__init__ = namespace["__init__"]  # type: ignore[misc]
        method.__qualname__, method.__module__ = f"{self.owner.__qualname__}.__init__", self.owner.__module__
        return method

    def seldom(self, instance: Any, *arguments: Any, **values: Any) -> None:
        """Does what the compiled method does; that one refuses what is no call of it."""
        if self.fields is None:
            self.fields = dataclasses.fields(self.owner)
            self.positional = [field.name for field in self.fields if field.init and not field.kw_only]
        taken, put = len(arguments) + len(values), object.__setattr__
        given = values | dict(zip(self.positional, arguments, strict=False))
        for field in self.fields:
            if field.init and field.name in given:
                taken -= 1
                put(instance, field.name, given[field.name])
            elif field.default is not MISSING:
                put(instance, field.name, field.default)
            elif field.default_factory is not MISSING:
                put(instance, field.name, field.default_factory())
            elif field.init:
                taken = -1
                break
        if taken:
            self.compiled()(instance, *arguments, **values)
        elif hasattr(instance, "__post_init__"):
            instance.__post_init__()


def _init(cls: Any, namespace: dict[str, Any]) -> str:
    namespace |= {"_put": object.__setattr__, "_unset": MISSING}
    slots, store = any(vars(base).get("__slots__") for base in cls.__mro__), "self.{0} = {1}"
    if cls.__setattr__ is _refuse_assignment:
        store = "_put(self, {0!r}, {1})" if slots else "_own[{0!r}] = {1}"
    parameters: dict[bool, list[str]] = {False: [], True: []}
    lines = ["_own = self.__dict__"] * store.startswith("_own")
    for field in dataclasses.fields(cls):
        made, given = field.default_factory is not MISSING, field.default is not MISSING
        namespace |= {f"_make_{field.name}": field.default_factory, f"_default_{field.name}": field.default}
        value = f"_make_{field.name}()" if made else field.name if field.init else f"_default_{field.name}"
        if field.init:
            parameters[bool(field.kw_only)].append(field.name + f"=_default_{field.name}" * (made or given))
            value += f" if {field.name} is _unset else {field.name}" * made
        if field.init or made or (given and slots):  # without slots the default is the class's attribute
            lines.append(store.format(field.name, value))
    lines.append("self.__post_init__()" if hasattr(cls, "__post_init__") else "pass")
    taken = ", ".join(["self", *parameters[False], *["*"] * bool(parameters[True]), *parameters[True]])
    return "\n    ".join([f"def __init__({taken}):", *lines])


def _values(cls: Any, wanted: Callable[[Any], bool | None]) -> Callable[[Any], tuple[Any, ...]]:
    """What takes the values of the wanted fields of an object."""
    names = [field.name for field in dataclasses.fields(cls) if wanted(field)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda instance: tuple([getattr(instance, name) for name in names])


def _eq(cls: Any) -> Callable[[Any, Any], Any]:
    values = _values(cls, lambda field: field.compare)

    def eq(self: Any, other: Any) -> Any:
        if other is self:
            return True
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return eq


def _hash(cls: Any) -> Callable[[Any], int]:
    values = _values(cls, lambda field: field.compare if field.hash is None else field.hash)
    return lambda self: hash(values(self))


def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _refuse_assignment(self: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _get_state(self: Any) -> list[Any]:
    """What pickle keeps of a frozen object with slots, which it could not assign to."""
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


def _made(cls: Any, *, frozen: bool, kw_only: bool, slots: bool, repr: bool, eq: bool) -> Any:
    """The class with its methods; those that it defines itself stay."""
    defined = {name for name, value in vars(cls).items() if value is not None}  # an __eq__ alone sets __hash__ to None
    cls.__doc__ = cls.__doc__ or cls.__name__  # else the library writes its signature, a third of a millisecond each
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)(cls)
    methods: dict[str, Any] = {"__init__": _Init(cls)}
    if repr:
        methods["__repr__"] = _repr
    if eq:
        methods |= {"__eq__": _eq(cls), "__hash__": _hash(cls) if frozen else None}
    if frozen:
        methods |= {"__setattr__": _refuse_assignment, "__delattr__": _refuse_deletion}
        if slots:
            methods |= {"__getstate__": _get_state, "__setstate__": _set_state}
    for name in methods.keys() - defined:
        setattr(cls, name, methods[name])
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, kw_only=False, slots=False, repr=True, eq=True):
        """`dataclasses.dataclass`, with the methods of this module."""

        def make(cls):
            return _made(cls, frozen=frozen, kw_only=kw_only, slots=slots, repr=repr, eq=eq)

        return make if cls is None else make(cls)
