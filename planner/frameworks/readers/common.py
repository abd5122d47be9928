"""Names back into setup values: the inverse of `planner.frameworks.exporters.common`, wider where tools have aliases;
and settings that every tool on top of transformers' TrainingArguments writes in the same words."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from planner.core.errors import ConfigError, SetupError
from planner.core.shipped import by_model_type
from planner.frameworks.exporters.common import USUAL_ATTENTION_MODULES, USUAL_LINEAR_MODULES
from planner.frameworks.readers import versions
from planner.frameworks.readers.loading import parse_json
from planner.frameworks.readers.types import (
    FROZEN_ENCODER,
    ON_TEXT,
    TEXT_ALONE,
    TRAINED,
    LowerBound,
    Missing,
    ReadConfig,
    UpperBound,
)
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools import Tool
from planner.memory.attention_kernels import attention_refusal, default_attention
from planner.memory.trained import trained_parameters
from planner.models import catalogue
from planner.models.encoders import SEEING, with_vision
from planner.models.spec import ModelSpec
from planner.models.stored import packed_as, stored_bits, stored_method
from planner.models.targets import same_targets
from planner.options.adapters import ADAPTERS
from planner.options.images import WITH_IMAGES
from planner.options.kernels import KERNELS, LIGER_LOSS, LIGER_PARTS, USUAL_TYPE, kernels_refusal
from planner.options.optimizers import OPTIMIZERS as ROWS
from planner.options.precisions import PRECISIONS as PRECISION_ROWS
from planner.options.precisions import precision_of
from planner.options.stacks import STACKS
from planner.setup import TrainSetup
from planner.setup.allowed import FLEX, SAVED_MODULES

OPTIMIZERS = {alias: name for name, row in ROWS.items() for alias in (row.transformers or name, *row.aliases)}
SAME_STATES = {alias: name for name, row in ROWS.items() for alias in row.same_states}
BOUNDED: dict[str, tuple[str, tuple[str, ...]]] = {
    name: (row, categories)
    for row, categories, names in (
        ("adamw", TRAINED, "galore_adafactor galore_adafactor_layerwise galore_adamw galore_adamw_8bit lomo adalomo"),
        ("adamw", TRAINED, "galore_adamw_layerwise galore_adamw_8bit_layerwise q_galore_adamw_8bit"),
        ("adamw", TRAINED, "apollo_adamw apollo_adamw_layerwise"),
        ("adamw", ("optimizer",), "muon dion came_pytorch grokadamw flash_adam flash_adamw flash_lion flash_sgd"),
        ("adamw", ("optimizer",), "flash_sgdw"),
        ("adamw-8bit", ("optimizer",), "adamw_torch_8bit adamw_torch_4bit ao_adamw_8bit ao_adamw_4bit ao_adamw_fp8"),
        ("adamw-amsgrad", ("optimizer",), "stable_adamw optimi_adamw"),
    )
    for name in names.split()
}
"""Optimizers that keep no more than a row, which may be much less: the row, and what of it. Layer by layer gradients go
early too.

