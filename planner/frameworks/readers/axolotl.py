"""Axolotl configs (`axolotl train FILE`) as setups. Defaults of Axolotl 0.21."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.core.errors import ConfigError, NotPlanned, Undetermined
from planner.frameworks.readers import common, versions
from planner.frameworks.readers.common import adapter_kind, config, settings_fields
from planner.frameworks.readers.objectives import estimated, of_trainer, refuse, rollout_fields
from planner.frameworks.readers.sharding import Layout, device_map, fsdp, hybrid, with_cut_sequences, zero_stage
from planner.frameworks.readers.types import TRAINED, LowerBound, ReadConfig, UpperBound
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.axolotl import AXOLOTL, LIGER_SWITCHES, LORA_SWITCHES, own_kernels
from planner.memory.attention_kernels import default_attention, has_expert_stacks
from planner.options.kernels import KERNELS, LIGER_LOSS, LIGER_PARTS, USUAL_TYPE
from planner.options.objectives import OBJECTIVES
from planner.options.precisions import PRECISIONS
from planner.setup.allowed import XFORMERS

FORMAT = "axolotl"
ADAPTERS = ("lora", "qlora")
OLD_ATTENTION_SWITCHES = {
    "flash_attention": "flash-attention-2",
    "sdp_attention": "sdpa",
    "flex_attention": "sdpa",
    "eager_attention": "eager",
    "xformers_attention": "sdpa",
}
NOT_COUNTED = {
    "lora_target_parameters": "adapters on stacked expert parameters are not counted",
    "relora": "ReLoRA's restarts are not counted",
    "relora_steps": "ReLoRA's restarts are not counted",
    **dict.fromkeys(("qat", "use_onebitllms"), common.FAKE_QUANTIZED),
    "use_eaft": LowerBound("the logits' copies of Axolotl's own loss (EAFT) are not counted", "loss"),
    "fp8": "fp8 matrix multiplications are counted as bf16",
    "diffusion": "a diffusion language model's noise schedule is not counted",
    "model_quantization_config": "the model's own quantization is not followed",
    "lisa_n_layers": UpperBound("LISA trains some layers at a time: counted as all", *TRAINED),
    "spectrum_top_fraction": UpperBound("Spectrum trains some layers: counted as all", *TRAINED),
    "s2_attention": "shifted sparse attention is counted as full attention",
    "tiled_mlp": common.TILED_MLP,
    "peft_trainable_token_indices": "single trained rows of the embeddings are not counted",
    "overrides_of_model_kwargs": "overrides_of_model_kwargs are not followed",
    **{
        key: UpperBound(f"{key}: counted as if nothing left the GPU", "weights")
        for key in ("ple_cpu_offload", "lora_on_cpu")
    },
}


def read(settings: Settings) -> ReadConfig:
    settings.note_unknown(versions.known_settings(FORMAT), AXOLOTL)
    objective = _objective(settings)
    adapter = settings.raw("adapter")
    if adapter and adapter not in ADAPTERS:
        raise NotPlanned(f"{settings.name}: adapter {adapter!r} is not planned", hint="lora and qlora are")
    fields = settings_fields(settings, AXOLOTL, "micro_batch_seqs", "seq_len_tokens", "packing")
    if not settings.has("gradient_accumulation_steps") and settings.has("batch_size"):
        micro = fields["micro_batch_seqs"]
        steps = max(1, settings.integer("batch_size", micro, at_least=1) // micro)
    else:
        steps = settings_fields(settings, AXOLOTL, "accumulation_steps")["accumulation_steps"]
    fields |= {
        "accumulation_steps": steps,
        "optimizer": common.optimizer(settings, "optimizer", "adamw_torch_fused"),
        "compile": settings.raw("torch_compile") is True,
        "attention": _attention(settings),
        "loss": _loss(settings),
        **_method(settings),
    }
    if objective != "sft":
        fields |= _of_objective(settings, fields, objective)
    fields["kernels"] = _kernels(settings, fields)
    fields["precision"] = _precision(settings, fields["method"])
    named = settings.raw("attn_implementation") == XFORMERS or settings.raw("xformers_attention") is True
    if named and fields["packing"] and fields["precision"].startswith("fp16"):
        fields |= {"attention": XFORMERS, "stack": "axolotl"}
    fields["checkpointing"] = _checkpointing(settings)
    fields["activation_offload"] = _offloads(settings, fields["checkpointing"])
    # Whether checkpointed layers keep their attention, which is what `true` means.
    value = settings.raw("selective_checkpointing")
    if value and value is not True:
        settings.approximate("of what selective_checkpointing keeps only attention is counted")
    fields["selective_checkpointing"] = bool(value) and common.keeps_attention(settings, fields)
    if settings.raw("peft_autocast_adapter_dtype") is False and fields["method"] == "lora":
        fields["adapter_dtype"] = "bf16" if PRECISIONS[fields["precision"]].compute == "bf16" else "auto"
    elif fields["method"] != "full":
        fields["adapter_dtype"] = "fp32"
    cuts = settings.first("context_parallel_size", "sequence_parallel_degree")
    fields |= device_map(settings, settings) or with_cut_sequences(settings, cuts, _parallel(settings), fields)
    if fields.get("expert_degree", 1) > 1:
        fields["stack"] = FORMAT  # which alone runs it beside whole copies
    fields = common.adapter(settings, fields, adapter_kind(settings, FORMAT))
    fields |= common.adapted_layers(settings, "peft_layers_to_transform", fields)
    fields |= common.frozen_but(settings, settings.model, fields)
    common.pictures(settings, fields, {"processor_type": settings.raw("processor_type")})
    settings.leave_out(NOT_COUNTED)
    reentrant = _reentrant(settings, fields)
    if settings.raw("layer_offloading"):
        settings.approximate(_layers_away(fields, reentrant))
    config_of = settings.raw("overrides_of_model_config")
    if isinstance(config_of, dict) and (sizes := sorted(common.SIZES & set(config_of))):
        settings.ask("model", f": overrides_of_model_config sets {', '.join(sizes)}")
    datasets = settings.raw("datasets", settings.raw("pretraining_dataset", []))
    first = datasets[0] if isinstance(datasets, list) and datasets and isinstance(datasets[0], dict) else {}
    dataset = first["path"] if isinstance(first.get("path"), str) else None
    return _as_loaded(settings, config(AXOLOTL, settings, fields, dataset=dataset, reentrant=reentrant))


def _layers_away(fields: Mapping[str, Any], reentrant: bool) -> str:
    """What to say of frozen layers that wait in the host's memory, once all of the model was on the GPU.

    What a forward recorded keeps its weights there: all without checkpointing, and bitsandbytes' in the newer form too
    (its node holds them by itself). Layers that come for the backward then lie beside them.

    Source: axolotl 0.21 `core/trainers/mixins/layer_offloading.py`; bitsandbytes 0.50 `MatMul4Bit` (ctx.tensors).
    Measured: traced as it stands, Llama-3.1-8B (docs/kernels.md): 15.5 -> 6.1 GiB after the first micro-batch of LoRA,
    17.8 -> 18.2 without checkpointing; QLoRA 12.9 -> 9.6 reentrant, 12.9 otherwise.
    """
    if not fields["checkpointing"] or (fields["quantization"] != "none" and not reentrant):
        return "layer_offloading: what the backward needs stays on the GPU, and a layer more that comes back beside it"
    words = "layer_offloading: counted as if no layer left the GPU again"
    return UpperBound(words, *TRAINED, "activations", "loss", "workspace")


def _as_loaded(settings: Settings, config: ReadConfig) -> ReadConfig:
    """The config under the stack that makes its 4-bit base where it says: in the host's memory, or on every GPU.

    Source: axolotl 0.21 utils/schemas/validation.py check_fsdp2_cpu_ram_efficient_loading_w_4bit, loaders/nf4.py.
    """
    setup, block = config.setup, settings.block("fsdp_config")
    by_rank_0 = block.flag(block.first("cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading"), False)
    staged = by_rank_0 and settings.raw("qlora_sharded_model_loading") is not False
    sharded = setup.four_bit and setup.parallel == "fsdp2" and not setup.transformers_version
    if not sharded or setup.stages_nf4 == staged:
        return config
    return replace(config, setup=setup.replace(stack="axolotl-staged" if staged else "axolotl-unstaged"))


OF_RL = {
    **dict.fromkeys(("dpo", "ipo"), "dpo"), **dict.fromkeys(("orpo", "simpo"), "orpo"), "kto": "kto",
    **dict.fromkeys(("grpo", "gdpo"), "grpo"),
}  # fmt: skip
"""Value of `rl` -> the objective whose trainer of TRL it subclasses.

