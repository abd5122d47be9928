"""What callers of the dry run rely on: outcomes, attribution, the cache, refusals."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.hardware.gpus import find_gpu
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.memory_terms import PHASES
from planner.setup.outcome import FailureKind, Fidelity, Prediction, ProbeFailure
from probes.dryrun import DryRunReport, cache, dry_run, dry_run_report, report_for_config
from probes.dryrun.api import VERSION
from tests.planner.helpers import loaded
from tests.probes.dryrun_small import dried, reported, small_config

SETUP = TrainSetup(seq_len_tokens=64, micro_batch_seqs=2, lora_rank=4)
AMPERE = (8, 0)
TURING = (7, 5)


def _model() -> ModelSpec:
    spec = loaded("meta-llama/Llama-3.2-1B")
    return replace(spec, config=small_config("llama", num_hidden_layers=8))


def _report(fields: dict[str, Any] | None = None, capability: tuple[int, int] = AMPERE) -> DryRunReport:
    return _run(SETUP.replace(**(fields or {})), capability)


@functools.cache
def _run(setup: TrainSetup, capability: tuple[int, int]) -> DryRunReport:
    return reported(small_config("llama", num_hidden_layers=8), capability, setup)


def test_dry_run_prediction_is_attributed() -> None:
    prediction = _report().prediction
    assert prediction.level is Fidelity.DRY_RUN
    assert set(prediction.phase_peaks_bytes) == set(PHASES)
    assert prediction.peak_allocated_bytes == prediction.phase_peaks_bytes[prediction.peak_phase]
    assert sum(term.size_bytes for term in prediction.terms) == prediction.peak_allocated_bytes
    assert {"weights", "adapters", "activations"} <= {term.category for term in prediction.terms}
    assert prediction.peak_allocated_bytes <= prediction.peak_reserved_bytes < prediction.peak_device_bytes


def test_dry_run_device_peak_follows_the_gpu() -> None:
    """The driver's share of memory is the GPU's, as the formula has it."""
    from planner.memory.workspace import context_bytes

    gpu = find_gpu("rtx-4090")
    prediction = dried(_model(), gpu, SETUP, use_cache=False)
    assert prediction.peak_device_bytes == prediction.peak_reserved_bytes + context_bytes(gpu)


def test_what_is_no_cuda_card_is_refused() -> None:
    outcome = dry_run(_model(), find_gpu("m3-max"), SETUP)
    assert isinstance(outcome, ProbeFailure)
    assert outcome.kind is FailureKind.UNSUPPORTED
    assert "Apple" in outcome.message


def test_dry_run_at_the_cards_limit_counts_the_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full fine-tuning here: 326 MiB reserved for 290 allocated; two thirds of the gap are enough when cached blocks
    are given back, one byte of it is not. A card with room sees no limit, from the same cache."""
    from planner.memory.workspace import context_bytes

    monkeypatch.setattr(cache, "default_directory", lambda: tmp_path)
    config = small_config("llama", num_hidden_layers=8, hidden_size=512, intermediate_size=1400)
    model = replace(_model(), config=config)
    setup = TrainSetup(
        seq_len_tokens=1000,
        micro_batch_seqs=3,
        method="full",
        lora_rank=0,
        optimizer="adamw",
        expandable_segments=False,
    )
    large = find_gpu("a100-40gb")

    def asked(limit: int | None) -> Prediction:
        gpu = large if limit is None else replace(large, memory_bytes=limit + context_bytes(large))
        return dried(model, gpu, setup)

    free = asked(None)
    room, gap = free.peak_allocated_bytes, free.peak_reserved_bytes - free.peak_allocated_bytes
    tight = asked(room + gap * 2 // 3)
    assert room < tight.peak_reserved_bytes <= room + gap * 2 // 3
    assert tight.peak_allocated_bytes == free.peak_allocated_bytes
    assert any("give cached memory back" in note for note in tight.notes)
    assert asked(room + gap * 2 // 3) == tight
    assert asked(room + 1).peak_reserved_bytes == free.peak_reserved_bytes
    assert asked(room - 1) == replace(free, peak_device_bytes=free.peak_device_bytes)
    assert asked(None) == free


def test_dry_run_says_when_attention_falls_back_to_the_math_kernel() -> None:
    report = _report({"precision": "fp32"})
    assert set(report.kernels) == {"math"}
    assert any("math kernel" in note and "data type float32" in note for note in report.prediction.notes)
    turing = _report({"precision": "fp16-autocast"}, TURING)
    assert set(turing.kernels) == {"math"}
    assert any("math kernel" in note and "below 8.0" in note for note in turing.prediction.notes)
    assert set(_report().kernels) == {"flash"}


def test_dry_run_gradients_accumulate_only_with_several_micro_batches() -> None:
    single = _report({"optimizer": "sgd"}).phase_groups["forward"]
    report = _report({"optimizer": "sgd", "accumulation_steps": 8})
    several = report.phase_groups["forward"]
    step = ["forward", "loss", "backward"] * 2 + ["step"]
    assert [name for name, _ in report.phases] == ["load", *step, *step]
    assert [start for _, start in report.phases] == sorted({start for _, start in report.phases})
    assert ("gradients", "accumulated gradients") not in single
    assert several[("gradients", "accumulated gradients")] > 0
    assert _report({"accumulation_steps": 2}).prediction == _report({"accumulation_steps": 8}).prediction


def test_dry_run_weights_are_the_module_tree() -> None:
    """Llama of 8 layers, width 64, MLP 96, 4 and 2 heads of 16, vocabulary 320 (bf16, and fp32 adapters of rank 4)."""
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    base = 2 * (8 * layer + 64 + 320 * 64 + (0 if small_config("llama").get("tie_word_embeddings") else 320 * 64))
    adapters = 4 * 8 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 2 * (64 + 96) + (96 + 64))
    assert _report().parameter_bytes == base + adapters


def test_dry_run_refuses_what_it_cannot_see() -> None:
    outcome = report_for_config(small_config("llama"), AMPERE, SETUP.replace(compile=True))
    assert isinstance(outcome, ProbeFailure)
    assert outcome.kind is FailureKind.UNSUPPORTED
    assert "compile" in outcome.message


@pytest.mark.parametrize("loss", ["chunked", "liger"])
def test_dry_run_fused_losses_need_no_logits_in_llama4(loss: str) -> None:
    """Llama 4's text class names its backbone otherwise than its prefix says."""
    config = small_config("llama4")
    config["text_config"] = config["text_config"] | {
        "hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 2,
    }  # fmt: skip
    reports = [report_for_config(config, AMPERE, SETUP.replace(loss=variant)) for variant in ("full", loss)]
    peaks = [report.prediction.phase_peaks_bytes["loss"] for report in reports if isinstance(report, DryRunReport)]
    assert len(peaks) == 2, reports
    assert peaks[1] < peaks[0]


def test_dry_run_unknown_model_type_is_a_failure_with_its_reason() -> None:
    outcome = report_for_config({"model_type": "no_such_model"}, AMPERE, SETUP)
    assert isinstance(outcome, ProbeFailure)
    assert "no_such_model" in outcome.message


def test_dry_run_missing_flash_attention_path_is_a_failure() -> None:
    outcome = report_for_config(small_config("llama4"), AMPERE, SETUP.replace(attention="flash-attention-2"))
    assert isinstance(outcome, ProbeFailure)
    assert "flash-attention 2" in outcome.message


def test_cache_answers_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "default_directory", lambda: tmp_path)
    gpu = find_gpu("rtx-4090")
    first = dry_run_report(_model(), gpu, SETUP)
    assert len(list(tmp_path.glob("*.json"))) == 1
    monkeypatch.setattr("probes.dryrun.api.report_for_config", None)  # a second run would fail
    assert dry_run_report(_model(), gpu, SETUP) == first


