"""Settings that every tool on top of transformers' TrainingArguments writes in the same words."""

from collections.abc import Mapping
from typing import Any

from planner.readers import common
from planner.readers.values import Settings


def checkpointing(settings: Settings, default: bool) -> int:
    """0, 1 or n, by the current names or the deprecated ones."""
    key = settings.first("activation_checkpointing", "gradient_checkpointing")
    if not settings.has(key):
        settings.assume(f"{key} absent: {'on' if default else 'off'}, the tool's default")
    if not settings.flag(key, default):
        return 0
    return _kwargs(settings).integer("every_n_layers", 1, at_least=1)


def _kwargs(settings: Settings) -> Settings:
    """What the switch is told beside on and off."""
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


def offloads(settings: Settings, checkpointing: int) -> bool:
    """Whether the checkpoints lie in host memory: transformers' option, or TRL's, which takes everything."""
    everything = settings.flag("activation_offloading", False)
    if everything and not checkpointing:
        settings.approximate("activations offloaded to host memory are counted as if they stayed on the GPU")
    return bool(checkpointing) and (_kwargs(settings).flag("offload", False) or everything)


def autocast(settings: Settings, bf16_default: bool) -> str | None:
    """ "bf16", "fp16" or None from the two switches."""
    fp16 = settings.flag("fp16", False)
    if settings.flag("bf16", bf16_default and not fp16):
        return "bf16"
    return "fp16" if fp16 else None


def weight_dtype(settings: Settings, key: str, default: str) -> str:
    """ "fp32", "bf16" or "fp16" from a dtype word; "auto" is the checkpoint's own."""
    word = settings.text(key, default).removeprefix("torch.")
    if word == "auto":
        config = settings.model.config if settings.model is not None else {}
        stored = config.get("dtype") or config.get("torch_dtype")
        if isinstance(stored, str) and stored.removeprefix("torch.") in common.DTYPES:
            return common.DTYPES[stored.removeprefix("torch.")]
        settings.assume(f"{key} auto: the checkpoint is taken to be bf16")
        return "bf16"
    if word not in common.DTYPES:
        raise settings.error(key, "one of float32, bfloat16, float16, auto", word)
    return common.DTYPES[word]
