"""The phantom GPU: devices, memory, values and refusals, in this process."""

import pytest
import torch
import torch.utils._device as device_context
from torch import nn

from planner.core.units import GIB, MIB
from planner.hardware.gpus import find_gpu
from probes.dryrun.workspaces import buffers
from probes.phantom.card import TraceOptions, card_of
from probes.phantom.mode import Phantom
from probes.phantom.session import phantom_gpu
from probes.phantom.steps import Done
from probes.phantom.summary import summary
from tests.probes.phantom.conftest import CARD

WORKSPACE = 8320 * 1024  # of cuBLAS, one for the forward's thread and one for the backward's


def test_tensors_say_that_they_are_on_the_card(phantom: Phantom) -> None:
    tensor = torch.ones(4, device="cuda")
    linear = nn.Linear(4, 4).cuda()
    for gpu_tensor in (tensor, tensor.cpu().cuda(), linear.weight, torch.tensor([1.0], device="cuda"), tensor[1:] * 2):
        assert (gpu_tensor.device, gpu_tensor.is_cuda, gpu_tensor.is_meta, gpu_tensor.get_device()) == (
            torch.device("cuda", 0),
            True,
            False,
            0,
        )
    assert torch.ones(4).device.type == "cpu"
    assert torch.empty(4, device="meta").is_meta
    assert tensor.to("cuda") is tensor
    assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 4090"
    assert torch.cuda.get_device_capability() == (8, 9)


def test_nothing_is_left_behind() -> None:
    before = torch.Tensor.to, torch.cuda.is_available(), torch.compile
    device_context._device_constructors.cache_clear()  # as in a process that has named no device yet
    with phantom_gpu(CARD):
        assert torch.cuda.is_available()
    assert (torch.Tensor.to, torch.cuda.is_available(), torch.compile) == before
    assert torch.empty(1, device="meta").is_meta
    with torch.device("meta"):
        assert {torch.tensor(1.0).is_meta, torch.zeros(1).is_meta} == {True}


def test_memory_of_a_linear_layer_is_what_a_gpu_holds(phantom: Phantom) -> None:
    """By hand: input, weight, output, both gradients of 4 MiB each, cuBLAS's workspaces."""
    layer = nn.Linear(1024, 1024, bias=False, device="cuda")
    rows = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    assert torch.cuda.memory_allocated() == 8 * MIB
    out = layer(rows)
    assert torch.cuda.memory_allocated() == 12 * MIB + WORKSPACE
    out.backward(torch.ones_like(out))
    assert torch.cuda.memory_allocated() == 20 * MIB + 2 * WORKSPACE
    assert torch.cuda.max_memory_allocated() == 24 * MIB + 2 * WORKSPACE  # the gradient of the output
    del out, rows
    layer.zero_grad()
    assert torch.cuda.memory_allocated() == 4 * MIB + 2 * WORKSPACE


