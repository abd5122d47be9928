"""ms-swift (`swift sft --model ... --tuner_type lora`, or the same keys as YAML) as setups. Defaults of ms-swift 4."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.core.errors import NotPlanned
from planner.frameworks.exporters.common import USUAL_LINEAR_MODULES
from planner.frameworks.readers import common
from planner.frameworks.readers.common import adapter_kind, config, settings_fields
from planner.frameworks.readers.loading import parse_json
from planner.frameworks.readers.objectives import estimated, of_trainer
from planner.frameworks.readers.sharding import device_map, with_autotp, with_cut_sequences
from planner.frameworks.readers.trl import sharded
from planner.frameworks.readers.types import TRAINED, ReadConfig, UpperBound
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.others import SWIFT
from planner.models.encoders import SEEING
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.options.objectives import OBJECTIVES
from planner.options.stacks import STACKS

FORMAT = "ms-swift"
PROGRAMS = ("swift/cli/sft.py", "swift/cli/rlhf.py")
"""Its own programs, which torchrun, DeepSpeed and Accelerate launch by their path."""
IN_PIECES = "ms-swift-cut-loss"
"""The stack with CELOSS_PARALLEL_SIZE, which the loss of cut sequences alone heeds."""
MODELS = {"model", "model_id_or_path", "model_type"}
OLD = ("sft_type", "model_id_or_path", "lora_dropout_p", "lora_target_modules")
"""Settings of ms-swift 2 (the older `swift sft`), which cuts at 2,048 tokens by itself and adapts attention alone.

Source: modelscope/ms-swift v2.6 `swift/llm/utils/argument.py`.
"""
MARKS = {"tuner_type", "train_type", "sft_type", "quant_bits", "rlhf_type", "vit_gradient_checkpointing"}
"""Settings that only ms-swift has."""
REWARDED = {"reward_funcs", "reward_model", "num_generations", "ref_model", "ref_adapters", "reward_weights"}
"""Settings of `swift rlhf`, whose kind may stand on the command line alone."""
DEFAULT_RLHF = "dpo"
"""What `swift rlhf` trains where nothing says it. Source: ms-swift 4.6 swift/arguments/rlhf_args.py."""
OF_RLHF = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "orpo", "cpo": "orpo", "rm": "reward"}
"""Value of `rlhf_type` -> the objective whose trainer of TRL it subclasses (CPO's has ORPO's logits)."""
TRL = "0.28"
"""The TRL after which ms-swift's own DPO and KTO are made: tokens' log-probabilities of whole logits, row by row.

Source: ms-swift@3602360a swift/rlhf_trainers/{dpo,kto,orpo,cpo,reward}_trainer.py, rlhf_mixin.py; it takes 0.15 to 1.0.
Measured by ms-swift (its examples): DPO of Qwen2.5-7B, LoRA 24 GiB for 27.4 predicted; full, ZeRO-3, packed, 4 GPUs 50
for 45.8.
"""
PICTURES = ("max_pixels", "vit_gradient_checkpointing", "freeze_vit", "freeze_aligner", "vit_lr", "aligner_lr")
PICTURES_OUTSIDE = ("MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_PIXELS", "VIDEO_MAX_TOKEN_NUM", "FPS_MAX_FRAMES")
"""Settings, and variables of the environment, that are written where pictures are trained on."""
ENCODER = "freeze_vit"
"""Keeps the encoder frozen, and its matrices out of all-linear.

Source: ms-swift@3602360a swift/arguments/tuner_args.py, swift/utils/transformers_utils.py get_multimodal_target_regex,
swift/template/base.py _get_inputs_embeds_hf (a blank picture where a batch has none).
"""
NOT_COUNTED = {
    "use_galore": UpperBound("GaLore's projected optimizer states are counted as AdamW's", *TRAINED),
    "freeze_parameters_ratio": "frozen parts of the model are counted as trained",
    "lisa_activated_layers": UpperBound("LISA trains a few layers at a time: counted as if it trained all", *TRAINED),
    "optimizer": "the optimizer of a plug-in is counted as that of `optim`",
}
WEIGHTED = {"react", "hermes", "qwen", "agentflan", "alpha_umi"}
"""Kinds of `loss_scale` with weights other than 0 and 1 (ms-swift 4.6 loss_scale/config)."""
GLOBAL_BATCH = 16
"""Sequences per step where no accumulation is given.