Source: axolotl-ai-cloud/axolotl@067b021c core/builders/rl.py, core/trainers/trl.py. TRL 1.16's CPOTrainer, SimPO's, has
the same concatenated_forward and get_batch_logps as ORPOTrainer.
"""
TRL = (1, 14)
"""The TRL that Axolotl 0.21 pins."""


def _objective(settings: Settings) -> str:
    kind, name = settings.raw("rl"), settings.name
    if settings.raw("kd_trainer"):
        raise estimated(name, "distillation (kd_trainer)", "Axolotl")
    if settings.raw("process_reward_model"):
        raise estimated(name, "process rewards (process_reward_model)", "Axolotl", "reward")
    if settings.raw("reward_model"):
        return "reward"
    if kind and (kind not in OF_RL or settings.raw("trainer_cls")):
        raise estimated(name, f"rl: {kind}", "Axolotl", OF_RL.get(kind, ""))
    if kind and (other := next(filter(settings.block("trl").raw, OF_ROLLOUTS), "")):
        raise estimated(name, f"rl: {kind} ({other})", "Axolotl", OF_RL[kind])
    return OF_RL.get(kind, "sft")


OF_ROLLOUTS = ("use_data_producer", "async_prefetch", "rollout_func")
"""Settings of Axolotl's block `trl` that make another loop of it."""


