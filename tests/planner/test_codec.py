"""One JSON form: what is written comes back equal, old files are read, and what is no evidence is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.core.errors import ConfigError
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.codec import (
    BadOutcome,
    decode,
    evidence_from_dict,
    evidence_from_text,
    evidence_to_dict,
    outcome_from_dict,
)
from planner.setup.interchange import to_jsonable
from planner.setup.memory_terms import MemoryTerm
from planner.setup.outcome import Environment, Evidence, FailureKind, Fidelity, Measurement, Prediction, ProbeFailure
from tests.planner.helpers import loaded

MEASUREMENT = Measurement(
    level=Fidelity.PROBE,
    peak_allocated_bytes=3,
    peak_reserved_bytes=4,
    peak_device_bytes=5,
    phase_peaks_bytes={"load": 1, "forward": 3},
    step_times_s=(0.5, 1.0),
    tokens_per_step=4096,
    layers_measured=(2, 4),
    environment=Environment(
        gpu_name="NVIDIA A100",
        gpu_key=None,
        driver="1",
        cuda="12",
        python="3.11",
        platform="x",
        libraries={"torch": "2"},
    ),
    extrapolation_error_fraction=0.01,
    mfu_fraction=0.4,
    flags=("unstable",),
    notes=("one",),
    device_peak_is_nvml=False,
    copy_bandwidth_bytes_per_s=1e12,
    rank_peaks=(("stage 1", 2, 5),),
    kernels=("flash_fwd_kernel",),
    between_steps_s=0.01,
    trainer_fraction=0.049,
    trainer_band_fraction=0.019,
    program="trl",
)
FAILURE = ProbeFailure(level=Fidelity.DRY_RUN, kind=FailureKind.TIMEOUT, message="120 s", log_path="x.log")


def formula() -> Prediction:
    model = loaded("meta-llama/Llama-3.2-1B")
    return predict(model, find_gpu("a100-80gb"), TrainSetup())


def through_json(values: Any) -> Any:
    return json.loads(json.dumps(values))


@pytest.mark.parametrize("evidence", [MEASUREMENT, FAILURE, formula()], ids=["measurement", "failure", "prediction"])
def test_evidence_survives_json(evidence: Evidence) -> None:
    """Every field: none of the measurement's and the failure's is at its default here."""
    back = evidence_from_dict(through_json(evidence_to_dict(evidence)))
    assert back == evidence
    assert type(back) is type(evidence)


def test_every_field_of_the_measurement_is_tried() -> None:
    defaults = {name: field.default for name, field in Measurement.__dataclass_fields__.items()}
    assert not [name for name, default in defaults.items() if getattr(MEASUREMENT, name) == default]


@pytest.mark.parametrize(
    "entry", {entry.model_type: entry for entry in catalogue.entries()}.values(), ids=lambda e: e.model_id
)
def test_model_specs_survive_json(entry: catalogue.CatalogueEntry) -> None:
    spec = loaded(entry.model_id)
    assert decode(ModelSpec, through_json(to_jsonable(spec))) == spec


def test_setups_survive_json_inside_other_data() -> None:
    setup = TrainSetup(lora_targets=("q_proj", "v_proj"), checkpointing=2)
    assert decode(tuple[TrainSetup, ...], through_json(to_jsonable((setup,)))) == (setup,)
    with pytest.raises(ConfigError, match=r"setups\[0\].*unknown setup key"):
        decode(tuple[TrainSetup, ...], [{"rnak": 8}], "setups")


def test_fields_of_later_versions_are_left_out_of_evidence_and_refused_elsewhere() -> None:
    newer = through_json(evidence_to_dict(MEASUREMENT))
    newer["colour"], newer["environment"]["room"] = "red", "attic"
    assert outcome_from_dict(newer) == MEASUREMENT
    with pytest.raises(ConfigError, match="only fields of MemoryTerm"):
        decode(MemoryTerm, {"category": "weights", "name": "x", "size_bytes": 1, "colour": "red"})


GOOD = evidence_to_dict(MEASUREMENT)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"schema": 1, "outcome": "x"},
        {"schema": 1, "outcome": ["measurement"]},
        {"schema": 1, "outcome": "failure", "level": "probe", "kind": "?", "message": ""},
        {**GOOD, "schema": 2},
        {**GOOD, "step_times_s": []},
        {**GOOD, "peak_device_bytes": "5"},
        {**GOOD, "peak_device_bytes": True},
        {**GOOD, "peak_device_bytes": -1},
        {**GOOD, "step_times_s": [0.0]},
        {**GOOD, "tokens_per_step": 0},
        {**GOOD, "phase_peaks_bytes": {"load": None}},
        {key: value for key, value in GOOD.items() if key != "environment"},
    ],
)
def test_what_is_no_evidence_is_refused(values: Any) -> None:
    with pytest.raises(BadOutcome):
        evidence_from_dict(through_json(values))


@pytest.mark.parametrize("text", ["not json", "[]", "NaN", '{"schema": 1'])
def test_text_that_is_no_evidence_is_refused(text: str) -> None:
    with pytest.raises(BadOutcome):
        evidence_from_text(text)


def test_a_prediction_is_no_outcome_of_a_probe() -> None:
    with pytest.raises(BadOutcome, match="got a prediction"):
        outcome_from_dict(json.loads(json.dumps(evidence_to_dict(replace(formula(), level=Fidelity.DRY_RUN)))))
