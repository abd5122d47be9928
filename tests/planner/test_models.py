"""The catalogue and the adapters: every published configuration gives exactly the module tree's parameters."""

import copy
import pickle

import pytest

from planner.core.errors import UsageError
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.families import model_types, spec_from_config
from planner.planning.plan_request import PlanRequest
from tests.planner.helpers import loaded

ENTRIES = catalogue.entries()


def test_parameters_equal_the_module_tree() -> None:
    """Golden: counted on the tree that transformers 5.23 builds, a tied head once."""
    for entry in ENTRIES:
        spec = spec_from_config(entry.config, model_id=entry.model_id, source="test")
        assert spec.num_params == entry.num_params, entry.model_id
        assert spec.built_class == entry.built_class, entry.model_id
        assert spec.tied == entry.tied, entry.model_id


def test_catalogue_holds_204_models_of_58_types() -> None:
    assert len(ENTRIES) == 204
    assert len({entry.model_type for entry in ENTRIES}) == 58
    assert {entry.model_type for entry in ENTRIES} <= set(model_types())
    assert len(catalogue.names()) == 204


def test_every_entry_says_where_it_came_from() -> None:
    for entry in ENTRIES:
        assert entry.config_source, entry.model_id
        assert entry.published_num_params is None or entry.published_source, entry.model_id
        assert "/work/" not in entry.config_source


def test_every_name_and_alias_loads_in_any_case() -> None:
    for entry in ENTRIES:
        for name in (entry.model_id, *entry.aliases, *entry.names):
            for spelling in (name, name.upper(), f"  {name.lower()} "):
                resolved = catalogue.find(spelling)
                assert resolved is not None, spelling
                assert resolved.model_id == entry.model_id, spelling


def test_names_are_unique() -> None:
    names = catalogue.all_names()
    assert len(names) == len(set(names))


def test_load_keeps_the_name_of_the_alias() -> None:
    """A launch file must load the weights that were asked for."""
    spec = loaded("deepseek-ai/deepseek-coder-v2-lite-instruct")
    assert spec.model_id == "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct"
    assert "same configuration as deepseek-ai/DeepSeek-V2-Lite" in spec.config_source


@pytest.mark.parametrize("name", ["", " ", "llama", "silu", '"', "meta-llama", "\\", "ñ", "no/such-model"])
def test_load_gives_none_for_what_is_no_name(name: str) -> None:
    assert catalogue.load(name) is None


def test_load_matches_the_id_exactly_by_its_last_part() -> None:
    spec = loaded("llama-3.1-8b")
    assert spec.model_id == "meta-llama/Llama-3.1-8B"


def test_a_copy_of_a_model_works_everything_out_anew() -> None:
    """What a walk keeps beside a model tells its parts apart by identity, which a copy does not share: a plan that had
    been pickled was compared without end."""
    model = loaded("qwen/qwen2.5-1.5b")
    assert model.once("kept", lambda _: 1) == 1
    for same in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert same == model
        assert same.once("kept", lambda _: 2) == 2


def test_an_encoder_decoder_says_what_its_decoder_begins_with() -> None:
    """Its loss shifts labels behind that token. T5's is its padding, 0.

    Source: transformers' documentation of T5, "T5 uses the pad_token_id as the starting token for decoder_input_ids".
    """
    rows = [entry.config for entry in catalogue.entries() if entry.config.get("is_encoder_decoder")]
    assert all(isinstance(config.get("decoder_start_token_id"), int) for config in rows)
    assert {config["decoder_start_token_id"] for config in rows if config["model_type"] == "t5"} == {0}


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("openai-community/gpt2", 1024),
        ("facebook/opt-125m", 2048),
        ("EleutherAI/gpt-neo-125m", 2048),
        ("google-bert/bert-base-uncased", 512),
        ("FacebookAI/roberta-base", 512),  # its table has 514 rows: positions are counted from behind the padding's
        ("openai/whisper-tiny", 448),
        ("meta-llama/Llama-3.1-8B", None),
        ("google/gemma-4-e2b-it", None),
        ("microsoft/deberta-v3-base", None),
    ],
)
def test_a_table_of_positions_ends_a_sequence(name: str, positions: int | None) -> None:
    """A longer one stops the run at its first step (IndexError); computed positions go on."""
    model, card = loaded(name), find_gpu("a100-80gb")
    assert model.learned_positions == positions
    assert PlanRequest(seq_len=positions or 300_000).workload(model, card)
    if positions:
        with pytest.raises(UsageError, match=f"has learned {positions} positions"):
            PlanRequest(seq_len=positions + 1).workload(model, card)
