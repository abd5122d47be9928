"""torchtitan's configs as setups: TOML (`torchtitan.train --job.config_file FILE`; defaults of torchtitan 0.2.2), and
Python functions (`--module llama3 --config llama3_8b`), never executed.

Source: pytorch/torchtitan `torchtitan/models/*/config_registry.py`, `torchtitan/config/configs.py`, November 2026.
"""

import ast
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError, NotATraining, Undetermined
from planner.core.shipped import by_model_type
from planner.frameworks.readers import training, versions
from planner.frameworks.readers.common import config
from planner.frameworks.readers.program.interpret import Reader
from planner.frameworks.readers.program.values import CallResult, Function
from planner.frameworks.readers.shell import flags
from planner.frameworks.readers.types import Missing, ReadConfig
from planner.frameworks.readers.values import FileContext, Settings
from planner.frameworks.tools.others import TORCHTITAN, TORCHTITAN_ADAMW
from planner.memory.attention_kernels import attention_refusal
from planner.setup.allowed import FLEX

FORMAT = "torchtitan"
PRECISIONS = {
    ("float32", "float32"): "fp32",
    ("float32", "bfloat16"): "bf16-mixed",
    ("bfloat16", "bfloat16"): "bf16-pure",
    ("bfloat16", "float32"): "bf16-pure",
}
"""(training.dtype, training.mixed_precision_param) -> precision."""
ASKED_BLOCKS = ("training", "optimizer", "activation_checkpoint", "compile", "parallelism", "model")
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe"}
TOKENS, CONTEXT, STEP = "num_tokens_per_microbatch_per_dp_rank", "max_context_length", "num_tokens_per_train_step"
DEFAULTS = {TOKENS: 16384, CONTEXT: 2048}
SERIES = {"llama3": "meta-llama/Llama-3.1-", "qwen3": "Qwen/Qwen3-"}
"""torchtitan's model -> the hub's, before its flavor (README: meta-llama/Llama-3.1-8B; 0.2.2 models/qwen3)."""
ASSETS = "assets/hf/"
REGISTRY_BLOCKS = ("training", "parallelism", "compile")


def is_config(values: dict[str, Any]) -> bool:
    """Whether a TOML file's blocks are torchtitan's, most of them."""
    titles = {key.partition(".")[0] for key in versions.known_settings(FORMAT)}
    strangers = set(values) - titles
    return bool(titles & set(values)) and 2 * len(strangers) <= len(values)


def read(settings: Settings) -> ReadConfig:
    top, parts = settings, _blocks(settings)
    training = parts["training"]
    pair = (training.text("dtype", "float32"), training.text("mixed_precision_param", "bfloat16"))
    if pair not in PRECISIONS:
        raise training.error("dtype", "float32 or bfloat16", pair[0])
    optimizer = parts["optimizer"]
    if optimizer.text("name", "AdamW") not in ("Adam", "AdamW"):
        raise optimizer.error("name", "Adam or AdamW", optimizer.raw("name"))
    word = optimizer.text("implementation", "fused")
    if word not in TORCHTITAN_ADAMW:
        raise optimizer.error("implementation", f"one of {', '.join(TORCHTITAN_ADAMW)}", word)
    fields: dict[str, Any] = {
        "method": "full",
        "lora_rank": 0,
        "loss": "full",
        "attention": "sdpa",
        "packing": True,
        "precision": PRECISIONS[pair],
        "optimizer": TORCHTITAN_ADAMW[word],
        "compile": parts["compile"].flag("enable", False),
        "seq_len_tokens": training.integer("seq_len", 2048, at_least=1),
        **_layout(parts["parallelism"], training),
    }
    fields |= _checkpointing(parts["activation_checkpoint"], fields)
    if top.model is not None and not attention_refusal(top.model, FLEX):
        fields["attention"] = FLEX
    data = training.optional_text("dataset_path") or training.optional_text("dataset")
    return config(TORCHTITAN, top, fields, model_id=_model(parts["model"], top), dataset=data)


def _model(settings: Settings, top: Settings) -> str | None:
    """The model's folder; where that is not here, the model of which torchtitan's own names say that it is."""
    path = settings.optional_text("hf_assets_path")
    local = path is None or path.startswith((".", "/", ASSETS))
    if path is not None and (not local or Path(path).is_dir() or top.outside.find(f"{path}/config.json")):
        return path
    name, flavor = settings.text("name", ""), settings.text("flavor", "")
    model = f"{SERIES[name]}{flavor}" if name in SERIES and flavor in by_model_type("torchtitan")[name].values() else ""
    if not model and path is not None and ASSETS in path:
        model = Path(path).name  # of the hub's repository: scripts/download_hf_assets.py
    if model:
        top.assume(f"{path or 'hf_assets_path'} is not here: the model is taken to be {model}")
    return model or path


