"""The dry run's ZeRO-3 and offloading: gathers by DeepSpeed's rules, full depth from few layers, engine's figures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.zero_dry_run_check import WIDER
from planner.setup import TrainSetup
from probes.dryrun import DryRunReport, report_for_config, zero3_engine, zero3_modules
from probes.dryrun.spread import fake_job
from probes.dryrun.trace import trace_run
from probes.dryrun.zero_gather import Coordinator, Limits, Weight
from probes.stack import load_config
from tests.probes.dryrun_small import assert_same_figures, peaks, small_config
from tests.probes.spread_rank import NO_FLASH

AMPERE = (8, 0)
DEEP = 9
FULL: dict[str, Any] = {"method": "full", "lora_rank": 0}
NEAR = Limits(prefetch=9_000, reuse=40_000, live=60_000)
"""Limits that cut through a model of some 40,000 elements a layer, as DeepSpeed's do through large ones."""


class _Store:
    """Notes what a coordinator does."""

    def __init__(self) -> None:
        self.done_with: list[str] = []

    def begin(self, names: list[str]) -> str:
        self.done_with.append("begin " + " ".join(names))
        return "+".join(names)

    def finish(self, names: list[str], token: str) -> None:
        self.done_with.append("finish " + " ".join(names))

    def done(self, token: str) -> None:
        self.done_with.append(f"done {token}")

    def release(self, name: str) -> None:
        self.done_with.append(f"release {name}")


def _coordinator(limits: Limits, *, persistent: str = "") -> tuple[Coordinator, _Store]:
    """Four modules a to d of one weight each, 10 elements."""
    store = _Store()
    weights = {name: Weight(num=10, persistent=name in persistent, trained=True) for name in "abcd"}
    return Coordinator(weights=weights, modules={name: (name,) for name in "abcd"}, store=store, limits=limits), store


def _step(coordinator: Coordinator) -> None:
    coordinator.start()
    for name in "abcd":
        coordinator.fetch(name, forward=True)
        coordinator.release(name, forward=True)
    for name in "dcba":
        coordinator.fetch(name, forward=False)
        coordinator.release(name, forward=False)
    coordinator.end_backward()


def test_first_step_gathers_for_every_use() -> None:
    coordinator, store = _coordinator(Limits(prefetch=100, reuse=1000, live=1000))
    _step(coordinator)
    assert [one for one in store.done_with if "begin" in one] == [f"begin {name}" for name in "abcddcba"]
    assert sum("release" in one for one in store.done_with) == 8
    assert not coordinator.whole


def test_weights_used_again_soon_stay() -> None:
    coordinator, store = _coordinator(Limits(prefetch=0, reuse=20, live=1000))
    _step(coordinator)
    store.done_with.clear()
    _step(coordinator)
    # after c's forward come d, d (20 elements): c's backward is too far away; d's own follows at once
    assert [one for one in store.done_with if "begin" in one] == [f"begin {name}" for name in "abcdcba"]


def test_gathers_ahead_stop_at_what_is_live() -> None:
    coordinator, store = _coordinator(Limits(prefetch=30, reuse=0, live=20))
    _step(coordinator)
    store.done_with.clear()
    coordinator.start()
    coordinator.fetch("a", forward=True)
    assert store.done_with == ["begin a", "finish a", "done a", "begin b"]
    coordinator.release("a", forward=True)
    coordinator.fetch("b", forward=True)
    assert store.done_with[-1] == "begin c"


def test_a_buffer_of_several_weights_lives_until_the_last_is_asked_for() -> None:
    coordinator, store = _coordinator(Limits(prefetch=30, reuse=0, live=100))
    _step(coordinator)
    store.done_with.clear()
    coordinator.start()
    for name in "abcd":
        coordinator.fetch(name, forward=True)
        coordinator.release(name, forward=True)
    assert "begin b c d" in store.done_with
    order = [one for one in store.done_with if one.startswith(("finish b", "done b"))]
    assert order == ["finish b c d", "done b+c+d"]
    # the next look ahead passes over weights that are still there: they are kept for those uses
    assert store.done_with.index("done b+c+d") > store.done_with.index("finish b c d") + 1


def test_small_weights_stay_until_the_step() -> None:
    coordinator, store = _coordinator(Limits(prefetch=0, reuse=0, live=0), persistent="b")
    _step(coordinator)
    coordinator.release_all()
    coordinator.hold("b")
    store.done_with.clear()
    _step(coordinator)
    assert not [one for one in store.done_with if one.endswith(" b")]
    coordinator.release_all()
    assert store.done_with[-1] == "release b"


def test_another_order_than_the_first_breaks_the_trace() -> None:
    coordinator, _ = _coordinator(Limits(prefetch=0, reuse=0, live=0))
    _step(coordinator)
    coordinator.start()
    with pytest.raises(ValueError, match="does not come in the order"):
        coordinator.fetch("d", forward=True)


# The whole step


@contextmanager
def _limits(limits: Limits, **more: Any) -> Iterator[None]:
    with (
        mock.patch.multiple(zero3_engine, LIMITS=limits, **more),
        mock.patch.object(zero3_modules, "ZERO3_PERSISTENT_ELEMENTS", 500),
    ):
        yield


def _setup(**fields: Any) -> TrainSetup:
    values: dict[str, Any] = {"num_gpus": 4, "seq_len_tokens": 64, "micro_batch_seqs": 2, "lora_rank": 4}
    return TrainSetup(**{**values, "parallel": "zero3", **fields})


