"""How each source's runs map onto `TrainSetup`: one function per source group.

A mapper returns a `Mapped`. What the source does not say is listed in `assumed`; what it says but a setup cannot
express in `differs` (its memory or speed is then known to be somewhat off); what makes the row useless for
comparison in `unmapped`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]

MODELS = {
    "mistralai/Mistral-7B-v0.1": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-v0.2": "mistralai/Mistral-7B-Instruct-v0.2",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "NousResearch/Llama-2-70b-hf": "meta-llama/Llama-2-70b-hf",
    "TinyLlama/TinyLlama-1.1B": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "TinyLlama-1.1B": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "TinyLlama-1.1B (litgpt config tiny-llama-1.1b, random init)": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "Qwen/Qwen-1_8B-Chat": "Qwen/Qwen1.5-1.8B",
    "Qwen/Qwen-7B-Chat": "Qwen/Qwen1.5-7B",
    "Qwen/Qwen-14B-Chat": "Qwen/Qwen1.5-14B",
    "Qwen/Qwen-72B-Chat": "Qwen/Qwen1.5-72B",
    "01-ai/Yi-6B-Chat": "01-ai/Yi-6B",
    "01-ai/Yi-34B-Chat": "01-ai/Yi-34B",
    "01-ai/Yi-34B-200K": "01-ai/Yi-34B",
    "OpenBuddy/openbuddy-zephyr-7b": "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B",
    "meta-llama/Meta-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "ibm-granite/granite-3.3-8b-instruct": "ibm-granite/granite-3.1-8b-base",
    "mistralai/Mistral-7B-v0.2 base": "mistralai/Mistral-7B-Instruct-v0.2",
    "meta-llama/Meta-Llama-3-8B (torchao MX benchmark; model inferred)": "meta-llama/Meta-Llama-3-8B",
}
"""Published name -> catalogue id with the same shapes, where the two differ."""

GPUS = {
    "A100-80GB": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "A100": "a100-80gb",
    "A10G": "a10g",
    "L40": "l40",
    "L40S": "l40s",
    "L4": "l4",
    "T4": "t4",
    "B200": "b200",
    "H100-80GB": "h100-sxm",
    "H100": "h100-sxm",
    "H200": "h200",
    "RTX4090": "rtx-4090",
    "RTX4070": "rtx-4070-ti-super",
    "RTX3090": "rtx-3090",
}

STABLELM_ALPHA_3B = {
    "model_type": "gpt_neox",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "vocab_size": 50688,
    "max_position_embeddings": 4096,
    "rotary_pct": 0.25,
    "hidden_act": "gelu",
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
}
"""Not in the catalogue. Source: the row's own parameter count (3,637,321,728: 16 layers of 4096, 50,688 rows)."""


@dataclass
class Mapped:
    """One row's place among the setups."""

    stack: str
    setup: dict[str, Any] | None = None
    speed_seq_len_tokens: int | None = None
    config: Mapping[str, Any] | None = None
    assumed: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    unmapped: str = ""
    unmapped_memory: str = ""


def base_setup(row: Row) -> dict[str, Any]:
    """What every source says in the same words."""
    setup: dict[str, Any] = {
        "micro_batch_seqs": int(row["micro_batch_size"]),
        "accumulation_steps": int(row.get("grad_accum") or 1),
        "seq_len_tokens": int(row["seq_len"]),
        "checkpointing": row.get("gc_class") == "full",
        "packing": row.get("len_class") == "packed",
    }
    if row.get("lora_rank"):
        setup["lora_rank"] = int(row["lora_rank"])
        setup["lora_dropout"] = float(row.get("lora_dropout") or 0.0)
    return setup


def transformers_version(row: Row) -> tuple[int, int] | None:
    """(major, minor) of transformers, None when the source does not say."""
    versions = row.get("versions")
    text = versions.get("transformers") if isinstance(versions, Mapping) else None
    if not text:
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


OLDER_BITSANDBYTES = "0.43.1"
"""The newest of a run before 0.43.2, of 23 July 2024."""