def _blocks(top: Settings) -> dict[str, Settings]:
    accepted = versions.known_settings(FORMAT)
    top.refuse_unknown((key.split(".")[0] for key in accepted), FORMAT)
    parts = {title: top.block(title) for title in (*top.values, *ASKED_BLOCKS)}
    for title, block in parts.items():
        keys = (key.split(".")[1] for key in accepted if key.startswith(f"{title}."))
        block.refuse_unknown(keys, f"torchtitan's {title}")
    return parts


def _layout(settings: Settings, training: Settings) -> dict[str, Any]:
    tensor = settings.integer("tensor_parallel_degree", 1, at_least=1)
    stages = settings.integer("pipeline_parallel_degree", 1, at_least=1)
    copies = settings.integer("data_parallel_replicate_degree", 1, at_least=1)
    context = settings.integer("context_parallel_degree", 1, at_least=1)
    gpus, shard = _gpus(settings, tensor * stages * copies * context)
    fields: dict[str, Any] = {"num_gpus": gpus, "tensor_degree": tensor, "pipeline_degree": stages}
    fields |= _batch(settings, training, stages, shard * copies)
    if context > 1:
        fields["context_degree"] = context
    if tensor > 1 and settings.flag("disable_loss_parallel", False):
        settings.approximate("disable_loss_parallel is counted as off: every rank would hold all logits")
    if shard * copies * context == 1:
        return fields | {"parallel": "none"}
    if shard * context == 1:
        return fields | {"parallel": "ddp"}
    policy = settings.text("fsdp_reshard_after_forward", "default")
    fields |= {
        "parallel": "fsdp2",
        "shard_degree": shard * context if copies > 1 else 0,
        "reshard_after_forward": policy == "always" or (policy == "default" and stages == 1),
    }
    if training.flag("enable_cpu_offload", False):
        fields["offload"] = "parameters"
    degree = settings.integer("expert_parallel_degree", 1, at_least=1)  # it takes its GPUs from those that shard
    if degree == 1:
        return fields
    if settings.integer("expert_tensor_parallel_degree", 1, at_least=1) > 1:
        settings.approximate("expert_tensor_parallel_degree is counted as 1")
    if settings.text("expert_parallel_comm_backend", "standard") != "standard":
        settings.approximate("expert_parallel_comm_backend is counted as PyTorch's own all-to-all")
    return {**fields, "expert_degree": degree}


def _gpus(settings: Settings, others: int) -> tuple[int, int]:
    """(GPUs of the run, of them those that share one copy's weights); `others`: those of all other degrees."""
    shard = int(settings.real("data_parallel_shard_degree", -1))
    gpus = others * shard if shard > 0 else max(settings.outside.num_gpus, others)
    if shard < 0:
        shard = gpus // others
        if settings.outside.num_gpus == 1:
            settings.assume(f"the number of GPUs is not in the file: {gpus} taken (say how many with --gpus)")
    if gpus != others * shard:
        raise ConfigError(f"{settings.name}: degrees of {others} do not divide {gpus} GPUs", hint="give --gpus")
    return gpus, shard


