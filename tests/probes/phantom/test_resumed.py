"""What programs do around their steps: resume, build on a device of their choice, evaluate."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from planner.core.units import MIB
from probes.phantom.mode import Phantom
from probes.phantom.session import phantom_gpu
from probes.phantom.steps import parts_of
from probes.phantom.summary import IDLE, summary
from tests.probes.phantom.conftest import CARD


def passed(model: nn.Module, rows: torch.Tensor) -> None:
    model(rows).sum().backward()


def to_first_gpu(storage: Any, location: str) -> Any:
    return storage.cuda(0)


@pytest.mark.parametrize("saved_on", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    "place", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), to_first_gpu, "cpu", None]
)
def test_a_checkpoint_is_loaded_where_the_program_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_on: str, place: Any
) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: saved_on)
    torch.save({"weight": torch.zeros(1024, 1024), "step": torch.tensor(7)}, tmp_path / "last.pt")
    with phantom_gpu(CARD):
        layer = nn.Linear(1024, 1024, bias=False, device="cuda")
        before = torch.cuda.memory_allocated()
        checkpoint = torch.load(tmp_path / "last.pt", map_location=place)
        on_card = place != "cpu" and (place is not None or saved_on != "cpu")
        assert (checkpoint["weight"].is_cuda, checkpoint["step"].item()) == (on_card, 7)
        assert torch.cuda.memory_allocated() - before == (4 * MIB + 512 if on_card else 0)
        assert layer.load_state_dict({"weight": checkpoint["weight"]}).missing_keys == []


def test_what_a_program_saved_itself_is_loaded_again(phantom: Phantom, tmp_path: Path) -> None:
    layer = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    passed(layer, torch.randn(8, 64, device="cuda"))
    optimizer.step()
    torch.save([layer.state_dict(), optimizer.state_dict()], tmp_path / "last.pt")
    for place in ("cuda", "cpu", None, {"cuda:0": "cuda:0"}, to_first_gpu):
        model, states = torch.load(tmp_path / "last.pt", map_location=place)
        assert {tensor.is_cuda for tensor in model.values()} == {place != "cpu"}
        layer.load_state_dict(model)
        optimizer.load_state_dict(states)
        optimizer.step()


MAKERS = {
    "a model": lambda: nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4)).get_parameter("1.bias"),
    "counted": partial(torch.arange, 4),
    "told": lambda: torch.tensor([1, 2, 3]).sum(),
    "a mask": lambda: torch.ones(2, 2).bool().all(),
    "shuffled": lambda: torch.zeros(4)[torch.randperm(4)],
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)])
def test_what_is_made_within_a_device_lies_there(phantom: Phantom, name: str, device: Any) -> None:
    with torch.device(device):
        made = MAKERS[name]()
        assert (made.is_cuda, made.device, made.is_meta) == (True, torch.device("cuda", 0), False)
    assert torch.ones(1).device.type == "cpu"


def test_values_that_are_known_stay_known_within_a_device(phantom: Phantom) -> None:
    with torch.device("cuda"):
        assert torch.arange(4).sum().item() == 6
        assert torch.tensor([3, 4]).tolist() == [3, 4]
        assert torch.ones(3).cpu().device.type == "cpu"


def test_a_peak_of_an_evaluation_is_called_one(phantom: Phantom) -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    passed(model, torch.randn(64, 256, device="cuda"))
    model.eval()
    with torch.no_grad():
        output = model(torch.randn(65536, 256, device="cuda"))
    trace = summary(phantom, "ended")
    assert trace.peak_phase == "evaluation"
    assert trace.by_category[0].name == "evaluation"
    del output
    model.train()
    passed(model, torch.randn(64, 256, device="cuda"))
    assert phantom.origins.phase == "forward"


def test_states_of_a_sharded_parameter_are_states() -> None:
    """A DTensor's memory is its local tensor's, a quantized tensor's that of its parts."""
    local, scale = torch.ones(2), torch.ones(3)
    assert parts_of(SimpleNamespace(_local_tensor=local))[0] is local  # type: ignore[arg-type]
    inner = SimpleNamespace(__tensor_flatten__=lambda: (["codes", "scale"], None), codes=local, scale=scale)
    assert [part.numel() for part in parts_of(inner)] == [2, 3]  # type: ignore[arg-type]


