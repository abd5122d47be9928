"""What installed libraries say of each type of model, in planner/data/model_types.json.

    python -m tools.build_types

Needs transformers and liger-kernel, no torch kernels: seconds. `tests/planner/test_model_types.py` compares what is
kept with the installed libraries.
"""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

from planner.core.shipped import MODEL_TYPES
from planner.models import catalogue


def main() -> None:
    facts = {**of_transformers(), "liger_loss": of_liger()}
    lines = (f" {json.dumps(name)}: {json.dumps(sorted(types))}" for name, types in sorted(facts.items()))
    MODEL_TYPES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def of_transformers() -> dict[str, set[str]]:
    """Types of which it builds text but no class that scores a sequence; those with a plan that dispatches tokens to
    experts on other GPUs; of these, those whose plan splits dense matrices too."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    listed = {entry.model_type for entry in catalogue.entries()}
    text = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *listed}
    plans = {}
    for name in CONFIG_MAPPING:  # a model that sees is asked by the type of the whole
        parts = getattr(CONFIG_MAPPING[name], "sub_configs", {})
        decoder = parts.get("text_config", CONFIG_MAPPING[name])
        plan = getattr(decoder, "base_model_ep_plan", None) or {}
        if "ep_dispatch_experts" in plan.values():
            plans[name] = plan.values()
    return {
        "unscored": text - {*auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES},
        "expert_plan": {*plans},
        "dense_expert_plan": {name for name, plan in plans.items() if "rowwise" in plan},
    }


def of_liger() -> set[str]:
    """Types whose loss its switch fuses with the head: of its table the functions that do unless they are told not
    to. Nothing of it is imported, which asks for Triton.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    package = find_spec("liger_kernel")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("liger_kernel")
    tree = ast.parse((Path(package.origin).parent / "transformers" / "monkey_patch.py").read_text())
    fuses = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args][-len(node.args.defaults) or 1 :]
            defaults = dict(zip(names, map(ast.unparse, node.args.defaults), strict=False))
            fuses |= {node.name} if defaults.get("fused_linear_cross_entropy") == "True" else set()
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)
              and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN"]  # fmt: skip
    assert isinstance(tables[0], ast.Dict)
    pairs = zip(tables[0].keys, tables[0].values, strict=True)
    return {ast.literal_eval(key) for key, value in pairs if key and ast.unparse(value) in fuses}


if __name__ == "__main__":
    main()
