"""`plan prices`: gpuhunt's offers in rows of the price table, and a table of one's own."""

import sys
from pathlib import Path

import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.prices import PROVIDERS
from planner.hardware.prices import PRICES_VARIABLE, all_prices, cluster_offer, price_per_hour

pytest.importorskip("gpuhunt")
pytestmark = [  # it leaves its files open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FIELDS = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags,cpu_arch"
)
OFFERS = {
    "aws": [
        "p5.48xlarge,x,55.04,192,2048,8,H100,80.0,False",
        "p5.4xlarge,x,6.0,16,256,1,H100,80.0,False",
        "p5.48xlarge,x,26.57,192,2048,8,H100,80.0,True",
    ],
    "azure": [
        "Standard_NC24ads_A100_v4,x,3.673,24,220,1,A100,80.0,False",
        "Standard_ND96amsr_A100_v4,x,32.77,96,1900,8,A100,80.0,False",
    ],
    "runpod": ["NVIDIA H100 PCIe,x,2.39,16,188,1,H100,80.0,False", "of no kind,x,0.01,16,188,1,H100,80.0,False"],
}


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as dstack publishes them, of a few offers."""
    for provider in PROVIDERS:
        rows = "".join(f"{row},,nvidia,,x86,{{}}\n" for row in OFFERS.get(provider, ()))
        (tmp_path / f"{provider}.csv").write_text(f"{FIELDS},provider_data\n{rows}")
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("catalogue")
def test_todays_prices_are_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "prices.csv"
    assert run(["prices", str(table)]) == 0
    monkeypatch.setenv(PRICES_VARIABLE, str(table))
    all_prices.cache_clear()
    try:
        prices = [(price.gpu_key, price.kind, price.network, price.low_usd_per_h) for price in all_prices()]
        assert prices == [
            ("a100-80gb", "on-demand", "ib-1600", 4.0963),
            ("a100-80gb-pcie", "on-demand", "", 3.673),
            ("h100-pcie", "on-demand", "", 2.39),
            ("h100-sxm", "on-demand", "", 6.0),
            ("h100-sxm", "on-demand", "efa-3200", 6.88),
            ("h100-sxm", "spot", "efa-3200", 3.3213),
        ]
        assert (price_per_hour("h100-sxm") or ())[0] == 6.44
        offered = cluster_offer("h100-sxm")
        assert (offered.provider, offered.usd_per_h) == ("AWS x", 6.88)
    finally:
        all_prices.cache_clear()


def test_what_is_missing_has_a_hint(
    catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (catalogue / "gcp.csv").unlink()
    assert run(["prices", str(tmp_path / "prices.csv")]) == 3
    assert "hint: without it plan goes on with the prices that ship" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    assert run(["prices", str(tmp_path / "prices.csv")]) == 3
    assert "[prices]" in capsys.readouterr().err
    assert not (tmp_path / "prices.csv").exists()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    monkeypatch.setenv(PRICES_VARIABLE, str(tmp_path / "other.csv"))
    all_prices.cache_clear()
    try:
        assert run(["Qwen/Qwen2.5-0.5B", "--gpu", "l4", "--no-dry-run"]) == 2
    finally:
        all_prices.cache_clear()
    assert f"hint: plan prices {tmp_path}/other.csv writes one" in capsys.readouterr().err
