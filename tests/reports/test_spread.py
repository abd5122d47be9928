"""Reports of plans for several GPUs: the layout, the ranks' peaks, the share of communication, and the way to JSON and
back."""

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.core.units import gib
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.engines.host import host_bytes_per_node
from planner.memory.workload import Data, Workload
from planner.planning.answer import plan_workload
from planner.planning.decision.candidates import candidate
from planner.planning.plan import Plan
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate
from reports.command import default_next_command
from reports.compare import plan_labels
from reports.html import Entry, plan_markdown, report_html
from reports.plan_json import plan_from_dict, plan_to_dict
from reports.setup_text import layout_words, setup_words, short_setup_words
from reports.terminal import render_estimate, render_plan
from reports.text import cost_per_million, epoch_sentence, layout_sentence
from tests.planner.helpers import plan_request
from tests.reports.factories import printed

SMALL = {"attention": ("sdpa",), "checkpointing": (1,), "loss": ("chunked",), "optimizer": ("adamw-fused",)}


def job(num_gpus: int = 8, gpu: str = "a100-80gb", model: str = "Qwen/Qwen2.5-7B", **options: Any) -> Workload:
    links = {name: options.pop(name, None) for name in ("num_nodes", "interconnect")}
    cluster = make_cluster(find_gpu(gpu), num_gpus, **links)
    return plan_request(model, gpu, cluster=cluster, fixed={**SMALL, **options.pop("fixed", {})}, **options)


def plan_of(**options: Any) -> Plan:
    plan = plan_workload(job(**options))
    assert isinstance(plan, Plan)
    return plan


def shown(render: Any, *arguments: Any, width: int = 80, **options: Any) -> str:
    return printed(lambda console: render(*arguments, console, **options), width, color_system=None)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(data=Data(epoch_tokens=10_000_000))


@pytest.fixture(scope="module")
def pipeline() -> Candidate:
    setup = TrainSetup(
        method="full", lora_rank=0, precision="bf16-mixed", num_gpus=4, parallel="none", pipeline_degree=4,
        accumulation_steps=8, loss="full",
    )  # fmt: skip
    return candidate(job(4, "h100-sxm"), setup)


def test_terminal_names_gpus_spread_and_communication(plan: Plan) -> None:
    text = " ".join(shown(render_plan, plan).split())
    assert "8 × A100-SXM4-80GB" in text
    assert f"8 GPUs ({layout_words(plan.chosen.setup)})" in text
    assert "communication" in text
    assert "the fullest GPU" in text
    assert "one GPU" in text


def test_markdown_and_html_name_the_spread(plan: Plan) -> None:
    for text in (plan_markdown(plan), report_html([Entry(plan=plan)])):
        assert f"8 GPUs ({layout_words(plan.chosen.setup)})" in text
        assert "Is one GPU enough?" in text


def test_ranks_that_differ_are_listed(pipeline: Candidate) -> None:
    peaks = pipeline.formula.rank_peaks
    assert len(peaks) > 1
    workload = job(4, "h100-sxm")
    text = shown(render_estimate, pipeline, workload.model, workload.gpu)
    markdown = plan_markdown(replace(plan_of(num_gpus=4, gpu="h100-sxm"), chosen=pipeline))
    html = report_html([Entry(plan=replace(plan_of(num_gpus=4, gpu="h100-sxm"), chosen=pipeline))])
    for name, _, _ in peaks:
        assert name in text
        assert name in markdown
        assert name in html


def test_plan_json_comes_back_the_same(plan: Plan, pipeline: Candidate) -> None:
    for original in (plan, replace(plan, chosen=pipeline)):
        back = plan_from_dict(json.loads(json.dumps(plan_to_dict(original))))
        assert back.workload.cluster == original.workload.cluster
        assert back.chosen == original.chosen
        assert back.tree == original.tree
        assert back.alternatives == original.alternatives


def test_cost_counts_every_gpu(plan: Plan) -> None:
    price = plan.workload.price_per_hour
    assert price
    hours = 1e6 / plan.chosen.tokens_per_s / 3600
    assert cost_per_million(plan) == pytest.approx(hours * price * 8)
    assert f"${10 * hours * price * 8:,.2f}" in epoch_sentence(plan.workload, plan.chosen)


def test_next_command_describes_the_same_cluster() -> None:
    command = default_next_command(plan_of(num_gpus=16, num_nodes=4, interconnect="pcie+ib-400"))
    assert "--gpus 16 --nodes 4 --interconnect pcie-gen4-x16+ib-400" in command
    plain = default_next_command(plan_of(num_gpus=8))
    assert "--gpus 8 --seq-len" in plain
    fixed = {"reshard_after_forward": (False,), "parallel": ("fsdp2",)}
    assert "--no-reshard --parallel fsdp2" in default_next_command(plan_of(fixed=fixed))
    assert "--host-memory" not in default_next_command(plan_of(gpu="gh200", num_gpus=4))  # which the superchips bring


@pytest.mark.parametrize(
    ("gpu", "nodes", "link"),
    [
        ("h100-sxm", 2, "ib-3200, 400 GB/s"),
        ("a100-80gb", 2, "ib-1600, 200 GB/s"),
        ("a100-80gb", 4, "ib-800, 100 GB/s"),
        ("gh200", 16, "ib-200, 25 GB/s"),
        ("mi250x", 2, "ib-800, 100 GB/s"),
    ],
)
def test_the_layout_says_what_joins_the_nodes_of_that_card(gpu: str, nodes: int, link: str) -> None:
    """`ib-400` read as a link of one GPU made a plan of pipeline 16; the default is an adapter for each GPU."""
    cluster = make_cluster(find_gpu(gpu), 16, num_nodes=nodes)
    setup = TrainSetup(num_gpus=16, parallel="ddp")
    words = layout_sentence(candidate(plan_request(), setup), replace(plan_request(), cluster=cluster))
    assert words.startswith(f"16 GPUs in {nodes} nodes ({link} per node): DDP")
    assert "nodes" not in layout_sentence(candidate(plan_request(), setup))


def test_the_layout_says_what_every_host_has_to_hold() -> None:
    setup = TrainSetup(method="full", lora_rank=0, num_gpus=8, parallel="fsdp2", offload="parameters")
    workload = plan_request()
    held = gib(host_bytes_per_node(workload.model, setup, 1))
    assert f", {held} in every node's host; " in layout_sentence(candidate(workload, setup), workload)


def test_words_on_one_gpu_say_nothing_of_several() -> None:
    setup = TrainSetup()
    assert "GPU" not in setup_words(setup) + short_setup_words(setup)
    assert layout_sentence(candidate(plan_request(), setup)) == ""


def test_labels_tell_clusters_apart() -> None:
    labels = plan_labels([("a", plan_of(num_gpus=4)), ("b", plan_of(num_gpus=8))])
    assert len(set(labels)) == 2
    assert "4 × A100-SXM4-80GB" in labels[0]