Sources: arXiv 2403.03507 (GaLore), 2412.05270 (APOLLO), 2306.09782 (LOMO), 2307.02047 (CAME), 2504.05295 (Dion);
`torch.optim.Muon` (one state of matrices); grokadamw 0.1.2 (its states lie on the host); torchao 0.18 (embeddings in 8
bits too); torch-optimi 0.3.3 (a third state of 16-bit weights alone).
"""
KNOWN_OPTIMIZERS = frozenset({*OPTIMIZERS, *SAME_STATES, *BOUNDED})

_HUB_KERNELS = ("flash-attn2", "flash-attn3", "flash-attn", "vllm-flash-attn3")
ATTENTIONS = {
    "eager": "eager",
    **dict.fromkeys(("sdpa", "flash_attention_torch", "flex_attention", "xformers"), "sdpa"),
    **{f"flash_attention_{version}": "flash-attention-2" for version in (2, 3, 4)},
    **{f"kernels-community/{name}": "flash-attention-2" for name in _HUB_KERNELS},
}

DTYPES = {
    "float32": "fp32", "fp32": "fp32", "float": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16",
    "fp16": "fp16", "half": "fp16",
}  # fmt: skip

FAKE_QUANTIZED = LowerBound("fake-quantized copies of weights are not counted", "weights", "activations")
"""Measured: Unsloth 2025.10 on a T4, Qwen3-4B, int4: 14.1 GiB reserved, 8.2 without them (its QAT notebook)."""
TILED_MLP = UpperBound("an MLP in pieces of the sequence is counted whole", "activations", "workspace")
"""Measured: Unsloth 2025.11 on an A100, gpt-oss-20b, 500,000 tokens: 70.5 GiB reserved, 174 with the MLP whole."""
FOUR_BIT = ("nf4", "nf4-double")
PRECISIONS = {(row.weights, row.autocast): name for name, row in PRECISION_ROWS.items() if row.autocast or row.offered}
"""(data type of the weights, of autocast) -> precision."""

SIZES = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "hidden_size", "n_embd", "d_model", "intermediate_size",
    "num_attention_heads", "num_key_value_heads", "n_head", "vocab_size", "num_experts", "num_local_experts",
    "head_dim",
}  # fmt: skip
"""Settings of a model's configuration that make another model of it."""
PEFT_DEFAULT_TARGETS = by_model_type("peft_targets")
"""PEFT's own targets where none are given (peft 0.21, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING): it stops at
a type that is not named there."""


def optimizer(settings: Settings, key: str, default: str, word: str | None = None) -> str:
    """A setup's optimizer from a tool's name, or from transformers' `word` for it: for one without a row, noted, that
    of the same states, or of no fewer."""
    name = (settings.text(key, default) if word is None else word).lower().removeprefix("optimizernames.")
    if name not in KNOWN_OPTIMIZERS:
        close = get_close_matches(name, sorted(KNOWN_OPTIMIZERS), n=1, cutoff=0.6)
        raise ConfigError(
            f"{settings.name}: {key} names no optimizer: {name!r:.80}",
            hint=f"did you mean {close[0]}?" if close else "adamw_torch_fused is the usual one",
        )
    arguments = str(settings.raw("optim_args") or "")
    if name == "sgd" and "momentum" in arguments:
        return "sgd-momentum"
    if name == "rmsprop" and ("momentum" in arguments or "centered" in arguments):
        counted, categories = BOUNDED["optimi_adamw"]
    elif name in OPTIMIZERS:
        return OPTIMIZERS[name]
    elif name in SAME_STATES:
        settings.assume(f"optimizer {name} keeps the states of {SAME_STATES[name]}: counted as that")
        return SAME_STATES[name]
    else:
        counted, categories = BOUNDED[name]
    settings.approximate(_without_row(name, counted, categories))
    return counted


_NO_ROW = "optimizer "


def _without_row(name: str, counted: str, categories: tuple[str, ...]) -> UpperBound:
    return UpperBound(f"{_NO_ROW}{name} has no memory model of its own: counted as {counted}", *categories)


def default_optimizer(settings: Settings) -> str:
    """What transformers' Trainer takes by itself, in the version that is named, else in the newest."""
    return versions.transformers(settings.outside.versions.get("transformers"), (), None).optimizer


def attention(settings: Settings, key: str) -> str:
    """A setup's attention from transformers' name; where none is given, what transformers takes for the model."""
    name = settings.text(key, default_attention(settings.model)).removeprefix("paged|").split("@")[0].split(":")[0]
    if name not in ATTENTIONS:
        settings.approximate(f"attention {name!r} has no memory model of its own: counted as sdpa")
        return "sdpa"
    if name == "flex_attention" and settings.model is not None and not attention_refusal(settings.model, FLEX):
        return FLEX
    if ATTENTIONS[name].replace("-", "_") != name:
        settings.assume(f"attention {name} is counted as {ATTENTIONS[name]}")
    return ATTENTIONS[name]


NOT_UNSCALED = (
    "the loss scaler of fp16 autocast cannot unscale the gradients of 16-bit weights, so full fine-tuning stops at "
    "its first step; load the weights in float32"
)
"""Source: PyTorch 2.13 `torch/amp/grad_scaler.py` _unscale_grads_ (fp16: "Attempting to unscale FP16 gradients"),
`AmpKernels.cu` (no kernel for bf16: pytorch/pytorch issue 127176). Not under FSDP, where accelerate 1.15 makes what
trains fp32 (`utils/fsdp_utils.py` fsdp2_prepare_model, `Accelerator.prepare_model`), and under DeepSpeed, which has
fp32 masters and a scaler of its own."""


