"""Writes planner/data/models.jsonl from a directory of sourced configurations.

    python tools/build_catalogue.py DIRECTORY_OF_JSON planner/data/models.jsonl

Each input is a config.json with facts of ours in fields that begin with "_". Each output line is one model, in our own
form, with the lower-case names first so that a reader finds its line without parsing the rest.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

FACTS = {
    "_built_class": "built_class",
    "_params_meta": "num_params",
    "_params_meta_multimodal": "num_params_multimodal",
    "_built_class_multimodal": "built_class_multimodal",
    "_tied": "tied",
    "_params_published": "published_num_params",
    "_params_published_source": "published_source",
    "_params_published_is_sibling": "published_of_sibling",
    "_source": "config_source",
    "_fields_from_memory": "guessed_fields",
    "_note": "note",
}
IGNORED = {"_id", "_aliases", "_auto_class", "_params_embedding", "_params_lm_head_untied"}


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """One model in our form, names to be filled in."""
    unknown = {key for key in raw if key.startswith("_")} - FACTS.keys() - IGNORED
    if unknown:
        raise SystemExit(f"{raw['_id']}: unknown facts {sorted(unknown)}")
    aliases = sorted({alias for alias in raw["_aliases"] if alias.lower() != raw["_id"].lower()}, key=str.lower)
    model = {"names": [], "id": raw["_id"], "aliases": aliases}
    model |= {ours: raw[theirs] for theirs, ours in FACTS.items() if theirs in raw}
    model["config"] = {key: value for key, value in raw.items() if not key.startswith("_")}
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    models = [convert(json.loads(path.read_text())) for path in sorted(arguments.source.glob("*.json"))]
    full = Counter(name.lower() for model in models for name in (model["id"], *model["aliases"]))
    twice = [name for name, count in full.items() if count > 1]
    if twice:
        raise SystemExit(f"names of two models: {twice}")
    # The bare name after the slash works too, where only one model has it.
    bare = Counter(name.rpartition("/")[2] for name in full)
    for model in models:
        names = {name.lower() for name in (model["id"], *model["aliases"])}
        names |= {short for name in names if bare[short := name.rpartition("/")[2]] == 1 and short not in full}
        model["names"] = [model["id"].lower(), *sorted(names - {model["id"].lower()})]
    models.sort(key=lambda model: model["names"][0])
    lines = [json.dumps(model, ensure_ascii=True, separators=(",", ":")) for model in models]
    arguments.target.write_text("\n".join(lines) + "\n")
    print(f"{len(models)} models, {sum(len(model['names']) for model in models)} names")


if __name__ == "__main__":
    main()
