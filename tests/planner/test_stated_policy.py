"""The policy's rules (docs/choices.md) as tables of what is known and what is taken, in milliseconds."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.models import catalogue
from planner.models.targets import num_lora_params
from planner.options.layouts import PARALLELS
from planner.planning.decision import alternatives, policy
from planner.planning.decision.node import Node
from planner.planning.decision.tree import (
    METHOD_BAND,
    _micro_batch_answer,
    choose_node,
    data_needs_full,
    data_too_small_for_full,
)
from planner.planning.groups import WalkCache
from planner.planning.lora_rank import MAX_RANK
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import memory_notes
from planner.planning.space import dimension_values
from planner.setup import TrainSetup
from planner.setup.allowed import PRECISIONS

MODEL = catalogue.load("meta-llama/Llama-3.2-1B")
assert MODEL is not None
NODES = {"full": Node.FULL, "lora": Node.LORA, "4": Node.FOUR_BIT, "8": Node.EIGHT_BIT}


def workload(gpu: str = "h100-sxm", **wishes: Any) -> Workload:
    assert MODEL is not None
    return PlanRequest(**wishes).workload(MODEL, find_gpu(gpu))


@pytest.mark.parametrize(
    ("name", "gpu", "targets", "taken", "said"),
    [
        ("google/gemma-3-1b-it", "t4", (), {"fp32"}, "fp32, as Tesla T4 has no bf16 and in fp16 its activations"),
        ("google/gemma-3-1b-it", "t4", ("unsloth",), {"fp16-autocast", "fp16-mixed"}, "Unsloth computes such parts"),
        ("google/gemma-3-1b-it", "l4", (), {"bf16-pure", "bf16-autocast", "bf16-mixed"}, ""),
        ("Qwen/Qwen3-30B-A3B", "t4", (), {"fp16-autocast", "fp16-mixed"}, "fp16: its gradients' norm often is no num"),
        ("Qwen/Qwen3-8B", "t4", (), {"fp16-autocast", "fp16-mixed"}, ""),
    ],
)
def test_a_model_that_overflows_in_fp16_is_not_planned_in_it_or_it_is_said(
    name: str, gpu: str, targets: tuple[str, ...], taken: set[str], said: str
) -> None:
    model, card = catalogue.load(name), find_gpu(gpu)
    assert model is not None
    precisions = dimension_values(PlanRequest(targets=targets).workload(model, card))["precision"]
    assert set(precisions) == taken
    setup = TrainSetup(precision=precisions[0], stack=targets[0] if targets else "trl")
    overflows = [note for note in memory_notes(model, card, setup) if "65,504" in note or "no number" in note]
    assert [said in note for note in overflows] == [True] * bool(said)


@pytest.mark.parametrize(("rate", "said"), [(2.0, True), (2e-4, False), (1e-7, True)])
def test_a_learning_rate_far_from_the_rules_is_said(rate: float, said: bool) -> None:
    chosen = cast(Any, SimpleNamespace(setup=TrainSetup()))
    notes = [*policy.job_notes(workload(learning_rate=rate), chosen)]
    assert any(note.startswith("--lr ") for note in notes) == said


def known(speed: float | None, *, sure: bool = True) -> Any:
    """What a walk learned of a node: its best point's speed (None: nothing fits)."""
    best = None if speed is None else SimpleNamespace(tokens_per_s=speed)
    return SimpleNamespace(
        best=lambda: best,
        best_sure=lambda: best if sure else None,
        sure=sure and best is not None,
        speed=lambda point: point.tokens_per_s,
    )


def taken(speeds: dict[str, float], *, only_may: tuple[str, ...] = (), **how: Any) -> Node | None:
    results = {node: known(speeds.get(name), sure=name not in only_may) for name, node in NODES.items()}
    from_host = how.pop("from_host", False)
    return choose_node(results, workload(**how), from_host=from_host)