def precision(settings: Settings, weights: str, autocast: str | None, method: str) -> str:
    """A setup's precision from the data types of weights and autocast."""
    if method == "full" and autocast == "fp16" and weights != "fp32":
        sharded = settings.raw("deepspeed") or settings.raw("fsdp")
        if not sharded and (weights == "fp16" or stored_dtype(settings.model)):  # else bf16 may be a guess
            settings.refusals.append(NOT_UNSCALED)
        else:
            settings.assume(f"{weights} weights under fp16 autocast are counted as fp16-mixed")
        return "fp16-mixed"
    if (weights, autocast) in PRECISIONS:
        return PRECISIONS[(weights, autocast)]
    if method != "full":
        return precision_of(weights, autocast)
    settings.assume("fp16 weights without autocast are counted like bf16 ones (the same bytes)")
    return "bf16-pure"


def stored(settings: Settings) -> str:
    """The quantization of a base for which nobody asks for one: transformers loads a checkpoint as it is published."""
    bits = stored_bits(settings.model)
    if bits:
        settings.assume(f"no quantization asked for: the checkpoint is published in {bits}, and loads as that")
    elif bits := packed_as(settings.model):
        settings.approximate(f"the checkpoint's {stored_method(settings.model)} weights are counted as {bits}")
    return bits or "none"


def counted_bits(settings: Settings, bits: int, whose: str) -> str:
    """The quantization that is nearest to another one's weights of so many bits, which is said: the bytes of a weight.

    LLM.int8()'s multiplication keeps its inputs for the backward under checkpointing too; others of 8 bits, of which
    none was measured, need not.

    Args:
        whose: the class or method that quantizes. Scales of a group of 64 or 128 weights make 4 bits 4.25 to 4.5.
    """
    kind, title = ("nf4", "4-bit NF4") if bits <= 4 else ("int8", "8-bit LLM.int8()")
    counted = f"{whose}'s weights of {bits} bits are counted as {title}"
    more = ("weights",) * (bits not in (4, 8)) + ("activations",) * (kind == "int8")
    settings.approximate(UpperBound(counted, *more) if more else counted)
    return kind


_OF_LORA = ("", "lora_")


def targets(settings: Settings, names: tuple[str, ...], *, by_lora: bool = True) -> str | tuple[str, ...]:
    """A setup's targets from module names, or one pattern: "all-linear" and "attention" where they mean just that.

    Args:
        by_lora: where none are named PEFT's table for LoRA decides, and stops at types that it has not.
    """
    model = settings.model
    if not names:
        model_type = model.model_type if model is not None else ""
        if by_lora and model is not None and model_type not in PEFT_DEFAULT_TARGETS:
            words = ("target_modules", "target_parameters")  # modules: not known; parameters alone are enough for it
            if not settings.more and not any(settings.has(f"{prefix}{word}") for word in words for prefix in _OF_LORA):
                settings.refusals.append(
                    f"PEFT stops: no target modules are named, and it has none of its own for {model_type}"
                )
            return "attention"
        default = tuple(PEFT_DEFAULT_TARGETS.get(model_type, ("q_proj", "v_proj")))
        settings.assume(f"no LoRA target modules named: PEFT takes {', '.join(default)}")
        return default
    if {name.lower() for name in names} & {"all-linear", "all"}:
        return "all-linear"
    names = tuple(dict.fromkeys(names))
    tables = {table.name.rpartition(".")[2] for table in model.embeddings} if model is not None else set()
    named = [name for name in names if name.rpartition(".")[2] in tables]
    if named and len(named) < len(names):
        settings.assume(f"{', '.join(named)}: adapters on a table (rank x (rows + width)) are counted")
        settings.tables += tuple(named)
        names = tuple(name for name in names if name not in named)
    if model is None:
        usual = {"attention": USUAL_ATTENTION_MODULES, "all-linear": USUAL_LINEAR_MODULES}
        return next((word for word, modules in usual.items() if set(names) == set(modules)), names)
    return same_targets(model, names) or names


