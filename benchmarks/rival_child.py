"""Asks other memory estimators, in the Python that has them: JSON lines in, JSON lines out. It needs nothing else.

    python -m venv RIVALS && RIVALS/bin/pip install canifinetune fitcheck-llm fitscout
    python -m benchmarks.published_examples --rivals RIVALS/bin/python

Each answers in GiB, its safety margin left out: canifinetune for what a process reserves, fitcheck and fitscout for
what a device holds. All three are told the model's shape, where they would look it up.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "intermediate_size", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip
OPTIMIZERS = {
    "paged-adamw-8bit": ("paged_adamw_8bit", "adam8bit"),
    "adamw-8bit": ("adamw_8bit", "adam8bit"),
    "adamw": ("adamw_torch", "adamw"),
    "adamw-fused": ("adamw_torch_fused", "adamw"),
}


def canifinetune(shape: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
    memory = import_module("canifinetune.estimator.memory")
    quantization = {"none": "none", "nf4": "nf4", "nf4-double": "nf4_double_quant", "int8": "int8"}
    request = memory.EstimateRequest(
        model_id="here/model",
        method=setup["method"],
        seq_len=setup["seq_len_tokens"],
        micro_batch_size=setup["micro_batch_seqs"],
        gradient_accumulation_steps=setup["accumulation_steps"],
        quantization=quantization[setup["quantization"]],
        lora_rank=setup["lora_rank"] or 16,
        lora_target_scope="attention" if setup["lora_targets"] == "attention" else "all_linear",
        optimizer=OPTIMIZERS[setup["optimizer"]][0],
        gradient_checkpointing=bool(setup["checkpointing"]),
        attention_implementation=setup["attention"].replace("-", "_"),
        loss_backend="stock" if setup["loss"] == "full" else "liger",
        gpu_vram_gb=shape["memory_gib"],
        override={
            **shape,
            "total_params": shape["num_params"],
            "num_hidden_layers": shape["num_layers"],
            "num_key_value_heads": shape["num_kv_heads"],
        },
        use_network=False,
    )
    memory_use = memory.estimate(request).memory
    return float(memory_use.total_estimated_gb - memory_use.safety_margin_gb)


def fitcheck(shape: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
    names = {name: shape[name] for name in (*SHAPE, "num_params", "head_dim")}
    config = import_module("fitcheck.config_parser").ModelConfig(name="model", **names)
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
    card = import_module("fitcheck.gpu_db").get_gpu(vram_mib=int(1024 * shape["memory_gib"]))
    return float(estimator.estimate(config, training, card).total_mib) / 1024


def fitscout(shape: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
    names = {name: shape[name] for name in SHAPE}
    profile = import_module("fitscout.model.profile").ModelProfile(params=shape["num_params"], **names)
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


RIVALS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], float]] = {
    "canifinetune": canifinetune,
    "fitcheck-llm": fitcheck,
    "fitscout": fitscout,
}
"""By distribution."""


def main() -> None:
    """A line for every rival that this Python has: its name, seconds of all answers, and GiB, or why not, of each."""
    requests = [json.loads(line) for line in sys.stdin]
    for name, ask in RIVALS.items():
        try:
            title = f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
        began, answers = time.perf_counter(), []
        for request in requests:
            try:
                answers.append(ask(request["shape"], request["setup"]))
            except Exception as error:  # another project's program: whatever it stumbles over is its answer
                answers.append(f"{type(error).__name__}: {error}"[:200])
        print(json.dumps({"name": title, "seconds": time.perf_counter() - began, "answers": answers}))


if __name__ == "__main__":
    main()
