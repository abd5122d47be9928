"""AMD's GPUs: the driver read through amdsmi, what doctor, `--gpu local` and the meter make of it."""

import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch

from planner.core.errors import EnvironmentProblem
from planner.core.units import GIB, MIB
from planner.hardware import amd
from planner.hardware.driver import nvml, visible_handles
from planner.hardware.gpus import local_gpu
from planner.setup.outcome import FailureKind
from probes import doctor
from probes.gpu.device import clean_lease
from probes.gpu.environment import device_status, read_environment
from probes.gpu.executors import local_devices
from probes.gpu.failures import classify_exception
from probes.gpu.meters import CudaMeter, attention_backend
from probes.gpu.topology import topology
from tests.fake_amdsmi import Card, amdsmi_module

SERIALS = ("0x4B2C1A9F8D3E6F7A", "0x00000000DEADBEEF", "0x1111222233334444")


@pytest.fixture(autouse=True)
def no_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in (amd.ROCR, amd.HIP, amd.CUDA):
        monkeypatch.delenv(name, raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, *cards: Card, initialises: bool = True) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi_module(cards, initialises=initialises))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> tuple[Card, ...]:
    cards = tuple(Card(serial=serial) for serial in SERIALS)
    machine(monkeypatch, *cards)
    return cards


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, (0, 1, 2)),
        ({"CUDA_VISIBLE_DEVICES": "2"}, (2,)),
        ({"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "2"}, (1, 0)),
        ({"ROCR_VISIBLE_DEVICES": "2,1"}, (2, 1)),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, (1,)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000deadbeef"}, (1,)),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, (0,)),
        ({"HIP_VISIBLE_DEVICES": ""}, ()),
    ],
)
def test_rocms_variables_choose_and_number_the_gpus(
    three: tuple[Card, ...], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], seen: tuple[int, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with nvml() as module:
        assert visible_handles(module) == tuple(three[index] for index in seen)
    assert local_devices() == tuple(f"cuda:{index}" for index in range(len(seen)))


def test_local_plans_the_card_with_what_is_free_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, Card(used_mib=lambda: 3072))
    card = local_gpu()
    assert card.key == "mi300x"
    assert card.memory_bytes == (196592 - 3072) * MIB  # torch shows all of it, unlike NVIDIA's
    assert "3072 MiB that others hold" in card.memory_basis
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    with pytest.raises(EnvironmentProblem, match="does not exist"):
        local_gpu()


def test_a_machine_without_amds_library_has_no_gpu_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """amdsmi without libamd_smi.so prints two lines and raises KeyError while it is imported."""

    class Broken:
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            if name == "amdsmi":
                print("Unable to find libamd_smi.so library")
                raise KeyError("libamd_smi.so")
            return None

    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with nvml() as module:
        assert module is None
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "amdsmi", ModuleType("amdsmi"))  # a folder of that name on the path
    with nvml() as module:
        assert module is None
    machine(monkeypatch, Card(), initialises=False)
    with nvml() as module:
        assert module is None
    machine(monkeypatch)
    with nvml() as module:
        assert module is None


def test_status_turn_and_environment_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, Card(used_mib=lambda: 285, processes=[(4711, 2 * GIB), (4712, 0)]))
    status = device_status("cuda:0")
    assert (status.name, status.uuid) == ("AMD Instinct MI300X", "GPU-4b2c1a9f8d3e6f7a")
    assert (status.used_bytes, status.total_bytes, status.process_ids) == (285 * MIB, 196592 * MIB, (4711,))
    assert clean_lease("cuda:0").shared_bytes == 285 * MIB  # a neighbour, however little it holds
    environment = read_environment("cuda:0", "mi300x", cuda="7.0.51831")
    assert (environment.driver, environment.power_limit_w, environment.cuda) == ("amdgpu 6.14.14", 750.0, "7.0.51831")
    assert topology(("cuda:0",)).text() == "one GPU, nothing to connect"


def test_the_meter_reads_the_context_and_no_throttling(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [285]
    machine(monkeypatch, Card(used_mib=lambda: used[0]))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {})
    with ExitStack() as resources:
        meter = CudaMeter("cuda:0", resources, 285 * MIB)
        used[0] = 285 + 2048 + 700
        assert meter.context_bytes() == 700 * MIB
        assert meter._nvml.throttle_flags() == set()


def test_doctor_says_what_is_read_and_what_works(three: tuple[Card, ...]) -> None:
    findings = {finding.name: finding for finding in doctor._driver()}
    driver = findings["AMD driver"]
    assert driver.level == "ok"
    assert "amdgpu 6.14.14" in driver.text
    assert "why clocks are held down and how GPUs are linked are not" in driver.text
    assert "750 W limit" in findings["GPU cuda:0"].text
    report = {"torch": "2.11", "rocm": True, "built_for": "7.0.51831", "gpus": [], "problems": {}, "seconds": {}}
    by_name = {finding.name: finding for finding in doctor.torch_findings(report)}
    assert "torch for ROCm 7.0.51831 finds no GPU" in by_name["torch on the GPU"].text
    assert "HIP_VISIBLE_DEVICES" in by_name["torch on the GPU"].mend
    assert by_name["ROCm"].level == "warning"
    assert "expandable_segments" in by_name["ROCm"].text
    report["expandable"] = True
    grown = {finding.name: finding for finding in doctor.torch_findings(report)}["ROCm"]
    assert (grown.level, grown.mend) == ("ok", "")
    every = [
        *findings.values(),
        *(doctor.Finding(name=name, level="ok", text="") for name in ("torch", "transformers")),
    ]
    every += [doctor.Finding(name=name, level="ok", text="") for name in ("peft", "torch on the GPU")]
    assert doctor.can_probe(every)
    assert not doctor.can_probe([finding for finding in every if finding.name != "AMD driver"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("No HIP GPUs are available", FailureKind.MACHINE),
        ("HIP error: no ROCm-capable device is detected", FailureKind.MACHINE),
        ("HIP out of memory. Tried to allocate 2.00 GiB", FailureKind.OUT_OF_MEMORY),
        ("HIP error: an illegal memory access was encountered", FailureKind.CRASHED),
    ],
)
def test_hips_words_are_known(text: str, kind: FailureKind) -> None:
    assert classify_exception(RuntimeError(text))[0] is kind


def test_aotritons_kernels_are_flash() -> None:
    assert attention_backend(("Cijk_Ailk_Bljk", "attn_fwd.kd")) == "flash"
