"""Stand-ins for parts of PyTorch that a run on one GPU imports but never calls.

transformers binds names of PyTorch's compiler and of its distributed tensors while it is imported, and PyTorch's meta
kernels ask the symbolic shapes (and with them sympy) about plain numbers. Loading them takes a second, a third of a
cold dry run. Within `standing_in` those modules are stood in for: a name taken from one is a `Late` object, of which
nothing is an instance, and which loads the real module when it is called, subclassed or asked for anything.

Only with the versions it was checked with (`CHECKED_WITH`): another one may ask for names that nobody thought of.

Nothing stays different for the rest of the process: when one of the real modules is loaded, by a `Late` or by anybody
later, every module that holds a stand-in of it gets the real object, and what was marked for the compiler is marked.
"""

import functools
import importlib
import importlib.machinery
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any

CHECKED_WITH = {"torch": "2.13.", "transformers": "5.23."}
"""Distribution -> how its version begins."""

COMPILER = "torch._dynamo"
SHAPES = "torch.fx.experimental.symbolic_shapes"
NAMES: dict[str, tuple[str, ...]] = {
    COMPILER: (),
    f"{COMPILER}._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    SHAPES: (),
    "sympy": ("Basic",),
    "torch.utils._sympy": (),
    "torch.utils._sympy.functions": ("Max",),
    "torch.distributed._functional_collectives": ("wait_tensor", "all_to_all_single_autograd"),
    "torch.distributed.tensor": ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.tensor.placement_types": ("Shard", "_StridedShard"),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy"),
    "torch.distributed._composable": (),
    "torch.distributed._composable.fsdp": ("fully_shard",),
    "torch.distributed.checkpoint": (),
    "torch.distributed.checkpoint.hf_storage": ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
    "transformers.distributed.expert_parallel": ("apply_expert_parallelism",),
    "transformers.distributed.tensor_parallel": (
        "apply_tensor_parallelism",
        "gather_state_dict_for_save",
        "get_kv_heads_per_rank",
        "verify_tp_plan",
    ),
    "trio": (),
}
"""Module -> names that may be stood in for; any other name of it is the real one's, which is then loaded."""


