"""torchtune recipes' configs (`tune run RECIPE --config FILE`) as setups. torchtune 0.6.1, its last release."""

from typing import Any

from planner.core.errors import NotPlanned
from planner.frameworks.readers import common
from planner.frameworks.readers.common import adapter_kind, config, settings_fields
from planner.frameworks.readers.sharding import parallel_of
from planner.frameworks.readers.types import ReadConfig, UpperBound
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.others import TORCHTUNE

FORMAT = "torchtune"
TARGETS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw_torch",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
    "torch.optim.SGD": "sgd",
}
IN_BACKWARD = "torchtune-in-bwd"
"""The stack of `optimizer_in_bwd`, which the recipe of whole models on one GPU has."""

OTHER_RECIPES = (
    "dpo", "ppo", "grpo", "kd", "distillation", "reward", "qat", "eval", "generate", "quantiz", "teacher_model",
)  # fmt: skip
"""Parts of the names of recipes, models and blocks that are not next-token training on text."""
LOSSES = ("CrossEntropyLoss", "CEWithChunkedOutputLoss")
"""Ends of the names of losses of next tokens; its others are of preferences and of teachers."""


def read(settings: Settings) -> ReadConfig:
    """The setup of a torchtune recipe's config.

    Source: pytorch/torchtune `recipes/configs`, `recipes/*.py`.
    """
    name, num_gpus = settings.name, settings.outside.num_gpus
    loss = settings.block("loss").text("_component_", "")
    named = () if loss else (name.lower(),)  # a name may say what comes after: 3B_sft_for_grpo
    if "quantizer" in settings.values:
        named = (*named, "quantizer", settings.block("quantizer").text("_component_", "").lower())
    named = (*named, loss.lower(), *({"teacher_model"} & set(settings.values)))
    other = next((part for part in OTHER_RECIPES if any(part in word for word in named)), "")
    if "max_new_tokens" in settings.values:
        other = "generation"
    if not other and loss and not loss.endswith(LOSSES):
        other = loss.rpartition(".")[2]
    if other:
        raise NotPlanned(
            f"{name}: no recipe of supervised fine-tuning ({other}): not planned", hint="full and LoRA recipes are"
        )
    tokenizer, inner = settings.block("tokenizer"), settings.block("model")
    given = settings.raw("dataset", {})  # of several, which are packed alike, the first
    several = isinstance(given, list) and given and isinstance(given[0], dict)
    dataset = Settings(given[0] if several else settings.mapping("dataset"), f"{name}: dataset")
    cuts = tokenizer if tokenizer.has("max_seq_len") else dataset
    if not cuts.has("max_seq_len"):
        settings.ask("seq_len_tokens", ": tokenizer.max_seq_len is null: nothing is cut")
    settings.approximate("torchtune's own model code is counted as transformers'")
    if "lora_qwen2" in inner.text("_component_", ""):
        settings.approximate("its Qwen 2 with adapters holds rotary tables in every layer: not counted")
    if settings.flag("enable_activation_offloading", False):
        settings.approximate(common.OFFLOADED)
    block = settings.block("optimizer")
    component = block.text("_component_", "torch.optim.AdamW")
    if component.endswith("CPUOffloadOptimizer"):  # torchao's, around another
        component = block.text("optimizer_class", "torch.optim.AdamW")
        away = ["optimizer", *["gradients"] * block.flag("offload_gradients", False)]
        words = f"CPUOffloadOptimizer: {' and '.join(away)} in the host's memory counted as if on the GPU"
        settings.approximate(UpperBound(words, *away))
    fused = component == "torch.optim.AdamW" and block.flag("fused", False)
    word = OPTIMIZERS.get(component, component)
    fields: dict[str, Any] = {
        "precision": "bf16-pure" if settings.text("dtype", "bf16") == "bf16" else "fp32",
        **settings_fields(settings, TORCHTUNE, "micro_batch_seqs", "accumulation_steps"),
        "seq_len_tokens": cuts.integer("max_seq_len", 2048, at_least=1),
        "packing": dataset.flag("packed", False),
        "optimizer": common.optimizer(block, "optim", "adamw_torch", "adamw_torch_fused" if fused else word),
        "attention": "sdpa",
        "checkpointing": int(settings.flag("enable_activation_checkpointing", False)),
        "loss": "chunked" if "Linear" in loss else "full",
        "compile": settings.raw("compile") is True,
    }
    fields |= _method(inner, settings, fields["precision"])
    fields |= parallel_of(settings, {"parallel": "fsdp2"} if num_gpus > 1 else {})
    if settings.flag("optimizer_in_bwd", False):
        if fields["method"] == "full" and fields.get("accumulation_steps", 1) == 1 and num_gpus == 1:
            fields["stack"] = IN_BACKWARD
        else:
            counted = "the optimizer in the backward frees gradients early: they are counted whole"
            settings.approximate(UpperBound(counted, "gradients"))
    fields = common.adapter(settings, fields, adapter_kind(inner, FORMAT))
    return config(TORCHTUNE, settings, fields, model_id=_model_id(settings, inner))


def _method(inner: Settings, settings: Settings, precision: str) -> dict[str, Any]:
    builder = inner.text("_component_", "").rpartition(".")[2]
    if "vision" in inner.text("_component_", ""):
        raise NotPlanned(f"{settings.name}: {builder} reads images: not planned", hint="text models are")
    if not builder.startswith(("lora_", "qlora_")):
        return {"method": "full", "quantization": "none", "lora_rank": 0}
    targets = [TARGETS.get(name, name) for name in inner.names("lora_attn_modules")]
    if inner.flag("apply_lora_to_mlp", False):
        targets += ["gate_proj", "up_proj", "down_proj"]
    four = builder.startswith("qlora_")
    return {
        "method": "qlora" if four else "lora",
        "quantization": "nf4-double" if four else "none",
        **settings_fields(inner, TORCHTUNE, "lora_rank", "lora_dropout"),
        "lora_targets": common.targets(settings, tuple(targets)),
        "adapter_dtype": "bf16" if precision == "bf16-pure" else "fp32",
    }


def _model_id(settings: Settings, inner: Settings) -> str | None:
    """The model by the folder of its checkpoint; open where its builder is no function of torchtune."""
    component = inner.text("_component_", "")
    if component and not component.startswith("torchtune."):
        settings.ask("model", f": {component} builds the model, no function of torchtune")
        return None
    block = settings.block("checkpointer")
    folder = block.optional_text("checkpoint_dir")
    if not block.text("_component_", "torchtune.").startswith("torchtune."):  # of a file written here: it may be an id
        return folder
    return folder.strip("/").rpartition("/")[2] if folder else None
