"""Writes planner/data/module_trees.jsonl.gz: the module trees of the catalogue's models, and of types that it lacks
those that see (benchmarks/image_models.py), where no adapter knows the type; and beside the rows of benchmarks/data
those of the configurations that stand in rows.

    python -m tools.build_trees

Needs torch, transformers, peft and timm (PYTHONPATH=.:.venv/timm), no weights: a minute.
`tests/probes/test_model_inventory.py` compares what is kept with the installed transformers, module by module.
"""

import copy
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.image_models import configs
from benchmarks.multi_gpu_points import FILE as MULTI_GPU
from benchmarks.multi_gpu_scaling import SHAPES, config_of
from benchmarks.speed_points import FILE, TREES
from planner.models import catalogue
from planner.models.families import has_family
from planner.models.module_tree import SHIPPED, tree_digest
from probes.module_tree import spec_of_tree

_OWN = ("model_id", "config", "config_source", "from_tree", "taken_as", "like")
"""What a spec says of where it came from."""


def main() -> None:
    listed = [entry.config for entry in catalogue.entries()]
    types = {config["model_type"] for config in listed}
    write(SHIPPED, listed + [config for config in configs().values() if config["model_type"] not in types])
    rows = [json.loads(line) for file in (FILE, MULTI_GPU) for line in file.read_text(encoding="utf-8").splitlines()]
    shapes = [config_of(*shape) for _, *shape in SHAPES]
    write(TREES, [row["config"] for row in rows if row.get("config")] + shapes)


def _lean(value: Any) -> Any:
    """As JSON's own types, without what is as the records have it by default."""
    if isinstance(value, tuple):
        return [_lean(element) for element in value]
    if not is_dataclass(value):
        return value
    pairs = ((field, getattr(value, field.name)) for field in fields(value))
    return {field.name: _lean(content) for field, content in pairs if content != field.default}


def write(path: Path, configs: Sequence[Mapping[str, Any]]) -> None:
    """The trees of those whose types have no adapter."""
    lines = {}
    for config in configs:
        if not has_family(config["model_type"]) and tree_digest(config) not in lines:
            spec = _lean(spec_of_tree(config, model_id="", source=""))
            stored = {name: value for name, value in spec.items() if name not in _OWN} | {"model_id": ""}
            raw = copy.deepcopy(dict(config))  # transformers writes into nested objects
            saved = json.loads(AutoConfig.for_model(raw.pop("model_type"), **raw).to_json_string())
            digests = sorted({tree_digest(config), tree_digest(saved)})
            lines[tree_digest(config)] = json.dumps({"digests": digests, "spec": stored}, separators=(",", ":"))
    text = "".join(f"{line}\n" for line in sorted(lines.values()))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{path.name}: {len(lines)} trees, {len(text):,} bytes, {path.stat().st_size:,} compressed")


if __name__ == "__main__":
    main()
