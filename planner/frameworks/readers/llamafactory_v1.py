"""LLaMA-Factory's v1 configs (`model`, `peft_config`, `dist_config`, `train_dataset`) as setups."""

from typing import Any

from planner.frameworks.readers import common, schema
from planner.frameworks.readers.fields import config, said
from planner.frameworks.readers.sharding import Layout, parallel_of, zero_stage
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.llamafactory import V1

FORMAT = "llamafactory-v1"


def read(settings: Settings) -> ReadConfig:
    """The setup of a v1 config.

    Raises:
        ConfigError: an unknown key, a wrong value, not a training.
    """
    settings.note_unknown(schema.accepted(FORMAT), V1)
    dist, num_gpus = settings.block("dist_config"), settings.outside.num_gpus
    fields: dict[str, Any] = {
        **said(settings, V1, "micro_batch_seqs", "seq_len_tokens"),
        "checkpointing": int(settings.flag("enable_activation_checkpointing", True)),
        "precision": "bf16-autocast",
        "packing": "padding_free" in settings.text("batching_strategy", "normal"),
        "loss": "full",
        **_method(settings),
    }
    settings.assume("LLaMA-Factory's v1 is young: bf16 weights under autocast are assumed")
    fields |= parallel_of(settings, _layout(settings, dist))
    per_pass = fields["micro_batch_seqs"] * num_gpus
    total = settings.integer("global_batch_size", per_pass, at_least=1)
    fields["accumulation_steps"] = max(1, total // per_pass)
    for key in ("cp_size", "ep_size"):
        if settings.integer(key, 1) > 1:
            settings.approximate(f"{key} splits a step over GPUs further: counted as plain data parallelism")
    if settings.has("optim_config"):
        settings.approximate("optim_config's optimizer is counted as AdamW")
    if settings.text("model_class", "llm") != "llm":
        common.pictures(settings, "model_class")
    data = settings.raw("train_dataset")
    return config(V1, settings, fields, dataset=data if isinstance(data, str) else None)


def _method(settings: Settings) -> dict[str, Any]:
    peft = settings.block("peft_config")
    kind = peft.text("name", "full") if peft.values else "full"
    if kind != "lora":
        if kind == "freeze":
            settings.approximate("freeze tuning trains some layers: counted as full fine-tuning, an upper bound")
        return {"method": "full", "quantization": "none", "lora_rank": 0}
    quant = settings.block("quant_config")
    bits = quant.integer("quantization_bit", 4) if quant.values else 0
    quantization = {0: "none", 8: "int8"}.get(bits, "nf4-double")
    return {
        "method": "lora" if quantization == "none" else "qlora",
        "quantization": quantization,
        **said(peft, V1, "lora_rank"),
        "lora_dropout": peft.real("lora_dropout", 0.0),
        "lora_targets": common.targets(peft, peft.names("target_modules") or ("all",)),
    }


def _layout(settings: Settings, dist: Settings) -> Layout:
    if not dist.values:
        return {"parallel": "none"}
    word = dist.text("name", "fsdp2")
    if word == "deepspeed":
        return zero_stage(dist, dist.raw("config_file", {}))
    if word != "fsdp2" or dist.has("cp_size") or dist.has("ep_size"):
        settings.approximate(f"dist_config {word} with its extra dimensions is counted as plain FSDP")
    return {"parallel": "fsdp2"}
