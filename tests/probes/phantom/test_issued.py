"""What a traced program issues, step by step, and the speed that is made of it."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from planner.hardware.gpus import find_gpu
from planner.speed.operators import TRAINER, WAIT, program_of
from planner.speed.rates import card_rates
from planner.speed.roofline.calibration import load_calibration
from planner.speed.traced import TracedSpeed, traced_speed
from probes.phantom.card import card_of
from probes.phantom.issued import Issued
from probes.phantom.mode import Phantom
from probes.phantom.origins import Origins
from probes.phantom.session import phantom_gpu
from probes.phantom.summary import summary

GPU = find_gpu("h100-sxm")
VOCABULARY, WIDTH, SEQS, TOKENS = 512, 64, 4, 128


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        out: torch.Tensor = self.head(hidden)
        return out


def train(
    phantom: Phantom, *, steps: int = 2, micro_batches: int = 1, looks: bool = False, reference: bool = False
) -> None:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        for _ in range(micro_batches):
            ids = torch.zeros(SEQS, TOKENS, dtype=torch.int64, device="cuda")
            if reference:
                with torch.no_grad():
                    model(ids)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            if looks:
                loss.item()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def phantom() -> Iterator[Phantom]:
    with phantom_gpu(card_of(GPU)) as virtual_gpu:
        yield virtual_gpu


def test_the_last_step_has_a_speed_lines_and_modules(phantom: Phantom) -> None:
    train(phantom)
    rows = summary(phantom, "done").program
    program = program_of(rows)
    assert [[len(calls) for calls in rows["places"]]] == [[len(segment.calls) for segment in program.segments]]
    assert {segment.phase for segment in program.segments} == {"forward", "backward", "step"}
    speed = traced_speed(rows, GPU)
    assert speed.tokens_per_s == pytest.approx(SEQS * TOKENS / speed.step_time_s)
    assert sum(speed.parts_s.values()) == pytest.approx(speed.step_time_s)
    assert sum(speed.phases_s.values()) == pytest.approx(speed.step_time_s, rel=0.02)
    assert any("host-bound" in note for note in speed.notes)
    assert {"layers.*", "head", "table"} <= {module.name for module in speed.by_module}
    matrices = 2 * SEQS * TOKENS * WIDTH * (3 * WIDTH + VOCABULARY) * 3
    assert speed.mfu_fraction == pytest.approx(matrices / speed.step_time_s / (GPU.bf16_flops_per_s or 1))


def test_more_micro_batches_take_as_much_more(phantom: Phantom) -> None:
    train(phantom, micro_batches=1)
    single = traced_speed(summary(phantom, "done").program or {}, GPU)
    train(phantom, micro_batches=3)
    three = traced_speed(summary(phantom, "done").program or {}, GPU)
    assert three.tokens_per_s == pytest.approx(3 * SEQS * TOKENS / three.step_time_s)
    assert 2.2 < three.step_time_s / single.step_time_s < 3.0  # one optimizer step


def test_tokens_of_a_reference_are_not_trained_on(phantom: Phantom) -> None:
    """TRL's DPO was said to train twice its tokens."""
    train(phantom, reference=True)
    speed = traced_speed(summary(phantom, "done").program or {}, GPU)
    assert speed.tokens_per_s == pytest.approx(SEQS * TOKENS / speed.step_time_s)


def test_a_look_at_the_loss_is_a_wait(phantom: Phantom) -> None:
    train(phantom, looks=True)
    program = program_of(summary(phantom, "done").program or {})
    waits = {number for number, operator in enumerate(program.operators) if operator.name == WAIT}
    (step,) = program.step  # what follows the last backward is the step's
    assert sum(call // 5 in waits for call in program.segments[step].calls) == 1


def speed_beside(phantom: Phantom, does: Callable[[], object]) -> TracedSpeed:
    """Of a step that `does` something before its optimizer."""
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.zeros(SEQS, TOKENS, dtype=torch.int64, device="cuda")).sum().backward()
        does()
        optimizer.step()
    rows = summary(phantom, "done").program
    assert rows is not None
    return traced_speed(rows, GPU)


