"""Where the tables and texts lie that ship beside the code."""

import json
from functools import cache
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
MODEL_TYPES = DATA / "model_types.json"


@cache
def model_types(of: str) -> frozenset[str]:
    """Types of models of which installed libraries say something, as `tools/build_types.py` read them: "unscored" and
    "expert_plan" (transformers 5.23), "liger_loss" (liger-kernel 0.8.5)."""
    return frozenset(json.loads(MODEL_TYPES.read_text(encoding="utf-8"))[of])
