"""Settings of programs that are not known, in YAML or JSON: read by the names that nearly all programs give them.

What stands there counts; what does not is asked for, never a default: the program that reads the file has its own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.core.errors import NotATraining
from planner.frameworks.readers import common, evaluating, loading
from planner.frameworks.readers.common import adapter_kind, config
from planner.frameworks.readers.objectives import OF_ROLLOUTS, OTHER_WORDS, PAIRS, SAYS_OBJECTIVE, of_own, refusal
from planner.frameworks.readers.program.reading import PARTS_OF_LENGTH
from planner.frameworks.readers.sharding import Layout, fsdp, with_cut_sequences, zero_stage
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools import tool_of
from planner.options.objectives import OBJECTIVES

FORMAT = "own settings"
NAMES = {
    "model": (
        "model_name_or_path", "pretrained_model_name_or_path", "pretrained_model_name", "base_model", "model_name",
        "model_id", "base_model_name", "base_model_name_or_path",
        "hf_model_name", "hf_model_ckpt", "pretrained_ckpt", "model_path", "model.name",
        "pretrained_model", "model.path", "model.id", "model.base", "model.name_or_path", "pretrained_model_path",
        "base_model_path", "model",
    ),
    "micro": (
        "per_device_train_batch_size", "micro_batch_size", "per_device_batch_size", "local_batch_size",
        "train_batch_size", "batch_size", "batch.size",
    ),
    "accumulation": (
        "gradient_accumulation_steps", "grad_accum_steps", "gradient_accumulation", "grad_accum", "accumulation_steps",
        "gradient_steps",
    ),
    "length": (
        "max_seq_length", "max_seq_len", "sequence_len", "cutoff_len", "seq_length", "seq_len", "max_length",
        "model_max_length", "block_size", "context_length", "data_max_length",
    ),
    "rank": (
        "lora_r", "lora_rank", "lora.r", "lora.rank", "peft.r", "peft_config.r", "peft.rank", "lora_config.r", "r",
        "rank",
    ),
    "targets": ("lora_target_modules", "target_modules"),
    "four": ("load_in_4bit", "use_4bit", "load_4bit", "use_qlora", "qlora"),
    "eight": ("load_in_8bit", "use_8bit", "load_8bit"),
    "double": (
        "bnb_4bit_use_double_quant", "use_double_quant", "use_nested_quant", "double_quant", "double_quantization",
    ),
    "quantized": ("is_quantized", "use_quantization", "quantization.enabled", "quantized", "use_bnb"),
    "lora": (
        "use_lora", "use_peft", "is_peft", "is_lora", "enable_lora", "lora_enabled", "lora.enabled", "peft.enabled",
    ),
    "checkpointing": ("gradient_checkpointing", "use_gradient_checkpointing", "activation_checkpointing"),
    "optimizer": ("optim", "optimizer", "optimizer.name", "optimizer.type"),
    "dtype": ("torch_dtype", "dtype", "model_dtype"),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
    "mixed": ("mixed_precision",),
    "attention": ("attn_implementation",),
    "flash": ("use_flash_attn", "use_flash_attention_2", "use_flash_attention", "flash_attn", "flash_attention"),
    "adapter": (
        "peft_type", "adapter", "finetuning_type", "train_type", "tuner_type", "peft.method", "peft.type",
        "finetune_type", "tuning_type", "method", "mode", "tuning_method", "peft_method", "finetune_method",
        "tuning_mode", "finetuning_method", "finetuning_mode", "adapter_type",
    ),
    "bits": ("quantization", "quantization_bit", "load_in_kbits", "bits"),
    "packing": ("packing",),
    "evaluates": ("eval_strategy", "evaluation_strategy", "eval_steps"),
    "evaluated": ("per_device_eval_batch_size", "eval_batch_size"),
    "liger": ("use_liger_kernel", "use_liger"),
    "dropout": ("lora_dropout", "lora.dropout", "peft.dropout"),
    "saved": ("modules_to_save", "lora_modules_to_save"),
    "use_dora": ("use_dora",),
    "use_rslora": ("use_rslora",),
    "context": (
        "sequence_parallel_size", "sequence_parallel_degree", "context_parallel_size", "context_parallel_degree",
        "ulysses_sequence_parallel_size", "sp_size", "cp_size",
    ),
}  # fmt: skip
"""What is asked -> the names that it has; one with a dot stands in a block of that name."""
SPOKEN = frozenset(
    name for key in ("model", "targets", "rank", "micro", "four", "lora") for name in NAMES[key] if "." not in name
)
"""Names that make a file another program's, where the tool that it looks like has others for them."""
OTHER_BLOCKS = ("eval", "test", "valid", "infer", "generat", "serv", "vllm", "bench")
"""Parts of the names of blocks that do not hold the training's settings."""
DATA_BLOCKS = ("data", "token", "preprocess")
"""Parts of the names of blocks in which the length of sequences stands, and nothing else of the training."""
FIELD_OF = {
    "model": "model", "micro": "micro_batch_seqs", "accumulation": "accumulation_steps", "length": "seq_len_tokens",
    "rank": "lora_rank", "checkpointing": "checkpointing",
}  # fmt: skip


