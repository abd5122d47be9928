"""`planner.models.targets` against real PEFT on meta: the same matrices, the same number of parameters."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from meta_models import build_on_meta, of_causal_types, shallow

from planner.core.errors import SetupError
from planner.models import catalogue, module_tree
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.models.targets import Targets, lora_linears, num_lora_params, peft_target_modules
from tests.whole import paired, some

peft = pytest.importorskip("peft")

from probes.module_tree import answer  # noqa: E402

module_tree.read_with(answer)  # torch is loaded: no process for each tree

RANK = 8
FIRST = {entry.model_type: entry for entry in reversed(of_causal_types())}
MORE = ("facebook/opt-350m", "google/gemma-4-E2B-it", "google-t5/t5-small")
CHOSEN = [*FIRST.values(), *(entry for name in MORE if (entry := catalogue.find(name)))]
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapt(given: Mapping[str, Any], targets: str | list[str]) -> tuple[int, set[str]]:
    """Number of adapter parameters and the names of the adapted matrices, from PEFT itself."""
    model = build_on_meta(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out of Conv1D, tied heads
        config = peft.LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(model, config, low_cpu_mem_usage=True)  # its matrices are on meta too
    names = [(name, value) for name, value in wrapped.named_parameters() if ".lora_" in name]
    adapted = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name, _ in names}
    return sum(value.numel() for _, value in names), adapted


def expected_names(model: ModelSpec, targets: Targets) -> set[str]:
    """Dotted names with layer numbers left out, stacked parameters by the names of PEFT's nested wrappers."""
    names = set()
    for layer, _, linears in lora_linears(model, targets):
        for linear in linears:
            name = re.sub(r"\.down_proj$", "", re.sub(r"gate_up_proj$", "base_layer", linear.name))
            plain = linear.module != "parameter" or linear.role == "router"
            names.add(f"{layer.path}.{linear.name if plain else name}".lstrip("."))
    return names


def without_numbers(names: set[str], model: ModelSpec) -> set[str]:
    """PEFT's names with the layer's number removed and prefixes of outer matrices dropped."""
    paths = [layer.path for layer in (*model.layer_kinds, *(layer for layer, _ in model.idle_layers))]
    outer = {linear.name for linear in (*model.outer_linears, *((model.head,) if model.head else ()))}
    stripped = set()
    for name in names:
        path = max((path for path in paths if name.startswith(f"{path}.")), key=len, default="")
        if not path:
            assert name.rpartition(".")[2] in outer, name
            stripped.add(name.rpartition(".")[2])
        else:
            stripped.add(path + re.sub(r"^\.\d+\.", ".", name.removeprefix(path)))
    return stripped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "targets"), some(paired(CHOSEN, ("all-linear", "attention", ("lm_head", *SEVEN)), 1), 2)
)
def test_targets_equal_peft(entry: catalogue.CatalogueEntry, targets: Targets) -> None:
    config = shallow(entry.config)
    spec = spec_from_config(config, model_id=entry.model_id, source="test")
    for_peft = peft_target_modules(spec, targets)
    try:
        expected = num_lora_params(spec, targets, RANK)
    except SetupError:
        with pytest.raises(ValueError, match=r"not supported|not found|Cannot convert"):
            adapt(config, for_peft)
        return
    num, names = adapt(config, for_peft)
    assert num == expected
    assert without_numbers(names, spec) == expected_names(spec, targets)
