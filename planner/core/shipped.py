"""Where the tables and texts lie that ship beside the code."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
MODEL_TYPES = DATA / "model_types.json"


def model_types(of: str) -> frozenset[str]:
    """Types of models of which libraries say something, as `tools/build_types.py` read their source."""
    return frozenset(by_model_type(of))


@cache
def by_model_type(of: str) -> Mapping[str, Any]:
    """The same of what has a value, by type; None of what has none."""
    types = _model_types()[of]
    return types if isinstance(types, dict) else dict.fromkeys(types)


@cache
def _model_types() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(MODEL_TYPES.read_text(encoding="utf-8"))
    return read
