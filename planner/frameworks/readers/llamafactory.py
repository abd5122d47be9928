"""LLaMA-Factory configs (`llamafactory-cli train FILE`) as setups. Defaults of LLaMA-Factory 0.9.5."""

from typing import Any

from planner.core.errors import NotATraining, NotPlanned
from planner.frameworks.readers import common, versions
from planner.frameworks.readers.common import adapter_kind, config, settings_fields
from planner.frameworks.readers.objectives import TRACE, estimated, of_trainer
from planner.frameworks.readers.sharding import Layout, fsdp, parallel_of, zero_stage
from planner.frameworks.readers.types import TRAINED, ReadConfig, UpperBound
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.llamafactory import ATTENTIONS, LLAMAFACTORY
from planner.memory.attention_kernels import default_attention
from planner.options.objectives import OBJECTIVES

FORMAT = "llamafactory"
PROGRAMS = ("src/train.py", "src/train_bash.py")
"""Its own program, which a checkout launches by its path."""
PREFERENCES = {
    **dict.fromkeys(("sigmoid", "hinge", "ipo", "kto_pair"), "dpo"), **dict.fromkeys(("orpo", "simpo"), "orpo"),
}  # fmt: skip
"""Values of `pref_loss` at stage dpo -> the objective whose step it is (SimPO's keeps what ORPO's does: LLaMA-Factory
0.9.5 train/dpo/trainer.py)."""
PICTURES = ("image_max_pixels", "image_min_pixels", "image_resolution", "video_max_pixels")
ENCODER = "freeze_vision_tower"
"""Keeps the encoder frozen, and its matrices out of `lora_target: all`.

Source: LLaMA-Factory 0.9.5 hparams/finetuning_args.py, model/model_utils/misc.py find_all_linear_modules,
data/collator.py (a blank picture where a batch has none).
"""
KTO = "LLaMA-Factory's KTO is counted as TRL 0.14's, which takes log-probabilities of all logits too"
"""Source: LLaMA-Factory 0.9.5 train/kto/trainer.py forward, train/trainer_utils.py get_batch_logps."""
READ_ATTENTIONS = {word: kind for kind, word in ATTENTIONS.items()} | {"auto": "sdpa", "fa3": "flash-attention-2"}
NOT_COUNTED = {
    "use_galore": UpperBound("GaLore's projected optimizer states are counted as AdamW's", *TRAINED),
    "use_apollo": UpperBound("APOLLO's projected optimizer states are counted as AdamW's", *TRAINED),
    "use_badam": UpperBound("BAdam's optimizer states of one block are counted as AdamW's of all", *TRAINED),
    "use_adam_mini": UpperBound("Adam-mini's second moments are counted as AdamW's", "optimizer"),
    "use_muon": UpperBound("Muon's optimizer states are counted as AdamW's", "optimizer"),
    "use_llama_pro": "LLaMA-Pro's added blocks are not counted",
    "mixture_of_depths": "mixture of depths skips tokens: counted as if none were skipped",
    "fp8": "fp8 matrix multiplications are counted as bf16",
    "use_unsloth": "Unsloth's kernels are not counted",
    "use_kt": UpperBound("experts computed on the host (KTransformers) are counted as on the GPU", "weights", *TRAINED),
    "upcast_layernorm": "norms in fp32 are not counted",
    "use_eaft_loss": "the copy of the logits that EAFT's loss takes is not counted",
    "shift_attn": "shifted sparse attention is counted as full attention",
}


