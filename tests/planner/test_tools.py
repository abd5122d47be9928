"""The tools' tables of fields: names that the tools' own parsers know, defaults that the readers take, places told."""

import pytest

from planner.core.errors import PlannerError
from planner.frameworks.readers import read_text, versions
from planner.frameworks.tools import TOOLS
from planner.setup import TrainSetup
from planner.setup.allowed import ATTENTIONS, OPTIMIZERS
from tests.whole import some

MINIMAL = {
    "trl": "model_name_or_path: gpt2\nuse_peft: true\n",
    "axolotl": "base_model: gpt2\nadapter: lora\n",
    "llamafactory": "model_name_or_path: gpt2\nstage: sft\ndo_train: true\nfinetuning_type: lora\n",
    "unsloth": "model: gpt2\ntraining:\n  training_type: lora\nlora: {}\n",
    "ms-swift": "model: gpt2\ntuner_type: lora\nmax_length: 1024\n",
}


@pytest.mark.parametrize("name", ["trl", "axolotl", "llamafactory", "torchtitan", "accelerate"])
def test_every_name_in_a_table_is_one_that_the_tools_parser_knows(name: str) -> None:
    parser_keys = versions.known_settings(name) | {key.partition(".")[0] for key in versions.known_settings(name)}
    for field in TOOLS[name].fields:
        assert {field.key, field.key.partition(".")[0]} & parser_keys, (name, field.key)


@pytest.mark.parametrize("name", TOOLS)
def test_no_fix_takes_a_value_for_which_a_tool_has_no_word(name: str) -> None:
    setup = TrainSetup()
    for of, values in {"optimizer": OPTIMIZERS, "attention": ATTENTIONS[:3]}.items():
        for after in (setup.replace(**{of: value}) for value in values):
            if TOOLS[name].fixes({}, setup, after):
                TOOLS[name].edits({}, setup, after, "a.yaml")


@pytest.mark.parametrize("name", MINIMAL)
def test_what_a_file_leaves_out_is_the_tables_default_and_told_so(name: str) -> None:
    config = read_text(MINIMAL[name], "run.yaml")
    assert config.format == name
    for field in TOOLS[name].fields:
        if field.default is not None and field.of in TrainSetup.__dataclass_fields__ and field.key not in config.values:
            assert getattr(config.setup, field.of) == field.default, field.of
            assert config.origins.get(field.of, "run.yaml:").startswith(("default of ", "run.yaml:")), field.of


def test_every_value_of_a_yaml_file_is_told_with_its_line() -> None:
    text = "# a run\nbase_model: gpt2\nadapter: lora\n\nmicro_batch_size: 3\nlora_r: 4\n"
    origins = read_text(text, "run.yaml").origins
    assert origins["micro_batch_seqs"] == "run.yaml:5"
    assert (origins["lora_rank"], origins["method"], origins["model"]) == ("run.yaml:6", "run.yaml:3", "run.yaml:2")
    assert origins["seq_len_tokens"] == "default of Axolotl 0.21.0"
    nested = "model: gpt2\ntraining:\n  training_type: lora\n  batch_size: 3\nlora: {lora_r: 4}\n"
    assert read_text(nested, "run.yaml").origins["micro_batch_seqs"] == "run.yaml:4"


@pytest.mark.parametrize("name", ["trl", "axolotl", "llamafactory"])
def test_no_setting_that_changes_a_field_is_told_as_a_default(name: str) -> None:
    """Every key that the tool's parser knows, alone, with values of each kind."""
    plain, texts = read_text(MINIMAL[name], "run.yaml"), {}
    for key in sorted(versions.known_settings(name)):
        if key not in plain.values and "." not in key:
            texts |= {f"{key}: {value}\n": key for value in some(("true", "auto", "false", "float32", "4"), 3)}
    mismatches = []
    for text, key in texts.items():
        try:
            config = read_text(MINIMAL[name] + text, "run.yaml")
        except PlannerError:
            continue
        if config.setup.objective != plain.setup.objective:
            continue  # which has defaults of its own
        mismatches += [
            f"{field} by {key}"
            for field in TrainSetup.__dataclass_fields__
            if getattr(config.setup, field) != getattr(plain.setup, field)
            and config.origins.get(field, "").startswith("default of ")
        ]
    assert len(texts) > 250
    assert not mismatches
