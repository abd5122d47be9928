"""What used to be taken without a word, and meant something else than the person wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import ConfigError
from planner.frameworks.readers import read_text
from planner.models.catalogue import load
from planner.models.resolve import resolve_model

AXOLOTL = "base_model: HuggingFaceTB/SmolLM2-135M\nadapter: lora\nlora_r: 8\ndatasets: [{path: x}]\n"
TRL = "model_name_or_path: HuggingFaceTB/SmolLM2-135M\n"


def read(text: str) -> Any:
    return read_text(text, "config.yaml", model=load("HuggingFaceTB/SmolLM2-135M"))


@pytest.mark.parametrize("text", [TRL + "optim: adamw_torch_fusd\n", AXOLOTL + "optimizer: adamw_torch_fusd\n"])
def test_a_misspelt_optimizer_is_an_error_with_the_closest_name(text: str) -> None:
    with pytest.raises(ConfigError, match="names no optimizer") as caught:
        read(text)
    assert "adamw_torch_fused" in caught.value.hint


@pytest.mark.parametrize("name", ["galore_adamw", "muon", "grokadamw"])
def test_an_optimizer_without_a_memory_model_stands_for_another_and_says_so(name: str) -> None:
    assert any(name in note for note in read(AXOLOTL + f"optimizer: {name}\n").approximations)


@pytest.mark.parametrize(
    ("word", "layers"),
    [('"no"', 0), ('"off"', 0), ("false", 0), ('"yes"', 1), ("true", 1), ("offload", 1), ("unsloth", 1)],
)
def test_axolotl_checkpointing_words_mean_what_they_say(word: str, layers: int) -> None:
    assert read(AXOLOTL + f"gradient_checkpointing: {word}\n").setup.checkpointing == layers


def test_axolotl_checkpointing_of_no_known_word_is_an_error() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing must be true or false"):
        read(AXOLOTL + "gradient_checkpointing: sometimes\n")


@pytest.mark.parametrize("value", ["{a: 1}", "[true]", "maybe", "3"])
def test_axolotl_bf16_of_no_truth_value_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match="bf16 must be true or false"):
        read(AXOLOTL + f"bf16: {value}\n")


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("bf16: true", "bf16-autocast"),
        ("bf16: full", "bf16-autocast"),
        ("bf16: auto", "bf16-autocast"),
        ("", "bf16-autocast"),
        ("bf16: false", "fp32"),
        ("bf16: false\nfp16: true", "fp16-autocast"),
        ("fp16: true", "fp16-autocast"),
        ("bfloat16: true", "bf16-pure"),
    ],
)
def test_axolotl_precisions_are_read_as_before(lines: str, precision: str) -> None:
    assert read(AXOLOTL + lines + "\n").setup.precision == precision


def gemma(folder: Path, **text_config: Any) -> Path:
    """A Gemma 3 of the catalogue as a local directory, some sizes changed (None: left out)."""
    spec = load("google/gemma-3-12b-it")
    config = json.loads(json.dumps(dict(spec.config)))
    for name, value in text_config.items():
        config["text_config"].pop(name, None)
        if value is not None:
            config["text_config"][name] = value
    config["torch_dtype"] = "bfloat16"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def index(folder: Path, total_size: Any) -> None:
    values = {"metadata": {"total_size": total_size}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(values))


@pytest.mark.usefixtures("warm_children")
def test_a_nested_size_left_to_transformers_defaults_is_named(tmp_path: Path) -> None:
    whole = resolve_model(str(gemma(tmp_path / "whole")))
    assert "lacks sizes" not in whole.config_source
    spec = resolve_model(str(gemma(tmp_path / "part", hidden_size=None)))
    assert spec.num_params < 0.7 * whole.num_params  # another model
    assert (
        f"text_config lacks sizes, transformers' defaults stand: hidden_size {spec.hidden_size:,}" in spec.config_source
    )


def test_a_config_that_contradicts_the_weights_beside_it_is_an_error(tmp_path: Path) -> None:
    folder = gemma(tmp_path / "model", hidden_size=None)
    index(folder, 24_374_863_616)  # of google/gemma-3-12b-it
    with pytest.raises(ConfigError, match=r"holds 12\.187 B"):
        resolve_model(str(folder))
    assert resolve_model(str(gemma(tmp_path / "right"))).num_params > 12e9


@pytest.mark.parametrize("total", [24_374_863_616, None, True, "24", 0, -5])
def test_weights_that_agree_or_tell_no_size_are_no_error(tmp_path: Path, total: Any) -> None:
    folder = gemma(tmp_path / "model")
    index(folder, total)
    assert resolve_model(str(folder)).num_params > 12e9


@pytest.mark.parametrize("text", ["[]", '{"metadata": 3}', "{}"])
def test_an_index_of_another_form_is_left_alone_or_refused(tmp_path: Path, text: str) -> None:
    folder = gemma(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(text)
    if text == "[]":
        with pytest.raises(ConfigError, match="expected a JSON object"):
            resolve_model(str(folder))
    else:
        assert resolve_model(str(folder)).num_params > 12e9
