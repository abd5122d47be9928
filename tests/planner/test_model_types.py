"""`planner/data/model_types.json` is what the installed libraries say (`python -m tools.build_types` writes it)."""

from importlib.util import find_spec

import pytest

from planner.core.shipped import model_types
from tools.build_types import of_liger, of_transformers


def test_what_transformers_says_of_types_is_kept() -> None:
    for name, types in of_transformers().items():
        assert model_types(name) == types, name
    seeing, none = {"qwen3_vl_moe", "glm4v_moe", "ernie4_5_vl_moe"}, {"dbrx", "jetmoe", "llama4", "longcat_flash"}
    assert seeing <= model_types("expert_plan")
    assert not none & model_types("expert_plan")


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed here")
def test_liger_fuses_the_loss_of_the_types_that_its_own_table_has() -> None:
    assert model_types("liger_loss") == of_liger()
