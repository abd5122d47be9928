"""The `ModelSpec` of a configuration that no adapter knows: its model is built on meta tensors and read.

    python -P -m probes.module_tree < config.json > spec.json

Nothing of `modeling_*.py` that a model brings along is run.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from planner.models.spec import ModelSpec
from planner.setup.interchange import to_jsonable
from probes.stack.build import bare_model
from probes.stack.configs import load_config
from probes.stack.tree import spec_of_model


def spec_of_tree(raw_config: Mapping[str, Any], *, model_id: str, source: str) -> ModelSpec:
    """The module inventory of the model that transformers builds of a raw configuration.

    Raises:
        ValueError: as `spec_of_model`, and whatever transformers says of a configuration that it does not build.
    """
    model = bare_model(load_config(raw_config), torch.bfloat16, "eager")
    return spec_of_model(model, raw_config, model_id=model_id, source=source)


def answer(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    """{"spec": ...} or {"failure": why}, as JSON's own types."""
    try:
        return {"spec": to_jsonable(spec_of_tree(raw_config, model_id="", source=""))}
    except Exception as error:  # whatever transformers makes of a stranger's configuration
        return {"failure": f"{type(error).__name__}: {str(error).strip()[:300]}"}


def main() -> int:
    """Reads a config.json on stdin; writes the answer on stdout."""
    print(json.dumps(answer(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
