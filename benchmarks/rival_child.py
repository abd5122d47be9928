"""Asks another memory estimator, in the Python that has it: JSON lines in, JSON lines out. It needs nothing else.

Each answers in GiB for what it says it estimates: canifinetune the process's reserved peak (its safety margin left
out), fitcheck and fitscout the process's device memory.
"""

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SHAPE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
OPTIMIZERS = {
    "paged-adamw-8bit": ("paged_adamw_8bit", "adam8bit"),
    "adamw-8bit": ("adamw_8bit", "adam8bit"),
    "adamw": ("adamw_torch", "adamw"),
    "adamw-fused": ("adamw_torch_fused", "adamw"),
}


def canifinetune(model: str, shape: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
    """canifinetune 0.4: knows models by name."""
    memory = import_module("canifinetune.estimator.memory")
    quantization = {"none": "none", "nf4": "nf4", "nf4-double": "nf4_double_quant", "int8": "int8"}
    request = memory.EstimateRequest(
        model_id=model,
        method=setup["method"],
        seq_len=setup["seq_len_tokens"],
        micro_batch_size=setup["micro_batch_seqs"],
        gradient_accumulation_steps=setup["accumulation_steps"],
        quantization=quantization[setup["quantization"]],
        lora_rank=setup["lora_rank"] or 16,
        lora_target_scope="attention" if setup["lora_targets"] == "attention" else "all_linear",
        optimizer=OPTIMIZERS[setup["optimizer"]][0],
        gradient_checkpointing=bool(setup["checkpointing"]),
        attention_implementation=setup["attention"].replace("flash-attention-2", "flash_attention_2"),
        gpu_vram_gb=shape["memory_gib"],
        use_network=False,
    )
    memory_use = memory.estimate(request).memory
    return float(memory_use.total_estimated_gb - memory_use.safety_margin_gb)


def fitcheck(model: str, shape: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
    """fitcheck-llm 0.3: takes a model's shape."""
    names = [*SHAPE, "num_params", "head_dim"]
    config = import_module("fitcheck.config_parser").ModelConfig(name=model, **{name: shape[name] for name in names})
    estimator = import_module("fitcheck.estimator")
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    training = estimator.TrainingConfig(
        precision="fp32" if setup["precision"] == "fp32" else "bf16",
        quantization={"nf4-double": "nf4"}.get(setup["quantization"], setup["quantization"]),
        double_quant=setup["quantization"] == "nf4-double",
        optimizer=OPTIMIZERS[setup["optimizer"]][1],
        batch_size=setup["micro_batch_seqs"],
        seq_len=setup["seq_len_tokens"],
        lora_rank=setup["lora_rank"] or None,
        lora_targets=attention
        if setup["lora_targets"] == "attention"
        else [*attention, "gate_proj", "up_proj", "down_proj"],
        grad_checkpoint=bool(setup["checkpointing"]),
        flash_attn=setup["attention"] != "eager",
        grad_accum_steps=setup["accumulation_steps"],
    )
    card = import_module("fitcheck.gpu_db").get_gpu(shape["gpu"])
    return float(estimator.estimate(config, training, card).total_mib) / 1024


def fitscout(model: str, shape: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
    """fitscout 0.1: takes a model's shape; adapters are always on queries and values."""
    profile = import_module("fitscout.model.profile").ModelProfile(
        params=shape["num_params"], **{name: shape[name] for name in SHAPE}
    )
    estimate = import_module("fitscout.memory.estimator").estimate_memory(
        profile,
        method=setup["method"],
        micro_batch=setup["micro_batch_seqs"],
        seq_len=setup["seq_len_tokens"],
        grad_ckpt=bool(setup["checkpointing"]),
        opt_8bit="8bit" in setup["optimizer"],
        lora_rank=setup["lora_rank"] or 16,
    )
    return float(estimate.total_gb)


RIVALS: dict[str, tuple[str, str, Callable[[str, Mapping[str, Any], Mapping[str, Any]], float]]] = {
    "canifinetune": ("canifinetune", "reserved", canifinetune),
    "fitcheck-llm": ("fitcheck", "device", fitcheck),
    "fitscout": ("fitscout", "device", fitscout),
}
"""Distribution -> (package, the figure that it estimates, how it is asked)."""


def main() -> None:
    """Every rival that this Python has answers every line; what it cannot answer is null with the reason."""
    here = []
    for name in RIVALS:
        try:
            here.append((f"{name} {version(name)}", *RIVALS[name][1:]))
        except PackageNotFoundError:
            continue
    for line in sys.stdin:
        request = json.loads(line)
        answers = []
        for name, figure, ask in here:
            answer: dict[str, Any] = {"name": name, "figure": figure, "gib": None, "why": ""}
            try:
                answer["gib"] = ask(request["model"], request["shape"], request["setup"])
            except Exception as error:  # another project's program: whatever it stumbles over is its answer
                answer["why"] = f"{type(error).__name__}: {error}"[:200]
            answers.append(answer)
        sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
