"""Calibration files: constants apart from facts, validated, and wider bands where less is known."""

import json
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from planner.core.errors import ConfigError
from planner.hardware.gpus import all_gpus, find_gpu
from planner.models.spec import ModelSpec
from planner.speed.roofline import Calibration, Constants, load_calibration
from planner.speed.roofline.bands import base_of
from planner.speed.roofline.calibration import DATA_FILE, VARIABLE, calibration_from_dict, calibration_to_dict, family
from planner.speed.roofline.local import Microbench, gpu_from_microbench, microbench_from_dict, with_microbench
from planner.speed.roofline.points import read_points

SHIPPED = load_calibration()
BENCH = Microbench(
    gpu_name="NVIDIA GeForce RTX 9090",
    matmul_flops_per_s={"bf16": 200e12, "fp16": 210e12, "fp32": 60e12},
    copy_bytes_per_s=1.8e12,
    issue_s=1.0e-5,
    memory_bytes=32 * 1024**3,
    date="2026-11-21",
    sm_count=170,
    capability=(12, 0),
)


def test_shipped_calibration_is_dated_and_names_its_points() -> None:
    assert SHIPPED.date >= "2026-11"
    assert sum(SHIPPED.points["sources"].values()) > 200
    assert set(SHIPPED.constants) <= set(Constants.names())


def test_shipped_calibration_keys_are_cards_or_families() -> None:
    allowed = {gpu.key for gpu in all_gpus()} | {family(gpu) for gpu in all_gpus()} | {"default"}
    archs = {gpu.arch for gpu in all_gpus()}
    for table in (SHIPPED.matmul_share, SHIPPED.fp32_share):
        assert set(table) <= allowed
    assert set(SHIPPED.rates_flops_per_s) <= allowed
    assert set(SHIPPED.architectures) <= allowed | archs
    assert all(0.4 < share < 1.5 for share in SHIPPED.matmul_share.values())


