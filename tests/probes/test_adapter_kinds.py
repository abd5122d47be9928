"""Every kind of adapter as peft itself builds it: how many parameters it trains (tests/planner/test_formula_grid.py
holds the memory of a step with it)."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.core.errors import SetupError  # noqa: E402
from planner.frameworks.exporters import EXPORTERS  # noqa: E402
from planner.frameworks.readers.common import PEFT_DEFAULT_TARGETS  # noqa: E402
from planner.memory.trained import trained_parameters  # noqa: E402
from planner.models import catalogue, module_tree  # noqa: E402
from planner.models.families import spec_from_config  # noqa: E402
from planner.options.adapters import ADAPTERS  # noqa: E402
from planner.setup.interchange import setup_from_dict  # noqa: E402
from probes.module_tree import answer  # noqa: E402
from probes.stack.adapters import add_adapters  # noqa: E402
from tests.planner.launch_sweep import request  # noqa: E402
from tests.probes.dryrun_small import small_config  # noqa: E402
from tests.probes.meta_models import build_on_meta  # noqa: E402

module_tree.read_with(answer)  # torch is loaded: no process for each tree
TYPES = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox")
"""Six ways to name and shape a layer: grouped keys, norms of heads, a width of heads of its own, fused matrices, Conv1D
with biases, LayerNorm with a parallel block."""


def test_trained_parameters_equal_pefts_of_every_kind() -> None:
    """All kinds on six model types; the model is built once per type and peft's wrapping is undone by building anew."""
    for model_type in TYPES:
        config = small_config(model_type)
        spec = spec_from_config(config, model_id=model_type, source="test")
        for kind, row in ADAPTERS.items():
            setup = setup_from_dict(
                {
                    "adapter": kind,
                    "checkpointing": row.checkpointing,
                    "lora_rank": 6 if row.size else 0,
                    **({"method": "qlora"} if "none" not in row.quantizations else {}),
                }
            )
            if kind == "oft" and model_type == "gpt2":  # neither side takes Conv1D
                with pytest.raises(SetupError, match="Conv1D"):
                    trained_parameters(spec, setup)
                continue
            with torch.device("meta"):
                wrapped = add_adapters(build_on_meta(config), setup)
            real = sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)
            assert trained_parameters(spec, setup).num == real, (model_type, kind)


def test_matrices_taken_where_none_are_named_are_pefts() -> None:
    """Of every type of the catalogue that peft has a default for."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFTS

    types = {model.model_type for name in catalogue.names() if (model := catalogue.load(name))} & PEFTS.keys()
    by_name = {model_type for model_type in types if isinstance(PEFTS[model_type], list)}
    ours = {model_type: tuple(PEFT_DEFAULT_TARGETS[model_type]) for model_type in by_name}
    assert ours == {model_type: tuple(PEFTS[model_type]) for model_type in by_name}


def test_the_scripts_own_lines_train_as_many_parameters() -> None:
    """The configuration that a launch script of transformers holds, given to peft."""
    import peft

    config = small_config("llama")
    spec = spec_from_config(config, model_id="llama", source="test")
    for kind, row in ADAPTERS.items():
        targets = {"lora_targets": ["k_proj", "v_proj", "down_proj"]} if kind == "ia3" else {}
        if kind == "adalora" or "none" not in row.quantizations:
            continue
        setup = setup_from_dict({"adapter": kind, "checkpointing": row.checkpointing, "loss": "full", **targets})
        text = EXPORTERS["hf"](request(setup, model=spec)).files[0].text
        name = "lora" if row.form == "low-rank" else "adapter"
        lines = text[text.index(f"\n{name} = ") :]
        made: dict[str, Any] = {}
        exec(lines[: lines.index("\n)\n") + 3].replace("pissa_niter_16", "gaussian"), vars(peft), made)
        with torch.device("meta"):
            wrapped = peft.get_peft_model(build_on_meta(config), made[name])
        real = sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)
        assert trained_parameters(spec, setup).num == real, kind
