"""TRL configs (`trl sft --config FILE`) as setups. Defaults of the TRL version that is named, else of 1.16."""

from typing import Any

from planner.core.errors import NotATraining, NotPlanned
from planner.frameworks.readers import common, versions
from planner.frameworks.readers.common import adapter_kind, config, settings_fields
from planner.frameworks.readers.objectives import NAMED, PAIRS, of_settings, refusal, refuse, rollout_fields
from planner.frameworks.readers.sharding import Layout, device_map, fsdp, fsdp_words, loaded, parallel_of, zero_stage
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.transformers import TRL
from planner.options.objectives import OBJECTIVES, Objective

FORMAT = "trl"


def read(settings: Settings) -> ReadConfig:
    values, objective = settings.values, _objective(settings)
    # whose defaults hold: of the versions that are named, else of the newest that can run the file
    named = settings.outside.versions
    bound = versions.taking((), filter(settings.has, values), objective=objective.name)
    defaults = versions.trl(named.get("trl"), bound)
    if defaults.assumed:
        settings.assume(defaults.taken)
    older = (
        key for key, until in versions.TRL_PREFERENCE_CONFIG_KEYS.items() if defaults.version <= versions.parsed(until)
    )
    settings.note_unknown(versions.accepted(FORMAT).union(older), TRL)
    of_transformers = versions.transformers(named.get("transformers"), values, defaults)
    kwargs = settings.block("model_init_kwargs")
    inside = not settings.has("attn_implementation") and kwargs.has("attn_implementation")
    fields: dict[str, Any] = {
        "objective": objective.name,
        **_kernels_and_loss(settings, objective, defaults),
        **settings_fields(settings, TRL, "micro_batch_seqs", "accumulation_steps", "packing", "compile"),
    }
    tokens = pairs_length(objective, defaults)  # which older trainers of preferences took otherwise
    if not objective.rolls_out and (objective.supervised or tokens == 1024 or settings.has("max_length")):
        fields |= settings_fields(settings, TRL, "seq_len_tokens")
    elif not objective.rolls_out:
        if not tokens:
            settings.ask("seq_len_tokens", f": {defaults.label} cuts no pair unless told")
        fields["seq_len_tokens"] = tokens or 1024
    fields |= {
        **_method(settings, kwargs, defaults),
        "attention": common.attention(kwargs if inside else settings, "attn_implementation"),
        "optimizer": common.optimizer(settings, "optim", of_transformers.optimizer),
        "checkpointing": common.checkpointing(settings, defaults.checkpointing),
    }
    adapted = not objective.supervised and fields["method"] != "full"
    if adapted and settings.flag("disable_dropout", not objective.rolls_out):
        fields["lora_dropout"] = 0.0
    fields["activation_offload"] = common.offloads(settings, fields["checkpointing"])
    fields["selective_checkpointing"] = common.selects(settings, fields)
    if "max_length" in values and values["max_length"] is None and not objective.rolls_out:
        settings.ask("seq_len_tokens", ": max_length is null: nothing is cut")
    if objective.rolls_out:
        fields |= rollout_fields(settings, fields, objective.name, defaults.version)
    refuse(settings, fields, defaults.version)
    fields |= device_map(settings, kwargs) or parallel_of(settings, loaded(settings, kwargs) or sharded(settings))
    fields = common.adapter(settings, fields, adapter_kind(settings, FORMAT))
    common.pictures(settings, fields, {})
    by_fsdp = common.fsdp_checkpoints(common.fsdp_block(settings))
    return config(
        TRL, settings, fields, dataset=settings.raw("dataset_name"), keys=of_transformers.keys,
        only=of_transformers.only, reentrant=not by_fsdp and versions.reentrant(of_transformers, defaults),
    )  # fmt: skip


def _objective(settings: Settings) -> Objective:
    name, words = settings.name, settings.outside.arguments or ()
    objective, certain = of_settings(settings.values, name, settings.outside.objective or next(iter(words), ""))
    if objective not in OBJECTIVES:
        raise refusal(f"{name}: objective {objective}")
    if settings.raw("do_train") is False and settings.raw("do_eval") is True:
        raise NotATraining(f"{name}: do_train is false: not a training", hint="give the config of a training")
    folder = next((root.name for root in settings.outside.roots), "")  # recipes/zephyr-7b-beta/dpo/config_full.yaml
    named = {*NAMED.findall(folder.lower())} & {*PAIRS}
    if not certain and len(named) == 1:
        (objective,) = named
        settings.assume(f"objective {objective}: by its folder's name")
    elif not certain:
        kinds = "of which kind (dpo, kto, orpo) the command that it is for says"
        settings.ask("objective", f" has beta: preferences, {kinds}")
    return OBJECTIVES[objective]


def _kernels_and_loss(settings: Settings, objective: Objective, defaults: versions.TrlDefaults) -> dict[str, Any]:
    liger = settings.flag(settings.first("use_liger_kernel", "use_liger"), False)
    whole = settings.real("label_smoothing_factor", 0.0) > 0
    kind = settings.optional_text("loss_type") if objective.supervised else None  # DPO's is a list
    loss = defaults.loss(kind, liger=False, whole=whole)
    if liger and defaults.loss(None, liger=True) == "liger":
        loss = "full"  # before 1.16 the switch takes the loss, whatever its type
    fields: dict[str, Any] = common.liger(settings, liger, loss)
    if objective.supervised:
        return fields | defaults.program(fields["loss"])
    if objective.reference and settings.flag("precompute_ref_log_probs", False):
        fields["precomputed_reference"] = True
    return fields | loss_of(objective, defaults, settings)


