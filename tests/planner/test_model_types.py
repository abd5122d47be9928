"""`planner/data/model_types.json` is what the libraries say (`python -m tools.build_types` writes it)."""

import re
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from planner.core.shipped import by_model_type, model_types
from planner.memory.attention_kernels import packs_apart
from planner.models import catalogue
from planner.setup.packages import LIGER
from tools.build_types import READ, of_decoders, of_liger, of_modeling, of_peft, of_transformers, of_vision, sees_as

ROOT = Path(__file__).resolve().parents[2]


def test_what_installed_libraries_say_of_types_is_kept() -> None:
    vision = of_vision(model_types("processor"))
    for name, types in {**of_transformers(), **of_modeling(), **vision, **of_peft()}.items():
        assert by_model_type(name) == (types if isinstance(types, dict) else dict.fromkeys(types)), name
    seeing, none = {"qwen3_vl_moe", "glm4v_moe", "ernie4_5_vl_moe"}, {"dbrx", "jetmoe", "llama4", "longcat_flash"}
    assert seeing <= model_types("expert_plan")
    assert not none & model_types("expert_plan")


def test_the_options_of_a_decoder_are_those_that_its_class_shows() -> None:
    names = ("gemma3_text", "smollm3")  # the other one is not Llama's: some of its layers have no positions
    assert of_decoders(names)["decoders"] == {names[0]: by_model_type("decoders")[names[0]]}


def test_a_type_sees_as_another_of_its_processor_where_it_has_the_same_matrices() -> None:
    processors = by_model_type("processor")
    assert sees_as("qwen3_vl", processors["qwen3_5"])
    assert not sees_as("llava", processors["gemma3"])
    assert "vipllava" not in processors  # LLaVA's processor, features of five layers


MOST = 26
"""Quoted names of model types in the packages: 23 of code (of them five another word, four the kind of `--like`)."""


def test_what_libraries_say_of_types_is_not_written_by_hand() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for package in ("planner", "probes", "search", "reports", "finetune_planner")
        for path in (ROOT / package).rglob("*.py")
        for word in re.findall(r'"([\w-]+)"', path.read_text(encoding="utf-8"))
        if word in CONFIG_MAPPING
    ]
    assert len(found) <= MOST, sorted(found)


def test_flash_attention_keeps_packed_samples_apart_where_positions_reach_it() -> None:
    opt, falcon = (catalogue.load(name) for name in ("facebook/opt-1.3b", "tiiuae/falcon-7b"))
    assert opt is not None
    assert falcon is not None
    for model, handed_on in ((opt, True), (falcon, False), (replace(opt, model_type="afmoe"), True)):
        assert packs_apart(model, "flash-attention-2") is handed_on
        assert not packs_apart(model, "sdpa")


def test_the_releases_that_were_read_are_those_that_launch_files_name() -> None:
    assert by_model_type("versions") == {name: version(name) for name in ("peft", "transformers")} | READ


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed here")
def test_liger_does_what_was_read() -> None:
    package = find_spec("liger_kernel")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parents[1]
    assert version(LIGER) == READ[LIGER]
    for name, types in of_liger(lambda path: (folder / path).read_text()).items():
        assert by_model_type(name) == (types if isinstance(types, dict) else dict.fromkeys(types)), name
