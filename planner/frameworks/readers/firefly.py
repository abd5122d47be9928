"""Firefly's training arguments (`train.py --train_args_file FILE`) as setups."""

from typing import Any

from planner.core.errors import NotPlanned
from planner.frameworks.readers import common
from planner.frameworks.readers.fields import config, said
from planner.frameworks.readers.sharding import parallel_of, zero_stage
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.others import FIREFLY

FORMAT = "firefly"
MODES = {"full": "full", "lora": "lora", "qlora": "qlora"}


def read(settings: Settings) -> ReadConfig:
    """The setup of a Firefly run.

    Source: yangjianxin1/Firefly `train.py` (`load_model`, `find_all_linear_names`), `component/argument.py`.

    Raises:
        ConfigError: another task than pretraining or supervised fine-tuning, or another mode.
    """
    task = settings.text("task_type", "sft")
    if task not in ("sft", "pretrain"):
        raise NotPlanned(f"{settings.name}: task_type {task} is not planned", hint="sft and pretrain are")
    mode = settings.text("train_mode", "qlora")
    if mode not in MODES:
        raise settings.error("train_mode", f"one of {', '.join(MODES)}", mode)
    autocast = common.autocast(settings, bf16_default=False)
    weights = "fp16" if autocast == "fp16" else "bf16"
    fields: dict[str, Any] = {
        **said(settings, FIREFLY, "micro_batch_seqs", "accumulation_steps", "seq_len_tokens"),
        "method": mode,
        "quantization": "nf4-double" if mode == "qlora" else "none",
        "kbit_fp32_cast": mode == "qlora",
        "precision": common.precision(settings, weights if mode != "full" else "fp32", autocast, mode),
        **(said(settings, FIREFLY, "lora_rank", "lora_dropout") if mode != "full" else {"lora_rank": 0}),
        "adapter_dtype": "fp32" if mode == "qlora" else "auto",
        "optimizer": common.optimizer(settings, "optim", common.default_optimizer(settings)),
        "attention": "sdpa",
        "checkpointing": common.checkpointing(settings, False),
        "loss": "full",
        "packing": task == "pretrain",
    }
    layout = zero_stage(settings, settings.raw("deepspeed")) if settings.has("deepspeed") else {}
    fields |= parallel_of(settings, layout)
    return config(FIREFLY, settings, fields)
