"""The kinds of adapters: what a setup says of them, and what they cost."""

import pytest

from planner.choices.adapters import ADAPTERS
from planner.errors import SetupError
from planner.interchange import setup_from_dict, setup_to_dict
from planner.setup import TrainSetup


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_goes_through_the_interchange_form(kind: str) -> None:
    setup = setup_from_dict({"adapter": kind})
    assert setup.adapter == kind
    assert setup_to_dict(setup).get("adapter", "lora") == kind
    assert setup_from_dict(setup_to_dict(setup)) == setup


def test_lora_is_the_default_and_is_not_written() -> None:
    assert TrainSetup().adapter == "lora"
    assert "adapter" not in setup_to_dict(TrainSetup())


def test_an_unknown_adapter_and_a_full_one_are_refused() -> None:
    with pytest.raises(SetupError, match="adapter must be one of"):
        setup_from_dict({"adapter": "houlsby"})
    with pytest.raises(SetupError, match="belongs to method"):
        setup_from_dict({"method": "full", "adapter": "rslora"})