def test_calibration_survives_a_round_trip() -> None:
    assert calibration_from_dict(json.loads(json.dumps(calibration_to_dict(SHIPPED)))) == SHIPPED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": 99}, "form 1"),
        ({"constants": {"speed_of_light": 3.0}}, "speed_of_light"),
        ({"constants": {"training_share": -1.0}}, "training_share"),
        ({"constants": {"training_share": float("nan")}}, "training_share"),
        ({"architectures": {"Ada": {"training_share": "much"}}}, "training_share"),
    ],
)
def test_calibration_refuses_nonsense(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibration_from_dict({**calibration_to_dict(SHIPPED), **change})


def test_load_calibration_names_the_file_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_calibration(str(tmp_path / "nowhere.json"))
    bad = tmp_path / "bad.json"
    bad.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_calibration(str(bad))


def test_load_calibration_follows_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.json"
    values = json.loads(DATA_FILE.read_text())
    values["constants"]["training_share"] = 0.5
    path.write_text(json.dumps(values))
    monkeypatch.setenv(VARIABLE, str(path))
    assert load_calibration().constants["training_share"] == 0.5
    monkeypatch.delenv(VARIABLE)
    assert load_calibration() is SHIPPED


def test_constants_for_most_specific_wins() -> None:
    card = find_gpu("rtx-4090")
    tables = {"Ada": {"k_half": 1.0}, "Ada:geforce": {"k_half": 2.0}, "rtx-4090": {"k_half": 3.0}}
    for dropped, expected in ((None, 3.0), ("rtx-4090", 2.0), ("Ada:geforce", 1.0), ("Ada", 180.0)):
        if dropped:
            del tables[dropped]
        assert Calibration(architectures=dict(tables)).constants_for(card).k_half == expected


def test_share_for_says_where_it_comes_from() -> None:
    assert SHIPPED.share_for(find_gpu("a100-80gb"))[1] == "gpu"
    assert SHIPPED.share_for(find_gpu("rtx-4080")) == (SHIPPED.matmul_share["Ada:geforce"], "family")
    assert SHIPPED.share_for(find_gpu("p100")) == (SHIPPED.matmul_share["default"], "default")


def test_bands_widen_with_ignorance() -> None:
    measured, scaled = (base_of("formula", find_gpu(key), SHIPPED, several=False) for key in ("a100-80gb", "a40"))
    assert 0 < measured.width < scaled.width < 1
    own = base_of("formula", find_gpu("a40"), replace(SHIPPED, bands={"a40": 0.07}), several=False)
    assert own.width == pytest.approx(log(1.07))  # of a card that `plan calibrate` has seen


def test_with_microbench_replaces_the_familys_guess() -> None:
    card = find_gpu("rtx-4080")
    calibration = with_microbench(
        SHIPPED, card, replace(BENCH, matmul_flops_per_s={"bf16": 48.75e12, "fp32": 24.37e12})
    )
    assert calibration.share_for(card) == (pytest.approx(0.5), "gpu")
    assert calibration.fp32_share_for(card) == pytest.approx(0.5)
    general = Constants(**SHIPPED.constants)
    constants = calibration.constants_for(card)
    assert constants.host_scale == pytest.approx(10 / 7.6)
    assert constants.bandwidth_share == pytest.approx(
        general.bandwidth_share * 1.8e12 / card.memory_bandwidth_bytes_per_s / 0.90
    )
    both = with_microbench(SHIPPED, find_gpu("h200"), replace(BENCH, matmul_flops_per_s={"bf16": 7e14, "fp16": 6e14}))
    assert both.rates_flops_per_s["h200"] == {"fp16": 6e14}
    assert SHIPPED.share_for(card)[1] == "family"  # the old calibration is untouched


def test_gpu_from_microbench_stands_for_an_unknown_card() -> None:
    card = gpu_from_microbench(BENCH)
    assert card.bf16_flops_per_s == 200e12
    assert card.memory_bandwidth_bytes_per_s == pytest.approx(2.0e12)
    assert with_microbench(SHIPPED, card, BENCH).share_for(card) == (pytest.approx(1.0), "gpu")
    emulated = replace(BENCH, matmul_flops_per_s={"bf16": 2.4e12, "fp16": 42e12}, capability=(7, 5))
    old = gpu_from_microbench(emulated)
    assert not old.bf16
    assert not old.flash_attention_2
    assert with_microbench(SHIPPED, old, emulated).rates_flops_per_s["local"]["bf16"] == 2.4e12


@pytest.mark.parametrize(
    "change", [{"issue_s": 0}, {"matmul_flops_per_s": {}}, {"memory_bytes": None}, {"gpu_name": 1}]
)
def test_microbench_from_dict_refuses_nonsense(change: dict[str, object]) -> None:
    values = {
        "gpu_name": "x", "matmul_flops_per_s": {"bf16": 1e12}, "copy_bytes_per_s": 1e11, "issue_s": 1e-6,
        "memory_bytes": 1, "capability": [8, 9],
    }  # fmt: skip
    assert microbench_from_dict(values).capability == (8, 9)
    if change == {"gpu_name": 1}:
        assert microbench_from_dict({**values, **change}).gpu_name == "1"
        return
    with pytest.raises(ConfigError):
        microbench_from_dict({**values, **change})


def test_text_where_lists_belong_is_left_out_with_a_reason() -> None:
    def no_model(name: str) -> ModelSpec:
        raise AssertionError(name)

    outcome = {"outcome": "measurement", "environment": {"gpu_key": "h100-sxm"}, "tokens_per_step": 8}
    lines = [
        json.dumps({"record": {"model_id": "m", "setup": {}, "outcome": outcome | other}})
        for other in ({"flags": 3}, {"step_times_s": ["a"]}, {"step_times_s": [[1]]})
    ]
    left_out = read_points(lines, find_model=no_model, find_gpu=find_gpu).left_out
    assert left_out == {"flags must be a list": 1, "step times must be numbers": 2}
