"""NeMo AutoModel recipes (`automodel FILE.yaml`) as setups. Defaults of AutoModel's main branch, November 2026."""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from planner.core.errors import NotPlanned
from planner.frameworks.readers import common
from planner.frameworks.readers.fields import adapter_kind, config, said
from planner.frameworks.readers.objectives import TEACHER, of_recipe
from planner.frameworks.readers.sharding import parallel_of
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.others import NEMO

FORMAT = "nemo-automodel"
OPTIMIZERS = {
    "torch.optim.Adam": "adamw_torch",
    "torch.optim.AdamW": "adamw_torch",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": "adamw_torch_fused",
    "torch.optim.SGD": "sgd",
}
STRATEGIES = {"fsdp2": "fsdp2", "megatron_fsdp": "fsdp2", "ddp": "ddp"}
BLOCKS = (
    "step_scheduler", "model", "peft", "quantization", "optimizer", "loss_fn", "dataset", "distributed",
    "packed_sequence", "compile", "fp8",
)  # fmt: skip
LENGTHS = ("seq_length", "seq_len", "max_length", "max_seq_length")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_recipe(values: dict[str, Any]) -> bool:
    """Whether a mapping is a recipe of AutoModel: objects named by `_target_`, or arguments of one of its recipes."""
    inner = values.get("model")
    targets = isinstance(inner, dict) and "_target_" in inner and "step_scheduler" in values
    return targets or ("dist_env" in values and bool({"recipe", "recipe_args", "model"} & set(values)))