def _batch(settings: Settings, training: Settings, stages: int, replicas: int) -> dict[str, Any]:
    local = training.integer("local_batch_size", 8, at_least=1)
    if stages == 1:
        total = int(training.real("global_batch_size", -1))
        steps = total // (local * replicas) if total > 0 else 1
        return {"micro_batch_seqs": local, "accumulation_steps": max(1, steps)}
    micro = settings.integer("pipeline_parallel_microbatch_size", 1, at_least=1)
    word = settings.text("pipeline_parallel_schedule", "1F1B").lower()
    if word not in SCHEDULES:
        settings.approximate(f"the pipeline schedule {word} is counted as 1F1B")
    schedule = SCHEDULES.get(word, "1f1b")
    return {"micro_batch_seqs": micro, "accumulation_steps": max(1, local // micro), "pipeline_schedule": schedule}


def _checkpointing(settings: Settings, fields: Mapping[str, Any]) -> dict[str, Any]:
    mode = settings.text("mode", "selective")
    if mode in ("full", "none"):
        return {"checkpointing": int(mode == "full")}
    option = str(settings.raw("selective_ac_option", "2"))
    if mode == "selective" and option.isdigit():
        return {"checkpointing": int(option)}
    split = any(fields.get(f"{dimension}_degree", 1) > 1 for dimension in ("tensor", "pipeline", "context", "expert"))
    by_operation = mode == "selective" and option == "op" and not split
    if not by_operation:
        settings.approximate(f"activation checkpointing by {mode} {option} is counted as checkpointing every layer")
    return {"checkpointing": 1, "selective_checkpointing": by_operation}


def is_registry(text: str) -> bool:
    return "torchtitan" in text and "-> Trainer.Config:" in text


def read_registry(text: str, name: str, around: FileContext) -> ReadConfig:
    """The setup of one config of a registry: the one that `--config` names, else the only one."""
    tree = ast.parse(text)
    reader = Reader(name, replace(around.of_program(), roots=()))  # torchtitan's own classes stay calls
    reader.whole(tree)
    configs = {
        node.name: reader.program.module.names.get(node.name)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) == "Trainer.Config"
    }
    words = flags(around.arguments or ())
    wanted = words.get("config") or (next(iter(configs)) if len(configs) == 1 else "")
    function = configs.get(str(wanted))
    if not isinstance(function, Function):
        if wanted or not configs:
            raise NotATraining(
                f"{name} has no config {wanted or 'at all'}", hint=f"it has {', '.join(configs) or 'none'}"
            )
        raise Undetermined(
            f"{name} holds {len(configs)} configs: {', '.join(configs)}",
            hint=f'add --args "--config {next(iter(configs))}"',
        )
    made = reader.called(function, CallResult("", where=name))
    if not isinstance(made, CallResult):
        raise Undetermined(f"{name}: what {wanted} returns is not known without running it", hint="name another config")
    return _of_config(made, words, name, around)


def _of_config(made: CallResult, words: dict[str, Any], name: str, around: FileContext) -> ReadConfig:
    accepted = versions.known_settings(FORMAT)
    blocks = {title: training.settings(made.argument(title), f"{name}: {title}") for title in REGISTRY_BLOCKS}
    for title, block in blocks.items():  # the command line's on top
        overrides = {key.partition(".")[2]: value for key, value in words.items() if key.startswith(f"{title}.")}
        block.values = {**block.values, **overrides}
    context = blocks["training"].integer(CONTEXT, DEFAULTS[CONTEXT], at_least=1)
    tokens = blocks["training"].integer(TOKENS, DEFAULTS[TOKENS], at_least=1)
    total = int(blocks["training"].real(STEP, -1))
    document: dict[str, dict[str, Any]] = {
        title: {key: value for key, value in settings.values.items() if f"{title}.{key}" in accepted}
        for title, settings in blocks.items()
    }
    document["training"] |= {"seq_len": context, "local_batch_size": max(1, tokens // context)}
    document["training"] |= {"global_batch_size": total // context} if total > 0 else {}
    mode = made.argument("activation_checkpoint")
    full = isinstance(mode, CallResult) and mode.owner == "FullAC"
    absent = mode is None or isinstance(mode, CallResult)
    document["activation_checkpoint"] = {"mode": "full" if full else "selective" if absent else "none"}
    document["activation_checkpoint"] |= {"selective_ac_option": "op"} if absent and not full else {}
    assets = training.settings(made, name).raw("hf_assets_path")
    document["model"] = {"hf_assets_path": assets} if isinstance(assets, str) else {}
    reading = read(Settings(document, name, around))
    loss = made.argument("loss")
    if isinstance(loss, CallResult) and loss.owner.startswith("Chunked"):
        reading = replace(reading, setup=reading.setup.replace(loss="chunked"))
    missing = {
        field: settings.undetermined[key]
        for settings in blocks.values()
        for key, field in ((CONTEXT, "seq_len_tokens"), (TOKENS, "micro_batch_seqs"), (STEP, "accumulation_steps"))
        if key in settings.undetermined
    }
    if not isinstance(assets, str) or "tokenizer" in assets:
        missing["model"] = f"{made.where}: hf_assets_path names no model"
    named = None if "model" in missing else reading.model_id
    return replace(reading, model_id=named, missing=tuple(Missing(field=of, reason=why) for of, why in missing.items()))