def fms(row: Row) -> Mapped:
    """IBM fms-acceleration: fms-hf-tuning around TRL's SFTTrainer, flash attention 2, checkpointing, foreach AdamW.

    Source: foundation-model-stack/fms-acceleration scripts/benchmarks (scenarios.yaml, defaults.yaml) and
    plugins/accelerated-peft (framework_plugin_bnb.py: no fp32 cast; the baseline leaves preparation to SFTTrainer).
    """
    mapped = Mapped(stack="hf-trainer")
    variant = row["variant"]
    if row["method"] == "gptq-lora":
        mapped.unmapped = "GPTQ 4-bit base"
    elif "foak" in variant:
        mapped.unmapped = "fms fused kernels (cross-entropy, RMSNorm, RoPE, LoRA)"
    elif "scattermoe" in variant:
        mapped.unmapped = "ScatterMoE kernels"
    elif row["model_id"].startswith(("ibm-granite/granite-3.0-3b-a800m", "ibm-research/", "ibm-granite/granite-4.0")):
        mapped.unmapped = "model not in the catalogue"
    elif "Mixtral" in row["model_id"] and row["method"] == "qlora":
        mapped.unmapped = (
            "transformers 4 quantized each expert as its own Linear; transformers 5 stacks them unquantized"
        )
    if mapped.unmapped:
        return mapped
    setup = base_setup(row) | {"attention": "flash-attention-2", "optimizer": "adamw", "loss": "full"}
    mapped.setup = setup
    compute = row["compute_dtype"]
    sixteen = "autocast" not in compute
    if row["method"] == "full":
        setup |= {"method": "full", "precision": "bf16-pure" if sixteen else "bf16-autocast"}
        if "fp16" in compute:
            setup["precision"] = "bf16-pure"
    elif row["method"] == "lora":
        setup |= {"method": "lora", "lora_targets": "attention"}
        setup["precision"] = "bf16-pure" if sixteen else "bf16-autocast"
    else:
        setup |= {"method": "qlora", "quantization": "nf4-double", "lora_targets": "attention"}
        setup["precision"] = "fp16-autocast" if "fp16" in compute else "bf16-autocast"
        setup["kbit_fp32_cast"] = variant.startswith("baseline")
        setup["adapter_dtype"] = "fp32"
        if setup["kbit_fp32_cast"] and "bf16" in compute:
            mapped.differs.append("TRL of that time cast embeddings, head and adapters back to bf16 (norms stay fp32)")
    if "float16" in compute or "None weights" in compute:
        mapped.assumed.append("16-bit weights without autocast taken as bf16: same bytes, same rate on this card")
    setup |= {"packing": False, "reentrant_checkpointing": setup["checkpointing"]}  # TRL's ConstantLengthDataset
    stated = transformers_version(row)
    version = stated or (4, 41)
    if stated is None:
        mapped.assumed.append("library versions not stated (April to June 2024: transformers 4.39 to 4.41)")
    if version < (4, 43):
        mapped.differs.append("transformers below 4.43: each layer kept a rotary table of the maximum length")
    setup["transformers_version"] = "{}.{}".format(*version)
    if row["method"] == "qlora":
        setup["bitsandbytes_version"] = row["versions"]["bitsandbytes"] if stated else OLDER_BITSANDBYTES
    if row["len_class"] in ("dynamic", "padding_free"):
        average = row.get("avg_seq_len")
        mapped.unmapped_memory = "length of the longest batch unknown"
        if average:
            mapped.speed_seq_len_tokens = round(average)
        else:
            mapped.unmapped = "lengths unknown"
    return mapped


PEFT_EMPTIED_UNTIL = "2025-11-13"
"""When huggingface/peft 90d3fc05d (#2894) stopped emptying the cache after every step."""
PEFT_EMPTIED = (
    "tokens/s: the loop empties PyTorch's cache after every step, so that every step asks the driver for its memory "
    "anew (peft run.py before 90d3fc05d, whose authors got 250 steps from 65 to 50 s by leaving nine in ten out)"
)


def peft(row: Row) -> Mapped:
    """PEFT's method comparison on MetaMathQA: a plain loop, bf16 weights without autocast, fp32 adapters, SDPA.

    Source: huggingface/peft method_comparison/MetaMathQA/run.py and the result files.
    """
    mapped = Mapped(stack="peft-loop")
    if str(row["source_date"]) < PEFT_EMPTIED_UNTIL:
        mapped.differs.append(PEFT_EMPTIED)
    if row["method_class"] not in ("lora", "full"):
        mapped.unmapped = f"adapter method {row['method']}"
        return mapped
    setup = base_setup(row) | {"attention": "sdpa", "optimizer": "adamw", "loss": "full", "precision": "bf16-pure"}
    if row["method_class"] == "full":
        setup |= {"method": "full"}
    else:
        setup |= {"method": "lora", "lora_targets": ["q_proj", "v_proj"], "adapter_dtype": "fp32"}
        if row["optimizer"] != "AdamW":
            frozen = "the first matrix is frozen and keeps no input"
            mapped.differs.append(f"memory: optimizer {row['optimizer']}: {frozen}")
            mapped.differs.append(
                "tokens/s: LoRA-FA's optimizer goes from pair to pair in Python and inverts a matrix for each "
                "(peft 0.21 optimizers/lorafa.py)"
            )
        if "mica" in row["variant"]:
            mapped.differs.append("memory: MiCA initialisation freezes one of the two matrices")
    mapped.setup = setup
    mapped.assumed.append("the longest batch is four samples at the cap of 768 tokens")
    mapped.assumed.append("evaluation by generation at batch 50 reserves less than training on the longest batch")
    mapped.speed_seq_len_tokens = round(row["avg_seq_len"])
    mapped.assumed.append("speed: every sample at the average length (batches are bucketed by length)")
    return mapped


