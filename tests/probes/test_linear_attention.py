"""The gated delta rule as flash-linear-attention computes it: the dry run's statement against fla's own code."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from planner.hardware.gpus import find_gpu  # noqa: E402
from planner.planning.predict import predict  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from planner.setup.outcome import Prediction, ProbeFailure  # noqa: E402
from planner.speed.prices import price  # noqa: E402
from planner.speed.rates import card_rates  # noqa: E402
from probes.allocator.events import Alloc, Event, Free  # noqa: E402
from probes.dryrun import dry_run  # noqa: E402
from probes.dryrun.operators import OperatorLog  # noqa: E402
from probes.dryrun.tracker import Tracker  # noqa: E402
from probes.stack.kernels import listening  # noqa: E402
from probes.stack.linear_attention import chunk_gated_delta_rule  # noqa: E402
from tests.planner.helpers import loaded  # noqa: E402
from tests.probes.dryrun_small import dried  # noqa: E402
from tests.whole import WHOLE, paired, some  # noqa: E402

TIMED = [
    ("forward", 1, 32768, 2, 8, 0.902), ("forward", 4, 8192, 2, 8, 0.467), ("forward", 1, 8192, 16, 16, 0.334),
    ("forward", 1, 32768, 16, 16, 1.275), ("forward", 1, 4096, 16, 32, 0.247), ("forward", 1, 32768, 16, 32, 1.890),
    ("forward", 4, 8192, 16, 32, 1.898), ("forward", 1, 4096, 16, 48, 0.344), ("forward", 1, 32768, 16, 64, 3.331),
    ("backward", 1, 8192, 4, 8, 0.722), ("backward", 1, 32768, 4, 8, 2.743), ("backward", 1, 8192, 8, 16, 0.957),
    ("backward", 1, 32768, 8, 16, 3.701), ("backward", 1, 8192, 16, 32, 1.444), ("backward", 1, 32768, 16, 32, 5.697),
]  # fmt: skip
"""Direction, sequences, tokens, key heads, value heads of 128, milliseconds on an H200: column "FLA" of QwenLM/FlashQLA
`benchmark/benchmark_results_H200.txt` (commit 6e5d2ea1; fla 0.5.1, CUDA graphs, without the norms of queries and keys).
"""
WITHIN = 0.11
"""What the prices miss of these at most; the median is 4 %."""
SIZES = [(2, 200, 2, 4, 64, 128), (1, 128, 3, 3, 128, 128), (1, 65, 2, 6, 128, 64)]
"""Sequences, tokens, key and value heads, key and value size: whole and broken chunks, shared and own key heads."""


class _Names(ModuleType):
    """A part of Triton that only signatures and bodies of kernels name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


def _triton(launches: list[str]) -> dict[str, ModuleType]:
    """Modules in Triton's place whose launches do nothing but say their name."""

    class Kernel:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.__name__ = function.__name__

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **kwargs: launches.append(self.__name__)

    def plain(*args: Any, **kwargs: Any) -> Any:
        return lambda function: function

    root: Any = _Names("triton")
    root.__version__ = "3.7.1"
    root.jit = lambda function=None, **_: Kernel if function is None else Kernel(function)
    root.heuristics = root.autotune = plain
    root.cdiv, root.next_power_of_2 = lambda a, b: -(-a // b), lambda n: 1 << (n - 1).bit_length()
    modules: dict[str, ModuleType] = {"triton": root}
    for name in ("language", "language.extra", "language.extra.libdevice", "language.math", "runtime", "experimental"):
        modules[f"triton.{name}"] = _Names(f"triton.{name}")
        parent, _, leaf = f"triton.{name}".rpartition(".")
        setattr(modules[parent], leaf, modules[f"triton.{name}"])
    for name in ("runtime.driver", "experimental.gluon", "experimental.gluon.language"):
        modules[f"triton.{name}"] = _Names(f"triton.{name}")
    runtime: Any = modules["triton.runtime"]
    runtime.driver = modules["triton.runtime.driver"]
    runtime.driver.active = None
    cache: Any = _Names("fla.ops.utils.cache")  # fla's own autotuner
    cache.fla_cache_autotune = plain
    return {**modules, cache.__name__: cache}


@pytest.fixture(scope="module")
def fla() -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """fla's own function over launches that do nothing, and their names."""
    place = find_spec("fla")
    if place is None or place.submodule_search_locations is None:
        pytest.skip("pip install --no-deps fla-core==0.6.0 einops")
    roots = [*place.submodule_search_locations]
    launches: list[str] = []
    import_module("torch._dynamo")  # `torch.compiler.disable` does, and would ask for more of Triton
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]
        sys.modules.update(_triton(launches))
        for name in ("fla", "fla.modules", "fla.ops"):  # else they import every layer there is
            package: Any = ModuleType(name)
            package.__path__ = [str(Path(root, *name.split(".")[1:])) for root in roots]
            package.__version__, sys.modules[name] = version("fla-core"), package
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no GPU
            chunk_o = import_module("fla.ops.common.chunk_o")
            rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

        with mock.patch.object(chunk_o, "check_shared_mem", lambda arch, _: arch == "ada"):
            yield rule, launches