Source: ms-swift@3602360a swift/trainers/arguments.py `__post_init__`; other defaults: swift/arguments/*.py there.
"""


def read(settings: Settings) -> ReadConfig:
    objective = _objective(settings)
    _take_fsdp_apart(settings)
    kept = settings.has("swift_version")  # args.json, in which a run keeps every setting, and how many ran it
    if kept and settings.outside.num_gpus == 1:
        settings.outside = replace(settings.outside, num_gpus=settings.integer("global_world_size", 1, at_least=1))
    old = any(settings.has(key) for key in OLD)
    fields = _method(settings, old=old)
    fields |= settings_fields(settings, SWIFT, "micro_batch_seqs", "compile")
    dtype = settings.first("torch_dtype", "dtype")
    weights = common.weight_dtype(settings, dtype, "auto") if settings.raw(dtype) != "AUTO" else "bf16"
    fp16 = settings.flag("fp16", weights == "fp16")
    autocast = "fp16" if fp16 else "bf16" if settings.flag("bf16", weights == "bf16") else None
    precision = common.precision(settings, weights, autocast, fields["method"])
    processes = settings.outside.num_gpus
    if settings.raw("device_map") == "auto":  # one process, or as many as are started, whatever their GPUs
        started = settings.outside.environment.get("NPROC_PER_NODE", "1")
        processes = max(1, int(started)) if started.isdigit() else 1
    steps = max(1, math.ceil(GLOBAL_BATCH / fields["micro_batch_seqs"] / processes))
    if not settings.has("gradient_accumulation_steps"):
        settings.assume(f"gradient_accumulation_steps absent: {steps}, for {GLOBAL_BATCH} sequences a step")
    fields |= {
        "precision": precision,
        "accumulation_steps": settings.integer("gradient_accumulation_steps", steps, at_least=1),
        "seq_len_tokens": _length(settings, old=old),
        "packing": settings.flag("packing", False) or settings.flag("padding_free", False),
        "optimizer": common.optimizer(settings, "optim", common.default_optimizer(settings)),
        "attention": _attention(settings),
        "checkpointing": common.checkpointing(settings, True),
        **common.liger(settings, settings.flag("use_liger_kernel", False), "full", apart=_loss_apart(settings)),
    }
    if objective != "sft":
        fields |= _of_objective(settings, fields, objective)
    fields["activation_offload"] = common.offloads(settings, fields["checkpointing"])
    fields = common.adapter(settings, fields, adapter_kind(settings, FORMAT))
    settings.leave_out(NOT_COUNTED)
    layout = sharded(settings)
    if layout and settings.has("deepspeed_autotp_size"):
        layout = with_autotp(settings, layout, settings.integer("deepspeed_autotp_size", 0))
    cut = with_cut_sequences(settings, "sequence_parallel_size", layout, fields)
    fields |= cut if "context_degree" in cut else device_map(settings, settings) or cut
    pieces = settings.outside.environment.get("CELOSS_PARALLEL_SIZE", "0")
    if "context_degree" in cut and fields["loss"] == "full" and pieces.isdigit() and int(pieces):
        fields["stack"] = IN_PIECES
        if int(pieces) != (tokens := STACKS[IN_PIECES].loss_chunk_tokens):
            settings.approximate(f"CELOSS_PARALLEL_SIZE {pieces} is counted as {tokens}")
    outside = settings.outside.environment
    signs = {key: settings.has(key) and not kept for key in PICTURES} | {
        key: outside.get(key) for key in PICTURES_OUTSIDE
    }
    common.pictures(settings, fields, signs, ENCODER)
    return config(SWIFT, settings, fields)


def _take_fsdp_apart(settings: Settings) -> None:
    """Makes transformers' `fsdp` and `fsdp_config` of ms-swift's one setting, a preset's name or a file of both, as it
    does by itself; the settings that a run keeps (args.json) have them apart already.

    Source: ms-swift@3602360a swift/arguments/sft_args.py _init_fsdp, _check_fsdp2_compatibility; config/fsdp2.json.
    """
    named = settings.raw("fsdp")
    if named == "fsdp2":
        given: Mapping[str, Any] = {"fsdp_config": {"fsdp_version": 2, "activation_checkpointing": True}}
    elif isinstance(named, str) and named.endswith(".json"):
        text = settings.outside.read_relative(named)
        if text is None:
            for field in ("checkpointing", "offload"):
                settings.ask(field, f": {named}, FSDP's settings, is not beside it")
        given = parse_json(text or "{}", named)
    elif isinstance(named, dict) or str(named).lstrip().startswith("{"):
        given = settings.mapping("fsdp")
    else:
        return
    block = given.get("fsdp_config") or {}
    if not isinstance(block, dict):
        raise settings.error("fsdp", "settings with a block fsdp_config", given)
    checkpoints = common.fsdp_checkpoints(Settings(block, f"{settings.name}: fsdp_config"))
    if block.get("activation_cpu_offload"):
        settings.approximate(UpperBound("activation_cpu_offload is counted as if it stayed on the GPU", "activations"))
    settings.values = {
        **settings.values,
        "fsdp": given.get("fsdp", "full_shard auto_wrap"),
        "fsdp_config": block,
        **({"gradient_checkpointing": False} if checkpoints else {}),
    }


def _objective(settings: Settings) -> str:
    kind, marked = settings.optional_text("rlhf_type"), REWARDED & set(settings.values)
    task = settings.text("task_type", "causal_lm")
    if kind is None and marked:
        raise estimated(settings.name, f"reinforcement learning ({', '.join(sorted(marked))})", "ms-swift", "grpo")
    if kind is not None and kind not in OF_RLHF:
        raise estimated(settings.name, f"rlhf_type {kind}", "ms-swift", kind)
    if kind is None and task not in ("causal_lm", "seq_cls"):
        raise estimated(settings.name, f"task_type {task}", "ms-swift", task)
    return OF_RLHF[kind] if kind is not None else "classification" if task == "seq_cls" else "sft"


def _of_objective(settings: Settings, fields: Mapping[str, Any], objective: str) -> dict[str, Any]:
    """The fields of another objective than supervised training; a packed row holds whole pairs."""
    row, kind = OBJECTIVES[objective], str(settings.raw("rlhf_type")).upper()
    version = TRL if row.reference else ""
    logits = f"ms-swift's {kind} is counted as {f'TRL {TRL}' if version else 'ORPO in TRL 1.16'} keeps whole logits"
    counted = logits if row.head == "vocabulary" else ""
    more = of_trainer(settings, fields, objective, version=version, counted=counted) | {"kernels": "eager"}
    if row.reference and settings.flag("precompute_ref_log_probs", False):
        more["precomputed_reference"] = True
    if fields["packing"] and settings.flag("packing", False):
        share = -(-fields["seq_len_tokens"] // row.seqs_per_sample)
        settings.assume(f"packing fills max_length with whole {row.sample}s: counted as one of {share} tokens each")
        more["seq_len_tokens"] = share
    return more


def _method(settings: Settings, *, old: bool) -> dict[str, Any]:
    tuner = settings.text(settings.first("sft_type", "tuner_type", "train_type"), "lora")
    if tuner not in ("lora", "full"):
        raise NotPlanned(f"{settings.name}: tuner {tuner} is not planned", hint="lora and full are")
    if tuner == "full":
        return {"method": "full", "quantization": "none", "lora_rank": 0}
    quantization = _quantization(settings)
    names = settings.names(settings.first("target_modules", "lora_target_modules"))
    if names in ((), ("DEFAULT",), ("AUTO",)):
        names = ("q_proj", "k_proj", "v_proj") if old else ("all-linear",)
    elif names == ("ALL",):
        names = ("all-linear",)
    elif "all-linear" in names and len(names) > 1:
        names = _beside_all(settings.model, names)
    saved = settings.first("modules_to_save", "lora_modules_to_save")
    fields = common.adapters(settings, SWIFT, quantization, names)
    if settings.flag(ENCODER, True):
        fields["lora_targets"] = common.without_encoder(settings, fields["lora_targets"])
    return {**fields, "modules_to_save": common.modules_to_save(settings, saved)}


def _beside_all(model: ModelSpec | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names among which "all-linear" stands for every matrix but the head, "all-embedding" for the token tables.

    Source: ms-swift@3602360a swift/pipelines/train/tuner.py get_target_modules.
    """
    if model is not None and model.model_type in SEEING:  # a pattern is made, the other names are left out
        return ("all-linear",)
    meant = {"all-linear": [*USUAL_LINEAR_MODULES], "all-embedding": ["embed_tokens"]}
    if model is not None:
        adapted = lora_linears(model, "all-linear")
        meant["all-linear"] = [linear.leaf for _, _, linears in adapted for linear in linears]
        meant["all-embedding"] = [table.name.rpartition(".")[2] for table in model.embeddings]
    return tuple(dict.fromkeys(part for name in names for part in meant.get(name, (name,))))


def _quantization(settings: Settings) -> str:
    """Source: ms-swift@3602360a swift/arguments/base_args/quant_args.py (of AWQ and GPTQ the checkpoint is published
    so)."""
    by, key = settings.text("quant_method", "bnb"), settings.first("quant_bits", "quantization_bit")
    bits = 8 if by == "fp8" or settings.raw(key) == "float8" else settings.integer(key, 0)
    if not bits or by in ("awq", "gptq", "gptq_v2"):
        return common.stored(settings)
    if by != "bnb" or bits not in (4, 8):
        return common.counted_bits(settings, bits, by)
    four = "nf4-double" if settings.flag("bnb_4bit_use_double_quant", True) else "nf4"
    return "int8" if bits == 8 else four


def _loss_apart(settings: Settings) -> bool:
    """Whether ms-swift computes the loss from logits by itself, which Liger's own loss then takes no part in.

    Source: ms-swift 4.6 trainers/seq2seq_trainer.py `compute_loss`, loss_scale/base.py (weights of 0 and 1 alone are
    written into the labels).
    """
    weighted = WEIGHTED & set(settings.text("loss_scale", "default").split("+"))
    other_loss = settings.has("loss_type") or settings.real("label_smoothing_factor", 0.0) > 0
    by_channel = settings.flag("enable_dft_loss", False) or settings.flag("enable_channel_loss", False)
    return bool(weighted or other_loss or by_channel or settings.integer("sequence_parallel_size", 1) > 1)


def _length(settings: Settings, *, old: bool) -> int:
    uncut = str(settings.raw("max_length")) == "-1" if settings.has("max_length") else not old
    if not uncut:
        return settings.integer("max_length", 2048, at_least=1)
    said_so = "is -1" if settings.has("max_length") else "absent"
    settings.ask("seq_len_tokens", f": max_length {said_so}: ms-swift cuts at the model's own limit")
    return 2048


def _attention(settings: Settings) -> str:
    word = {"flash_attn": "flash_attention_2", "flash_attention": "flash_attention_2"}
    value = settings.optional_text("attn_impl")
    if value is None and settings.has("use_flash_attn") and settings.raw("use_flash_attn") != "auto":
        value = "flash_attn" if settings.flag("use_flash_attn", False) else None
    named = {"attn": word.get(value, value)} if value else {}
    return common.attention(Settings(named, settings.name, settings.outside), "attn")