LESS, MORE = 1 - METHOD_BAND, 1 + METHOD_BAND
TAKEN: list[tuple[dict[str, float], dict[str, Any], str]] = [
    # speeds of what fits, the request -> the class taken
    ({"lora": 1.0, "4": 5.0, "8": 5.0}, {}, "lora"),
    ({"4": 1.0, "8": 5.0}, {}, "4"),
    ({"8": 1.0, "full": 0.1}, {}, "8"),
    ({"full": 1.0}, {}, "full"),
    ({"lora": 1.0, "full": 1.0}, {}, "full"),
    ({"lora": 1.0, "full": LESS + 0.01}, {}, "full"),
    ({"lora": 1.0, "full": LESS - 0.01}, {}, "lora"),
    ({"lora": 1.0, "full": 9.0}, {"only_may": ("full",)}, "lora"),
    ({"lora": 1.0, "4": 0.5}, {"only_may": ("lora",)}, "4"),
    ({"lora": 1.0, "4": 0.5}, {"only_may": ("lora", "4")}, "lora"),
    ({"lora": 1.0, "4": MORE + 0.01}, {"prefer": "speed"}, "4"),
    ({"lora": 1.0, "4": MORE - 0.01}, {"prefer": "speed"}, "lora"),
    ({"lora": 1.0, "4": LESS + 0.01}, {"from_host": True}, "4"),
    ({"lora": 1.0, "4": LESS - 0.01}, {"from_host": True}, "lora"),
    ({"lora": 9.0, "full": 1.0}, {"fixed": {"method": ("full",)}}, "full"),
]


@pytest.mark.parametrize(("speeds", "how", "expected"), TAKEN, ids=str)
def test_the_class_that_is_taken(speeds: dict[str, float], how: dict[str, Any], expected: str) -> None:
    assert taken(speeds, **how) is NODES[expected]


def with_data(tokens: int) -> Workload:
    base = workload()
    return replace(base, data=replace(base.data, epoch_tokens=tokens))


def test_data_that_an_adapter_cannot_hold_and_data_that_full_fine_tuning_overfits() -> None:
    """2 bits a parameter of the largest rank hold 1 bit a token; 1e-4 tokens a parameter are too few."""
    most = 2 * num_lora_params(MODEL, "all-linear", MAX_RANK)
    assert [data_needs_full(with_data(tokens)) for tokens in (most, most + 1)] == [False, True]
    few = int(1e-4 * MODEL.num_params)
    assert [data_too_small_for_full(with_data(tokens)) for tokens in (few, few + 1)] == [True, False]
    results = {node: known({Node.LORA: 1.0, Node.FULL: 2.0}.get(node)) for node in Node}
    assert [choose_node(results, with_data(tokens)) for tokens in (few, few + 1)] == [Node.LORA, Node.FULL]


MASTERS = {"zero1", "zero2", "zero3"}
"""Engines that keep fp32 masters of 16-bit weights by themselves. Source: DeepSpeed 0.19 `bf16_optimizer`."""


@pytest.mark.parametrize(("precision", "parallel"), [*product(PRECISIONS, PARALLELS)], ids=str)
def test_whether_16_bit_weights_take_the_updates_themselves(precision: str, parallel: str) -> None:
    if precision == "fp16-autocast":  # adapters alone
        return
    gpus = 1 if parallel == "none" else 4
    setup = TrainSetup(method="full", lora_rank=0, precision=precision, num_gpus=gpus, parallel=parallel)
    alone = precision in ("bf16-pure", "bf16-autocast") and parallel not in MASTERS
    assert policy.full_quality(setup) == int(alone)
    assert policy.full_quality(TrainSetup(precision="bf16-pure", num_gpus=gpus, parallel=parallel)) == 0