def _followed(rule: Callable[..., Any], sizes: Sequence[int], dtype: Any) -> list[Event]:
    """What a layer's forward and backward allocate, from projections that lie across one another as transformers'."""
    seqs, tokens, key_heads, heads, size, value_size = sizes
    tracker = Tracker("meta")
    with tracker:
        parts = [key_heads * size, key_heads * size, heads * value_size]
        mixed = torch.empty(seqs, sum(parts), tokens, dtype=dtype, device="meta", requires_grad=True)
        query, key, value = (
            part.reshape(seqs, tokens, -1, width)
            for part, width in zip(mixed.transpose(1, 2).split(parts, dim=-1), (size, size, value_size), strict=True)
        )
        beta = torch.empty(seqs, tokens, heads, dtype=dtype, device="meta", requires_grad=True)
        g = torch.empty(seqs, tokens, heads, dtype=torch.float32, device="meta", requires_grad=True)
        del tracker.events[:]
        out, state = rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        assert state is None
        del query, key, value
        out.sum().backward()
        del out
    tracker.close()
    return tracker.events


def _sizes(events: Sequence[Event]) -> tuple[list[int], list[int]]:
    """(bytes of every allocation in order, bytes alive after each)."""
    alive: dict[int, int] = {}
    made, alive_bytes = [], []
    for event in events:
        if isinstance(event, Alloc):
            alive[event.id] = event.size_bytes
            made.append(event.size_bytes)
            alive_bytes.append(sum(alive.values()))
        elif isinstance(event, Free):
            alive.pop(event.id, None)
    return made, alive_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_allocated_and_launched_is_what_flas_own_code_does(
    fla: tuple[Callable[..., Any], list[str]], sizes: Sequence[int], dtype: Any
) -> None:
    rule, launches = fla
    del launches[:]
    expected = _sizes(_followed(rule, sizes, dtype))
    kernels: list[str] = []
    with listening(lambda name, inputs, outputs: kernels.append(name)):
        actual = _sizes(_followed(chunk_gated_delta_rule, sizes, dtype))
    assert actual == expected
    assert len(kernels) == len(launches), (kernels, launches)


def _priced_s(direction: str, seqs: int, tokens: int, key_heads: int, heads: int) -> float:
    """Device seconds of all that one direction issues, but the norms of queries and keys."""

    def tensor(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(seqs, tokens, *shape, dtype=dtype, device="meta", requires_grad=True)

    query, key, value = tensor(key_heads, 128), tensor(key_heads, 128), tensor(heads, 128)
    beta, g = tensor(heads), tensor(heads, dtype=torch.float32)
    tracker = Tracker("meta")
    with tracker:
        log = tracker.log = OperatorLog()
        with log.following():
            out, _ = chunk_gated_delta_rule(query, key, value, g=g, beta=beta)
            first = len(log.calls)
            torch.autograd.grad(out, [query, key, value, g, beta], torch.empty_like(out))
    calls = log.calls[:first] if direction == "forward" else log.calls[first:]
    rates = card_rates(find_gpu("h200"))
    issued = [log.operators[number // 5] for number in calls if number >= 0]
    return sum(price(operator, rates).seconds for operator in issued if "l2norm" not in operator.name)


def test_what_flas_kernels_take_is_what_others_measured() -> None:
    errors = [1e3 * _priced_s(*case) / measured_ms - 1 for *case, measured_ms in TIMED]
    assert max(map(abs, errors)) < WITHIN, list(zip(TIMED, errors, strict=True))


def _dry(**fields: Any) -> Prediction:
    model = loaded("qwen/qwen3.5-4b")
    return dried(model, find_gpu("h100-sxm"), TrainSetup(loss="chunked", **fields))


def test_the_path_is_the_setups() -> None:
    """The loop's peak is the one that TRL's own trainer had on an H100 without fla (docs/accuracy/own-runs.md)."""
    loop, package = (_dry(micro_batch_seqs=2, linear_attention=implementation) for implementation in ("torch", "fla"))
    assert loop.peak_allocated_bytes == pytest.approx(11993382912, rel=1e-4)
    assert package.peak_allocated_bytes < 0.92 * loop.peak_allocated_bytes
    assert loop.tokens_per_s is not None
    assert package.tokens_per_s is not None
    assert package.tokens_per_s > 3 * loop.tokens_per_s
    assert any("host-bound" in note for note in loop.notes)


@pytest.mark.parametrize(
    ("path", "checkpointing", "precision"),
    [(*case, "bf16-autocast") for case in some(paired(["fla", "torch"], [0, 1], 1), 2)]
    + [("torch", 0, "fp32"), ("fla", 0, "fp32")] * WHOLE,
)
def test_the_formula_follows_both(path: str, checkpointing: int, precision: str) -> None:
    model, gpu = loaded("qwen/qwen3.5-4b"), find_gpu("h100-sxm")
    fields: dict[str, Any] = {"linear_attention": path, "checkpointing": checkpointing, "kernels": "liger"}
    fields["precision"] = precision
    dry, formula = _dry(**fields), predict(model, gpu, TrainSetup(loss="chunked", **fields))
    assert formula.peak_allocated_bytes == pytest.approx(dry.peak_allocated_bytes, rel=0.015)
    assert formula.tokens_per_s == pytest.approx(dry.tokens_per_s, rel=0.22 if precision == "fp32" else 0.1)


def test_a_class_that_does_not_ask_for_the_package_is_refused() -> None:
    model = loaded("qwen/qwen3-8b")
    outcome = dry_run(model, find_gpu("h100-sxm"), TrainSetup(linear_attention="fla", seq_len_tokens=64))
    assert isinstance(outcome, ProbeFailure)
    assert "does not ask for flash-linear-attention" in outcome.message