def _report(model_type: str, setup: TrainSetup, **options: Any) -> DryRunReport:
    found = report_for_config(small_config(model_type, num_hidden_layers=DEEP), AMPERE, setup, **options)
    assert isinstance(found, DryRunReport), found
    return found


DEPTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {}),
    "full, accumulation, no checkpointing": ("qwen2", {**FULL, "checkpointing": 0, "accumulation_steps": 2}),
    "nf4": ("llama", {"method": "qlora", "quantization": "nf4-double"}),
    "fused head loss, alternating layers": ("gemma2", {**FULL, "loss": "chunked"}),
    "stacked experts, parameters offloaded": (
        "mixtral",
        {**FULL, "checkpointing": 0, "offload": "parameters", "optimizer": "adamw"},
    ),
    "zero1, offloaded": ("llama", {**FULL, "parallel": "zero1", "offload": "optimizer", "accumulation_steps": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "fields"), DEPTHS.values(), ids=DEPTHS.keys())
def test_repeated_depth_equals_full_depth(model_type: str, fields: dict[str, Any]) -> None:
    setup = _setup(**fields)
    with _limits(NEAR, ZERO3_SUB_GROUP_ELEMENTS=30_000):
        short, full = _report(model_type, setup), _report(model_type, setup, full_depth=True)
    assert_same_figures(short, full)


def _bytes_of(report: DryRunReport, phase: str, category: str, name: str) -> int:
    return report.phase_groups[phase].get((category, name), 0)


def test_4_bit_layers_keep_what_was_gathered_for_them() -> None:
    """bitsandbytes keeps a view of the packed weight on its autograd node, so that a release frees nothing until the
    layer's backward; plain layers under the same limits give their weights back."""
    with _limits(NEAR):
        packed = _report("llama", _setup(method="qlora", quantization="nf4-double"))
        plain = _report("llama", _setup())
    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64  # elements of one block's
    held = _bytes_of(packed, "loss", "workspace", "gathered weights")
    assert held >= DEEP * matrices // 2  # all blocks at once, two elements in a byte
    assert _bytes_of(plain, "loss", "workspace", "gathered weights") < DEEP * matrices


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        ({"parallel": "zero2"}, ["fp32 masters", "exp_avg", "exp_avg_sq"]),
        ({"parallel": "zero3"}, ["fp32 masters", "exp_avg", "exp_avg_sq"]),
    ],
    ids=str,
)
def test_offloaded_states_are_not_on_the_device(fields: dict[str, Any], gone: list[str]) -> None:
    here = _report("llama", _setup(**FULL, optimizer="adamw", **fields))
    away = _report("llama", _setup(**FULL, optimizer="adamw", offload="optimizer", **fields))
    for name in gone:
        assert _bytes_of(here, "step", "optimizer", name) > 0
        assert _bytes_of(away, "step", "optimizer", name) == 0
    # the reduce bucket and 16-bit weights stay
    assert ("gradients", "ZeRO reduce bucket") in away.phase_groups["backward"]
    assert away.parameter_bytes == here.parameter_bytes


def test_offloaded_parameters_come_when_they_are_needed() -> None:
    with _limits(NEAR):
        here = _report("llama", _setup(**FULL, optimizer="adamw", offload="optimizer"))
        away = _report("llama", _setup(**FULL, optimizer="adamw", offload="parameters"))
    assert here.parameter_bytes > 0
    assert away.parameter_bytes == 0
    assert _bytes_of(away, "forward", "workspace", "gathered weights") > 0


# Against the engine: benchmarks/zero_dry_run_check.py (DeepSpeed 0.19.8, two CPU ranks), its figures of rank 0

MEASURED = {
    "forward": 264_465_920,
    "forward/0": 264_675_840,
    "forward/1": 264_876_544,
    "forward/2": 265_069_056,
    "forward/3": 265_261_568,
    "forward/4": 265_454_080,
    "forward/5": 265_672_192,
    "loss": 225_048_064,
    "backward": 220_877_824,
    "backward/5": 223_260_160,
    "backward/4": 215_636_992,
    "backward/3": 215_949_312,
    "backward/2": 208_772_096,
    "backward/1": 200_670_208,
    "backward/0": 191_655_424,
    "step": 243_090_944,
}
BLOCKS = 4 * 512
"""Scalars that the engine keeps and the dry run does not."""


def test_every_segment_is_deepspeeds() -> None:
    setup = TrainSetup(
        **FULL,
        parallel="zero3",
        num_gpus=2,
        checkpointing=0,
        optimizer="adamw-fused",
        attention="eager",
        seq_len_tokens=8,
        micro_batch_seqs=1,
    )
    bucket: Callable[[int], int] = lambda num: 4_000_000  # noqa: E731
    config = load_config(small_config("llama", **WIDER))
    with mock.patch.object(zero3_engine, "zero_bucket_elements", bucket), fake_job(setup) as world:
        trace = trace_run(config, setup, capability=NO_FLASH, workspaces=False, num_layers=6, world=world)
        found = peaks(world.finish(trace, None).events)
    found.pop("load")
    assert found.keys() == MEASURED.keys()
    for segment, size in found.items():
        assert abs(size - MEASURED[segment]) <= BLOCKS, segment