OPEN_AS = FIELD_OF | {
    "targets": "lora_targets", "four": "quantization", "eight": "quantization", "lora": "method", "dtype": "precision",
    "bf16": "precision", "optimizer": "optimizer", "packing": "packing",
}  # fmt: skip
"""What is asked -> the field that is open where only composing Hydra's files would tell it."""


def is_training(values: Mapping[str, Any]) -> bool:
    """Whether a mapping names a batch and a model, a length, or adapters and an accumulation: less is no training's."""
    entries = _named_settings(values)
    certain = "micro" in entries and entries["micro"][0].endswith("per_device_train_batch_size")
    named = {"model", "length"} & set(entries)
    adapted = {"rank", "accumulation"} <= set(entries) and bool({"model", "micro"} & set(entries))
    return certain or adapted or ("micro" in entries and bool(named) and bool({"accumulation", "rank"} & set(entries)))


ABSENT = " does not say; the program that reads it may"
NUMBERS = ("micro", "accumulation", "length", "rank", "context", "evaluated")
ADAPTERS = {"lora": True, "qlora": True, "full": False, "none": False}
BITS = {"4": "four", "4bit": "four", "4-bit": "four", "nf4": "four", "8": "eight", "8bit": "eight", "8-bit": "eight"}
SWITCHES = (
    "four", "eight", "double", "quantized", "lora", "bf16", "fp16", "packing", "liger", "flash", "use_dora",
    "use_rslora",
)  # fmt: skip


def _makes_sense(key: str, value: Any) -> bool:
    """Whether a value is of the kind that is asked: another program's name may mean something else ("auto")."""
    if key in NUMBERS:
        return str(value).isdigit() and int(str(value)) > 0
    if key in SWITCHES:
        return isinstance(value, bool) or str(value).lower() in ("true", "false")
    if key == "optimizer":
        return isinstance(value, str) and value.lower() in common.KNOWN_OPTIMIZERS
    return isinstance(value, str) if key in ("dtype", "attention", "model") else True


def read(settings: Settings) -> ReadConfig:
    """The setup that a file of settings says, with what it leaves open as `missing`."""
    values, name = settings.values, settings.name
    if values.get("do_train") is False:
        raise NotATraining(f"{name}: do_train is false: not a training", hint="give the config of a training")
    texts = [str(value).lower() for path, value in _leaves(values, ()) if path[-1].lower() in SAYS_OBJECTIVE]
    if marks := sorted(OF_ROLLOUTS & {part.lower() for path, _ in _leaves(values, ()) for part in path}):
        raise refusal(f"{name}: reinforcement learning by its settings ({', '.join(marks[:3])})")
    named = settings.outside.objective
    objective, certain = (named, True) if named in PAIRS else of_own(values, name, (name.lower(), *texts))
    entries = _named_settings(values)
    opened = {key: value for key, (_, value) in entries.items() if loading.is_open(value)}
    entries = {key: entry for key, entry in entries.items() if key not in opened and _makes_sense(key, entry[1])}
    entries = _in_words(entries) | entries
    settings = Settings({key: value for key, (_, value) in entries.items()}, name, settings.outside)
    settings.assume("settings read by their usual names: the program that reads this file is not known")
    if later := sorted(_later_stages(values)):
        settings.assume(f"of several stages that of sft is read ({', '.join(later)} left out)")
    settings.approximate("loss and optimizer are taken to be transformers' defaults where the file says nothing")
    for key, field in FIELD_OF.items():
        if key not in settings.values:
            settings.ask(field, ABSENT)
    for key, text in opened.items():
        if key in OPEN_AS:
            settings.ask(OPEN_AS[key], f": {key} is {text}")
    of_trl = any(str(value).endswith("SFTConfig") for path, value in _leaves(values, ()) if path[-1] == "_target_")
    fields: dict[str, Any] = {
        **_method(settings),
        "micro_batch_seqs": settings.integer("micro", 1, at_least=1),
        "accumulation_steps": settings.integer("accumulation", 1, at_least=1),
        "seq_len_tokens": settings.integer("length", 1024, at_least=1),
        "checkpointing": int(settings.raw("checkpointing", False) not in (False, None, "none", "false")),
        "optimizer": common.optimizer(settings, "optimizer", "adamw_torch_fused"),
        "attention": common.attention(settings, "attention"),
        "packing": settings.flag("packing", False),
        **common.liger(settings, settings.flag("liger", False), "chunked" if of_trl else "full"),
    }
    fields |= _preferences(settings, objective, certain=certain)
    fields = common.adapter(settings, fields, adapter_kind(settings, FORMAT))
    fields |= with_cut_sequences(settings, "context", _layout(settings, values), fields)
    keys = {FIELD_OF[key]: path for key, (path, _) in entries.items() if key in FIELD_OF and key != "model"}
    keys |= {"eval_seqs": entries["evaluated"][0]} if "evaluated" in entries else {}
    evaluated = 0  # also where the file says nothing of it
    if str(settings.raw("evaluates", "")).lower() not in evaluating.NEVER:
        if settings.has("evaluates") and not settings.has("evaluated"):
            settings.ask("eval_seqs", " evaluates, and does not say how many sequences at once")
        evaluated = settings.integer("evaluated", 0)
    named = settings.raw("model")
    answer = config(tool_of(FORMAT), settings, fields, model_id=named if isinstance(named, str) else None, keys=keys)
    return replace(answer, values=values, eval_seqs=evaluated)