COMPILED = [
    # card, fields -> whether compiled runs of such were compared
    ("h100-sxm", {}, True),
    ("rtx-3090", {}, True),
    ("t4", {"precision": "fp16-mixed"}, False),
    ("mi300x", {}, False),
    ("h100-sxm", {"num_gpus": 2, "parallel": "ddp"}, False),
    ("h100-sxm", {"objective": "dpo", "loss": "full"}, False),
    ("h100-sxm", {"method": "qlora", "quantization": "nf4"}, False),
    ("h100-sxm", {"adapter": "dora"}, False),
]


@pytest.mark.parametrize(("gpu", "fields", "compared"), COMPILED, ids=str)
def test_compile_is_open_where_compiled_runs_were_compared_and_it_gains_more_than_they_err(
    gpu: str, fields: dict[str, Any], compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = TrainSetup(**fields)
    for gain, enough in ((policy.COMPILE_WORTH - 0.01, False), (policy.COMPILE_WORTH + 0.01, True)):
        monkeypatch.setattr(policy, "compiled_and_not", lambda *_, gain=gain: (100.0 * (1 + gain), 100.0))
        assert (policy.compile_left_out(workload(gpu), setup) == "") == (compared and enough)


def test_compiles_gain_is_over_the_fastest_kernels_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def speeds(model: object, gpu: object, setup: TrainSetup) -> Any:
        speed = 150.0 if setup.compile else 100.0
        return SimpleNamespace(at=lambda micro, steps: (0.0, speed))

    monkeypatch.setattr(policy, "speed_profile", speeds)
    assert policy.compiled_and_not(workload(), TrainSetup()) == (150.0, 100.0)


def test_compile_is_left_out_of_jobs_that_it_saves_less_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "compiled_and_not", lambda *_: (2000.0, 1000.0))
    request = workload("h100-sxm")
    takes_s = policy.compile_s(request.model)
    for saved_s, left_out in ((0.9 * takes_s, True), (1.1 * takes_s, False), (0, False)):
        data = replace(request.data, epoch_tokens=round(1000 * saved_s))  # of two epochs
        why = policy.compile_left_out(replace(request, data=data, num_epochs=2.0), TrainSetup())
        assert bool(why) == left_out
        assert not left_out or "saves this job" in why


WALKED = {("axolotl",)}
"""Programs with kernels of their own whose published runs were compared."""
ALL = {"method": ("lora", "qlora"), "lora_targets": ("all-linear",)}


@pytest.mark.parametrize(
    ("sure", "fixed", "fewer"),
    [
        ((), {}, True),
        (("a point that does",), {}, False),
        *(((), {name: ("x",)}, False) for name in ("lora_targets", "quantization", "adapter")),
    ],
    ids=str,
)
def test_attention_alone_is_adapted_where_no_lora_on_all_matrices_surely_fits(
    sure: tuple[object, ...], fixed: dict[str, Any], fewer: bool
) -> None:
    request = replace(workload(), fixed=fixed)
    expected = {**ALL, "method": ("lora",), "lora_targets": ("attention",), "lora_rank": (16, 32)} if fewer else {}
    assert policy.fewer_matrices(request, ALL, sure) == expected


@pytest.mark.parametrize("name", ["axolotl", "unsloth"])
def test_a_program_that_is_absent_is_not_walked(name: str) -> None:
    request, values = workload(), {"method": ("lora",), "lora_targets": ("all-linear",)}
    here = {space.targets for space in policy.opened_workloads(request, values)}
    there = {space.targets for space in policy.opened_workloads(replace(request, absent_packages=(name,)), values)}
    assert here - there == {(name,)} & WALKED
    assert here >= WALKED


