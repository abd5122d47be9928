"""One list for the target set "attention": what PEFT adapts on the built module tree is what the planner counts, what
the dry run hands over and what every launch file says."""

import ast
import re
from functools import cache
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch")
peft_utils = pytest.importorskip("peft.tuners.tuners_utils")

from peft import LoraConfig  # noqa: E402

from planner.frameworks.exporters import EXPORTERS  # noqa: E402
from planner.models import catalogue  # noqa: E402
from planner.models.spec import LayerSpec, ModelSpec  # noqa: E402
from planner.models.targets import lora_linears, peft_target_modules  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from probes.stack.adapters import target_modules  # noqa: E402
from probes.stack.build import bare_model  # noqa: E402
from probes.stack.configs import load_config, num_layers, truncated_config  # noqa: E402
from tests.planner.helpers import loaded  # noqa: E402
from tests.planner.launch_sweep import request  # noqa: E402
from tests.whole import some  # noqa: E402

FIRST_OF_TYPE = {entry.model_type: entry for entry in reversed(catalogue.entries())}
DEPTH = 4


def chosen(names: set[str], targets: str | list[str]) -> set[str]:
    """The names that PEFT adapts, by its own matching."""
    config = LoraConfig(target_modules=targets)
    return {name for name in names if peft_utils.check_target_module_exists(config, name)}


def full_name(layer: LayerSpec, name: str) -> str:
    return f"{layer.path}.{name}" if layer.kind == "idle-part" else f"{layer.path}.0.{name}"


def module_names(model: ModelSpec) -> set[str]:
    """Every matrix of the inventory by the name its module has, idle encoders and the head too."""
    layers = (*model.layer_kinds, *(layer for layer, _ in model.idle_layers))
    inside = {
        full_name(layer, linear.name) for layer in layers for linear in layer.linears if linear.module != "parameter"
    }
    outer = {linear.name for linear in (*model.outer_linears, *((model.head,) if model.head else ()))}
    return inside | outer


@cache
def emitted(model: ModelSpec, target: str) -> str | list[str] | None:
    """What a launch file hands to PEFT, None where the target refuses the model."""
    setup = TrainSetup(lora_targets="attention", loss="full", attention="eager")
    launch = EXPORTERS[target](request(setup, model=model))
    if launch.refused:
        return None
    text = launch.files[0].text
    if target == "hf":
        match = re.search(r"target_modules=(.*),\n", text)
        return ast.literal_eval(match[1])
    values = yaml.safe_load(text)["lora_target_modules"]
    return values[0] if target == "trl" and len(values) == 1 else values  # TRL unpacks a list of one


@pytest.mark.parametrize("target", ["trl", "hf", "axolotl"])
def test_every_launch_file_adapts_what_was_planned_for_every_model(target: str) -> None:
    """204 models; 16 of them differed when the exporters and the dry run kept lists of their own."""
    differing, refused = [], []
    for entry in some(catalogue.entries(), 3):
        model = loaded(entry.model_id)
        names = emitted(model, target)
        if names is None:
            refused.append(entry.model_id)
            continue
        planned = {
            full_name(layer, linear.name)
            for layer, _, linears in lora_linears(model, "attention")
            for linear in linears
        }
        if chosen(module_names(model), names) != planned:
            differing.append(entry.model_id)
    assert differing == []
    assert len(refused) <= 50  # encoder-decoders, checkpoints that the tool cannot load, classes it would mistake


@pytest.mark.parametrize("model_type", some(sorted(FIRST_OF_TYPE), 3))
def test_the_dry_run_adapts_what_was_planned(model_type: str) -> None:
    """On the module tree that transformers builds, at a depth that still has every kind of layer's names."""
    entry = FIRST_OF_TYPE[model_type]
    spec = loaded(entry.model_id)
    config = load_config(entry.config)
    config = truncated_config(config, min(DEPTH, num_layers(config)))
    model: Any = bare_model(config, torch.bfloat16, "eager")
    wanted = target_modules(model, "attention")
    assert wanted == peft_target_modules(spec, "attention")
    modules = {name for name, module in model.named_modules() if not list(module.children())}
    planned = {
        f"{layer.path}.{{}}.{linear.name}"
        for layer, _, linears in lora_linears(spec, "attention")
        for linear in linears
    }
    numbers = re.compile(r"\.\d+\.")
    adapted = {numbers.sub(".{}.", name, count=1) for name in chosen(modules, wanted)}
    assert adapted <= planned
    layers = {numbers.sub(".{}.", name, count=1) for name in modules}
    assert adapted == planned & layers