@pytest.mark.parametrize(
    ("gpu", "hidden", "expected_mib"),
    [("a100-80gb", 1024, 16), ("a100-80gb", 8192, 108), ("h100-sxm", 16384, 136), ("h100-sxm", 32768, 144)],
)
def test_a_sum_over_rows_takes_partial_sums(gpu: str, hidden: int, expected_mib: int) -> None:
    """Liger's benchmark: what its RMS norms' weight gradients take beyond their tensors (`kernel_bench_liger.csv`)."""
    with phantom_gpu(card_of(find_gpu(gpu))):
        rows = torch.empty(2048, hidden, device="cuda")
        for dim, sums in ((0, expected_mib * MIB), (1, 0)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            total = rows.sum(dim)
            spent = torch.cuda.max_memory_allocated() - before - total.numel() * 4
            assert spent - sums in (0, 512, 1024)  # and a semaphore for each group of blocks
            del total
    assert buffers((4, 512, 256), (512 * 256, 256, 1), {0, 1}, 1 << 18) == buffers((2048, 256), (256, 1), {0}, 1 << 18)


def test_a_mask_that_is_known_selects_what_it_would(phantom: Phantom) -> None:
    rows = torch.randn(64, 1024, device="cuda", requires_grad=True)
    mask = (torch.arange(64) % 4 == 0).cuda()
    picked = rows[mask]
    assert (picked.shape, picked.device.type) == ((16, 1024), "cuda")
    picked.sum().backward()
    changed = rows.detach().clone()
    changed[mask, :] = changed[mask, :] + torch.ones(16, 1024, device="cuda")
    assert not phantom.notes
    assert not phantom.origins.questions
    assert rows[rows[:, 0] > 0].shape == (64, 1024)
    assert [what for what, _ in phantom.origins.questions] == ["how many elements a mask selects (all were assumed)"]
    assert torch.tensor([mask.sum(), 2], device="cuda").tolist() == [16, 2]


def test_a_module_moved_from_the_host_takes_memory_only_there(phantom: Phantom) -> None:
    layer = nn.Linear(8192, 8192, bias=False)
    assert layer.weight.device.type == "cpu"
    assert torch.cuda.memory_allocated() == 0
    layer.to("cuda", torch.bfloat16)
    assert torch.cuda.memory_allocated() == 128 * MIB
    layer.to("cpu")
    assert (layer.weight.device.type, torch.cuda.memory_allocated()) == ("cpu", 0)


def test_a_parameter_that_moves_stays_the_same_object(phantom: Phantom) -> None:
    """An optimizer made before the model is moved trains it, and tied matrices stay tied."""
    model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.to("cuda")
    assert model[1].weight is model[0].weight
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model[0].weight.data = torch.ones(8, 8)
    host = nn.Parameter(torch.empty(0), requires_grad=False)  # as bitsandbytes copies a quantized matrix
    host.data = torch.empty(16, dtype=torch.uint8, device="cuda")
    assert (host.device.type, host.shape, host.requires_grad, type(host)) == ("cuda", (16,), False, nn.Parameter)
    scale = nn.Parameter(torch.tensor([0.5]))
    assert scale.cuda().item() == 0.5
    assert nn.init.ones_(scale).cuda().item() == 1.0
    assert not phantom.origins.questions


def test_running_out_of_memory_happens_at_the_request_and_can_be_caught(phantom: Phantom) -> None:
    tensor = torch.empty(20 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 GiB"):
        torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    del tensor
    assert torch.empty(4 * GIB, dtype=torch.uint8, device="cuda").numel() == 4 * GIB
    refused = phantom.origins.refused
    assert (refused.requested_bytes, refused.allocated_bytes) == (4 * GIB, 20 * GIB)
    assert refused.line.rpartition(":")[0] == __file__


def test_masks_and_positions_have_their_values(phantom: Phantom) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).cuda()
    assert not bool(mask.all())
    assert (mask.sum(-1).tolist(), mask.bool().sum().item()) == ([2, 1], 3)
    assert torch.arange(6, device="cuda").view(2, 3)[mask.bool()].tolist() == [0, 1, 3]
    mask[0, 2] = 1
    assert mask[0].all()
    assert mask.cpu().tolist() == [[1, 1, 1], [1, 0, 0]]
    hidden = torch.randn(2, 3, 8, device="cuda")
    assert hidden[mask.bool()].shape == (4, 8)
    assert not phantom.origins.questions


def test_unknown_values_are_answered_harmlessly_and_noted(phantom: Phantom) -> None:
    hidden = torch.randn(4, 64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
    assert not torch.isnan(hidden).any()
    layout = torch.distributions.MultivariateNormal(hidden[0, 0], scale_tril=hidden[0])  # checks its arguments
    assert layout.sample().shape == (64,)
    assert not phantom.origins.questions
    assert hidden.mean().item() == 1.0
    ((what, line),) = phantom.origins.questions
    assert (what, line is not None and line.file) == ("a float32 value", __file__)


def test_what_weights_touch_is_unknown(phantom: Phantom) -> None:
    count = torch.zeros(1, dtype=torch.long, device="cuda")
    assert count.item() == 0
    count += torch.randn(300, 300, device="cuda").sum().long()
    count.item()
    assert phantom.origins.questions


def test_a_routers_experts_get_equal_shares(phantom: Phantom) -> None:
    chosen = torch.rand(2048, 8, device="cuda").topk(2, dim=-1).indices
    mask = nn.functional.one_hot(chosen, num_classes=8).permute(2, 1, 0)
    assert [torch.where(expert_mask)[1].numel() for expert_mask in mask] == [512] * 8
    assert torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().shape == (8, 1)
    assert "which classes a tensor holds (spread evenly)" in {what for what, _ in phantom.origins.questions}


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loop_is_stopped_after_its_steps(scaled: bool) -> None:
    done: list[int] = []
    with phantom_gpu(
        CARD, TraceOptions(num_steps=2), finished=lambda phantom: done.append(len(phantom.memory.events))
    ) as phantom:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
        model[0].weight.requires_grad_(False)  # handed to the optimizer all the same
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=scaled)

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(8, 64, device="cuda")).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        step()
        with pytest.raises(Done):
            step()
        result = summary(phantom, "done")
    assert len(done) == 1
    assert (result.num_steps, set(result.phase_peaks_bytes)) == (2, {"load", "forward", "backward", "step"})
    sizes = {category.name: category.size_bytes for category in result.by_category}
    trained, frozen = (
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad is on)
        for on in (True, False)
    )
    assert 4 * trained <= sizes["trained weights"] < 4 * trained + 4096
    assert sizes["weights and buffers"] >= 4 * frozen
    assert sizes["optimizer states"] >= 8 * trained
    modules = {module.name: module.size_bytes for module in result.by_module}
    assert modules["0"] >= 4 * frozen  # whose weights no optimizer owns


def test_the_peak_survives_a_reset_by_the_program(phantom: Phantom) -> None:
    torch.empty(GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert summary(phantom, "ended").peak_allocated_bytes == GIB


def test_a_cuda_graph_is_refused(phantom: Phantom) -> None:
    from probes.phantom.cuda import Refused

    with pytest.raises(Refused, match="CUDA graph"):
        torch.cuda.CUDAGraph()


def test_what_is_moved_to_meta_lies_nowhere(phantom: Phantom) -> None:
    """Accelerate does so before it shards a model, which moves parameters that are on a device to the GPU."""
    layer = nn.Linear(1024, 1024, bias=False).to("meta")
    moved = torch.ones(1024, device="cuda").to("meta").new_zeros(8)
    assert {tensor.device.type for tensor in (layer.weight, layer.weight.new_zeros(4), moved)} == {"meta"}
    assert (layer.weight.is_meta, torch.cuda.memory_allocated()) == (True, 0)