def _of_objective(settings: Settings, fields: Mapping[str, Any], objective: str) -> dict[str, Any]:
    """The fields of another objective than supervised training."""
    for key in ("dpo_use_liger_kernel", "use_liger_loss"):
        if settings.raw(key) or settings.block("trl").raw(key):
            settings.approximate("Liger's loss of this objective holds no logits: counted as if all were there")
    counted, version = "", ""
    if objective == "kto":
        counted, version = "KTO's whole logits in TRL 1.14, which Axolotl runs, are counted as TRL 1.5's", "1.5"
    elif settings.raw("rl") == "simpo":
        counted = "SimPO is counted as ORPO, whose step in TRL keeps the same logits"
    elif objective == "grpo":
        version = ".".join(map(str, TRL))
    more = of_trainer(settings, fields, objective, version=version, counted=counted)
    if settings.raw("precompute_ref_log_probs") and OBJECTIVES[objective].reference:
        more["precomputed_reference"] = True
    if objective == "grpo":
        given = {"beta": settings.raw("rl_beta")} | settings.mapping("trl")
        if given.get("vllm_mode") == "colocate":  # core/trainers/grpo/__init__.py: of no other mode, TRL's own neither
            given["vllm_gpu_memory_utilization"] = settings.block("vllm").raw("gpu_memory_utilization", 0.9)
        else:
            given.pop("vllm_enable_sleep_mode", None)
        rolled = settings.blocks["rollout"] = Settings(given, settings.name, settings.outside)
        more |= rollout_fields(rolled, {**fields, **more}, objective, TRL)
    refuse(settings.blocks.get("rollout", settings), {**fields, **more}, TRL)
    return more


def _method(settings: Settings) -> dict[str, Any]:
    adapter = settings.raw("adapter")
    four, eight = settings.flag("load_in_4bit", False), settings.flag("load_in_8bit", False)
    if not adapter:
        if four or eight:
            raise ConfigError(
                f"{settings.name}: quantized weights cannot be trained without an adapter",
                hint="add `adapter: qlora`, or load_in_4bit: false",
            )
        return {"method": "full", "quantization": "none", "lora_rank": 0}
    if settings.raw("gptq"):
        settings.approximate("GPTQ weights are counted like NF4")
        four = True
    quantization = "int8" if eight else "none"
    if four:
        inner = settings.block("bnb_config_kwargs")
        quantization = "nf4-double" if inner.flag("bnb_4bit_use_double_quant", True) else "nf4"
    elif adapter == "qlora" and not eight:
        raise ConfigError(f"{settings.name}: adapter qlora needs load_in_4bit: true", hint="or write adapter: lora")
    names = settings.names("lora_target_modules")
    if isinstance(settings.raw("lora_target_modules"), str):
        names = (settings.text("lora_target_modules", ""),)
    if settings.flag("lora_target_linear", False):
        if names and names != ("all-linear",):
            settings.assume("lora_target_linear adds all linear layers to lora_target_modules")
        names = ("all-linear",)
    return {
        **common.adapters(settings, AXOLOTL, quantization, names),
        "quantize_experts": _quantizes_experts(settings, quantization),
        "modules_to_save": common.modules_to_save(settings, "lora_modules_to_save"),
    }


