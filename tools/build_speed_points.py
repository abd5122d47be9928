"""Regenerates `benchmarks/data/speed_points.jsonl`: published throughputs as (model, GPU, setup, conditions) points.

    python tools/build_speed_points.py --shared ../shared

One line per configuration: the median tokens/s per GPU, every repeat, the setup in interchange form, and what the stack
did that a setup cannot say (`planner.throughput.Conditions`). Kept: runs whose configuration is complete enough to
predict (confidence A or B). Left out, with a count on stderr: GPTQ bases, other adapter methods, Unsloth kernels,
models whose shape is not stated, FP8, CUDA graphs, more than one GPU except DDP of adapters and llm-foundry's FSDP.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "data" / "speed_points.jsonl"
Row = dict[str, Any]

MODELS = {
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "NousResearch/Llama-2-70b-hf": "meta-llama/Llama-2-70b-hf",
}
GPUS = {
    "A100-80GB": "a100-80gb", "A100-40GB": "a100-40gb", "A100": "a100-80gb", "L40": "l40", "L40S": "l40s", "B200": "b200",
    "H100-80GB": "h100-sxm", "RTX4090": "rtx-4090", "RTX3090": "rtx-3090",
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


def fms(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """IBM fms-acceleration: TRL's SFTTrainer, flash attention 2, checkpointing (reentrant then), foreach AdamW."""
    if row["method"] == "gptq-lora":
        raise Unusable("GPTQ base")
    if "granite" in row["model_id"] or row["model_id"].startswith("ibm-research/"):
        raise Unusable("ScatterMoE model not in the catalogue")
    setup = base(row, row.get("avg_seq_len") if row["len_class"] in ("dynamic", "padding_free") else None)
    setup["attention"] = "flash-attention-2"
    conditions: dict[str, Any] = dict(OLD_STACK)
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
        setup["adapter_dtype"] = "fp32"
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
    if row["optimizer"] != "AdamW" or "mica" in row["variant"]:
        raise Unusable("LoRA-FA or MiCA")
    setup = base(row, row["avg_seq_len"]) | {
        "attention": "sdpa",
        "precision": "bf16-pure",
        "method": row["method_class"],
    }
    if row["method_class"] == "lora":
        setup |= {"lora_targets": ["q_proj", "v_proj"], "adapter_dtype": "fp32"}
    return setup, {"masked_attention": True}


def ml_engineering(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plain loop in pure bf16 on one B200, with and without the optimizer step."""
    if "mode=" in str(row.get("compile")):
        raise Unusable("CUDA graphs or autotuned kernels")
    setup = base(row) | {"attention": "sdpa", "precision": "bf16-pure", "method": "full"}
    setup["compile"] = bool(row.get("compile"))
    conditions: dict[str, Any] = {"gradient_clipping": False, "trainer_overhead": False}
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


SOURCES = {
    "fms_acceleration": fms,
    "peft_metamathqa": peft,
    "ml_engineering": ml_engineering,
    "llm_foundry": llm_foundry,
    "fsdp_qlora": fsdp_qlora,
    "llamafactory_wiki": llamafactory,
}


def mpt_config(name: str, seq_len: int) -> dict[str, Any]:
    """GPT-2's shape is MPT's: learned positions, LayerNorm with bias, fused qkv, plain MLP of 4 x width, tied head."""
    width, layers, heads = MPT[name]
    return {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": seq_len,
        "vocab_size": 50368, "activation_function": "gelu",
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
        if mapper is None or row["status"] != "ok" or not row.get("tokens_per_s_per_gpu"):
            continue
        if row.get("confidence_tput") not in ("A", "B"):
            continue
        if row["n_gpus"] > 1 and row["source_group"] not in ("llm_foundry", "fsdp_qlora"):
            continue
        try:
            setup, conditions = mapper(row)
        except Unusable as reason:
            left_out[str(reason)] += 1
            continue
        points[row["config_id"]].append({**row, "setup": setup, "conditions": conditions})
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