def read(settings: Settings) -> ReadConfig:
    settings.note_unknown(versions.accepted(FORMAT), LLAMAFACTORY)
    objective = _objective(settings)
    liger = settings.flag(settings.first("enable_liger_kernel", "use_liger_kernel"), False)
    fields = settings_fields(
        settings, LLAMAFACTORY, "micro_batch_seqs", "accumulation_steps", "seq_len_tokens", "compile"
    )
    fields |= {**_method(settings), "objective": objective}
    word = settings.text("flash_attn", "auto")
    if word not in READ_ATTENTIONS:
        raise settings.error("flash_attn", f"one of {', '.join(READ_ATTENTIONS)}", word)
    whole = settings.flag("disable_gradient_checkpointing", False)
    fields |= {
        "checkpointing": 0 if whole else 1,
        "activation_offload": not whole and settings.flag("use_unsloth_gc", False),
        "precision": _precision(settings, widens=fields["method"] == "full" and not fields.get("trained_layers")),
        # under packing samples fill one token less, and padding brings the row back to cutoff_len
        "packing": settings.flag("packing", objective == "pretrain") or settings.flag("neat_packing", False),
        "attention": default_attention(settings.model) if word == "auto" else READ_ATTENTIONS[word],
        **common.liger(settings, liger, "full"),
        "optimizer": common.optimizer(settings, "optim", common.default_optimizer(settings)),
    }
    if not OBJECTIVES[objective].supervised:
        if liger:
            settings.approximate("Liger's kernels in preference training are not counted")
        as_counted = {"version": "0.14", "counted": KTO} if objective == "kto" else {}
        fields |= of_trainer(settings, fields, objective, **as_counted) | {"kernels": "eager"}
    if OBJECTIVES[objective].reference and fields["method"] == "full":
        settings.approximate("the reference is loaded in 16 bits: counted in the policy's type, too much")
    elif OBJECTIVES[objective].reference and (other := settings.raw("ref_model")):
        settings.ask("beside", f": the reference {other} is loaded beside the adapters' base")
    layout: Layout = {"parallel": "none"}
    if settings.raw("fsdp"):
        layout = fsdp(settings, dict(common.fsdp_block(settings).values))
    elif settings.has("deepspeed"):
        layout = zero_stage(settings, settings.values["deepspeed"])
    workers = settings.integer("ray_num_workers", 1, at_least=1)  # train/tuner.py: each has a GPU of its own
    fields |= parallel_of(settings, layout, workers if workers > 1 else 0)
    fields = common.adapter(settings, fields, adapter_kind(settings, FORMAT))
    common.pictures(settings, fields, {key: settings.raw(key) for key in PICTURES}, ENCODER)
    settings.leave_out(NOT_COUNTED)
    earlier = settings.raw("adapter_name_or_path") and not settings.raw("create_new_adapter")
    if fields["method"] != "full" and earlier:
        whose = "adapters that are trained on (adapter_name_or_path) have the rank of their own file"
        if settings.has("lora_rank"):
            settings.assume(f"{whose}: taken to be lora_rank")
        else:
            settings.ask("lora_rank", f": {whose}")
    data = settings.raw("dataset")
    return config(LLAMAFACTORY, settings, fields, dataset=data if isinstance(data, str) else None)


def _objective(settings: Settings) -> str:
    stage = settings.text("stage", "sft")
    if not settings.flag("do_train", False):
        raise NotATraining(
            f"{settings.name}: do_train is not true: not a training config", hint="give the config of a training"
        )
    if megatron := next((key for key in settings.values if key.endswith("_model_parallel_size")), ""):
        raise NotPlanned(f"{settings.name} trains with Megatron ({megatron}): not planned", hint=TRACE)
    if settings.flag("use_asft_loss", False):  # a reference's logits, and the divergence of all of them
        raise estimated(settings.name, "ASFT", "LLaMA-Factory")
    if stage == "dpo":
        loss = settings.text("pref_loss", "sigmoid")
        if loss not in PREFERENCES:
            raise settings.error("pref_loss", f"one of {', '.join(PREFERENCES)}", loss)
        if loss == "simpo":
            settings.approximate("SimPO is counted as ORPO, whose step in LLaMA-Factory keeps the same logits")
        return PREFERENCES[loss]
    objective = {"sft": "sft", "pt": "pretrain", "kto": "kto"}.get(stage, "")
    if not objective:  # rm: whole logits, in fp32 too, and every layer's output (AutoModelForCausalLMWithValueHead)
        raise estimated(settings.name, f"stage {stage}", "LLaMA-Factory", "reward" if stage == "rm" else stage)
    return objective