ENGINES = ("engine", "strategy", "backend", "parallel", "distributed", "accelerator", "shard")
"""Parts of the names of settings that say in a word how a job is spread."""


def _layout(settings: Settings, values: Mapping[str, Any]) -> Layout:
    blocks = dict(_named(values, ("deepspeed", "deepspeed_config", "fsdp_config", "fsdp")))
    for key, value in blocks.items():
        if key.startswith("deepspeed") and isinstance(value, (str, Mapping)) and value:
            return zero_stage(settings, value)
    block = blocks.get("fsdp_config")
    texts = [str(value).lower() for value in (blocks.get("fsdp"), block) if value]
    texts += [
        str(value).lower()
        for path, value in _leaves(values, ())
        if any(part in name.lower() for name in path for part in ENGINES) and isinstance(value, str)
    ]
    words = " ".join(texts)
    if re.search(r"deepspeed|\bzero[_-]?[123]?\b", words) and "fsdp" not in words:
        settings.ask("parallel", " names DeepSpeed, and not of which stage")
        return {}
    if re.search(r"fsdp|(?:full|hybrid)_shard|shard_grad_op", words):
        named = next((word for word in ("shard_grad_op", "hybrid_shard", "no_shard") if word in words), "full_shard")
        return fsdp(settings, dict(block) if isinstance(block, Mapping) else {"sharding_strategy": named.upper()})
    return {}


