"""A rank's step on three clocks: what it exchanges, what waits for it, and what of it compute hides."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import distributed, nn

from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.planning.run_speed import rank_speed
from planner.setup import TrainSetup
from planner.speed.operators import COLLECTIVE, GRADIENT, ISSUERS, JOIN, MARK, Program, program_of
from planner.speed.rank_timeline import FIRST_BUCKET_BYTES, Clocks
from planner.speed.several_gpus.exchange import DDP_BUCKET_BYTES
from planner.speed.timeline import QUEUE_S, ClockMap, Exchange
from planner.speed.traced import traced_speed
from probes.dryrun import dry_run_report
from probes.dryrun.report import DryRunReport
from probes.phantom.card import card_of
from probes.phantom.mode import Phantom
from probes.phantom.session import phantom_gpu
from probes.phantom.summary import summary

GPU, WIDTH, LAYERS = find_gpu("h100-sxm"), 4096, 6
MIB = 2**20


def compute(seconds: float) -> ClockMap:
    """A kernel that is issued at once."""
    return ClockMap(0.0, float("-inf"), seconds, seconds)


def gather(seconds: float, after: int = 0) -> Exchange:
    return Exchange(COLLECTIVE, seconds, after)


def test_a_collective_hides_behind_what_does_not_wait_for_it() -> None:
    clocks = Clocks(lambda size_bytes: 0.0)
    clocks.run([gather(2.0), compute(3.0), Exchange(JOIN, ago=1), compute(1.0)], reducing=True)
    assert clocks.at == 4.0
    assert clocks.link == pytest.approx(2.0 + QUEUE_S)


def test_the_model_s_stream_waits_for_the_rest_of_one_that_is_longer() -> None:
    clocks = Clocks(lambda size_bytes: 0.0)
    clocks.run([gather(2.0), compute(0.5), Exchange(JOIN, ago=1), compute(1.0)], reducing=True)
    assert clocks.at == pytest.approx(3.0 + QUEUE_S)


def test_collectives_take_turns_and_wait_for_their_data() -> None:
    """The second begins where the model's stream was when it was marked, the first done; one on the model's stream
    stops that."""
    clocks = Clocks(lambda size_bytes: 0.0)
    clocks.run([gather(1.0), compute(5.0), Exchange(MARK), compute(2.0), gather(1.0, after=1)], reducing=True)
    assert (clocks.device, clocks.link) == (7.0, 6.0)
    clocks.run([gather(1.0, after=-1), compute(1.0)], reducing=True)
    assert clocks.at == 9.0


def test_ddp_reduces_by_buckets_and_waits_at_the_end() -> None:
    """By hand: a first bucket of a MiB, then of 25, each after the compute before it; the rest at the end."""
    sizes = []

    def all_reduce_s(size_bytes: float) -> float:
        sizes.append(size_bytes)
        return 1.0

    clocks = Clocks(all_reduce_s)
    items = [item for _ in range(4) for item in (compute(1.0), Exchange(GRADIENT, 10.0 * MIB))]
    clocks.run(items, reducing=False)
    assert (clocks.at, sizes) == (4.0, [])
    clocks.run(items, reducing=True)
    clocks.reduced()
    assert sizes == [10 * MIB, 30 * MIB]
    assert FIRST_BUCKET_BYTES < 10 * MIB < DDP_BUCKET_BYTES < 30 * MIB
    assert clocks.at == 9.0


def test_a_join_counts_collectives_alone() -> None:
    clocks = Clocks(lambda size_bytes: 1.0)
    clocks.run([gather(0.1), Exchange(GRADIENT, 2.0 * MIB), Exchange(JOIN, ago=1)], reducing=True)
    assert clocks.device == pytest.approx(0.1 + QUEUE_S)


@pytest.fixture
def phantom(monkeypatch: pytest.MonkeyPatch) -> Iterator[Phantom]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with phantom_gpu(card_of(GPU)) as virtual_gpu:
        distributed.init_process_group("nccl")
        yield virtual_gpu


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(WIDTH, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()


def exchanged(program: Program) -> Counter[str]:
    names = (
        program.operators[call // len(ISSUERS)].name
        for place in (*program.micro_batch, *program.step)
        for call in program.segments[place].calls
    )
    return Counter(name for name in names if name.startswith((COLLECTIVE, "stream.")))


def test_a_traced_fsdp2_gathers_every_layer_twice_and_scatters_its_gradient(phantom: Phantom) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for module in (*model, model):
        fully_shard(module)
    train(model)
    rows = summary(phantom, "done").program or {}
    found = exchanged(program_of(rows))
    assert found[f"{COLLECTIVE}_allgather_base_"] == 2 * LAYERS
    assert found[f"{COLLECTIVE}_reduce_scatter_base_"] == LAYERS
    assert found[JOIN] >= 2 * LAYERS
    whole = next(operator for operator in program_of(rows).operators if operator.name.startswith(COLLECTIVE))
    assert whole.numbers[:3] == (WIDTH * WIDTH * 4, 4, 1)
    speed, nearly_alone = traced_speed(rows, GPU), traced_speed({**rows, "num_ranks": 1}, GPU)
    assert speed.num_gpus == 4
    assert 0 < speed.parts_s["communication"] < 0.1 * speed.step_time_s
    assert speed.step_time_s > nearly_alone.step_time_s
    # a GPU whose ranks talk over PCIe waits for it, and nobody knows how fast it is
    slow = traced_speed(rows, find_gpu("rtx-4090"))
    assert slow.parts_s["communication"] > 0.3 * slow.step_time_s
    assert slow.band_fraction > 2 * speed.band_fraction
    measured = traced_speed(rows, find_gpu("rtx-4090"), make_cluster(find_gpu("rtx-4090"), 4, interconnect="22GB/s"))
    assert measured.step_time_s < slow.step_time_s
    assert measured.band_fraction < slow.band_fraction


def test_a_traced_ddp_reduces_beside_its_backward(phantom: Phantom) -> None:
    train(nn.parallel.DistributedDataParallel(layers(), device_ids=[0]))
    rows = summary(phantom, "done").program or {}
    found = exchanged(program_of(rows))
    assert found[f"{COLLECTIVE}allreduce_"] == LAYERS
    assert found[JOIN] == LAYERS
    assert 0 < traced_speed(rows, GPU).parts_s["communication"] < 0.1 * traced_speed(rows, GPU).step_time_s


def test_of_tensor_parallelism_no_speed_is_said(phantom: Phantom) -> None:
    from torch.distributed._functional_collectives import all_reduce

    class Split(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            whole: torch.Tensor = all_reduce(super().forward(rows), "sum", distributed.group.WORLD)
            return whole

    train(Split(WIDTH, WIDTH, bias=False).cuda())
    with pytest.raises(ValueError, match="tensor parallelism"):
        traced_speed(summary(phantom, "done").program or {}, GPU)


SMALL = TrainSetup(
    method="full", lora_rank=0, precision="bf16-mixed", optimizer="adamw-fused", loss="full", micro_batch_seqs=2,
    seq_len_tokens=1024, num_gpus=4, parallel="fsdp2",
)  # fmt: skip


def small_model() -> ModelSpec:
    model = catalogue.load("Qwen/Qwen2.5-0.5B")
    assert model is not None
    return model


def program_for(setup: TrainSetup) -> Program:
    model = small_model()
    report = dry_run_report(model, GPU, setup, use_cache=False)
    assert isinstance(report, DryRunReport)
    assert report.prediction.tokens_per_s
    assert report.prediction.time_parts_s["communication"] > 0
    assert report.program is not None
    return report.program


def test_a_dry_run_rank_exchanges_what_the_full_model_does() -> None:
    """24 layers, of which a few run, gathered in the forward and in the backward; the root stays gathered."""
    program = program_for(SMALL)
    found = exchanged(program)
    assert found[f"{COLLECTIVE}_reduce_scatter_base_"] >= 24
    assert 48 <= found[f"{COLLECTIVE}_allgather_base_"] <= 52
    cluster, model = make_cluster(GPU, 4), small_model()
    by_nvlink = rank_speed(program, model, GPU, SMALL, cluster)
    slower = rank_speed(program, model, GPU, SMALL, make_cluster(GPU, 4, interconnect="pcie"))
    assert by_nvlink.step_s < slower.step_s
    assert sum(slower.parts_s.values()) == pytest.approx(slower.step_s, rel=1e-6)
    twice = rank_speed(program, model, GPU, replace(SMALL, accumulation_steps=2), cluster)
    assert 1.8 * by_nvlink.step_s < twice.step_s < 2 * by_nvlink.step_s


def test_ddp_reduces_once_a_step_however_many_micro_batches() -> None:
    setup = SMALL.replace(parallel="ddp")
    program, cluster, model = program_for(setup), make_cluster(GPU, 4, interconnect="pcie"), small_model()
    gradients = [operator.numbers[0] for operator in program.operators if operator.name == GRADIENT]
    assert len(gradients) > 1
    exposed = [
        rank_speed(program, model, GPU, setup.replace(accumulation_steps=steps), cluster).parts_s["communication"]
        for steps in (1, 2, 8)
    ]
    assert exposed[2] == pytest.approx(exposed[1], rel=0.01)
    assert exposed[0] == pytest.approx(exposed[1], rel=0.2)  # later ones hide some behind the sums of gradients