def _quantizes_experts(settings: Settings, quantization: str) -> bool:
    model = settings.model
    if not settings.flag("quantize_moe_experts", False) or (model is not None and not has_expert_stacks(model)):
        return False
    if quantization == "int8":
        settings.approximate("stacked experts in 8 bits (quantize_moe_experts): no dry run follows them")
    return quantization != "none"


def _precision(settings: Settings, method: str) -> str:
    if settings.flag("bfloat16", False):
        return "bf16-pure"
    fp16 = settings.raw("fp16") == "auto" or settings.flag("fp16", False) or settings.flag("float16", False)
    word = settings.raw("bf16", "auto" if not fp16 else False)
    if word == "auto":
        settings.assume("bf16 auto: on, as on every card since Ampere")
    if word in ("auto", "full") or settings.flag("bf16", False):
        return "bf16-autocast"
    if fp16:
        if method == "full":
            settings.approximate("fp16 full fine-tuning: counted with fp32 weights (fp16 ones cannot be unscaled)")
            return "fp16-mixed"
        return "fp16-autocast"
    if settings.flag("load_in_8bit", False):
        settings.assume("an int8 base without bf16 is loaded in fp16")
        return "fp16-autocast"
    return "fp32"


def _checkpointing(settings: Settings) -> int:
    value = settings.raw("gradient_checkpointing", False)
    if value in ("offload", "offload_disk", "unsloth"):
        return 1
    if common.fsdp_checkpoints(settings.block("fsdp_config")):
        return 1
    if not settings.flag("gradient_checkpointing", False):
        return 0
    return settings.block("gradient_checkpointing_kwargs").integer("every_n_layers", 1, at_least=1)


def _reentrant(settings: Settings, fields: Mapping[str, Any]) -> bool:
    """Whether Axolotl asks for the older form of checkpointing, as it does where nothing else is said.

    Source: axolotl 0.21 `utils/config/__init__.py` normalize_config (and Gemma 4 without it),
    `monkeypatch/selective_checkpointing.py`; its reader's keys that set the form are `read._reentrant`'s.
    """
    overridden = any(
        settings.raw(key) is not None for key in ("gradient_checkpointing_kwargs", "unfrozen_parameters", "rl")
    )
    gemma = settings.model is not None and settings.model.model_type.startswith("gemma4")
    checkpointing = settings.raw("gradient_checkpointing") is True
    return checkpointing and not (
        overridden or gemma or fields["selective_checkpointing"] or fields["activation_offload"]
    )


def _offloads(settings: Settings, checkpointing: int) -> bool:
    everything = settings.raw("activation_offloading", False)
    if everything and not checkpointing:
        settings.approximate(common.OFFLOADED)
        return False
    if everything is True and settings.raw("adapter"):
        settings.approximate(
            "activation_offloading: true moves all activations of an adapter's run, not only checkpoints"
        )
    return bool(checkpointing) and (
        bool(everything) or settings.raw("gradient_checkpointing") in ("offload", "offload_disk", "unsloth")
    )


def _attention(settings: Settings) -> str:
    if settings.raw("gemma4_hybrid_attn_impl") is True:  # 0.21 monkeypatch/gemma4_hybrid_mask.py
        settings.assume(
            "gemma4_hybrid_attn_impl: heads of 512 run SDPA beside flash attention, counted as SDPA for all"
        )
        return "sdpa"
    if settings.has("attn_implementation"):
        return common.attention(settings, "attn_implementation")
    for key, kind in OLD_ATTENTION_SWITCHES.items():
        if settings.raw(key) is True:
            settings.assume(f"{key} is read as attn_implementation {kind}")
            return kind
    default = default_attention(settings.model)
    settings.assume(f"no attention named: {default}, transformers' default")
    return default