def test_another_model_that_is_asked_in_a_step_evaluates_nothing(phantom: Phantom) -> None:
    model, reference = nn.Linear(256, 256).cuda(), nn.Linear(256, 256).cuda().eval()
    passed(model, torch.randn(64, 256, device="cuda"))
    with torch.no_grad():
        output = reference(torch.randn(65536, 256, device="cuda"))
    assert summary(phantom, "ended").peak_phase == "forward"
    del output


@pytest.mark.parametrize(("on", "training", "idle"), [(True, False, True), (True, True, False), (False, False, False)])
def test_checkpointing_that_does_nothing_is_named(phantom: Phantom, on: bool, training: bool, idle: bool) -> None:
    model = nn.Linear(8, 8).cuda().train(training)
    model.is_gradient_checkpointing = on  # type: ignore[assignment]
    passed(model, torch.randn(4, 8, device="cuda"))
    assert (IDLE in summary(phantom, "ended").notes) == idle
    with torch.no_grad():  # an evaluation needs none
        model(torch.randn(4, 8, device="cuda"))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", 0])
def test_safetensors_that_a_program_saved_itself_are_loaded_again(tmp_path: Path, device: Any) -> None:
    with phantom_gpu(CARD):
        import safetensors
        from safetensors import torch as of_torch

        layer = nn.Linear(1024, 1024, device="cuda")
        path = tmp_path / "model.safetensors"
        of_torch.save_file(layer.state_dict(), path)
        before = torch.cuda.memory_allocated()
        tensors = of_torch.load_file(path, device=device)
        assert (tensors["weight"].is_cuda, tensors["bias"].shape) == (device != "cpu", (1024,))
        assert (torch.cuda.memory_allocated() > before) == (device != "cpu")
        assert of_torch.load_model(layer, path, device=device) == (set(), [])
        with safetensors.safe_open(path, framework="pt", device=device) as opened:
            assert opened.get_tensor("weight").shape == (1024, 1024)
        of_torch.save_file({"real": torch.ones(2)}, path)  # what has values is written and read as ever
        assert of_torch.load_file(path)["real"].tolist() == [1, 1]


@pytest.mark.parametrize("place", ["cuda", "cpu", torch.device("cuda", 0)])
def test_a_checkpoint_of_its_own_takes_its_room_on_the_card(phantom: Phantom, tmp_path: Path, place: Any) -> None:
    layer = nn.Linear(1024, 1024, bias=False, device="cuda")
    torch.save({"model": layer.state_dict(), "step": 7}, tmp_path / "last.pt")
    before = torch.cuda.memory_allocated()
    checkpoint = torch.load(tmp_path / "last.pt", map_location=place)
    assert (torch.cuda.memory_allocated() - before, checkpoint["step"]) == (0 if place == "cpu" else 4 * MIB, 7)
    layer.load_state_dict(checkpoint["model"])
    del checkpoint
    assert torch.cuda.memory_allocated() == before


SECOND = {
    "moved": lambda: nn.Linear(4096, 4096, bias=False).cuda(),
    "moved by its device": lambda: nn.Linear(4096, 4096, bias=False).to(torch.device("cuda", 0)),
    "moved as another type": lambda: nn.Linear(4096, 4096, bias=False).to("cuda", torch.float32),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_model_that_is_loaded_after_the_steps_is_no_activation(phantom: Phantom, name: str) -> None:
    model = nn.Linear(64, 64).cuda()
    passed(model, torch.randn(8, 64, device="cuda"))
    second_model = SECOND[name]()
    trace = summary(phantom, "ended")
    assert (trace.peak_phase, trace.by_category[0].name) == ("load", "weights and buffers")
    assert trace.by_category[0].size_bytes > 64 * MIB
    passed(model, torch.randn(1 << 20, 64, device="cuda"))  # the opposite: what a step makes is its own
    assert summary(phantom, "ended").peak_phase in ("forward", "backward")
    del second_model


def test_a_step_in_evaluation_mode_is_a_step(phantom: Phantom) -> None:
    model = nn.Linear(64, 64).cuda().eval()
    passed(model, torch.randn(8, 64, device="cuda"))
    assert phantom.origins.phase == "forward"
