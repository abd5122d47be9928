"""Small configurations of real families for the dry run's tests: catalogue entries, shrunk."""

from collections.abc import Mapping
from typing import Any

import pytest

from planner.hardware.gpu import GpuSpec
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.dryrun import DryRunReport, dry_run, report_for_config

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 320, "num_hidden_layers": 3, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 128,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}  # fmt: skip
_DROPPED = ("rope_scaling", "layer_types", "pad_token_id")


def catalogue_config(model_type: str) -> dict[str, Any]:
    """The raw configuration of the catalogue's first model of a type."""
    entry = next(candidate for candidate in catalogue.entries() if candidate.model_type == model_type)
    return dict(entry.config)


def small_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A model of that type with 3 layers of width 64."""
    config = {key: value for key, value in catalogue_config(model_type).items() if key not in _DROPPED}
    for key, value in _SIZES.items():
        if key in config or key in ("hidden_size", "vocab_size"):
            config[key] = value
    if model_type in ("phi3", "smollm3"):
        config["pad_token_id"] = 0
    return config | changes


def small_spec(model_type: str, **changes: Any) -> ModelSpec:
    """The formula's model of `small_config`."""
    return spec_from_config(small_config(model_type, **changes), model_id="small", source="test")


def reported(config: Mapping[str, Any], capability: tuple[int, int], setup: TrainSetup, **options: Any) -> DryRunReport:
    """`report_for_config`, which must have one."""
    report = report_for_config(config, capability, setup, **options)
    assert isinstance(report, DryRunReport), report
    return report


def dried(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, **options: Any) -> Prediction:
    """`dry_run`, which must have a prediction."""
    prediction = dry_run(model, gpu, setup, **options)
    assert isinstance(prediction, Prediction), prediction
    return prediction


def agreeing(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, rel: float, run: Prediction | None = None
) -> tuple[Prediction, Prediction]:
    """The formula's prediction and the dry run's (`run`, else made here), whose peaks lie within `rel`."""
    run = run or dried(model, gpu, setup, use_cache=False)
    formula = predict_memory(model, gpu, setup)
    assert formula.peak_allocated_bytes == pytest.approx(run.peak_allocated_bytes, rel=rel)
    return formula, run


def peaks(events: list[Event]) -> dict[str, int]:
    """Allocated peak of every phase and layer, blocks of 512 bytes."""
    total, phase, sizes = 0, "", {}
    by_phase: dict[str, int] = {}
    for event in events:
        if isinstance(event, Alloc):
            sizes[event.id] = -(-event.size_bytes // 512) * 512
            total += sizes[event.id]
            by_phase[phase] = max(by_phase.get(phase, 0), total)
        elif isinstance(event, Free):
            total -= sizes.pop(event.id)
        elif isinstance(event, Phase):
            phase = event.name
    return by_phase


def assert_same_figures(short: DryRunReport, full: DryRunReport) -> None:
    """A run at little depth, its block repeated, says of the full model what a run of every layer says."""
    assert short.depth < full.depth == full.num_layers, (short.depth, full.depth, full.num_layers)
    repeated, whole = short.prediction, full.prediction
    assert repeated.phase_peaks_bytes == whole.phase_peaks_bytes, (repeated.phase_peaks_bytes, whole.phase_peaks_bytes)
    assert repeated.peak_reserved_bytes == whole.peak_reserved_bytes, (
        repeated.peak_reserved_bytes,
        whole.peak_reserved_bytes,
    )
    assert repeated.terms == whole.terms, set(repeated.terms) ^ set(whole.terms)
    assert short.parameter_bytes == full.parameter_bytes, (short.parameter_bytes, full.parameter_bytes)
