"""How GPUs are connected, from a driver's answers as NVML gives them; and what the doctor makes of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from probes import doctor
from probes.gpu import topology


class NoAnswer(Exception):
    """NVML's error."""


def driver(*, nvlinks: int = 0, ancestor: int = 20, silent: bool = False) -> Any:
    """A driver of GPUs that are all connected alike; `silent` as in a container that hides everything."""

    def tell(answer: int) -> int:
        if silent:
            raise NoAnswer
        return answer

    def link_state(handle: str, link: int) -> int:
        if link >= nvlinks:
            raise NoAnswer
        return tell(1)

    return SimpleNamespace(
        NVMLError=NoAnswer,
        NVML_NVLINK_MAX_LINKS=36,
        NVML_FEATURE_ENABLED=1,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVML_TOPOLOGY_MULTIPLE=20,
        NVML_TOPOLOGY_SYSTEM=50,
        nvmlDeviceGetCount=lambda: 8,
        nvmlDeviceGetHandleByIndex=lambda index: f"handle {index}",
        nvmlDeviceGetMigMode=lambda handle: (0, 0),
        nvmlDeviceGetNvLinkState=link_state,
        nvmlDeviceGetP2PStatus=lambda first, second, kind: tell(0 if nvlinks else 5),
        nvmlDeviceGetTopologyCommonAncestor=lambda first, second: tell(ancestor),
    )


def seen(monkeypatch: pytest.MonkeyPatch, module: Any, num: int) -> topology.Topology:
    @contextmanager
    def nvml() -> Iterator[Any]:
        yield module

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(topology, "nvml", nvml)
    return topology.topology(tuple(f"cuda:{index}" for index in range(num)))


def test_nvlink_is_told_for_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    links = seen(monkeypatch, driver(nvlinks=18), 4)
    assert set(links.pairs.values()) == {"NVLink"}
    assert len(links.pairs) == 6
    assert links.text() == "NVLink (6 pairs); 18 NVLinks on each"


def test_cards_without_nvlink_are_connected_over_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    links = seen(monkeypatch, driver(ancestor=50), 2)
    assert links.nvlinks == (0, 0)
    assert links.text() == "PCIe, across processors (1 pair)"
    assert "several switches" in seen(monkeypatch, driver(), 2).text()


def test_what_a_driver_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch, driver(silent=True), 2).text() == "the driver does not tell how they are connected"
    nothing = seen(monkeypatch, None, 2)
    assert nothing.pairs == {}
    assert nothing.nvlinks == (None, None)
    assert seen(monkeypatch, driver(), 1).text() == "one GPU, nothing to connect"
    assert seen(monkeypatch, None, 0).text() == "no GPU"


def test_doctor_tells_gpus_links_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, driver(nvlinks=18), 0)
    report = {"ranks": {"gloo": True, "nccl": "2.28.9"}, "problems": {}}
    gpus, nccl, _ = doctor.several_gpus(report, ("cuda:0", "cuda:1"))
    assert gpus.text == "2 here: NVLink (1 pair); 18 NVLinks on each"
    assert gpus.facts["connections"] == [["cuda:0", "cuda:1", "NVLink"]]
    assert (nccl.level, nccl.text) == ("ok", "2.28.9, gloo for the CPU")
    _, nccl, _ = doctor.several_gpus({"ranks": {"gloo": True, "nccl": ""}}, ("cuda:0", "cuda:1"))
    assert nccl.level == "warning"
    assert nccl.mend
    gpus, nccl, _ = doctor.several_gpus({"problems": {"ranks": "ImportError: no module"}}, ())
    assert gpus.facts["num_gpus"] == 0
    assert nccl.level == "warning"
    assert "ImportError" in nccl.text
