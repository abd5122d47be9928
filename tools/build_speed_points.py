"""Regenerates `benchmarks/data/speed_points.jsonl`: published throughputs as (model, GPU, setup, conditions) points.

    python tools/build_speed_points.py --shared ../shared

One line per configuration: the median tokens/s per GPU, every repeat, the setup in interchange form, and what the stack
did that a setup cannot say (`planner.speed.roofline.Conditions`). Kept: runs whose configuration is complete enough to
predict (confidence A or B), and ms-swift's (C: sample lengths known only by mean and deviation) for their ratios. Left
out, with a count on stderr: GPTQ bases, other adapter methods, Unsloth kernels, models whose shape is not stated, FP8,
CUDA graphs, more than one GPU except DDP of adapters and llm-foundry's FSDP.
"""

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.measurement_sources import PEFT_EMPTIED_UNTIL  # noqa: E402

OUT = ROOT / "benchmarks" / "data" / "speed_points.jsonl"
Row = dict[str, Any]

MODELS = {
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "NousResearch/Llama-2-70b-hf": "meta-llama/Llama-2-70b-hf",
    "Qwen/Qwen-1_8B-Chat": "Qwen/Qwen1.5-1.8B",
    "Qwen/Qwen-7B-Chat": "Qwen/Qwen1.5-7B",
    "Qwen/Qwen-14B-Chat": "Qwen/Qwen1.5-14B",
    "01-ai/Yi-6B-Chat": "01-ai/Yi-6B",
    "01-ai/Yi-34B-Chat": "01-ai/Yi-34B",
    "OpenBuddy/openbuddy-zephyr-7b": "mistralai/Mistral-7B-v0.1",
}
GPUS = {
    "A100-80GB": "a100-80gb", "A100-40GB": "a100-40gb", "A100": "a100-80gb", "L40": "l40", "L40S": "l40s",
    "B200": "b200", "H100-80GB": "h100-sxm", "RTX4090": "rtx-4090", "RTX3090": "rtx-3090",
}  # fmt: skip
MPT = {  # llm-foundry's scripts/train/yamls/pretrain: width, layers, heads
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
}  # fmt: skip
OLD_STACK = {"reentrant_checkpointing": True, "loop_experts": True}


class Unusable(Exception):
    """Why a row is left out."""


def base(row: Row, seq_len: float | None = None) -> dict[str, Any]:
    """What all sources say in the same words."""
    setup: dict[str, Any] = {
        "micro_batch_seqs": int(row["micro_batch_size"]),
        "accumulation_steps": int(row.get("grad_accum") or 1),
        "seq_len_tokens": round(seq_len or row["seq_len"]),
        "checkpointing": row.get("gc_class") == "full",
        "packing": row.get("len_class") == "packed",
        "loss": "full",
        "optimizer": "adamw",
    }
    if row.get("lora_rank"):
        setup["lora_rank"] = int(row["lora_rank"])
        setup["lora_dropout"] = float(row.get("lora_dropout") or 0.0)
    return setup


def peft_version(row: Row) -> tuple[int, int]:
    """(major, minor) of peft; runs of April to June 2024 do not state it (0.10 or 0.11).

    From 0.12 on, peft casts 16-bit adapters to fp32 (`autocast_adapter_dtype`).
    """
    versions = row.get("versions")
    text = versions.get("peft", "") if isinstance(versions, dict) else ""
    major, minor = (text or "0.11").split(".")[:2]
    return int(major), int(minor)


