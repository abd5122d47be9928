"""Collectives: the ring's volume, what a network costs, when a tree wins."""

from dataclasses import replace

import pytest

from planner.hardware.cluster import Cluster, make_cluster
from planner.hardware.gpus import find_gpu
from planner.speed.roofline.calibration import LayoutConstants
from planner.speed.several_gpus.collectives import Collectives, Group, group_of, link_rate

EXACT = LayoutConstants(nvlink_share=1.0, pcie_share=1.0, network_share=1.0, collective_s=0.0)


def cluster(gpus: int, *, nodes: int | None = None, latency_s: float = 0.0) -> Cluster:
    made = make_cluster(find_gpu("a100-80gb"), gpus, num_nodes=nodes, interconnect="ib-1600" if nodes else None)
    between = replace(made.between, latency_s=latency_s) if made.between else None
    return replace(made, within=replace(made.within, latency_s=latency_s), between=between)


def test_a_ring_takes_its_volume_over_the_link() -> None:
    one_node = cluster(8)
    collectives = Collectives(one_node, EXACT)
    group = group_of(one_node, 8)
    rate = one_node.within.bytes_per_s
    assert collectives.all_reduce_s(1e9, group) == pytest.approx(2 * 7 / 8 * 1e9 / rate)
    assert collectives.all_gather_s(1e9, group) == pytest.approx(7 / 8 * 1e9 / rate)


def test_between_nodes_the_slower_link_decides() -> None:
    fast = cluster(16, nodes=2)
    slow = replace(fast, between=replace(fast.between, bytes_per_s=fast.between.bytes_per_s / 8))
    group = group_of(fast, 16)
    quick = Collectives(fast, EXACT).all_gather_s(1e9, group)
    assert Collectives(slow, EXACT).all_gather_s(1e9, group) == pytest.approx(8 * quick)
    assert quick == pytest.approx(15 / 16 * 1e9 / fast.between.bytes_per_s)


def test_groups_across_nodes_share_the_nodes_network() -> None:
    four = cluster(32, nodes=4)
    across = group_of(four, 4, 8)  # GPU 0 of every node: seven like groups beside it
    assert (across.per_node, across.nodes, across.sharing) == (1, 4, 8)
    rate = four.between.bytes_per_s
    assert Collectives(four, EXACT).all_reduce_s(1e9, across) == pytest.approx(8 * 2 * 3 / 4 * 1e9 / rate)


def test_groups_fill_nodes_before_the_next_begins() -> None:
    four = cluster(32, nodes=4)
    assert group_of(four, 8) == Group(size=8, per_node=8, sharing=1)
    assert group_of(four, 4) == Group(size=4, per_node=4, sharing=2)
    assert group_of(four, 16, 2) == Group(size=16, per_node=4, sharing=2)
    assert group_of(four, 32).nodes == 4


def test_latency_counts_every_hop_of_a_ring() -> None:
    two = cluster(16, nodes=2, latency_s=4e-6)
    group = group_of(two, 16)
    assert Collectives(two, EXACT).all_gather_s(0.0, group) == pytest.approx(15 * 4e-6)


def test_one_rank_alone_sends_nothing() -> None:
    one_node = cluster(8)
    collectives = Collectives(one_node, LayoutConstants())
    alone = group_of(one_node, 1)
    for collective in (collectives.all_reduce_s, collectives.all_gather_s, collectives.send_s):
        assert collective(1e9, alone) == 0.0


def test_geforce_cards_stage_pcie_in_host_memory() -> None:
    constants = LayoutConstants()
    consumer = make_cluster(find_gpu("rtx-4090"), 2)
    server = make_cluster(find_gpu("l40s"), 2)
    assert consumer.within.bytes_per_s == server.within.bytes_per_s
    assert link_rate(consumer, consumer.within, constants) < link_rate(server, server.within, constants)
