"""`dataclass`: the standard library's, whose methods are compiled when they are first called.

Python compiles six methods of every frozen class while it imports it: half a millisecond a class, an eighth of a plan,
which loads a hundred classes and calls few of their methods. Here `dataclasses` itself makes the class (`fields`,
`replace`, `asdict` and type checkers know it), but without methods: `__init__`, `__eq__` and `__hash__` are compiled
when somebody first asks for them, the others are one function for all classes. They do what the standard library's do.

Not taken: `order`, `unsafe_hash` and `InitVar`, which nothing here uses. A frozen class and its bases are made by the
same decorator: either refuses a base of the other's.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import MISSING, FrozenInstanceError
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


class _Later:
    """A method that is compiled, and put in its own place, when it is first asked for."""

    def __init__(self, owner: type, name: str, write: "Callable[[Any, dict[str, Any]], str]") -> None:
        self.owner, self.name, self.write = owner, name, write

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        namespace: dict[str, Any] = {}
        exec(self.write(self.owner, namespace), namespace)
        method = namespace[self.name]
        method.__qualname__, method.__module__ = f"{self.owner.__qualname__}.{self.name}", self.owner.__module__
        setattr(self.owner, self.name, method)
        return method.__get__(instance, owner)


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


def _values(of: str, names: Iterable[str]) -> str:
    return f"({''.join(f'{of}.{name}, ' for name in names)})"


def _eq(cls: Any, namespace: dict[str, Any]) -> str:
    names = [field.name for field in dataclasses.fields(cls) if field.compare]
    return (
        "def __eq__(self, other):\n"
        "    if other is self: return True\n"
        "    if other.__class__ is not self.__class__: return NotImplemented\n"
        f"    return {_values('self', names)} == {_values('other', names)}"
    )


def _hash(cls: Any, namespace: dict[str, Any]) -> str:
    names = [field.name for field in dataclasses.fields(cls) if (field.compare if field.hash is None else field.hash)]
    return f"def __hash__(self): return hash({_values('self', names)})"


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
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)(cls)
    methods: dict[str, Any] = {"__init__": _Later(cls, "__init__", _init)}
    if repr:
        methods["__repr__"] = _repr
    if eq:
        methods["__eq__"] = _Later(cls, "__eq__", _eq)
        methods["__hash__"] = _Later(cls, "__hash__", _hash) if frozen else None
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
        """`dataclasses.dataclass`, methods compiled at their first call."""

        def make(cls):
            return _made(cls, frozen=frozen, kw_only=kw_only, slots=slots, repr=repr, eq=eq)

        return make if cls is None else make(cls)
