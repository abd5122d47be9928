"""The first answer for a type without an adapter, before its layers are read."""

from dataclasses import replace

import pytest

from finetune_planner.cli.make import FOLLOWS, say_first
from planner.memory.workload import Workload
from planner.models.families import spec_from_sizes
from planner.models.spec import ModelSpec
from tests.planner.helpers import plan_request

SEED = {"model_type": "seed_oss", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 155136}  # fmt: skip


def asked(spec: ModelSpec) -> Workload:
    return replace(plan_request(), model=spec)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, ("By the sizes in its config.json alone: Fits.", "(formula ±30 %)")),
        ({"num_hidden_layers": 900}, ("By the sizes in its config.json alone: Nothing fits",)),
        ({"kv_lora_rank": 512}, ("its sizes alone tell too little",)),
        ({"vocab_size": None}, ("its sizes alone tell too little",)),
        ({"head_dim": "wide"}, ("its sizes alone tell too little",)),
    ],
)
def test_the_first_answer_is_by_sizes_with_a_strangers_band(
    more: dict[str, object], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    say_first({**SEED, **more}, asked)
    captured = capsys.readouterr()
    assert not captured.out  # which is for the exact answer
    assert all(word in captured.err for word in ("seed_oss", *words, FOLLOWS[1:]))


def test_a_type_with_an_adapter_has_no_first_answer() -> None:
    assert spec_from_sizes({**SEED, "model_type": "llama"}) is None