def test_a_step_in_the_hosts_memory_takes_that_memorys_time(phantom: Phantom) -> None:
    """torchao's CPUOffloadOptimizer was as quick as an optimizer without states: AdamW reads and writes four tensors
    (PyTorch's schema takes a gradient to be written too), once the gradients that it waits for are there."""
    weight = nn.Parameter(torch.zeros(1 << 26, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    away = torch.optim.AdamW([weight], fused=True)

    def steps() -> None:
        torch.cuda.Stream().record_event().synchronize()
        away.step()

    base, hosted = speed_beside(phantom, lambda: None), speed_beside(phantom, steps)
    moved_s = 8 * weight.nbytes / load_calibration().layout_constants.cpu_adam_bytes_per_s
    assert hosted.step_time_s - base.step_time_s == pytest.approx(moved_s, rel=0.05)
    assert any("host's memory" in note for note in hosted.notes)
    assert not any("host's" in note for note in base.notes)
    operators = program_of(summary(phantom, "done").program or {}).operators
    assert any(operator.name == WAIT for operator in operators)


def test_copies_between_host_and_card_take_the_links_time(phantom: Phantom) -> None:
    """What a program carries to the host and back was as quick as within the card, and `copy_` took no time at all; on
    a stream of its own it goes beside the rest, until the link is what takes longest."""
    there = torch.zeros(1 << 28, device="cuda")
    here = torch.empty(1 << 28, pin_memory=True)
    plain = torch.empty(1 << 28)
    aside = torch.cuda.stream(torch.cuda.Stream())  # entered again and again

    def step_s(carry: Callable[[], object]) -> float:
        return speed_beside(phantom, carry).step_time_s

    def carried_aside(times: int) -> None:
        for _ in range(times):
            with aside:
                here.copy_(there, non_blocking=True)

    base = step_s(lambda: None)
    link_s = (1 << 30) / card_rates(GPU).pcie
    assert step_s(lambda: there.copy_(here)) - base == pytest.approx(link_s, rel=0.02)
    assert step_s(lambda: there.copy_(here.data)) - base == pytest.approx(link_s, rel=0.02)  # as pinned as `here`
    assert step_s(lambda: there.to("cpu")) - base > 3 * link_s
    assert step_s(lambda: plain.cuda()) - base > 3 * link_s
    assert 0 < step_s(lambda: there.copy_(there.clone())) - base < 0.2 * link_s
    assert step_s(lambda: carried_aside(1)) == pytest.approx(max(base, link_s), rel=0.02)
    assert step_s(lambda: carried_aside(3)) == pytest.approx(3 * link_s, rel=0.02)


def test_a_table_without_an_embedding_module_has_tokens(phantom: Phantom) -> None:
    net = Net().cuda()
    table = nn.Parameter(net.table.weight)
    net.table.forward = lambda ids: table[ids]  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.zeros(SEQS, TOKENS, dtype=torch.int64, device="cuda")).sum().backward()
        optimizer.step()
    speed = traced_speed(summary(phantom, "done").program or {}, GPU)
    assert speed.tokens_per_s == pytest.approx(SEQS * TOKENS / speed.step_time_s)


def test_what_did_not_train_has_no_step(phantom: Phantom) -> None:
    alone = nn.Parameter(torch.empty(4, device="cuda"))
    alone.sum().backward()
    torch.optim.SGD([alone]).step()  # without a module no training is seen to begin
    assert summary(phantom, "done").program is None
    Net().cuda()(torch.zeros(1, 4, dtype=torch.int64, device="cuda"))
    assert summary(phantom, "done").program is None


def test_micro_batches_that_were_left_out_count() -> None:
    """Three alike, of which the last two were left out, then the last one, clipping and the optimizer."""
    origins = Origins()
    origins.num_forwards = 1
    log = Issued(origins)
    kernel = torch.ops.aten.mul.Tensor
    rows = torch.empty(8, 8, device="meta")

    def runs(times: int) -> None:
        for _ in range(times):
            log.ran(kernel, (rows, rows), {}, rows, _Unknown())

    log._training = 0
    model = nn.Linear(2, 2)
    for repeated in (False, True, True, False):
        log.micro_batch_begins()
        log.trainer("micro-batch", model)
        if repeated:
            log.micro_batch_repeats()
            continue
        runs(5)
        log.micro_batch_ends()
    log.trainer("step", model)
    runs(2)
    log.step_begins()
    runs(1)
    log.step_ends(7)
    program_rows = log.rows()
    assert program_rows is not None
    program = program_of(program_rows)
    names = [
        program.operators[call // 5].name
        for place in (*program.micro_batch, *program.step)
        for call in program.segments[place].calls
    ]
    assert names.count(f"{TRAINER}micro-batch") == 4
    assert names.count(f"{TRAINER}step") == 1
    assert names.count("aten.mul.Tensor") == 4 * 5 + 2 + 1


class _Unknown:
    number = None
