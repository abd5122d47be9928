"""Which settings each tool knows: snapshots of the tools' own parsers, with versions (tools/validators/snapshot.py)."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

# Names that published configs still carry and current parsers have dropped; none changes memory or speed unless a
# reader looks at it.
LEGACY_HF = (
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "warmup_ratio",
    "group_by_length",
    "logging_dir",
    "save_safetensors",
    "overwrite_output_dir",
    "no_cuda",
    "half_precision_backend",
    "fp16_opt_level",
    "evaluation_strategy",
    "torch_dtype",
    "max_seq_length",
    "push_to_hub_model_id",
    "push_to_hub_token",
    "push_to_hub_organization",
    "dataloader_num_workers",
    "ddp_timeout",
    "jit_mode_eval",
    "use_ipex",
    "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap",
    "tpu_num_cores",
    "past_index",
    "include_inputs_for_metrics",
    "eval_use_gather_object",
    "use_legacy_prediction_loop",
    "mp_parameters",
    "dispatch_batches",
    "split_batches",
    "tokenizers_parallelism",
)


@cache
def snapshot() -> dict[str, Any]:
    """tool -> {"version": ..., "fields": [...]} as committed."""
    data: dict[str, Any] = json.loads(files("planner").joinpath("data/launch_fields.json").read_text("utf-8"))
    return data


def known(tool: str) -> frozenset[str]:
    """Top-level settings a tool's parser knows, legacy names included."""
    entry = snapshot()[tool]
    return frozenset((*entry["fields"], *entry.get("legacy", ())))


def version(tool: str) -> str:
    """The version of the tool whose settings `known` lists."""
    return str(snapshot()[tool]["version"])
