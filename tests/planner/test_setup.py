"""TrainSetup: impossible combinations cannot be built, derived data types follow the trainer."""

from dataclasses import fields
from typing import Any

import pytest

from planner.core.errors import SetupError
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict

IMPOSSIBLE: list[dict[str, Any]] = [
    {"method": "full"},  # the default rank of 16 has no meaning
    {"method": "full", "lora_rank": 0, "quantization": "nf4"},
    {"method": "full", "lora_rank": 0, "precision": "fp16-autocast"},
    {"method": "full", "lora_rank": 0, "kbit_fp32_cast": True},
    {"method": "lora", "lora_rank": 0},
    {"method": "lora", "lora_rank": -4},
    {"method": "lora", "quantization": "int8"},
    {"method": "lora", "kbit_fp32_cast": True},
    {"method": "qlora"},
    {"precision": "fp32", "attention": "flash-attention-2"},
    {"micro_batch_seqs": 0},
    {"seq_len_tokens": True},
    {"lora_dropout": 1.0},
    {"lora_targets": ()},
    {"lora_targets": "everything"},
    {"optimizer": "adam"},
    {"parallel": "ddp"},
]


@pytest.mark.parametrize("fields", IMPOSSIBLE, ids=str)
def test_setup_refuses_impossible_combinations(fields: dict[str, Any]) -> None:
    with pytest.raises(SetupError) as caught:
        TrainSetup(**fields)
    assert caught.value.hint


def test_interchange_example_of_the_readme_round_trips() -> None:
    line = {
        "method": "qlora", "precision": "bf16-pure", "quantization": "nf4-double", "kbit_fp32_cast": True,
        "lora_rank": 16, "lora_targets": "attention", "optimizer": "paged-adamw-8bit", "attention": "sdpa",
        "checkpointing": True, "loss": "full", "micro_batch_seqs": 1, "accumulation_steps": 1,
        "seq_len_tokens": 2048, "num_gpus": 1,
    }  # fmt: skip
    setup = setup_from_dict(line)
    written = setup_to_dict(setup)
    assert setup_from_dict(written) == setup
    assert {key: written[key] for key in line} == line


@pytest.mark.parametrize(
    "line",
    [{"rank": 8}, {"checkpointing": -1}, {"checkpointing": "yes"}, {"packing": 1}, {"lora_targets": [1]},
     {"method": []},
     {"lora_dropout": "x"}, {"seq_len_tokens": 1.5}, {"method": None}],
    ids=str,
)  # fmt: skip
def test_interchange_refuses_what_is_no_setup(line: dict[str, Any]) -> None:
    with pytest.raises(SetupError):
        setup_from_dict(line)


def test_interchange_defaults_depend_on_the_method() -> None:
    assert setup_from_dict({"method": "full"}).lora_rank == 0
    assert setup_from_dict({"method": "qlora"}).quantization == "nf4-double"
    assert setup_from_dict({"method": "lora", "lora_rank": None}).lora_rank == 16


def test_no_record_of_a_setup_has_more_than_eight_fields() -> None:
    records = TrainSetup.__bases__
    assert len(records) == 10
    assert all(len(fields(record)) <= 8 for record in records)
    assert sum(len(fields(record)) for record in records) == len(fields(TrainSetup))


@pytest.mark.parametrize(
    ("key", "meant"),
    [("micro_batch", "micro_batch_seqs"), ("seq_len", "seq_len_tokens"), ("gradient_checkpointing", "checkpointing")],
)
def test_a_key_that_almost_names_a_field_is_told_which(key: str, meant: str) -> None:
    with pytest.raises(SetupError, match="unknown setup key") as caught:
        setup_from_dict({key: 1})
    assert caught.value.hint == f"did you mean {meant}?"
