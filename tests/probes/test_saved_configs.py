"""A config.json that transformers itself saves describes the same model as the one it read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from meta_models import auto_config

from planner.models import catalogue
from planner.models.families import spec_from_config
from planner.models.resolve import resolve_model
from tests.whole import these

FIRST = {entry.model_type: entry for entry in reversed(catalogue.entries())}.values()


@pytest.mark.slow
@pytest.mark.parametrize("entry", these(FIRST, catalogue.entries()), ids=lambda entry: entry.model_id)
def test_saved_config_gives_the_same_spec(entry: catalogue.CatalogueEntry, tmp_path: Path) -> None:
    """transformers renames fields, fills in defaults and leaves others out: none of it may change the inventory."""
    config: Mapping[str, Any] = entry.config
    built = auto_config(config)
    built.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == entry.model_type
    from_saved = resolve_model(str(tmp_path))
    original = spec_from_config(config, model_id=str(tmp_path), source="")
    assert from_saved == original
