"""Stand-ins for parts of PyTorch that a run on one GPU imports but never calls.

transformers binds names of PyTorch's compiler and of its distributed tensors while it is imported, and PyTorch's meta
kernels ask the symbolic shapes (and with them sympy) about plain numbers. Loading them takes a second, a third of a
cold dry run. After `stand_in` those modules are stood in for: a name taken from one is a `Late` object, of which
nothing is an instance.

For the child that makes reports (`helper_child.py`) and nothing else: where something there needs the real module after
all, the child ends, and who asked it makes the report without stand-ins (`helper.py`).

Only with the versions it was checked with (`CHECKED_WITH`): another one may ask for names that nobody thought of.
"""

import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any, NoReturn

CHECKED_WITH = {"torch": "2.13.", "transformers": "5.23."}
"""Distribution -> how its version begins."""
EXIT_NEEDED = 73
"""How a process ends in which the real module was needed."""

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
"""Module -> names that may be stood in for; any other name of it is the real one's."""


def needed(*args: Any, **kwargs: Any) -> NoReturn:
    """Ends the process: a stand-in does not do. No exception, which a library may catch to take another path."""
    os._exit(EXIT_NEEDED)


class Late:
    """What stands for a name of a module that is not loaded."""

    __call__ = __mro_entries__ = needed

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `functools`, `inspect` and `typing` ask of anything
            raise AttributeError(name)
        needed()

    def __or__(self, other: object) -> tuple[object, ...]:  # as an annotation, or in `isinstance`
        return (self, other)

    def __ror__(self, other: object) -> tuple[object, ...]:
        return (other, self)


class _Module(ModuleType):
    """A module of `NAMES` that is not loaded."""

    def __getattr__(self, name: str) -> Any:
        if name in NAMES[self.__name__]:
            late = Late()
            setattr(self, name, late)
            return late
        if name.startswith("__"):  # what the import system asks of a module
            raise AttributeError(name)
        needed()


class _Finder(MetaPathFinder, Loader):
    """Gives stand-ins in the place of `NAMES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NAMES:
            return ModuleSpec(fullname, self, is_package=True)
        if isinstance(sys.modules.get(fullname.rpartition(".")[0]), _Module):  # a part that nothing stands for
            needed()
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_ANSWERS.get(module.__name__, {}))


def stand_in() -> None:
    """From now on the modules of `NAMES` are stood in for in this process, where its libraries are those checked with;
    none of them is loaded yet."""
    if all(version(name).startswith(beginning) for name, beginning in CHECKED_WITH.items()):
        sys.meta_path.insert(0, _Finder())


# What the compiler is asked while nothing is compiled: its marks are for it alone.


def _same(value: Any) -> Any:
    return value


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    return _same if fn is None else fn


_CONFIG = Late()
vars(_CONFIG)["error_on_nested_fx_trace"] = True  # of which checkpointing notes this in case something is traced


# What meta kernels ask the symbolic shapes: of plain numbers the answer needs none. Source: PyTorch 2.13
# torch/fx/experimental/symbolic_shapes.py.


def _of_plain(types: set[type], answer: Callable[..., Any] = _same) -> Callable[..., Any]:
    def ask(*args: Any) -> Any:
        return answer(*args) if all(type(argument) in types for argument in args) else needed()

    return ask


def _equal(left: Any, right: Any) -> Any:
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(_equal(member, other) for member, other in zip(left, right, strict=True))
    return left == right if type(left) is int and type(right) is int else needed()


def _free_symbols(value: Any) -> Any:
    return needed() if getattr(value, "_has_symbolic_sizes_strides", True) else ()  # no tensor, or of symbolic shape


_CONDITIONS = (
    "expect_true", "guard_bool", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true",
)  # fmt: skip
_NUMBERS = {int, bool, float}
_ANSWERS: dict[str, dict[str, Any]] = {
    COMPILER: {
        "disable": _disable,
        **dict.fromkeys(("allow_in_graph", "assume_constant_result"), _same),
        "config": _CONFIG,
        "graph_break": lambda msg="": None,
    },
    SHAPES: {
        **dict.fromkeys(_CONDITIONS, _of_plain({bool})),
        **dict.fromkeys(("free_symbols", "free_unbacked_symbols"), _free_symbols),
        "guard_int": _of_plain({int}),
        "guarding_hint_or_throw": _of_plain({int, bool}),
        "has_guarding_hint": _of_plain(_NUMBERS, lambda value: True),
        "is_nested_int": _of_plain(_NUMBERS, lambda value: False),
        "sym_and": _of_plain({bool}, lambda *all_: functools.reduce(operator.and_, all_)),
        "sym_or": _of_plain({bool}, lambda *all_: functools.reduce(operator.or_, all_)),
        "sym_eq": _equal,
    },
}
