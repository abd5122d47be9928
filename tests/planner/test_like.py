"""`--like`: a type that nobody knows, from the sizes that its configuration names."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import ConfigError, PlannerError, UnknownModelError, UsageError
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import default_attention
from planner.models import catalogue
from planner.models.families import alike, spec_from_config
from planner.models.families.fields import Fields
from planner.models.module_tree import NoTree
from planner.models.resolve import resolve_model
from planner.models.spec import ModelSpec
from planner.planning.evidence.bands import LIKE_BANDS, LIKE_MIXTURE_ADAPTED_BAND, LIKE_TIME_BANDS, memory_band
from planner.planning.predict import predict
from planner.setup import TrainSetup
from tests.whole import some

CARD = "h200"
LORA = TrainSetup(method="lora", lora_rank=16, micro_batch_seqs=2, seq_len_tokens=2048, checkpointing=1)
SETUPS = {
    "LoRA": LORA,
    "LoRA, no checkpointing": LORA.replace(checkpointing=0),
    "full": LORA.replace(method="full", lora_rank=0, precision="bf16-mixed", micro_batch_seqs=1),
}


def known_pairs() -> Iterator[tuple[ModelSpec, ModelSpec]]:
    """(a model by its sizes alone, the same by its adapter)."""
    for entry in catalogue.entries():
        fields = Fields(entry.config, "config.json")
        kind = "" if entry.model_type in ("llama", "t5", "whisper") else alike.kind_of(fields)
        adapted = catalogue.load(entry.model_id)
        if (
            kind
            and adapted is not None
            and not adapted.reads_both_ways
            and not {"vision_config", "audio_config"} & set(entry.config)
        ):
            read = alike.build(fields, kind)
            yield replace(read, model_id=adapted.model_id, model_type="unknown", config=adapted.config), adapted


def errors_of(read: ModelSpec, adapted: ModelSpec) -> Iterator[tuple[str, float, float]]:
    """(setup, error of the peak, error of the step time) of every setup."""
    card = find_gpu(CARD)
    for name, setup in SETUPS.items():
        by_sizes, true = (
            predict(spec, card, setup.replace(attention=default_attention(spec))) for spec in (read, adapted)
        )
        assert by_sizes.step_time_s
        assert true.step_time_s
        yield name, true.peak_device_bytes / by_sizes.peak_device_bytes - 1, true.step_time_s / by_sizes.step_time_s - 1


GLM_NAMES = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "multi_query_group_num",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "padded_vocab_size",
}


@pytest.fixture(autouse=True)
def _no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the installed transformers."""

    def unknown(config: Any, model_type: str) -> ModelSpec:
        raise NoTree("transformers does not know it")

    monkeypatch.setattr("planner.models.module_tree._read_tree", unknown)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    entry = catalogue.find(name)
    return {**entry.config, "model_type": "nobodys", **changes}


def read(config: dict[str, Any], like: str = "") -> ModelSpec:
    return spec_from_config(config, model_id="m", source="test", like=like)


def test_a_llama_under_other_names_is_the_same_size() -> None:
    config = config_of("meta-llama/Llama-3.1-8B")
    renamed = {GLM_NAMES.get(name, name): value for name, value in config.items()}
    spec = catalogue.load("meta-llama/Llama-3.1-8B")
    assert spec is not None
    assert read(renamed, "llama").num_params == read(config, "llama").num_params == spec.num_params


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "zai-org/GLM-4.5-Air"])
def test_experts_are_counted_under_every_name_that_they_have(name: str) -> None:
    """A copy of Qwen3-30B-A3B as llama was 3.34 B."""
    spec = catalogue.load(name)
    assert read(config_of(name), "mixture").num_params == pytest.approx(spec.num_params, rel=0.001)


@pytest.mark.parametrize(
    ("name", "hinted"), [("Qwen/Qwen3-30B-A3B", "--like mixture"), ("meta-llama/Llama-3.1-8B", "--like llama")]
)
def test_the_error_names_the_kind_that_fits(name: str, hinted: str) -> None:
    with pytest.raises(UnknownModelError) as error:
        read(config_of(name))
    assert hinted in error.value.hint


@pytest.mark.parametrize(
    ("config", "like", "message"),
    [
        (config_of("Qwen/Qwen3-30B-A3B"), "llama", "has 128 experts"),
        (config_of("meta-llama/Llama-3.1-8B"), "mixture", "has no experts"),
        (config_of("deepseek-ai/DeepSeek-V2-Lite"), "mixture", "kv_lora_rank"),
        (config_of("meta-llama/Llama-3.1-8B", ssm_state_size=16), "llama", "ssm_state_size"),
        (config_of("meta-llama/Llama-3.1-8B", vision_config={}), "llama", "an encoder"),
        (config_of("meta-llama/Llama-3.1-8B"), "bert", "no such kind"),
        (config_of("meta-llama/Llama-3.1-8B", hidden_size=None), "llama", "hidden_size is missing"),
        (config_of("meta-llama/Llama-3.1-8B", model_type="llama"), "llama", "is known"),
    ],
)
def test_what_another_kind_is_told_of_is_refused(config: dict[str, Any], like: str, message: str) -> None:
    with pytest.raises(PlannerError, match=message) as error:
        read(config, like)
    assert error.value.hint


def test_weights_of_another_size_beside_it_are_refused(tmp_path: Path) -> None:
    config = config_of("meta-llama/Llama-3.1-8B", torch_dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 2 * 8_030_261_248}}))
    assert resolve_model(str(tmp_path), like="llama").like == "llama"
    index.write_text(json.dumps({"metadata": {"total_size": 2 * 13_000_000_000}}))
    with pytest.raises(ConfigError, match="holds 13"):
        resolve_model(str(tmp_path), like="llama")


def test_transformers_own_layers_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tree_spec = catalogue.load("Qwen/Qwen3-0.6B")
    monkeypatch.setattr("planner.models.module_tree.spec_from_tree", lambda config, model_type: tree_spec)
    spec = read(config_of("meta-llama/Llama-3.1-8B"), "llama")
    assert spec.like == ""
    assert "not needed" in spec.taken_as


def test_like_of_a_known_name_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="is known"):
        resolve_model("qwen3 8b", like="llama")


def test_the_bands_hold_what_known_types_read_as_strangers_are_off_by() -> None:
    """Every fifth model of the catalogue that `--like` can read, three setups each."""
    num = 0
    for known_by_size, spec in some([*known_pairs()], 5):
        for name, peak, time in errors_of(known_by_size, spec):
            wide = known_by_size.like == "mixture" and name == "LoRA, no checkpointing"
            band = LIKE_MIXTURE_ADAPTED_BAND if wide else LIKE_BANDS[known_by_size.like]
            assert abs(peak) <= band, (spec.model_id, name)
            assert abs(time) <= LIKE_TIME_BANDS[known_by_size.like], (spec.model_id, name)
            num += 1
    assert num > 45


def test_the_prediction_says_how_it_was_made() -> None:
    spec = read(config_of("meta-llama/Llama-3.1-8B"), "llama")
    setup = TrainSetup(method="lora", lora_rank=16)
    prediction = predict(spec, find_gpu("h200"), setup)
    assert prediction.memory_band_fraction >= LIKE_BANDS["llama"] == memory_band(spec, setup)
    assert (prediction.time_band_fraction or 0.0) >= LIKE_TIME_BANDS["llama"]
    assert any("--like" in note for note in prediction.notes)
