"""One table of setups that drives every exporter's tests: each value of each field, random combinations, and every way
of spreading a job over several GPUs."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from planner.core.errors import SetupError
from planner.frameworks.exporters import DatasetChoice, ExportRequest
from planner.frameworks.hyperparameters import choose
from planner.options.objectives import OBJECTIVES, SHARED_BY, Objective
from planner.setup import TrainSetup
from planner.setup.allowed import ATTENTIONS, KERNEL_FAMILIES, LOSSES, OPTIMIZERS, PARALLELS, PRECISIONS, QUANTIZATIONS
from planner.setup.interchange import setup_from_dict
from tests.whole import WHOLE

NUM_SETUPS = 300
SEED = 7


def _all_values() -> Iterator[TrainSetup]:
    """Every value of every field at least once, on a base that allows it."""
    for precision, quantization in product(PRECISIONS, QUANTIZATIONS):
        method = "lora" if quantization == "none" else "qlora"
        yield TrainSetup(method=method, precision=precision, quantization=quantization)
    for precision in PRECISIONS:
        if precision != "fp16-autocast":
            yield TrainSetup(method="full", precision=precision, lora_rank=0)
    for name, values in {
        "optimizer": OPTIMIZERS,
        "attention": ATTENTIONS[:3],
        "loss": LOSSES,
        "checkpointing": (0, 1, 2, 5),
        "packing": (False, True),
        "compile": (False, True),
        "kernels": KERNEL_FAMILIES,
        "activation_offload": (False, True),
        "selective_checkpointing": (False, True),
        "lora_rank": (1, 8, 256),
        "lora_dropout": (0.0, 0.05, 0.5),
        "lora_targets": ("attention", "all-linear", ("q_proj", "v_proj"), ("down_proj",)),
        "adapter_dtype": ("auto", "fp32", "bf16"),
        "micro_batch_seqs": (1, 3, 64),
        "accumulation_steps": (1, 7, 128),
        "seq_len_tokens": (128, 1000, 131072),
    }.items():
        for value in values:
            yield TrainSetup(**{name: value})
    yield TrainSetup(attention="xformers", stack="axolotl", packing=True, precision="fp16-autocast")
    for parallel in PARALLELS:
        num_gpus = 1 if parallel == "none" else 4
        yield TrainSetup(parallel=parallel, num_gpus=num_gpus)
        yield TrainSetup(parallel=parallel, num_gpus=num_gpus, method="full", lora_rank=0, checkpointing=2)
        yield TrainSetup(parallel=parallel, num_gpus=num_gpus, method="qlora", quantization="nf4-double")
    yield TrainSetup(method="qlora", quantization="nf4", kbit_fp32_cast=True)


METHODS: tuple[dict[str, Any], ...] = (
    {"method": "full", "lora_rank": 0, "precision": "bf16-mixed"},
    {"method": "full", "lora_rank": 0, "precision": "bf16-pure", "optimizer": "adamw", "packing": True},
    {"method": "lora", "lora_targets": "attention", "checkpointing": 0},
    {"method": "qlora", "quantization": "nf4", "checkpointing": 2, "loss": "chunked"},
)
LAYOUTS: tuple[dict[str, Any], ...] = (
    *({"num_gpus": 8, "parallel": name} for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    {"num_gpus": 2, "parallel": "fsdp2", "reshard_after_forward": False},
    {"num_gpus": 8, "parallel": "fsdp2", "offload": "parameters"},
    {"num_gpus": 16, "parallel": "fsdp2", "shard_degree": 8},
    {"num_gpus": 32, "parallel": "fsdp2", "shard_degree": 8, "reshard_after_forward": False},
    {"num_gpus": 16, "parallel": "fsdp2", "shard_degree": 4, "offload": "parameters"},
    {"num_gpus": 4, "parallel": "zero1", "offload": "optimizer"},
    {"num_gpus": 4, "parallel": "zero2", "offload": "optimizer"},
    {"num_gpus": 8, "parallel": "zero3", "offload": "optimizer"},
    {"num_gpus": 16, "parallel": "zero3", "offload": "parameters"},
    {"num_gpus": 8, "parallel": "none", "tensor_degree": 8},
    {"num_gpus": 2, "parallel": "none", "tensor_degree": 2},
    {"num_gpus": 16, "parallel": "fsdp2", "tensor_degree": 4},
    {"num_gpus": 16, "parallel": "fsdp2", "tensor_degree": 2, "shard_degree": 4},
    {"num_gpus": 8, "parallel": "ddp", "tensor_degree": 2},
    {"num_gpus": 8, "parallel": "fsdp2", "context_degree": 4, "checkpointing": 1, "activation_offload": True},
    {"num_gpus": 16, "parallel": "fsdp2", "context_degree": 4, "shard_degree": 8},
    {"num_gpus": 8, "parallel": "zero3", "context_degree": 4},
    {"num_gpus": 4, "parallel": "none", "pipeline_degree": 4, "accumulation_steps": 8},
    {
        "num_gpus": 8, "parallel": "fsdp2", "pipeline_degree": 4, "pipeline_schedule": "gpipe",
        "accumulation_steps": 8,
    },
    {"num_gpus": 16, "parallel": "fsdp2", "tensor_degree": 2, "pipeline_degree": 2, "accumulation_steps": 4},
    {"num_gpus": 4, "parallel": "dp"},
    {"num_gpus": 3, "parallel": "device-map"},
)  # fmt: skip
"""Every way of spreading that `TrainSetup` can say."""


@cache
def layout_setups() -> list[TrainSetup]:
    """Every way of spreading times full (twice), LoRA and QLoRA."""
    batch = {"micro_batch_seqs": 2, "accumulation_steps": 2}
    return [TrainSetup(**{**batch, **method, **layout}) for method, layout in product(METHODS, LAYOUTS)]


def objective_layouts() -> list[TrainSetup]:
    """Every objective that several GPUs train, under every engine that does, by full fine-tuning and by LoRA."""
    rows = [row for row in OBJECTIVES.values() if not row.supervised and not row.alone]

    def made(row: Objective) -> dict[str, Any]:
        return {"rollout": {"generator": "vllm-sleep"}} if row.rolls_out else {}

    methods = ({"method": "full", "precision": "bf16-pure", "attention": "flash-attention-2"}, {"method": "lora"})
    job = {"micro_batch_seqs": 2, "num_gpus": 4}
    return [
        setup_from_dict({"objective": row.name, "parallel": parallel, **job, **method, **made(row)})
        for row, parallel, method in product(rows, SHARED_BY, methods)
        if not (row.rolls_out and parallel == "zero3")
    ]


@cache
def setups(num: int = NUM_SETUPS) -> list[TrainSetup]:
    """The table: every value once, random combinations up to `num`, `spread_setups`, some layers alone; always the
    same."""
    dice = random.Random(SEED)
    table = dict.fromkeys(_all_values())
    while len(table) < num:
        method = dice.choice(("full", "lora", "qlora"))
        parallel = dice.choice(("none", "none", "ddp", "zero2", "zero3", "fsdp2"))
        values = {
            "method": method,
            "precision": dice.choice(PRECISIONS),
            "quantization": dice.choice(QUANTIZATIONS[1:]) if method == "qlora" else "none",
            "kbit_fp32_cast": method == "qlora" and dice.random() < 0.3,
            "lora_rank": 0 if method == "full" else dice.choice((4, 16, 64)),
            "lora_targets": dice.choice(("attention", "all-linear", ("q_proj", "v_proj"))),
            "lora_dropout": dice.choice((0.0, 0.1)),
            "optimizer": dice.choice(OPTIMIZERS),
            "attention": dice.choice(ATTENTIONS[:3]),
            "checkpointing": dice.choice((0, 1, 1, 3)),
            "loss": dice.choice(LOSSES),
            "micro_batch_seqs": dice.choice((1, 2, 8)),
            "accumulation_steps": dice.choice((1, 4, 16)),
            "seq_len_tokens": dice.choice((512, 2048, 8192)),
            "packing": dice.random() < 0.3,
            "compile": dice.random() < 0.1,
            "kernels": dice.choice(KERNEL_FAMILIES),
            "activation_offload": dice.random() < 0.2,
            "num_gpus": 1 if parallel == "none" else 8,
            "parallel": parallel,
        }
        try:
            table.setdefault(TrainSetup(**values))
        except SetupError:
            continue
    partial = [TrainSetup(**method, trained_layers=layers) for method, layers in product(METHODS[:3], (4, -4))]
    return [*table, *(setup for setup in layout_setups() if setup not in table), *partial]


@cache
def fewer_setups() -> list[TrainSetup]:
    """Every value once, twenty random combinations, and of the ways of spreading each with two of four methods."""
    few, layouts = setups(len(dict.fromkeys(_all_values())) + 20), layout_setups()
    return setups() if WHOLE else [setup for setup in few if setup not in layouts or layouts.index(setup) % 2 == 0]


def request(setup: TrainSetup, **changes: object) -> ExportRequest:
    """A request for a hub model with a chat dataset."""
    values: dict[str, object] = {
        "model_id": "Qwen/Qwen2.5-1.5B",
        "setup": setup,
        "hyper": choose(setup, num_params=1_543_714_304),
        "dataset": DatasetChoice(path="HuggingFaceH4/no_robots", columns=""),
        **changes,
    }
    return ExportRequest(**values)  # type: ignore[arg-type]