SCORES = ("score", "classifier")
"""Heads of classification and reward models, which peft trains whole whether they are named or not; a vector for each
label.

Source: peft 0.21 peft_model.py PeftModelForSequenceClassification, classifier_module_names.
"""


def modules_to_save(settings: Settings, key: str, said_to: Settings | None = None) -> tuple[str, ...]:
    """The embedding and head that are trained whole beside the adapters; of other modules it is said that they are not
    counted (to `said_to`, where the setting stands in a part that nobody asks)."""
    names = settings.names(key)
    scores = [name for name in names if name in SCORES]
    if scores:
        (said_to or settings).assume(f"{key} {', '.join(scores)}: trained whole, which peft does by itself")
    others = [name for name in names if name not in (*SAVED_MODULES, *SCORES)]
    if others:
        (said_to or settings).approximate(f"{key} {', '.join(others)}: trained in full, not counted")
    return tuple(name for name in names if name in SAVED_MODULES)


CONFIGS = {row.config: row for row in ADAPTERS.values() if row.config != "LoraConfig"}
"""peft's configuration classes of adapters that have one of their own."""


def adapter(settings: Settings, fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """The fields with the kind of adapter, where it is counted in such a setup; else as they are, with a note."""
    if fields.get("method") == "full" or kind == "lora":
        return fields
    row, adapter_fields = ADAPTERS[kind], {**fields, "adapter": kind}
    if adapter_fields.get("checkpointing") and not row.checkpointing:
        settings.refusals.append(f"peft's {row.title} does not work with gradient checkpointing; counted without it")
        adapter_fields |= {"checkpointing": 0, "activation_offload": False}
    try:
        setup = TrainSetup(**adapter_fields)
        if settings.model is not None:
            trained_parameters(settings.model, setup)
    except SetupError as error:
        settings.approximate(f"{row.title} is counted as LoRA: {error.message}")
        return {**fields, "lora_rank": max(1, fields["lora_rank"])}
    return adapter_fields


def pictures(settings: Settings, fields: Mapping[str, Any], keys: Mapping[str, Any], freezes: str = "") -> None:
    """Asks what a sample shows, where one of these settings says that pictures are trained on: no file does.

    Args:
        keys: settings of pictures -> their values.
        freezes: the switch, on by itself, that keeps the encoder out of full fine-tuning; off, it trains on text too,
            before which the tool puts a blank picture.
    """
    model, named = settings.model, next((key for key, value in keys.items() if value), "")
    if not named:
        if model is not None and model.model_type in SEEING:
            settings.assume(TEXT_ALONE)
        return
    if model is not None and model.model_type not in SEEING:
        makes = f"{named} is of more than text, and what {model.model_type} makes of that is not planned"
        settings.ask("images", f": {makes} (images=none counts text alone)")
        return
    given = {**fields, "parallel": "none"} if settings.outside.num_gpus == 1 else fields  # as `overrides` has it
    others = [f"{of} {given[of]}" for of, planned in WITH_IMAGES.items() if given.get(of, planned[0]) not in planned]
    alone = f"; with {', '.join(others)} they are not planned (images=none counts text alone)" if others else ""
    settings.ask("images", f": {named} is of pictures, and how many a sample shows is known to the data alone{alone}")
    if freezes and fields["method"] == "full":
        frozen = settings.flag(freezes, True)
        settings.approximate(f"{freezes} true{FROZEN_ENCODER}" if frozen else f"{freezes} false{ON_TEXT}")


def without_encoder(settings: Settings, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """All linear layers of the text alone of a vision-language model, as tools take them that freeze its encoder."""
    model = settings.model
    if names != "all-linear" or model is None or model.model_type not in SEEING:
        return names
    idle = sorted({re.escape(layer.path) for layer, _ in with_vision(model).idle_layers})
    return (rf"(?!({'|'.join(idle)})\.).*\.\d+\..*",)


def build(settings: Settings, fields: dict[str, Any]) -> TrainSetup:
    """A validated setup; an impossible combination is the file's mistake."""
    if fields.get("activation_offload") and fields.get("parallel", "none") not in ("none", "ddp", "fsdp2"):
        settings.approximate("checkpoints in host memory under sharding are counted as if they stayed on the GPU")
        fields = {**fields, "activation_offload": False}
    fields = _as_paused(settings, _as_stepped(settings, fields))
    whole = {**fields, "expert_degree": 1}
    copied = fields.get("parallel") == "ddp"
    distributed = (fields.get("method") == "full" or copied) and (_can_be(fields) or not _can_be(whole))
    if fields.get("expert_degree", 1) > 1 and not distributed:
        settings.approximate("experts distributed over GPUs are counted here as if every GPU that shards held them all")
        fields = whole
    try:
        return TrainSetup(**fields)
    except SetupError as error:
        hint = re.sub(r"--(?!gpus?\b)(?=[a-z])", "", error.hint)  # options of `plan`, which a check has not
        raise ConfigError(f"{settings.name}: {error.message}", hint=f"in the file: {hint}" if hint else "") from error


def _as_stepped(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with an optimizer that steps FSDP2's DTensors, where one that does not only stands for the file's own
    (torchao's in 8 bits: its `OptimState8bit` has DTensor's operators, which bitsandbytes' states have not)."""
    if fields.get("parallel") != "fsdp2" or ROWS[fields.get("optimizer", "adamw")].steps_dtensors:
        return fields
    stands = (text for text in settings.approximations if isinstance(text, UpperBound) and text.startswith(_NO_ROW))
    for text in stands:
        name = text.removeprefix(_NO_ROW).split()[0]
        settings.approximations[settings.approximations.index(text)] = _without_row(name, "adamw", text.categories)
        return {**fields, "optimizer": "adamw"}
    return fields


def _as_paused(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as a trainer checkpoints that switches it off and on again within a step."""
    decides = ("stack", "objective", "rollout", "precomputed_reference")
    named = TrainSetup().replace_trusted(**{name: fields[name] for name in decides if name in fields})
    every, offloads = fields.get("checkpointing", 0), fields.get("activation_offload", False)
    lost = {"checkpointing": 1} if every > 1 else {}
    lost |= {"activation_offload": False} if offloads and named.stack != "axolotl" else {}
    if not lost or not named.pauses_checkpointing:
        return fields
    settings.assume("its trainer switches checkpointing off within a step, and on again for every layer, on the GPU")
    return fields | lost


def _can_be(fields: dict[str, Any]) -> bool:
    try:
        TrainSetup(**fields)
    except SetupError:
        return False
    return True


LIGER_OPTIONS = {"norm": ("rms_norm",), "rotary": ("rope",), "gated": ("swiglu", "geglu")}
"""Part of a layer -> its names in `liger_kernel_config`. Source: liger-kernel 0.8.5 `transformers/monkey_patch.py`."""


def liger(settings: Settings, on: bool, loss: str, *, apart: bool = False) -> dict[str, str]:
    """The fields "kernels" and "loss" of transformers' Liger switch.

    Args:
        loss: what runs where the switch is off, or leaves the loss alone ("chunked": TRL's head, which it never takes).
        apart: the trainer keeps the labels for a loss of its own: without them Liger's forward makes whole logits
            (transformers 5.23 `Trainer.compute_loss`, Liger 0.8.4 lce_forward).
    """
    if not on:
        return {"kernels": "eager", "loss": loss}
    options = settings.mapping("liger_kernel_config")
    kind = settings.model.model_type if settings.model is not None else USUAL_TYPE
    fused = kind in LIGER_LOSS
    if fused or kind in LIGER_PARTS:
        fused = options.get("fused_linear_cross_entropy", fused)
    elif loss == "full" and not apart:
        settings.assume(f"Liger has no loss for {kind}: the logits are held in full")
    return {
        "kernels": liger_kernels(settings, LIGER_OPTIONS, options),
        "loss": "liger" if fused is True and loss != "chunked" and not apart else loss,
    }


def liger_kernels(settings: Settings, names: dict[str, tuple[str, ...]], options: dict[str, Any]) -> str:
    """ "liger" where the options leave any part of a layer to Liger that it knows for this model, else "eager"."""
    model = settings.model
    if model is not None and (reason := kernels_refusal("liger", model.model_type)):
        settings.assume(f"{reason} that are counted: its layers are counted as eager ones")
        return "eager"
    supported = LIGER_PARTS[model.model_type] if model is not None else KERNELS["liger"].parts
    parts = {part for part in names if part in supported}
    left = {part for part in parts if any(options.get(name) is False for name in names[part])}
    if left == parts:
        return "eager"
    if left:
        settings.approximate(f"of Liger's kernels {', '.join(sorted(left))} is off: counted as if all ran")
    return "liger"


CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""The switch's name, and the deprecated one."""


def checkpointing(settings: Settings, default: bool) -> int:
    """0, 1 or n, by the current names or the deprecated ones, or FSDP's own."""
    key = settings.first(*CHECKPOINTING)
    if fsdp_checkpoints(fsdp_block(settings)):
        settings.refusals += [CHECKPOINTED_TWICE] * settings.flag(key, default)
        return 1
    if not settings.has(key):
        settings.assume(f"{key} absent: {'on' if default else 'off'}, the tool's default")
    if not settings.flag(key, default):
        return 0
    return _kwargs(settings).integer("every_n_layers", 1, at_least=1)


CHECKPOINTED_TWICE = "transformers' Trainer refuses FSDP's activation_checkpointing beside its own: switch one off"
"""Source: transformers 5.23 `Trainer.create_accelerator_and_postprocess`."""


def fsdp_block(settings: Settings) -> Settings:
    """TrainingArguments' `fsdp_config`: a block, or the file that it names, which is asked for where not at hand."""
    value = settings.raw("fsdp_config", {})
    if not isinstance(value, str) or not value.endswith(".json"):
        return settings.block("fsdp_config")
    text = settings.outside.read_relative(value)
    if text is None:
        for name in ("checkpointing", "offload"):
            settings.ask(name, f": {value}, FSDP's config, is not beside it")
    return Settings(parse_json(text or "{}", value), f"{settings.name}: {value}", settings.outside)


def fsdp_checkpoints(block: Settings) -> bool:
    """Whether FSDP checkpoints by itself, as its block says with or without the prefix: never in the reentrant form.

    Source: accelerate 1.15 `Accelerator.prepare_model` (FSDP1), `fsdp2_apply_ac`.
    """
    return block.flag(block.first("activation_checkpointing", "fsdp_activation_checkpointing"), False)


def _kwargs(settings: Settings) -> Settings:
    return settings.block(settings.first("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"))


def selects(settings: Settings, fields: Mapping[str, Any]) -> bool:
    """Whether checkpointed layers keep their attention: a key of TRL's SFTTrainer among transformers' arguments."""
    return _kwargs(settings).flag("selective", False) and keeps_attention(settings, fields)


def keeps_attention(settings: Settings, fields: Mapping[str, Any]) -> bool:
    """Whether a file that asks for selective checkpointing gets it, as the other fields are; says so where not."""
    if fields["checkpointing"] and not fields["activation_offload"]:
        return True
    settings.approximate("selective checkpointing is counted as recomputing whole layers")
    return False


OFFLOADED = UpperBound("activations offloaded to host memory are counted as if they stayed on the GPU", "activations")


def offloads(settings: Settings, checkpointing: int) -> bool:
    """Whether the checkpoints lie in host memory: transformers' option, or TRL's, which takes everything."""
    everything = settings.flag("activation_offloading", False)
    if everything and not checkpointing:
        settings.approximate(OFFLOADED)
    return bool(checkpointing) and (_kwargs(settings).flag("offload", False) or everything)


def autocast(settings: Settings, bf16_default: bool) -> str | None:
    """ "bf16", "fp16" or None from the two switches."""
    fp16 = settings.flag("fp16", False)
    if settings.flag("bf16", bf16_default and not fp16):
        return "bf16"
    return "fp16" if fp16 else None


@cache
def _in_float32() -> frozenset[str]:
    """Types of which every configuration of the catalogue says that its checkpoint is published in float32."""
    by_type: dict[str, set[str]] = {}
    for entry in catalogue.entries():
        by_type.setdefault(entry.model_type, set()).add(
            str(entry.config.get("dtype") or entry.config.get("torch_dtype"))
        )
    return frozenset(name for name, dtypes in by_type.items() if dtypes == {"float32"})


def stored_dtype(model: ModelSpec | None) -> str:
    """The data type of a model's checkpoint, "" where that is not known."""
    config = model.config if model is not None else {}
    dtype = config.get("dtype") or config.get("torch_dtype")
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES:
        return DTYPES[dtype.removeprefix("torch.")]
    # encoders say nothing: of ModernBERT transformers' tests/models/modernbert, github.com/plantcad/genecad/pull/24
    return "fp32" if model is not None and (model.reads_both_ways or model.model_type in _in_float32()) else ""


def weight_dtype(settings: Settings, key: str, default: str) -> str:
    """ "fp32", "bf16" or "fp16" from a dtype word; "auto" is the checkpoint's own."""
    word = settings.text(key, default).removeprefix("torch.")
    if word == "auto":
        if dtype := stored_dtype(settings.model):
            return dtype
        settings.assume(f"{key} auto: the checkpoint is taken to be bf16")
        return "bf16"
    if word not in DTYPES:
        raise settings.error(key, "one of float32, bfloat16, float16, auto", word)
    return DTYPES[word]


def spelled(numbers: Sequence[int], full: int) -> int | tuple[int, ...]:
    """Layers of so many by their numbers as a setup says them: so many of the last or first, else all numbers."""
    ordered = tuple(sorted(set(numbers)))
    if ordered == tuple(range(full)):
        return 0
    if ordered == tuple(range(ordered[0], full)):
        return len(ordered)
    return -len(ordered) if ordered == tuple(range(len(ordered))) else ordered


def adapted_layers(settings: Settings, key: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The layers that carry adapters; nothing where a setting names none, or cannot be followed, which is said."""
    numbers, model = settings.raw(key), settings.model
    if numbers in (None, False, [], ""):
        return {}
    named = [numbers] if type(numbers) is int else numbers if isinstance(numbers, list) else []
    counted = fields["method"] != "full" and fields.get("objective", "sft") in ("sft", "pretrain")
    valid = model is not None and all(type(number) is int and 0 <= number < model.num_layers for number in named)
    if counted and named and valid and model is not None:
        layers = spelled(named, model.num_layers)
        if _counted_alone(layers, fields):
            return {"trained_layers": layers} if layers else {}
    settings.approximate(f"adapters on some layers ({key}) are counted on all of them")
    return {}


def frozen_but(settings: Settings, model: ModelSpec | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The layers that Axolotl's `unfrozen_parameters` leaves training, where it names whole layers.

    Source: axolotl 0.21 `utils/freeze.py` LayerNamePattern (matched from a name's beginning, every dot is one).
    """
    patterns = settings.names("unfrozen_parameters")
    if not patterns:
        return {}
    if fields["method"] != "full":
        settings.approximate("unfrozen_parameters beside an adapter: counted as the adapter alone, all of it")
        return {}
    layers = _whole_layers(model, patterns) if model is not None else ()
    trained_layers = spelled(layers, model.num_layers) if layers and model is not None else 0
    if not trained_layers or not _counted_alone(trained_layers, fields):
        counted = "only some parameters are trained (unfrozen_parameters): counted as full fine-tuning"
        settings.approximate(UpperBound(counted, *TRAINED))
        return {}
    return {"trained_layers": trained_layers}


def _counted_alone(layers: int | tuple[int, ...], fields: Mapping[str, Any]) -> bool:
    """Whether layers are the last ones, which every engine's memory is known of, or every GPU holds the whole model."""
    return (isinstance(layers, int) and layers >= 0) or fields.get("parallel", "none") in ("none", "ddp")


def _whole_layers(model: ModelSpec, patterns: Sequence[str]) -> tuple[int, ...]:
    """The layers that patterns name whole (`model.layers.(4|8).`, `model.layers.3[01]..*`); none where one names more
    or less."""
    numbers: set[int] = set()
    for pattern in patterns:
        match = re.fullmatch(r"\^?([\w.]+)\.([\d|()\[\]-]+)\.(?:\.\*)?", pattern)
        if match is None or all(kind.path != match[1] for kind in model.layer_kinds):
            return ()
        try:
            numbers |= {number for number in range(model.num_layers) if re.fullmatch(match[2], str(number))}
        except re.error:
            return ()
    return tuple(sorted(numbers))


def settings_fields(settings: Settings, tool: Tool, *names: str) -> dict[str, Any]:
    """Fields of a setup that one setting each says; the tool's default, and a note, where the file says nothing."""
    fields: dict[str, Any] = {}
    for name in names:
        field = tool.field(name)
        assert field is not None, (tool.name, name)
        key = settings.first(*(alias.rpartition(".")[2] for alias in (field.key, *field.older)))
        default = field.default
        if isinstance(default, bool):
            fields[name] = settings.flag(key, default)
            continue
        if not settings.has(key):
            settings.assume(f"{key} absent: {default}, {tool.title}'s default")
        fields[name] = (
            settings.real(key, default) if isinstance(default, float) else settings.integer(key, default, at_least=1)
        )
    return fields


def adapters(settings: Settings, tool: Tool, quantization: str, names: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Fields of a run with LoRA adapters: method, quantization, rank, dropout, targets, and `more`."""
    return {
        "method": "lora" if quantization == "none" else "qlora",
        "quantization": quantization,
        **settings_fields(settings, tool, "lora_rank", "lora_dropout"),
        "lora_targets": targets(settings, names),
        **more,
    }


def config(tool: Tool, settings: Settings, fields: dict[str, Any], **more: Any) -> ReadConfig:
    """The reading of a tool's file: its fields as a setup, with what was asked, assumed and approximated on the way.

    Args:
        settings: the whole file; more: other fields of the reading, the model's name where its setting does not say it.
    """
    every = (settings, *settings.blocks.values())
    named = tool.field("model")
    if "model_id" not in more and "model" not in settings.missing and named is not None:
        more["model_id"] = settings.optional_text(settings.first(named.key, *named.older))
    return ReadConfig(
        format=tool.name,
        path=settings.name,
        setup=build(settings, {"stack": tool.name, **fields} if tool.name in STACKS else fields),
        missing=tuple(Missing(field=of, reason=why) for part in every for of, why in part.missing.items()),
        assumptions=tuple(dict.fromkeys(assumption for part in every for assumption in part.assumptions)),
        approximations=tuple(dict.fromkeys(approximation for part in every for approximation in part.approximations)),
        refusals=tuple(refusal for part in every for refusal in part.refusals),
        adapted_tables=tuple(table for part in every for table in part.tables),
        unknown_keys=tuple(key for part in every for key in part.unknown_keys),
        values=settings.values,
        **more,
    )


def adapter_kind(settings: Settings, tool: str) -> str:
    """The kind of adapter that a file's switches ask for, in the words that each kind has in that tool, else in peft's
    LoraConfig. Kinds that need other memory come before those that only start otherwise."""
    for row in sorted(ADAPTERS.values(), key=lambda row: row.start_only):
        arguments = getattr(row, tool, row.arguments if row.config == "LoraConfig" else None)
        if arguments and all(_asks(settings, key, word) for key, word in arguments.items()):
            return row.name
    return "lora"


def _asks(settings: Settings, key: str, word: Any) -> bool:
    """Whether a file sets a switch, or a word of a family ("pissa_niter_16": any of "pissa")."""
    if isinstance(word, bool):
        return settings.raw(key) is not None and settings.flag(key, False) is word
    return str(settings.raw(key, "")).startswith(str(word).partition("_")[0])


def keys(tool: Tool, values: Mapping[str, Any]) -> dict[str, str]:
    """Field -> its key in this file: the name of it that stands there, else today's."""
    return {
        field.of: next((name for name in (field.key, *field.older) if written(values, name) is not None), field.key)
        for field in tool.fields
    }


def origins(
    tool: Tool, values: Mapping[str, Any], lines: Mapping[str, int], file: str, running: Mapping[str, str]
) -> dict[str, str]:
    """Field -> where its value comes from: "file:line", or the default of which version of the tool.

    Args:
        lines: dotted key -> its line; running: package -> the version that was named for this run.
    """
    newest = versions.snapshot().get(tool.name, {}).get("version", "")
    version = running.get(tool.name, newest)
    default = f"default of {tool.title} {version}".strip()
    sources: dict[str, str] = {}
    for field in tool.fields:
        stands = [name for name in (field.key, *field.older, *field.more) if written(values, name) is not None]
        if stands and stands[0] in lines:
            sources[field.of] = f"{file}:{lines[stands[0]]}"
        elif not stands and field.of not in ("model", "num_gpus", "parallel", "sync_each_batch"):
            sources[field.of] = default
    return sources


def written(values: Mapping[str, Any], key: str) -> Any:
    """What a file has at a dotted key, None where nothing."""
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