def _loss(settings: Settings) -> str:
    plugged = any("cut_cross_entropy" in plugin for plugin in _plugins(settings))
    cut = settings.raw("cut_cross_entropy", plugged) is True
    # Axolotl's own form of Liger's loss, and cut cross-entropy, know more models than Liger does
    if cut or settings.raw("liger_fused_linear_cross_entropy") is True:
        kind = settings.model.model_type if settings.model is not None else USUAL_TYPE
        loss = "liger" if kind in LIGER_LOSS or (kind in LIGER_PARTS and not cut) else "chunked"
        if cut or loss == "chunked":
            what = "cut cross-entropy" if cut else f"Axolotl's own fused loss for {kind}"
            settings.assume(f"{what} is counted as a fused loss ({loss})")
        return loss
    if settings.raw("chunked_cross_entropy") is True:
        return "chunked"
    return "full"


def _kernels(settings: Settings, fields: dict[str, Any]) -> str:
    """The Liger plugin's layers, and Axolotl's own LoRA kernels: on by themselves for adapters without dropout where
    the config says nothing of them, trains no preferences or rollouts, and trusts no remote code.

    Source: Axolotl 0.21 `integrations/liger/args.py`, `utils/schemas/config.py` check_auto_enable_lora_kernels.
    """
    options = {name: settings.raw(name, False) is True for name in LIGER_SWITCHES.values()}
    liger, model = "eager", settings.model
    if any("liger" in plugin.lower() for plugin in _plugins(settings)) and any(options.values()):
        liger = common.liger_kernels(settings, {part: (name,) for part, name in LIGER_SWITCHES.items()}, options)
    by_itself = not (settings.raw("rl") or settings.raw("trust_remote_code"))
    switches = [settings.raw(name, None if by_itself else False) for name in LORA_SWITCHES]
    family = own_kernels(liger, fields, switches, model.model_type if model is not None else "")
    if family and ("lora" in KERNELS[family].parts or True not in switches):
        return family
    where = "" if family else " without Liger's layers"
    settings.approximate(f"Axolotl's LoRA kernels{where}: counted as eager ones, slower and larger")
    return family or "eager"


def _plugins(settings: Settings) -> tuple[str, ...]:
    value = settings.raw("plugins", [])
    return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)


def _parallel(settings: Settings) -> Layout:
    if settings.raw("deepspeed"):
        return zero_stage(settings, settings.raw("deepspeed"))
    if settings.raw("fsdp_config") or settings.raw("fsdp"):
        inner = settings.raw("fsdp_config", {})
        inner = inner if isinstance(inner, dict) else {}
        older = bool(settings.raw("fsdp"))  # a list of words is FSDP 1's, which axolotl 0.21 has no more
        layout = fsdp(settings, inner, version=settings.integer("fsdp_version", 1 if older else 2)) | _mesh(settings)
        if "fsdp_version" in layout:
            settings.assume("FSDP 1 is an older Axolotl's (0.21 refuses it), taken with transformers 4.57")
            return layout | {"transformers_version": "4.57"}
        return layout
    return {"parallel": "none", **_mesh(settings)}


def _mesh(settings: Settings) -> Layout:
    num_gpus = settings.outside.num_gpus
    names = ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "context_parallel_size")
    shard, copies, tensor, context = (settings.integer(key, 1, at_least=1) for key in names)
    tensor = tensor if num_gpus > 1 else 1
    layout = hybrid(settings, num_gpus, shard=shard, copies=copies, tensor=tensor, context=context)
    experts = settings.integer("expert_parallel_size", 1, at_least=1)
    if experts == 1:
        return layout
    mesh = experts * shard * tensor * context  # 0.21 integrations/expert_parallel/plugin.py _resolve_ep_group
    if mesh != num_gpus:
        raise Undetermined(
            f"{settings.name}: expert_parallel_size {experts} makes a mesh of {mesh} GPUs, of {num_gpus} in the run",
            hint=f"say how many the run has: --gpus {mesh}",
        )
    if mesh == experts:
        return {**layout, "expert_degree": experts}
    settings.approximate(
        "experts distributed beside FSDP (expert_parallel_size) are counted as if it sharded everything"
    )
    return layout
