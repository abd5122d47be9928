"""The GPU table: sourced, plausible, and every known device name matches exactly one row."""

import csv
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner.hardware.gpus as gpus
from planner.core.errors import EnvironmentProblem, UnknownGpuError, UsageError
from planner.core.units import GIB, MIB
from planner.hardware import instances
from planner.hardware.cluster import links
from planner.hardware.prices import all_prices, cluster_offer, keys_on_demand, price_per_hour
from tests.fake_nvml import Card, nvml_module

TABLE = list(csv.DictReader((Path(gpus.__file__).parents[1] / "data" / "gpus.csv").read_text().splitlines()))

KNOWN_NAMES = [
    ("rtx-4090", "rtx-4090"), ("RTX 4090", "rtx-4090"), ("rtx4090", "rtx-4090"), ("geforce_rtx_4090", "rtx-4090"),
    ("4090", "rtx-4090"), ("4070 ti super", "rtx-4070-ti-super"), ("a6000", "rtx-a6000"), ("6000 ada", "rtx-6000-ada"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("A100 80GB", "a100-80gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"), ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
    ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H200", "h200"),
    ("Tesla T4", "t4"), ("t4", "t4"), ("Colab T4", "t4"), ("kaggle P100", "p100"),
    ("Tesla V100-SXM2-16GB", "v100-16gb"), ("NVIDIA L40S", "l40s"), ("NVIDIA L40", "l40"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("NVIDIA RTX A6000", "rtx-a6000"),
    ("AMD Instinct MI300X", "mi300x"), ("MI300X", "mi300x"), ("Apple M1 Max", "apple-m1-max"), ("NVIDIA GB10", "gb10"),
    ("DGX Spark", "gb10"), ("NVIDIA GB300", "gb300"), ("NVIDIA H20", "h20"), ("A800", "a800-80gb"),
    ("4060", "rtx-4060"), ("4060 Ti 8GB", "rtx-4060-ti-8gb"), ("RTX 4060 Ti 16 GB", "rtx-4060-ti-16gb"),
    ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti-16gb"), ("4070 super", "rtx-4070-super"),
    ("NVIDIA GeForce RTX 5070", "rtx-5070"), ("RTX 3050 4GB", "rtx-3050-4gb"),
]  # fmt: skip


def test_every_row_is_sourced_and_the_table_says_how_many_there_are() -> None:
    assert all(spec.source and spec.memory_basis for spec in gpus.all_gpus())
    assert len({spec.key for spec in gpus.all_gpus()}) == len(TABLE)
    assert f"table: {len(TABLE)} accelerators" in (gpus.__doc__ or "")


def test_a_row_without_a_reading_of_its_memory_says_so() -> None:
    for row in TABLE:
        if row["vendor"] in ("NVIDIA", "Intel") and not row["memory_source"]:
            assert "memory" in row["unsourced"], row["key"]
        if row["memory_source"].startswith("as "):
            assert "memory" in row["unsourced"], row["key"]


def test_rows_are_plausible() -> None:
    for spec in gpus.all_gpus():
        assert 3 * GIB < spec.memory_bytes <= 288 * GIB, spec.key
        assert 6e10 < spec.memory_bandwidth_bytes_per_s <= 1e13, spec.key
        for flops in (spec.bf16_flops_per_s, spec.fp16_flops_per_s, spec.fp32_flops_per_s, spec.tf32_flops_per_s):
            assert flops is None or 1e12 < flops < 1e16, spec.key
        if spec.vendor == "NVIDIA":
            assert spec.compute_capability is not None, spec.key
            assert spec.bf16 == (spec.compute_capability >= (8, 0)), spec.key
            assert spec.flash_attention_2 == (spec.compute_capability >= (8, 0)), spec.key


def test_key_name_and_driver_name_find_their_own_row() -> None:
    for spec in gpus.all_gpus():
        for name in (spec.key, spec.name, spec.driver_name, spec.name.upper(), f" {spec.key.replace('-', ' ')} "):
            assert gpus.find_gpu(name).key == spec.key, name


@pytest.mark.parametrize(("name", "key"), KNOWN_NAMES)
def test_find_gpu_knows_the_names_people_use(name: str, key: str) -> None:
    assert gpus.find_gpu(name).key == key


@pytest.mark.parametrize(
    ("name", "hinted"),
    [
        ("a100", "a100-80gb"),
        ("NVIDIA V100", "v100-32gb"),
        ("rtx-9090", "rtx-4090"),
        ("RTX 6000", "rtx-6000-ada, rtx-pro-6000-blackwell, quadro-rtx-6000"),
        ("RTX 3080 Laptop", "rtx-3080-laptop-8gb, rtx-3080-laptop-16gb"),
        ("jetson orin", "jetson-agx-orin-64gb"),
        ("", "plan gpus"),
        ("\x00\U0001f600", "plan gpus"),
        ("x" * 10_000, "plan gpus"),
        ("GTX 980 Ti", "NAME:12GiB:360GB/s:29TFLOPS"),
        ("MacBook Pro", "apple-m3-max"),
        ("geforce", "rtx-3060"),
        ("24 GB", "cards of 24 GB: a10, a10g, a30, rtx-a5000, rtx-3090, rtx-3090-ti, rtx-4090, l4;"),
        ("NVIDIA 12gb GPU", "cards of 12 GB: rtx-3060,"),
        ("Google Colab", "Colab gives a t4"),
        ("kaggle", "Kaggle gives 2 x t4 or one p100"),
        ("4060 ti", "say which: rtx-4060-ti-8gb, rtx-4060-ti-16gb"),
        ("GeForce RTX 4060 Ti", "say which: rtx-4060-ti-8gb, rtx-4060-ti-16gb"),
    ],
)
def test_unknown_and_ambiguous_names_are_errors_with_a_hint(name: str, hinted: str) -> None:
    with pytest.raises(UnknownGpuError) as error:
        gpus.find_gpu(name)
    assert hinted in error.value.hint
    assert len(error.value.message) < 200


def test_nothing_is_called_close_that_is_not() -> None:
    for name in ("none", "cpu", "colab"):
        with pytest.raises(UnknownGpuError) as error:
            gpus.find_gpu(name)
        assert "closest" not in error.value.hint


def test_usable_memory_is_what_torch_reports() -> None:
    """Golden: readings in the table's source."""
    assert gpus.find_gpu("rtx-4090").memory_bytes == 24074 * MIB
    assert gpus.find_gpu("t4").memory_bytes == 14912 * MIB
    assert gpus.find_gpu("a100-80gb").memory_bytes == 81051 * MIB
    assert gpus.find_gpu("h200").memory_bytes == 143156 * MIB


def test_memory_without_a_reading_says_so() -> None:
    assert "marketing" in gpus.find_gpu("mi325x").memory_basis
    assert "marketing" in gpus.find_gpu("mi355x").memory_basis
    assert "smallest of 36, 48" in gpus.find_gpu("apple-m3-max").memory_basis
    assert "driver total 8192 MiB less" in gpus.find_gpu("rtx-3070").memory_basis


def test_unified_memory_is_what_metal_recommends() -> None:
    """Two thirds of up to 32 GiB, three quarters of more: recommendedMaxWorkingSetSize as people report it."""
    assert gpus.find_gpu("apple-m2-max").memory_bytes // MIB == 21845
    assert gpus.find_gpu("apple-m2-ultra").memory_bytes == 49152 * MIB
    assert "Metal" in gpus.find_gpu("apple-m3-max").memory_basis


def test_a_size_that_nobody_named_is_said() -> None:
    assert 'sold with 8, 16 or 24 GB: the least is taken where neither the name (--gpu "Apple M3 16GB")' in (
        gpus.find_gpu("MacBook Pro M3").taken_as
    )
    assert gpus.find_gpu("Apple M3 16GB").taken_as == gpus.find_gpu("rtx-4090").taken_as == ""
    assert [card.key for card in gpus.larger_versions(gpus.find_gpu("M3 16GB"))] == ["apple-m3-24gb"]


def test_reserve_estimate_fits_the_rows_that_have_both_figures() -> None:
    both = [(int(row["driver_mib"]), int(row["torch_mib"])) for row in TABLE if row["driver_mib"] and row["torch_mib"]]
    errors = [driver - (gpus.RESERVE_MIB + gpus.RESERVE_FRACTION * driver) - torch for driver, torch in both]
    assert len(both) >= 29
    assert max(abs(error) for error in errors) <= gpus.RESERVE_ERROR_MIB


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("no_nvml")
def test_local_gpu_takes_the_drivers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A modified 48 GiB RTX 4090: the driver overrides the table."""

    def smi(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout="GPU-1, NVIDIA GeForce RTX 4090, 49140, 0, [N/A]\n")

    monkeypatch.setattr(subprocess, "run", smi)
    spec = gpus.find_gpu("LOCAL")
    assert spec.key == "rtx-4090"
    assert 47 * GIB < spec.memory_bytes < 49140 * MIB
    assert "49140" in spec.memory_basis


INLINE_ECC = ("a10", "a10g", "a16", "a2", "a40", "l4", "l40", "l40s", "t4")


def test_ecc_takes_bandwidth_where_its_bits_lie_in_the_same_memory() -> None:
    """Data center cards with GDDR6 show 15/16 of their memory; HBM has bits of its own, RTX cards leave it off."""
    sheet = {row["key"]: float(row["bandwidth_gb_per_s"]) for row in TABLE}
    shares = {spec.key: spec.memory_bandwidth_bytes_per_s / sheet[spec.key] / 1e9 for spec in gpus.all_gpus()}
    assert {key for key, share in shares.items() if share != pytest.approx(1.0)} == set(INLINE_ECC)
    assert [shares[key] for key in INLINE_ECC] == pytest.approx([15 / 16] * len(INLINE_ECC))


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    ("name", "total_mib", "gb_per_s"),
    [
        ("NVIDIA L40S", 46068, 810.0),
        ("NVIDIA L40S", 49140, 864.0),
        ("NVIDIA RTX A6000", 49140, 768.0),
        ("NVIDIA RTX A6000", 46068, 720.0),
        ("NVIDIA H200", 143771, 4800.0),
    ],
)
def test_the_driver_here_says_whether_ecc_is_on(
    monkeypatch: pytest.MonkeyPatch, name: str, total_mib: int, gb_per_s: float
) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout=f"GPU-1, {name}, {total_mib}, 0, [N/A]\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert gpus.local_gpu().memory_bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9)


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 3),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        PermissionError("nvidia-smi"),
    ],
)
def test_local_gpu_without_a_driver_is_an_environment_problem(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def smi(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", smi)
    with pytest.raises(EnvironmentProblem) as error:
        gpus.local_gpu()
    assert error.value.exit_code == 3
    assert "--gpu" in error.value.hint


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    "answer", ["", "\n", "No devices were found\n", "GPU-1, NVIDIA A100, [N/A], 0, Enabled\n", "v,x,y,z,w"]
)
def test_local_gpu_with_a_senseless_answer_is_an_environment_problem(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    completed = subprocess.CompletedProcess([], 0, stdout=answer, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: completed)
    with pytest.raises(EnvironmentProblem):
        gpus.local_gpu()


def test_memory_without_a_reading_is_what_the_box_says_less_what_torch_does_not_show() -> None:
    """An NVIDIA card's reserve is known from others'; AMD's driver shows torch nearly everything."""
    assert gpus.find_gpu("rtx-2080-super").memory_bytes == 8192 * MIB - 416 * MIB
    assert "no reading" in gpus.find_gpu("rtx-2080-super").memory_basis
    assert gpus.find_gpu("mi100").memory_bytes == 32 * GIB
    assert not gpus.find_gpu("mi100").flash_attention_2  # flash-attn 2.8 setup.py: gfx90a, gfx942, gfx950


def test_local_gpu_that_the_table_lacks_is_planned_from_what_its_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden: 1,408 cores, 192 bits of 7,001 MHz (a GTX 1660 SUPER's): 336 GB/s; its own key finds it."""
    card = Card("NVIDIA GeForce GTX 1660 ULTRA", "GPU-1", 6144)
    card.capability, card.num_cores, card.clocks_mhz, card.bus_bits = (7, 5), 1408, (1785, 7001), 192
    on_machine(monkeypatch, card)
    spec = gpus.find_gpu("local")
    assert spec.memory_bandwidth_bytes_per_s == pytest.approx(336e9, rel=0.001)
    assert spec.fp32_flops_per_s == pytest.approx(5.027e12, rel=0.001)
    assert spec.fp16_flops_per_s == pytest.approx(2 * 5.027e12, rel=0.001)  # no tensor cores: halves in pairs
    assert (spec.bf16, spec.sm_count, spec.memory_bytes) == (False, 22, (6144 - 412) * MIB)
    assert "not in the table" in spec.taken_as
    by_key = gpus.find_gpu(spec.key)
    assert by_key.fp16_flops_per_s == pytest.approx(spec.fp16_flops_per_s, rel=1e-3)
    assert (by_key.key, by_key.compute_capability, by_key.bf16) == (spec.key, (7, 5), False)


@pytest.mark.parametrize(
    ("name", "capability", "cores", "clocks_mhz", "bus_bits", "key"),
    [
        ("NVIDIA GeForce RTX 3060", (8, 6), 3584, (1777, 7501), 192, "rtx-3060"),
        ("NVIDIA RTX A4000", (8, 6), 6144, (1560, 7001), 256, "rtx-a4000"),
        ("NVIDIA GeForce RTX 4090", (8, 9), 16384, (2520, 10501), 384, "rtx-4090"),
        ("Tesla T4", (7, 5), 2560, (1590, 5001), 256, "t4"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 6912, (1410, 1215), 5120, "a100-40gb"),
        ("NVIDIA GeForce RTX 5090", (12, 0), 21760, (2407, 14001), 512, "rtx-5090"),
    ],
)
def test_what_a_driver_tells_gives_the_tables_figures(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: Any, cores: int, clocks_mhz: Any, bus_bits: int, key: str
) -> None:
    """Cards that have a row, as if they had none: bandwidth within 1 %, rates within 3 % at the rated clock."""
    card = Card(name, "GPU-1", 8192)
    card.capability, card.num_cores, card.clocks_mhz, card.bus_bits = capability, cores, clocks_mhz, bus_bits
    on_machine(monkeypatch, card)
    monkeypatch.setattr(gpus, "_row_of", lambda seen: None)
    spec, row = gpus.local_gpu(), next(row for row in TABLE if row["key"] == key)
    assert spec.memory_bandwidth_bytes_per_s == pytest.approx(float(row["bandwidth_gb_per_s"]) * 1e9, rel=0.01)
    assert spec.fp16_flops_per_s == pytest.approx(float(row["fp16_tflops"]) * 1e12, rel=0.03)
    assert spec.sm_count == int(row["sm_count"])


@pytest.mark.parametrize(("total_mib", "key"), [(12288, "rtx-3060"), (8192, "rtx-3060-8gb"), (11900, "rtx-3060")])
def test_of_cards_that_a_driver_calls_alike_the_memory_tells(
    monkeypatch: pytest.MonkeyPatch, total_mib: int, key: str
) -> None:
    on_machine(monkeypatch, Card("NVIDIA GeForce RTX 3060", "GPU-1", total_mib))
    assert gpus.local_gpu().key == key


@pytest.mark.usefixtures("no_nvml")
def test_local_gpu_that_the_table_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    completed = subprocess.CompletedProcess([], 0, stdout="GPU-1, NVIDIA GeForce GTX 960, 6144, 0, [N/A]\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: completed)
    with pytest.raises(UnknownGpuError, match="GTX 960"):
        gpus.local_gpu()


T4 = Card("Tesla T4", "GPU-11110000-aaaa", 15360)
H200 = Card("NVIDIA H200", "GPU-22220000-bbbb", 143771)


def on_machine(monkeypatch: pytest.MonkeyPatch, *cards: Card, visible: str | None = None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(cards))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("visible", "key"),
    [
        (None, "t4"), ("1,0", "h200"), ("GPU-22220000-bbbb", "h200"), ("GPU-2222", "h200"), ("GPU-1,1", "t4"),
        ("1,-1,0", "h200"),
    ],
)  # fmt: skip
def test_local_gpu_is_the_first_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, visible: str | None, key: str) -> None:
    """Before: a UUID chose the H200 and the T4 was planned; its beginning raised."""
    on_machine(monkeypatch, T4, H200, visible=visible)
    assert gpus.local_gpu().key == key


def test_local_gpu_is_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, T4, H200)
    assert gpus.local_gpu("cuda:1").key == "h200"


@pytest.mark.parametrize("visible", ["", "-1", "5", "GPU-3", "GPU-", "MIG-1"])
def test_a_gpu_that_nothing_shows_is_never_replaced_by_another(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    on_machine(monkeypatch, T4, H200, visible=visible)
    with pytest.raises(EnvironmentProblem, match="does not exist") as error:
        gpus.local_gpu()
    assert f"CUDA_VISIBLE_DEVICES={visible}" in error.value.message


@pytest.mark.parametrize("visible", [None, "0", "GPU-9", "MIG-small"])
def test_local_gpu_plans_a_mig_slice_as_one(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    """Before: 1g.10gb was planned as 79 GiB. CUDA uses one slice, the first where none is named."""
    whole = Card("NVIDIA H100 80GB HBM3", "GPU-9", 81559)
    whole.sliced("1g.10gb", "MIG-small", 9984, sms=16).sliced("3g.40gb", "MIG-large", 40448, sms=60)
    on_machine(monkeypatch, whole, visible=visible)
    spec, full = gpus.local_gpu(), gpus.find_gpu("h100-sxm")
    assert spec.key == "h100-sxm"
    assert 9 * GIB < spec.memory_bytes < 9984 * MIB
    assert spec.sm_count == 16
    assert spec.bf16_flops_per_s == pytest.approx(full.bf16_flops_per_s * 16 / 132)
    assert spec.memory_bandwidth_bytes_per_s == pytest.approx(full.memory_bandwidth_bytes_per_s * 9984 / 81559)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-large")
    assert gpus.local_gpu().sm_count == 60


@pytest.mark.parametrize("driver", ["nvml", "nvidia-smi"])
def test_cards_of_this_machine_that_are_not_alike_are_no_job(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    """Before: the second was taken for a copy of the first."""
    cards = [Card(f"NVIDIA GeForce RTX {name}", f"GPU-{name}", mib) for name, mib in (("3090", 24576), ("3060", 12288))]
    on_machine(monkeypatch, *cards, cards[1])
    if driver != "nvml":
        monkeypatch.setitem(sys.modules, "pynvml", None)
        shown = "".join(f"{card.uuid}, {card.name}, {card.total_mib}, 0, [N/A]\n" for card in (*cards, cards[1]))
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=shown))
    with pytest.raises(UsageError, match="one kind, got 1 x rtx-3090, 1 x rtx-3060") as error:
        gpus.card_and_count("local", 2)
    assert "--gpu rtx-3060 --gpus 2" in error.value.hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert gpus.card_and_count("local", 4) == ("local", 4)  # alike, and fewer than asked for
    with pytest.raises(UsageError, match="one kind"):
        gpus.find_gpu("RTX 3090 + RTX 3060")


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    "shown", ["GPU-a, NVIDIA A100-SXM4-80GB, 81920, 4, Enabled\n", "GPU-a, Orin (nvgpu), [N/A], [N/A], [N/A]\n"]
)
def test_what_nvidia_smi_leaves_out_is_said(monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    """Before: "no GPU found", though one was shown."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=shown))
    with pytest.raises(EnvironmentProblem, match="nothing of its") as error:
        gpus.local_gpu()
    assert "nvidia-ml-py" in error.value.hint


@pytest.mark.parametrize(
    ("name", "key", "gib", "sms", "memory_share"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-40gb-mig-1g.5gb", 4.75, 14, 1 / 8),
        ("a100-40gb 1g.10gb", "a100-40gb-mig-1g.10gb", 9.75, 14, 1 / 4),
        ("A100 3g.40gb", "a100-80gb-mig-3g.40gb", 39.25, 42, 1 / 2),
        ("H100 1g.10gb", "h100-sxm-mig-1g.10gb", 9.5, 16, 1 / 8),
        ("A30 2g.12gb", "a30-mig-2g.12gb", 11.77, 28, 1 / 2),
    ],
)
def test_a_mig_slice_is_planned_by_its_name(name: str, key: str, gib: float, sms: int, memory_share: float) -> None:
    """Golden: memory and multiprocessors of `nvidia-smi mig -lgip` (MIG User Guide). Before: "3g" was 3 GB."""
    spec = gpus.find_gpu(name)
    whole = gpus.find_gpu(key.partition("-mig-")[0])
    assert (spec.key, spec.sm_count) == (key, sms)
    assert spec.memory_bytes == pytest.approx(gib * GIB - 410 * MIB, rel=0.005)
    assert spec.memory_bandwidth_bytes_per_s == pytest.approx(whole.memory_bandwidth_bytes_per_s * memory_share)
    assert spec.bf16_flops_per_s == pytest.approx(whole.bf16_flops_per_s * sms / whole.sm_count)
    assert gpus.find_gpu(key) == replace(spec, taken_as="")


@pytest.mark.parametrize(
    ("name", "num", "key"),
    [
        ("g5.xlarge", 1, "a10g"),
        ("ml.g5.12xlarge", 4, "a10g"),
        ("2 x p5.48xlarge", 16, "h100-sxm"),
        ("a2-highgpu-1g", 1, "a100-40gb"),
        ("Standard_NC24ads_A100_v4", 1, "a100-80gb-pcie"),
        ("ND96isr_H100_v5", 8, "h100-sxm"),
    ],
)
def test_a_rented_machine_is_its_cards(name: str, num: int, key: str) -> None:
    card, asked = gpus.find_gpus(name)
    assert (card.key, asked) == (key, num)
    assert gpus.card_and_count(name, None) == (key, num)


def test_several_small_machines_are_no_one_node_and_unlike_cards_are_counted() -> None:
    with pytest.raises(UsageError, match="2 machines, of 4 cards each") as error:
        gpus.find_gpus("2x g5.12xlarge")
    assert error.value.hint == "--gpu a10g --gpus 8 --nodes 2"
    with pytest.raises(UsageError, match="4 x rtx-3090, 1 x rtx-4090"):
        gpus.find_gpus("4x rtx 3090 + 1x rtx 4090")
    assert gpus.find_gpus("2x GH200 1g.12gb")[0].host_bytes == 0


def test_words_that_one_card_alone_has_are_that_card() -> None:
    card = gpus.find_gpu("laptop 4060")
    assert (card.key, "taken as" in card.taken_as) == ("rtx-4060-laptop", True)


def test_every_instance_has_cards_of_the_table() -> None:
    assert {key for _, key in instances._instances().values()} <= {row["key"] for row in TABLE}


@pytest.mark.parametrize("name", ["1g.10gb", "T4 1g.2gb", "A100 80GB 3g.20gb", "H100 9g.90gb"])
def test_a_slice_that_no_card_has_is_an_error(name: str) -> None:
    with pytest.raises(UnknownGpuError):
        gpus.find_gpu(name)


def test_local_gpu_leaves_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A desktop holds 3 GiB: before, they were planned with. The driver's own reserve is no one's."""
    card = Card("NVIDIA GeForce RTX 4090", "GPU-1", 24564)
    on_machine(monkeypatch, card)
    alone = gpus.local_gpu()
    card.used = lambda: 3 * GIB
    shared = gpus.local_gpu()
    assert alone.memory_bytes - shared.memory_bytes == 3 * GIB
    assert "3072 MiB that others hold" in shared.memory_basis
    assert "others" not in alone.memory_basis


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(("visible", "key"), [(None, "t4"), ("1", "h200"), ("GPU-b", "h200"), ("GPU-a", "t4")])
def test_nvidia_smi_answers_for_the_visible_gpu_too(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, key: str
) -> None:
    answer = "GPU-a1, Tesla T4, 15360, 4, [N/A]\nGPU-b2, NVIDIA H200, 143771, 3072, Disabled\n"
    completed = subprocess.CompletedProcess([], 0, stdout=answer, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: completed)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spec = gpus.local_gpu()
    assert spec.key == key
    assert ("3072 MiB that others hold" in spec.memory_basis) == (key == "h200")


def test_price_is_the_median_of_on_demand_prices() -> None:
    """Golden: by hand from 1.49 (1.19 to 1.79), 1.35, 2.00 and 3.673 USD."""
    price = price_per_hour("a100-80gb-pcie")
    assert price[0] == pytest.approx((1.49 + 2.0) / 2)
    assert "median of 4 on-demand prices, 1.19 to 3.67 USD (Azure eastus, Crusoe," in price[1]
    assert price[2] == "2026-10-10"
    many = price_per_hour("h100-sxm")
    assert "12 providers" in many[1]


def test_price_says_when_only_one_or_none_is_known() -> None:
    assert price_per_hour("rtx-4090") == (0.34, "RunPod, on-demand", "2026-10-03")
    assert price_per_hour("apple-m1-max") is None
    assert price_per_hour("no-such-gpu") is None


def test_a_marketplace_s_lowest_ask_counts_only_where_nobody_rents_on_demand() -> None:
    """A cent of it is a fifth of the price: not rounded to cents."""
    assert price_per_hour("rtx-3060") == (0.0521, "Vast.ai, marketplace, lowest ask", "2026-10-03")
    assert {"rtx-3060"} < {price.gpu_key for price in all_prices()} - keys_on_demand()


def test_spot_is_apart_and_a_clusters_price_and_network_are_of_one_offer() -> None:
    """Golden: CoreWeave and Google on 10 October; of H100 with a known network Nebius 4.5, AWS 6.88."""
    spot = price_per_hour("h100-sxm", spot=True)
    words = "median of 2 spot prices, 2.46 to 6.29 USD (CoreWeave, Google Cloud us-central1)"
    assert spot == (pytest.approx((2.4638 + 6.2894) / 2, abs=1e-4), words, "2026-10-10")
    assert price_per_hour("rtx-4090", spot=True) is None
    offer, slower, cheap = (
        cluster_offer("h100-sxm"),
        cluster_offer("a100-80gb", least_bytes_per_s=200e9),
        cluster_offer("h200", spot=True),
    )
    assert [candidate and (candidate.provider, candidate.network) for candidate in (offer, slower, cheap)] == [
        ("Nebius", "ib-3200"), ("Oracle", "roce-1600"), ("CoreWeave", "ib-3200"),
    ]  # fmt: skip
    assert cluster_offer("rtx-pro-6000-blackwell") is None
    assert cluster_offer("a100-80gb", least_bytes_per_s=400e9) is None
    networks = {price.network for price in all_prices() if price.network}
    assert {links()[network].kind for network in networks} == {"network"}


def test_every_price_belongs_to_a_gpu_and_has_a_source() -> None:
    keys = {spec.key for spec in gpus.all_gpus()}
    for price in all_prices():
        assert price.gpu_key in keys
        assert price.source
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", price.as_of)
        assert 0 < price.low_usd_per_h <= price.high_usd_per_h < 100