def _method(settings: Settings) -> dict[str, Any]:
    kind = settings.text("finetuning_type", "lora")
    if kind not in ("full", "lora", "freeze", "oft"):
        raise settings.error("finetuning_type", "full, lora, freeze or oft", kind)
    if kind in ("full", "freeze"):
        layers = {"trained_layers": _layers(settings)} if kind == "freeze" else {}
        return {"method": "full", "quantization": "none", "lora_rank": 0} | layers
    quantization = common.stored(settings)
    if settings.has("quantization_bit"):
        bits, method = settings.integer("quantization_bit", 4), settings.text("quantization_method", "bnb").lower()
        double = settings.flag("double_quantization", True)
        quantization = "int8" if bits == 8 else "nf4-double" if double else "nf4"
        if bits not in (4, 8) or method not in ("bnb", "bitsandbytes"):
            quantization = common.counted_bits(settings, bits, method)
    if kind == "oft":
        return {
            "method": "lora" if quantization == "none" else "qlora",
            "quantization": quantization,
            "lora_rank": settings.integer("oft_block_size", 32, at_least=1),
            "lora_targets": common.targets(settings, settings.names("oft_target") or ("all",)),
            "adapter_dtype": "fp32",
        }
    fields = common.adapters(settings, LLAMAFACTORY, quantization, settings.names("lora_target") or ("all",))
    if settings.flag(ENCODER, True):
        fields["lora_targets"] = common.without_encoder(settings, fields["lora_targets"])
    return {**fields, "modules_to_save": _saved(settings), "adapter_dtype": "fp32"}


ADDED_TOKENS = ("add_tokens", "add_special_tokens", "new_special_tokens", "resize_vocab")
"""Settings that make a vocabulary larger, or round it up."""


def _saved(settings: Settings) -> tuple[str, ...]:
    """Modules that train whole beside the adapters; of a vocabulary that grows the embeddings and the head.

    Source: LLaMA-Factory 0.9 `model/loader.py` load_tokenizer (added tokens set resize_vocab), `model/adapter.py`
    _setup_lora_tuning (no additional_target: the modules of both).
    """
    grows = next((key for key in ADDED_TOKENS if settings.raw(key)), "")
    if not grows or settings.has("additional_target"):
        return common.modules_to_save(settings, "additional_target")
    settings.assume(f"{grows} trains the embeddings and the head beside the adapters, as no additional_target is named")
    defaults = {"additional_target": ["embed_tokens", "lm_head"]}
    return common.modules_to_save(Settings(defaults, settings.name, settings.outside), "additional_target", settings)


def _layers(settings: Settings) -> int:
    """The layers that freeze tuning trains; 0, all, where a setup cannot say which parameters it does.

    Source: LLaMA-Factory 0.9 `hparams/finetuning_args.py` FreezeArguments (freeze_trainable_layers 2, its modules all),
    `model/adapter.py` _setup_freeze_tuning.
    """
    layers = settings.raw("freeze_trainable_layers", 2)  # negative: the first ones
    trained_layers = layers if type(layers) is int else 0
    extras = settings.raw("freeze_extra_modules") or settings.flag("use_llama_pro", False)
    sharded = settings.raw("deepspeed") or settings.raw("fsdp")
    if extras or settings.flag("fp16", False) or (sharded and trained_layers < 0):
        trained_layers = 0
    if not trained_layers:
        settings.approximate(UpperBound("freeze tuning trains some parameters: counted as full fine-tuning", *TRAINED))
    elif settings.text("freeze_trainable_modules", "all") != "all":
        settings.approximate(UpperBound("freeze tuning trains modules of layers: these are counted whole", *TRAINED))
    return trained_layers


def _precision(settings: Settings, *, widens: bool) -> str:
    """`widens`: whether what the autocast type leaves is fp32: of partial layers the frozen rest is not.

    Source: LLaMA-Factory 0.9.5 `model/loader.py` load_model (the file's type), `model/adapter.py` init_adapter (what
    trains is cast to fp32), `model/patcher.py` patch_config (`infer_dtype` is of models that do not train).
    """
    if settings.flag("pure_bf16", False):
        return "bf16-pure"
    autocast = common.autocast(settings, bf16_default=False)
    if autocast is None and widens:
        settings.assume("neither bf16 nor fp16: the weights are cast to fp32, no autocast")
        return "fp32"
    if autocast is None:
        settings.assume("neither bf16 nor fp16: weights in the checkpoint's type, taken to be bf16, no autocast")
        return "bf16-pure"
    return f"{autocast}-mixed" if widens else f"{autocast}-autocast"
