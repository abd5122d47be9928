"""What "attention" adapts on the built module tree is what the planner and the launch files say it adapts."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.models import catalogue  # noqa: E402
from planner.models.targets import peft_target_modules  # noqa: E402
from probes.stack import bare_model, load_config, num_layers, truncated_config  # noqa: E402
from probes.stack.adapters import attention_targets  # noqa: E402

FIRST_OF_TYPE = {entry.model_type: entry for entry in reversed(catalogue.entries())}
DEPTH = 4


@pytest.mark.parametrize("model_type", sorted(FIRST_OF_TYPE))
def test_attention_targets_agree_with_the_planner(model_type: str) -> None:
    entry = FIRST_OF_TYPE[model_type]
    config = load_config(entry.config)
    config = truncated_config(config, min(DEPTH, num_layers(config)))
    model = bare_model(config, torch.bfloat16, "eager")
    spec = catalogue.load(entry.model_id)
    assert spec is not None
    wanted = peft_target_modules(spec, "attention")
    names = [name for name, _ in model.named_modules()]
    if isinstance(wanted, str):
        expected = {name for name in names if re.fullmatch(wanted, name)}
    else:
        expected = {name for name in names if any(name == one or name.endswith(f".{one}") for one in wanted)}
    assert set(attention_targets(model)) == expected