def litgpt(row: Row) -> Mapped:
    """Lightning's own models and loop: pure bf16 (adapters too), SDPA, fused qkv, no checkpointing, foreach AdamW.

    Source: Lightning-AI/litgpt config_hub/finetune and litgpt/finetune/*.py.
    """
    mapped = Mapped(stack="litgpt")
    if row["method_class"] not in ("lora", "qlora", "full"):
        mapped.unmapped = f"adapter method {row['method']}"
        return mapped
    if row.get("compile") not in (None, False) and "thunder" in str(row.get("compile")):
        mapped.unmapped = "compiled by lightning-thunder"
        return mapped
    setup = base_setup(row) | {"attention": "sdpa", "optimizer": "adamw", "loss": "full", "precision": "bf16-pure"}
    setup["checkpointing"] = False
    mapped.setup = setup
    mapped.differs.append("litgpt's own modules; its loss takes the head in chunks of 128 tokens, logits stay in bf16")
    if "stablelm-base-alpha-3b" in row["model_id"]:
        mapped.config = STABLELM_ALPHA_3B
    fused_qkv = "stablelm" in row["model_id"] or "falcon" in row["model_id"]
    if row["method_class"] == "full":
        setup |= {"method": "full"}
    else:
        if "head" in (row.get("target_modules") or ()):
            mapped.differs.append("the output head is adapted too")
            targets: Any = "all-linear"
        else:
            targets = ["query_key_value"] if fused_qkv else ["q_proj", "v_proj"]
        setup |= {"method": row["method_class"], "lora_targets": targets, "adapter_dtype": "bf16"}
        mapped.differs.append("LoRA on the fused qkv matrix pads its output to full width")
        if row["method_class"] == "qlora":
            setup["quantization"] = "nf4-double" if "dq" in str(row.get("quantization")) else "nf4"
            setup["bitsandbytes_version"] = OLDER_BITSANDBYTES
            mapped.differs.append("the output head is quantized too")
    if row["compute_dtype"] == "bf16-mixed":
        setup["precision"] = "bf16-mixed"
        setup["adapter_dtype"] = "fp32" if setup["method"] != "full" else "auto"
    if row["compute_dtype"] == "see notes":
        mapped.assumed.append("bf16-true, the script's default where supported")
    if row.get("len_class") == "dynamic":
        mapped.assumed.append(f"the longest batch is {row['seq_len']} tokens")
    return mapped


def ms_swift(row: Row) -> Mapped:
    """ms-swift 1.x: Trainer under bf16 autocast, bf16 weights, fp32 adapters, foreach AdamW, flash attention 2.

    The samples average 3,234 tokens and reach 19,548, so the longest batch is at the stated maximum.
    Source: modelscope/ms-swift docs/source_en/LLM/Benchmark.md before its removal.
    """
    mapped = Mapped(stack="ms-swift")
    model = row["model_id"]
    if row["weight_fmt"] in ("gptq4", "gptq8"):
        mapped.unmapped = "GPTQ base"
    elif model.startswith(("THUDM/", "baichuan-inc/")):
        mapped.unmapped = "remote-code model, not in the catalogue"
    elif "Audio" in model or "VL" in model:
        mapped.unmapped = "multimodal model"
    elif not row.get("seq_len") or not row.get("micro_batch_size"):
        mapped.unmapped = "length or micro-batch not stated"
    if mapped.unmapped:
        return mapped
    setup = base_setup(row) | {"optimizer": "adamw", "loss": "full", "precision": "bf16-autocast"}
    setup["attention"] = "eager" if "eager" in str(row.get("attn_impl")) else "flash-attention-2"
    mapped.setup = setup
    if row["method_class"] == "full":
        setup |= {"method": "full"}
    else:
        all_linear = "all linear" in str(row.get("target_modules"))
        setup |= {"method": "lora", "adapter_dtype": "fp32"}
        setup["lora_targets"] = "all-linear" if all_linear else ["q_proj", "k_proj", "v_proj"]
        if row["method_class"] == "qlora":
            setup |= {"method": "qlora", "quantization": "nf4-double", "kbit_fp32_cast": True}
            mapped.assumed.append("bitsandbytes 4 bit taken as NF4 with double quantization and the fp32 cast")
    mapped.differs.append(
        "lengths vary from 91 tokens to the maximum without expandable_segments: reserved is fragmented over them"
    )
    if model.startswith("Qwen/Qwen-"):
        mapped.differs.append("Qwen 1 remote code: fused c_attn, and the loss does not upcast the logits")
    if "OpenBuddy" in model:
        mapped.differs.append("extended vocabulary (36,608 rows), taken as Mistral's 32,000")
    return mapped