def _method(settings: Settings, kwargs: Settings, defaults: versions.TrlDefaults) -> dict[str, Any]:
    quantization, compute = _quantization(settings, kwargs)
    peft = settings.flag("use_peft", False)
    unused = [key for key in ("lora_r", "lora_alpha", "lora_target_modules") if settings.has(key)]
    if unused and not settings.has("use_peft"):
        settings.ask(
            "method", f" sets {unused[0]} but not use_peft: trl trains every weight then, another program may not"
        )
    method = "full" if not peft else "lora" if quantization == "none" else "qlora"
    fields = {"method": method, "quantization": quantization if peft else "none"}
    fields["precision"] = _precision(settings, method, quantization, compute, defaults)
    if not peft:
        return fields | {"lora_rank": 0}
    if settings.has("lora_target_parameters"):
        settings.approximate("adapters on stacked expert parameters are not counted")
    return {
        **fields,
        **settings_fields(settings, TRL, "lora_rank", "lora_dropout"),
        "lora_targets": common.targets(settings, settings.names("lora_target_modules")),
        "modules_to_save": common.modules_to_save(settings, "lora_modules_to_save"),
    }


def _precision(
    settings: Settings, method: str, quantization: str, compute: str | None, defaults: versions.TrlDefaults
) -> str:
    """`compute`: the type in which 4-bit weights compute, where it is given apart from `dtype`."""
    key = settings.first("dtype", "torch_dtype")
    if not settings.has(key):
        settings.assume("dtype absent: float32 weights, TRL's default")
    weights = common.weight_dtype(settings, key, "float32")
    autocast = common.autocast(settings, bf16_default=defaults.bf16)
    if method == "qlora" and autocast == "fp16":
        settings.approximate(
            "TRL casts a quantized base's adapters to bf16, which the fp16 loss scaler cannot unscale: the run stops "
            "at its first optimizer step"
        )
    if compute is None and weights == "fp32" and autocast and quantization in common.FOUR_BIT:
        settings.approximate("4-bit weights compute in float32 here (TRL takes the compute type from dtype)")
    return common.precision(settings, weights, autocast, method)


def loss_of(objective: Objective, defaults: versions.TrlDefaults, settings: Settings) -> dict[str, str]:
    """The loss that TRL's trainer of an objective has, and the version where its step is another than today's."""
    version, name, since = defaults.version, settings.name, versions.TRL_OF_OBJECTIVES_SINCE[objective.name]
    # no full logits any more: read in 1.16; 1.14 makes them
    if version >= (1, 15) or (objective.losses == ("full",) and version >= since):
        return {"loss": objective.losses[0]}
    flag = next((key for key in ("use_liger_loss", "use_liger_kernel") if settings.flag(key, False)), "")
    between = objective.name == "kto" and version >= (1, 6)  # other parts of its whole logits
    if version < since or between or flag:
        raise NotPlanned(
            f"{name} trains {objective.name} with {defaults.label}{f' and {flag}' * bool(flag)}, whose step is "
            "another: not modelled",
            hint="--assume trl==1.16 judges it as today's; plan trace -- python FILE runs it on a phantom GPU",
        )
    for key in BEYOND_PAIRS:
        if settings.raw(key) not in (None, False):
            settings.approximate(f"{key} of {defaults.label} is not counted")
    settings.assume("whole logits are counted, which TRL from 1.15 on never holds (--assume trl==1.16)")
    return {"loss": "full", "trl_version": ".".join(map(str, version))}


BEYOND_PAIRS = ("rpo_alpha", "use_weighting", "padding_free", "use_logits_to_keep", "sync_ref_model")
"""Settings of older DPO trainers that add logits, or take some away."""


def pairs_length(objective: Objective, defaults: versions.TrlDefaults) -> int:
    """To how many tokens a trainer cuts that is not told; 0: to none."""
    older = versions.TRL_CUTS_PAIRS.get(objective.name, ())
    return next((tokens for until, tokens in older if defaults.version < until), 1024)


def sharded(settings: Settings) -> Layout:
    """How a config with TrainingArguments' names spreads over GPUs."""
    named = settings.raw("deepspeed")
    if named not in (None, ""):
        return zero_stage(settings, named)
    if settings.raw("fsdp") or settings.has("fsdp_config"):
        block = dict(common.fsdp_block(settings).values)
        words = settings.raw("fsdp", True)
        if isinstance(words, list):
            words = " ".join(map(str, words))
        return fsdp_words(settings, words, block) if isinstance(words, str) else fsdp(settings, block)
    word = settings.raw("accelerate_config", "none")
    if isinstance(word, str) and word in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2"):
        version = {"fsdp_version": 1} if word == "fsdp1" else {}
        return {"parallel": "fsdp2" if word.startswith("fsdp") else word, **version}
    return {"parallel": "none"}


def _quantization(settings: Settings, kwargs: Settings) -> tuple[str, str | None]:
    """(quantization, compute dtype where it is given apart from `dtype`)."""
    inner = kwargs.mapping("quantization_config")
    if inner:
        block = Settings(inner, f"{settings.name}: quantization_config")
        if block.flag("load_in_8bit", False):
            return "int8", None
        if block.flag("load_in_4bit", False):
            double = block.flag("bnb_4bit_use_double_quant", False)
            return ("nf4-double" if double else "nf4"), block.text("bnb_4bit_compute_dtype", "float32")
    if settings.flag("load_in_8bit", False):
        return "int8", None
    if settings.flag("load_in_4bit", False):
        if settings.text("bnb_4bit_quant_type", "nf4") != "nf4":
            settings.assume("fp4 is counted like nf4 (the same bytes)")
        return ("nf4-double" if settings.flag("use_bnb_nested_quant", False) else "nf4"), None
    return common.stored(settings), None