def test_cache_key_changes_with_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**changes: Any) -> str:
        values: dict[str, Any] = {
            "config": small_config("llama"),
            "capability": AMPERE,
            "setup": SETUP,
            "own_version": VERSION,
            "options": {"full_depth": False},
        }
        values |= changes
        return cache.key_of(values.pop("config"), values.pop("capability"), values.pop("setup"), **values)

    keys = {
        key(),
        key(config=small_config("llama", num_hidden_layers=9)),
        key(capability=TURING),
        key(setup=SETUP.replace(lora_rank=8)),
        key(own_version=VERSION + 1),
        key(options={"full_depth": True}),
    }
    monkeypatch.setattr(cache, "library_versions", lambda: {"torch": "0.0"})
    keys.add(key())
    assert len(keys) == 7
    assert key(config=small_config("llama") | {"_source": "a note"}) == key()


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"prediction": {}})])
def test_cache_ignores_damaged_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.json").write_text(text)
    assert cache.load(tmp_path, "key") is None


def test_cache_round_trip(tmp_path: Path) -> None:
    report = _report()
    cache.save(tmp_path, "key", report)
    assert cache.load(tmp_path, "key") == report


def test_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache.save(blocked / "below", "key", _report())


@pytest.mark.parametrize("micro_batch", [2049, 1_000_000])
def test_a_loss_of_too_many_pieces_is_not_followed_one_by_one(micro_batch: int) -> None:
    """A million pairs were a million tiles each way, 60 s and more; the formula stands."""
    model = loaded("HuggingFaceTB/SmolLM2-135M")
    setup = TrainSetup(method="lora", loss="chunked", objective="dpo", seq_len_tokens=2048)
    outcome = dry_run(model, find_gpu("rtx-4090"), setup.replace(micro_batch_seqs=micro_batch))
    assert isinstance(outcome, ProbeFailure)
    assert "a dry run follows each piece of the loss" in outcome.message
