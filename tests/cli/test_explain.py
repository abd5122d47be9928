"""`plan explain WORD`, and the short answer's words."""

import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.lists import glossary, plain
from planner.options.adapters import ADAPTERS
from planner.options.optimizers import OPTIMIZERS


def test_a_word_is_found_however_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["chunked-loss"], ["Chunked", "loss"], ["chunkedloss"]):
        assert run(["explain", *words]) == 0
        assert capsys.readouterr().out.startswith("chunked loss: ")


def test_an_unknown_word_is_an_error_with_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "adamw-fusd"]) == 2
    assert "hint: near it: adamw-fused" in capsys.readouterr().err


def test_every_kind_of_adapter_is_explained_from_its_own_row(capsys: pytest.CaptureFixture[str]) -> None:
    for row in ADAPTERS.values():
        assert run(["explain", row.name]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert row.what in out
        assert row.title.lower() in out.lower()


def test_the_words_of_a_usual_plan_are_in_the_glossary() -> None:
    glossary_words = {plain(word) for word in glossary()}
    usual = ("adamw-fused", "adamw-8bit", "paged-adamw-8bit")
    assert set(usual) <= set(OPTIMIZERS)
    for word in (*usual, "bf16-autocast", "bf16-mixed", "bf16-pure", "sdpa", "nf4", "int8", "packing", "checkpointing"):
        assert plain(word) in glossary_words
