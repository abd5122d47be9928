"""Every causal language model type of the installed transformers on its first day: its config.json, as transformers
writes it, is read, and its inventory holds what its module tree holds.

End to end, with plan, dry run and launch files: `python -m benchmarks.any_model` (docs/accuracy/any-model.md).
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch

from benchmarks.any_model import DATA, PAGE, causal_types, page, passes, planned, written
from planner.models.config_file import CONFIG_NAME, read_config
from planner.models.families import has_family, spec_from_config
from probes.stack.build import bare_model
from probes.stack.configs import load_config
from probes.stack.tree import spec_of_model
from tests.whole import some

LAYERS = 12
"""Most patterns of layers repeat within so many."""
NOT_BUILT = {
    "gemma4_assistant": "producing a cache",
    "gemma4_unified_assistant": "producing a cache",
    "musicgen": "text config",
    "musicgen_melody": "text config",
}
"""What `AutoModelForCausalLM` does not build of its configuration: drafters that read another model's keys and values,
and a text encoder with a decoder of sound. Each with the words of transformers' error."""


@pytest.mark.parametrize("model_type", some(causal_types(), 15))
def test_a_type_is_counted_to_the_parameter(model_type: str, tmp_path: Path) -> None:
    if model_type == "gemma3n":
        pytest.importorskip("timm")
    written(model_type, tmp_path, LAYERS)
    raw = read_config(tmp_path / CONFIG_NAME)
    if model_type in NOT_BUILT:
        with pytest.raises(ValueError, match=NOT_BUILT[model_type]):
            bare_model(load_config(raw), torch.bfloat16, "eager")
        return
    model = bare_model(load_config(raw), torch.bfloat16, "eager")
    num_params = sum(parameter.numel() for parameter in model.parameters())
    specs = [spec_of_model(model, raw, model_id="m", source="s")]
    if has_family(model_type):
        specs.append(spec_from_config(raw, model_id="m", source="s"))
    assert [spec.num_params for spec in specs] == [num_params] * len(specs)
    assert all(spec.layer_order for spec in specs)


def test_the_page_says_what_was_counted() -> None:
    """Every type of the installed transformers, once; page and changelog claim what the lines count."""
    lines = [json.loads(line) for line in DATA.read_text().splitlines()]
    assert sorted(line["type"] for line in lines) == causal_types()
    assert PAGE.read_text() == page(lines)
    passing = sum(map(passes, lines))
    assert f"{passing} of the {len(lines)} causal types" in (PAGE.parents[2] / "CHANGELOG.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", some(["bamba", "jetmoe"], 2))
def test_a_strangers_plan_is_proven_and_written(model_type: str) -> None:
    """A hybrid of state spaces and attention; experts in a loop, for which values are followed, without
    checkpointing."""
    line = planned(model_type, layers=2, limit_s=300.0)
    assert "failed" not in line, line
    assert line["fits"]
    assert "trl" in line["written"]