def fms(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """IBM fms-acceleration: TRL's SFTTrainer, flash attention 2, checkpointing (reentrant then), foreach AdamW."""
    if row["method"] == "gptq-lora":
        raise Unusable("GPTQ base")
    if "granite" in row["model_id"] or row["model_id"].startswith("ibm-research/"):
        raise Unusable("ScatterMoE model not in the catalogue")
    setup = base(row, row.get("avg_seq_len") if row["len_class"] in ("dynamic", "padding_free") else None)
    setup["attention"] = "flash-attention-2"
    conditions: dict[str, Any] = dict(OLD_STACK)
    if row["len_class"] in ("dynamic", "padding_free"):
        conditions["masked_attention"] = True
    compute = row["compute_dtype"]
    pure = "autocast" not in compute
    half = "fp16" in compute or "float16" in compute
    if row["method"] == "full":
        setup |= {"method": "full", "precision": "bf16-pure" if pure or half else "bf16-autocast"}
    elif row["method"] == "lora":
        setup |= {"method": "lora", "lora_targets": "attention"}
        setup["precision"] = "bf16-pure" if pure else "bf16-autocast"
    else:
        setup |= {"method": "qlora", "quantization": "nf4-double", "lora_targets": "attention"}
        setup["precision"] = "fp16-autocast" if half else "bf16-autocast"
        setup["kbit_fp32_cast"] = row["variant"].startswith("baseline")
    if row["method"] != "full":
        setup["adapter_dtype"] = "fp32" if peft_version(row) >= (0, 12) else "bf16"
    if row.get("fused_kernels"):
        conditions |= {"fused_norm_rope": True, "fused_loss": True}
        conditions["fused_lora"] = "LoRA" in row["fused_kernels"]
    if "liger" in str(row.get("loss_impl")):
        setup["loss"] = "liger"
    return setup, conditions


def peft(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """PEFT's method comparison: a plain loop, bf16 weights without autocast, fp32 adapters, SDPA, no checkpointing."""
    if row["method_class"] not in ("lora", "full"):
        raise Unusable("other adapter method")
    if str(row["source_date"]) < PEFT_EMPTIED_UNTIL:
        raise Unusable("PEFT's loop while it emptied the cache after every step")
    if row["optimizer"] != "AdamW" or "mica" in row["variant"]:
        raise Unusable("LoRA-FA or MiCA")
    setup = base(row, row["avg_seq_len"]) | {
        "attention": "sdpa",
        "precision": "bf16-pure",
        "method": row["method_class"],
    }
    if row["method_class"] == "lora":
        setup |= {"lora_targets": ["q_proj", "v_proj"], "adapter_dtype": "fp32"}
    return setup, {"masked_attention": True, "trainer_overhead": False}


def ml_engineering(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plain loop in pure bf16 on one B200 (PyTorch 2.13, CUDA 13), with and without the optimizer step."""
    if "mode=" in str(row.get("compile")):
        raise Unusable("CUDA graphs or autotuned kernels")
    setup = base(row) | {"attention": "sdpa", "precision": "bf16-pure", "method": "full"}
    setup["compile"] = bool(row.get("compile"))
    conditions: dict[str, Any] = {"gradient_clipping": False, "trainer_overhead": False, "cudnn_attention": True}
    if "AdamW" not in row["step_def"]:
        conditions["optimizer_part"] = 0.0
    return setup, conditions


def llm_foundry(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """MPT under FSDP on 8 GPUs: bf16 compute, sharded optimizer; communication is not predicted."""
    if row["n_gpus"] != 8:
        raise Unusable("more than 8 GPUs")
    if "fp8" in str(row["compute_dtype"]):
        raise Unusable("FP8")
    if "1600 Gbps" in row["notes"]:
        raise Unusable("llm-foundry under amp on A100 (a repeat of the same configurations)")
    setup = base(row) | {"attention": "flash-attention-2", "precision": "bf16-pure", "method": "full"}
    return setup, {"optimizer_part": 0.125, "trainer_overhead": False, "flash_1": True}


def fsdp_qlora(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answer.AI's script under DDP: only adapter gradients travel between the two cards."""
    if "DDP" not in row["parallelism"]:
        raise Unusable("FSDP without NVLink")
    setup = base(row) | {
        "attention": "sdpa",
        "precision": "bf16-pure",
        "method": row["method"],
        "adapter_dtype": "bf16",
    }
    setup["lora_targets"] = ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"]
    if row["method"] == "qlora":
        setup["quantization"] = "nf4"
    return setup, {"trainer_overhead": False}


def llamafactory(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """LLaMA-Factory's comparison table: every sample taken at the stated maximum of 1024 tokens."""
    if "unsloth" in row["library"]:
        raise Unusable("Unsloth kernels")
    setup = base(row) | {"method": row["method"], "precision": "bf16-autocast", "checkpointing": True}
    setup["lora_targets"] = ["q_proj", "v_proj"]
    setup["attention"] = "flash-attention-2" if "flash" in row["attn_impl"] else "eager"
    if row["method"] == "qlora":
        setup |= {"quantization": "nf4-double", "kbit_fp32_cast": True, "adapter_dtype": "fp32"}
    return setup, dict(OLD_STACK)


def kept_mean(limit: int, mean: float = 3234.4, deviation: float = 2547.5) -> float:
    """Mean length of the samples of at most `limit` tokens, for log-normal lengths (ms-swift's news data set).

    ms-swift 1.x drops longer samples by default (`truncation_strategy: delete`).
    """
    variance = math.log(1.0 + (deviation / mean) ** 2)
    middle, width = math.log(mean) - variance / 2, math.sqrt(variance)

    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2.0))

    at = (math.log(limit) - middle) / width
    return mean * below(at - width) / below(at)


def ms_swift(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """ms-swift 1.x on A100: bf16 autocast, fp32 adapters on the fused qkv, one sample at a time."""
    if row["method"] not in ("lora", "full", "qlora") or row["model_id"] not in MODELS:
        raise Unusable("ms-swift: another method or a remote-code model")
    if not row.get("seq_len") or not row.get("micro_batch_size") or row["micro_batch_size"] != 1:
        raise Unusable("ms-swift: length not stated, or padded micro-batches")
    if row["weight_fmt"] not in ("bf16", "4bit_other") or row.get("gc_class") not in ("full", "none"):
        raise Unusable("ms-swift: GPTQ, or checkpointing not stated")
    setup = base(row, kept_mean(row["seq_len"])) | {"method": row["method"], "precision": "bf16-autocast"}
    setup["attention"] = "eager" if "eager" in row["attn_impl"] else "flash-attention-2"
    if row["method"] != "full":
        every = row.get("target_modules") == "all linear"
        setup |= {
            "lora_targets": "all-linear" if every else ["q_proj", "k_proj", "v_proj", "qkv"],
            "adapter_dtype": "fp32",
        }
    if row["method"] == "qlora":
        setup |= {"quantization": "nf4-double", "kbit_fp32_cast": True}
    return setup, {"reentrant_checkpointing": True}


SOURCES = {
    "fms_acceleration": fms,
    "peft_metamathqa": peft,
    "ml_engineering": ml_engineering,
    "llm_foundry": llm_foundry,
    "fsdp_qlora": fsdp_qlora,
    "llamafactory_wiki": llamafactory,
    "ms_swift_benchmark": ms_swift,
}


def mpt_config(name: str, seq_len: int) -> dict[str, Any]:
    """GPT-2's shape is MPT's: learned positions, LayerNorm with bias, fused qkv, plain MLP of 4 x width, tied head;
    its dropouts are off (llm-foundry's MPTConfig)."""
    width, layers, heads = MPT[name]
    return {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": seq_len,
        "vocab_size": 50368, "activation_function": "gelu", "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip


def main() -> None:
    """Reads the rows, writes the points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    text = (parser.parse_args().shared / "data" / "measurements.jsonl").read_text(encoding="utf-8")
    left_out: Counter[str] = Counter()
    points: dict[str, list[Row]] = defaultdict(list)
    for line in text.splitlines():
        row = json.loads(line)
        mapper = SOURCES.get(row["source_group"])
        if mapper is None or row["status"] != "ok" or row.get("n_gpus", 1) is None:
            continue
        swift = row["source_group"] == "ms_swift_benchmark" and row.get("samples_per_s") and row["n_gpus"] == 1
        if not swift and not (row.get("tokens_per_s_per_gpu") and row.get("confidence_tput") in ("A", "B")):
            continue
        if row["n_gpus"] > 1 and row["source_group"] not in ("llm_foundry", "fsdp_qlora"):
            continue
        try:
            setup, conditions = mapper(row)
        except Unusable as reason:
            left_out[str(reason)] += 1
            continue
        if swift:
            row["tokens_per_s_per_gpu"] = row["samples_per_s"] * kept_mean(row["seq_len"])
        points[f"{row['config_id']}-{setup.get('adapter_dtype', '')}".rstrip("-")].append(
            {**row, "setup": setup, "conditions": conditions}
        )
    lines = []
    for config_id, rows in points.items():
        first = rows[0]
        model = MODELS.get(first["model_id"], first["model_id"])
        speeds = sorted(row["tokens_per_s_per_gpu"] for row in rows)
        point: dict[str, Any] = {
            "id": config_id,
            "source": first["source_group"],
            "at": sorted({row["source"] for row in rows})[0],
            "model": model,
            "gpu": GPUS[first["gpu_key"]],
            "num_gpus": first["n_gpus"],
            "confidence": first["confidence_tput"],
            "tokens_per_s": round(median(speeds), 1),
            "repeats": speeds,
            "setup": first["setup"],
            "conditions": first["conditions"],
        }
        if first["source_group"] == "ms_swift_benchmark" and "Qwen" in model:
            point["fused_qkv"] = True  # the Qwen 1 code has one c_attn
        if "Mixtral" in model:
            point["experts"] = "linear"  # transformers 4 built each expert of its own matrices
        if "MPT" in model:
            name = model.split()[-1]
            point["model"] = f"mosaicml/mpt-{name}"
            point["config"] = mpt_config(name, first["seq_len"])
        lines.append(json.dumps(point, separators=(",", ":")))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for reason, number in left_out.most_common():
        print(f"left out {number:4d} rows: {reason}", file=sys.stderr)
    print(f"{len(lines)} configurations in {OUT.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
