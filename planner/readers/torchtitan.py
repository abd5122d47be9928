"""torchtitan configs (`torchtitan.train --job.config_file FILE`) as setups. Defaults of torchtitan 0.2.2."""

from typing import Any

from planner.errors import ConfigError
from planner.models.spec import ModelSpec
from planner.readers import common, schema
from planner.readers.sharding import Sharding
from planner.readers.types import ReadConfig
from planner.readers.values import Settings
from planner.tools.others import TORCHTITAN_ADAMW

FORMAT = "torchtitan"
PRECISIONS = {
    ("float32", "float32"): "fp32",
    ("float32", "bfloat16"): "bf16-mixed",
    ("bfloat16", "bfloat16"): "bf16-pure",
    ("bfloat16", "float32"): "bf16-pure",
}
"""(training.dtype, training.mixed_precision_param) -> precision."""
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe"}


def is_config(values: dict[str, Any]) -> bool:
    """Whether a TOML file's blocks are torchtitan's, most of them."""
    titles = {key.partition(".")[0] for key in schema.known(FORMAT)}
    strangers = set(values) - titles
    return bool(titles & set(values)) and 2 * len(strangers) <= len(values)


def read(
    values: dict[str, Any], name: str, model: ModelSpec | None = None, *, sharding: Sharding | None = None
) -> ReadConfig:
    """The setup of a torchtitan config.

    Raises:
        ConfigError: an unknown key, a wrong value, degrees that do not fit the GPUs.
    """
    known = schema.known(FORMAT)
    top = Settings(values, name)
    top.refuse_unknown((key.split(".")[0] for key in known), FORMAT)
    parts = {title: Settings(top.mapping(title), f"{name}: {title}") for title in values}
    for title, block in parts.items():
        keys = (key.split(".")[1] for key in known if key.startswith(f"{title}."))
        block.refuse_unknown(keys, f"torchtitan's {title}")

    def part(title: str) -> Settings:
        return parts.setdefault(title, Settings({}, f"{name}: {title}"))

    training = part("training")
    pair = (training.text("dtype", "float32"), training.text("mixed_precision_param", "bfloat16"))
    if pair not in PRECISIONS:
        raise training.error("dtype", "float32 or bfloat16", pair[0])
    fields: dict[str, Any] = {
        "method": "full",
        "lora_rank": 0,
        "loss": "full",
        "attention": "sdpa",
        "packing": True,
        "precision": PRECISIONS[pair],
        "optimizer": _optimizer(part("optimizer")),
        "checkpointing": _checkpointing(part("activation_checkpoint")),
        "compile": part("compile").flag("enable", False),
        "seq_len_tokens": training.integer("seq_len", 2048, at_least=1),
    }
    fields |= _spread(part("parallelism"), training, sharding or Sharding())
    return ReadConfig(
        format=FORMAT,
        path=name,
        model_id=part("model").optional_text("hf_assets_path"),
        setup=common.build(top, fields),
        assumptions=tuple(one for settings in parts.values() for one in settings.assumptions),
        approximations=tuple(one for settings in parts.values() for one in settings.approximations),
        dataset=training.optional_text("dataset_path") or training.optional_text("dataset"),
        values=values,
    )


def _optimizer(settings: Settings) -> str:
    if settings.text("name", "AdamW") not in ("Adam", "AdamW"):
        raise settings.error("name", "Adam or AdamW", settings.raw("name"))
    word = settings.text("implementation", "fused")
    if word not in TORCHTITAN_ADAMW:
        raise settings.error("implementation", f"one of {', '.join(TORCHTITAN_ADAMW)}", word)
    return TORCHTITAN_ADAMW[word]


def _checkpointing(settings: Settings) -> int:
    mode = settings.text("mode", "selective")
    if mode in ("full", "none"):
        return int(mode == "full")
    option = str(settings.raw("selective_ac_option", "2"))
    if mode == "selective" and option.isdigit():
        return int(option)
    settings.approximate(f"activation checkpointing by {mode} {option} is counted as checkpointing every layer")
    return 1


def _spread(settings: Settings, training: Settings, sharding: Sharding) -> dict[str, Any]:
    """GPUs, degrees and batch: a degree of -1 takes the GPUs that the others leave."""
    tensor = settings.integer("tensor_parallel_degree", 1, at_least=1)
    stages = settings.integer("pipeline_parallel_degree", 1, at_least=1)
    copies = settings.integer("data_parallel_replicate_degree", 1, at_least=1)
    shard = int(settings.real("data_parallel_shard_degree", -1))
    others = tensor * stages * copies
    gpus = others * shard if shard > 0 else max(sharding.num_gpus, others)
    if shard < 0:
        shard = gpus // others
        if sharding.num_gpus == 1:
            settings.assume(f"the number of GPUs is not in the file: {gpus} taken (say how many with --gpus)")
    if gpus != others * shard:
        raise ConfigError(f"{settings.name}: degrees of {others} do not divide {gpus} GPUs", hint="give --gpus")
    for key in ("context_parallel_degree", "expert_parallel_degree"):
        if settings.integer(key, 1, at_least=1) > 1:
            settings.approximate(f"{key} splits a step further: counted as if it did not")
    local = training.integer("local_batch_size", 8, at_least=1)
    total = int(training.real("global_batch_size", -1))
    fields: dict[str, Any] = {"num_gpus": gpus, "tensor_degree": tensor, "pipeline_degree": stages}
    if stages > 1:
        micro = settings.integer("pipeline_parallel_microbatch_size", 1, at_least=1)
        fields |= {"micro_batch_seqs": micro, "accumulation_steps": max(1, local // micro)}
        word = settings.text("pipeline_parallel_schedule", "1F1B").lower()
        if word not in SCHEDULES:
            settings.approximate(f"the pipeline schedule {word} is counted as 1F1B")
        fields["pipeline_schedule"] = SCHEDULES.get(word, "1f1b")
    else:
        steps = total // (local * shard * copies) if total > 0 else 1
        fields |= {"micro_batch_seqs": local, "accumulation_steps": max(1, steps)}
    if shard * copies == 1:
        return fields | {"parallel": "none"}
    if shard == 1:
        return fields | {"parallel": "ddp"}
    policy = settings.text("fsdp_reshard_after_forward", "default")
    fields |= {
        "parallel": "fsdp2",
        "shard_degree": shard if copies > 1 else 0,
        "reshard_after_forward": policy == "always" or (policy == "default" and stages == 1),
    }
    if training.flag("enable_cpu_offload", False):
        fields["offload"] = "parameters"
    return fields
