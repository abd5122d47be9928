"""Where the tables and texts lie that ship beside the code."""

import json
from functools import cache
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
MODEL_TYPES = DATA / "model_types.json"


def model_types(of: str) -> frozenset[str]:
    """Types of models of which installed libraries say something, as `tools/build_types.py` read them: "unscored",
    "expert_plan" and "dense_expert_plan" (transformers 5.23), "liger_loss" (liger-kernel 0.8.5)."""
    return _model_types()[of]


@cache
def _model_types() -> dict[str, frozenset[str]]:
    return {of: frozenset(types) for of, types in json.loads(MODEL_TYPES.read_text(encoding="utf-8")).items()}