def _named(values: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key.lower() in names:
            yield key.lower(), value
        elif isinstance(value, Mapping):
            yield from _named(value, names)


def _method(settings: Settings) -> dict[str, Any]:
    present = set(settings.values)
    adapted = settings.flag("lora", bool({"rank", "targets"} & present))
    whole = not settings.flag("quantized", True)
    four, eight = (not whole and settings.flag(key, False) for key in ("four", "eight"))
    if not adapted:
        settings.missing.pop("lora_rank", None)
        if "lora" not in present:
            settings.ask("method", " names no adapter; the program that reads it may")
        if "optimizer" not in present:
            settings.ask("optimizer", " names none; the program that reads it may")
        return {"method": "full", "quantization": "none", "lora_rank": 0, "precision": _precision(settings, "full")}
    if not {"four", "eight"} & present and not whole:
        settings.ask("quantization", ABSENT)
    names = settings.text_or_names("targets")
    if not names:
        settings.ask("lora_targets", " names none; the program that reads it may")
    method = "qlora" if four or eight else "lora"
    nf4 = "nf4-double" if settings.flag("double", False) else "nf4"
    return {
        "method": method,
        "quantization": "none" if method != "qlora" else "int8" if eight else nf4,
        "precision": _precision(settings, method),
        "lora_rank": settings.integer("rank", 8, at_least=1),
        "lora_targets": common.targets(settings, names, by_lora=bool(names)),
        "lora_dropout": settings.real("dropout", 0.0),
        "modules_to_save": common.modules_to_save(settings, "saved"),
    }


def _precision(settings: Settings, method: str) -> str:
    word = settings.text("dtype", "auto").removeprefix("torch.")
    autocast = "bf16" if settings.flag("bf16", False) else "fp16" if settings.flag("fp16", False) else None
    mixed = str(settings.raw("mixed", "")).lower()
    autocast = autocast or (mixed if mixed in ("bf16", "fp16") else None)
    if word not in common.DTYPES and (autocast is None or method != "qlora"):
        settings.ask("precision", " names no data type of the weights; the program that reads it may")
    return common.precision(settings, common.DTYPES.get(word, "bf16"), autocast, method)


def _preferences(settings: Settings, objective: str, *, certain: bool) -> dict[str, Any]:
    if not certain:
        settings.ask("objective", " has settings of preferences: of which kind the program that reads it says")
    if objective == "sft":
        return {}
    losses = OBJECTIVES[objective].losses
    if len(losses) > 1:
        settings.ask("loss", f": whose {objective} it is: TRL since 1.15 never holds all logits (chunked), others do")
    return {"objective": objective, "packing": False, "loss": losses[0]}


def _in_words(entries: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Switches that a file says in words: `peft_type: qlora`, `quantization: 4bit`, `use_flash_attn: true`."""
    switches: dict[str, tuple[str, Any]] = {}
    path, word = entries.get("adapter", ("", ""))
    if kind := _adapter(word):
        switches["lora"] = (path, ADAPTERS[kind])
        switches |= {"four": (path, True)} if kind == "qlora" else {}
    path, word = entries.get("bits", ("", ""))
    if key := BITS.get(str(word).lower()):
        switches[key] = (path, True)
    path, word = entries.get("flash", ("", False))
    if str(word).lower() == "true":
        switches["attention"] = (path, "flash_attention_2")
    return switches


def _adapter(word: Any) -> str:
    """The method that a setting names (`lora_sft`, `full-finetune`), "" where it names none."""
    parts = re.split(r"[^a-z0-9]+", word.lower()) if isinstance(word, str) else []
    return next((kind for kind in ADAPTERS if kind in (parts if kind != "none" else [word])), "")


def _named_settings(values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """What is asked -> (path of the key, value), where the file says one thing."""
    # the last two of a path's names, as programs spell them
    leaves = [
        (path, value, [_unprefixed(part.lower().replace("-", "_")) for part in path[-2:]])
        for path, value in _leaves(values, ())
    ]
    by_last: dict[str, list[tuple[tuple[str, ...], Any, list[str]]]] = {}
    for leaf in leaves:
        by_last.setdefault(leaf[2][-1], []).append(leaf)
    entries: dict[str, tuple[str, Any]] = {}
    for key, names in NAMES.items():
        for name in names:
            alike = by_last.get(name.partition(".")[2] or name, ())
            matches = [(path, value) for path, value, words in alike if _is_named(words, name)]
            if key == "adapter":  # what else has such a name is another setting
                matches = [match for match in matches if _adapter(match[1])]
            if name == "rank":  # a process has one too
                scaled = {path[:-1] for path, _, words in leaves if "alpha" in words[-1]}
                matches = [match for match in matches if match[0][:-1] in scaled]
            if key == "model":  # a name without an owner may be a run's: it stands where nothing better does
                matches = [match for match in matches if isinstance(match[1], str)]
                if matches and "/" not in matches[0][1]:
                    entries.setdefault(key, (".".join(matches[0][0]), matches[0][1]))
                    continue
            if matches:
                if len({str(value) for _, value in matches}) == 1:
                    entries[key] = (".".join(matches[0][0]), matches[0][1])
                break
    by_name = {path[-1].lower(): value for path, value, _ in leaves}
    for first, other in PARTS_OF_LENGTH:
        parts = (by_name.get(first), by_name.get(other))
        if all(type(part) is int for part in parts):
            entries["length"] = (f"{first} + {other}", sum(parts))
    return entries


PREFIXES = ("train_", "training_", "trainer_", "sft_", "finetune_", "finetuning_", "ft_", "llm_", "hf_")
"""What people put before a library's name of a setting."""
LAST_NAMES = frozenset(name.rpartition(".")[2] for names in NAMES.values() for name in names)


def _unprefixed(word: str) -> str:
    bare = next((word.removeprefix(prefix) for prefix in PREFIXES if word.startswith(prefix)), word)
    return bare if word not in LAST_NAMES and bare in LAST_NAMES else word


def _is_named(words: Sequence[str], name: str) -> bool:
    block, dot, last = name.partition(".")
    return words[-1] == name if not dot else len(words) > 1 and words[-1] == last and words[-2].startswith(block)


def _later_stages(values: Mapping[str, Any]) -> set[str]:
    """Blocks of other objectives beside a block of supervised training: stages that follow it."""
    inner = [value for value in values.values() if isinstance(value, Mapping)]
    if isinstance(values.get("sft"), Mapping):
        return {key for key, value in values.items() if isinstance(value, Mapping) and OTHER_WORDS.search(key.lower())}
    return {key for block in inner for key in _later_stages(block)}


def _leaves(values: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    of_data = any(part in block.lower() for block in above for part in DATA_BLOCKS)
    later = _later_stages(values) if isinstance(values.get("sft"), Mapping) else set()
    for key, value in values.items():
        if isinstance(value, Mapping):
            if key not in later and not any(part in key.lower() for part in OTHER_BLOCKS):
                yield from _leaves(value, (*above, key))
        elif value is not None and (not of_data or key.lower() in NAMES["length"]):
            yield (*above, key), value