def ms_swift_examples(row: Row) -> Mapped:
    """Comments in ms-swift's example scripts: rounded to a GiB, the card unknown."""
    mapped = Mapped(stack="ms-swift")
    method = row["method"]
    if "rlhf" in method or "Omni" in row["model_id"] or "VL" in row["model_id"]:
        mapped.unmapped = "multimodal or preference tuning"
        return mapped
    setup = base_setup(row) | {"attention": "flash-attention-2", "optimizer": "adamw-fused", "loss": "full"}
    setup |= {"precision": "bf16-autocast", "method": row["method_class"]}
    if row["method_class"] == "lora":
        setup |= {"lora_targets": "all-linear", "adapter_dtype": "fp32"}
    if row.get("loss_impl") == "liger":
        setup["loss"] = "liger"
    mapped.setup = setup
    mapped.assumed += ["gradient checkpointing on (default)", "A100-80GB (the card is not stated)"]
    return mapped


def ml_engineering(row: Row) -> Mapped:
    """A plain transformers loop on a B200: pure bf16, SDPA, checkpointing, full logits, fixed lengths.

    Source: stas00/ml-engineering training/performance/benchmarks/torch-compile-bench.py.
    """
    mapped = Mapped(stack="plain-loop")
    if "AdamW" not in row.get("step_def", ""):
        mapped.unmapped = "forward and backward only, no optimizer step"
    elif row["compile"] not in (False, "torch.compile() default"):
        mapped.unmapped = f"{row['compile']}"
    if mapped.unmapped:
        return mapped
    mapped.setup = base_setup(row) | {
        "method": "full", "precision": "bf16-pure", "attention": "sdpa", "optimizer": "adamw", "loss": "full",
        "compile": row["compile"] is not False,
    }  # fmt: skip
    return mapped


def llamafactory(row: Row) -> Mapped:
    """LLaMA-Factory's comparison page (January 2024)."""
    mapped = Mapped(stack="llama-factory")
    if "unsloth" in row["library"]:
        mapped.unmapped = "Unsloth kernels"
        return mapped
    setup = base_setup(row) | {
        "precision": "bf16-autocast", "optimizer": "adamw", "loss": "full", "checkpointing": True,
        "lora_targets": ["q_proj", "v_proj"], "adapter_dtype": "fp32", "method": row["method_class"],
    }  # fmt: skip
    setup["attention"] = "flash-attention-2" if "flash" in row["attn_impl"] else "sdpa"
    if row["method_class"] == "qlora":
        setup |= {"quantization": "nf4-double", "kbit_fp32_cast": True}
    mapped.setup = setup
    mapped.unmapped_memory = "metric not stated"
    mapped.assumed += [*row["assumed"], "A100-80GB", "every sample filled to 1,024 tokens"]
    return mapped


def unsloth_notebooks(row: Row) -> Mapped:
    """Unsloth's notebooks: own kernels, checkpoints offloaded to host memory, lengths unknown."""
    return Mapped(stack="unsloth", unmapped="Unsloth kernels with offloaded checkpoints; sample lengths unknown")


def torchao(row: Row) -> Mapped:
    """torchao's quantized-training scripts on a model of its own."""
    return Mapped(stack="torchao", unmapped="the script's own model, shape not stated")


def other(row: Row) -> Mapped:
    """Any source without a mapper of its own."""
    return Mapped(stack=row["source_group"], unmapped="no mapping for this source")


def multi_gpu(row: Row) -> Mapped:
    """Several GPUs: FSDP full sharding of the sources above; everything else keeps its facts without a setup."""
    if row["source_group"] != "fms_acceleration" or not row["parallelism"].startswith("FSDP"):
        return Mapped(stack=row["source_group"], unmapped=f"parallelism {row['parallelism']}")
    mapped = fms(row)
    if mapped.setup is not None:
        layout = {"parallel": "fsdp2", "fsdp_version": 1, "reentrant_checkpointing": True}
        mapped.setup |= {"num_gpus": int(row["n_gpus"]), **layout}
    return mapped


MAPPERS: Mapping[str, Callable[[Row], Mapped]] = {
    "fms_acceleration": fms,
    "peft_metamathqa": peft,
    "litgpt": litgpt,
    "ms_swift_benchmark": ms_swift,
    "ms_swift_examples": ms_swift_examples,
    "ml_engineering": ml_engineering,
    "llamafactory_wiki": llamafactory,
    "unsloth_notebooks": unsloth_notebooks,
    "torchao": torchao,
}
