"""torchtune recipes' configs (`tune run RECIPE --config FILE`) as setups. torchtune 0.6.1, its last release."""

import re
from typing import Any

from planner.errors import NotPlanned
from planner.models.spec import ModelSpec
from planner.readers import common
from planner.readers.fields import adapter_kind, said
from planner.readers.objectives import TEACHER, of_recipe
from planner.readers.sharding import Sharding, parallel_of
from planner.readers.types import Missing, ReadConfig
from planner.readers.values import Settings
from planner.tools.others import TORCHTUNE

FORMAT = "torchtune"
TARGETS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw_torch",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
    "torch.optim.SGD": "sgd",
}


def read(
    values: dict[str, Any], name: str, model: ModelSpec | None = None, *, sharding: Sharding | None = None
) -> ReadConfig:
    """The setup of a torchtune recipe's config.

    Source: pytorch/torchtune `recipes/configs`, `recipes/*.py`.

    Raises:
        ConfigError: another kind of recipe than supervised fine-tuning.
    """
    settings = Settings(values, name)
    loss = Settings(settings.mapping("loss"), f"{name}: loss")
    if of_recipe(FORMAT, (name.lower(), loss.text("_component_", "").lower(), *TEACHER & set(values))):
        raise NotPlanned(f"{name}: no recipe of supervised fine-tuning: not planned", hint="full and LoRA recipes are")
    inner = Settings(settings.mapping("model"), f"{name}: model")
    tokenizer = Settings(settings.mapping("tokenizer"), f"{name}: tokenizer")
    optimizer = Settings(settings.mapping("optimizer"), f"{name}: optimizer")
    component = inner.text("_component_", "")
    builder = component.rpartition(".")[2]
    adapted = builder.startswith(("lora_", "qlora_"))
    method = "qlora" if builder.startswith("qlora_") else "lora" if adapted else "full"
    if "vision" in component:
        raise NotPlanned(f"{name}: {builder} reads images: not planned", hint="text models are")
    missing = []
    if component and not component.startswith("torchtune."):
        missing.append(Missing(field="model", reason=f"{name}: {component} builds the model, no function of torchtune"))
    if not tokenizer.has("max_seq_len"):
        missing.append(Missing(field="seq_len_tokens", reason=f"{name}: tokenizer.max_seq_len is null: nothing is cut"))
    num_gpus = sharding.num_gpus if sharding is not None else 1
    pure = settings.text("dtype", "bf16") == "bf16"
    named = optimizer.text("_component_", "torch.optim.AdamW")
    chosen = {"optim": OPTIMIZERS.get(named, named)}
    if named == "torch.optim.AdamW" and optimizer.flag("fused", False):
        chosen["optim"] = "adamw_torch_fused"
    words = Settings(chosen, name)
    settings.approximate("torchtune's own model code is counted as transformers'")
    if settings.flag("enable_activation_offloading", False):
        settings.approximate("activations offloaded to host memory are counted as if they stayed on the GPU")
    if settings.flag("optimizer_in_bwd", False):
        settings.approximate("the optimizer in the backward frees gradients early: they are counted whole")
    fields: dict[str, Any] = {
        "method": method,
        "quantization": "nf4-double" if method == "qlora" else "none",
        "precision": "bf16-pure" if pure else "fp32",
        **(said(inner, TORCHTUNE, "lora_rank", "lora_dropout") if adapted else {"lora_rank": 0}),
        **said(settings, TORCHTUNE, "micro_batch_seqs", "accumulation_steps"),
        "seq_len_tokens": tokenizer.integer("max_seq_len", 2048, at_least=1),
        "packing": Settings(_first_dataset(settings), f"{name}: dataset").flag("packed", False),
        "optimizer": common.optimizer(words, "optim", "adamw_torch"),
        "attention": "sdpa",
        "checkpointing": int(settings.flag("enable_activation_checkpointing", False)),
        "loss": "chunked" if re.search("Linear|Chunked", loss.text("_component_", "")) else "full",
        "compile": settings.raw("compile") is True,
    }
    if adapted:
        targets = [TARGETS.get(one, one) for one in inner.names("lora_attn_modules")]
        if inner.flag("apply_lora_to_mlp", False):
            targets += ["gate_proj", "up_proj", "down_proj"]
        fields["lora_targets"] = common.targets(tuple(targets), model, settings)
        fields["adapter_dtype"] = "bf16" if pure else "fp32"
        fields = common.adapter(settings, fields, adapter_kind(inner, FORMAT), model)
    fields |= parallel_of(settings, {"parallel": "fsdp2"} if num_gpus > 1 else {}, num_gpus)
    folder = Settings(settings.mapping("checkpointer"), f"{name}: checkpointer").optional_text("checkpoint_dir")
    parts = (settings, tokenizer, optimizer, inner, words)
    return ReadConfig(
        format=FORMAT,
        path=name,
        model_id=folder.strip("/").rpartition("/")[2] if folder and component.startswith("torchtune.") else None,
        setup=common.build(settings, fields),
        missing=tuple(missing),
        assumptions=tuple(one for part in parts for one in part.assumptions),
        approximations=tuple(one for part in parts for one in part.approximations),
        values=values,
    )


def _first_dataset(settings: Settings) -> dict[str, Any]:
    """The block of the only data set, or of the first of several, which are packed alike."""
    given = settings.raw("dataset", {})
    if isinstance(given, list) and given and isinstance(given[0], dict):
        return given[0]
    return settings.mapping("dataset")
