"""Copies of the catalogue's models, which their publishers quantize and name alike."""

import re
from collections.abc import Mapping
from typing import Any

from planner.core.errors import UnknownModelError
from planner.models import catalogue
from planner.models.stored import PUBLISHERS

DYNAMIC = "-unsloth-bnb-4bit"
"""Ending of a copy of which some matrices stay in 16 bits: which ones is known to its config.json alone."""
DYNAMIC_MORE = "but for what its config.json alone names: weights of 8 to 24 % more in Unsloth's notebooks"
"""Measured: after loading, five of unslothai/notebooks print 8 (Gemma 4 31B), 13, 18 (Phi-4), 22 (Qwen3-14B) and 24 %
(Gemma 3 27B) more than plain 4 bits take, where plain copies print 1 and 4; unsloth.ai/blog/dynamic-4bit says 10."""
IN_4_BITS = "-bnb-4bit"
ITS_OWN_NAMES = {
    "unsloth/tinyllama": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "unsloth/tinyllama-chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "unsloth/zephyr-sft": "HuggingFaceH4/mistral-7b-sft-beta",
}
"""Unsloth's copies that are not named after what they copy. Source: unsloth 2026.10.9 `models/mapper.py`."""
QUANTIZED = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
"""Of every `unsloth/...-bnb-4bit` (as in their config.json, for example mistral-7b-v0.3-bnb-4bit)."""


PACKED = re.compile(r"[-_](awq|gptq)(?:[-_](?:int|w)?(4|8)(?:bit)?)?$", re.IGNORECASE)
"""Ending of a copy whose weights are packed, whoever publishes it, and its bits (4 unless it says 8)."""
FOR_INFERENCE = re.compile(r"[-_.]gguf\b|[-_.:]i?q\d_[\dk]|\bmlx\b|:.+-(?:fp16|qat)$", re.IGNORECASE)
"""In names of files and copies for inference (llama.cpp's, Ollama's, MLX's): the original is what is trained."""
STORED_AS = re.compile(r"(?:[-_.:](?:gguf|mlx|qat|i1|ud|i?q\d(?:_[a-z\d]+)*|b?fp?16|\d-?bit))+$", re.IGNORECASE)


def plain_name(name: str) -> tuple[str, dict[str, Any]]:
    """The name of a copy without what says how it is stored, and what its config.json has more for that."""
    if packed := PACKED.search(name):
        quantization = {"quant_method": packed[1].lower(), "bits": int(packed[2] or 4)}
        return name[: packed.start()], {"quantization_config": quantization}
    if FOR_INFERENCE.search(name):
        return STORED_AS.sub("", name).replace("\\", "/").rpartition("/")[2], {}
    owner, _, model = name.lower().rpartition("/")
    if owner not in PUBLISHERS or not model.endswith(IN_4_BITS):
        return ITS_OWN_NAMES.get(name.lower(), name), {}
    ending = DYNAMIC if model.endswith(DYNAMIC) else IN_4_BITS
    plain = name[: -len(ending)]
    return ITS_OWN_NAMES.get(plain.lower(), plain), {"quantization_config": dict(QUANTIZED)}


def unfused(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json of Unsloth's copy of a Phi-3 or Phi-4 has else: Llama's layers, with q, k, v, gate and up apart
    (not Phi-4-mini's, whose rotary embedding is partial).

    Source: unslothai/notebooks c. August 2026, Phi_4-Conversational ("Fast Llama patching"), Phi_3.5_Mini,
    Phi_3_Medium ("patched 40 layers with 40 QKV layers"); unsloth.ai/blog/phi4.
    """
    fused = config.get("model_type") == "phi3" and "partial_rotary_factor" not in config
    llamas = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return llamas if fused and name.lower().startswith("unsloth/") else {}


def mirrored(name: str) -> tuple[catalogue.CatalogueEntry | None, dict[str, Any]]:
    """The catalogue's model of which a name is a copy, and what the copy's config.json has more; None: of none, or not
    known of which layers."""
    from planner.models.name_matching import understand  # late: an id of the catalogue needs none of it

    plain, extra = plain_name(name)
    if name.lower().partition("/")[0] not in PUBLISHERS or name.lower().endswith(DYNAMIC):
        return None, {}
    try:
        taken = understand(plain)
    except UnknownModelError:  # of several
        taken = None
    entry = catalogue.find(taken.catalogue_id) if taken is not None else None
    return (entry, extra | unfused(plain, entry.config)) if entry is not None else (None, {})
