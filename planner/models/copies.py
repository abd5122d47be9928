"""Copies of the catalogue's models, which their publishers quantize and name alike."""

from typing import Any

from planner.models import catalogue
from planner.models.adapters import spec_from_config
from planner.models.spec import ModelSpec

PUBLISHERS = ("unsloth", "nousresearch")
DYNAMIC = "-unsloth-bnb-4bit"
"""Ending of a copy of which some layers alone are in 4 bits: which ones is known to its config.json alone."""
IN_4_BITS = "-bnb-4bit"
QUANTIZED = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
"""Of every `unsloth/...-bnb-4bit` (as in their config.json, for example mistral-7b-v0.3-bnb-4bit)."""


def mirrored(name: str) -> tuple[catalogue.CatalogueEntry | None, dict[str, Any]]:
    """The catalogue's model of which a name is a copy, and what the copy's config.json has more; None: of none, or not
    known of which layers."""
    owner, _, model = name.lower().partition("/")
    if owner not in PUBLISHERS or model.endswith(DYNAMIC):
        return None, {}
    quantized = model.endswith(IN_4_BITS)
    wanted = _bare(model.removesuffix(IN_4_BITS))
    found = [one for one in catalogue.entries() if any(_bare(full.partition("/")[2]) == wanted for full in one.names)]
    extra = {"quantization_config": dict(QUANTIZED)} if quantized else {}
    return (found[0], extra) if len(found) == 1 else (None, {})


def _bare(model: str) -> str:
    return model.removeprefix("meta-")


def load(name: str) -> ModelSpec | None:
    """The copy under its original's name, in the type in which it is stored; None where it is no copy that is known."""
    entry, extra = mirrored(name)
    plain = catalogue.load(entry.model_id) if entry is not None else None
    if plain is None or not extra:
        return plain
    return spec_from_config({**plain.config, **extra}, model_id=plain.model_id, source=f"{name}, by its name")
