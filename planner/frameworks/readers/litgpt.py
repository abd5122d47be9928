"""litgpt configs (`litgpt finetune_lora --config FILE`) as setups. Defaults of litgpt 0.5.13."""

from typing import Any

from planner.core.errors import NotPlanned
from planner.frameworks.readers import common
from planner.frameworks.readers.common import config, settings_fields
from planner.frameworks.readers.sharding import parallel_of
from planner.frameworks.readers.types import ReadConfig, UpperBound
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.others import LITGPT
from planner.models.stored import quantizes

FORMAT = "litgpt"
PRECISIONS = {"bf16-true": "bf16-pure", "16-true": "bf16-pure", "bf16-mixed": "bf16-mixed", "16-mixed": "fp16-mixed",
              "32-true": "fp32"}  # fmt: skip
QUANTIZATIONS = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-double", "bnb.fp4": "nf4", "bnb.fp4-dq": "nf4-double",
                 "bnb.int8-training": "int8"}  # fmt: skip
PARTS = {
    "lora_query": ("q", "q_proj", True),
    "lora_key": ("k", "k_proj", False),
    "lora_value": ("v", "v_proj", True),
    "lora_projection": ("o", "o_proj", False),
}
"""Switch -> (role of the matrix, its usual name, whether it is on by itself)."""
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def read(settings: Settings) -> ReadConfig:
    """The setup of a litgpt fine-tuning.

    Source: Lightning-AI/litgpt `finetune/lora.py`, `finetune/full.py`, `args.py`.
    """
    train = settings.block("train")
    word = settings.text("precision", "bf16-true")
    if word not in PRECISIONS:
        raise NotPlanned(f"{settings.name}: precision {word} is not planned", hint=f"{', '.join(PRECISIONS)} are")
    devices = settings.integer("devices", settings.outside.num_gpus, at_least=1)
    if not train.has("max_seq_length"):
        settings.ask("seq_len_tokens", ": no train.max_seq_length: litgpt takes the longest sample")
    settings.approximate("litgpt's own model code is counted as transformers'")
    fields = {**_method(settings), **settings_fields(train, LITGPT, "micro_batch_seqs")}
    per_step = train.integer("global_batch_size", 16, at_least=1)
    fields |= {
        "precision": PRECISIONS[word],
        "accumulation_steps": max(1, per_step // (devices * fields["micro_batch_seqs"])),
        "seq_len_tokens": train.integer("max_seq_length", 2048, at_least=1),
        "optimizer": "adamw",
        "attention": "sdpa",
        "checkpointing": int(fields["method"] == "full" and devices > 1),
        "loss": "full",
        **parallel_of(settings, {"parallel": "fsdp2"} if devices > 1 else {}, devices),
    }
    folder = settings.optional_text("checkpoint_dir")
    named = "/".join(folder.strip("/").split("/")[-2:]) if folder else None
    return config(LITGPT, settings, fields, model_id=named)


def _method(settings: Settings) -> dict[str, Any]:
    word = settings.text("quantize", "none")
    if word != "none" and word not in QUANTIZATIONS:
        raise settings.error("quantize", f"one of {', '.join(QUANTIZATIONS)}", word)
    if not any(key.startswith("lora_") for key in settings.values):
        return {"method": "full", "quantization": "none", "lora_rank": 0}
    quantization = QUANTIZATIONS.get(word, "none")
    if quantization != "none" and settings.model is not None and not quantizes(settings.model):
        counted = f"litgpt quantizes its own {settings.model.model_type}: counted in 16 bits, as transformers' stays"
        settings.approximate(UpperBound(counted, "weights"))
    roles = {role: usual for key, (role, usual, on) in PARTS.items() if settings.flag(key, on)}
    roles |= MLP if settings.flag("lora_mlp", False) else {}
    return common.adapters(settings, LITGPT, quantization, _targets(settings, roles))


def _targets(settings: Settings, roles: dict[str, str]) -> tuple[str, ...]:
    """The matrices of these roles by the model's own names; litgpt adapts parts of a fused one, here all of it."""
    if settings.model is None:
        return tuple(roles.values())
    linears = [linear for layer in settings.model.layer_kinds for linear in layer.linears]
    fused = "qkv" if roles.keys() & {"q", "k", "v"} else ""
    gate_up = "gate_up" if roles.keys() & {"gate", "up"} else ""
    names = tuple(dict.fromkeys(linear.leaf for linear in linears if linear.role in (*roles, fused, gate_up)))
    if any(linear.role == fused for linear in linears) and not roles.keys() >= {"q", "k", "v"}:
        settings.approximate("adapters on parts of a fused matrix of queries, keys and values are counted on all of it")
    return names or tuple(roles.values())