class Late:
    """What stands for `name` of a module that is not loaded."""

    def __init__(self, home: str, name: str) -> None:
        vars(self).update(_home=home, _name=name)

    def _real(self) -> Any:
        return getattr(_FINDER.load(self._home), self._name)

    def __instancecheck__(self, one: object) -> bool:
        return _FINDER.is_loaded(self._home) and isinstance(one, self._real())

    def __subclasscheck__(self, one: type) -> bool:
        return _FINDER.is_loaded(self._home) and issubclass(one, self._real())

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (self._real(),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `functools`, `inspect` and `typing` ask of anything
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __or__(self, other: object) -> tuple[object, ...]:  # as an annotation, or in `isinstance`
        return (self, other)

    def __ror__(self, other: object) -> tuple[object, ...]:
        return (other, self)


class _Module(ModuleType):
    """A module of `NAMES` that is not loaded."""

    def __getattr__(self, name: str) -> Any:
        home = self.__name__
        if name in NAMES[home]:
            late = Late(home, name)
            setattr(self, name, late)
            return late
        if name.startswith("__"):  # what the import system asks of a module
            raise AttributeError(name)
        return getattr(_FINDER.load(home), name)


class _Settling(Loader):
    """The real loader of a module; afterwards the stand-ins give way to what it loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _FINDER.settle(module)


class _Finder(MetaPathFinder, Loader):
    """Gives stand-ins while it is active, and notices when the real modules are loaded."""

    def __init__(self) -> None:
        self.active = False
        self.given_up = False
        self.given: set[str] = set()
        """Modules that were stood in for and have not been loaded since."""
        self.made: dict[str, ModuleType] = {}
        self.marks: MutableMapping[Callable[..., Any], Callable[[Any, Any], None]] = weakref.WeakKeyDictionary()
        """Function -> how the compiler marks it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self.active and fullname in NAMES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        package = fullname.rpartition(".")[0]
        if self.active and isinstance(sys.modules.get(package), _Module):  # a part that nothing stands for
            path = getattr(self.load(package), "__path__", None)
        if fullname not in self.given:
            return importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in NAMES else None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Settling(spec.loader)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.given.add(spec.name)
        return self.made.setdefault(spec.name, _Module(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        answers: dict[str, dict[str, Any]] = {COMPILER: _MARKS, SHAPES: _ANSWERS}
        vars(module).update(answers.get(module.__name__, {}))

    def is_loaded(self, name: str) -> bool:
        """Whether the real module is there."""
        module = sys.modules.get(name)
        return module is not None and not isinstance(module, _Module)

    def load(self, name: str) -> ModuleType:
        """The real module. Where a stand-in does not do, none is given any more: the real ones need each other."""
        if not self.is_loaded(name) and self.active:
            give_up()
        return importlib.import_module(name)

    def withdraw(self) -> None:
        """Takes the stand-ins out of `sys.modules`, so that the next import is the real one's. As attributes of their
        packages they stay until then: peft asks for `torch.distributed.tensor.DTensor` without importing it."""
        self.active = False
        for name, module in self.made.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def settle(self, real: ModuleType) -> None:
        """Binds every name that stood for something of `real` to it."""
        home = real.__name__
        self.given.discard(home)
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if type(value) is Late and value._home == home and hasattr(real, value._name):
                    setattr(module, name, getattr(real, value._name))
                elif type(value) is _Module and value.__name__ == home:
                    setattr(module, name, real)
        if home == COMPILER:
            for one, mark in list(self.marks.items()):
                mark(real, one)
            self.marks.clear()


_FINDER = _Finder()


@contextmanager
def standing_in() -> Iterator[None]:
    """Within it the modules of `NAMES` are stood in for, as far as they are not loaded yet."""
    if not _checked():
        give_up()
    if _FINDER.active or _FINDER.given_up:
        yield
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.active = True
    try:
        yield
    finally:
        _FINDER.withdraw()


@functools.cache
def _checked() -> bool:
    return all(version(name).startswith(beginning) for name, beginning in CHECKED_WITH.items())


def give_up() -> None:
    """From now on this process uses the real modules only."""
    _FINDER.given_up = True
    _FINDER.withdraw()


def given_up() -> bool:
    """Whether the real modules are used from now on."""
    return _FINDER.given_up


def load_real() -> None:
    """Loads everything that was stood in for: several GPUs need it."""
    for name in sorted(_FINDER.given):
        importlib.import_module(name)


# What the compiler is asked while nothing is compiled: a mark is kept until it is loaded, and only as long as what it
# marks lives (checkpointing marks a closure that holds saved tensors).


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    if fn is None:
        return lambda one: _disable(one, recursive, **options)
    if isinstance(fn, type):
        return _FINDER.load(COMPILER).disable(fn, recursive, **options)
    now = [fn]

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return now[0](*args, **kwargs)

    def mark(compiler: Any, one: Any) -> None:
        target = one._now
        target[0] = compiler.disable(target[0], recursive, **options)

    call._now = now  # type: ignore[attr-defined]
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    _FINDER.marks[call] = mark
    return call


def _marking(name: str) -> Callable[..., Any]:
    def mark(fn: Any) -> Any:
        _FINDER.marks[fn] = lambda compiler, one: getattr(compiler, name)(one)
        return fn

    return mark


class _Config:
    """The compiler's settings, of which checkpointing notes one in case something is traced."""

    error_on_nested_fx_trace = True

    def __getattr__(self, name: str) -> Any:
        return getattr(_FINDER.load(COMPILER).config, name)


_MARKS = {
    "disable": _disable,
    **{name: _marking(name) for name in ("allow_in_graph", "assume_constant_result")},
    "config": _Config(),
    "graph_break": lambda msg="": None,
}


# What meta kernels ask the symbolic shapes: of plain numbers the answer needs none. Source: PyTorch 2.13
# torch/fx/experimental/symbolic_shapes.py.


def _of_plain(name: str, types: set[type], answer: Callable[..., Any] = lambda one: one) -> Callable[..., Any]:
    def ask(*args: Any) -> Any:
        plain = all(type(one) in types for one in args)
        return answer(*args) if plain else getattr(_FINDER.load(SHAPES), name)(*args)

    return ask


def _equal(left: Any, right: Any) -> Any:
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(_equal(one, other) for one, other in zip(left, right, strict=True))
    if type(left) is int and type(right) is int:
        return left == right
    return _FINDER.load(SHAPES).sym_eq(left, right)


def _free_symbols(name: str) -> Callable[..., Any]:
    def ask(one: Any) -> Any:
        if getattr(one, "_has_symbolic_sizes_strides", True):  # no tensor, or one of symbolic shape
            return getattr(_FINDER.load(SHAPES), name)(one)
        return ()

    return ask


_CONDITIONS = (
    "expect_true", "guard_bool", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true",
)  # fmt: skip
_ANSWERS = {
    **{name: _of_plain(name, {bool}) for name in _CONDITIONS},
    **{name: _free_symbols(name) for name in ("free_symbols", "free_unbacked_symbols")},
    "guard_int": _of_plain("guard_int", {int}),
    "guarding_hint_or_throw": _of_plain("guarding_hint_or_throw", {int, bool}),
    "has_guarding_hint": _of_plain("has_guarding_hint", {int, bool, float}, lambda one: True),
    "is_nested_int": _of_plain("is_nested_int", {int, bool, float}, lambda one: False),
    "sym_and": _of_plain("sym_and", {bool}, lambda *all_: functools.reduce(operator.and_, all_)),
    "sym_or": _of_plain("sym_or", {bool}, lambda *all_: functools.reduce(operator.or_, all_)),
    "sym_eq": _equal,
}
