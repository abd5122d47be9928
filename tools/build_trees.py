"""Writes planner/data/module_trees.jsonl.gz: the module trees of the catalogue's models whose types have no adapter.

    python -m tools.build_trees

Needs torch, transformers and peft, no weights: a minute. `tests/probes/test_model_inventory.py` compares what is kept
with the installed transformers, module by module.
"""

import copy
import gzip
import json

from transformers import AutoConfig

from planner.interchange import to_jsonable
from planner.models import catalogue
from planner.models.adapters import has_adapter
from planner.models.module_tree import SHIPPED, tree_digest
from probes.module_tree import spec_of_tree

_OWN = ("model_id", "config", "config_source", "from_tree", "taken_as", "like")
"""What a spec says of where it came from."""


def main() -> None:
    """Builds every such model on meta tensors and keeps what it holds."""
    lines = []
    for entry in catalogue.entries():
        if not has_adapter(entry.model_type):
            spec = to_jsonable(spec_of_tree(entry.config, model_id="", source=""))
            kept = {name: value for name, value in spec.items() if name not in _OWN} | {"model_id": ""}
            raw = copy.deepcopy(dict(entry.config))  # transformers writes into nested objects
            saved = json.loads(AutoConfig.for_model(raw.pop("model_type"), **raw).to_json_string())
            digests = sorted({tree_digest(entry.config), tree_digest(saved)})
            lines.append(json.dumps({"digests": digests, "spec": kept}, separators=(",", ":")))
    text = "".join(f"{line}\n" for line in sorted(lines))
    SHIPPED.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(lines)} trees, {len(text):,} bytes, {SHIPPED.stat().st_size:,} compressed")


if __name__ == "__main__":
    main()