def test_of_what_the_hosts_memory_helps_the_least_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.memory.engines import host

    needs = {"optimizer": 10 << 30, "parameters": 30 << 30}

    def points(plan_request: Workload, cache: WalkCache) -> dict[Node, Any]:
        (offload,) = plan_request.fixed["offload"]
        setup = SimpleNamespace(offload=offload)
        return {Node.LORA: SimpleNamespace(setup=setup, tokens_per_s=1.0, peak_device_bytes=0)}

    monkeypatch.setattr(alternatives, "best_points", points)
    monkeypatch.setattr(alternatives, "memory_band", lambda *_: 0.0)
    monkeypatch.setattr(host, "host_bytes_per_node", lambda model, setup, nodes: needs[setup.offload])
    nearest: Any = SimpleNamespace(formula=SimpleNamespace(peak_device_bytes=1 << 40))
    (suggestion,) = alternatives._offloaded(workload("rtx-4090"), nearest, WalkCache())
    assert suggestion.action.startswith("--offload optimizer --host-memory 12: ")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({}, True),
        ({"precision": "bf16-pure"}, False),
        ({"optimizer": "adamw-8bit"}, False),
        ({"kernels": "liger"}, True),
    ],
)
def test_the_simpler_is_preferred_among_what_loses_the_same(other: dict[str, Any], same: bool) -> None:
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-mixed")
    assert policy.equals(setup, setup.replace(**other)) is same


@pytest.mark.parametrize(("more", "added"), [(0, 0), (1 << 30, 1 << 30), (40 << 30, 0)])
def test_what_would_help_keeps_clear_of_what_a_dry_run_found_beyond_the_formula(
    more: int, added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run found `more` bytes: suggestions keep as much free besides, unless that is the whole memory."""
    plan_request, given = workload("rtx-4090"), []
    monkeypatch.setattr(alternatives, "_suggestions", lambda request, *_: iter(given.append(request) or ()))
    monkeypatch.setattr(
        alternatives, "candidate", lambda *_: SimpleNamespace(formula=SimpleNamespace(peak_device_bytes=30 << 30))
    )
    smallest = SimpleNamespace(peak_device_bytes=(30 << 30) + more, setup=None)
    results: Any = SimpleNamespace(nodes=lambda: {Node.LORA: SimpleNamespace(smallest=smallest)})
    refused = alternatives.refusal(plan_request, results, (), cast(Any, None), ())
    assert [trial.headroom_bytes - plan_request.headroom_bytes for trial in given] == [added]
    assert refused.missing_bytes == (30 << 30) + more - plan_request.budget_bytes


def test_a_roomier_card_saves_what_it_has_more() -> None:
    request = workload("t4")
    suggestion, *_ = alternatives._larger_gpu(request, [(request, TrainSetup(method="full", lora_rank=0))])
    larger = find_gpu(suggestion.action.removeprefix("--gpu "))
    assert suggestion.saves_bytes == larger.memory_bytes - request.memory_bytes > 0


@pytest.mark.parametrize(("steps", "larger", "words"), [
    (1, False, "fits in one forward"), (1, True, "fits in one forward"), (2, True, "larger micro-batches fit"),
    (2, False, "the fastest that fits"),
])  # fmt: skip
def test_why_the_global_batch_is_cut_so(steps: int, larger: bool, words: str) -> None:
    family = TrainSetup()
    best = SimpleNamespace(family=family, accumulation_steps=steps, micro_batch_seqs=4, peak_device_bytes=1)
    more = [SimpleNamespace(family=family, micro_batch_seqs=8)] * larger
    assert words in _micro_batch_answer(cast(Any, best), workload(), cast(Any, more)).reason


def test_a_card_that_is_advised_for_a_node_is_one_that_nodes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DGX Spark has the memory that is missing, and no second one beside it."""
    monkeypatch.setattr(alternatives, "device_peak_bytes", lambda *_: 100 << 30)
    one = workload("h100-sxm")
    eight = replace(one, cluster=make_cluster(one.gpu, 8))
    named = [
        [suggestion.action for suggestion in alternatives._larger_gpu(request, [(request, TrainSetup())])]
        for request in (one, eight)
    ]
    assert named[0][0] == "--gpu gb10"
    assert named[1] == ["--gpu h200-nvl"]