def read(settings: Settings) -> ReadConfig:
    """The setup of an AutoModel recipe.

    Source: NVIDIA-NeMo/Automodel `nemo_automodel/_transformers/auto_model.py`, `components/_peft/lora.py`,
    `components/training/step_scheduler.py`, `examples/`.

    Raises:
        ConfigError: another kind of recipe than next-token training of a language model.
    """
    top, parts, num_gpus = settings, settings.blocks, settings.outside.num_gpus
    for title in BLOCKS:
        block = top.raw(title)
        parts[title] = Settings(block if isinstance(block, dict) else {}, f"{top.name}: {title}", top.outside)
    inner, steps = parts["model"], parts["step_scheduler"]
    _refuse_other_recipes(top, inner)
    fields = _method(parts, common.weight_dtype(inner, inner.first("dtype", "torch_dtype"), "auto"))
    layout, copies = _layout(parts["distributed"], num_gpus)
    used = parts["optimizer"].text("_target_", "torch.optim.AdamW")
    chosen = OPTIMIZERS.get(used, used.rpartition(".")[2].lower())
    loss = parts["loss_fn"].text("_target_", "")
    fields |= said(steps, NEMO, "micro_batch_seqs")
    per_copy = fields["micro_batch_seqs"] * copies
    fields |= {
        **_length(parts, top),
        "accumulation_steps": max(1, steps.integer("global_batch_size", 32, at_least=1) // per_copy),
        "attention": common.attention(inner, "attn_implementation"),
        "checkpointing": int(parts["distributed"].flag("activation_checkpointing", False)),
        "loss": "liger" if "linear_ce" in loss else "chunked" if "chunked" in loss else "full",
        "compile": parts["compile"].flag("enabled", False),
    }
    fields = common.adapter(top, fields, adapter_kind(parts["peft"], FORMAT))
    _note_what_is_not_counted(top, parts)
    fields |= parallel_of(top, layout)
    fields["optimizer"] = common.optimizer(top, "optim", "adamw_torch", chosen)
    return config(NEMO, top, fields, model_id=_model_id(top, inner))


def _refuse_other_recipes(top: Settings, inner: Settings) -> None:
    values = top.values
    other = of_recipe(FORMAT, (str(values.get("recipe", "")), inner.text("_target_", ""), *TEACHER & set(values)))
    if other or not inner.has("_target_") or "step_scheduler" not in values:
        kind = other or values.get("recipe") or "without model and step_scheduler"
        raise NotPlanned(
            f"{top.name}: a recipe of AutoModel ({kind}) that is not planned", hint="next-token training is"
        )


def _model_id(top: Settings, inner: Settings) -> str | None:
    """The checkpoint that the model's block names, or its configuration; open where neither does."""
    where = inner.raw("config")
    named = inner.raw("pretrained_model_name_or_path")
    named = named or (where.get("pretrained_model_name_or_path") if isinstance(where, dict) else where)
    if not named:
        top.ask("model", ": model names no checkpoint")
    return named if isinstance(named, str) else None


def _method(parts: Mapping[str, Settings], weights: str) -> dict[str, Any]:
    """Method, adapters and precision; weights are of one type and there is no autocast."""
    peft, bits = parts["peft"], parts["quantization"]
    if not (peft.has("_target_") or peft.has("dim")):
        precision = common.precision(parts["model"], weights, None, "full")
        return {"method": "full", "quantization": "none", "lora_rank": 0, "precision": precision}
    four, eight = bits.flag("load_in_4bit", False), bits.flag("load_in_8bit", False)
    double = "-double" if bits.flag("bnb_4bit_use_double_quant", False) else ""
    return {
        "method": "qlora" if four or eight else "lora",
        "quantization": "int8" if eight else f"nf4{double}" if four else "none",
        "precision": common.precision(parts["model"], weights, None, "lora"),
        **said(peft, NEMO, "lora_rank", "lora_dropout"),
        "lora_targets": _targets(peft),
        "adapter_dtype": weights,
    }


def _length(parts: Mapping[str, Settings], top: Settings) -> dict[str, Any]:
    """Tokens of a sequence, packed or as the data set cuts them; open where neither says."""
    packed = parts["packed_sequence"].integer("packed_sequence_size", 0)
    key = parts["dataset"].first(*LENGTHS)
    if not packed and not parts["dataset"].has(key):
        top.ask("seq_len_tokens", ": no packed_sequence_size, no dataset.seq_length")
    return {"seq_len_tokens": packed or parts["dataset"].integer(key, 2048, at_least=1), "packing": packed > 0}


def _note_what_is_not_counted(top: Settings, parts: Mapping[str, Settings]) -> None:
    if parts["fp8"].flag("enabled", False):
        top.approximate("fp8 matrix multiplications are counted as bf16")
    if parts["model"].flag("use_liger_kernel", True):
        top.approximate("AutoModel puts Liger's kernels into the model: counted as transformers' own")
    if parts["model"].has("backend"):
        top.approximate("AutoModel's own model code is counted as transformers'")


def _layout(settings: Settings, num_gpus: int) -> tuple[dict[str, Any], int]:
    """How a recipe layouts, and over how many GPUs its batch."""
    tensor = max(1, _degree(settings, "tp_size"))
    stages = max(1, _degree(settings, "pp_size"))
    for key in ("cp_size", "ep_size"):
        if _degree(settings, key) > 1:
            settings.approximate(f"{key} splits a step further: counted as if it did not")
    word = settings.text("strategy", "fsdp2")
    if num_gpus % (tensor * stages):
        tensor = stages = 1
        settings.assume(f"tp_size and pp_size do not divide {num_gpus} GPUs: left out (say how many with --gpus)")
    layout = {"parallel": STRATEGIES.get(word, "fsdp2"), "tensor_degree": tensor, "pipeline_degree": stages}
    return layout if num_gpus > 1 else {}, num_gpus // (tensor * stages)


def _degree(settings: Settings, key: str) -> int:
    value = settings.raw(key, 1)
    return value if isinstance(value, int) else 1  # "none" in the recipes


def _targets(peft: Settings) -> str | tuple[str, ...]:
    if peft.flag("match_all_linear", False):
        return "all-linear"
    names: list[str] = []
    for pattern in peft.text_or_names("target_modules"):
        last = pattern.rpartition(".")[2] or pattern
        names += [one for one in LINEAR if fnmatch(one, last)] or [last]
    return common.targets(peft, tuple(names))
