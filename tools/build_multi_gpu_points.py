"""Regenerates `benchmarks/data/multi_gpu_points.jsonl`: published runs on several GPUs, with setup and cluster.

    python tools/build_multi_gpu_points.py --shared ../shared

One line per configuration: the median tokens/s **per GPU** with every repeat, the worst rank's peak memory where the
source reports one of PyTorch's counts, the setup with its layout in interchange form, the cluster, what the stack did
that a setup cannot say (`planner.speed.roofline.Conditions`), and what was assumed. `loose` figures rest on a guess
that matters (a link nobody names, a card that is not in the table, sample lengths known only by their mean): shown
apart. Left out, with counts and reasons in `multi_gpu_left_out.json`: see `SOURCES` and the mappers.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.core.units import GIB  # noqa: E402
from planner.setup.interchange import setup_from_dict  # noqa: E402
from tools import build_speed_points as single  # noqa: E402
from tools.build_speed_points import Row, Unusable  # noqa: E402

OUT = ROOT / "benchmarks" / "data" / "multi_gpu_points.jsonl"
LEFT_OUT = ROOT / "benchmarks" / "data" / "multi_gpu_left_out.json"
MODELS = single.MODELS | {
    "Qwen/Qwen-72B-Chat": "Qwen/Qwen1.5-72B",
    "01-ai/Yi-34B-200K": "01-ai/Yi-34B",
    "TinyLlama-1.1B": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "TinyLlama-1.1B (litgpt config tiny-llama-1.1b, random init)": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "mistralai/Mistral-7B-v0.2 base": "mistralai/Mistral-7B-Instruct-v0.2",
}
GPUS = {
    "NVIDIA RTX 3090": "rtx-3090", "NVIDIA RTX 4090": "rtx-4090", "NVIDIA A5000": "rtx-a5000",
    "NVIDIA RTX 6000 Ada": "rtx-6000-ada", "NVIDIA A100 40GB SXM": "a100-40gb", "NVIDIA H100 80GB SXM": "h100-sxm",
    "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA A100 80GB": "a100-80gb", "NVIDIA A100 40GB": "a100-40gb",
    "NVIDIA H100 80GB": "h100-sxm", "NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA A100-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA L40 (source file l40_40gb)": "l40",
    "NVIDIA H100 96GB (HBM2e, 500W)": "h100-96gb-500w", "NVIDIA H100 (8x)": "h100-sxm", "AMD MI300X (8x)": "mi300x",
    "NVIDIA A100 (80GB by values > 40)": "a100-80gb",
}  # fmt: skip
"""Published card -> key of the GPU table ("h100-96gb-500w": `benchmarks.multi_gpu_points` makes it from the H100)."""
METRICS = {"max_allocated": "allocated", "max_active": "allocated", "max_reserved": "reserved"}
MPT = single.MPT | {"70b": (8192, 80, 64)}


@dataclass
class Mapped:
    """One row as a point: how it is spread, and what had to be assumed."""

    setup: dict[str, Any]
    conditions: dict[str, Any] = field(default_factory=dict)
    interconnect: str | None = None
    num_nodes: int | None = None
    assumed: list[str] = field(default_factory=list)
    loose: bool = False
    loose_speed: bool = False
    loose_memory: bool = False
    no_memory: str = ""
    no_speed: str = ""
    memory: tuple[str, float] | None = None
    tokens_per_s: float | None = None


def fms(row: Row) -> Mapped:
    """IBM fms-acceleration: TRL's SFTTrainer under Accelerate's FSDP (version 1), two to eight cards of one node.

    HF's tokens/s counts one process, so it is per GPU. A100s are SXM cards (NVLink), L40s have PCIe only.
    """
    if not row["parallelism"].startswith("FSDP"):
        raise Unusable("expert parallelism (ScatterMoE)")
    if "scattermoe" in row["variant"]:
        raise Unusable("ScatterMoE kernels")
    setup, conditions = single.fms(row)
    mapped = Mapped(setup | {"parallel": "fsdp2"}, conditions)
    conditions["fsdp_1"] = True
    steps = row.get("samples_per_s", 0.0) * row.get("step_time_s", 0.0) / row["n_gpus"] / row["micro_batch_size"]
    if steps and round(steps) != setup["accumulation_steps"]:
        setup["accumulation_steps"] = mapped.setup["accumulation_steps"] = max(1, round(steps))
        mapped.assumed.append("accumulation from samples per second times step time")
    if row["len_class"] not in ("packed", "fixed"):
        mapped.no_memory = "length of the longest batch not stated"
        mapped.assumed.append("lengths known by their mean only: every rank taken at the mean, none waits for another")
        mapped.loose = True
    elif row.get("fused_kernels"):
        mapped.no_memory = "fused kernels keep other activations"
    return mapped


def llm_foundry(row: Row) -> Mapped:
    """MPT pretraining under Composer's FSDP (version 1); the global rate is divided by the GPUs in the facts.

    "PURE" gathers and reduces in bf16, "DEFAULT" reduces in fp32. A100-80GB and, assumed, the A100-40GB clusters have
    1600 Gbit/s RoCE per node (the README names it for one table); H100 nodes are taken as 3200.
    """
    if "fp8" in str(row["compute_dtype"]):
        raise Unusable("FP8")
    setup = single.base(row) | {"attention": "flash-attention-2", "precision": "bf16-pure", "method": "full"}
    mapped = Mapped(setup | {"parallel": "fsdp2"}, {"trainer_overhead": False, "flash_1": True, "fsdp_1": True})
    if "SHARD_GRAD_OP" in row["parallelism"]:
        mapped.setup["reshard_after_forward"] = False
    if row["n_gpus"] > 8:
        mapped.interconnect = "ib-3200" if "H100" in row["gpu_name"] else "roce-1600"
        if mapped.interconnect == "ib-3200" or "40GB" in row["gpu_name"]:
            mapped.assumed.append(f"{mapped.interconnect} between nodes")
    if "DEFAULT" in row["parallelism"]:
        mapped.conditions["fp32_reduction"] = True
    return mapped


def fsdp_qlora(row: Row) -> Mapped:
    """Answer.AI's own script: FSDP (version 1) with the adapters wrapped apart, or its NO_SHARD form.

    The global rate is divided by the GPUs in the facts. No consumer or workstation card had NVLink. The 4090s had full
    PCIe 4.0 x16; the 3090s an "older motherboard and slow PCIe lanes", taken as PCIe 3.0 x16.
    """
    if "activation" in str(row.get("offload")):
        raise Unusable("activations offloaded too")
    setup = single.base(row) | {
        "attention": "sdpa", "precision": "bf16-pure", "method": row["method"], "adapter_dtype": "bf16",
        "lora_targets": ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"],
    }  # fmt: skip
    if row["method"] == "qlora":
        setup["quantization"] = "nf4"
    mapped = Mapped(setup, {"trainer_overhead": False, "fsdp_1": "DDP" not in row["parallelism"]})
    mapped.setup["parallel"] = "ddp" if "DDP" in row["parallelism"] else "fsdp2"
    if "DDP" not in row["parallelism"]:
        setup.setdefault("lora_rank", 64)
    if row.get("offload"):
        mapped.setup["offload"] = "parameters"
    sxm = "SXM" in row["gpu_name"]
    mapped.interconnect = None if sxm else "pcie"
    if row["gpu_name"].endswith("3090"):
        mapped.interconnect = "pcie-gen3-x16"
        mapped.assumed.append("the link of the 3090s is not named")
        mapped.loose_speed = "DDP" not in row["parallelism"]
    return mapped


def torchtitan(row: Row) -> Mapped:
    """torchtitan's own FSDP2 runs: fp32 weights, bf16 gathers, no Trainer around the loop.

    A100s: 64 in nodes of eight, the network is not named (1600 Gbit/s assumed). H100s: 96 GB HBM2e at 500 W, NVLink
    within and 400 Gbit/s per GPU between hosts; no such card in the table. "Selective op" recomputes every second
    matmul, taken as every second layer for speed.
    """
    parallelism = row["parallelism"]
    if "loat8" in parallelism or "FP8" in parallelism or "FP4" in parallelism or "fp8" in str(row.get("quantization")):
        raise Unusable("FP8 or FP4")
    if "GPT-2" in row["model_id"] or "B200" in row["gpu_name"]:
        raise Unusable("torchtitan: model shape or power limit not stated")
    if parallelism not in ("FSDP", "FSDP2", "FSDP + torch.compile"):
        raise Unusable("torchtitan: context parallelism or float8")
    kind = row.get("gradient_checkpointing")
    setup = single.base(row) | {
        "attention": "sdpa", "precision": "bf16-mixed", "method": "full", "parallel": "fsdp2",
        "checkpointing": {"full": 1, "none": 0}.get(kind, 2), "compile": bool(row.get("compile")),
        "optimizer": "adamw-fused",
    }  # fmt: skip
    mapped = Mapped(setup, {"trainer_overhead": False, "fp32_reduction": True})
    if kind in ("selective", "selective op"):
        mapped.no_memory = "selective checkpointing by operator"
        mapped.assumed.append("selective checkpointing by operator taken as every second layer")
    if "H100" in row["gpu_name"]:
        mapped.interconnect = "ib-3200" if row["n_gpus"] > 8 else None
        mapped.assumed.append("H100 at 500 W taken at the 700 W card's matmul rate")
        mapped.loose = True
    else:
        mapped.interconnect = "ib-1600"
        mapped.assumed.append("ib-1600 between nodes")
    return mapped


def torchao(row: Row) -> Mapped:
    """torchao's float8 table, the bf16 rows: torchtitan under torch.compile, selective checkpointing by operator."""
    if "none (bf16)" not in row["compute_dtype"]:
        raise Unusable("FP8")
    setup = single.base(row) | {
        "attention": "sdpa", "precision": "bf16-mixed", "method": "full", "parallel": "fsdp2", "checkpointing": 2,
        "compile": True, "optimizer": "adamw-fused",
    }  # fmt: skip
    assumed = ["selective checkpointing by operator taken as every second layer"]
    return Mapped(
        setup, {"trainer_overhead": False, "fp32_reduction": True}, assumed=assumed, loose=True, no_memory=assumed[0]
    )


def ml_engineering(row: Row) -> Mapped:
    """DeepSpeed on eight H200 or B200: ZeRO-3 with the optimizer on the host, and ZeRO-2; a bare loop.

    Flash attention 3 or 4, Liger's norms, rotary embedding and MLP with its fused loss in the offloaded runs.
    """
    liger, blackwell = "liger" in str(row.get("loss_impl")), row.get("gpu_key") == "B200"
    setup = single.base(row) | {
        "attention": "sdpa" if blackwell else "flash-attention-2", "precision": "bf16-mixed", "method": "full",
        "loss": "liger" if liger else "full", "parallel": "zero2" if "ZeRO-2" in row["parallelism"] else "zero3",
    }  # fmt: skip
    if "offload" in row["parallelism"]:
        setup["offload"] = "optimizer"
    mapped = Mapped(setup, {"trainer_overhead": False, "fused_norm_rope": liger})
    mapped.loose_memory = liger
    if liger:
        mapped.assumed.append("Liger's kernels keep other activations: memory shown apart")
    mapped.assumed.append(f"flash attention 3 and 4 taken as {'SDPA' if blackwell else '2'}")
    mapped.loose_speed = row["seq_len"] > 8192  # attention is then most of the step
    return mapped


def xtuner(row: Row) -> Mapped:
    """XTuner's speed configurations without sequence parallelism (file names *_sp1.py): ZeRO-3, micro-batch 1."""
    model, tokens, gpus = row["model_id"], row["seq_len"], row["n_gpus"]
    without = {"meta-llama/Llama-2-7b-hf": (8192, 32768), "01-ai/Yi-34B-200K": (8192,)}
    without["meta-llama/Llama-2-70b-hf"] = (8192,)
    if "sp=" in row["parallelism"]:
        if not row["parallelism"].endswith("sp=1"):
            raise Unusable("sequence parallelism")
        row = {**row, "micro_batch_size": row.get("micro_batch_size") or 1}
    elif tokens not in without.get(model, ()):
        raise Unusable("sequence parallelism")
    setup = single.base(row) | {
        "attention": "flash-attention-2", "precision": "bf16-mixed", "method": "full", "parallel": "zero3",
    }  # fmt: skip
    mapped = Mapped(setup, {"trainer_overhead": False, "reentrant_checkpointing": True, "fused_norm_rope": True})
    if gpus > 8:
        mapped.interconnect, mapped.loose_speed = "ib-1600", True
        mapped.assumed.append("ib-1600 between nodes")
    return mapped


def litgpt(row: Row) -> Mapped:
    """litgpt's eager pretraining runs on eight A100-40GB (extensions/thunder): memory only."""
    if "unclear" in row["parallelism"]:
        raise Unusable("litgpt: number of GPUs in use unclear")
    if "lit-gpt finetune" in row["parallelism"]:
        raise Unusable("FSDP 1 under no_sync kept whole gradients of frozen weights (flat parameters)")
    if "thunder" in str(row.get("compile")):
        raise Unusable("compiled by lightning-thunder")
    setup = single.base(row) | {
        "attention": "sdpa", "precision": "bf16-pure", "method": "full", "optimizer": "adamw-fused",
        "checkpointing": 0, "parallel": "ddp" if row["parallelism"] == "DDP" else "fsdp2",
    }  # fmt: skip
    mapped = Mapped(setup, no_speed="time of a single iteration")
    mapped.assumed.append("bf16-true, micro-batch 4: the script's defaults")
    return mapped


def tinyllama(row: Row) -> Mapped:
    """TinyLlama's pretraining: four nodes of four A100-40GB, lit-gpt with fused kernels; the network is not named."""
    setup = single.base(row) | {
        "attention": "flash-attention-2", "precision": "bf16-mixed", "method": "full", "parallel": "fsdp2",
        "shard_degree": 4, "checkpointing": 0, "optimizer": "adamw-fused",
    }  # fmt: skip
    conditions = {"trainer_overhead": False, "fused_norm_rope": True, "fused_loss": True}
    assumed = ["hybrid shard within nodes of four", "ib-200 between nodes"]
    return Mapped(setup, conditions, "ib-200", 4, assumed, loose=True)


def ms_swift(row: Row) -> Mapped:
    """ms-swift 1.x with one model over two A100s by `device_map`; reserved memory of both cards."""
    if "device_map" not in row["parallelism"]:
        raise Unusable("ms-swift: length or micro-batch not stated")
    setup, conditions = single.ms_swift(row)
    setup = setup | {"parallel": "device-map", "seq_len_tokens": int(row["seq_len"])}
    mapped = Mapped(setup, conditions, loose=True)
    mapped.assumed.append("speed: samples of the mean length that is at most the cap; memory: a sample at the cap")
    elsewhere = row.get("other_mem_GiB") or {}
    cards = [elsewhere[name] for name in ("gpu0", "gpu1") if isinstance(elsewhere.get(name), (int, float))]
    if cards:
        mapped.memory = ("reserved", max(cards) * GIB)
    if row.get("samples_per_s"):
        mapped.tokens_per_s = row["samples_per_s"] * single.kept_mean(row["seq_len"]) / row["n_gpus"]
        mapped.setup["speed_seq_len_tokens"] = round(single.kept_mean(row["seq_len"]))
    return mapped


SOURCES = {
    "fms_acceleration": fms,
    "llm_foundry": llm_foundry,
    "fsdp_qlora": fsdp_qlora,
    "torchtitan": torchtitan,
    "torchao": torchao,
    "ml_engineering": ml_engineering,
    "xtuner": xtuner,
    "litgpt": litgpt,
    "tinyllama": tinyllama,
    "ms_swift_benchmark": ms_swift,
}
WHY_NO_SOURCE = {
    "ms_swift_examples": "comments in example scripts: card not named, figures rounded",
    "unsloth": "Unsloth's kernels",
    "axolotl_examples": "card and metric not named",
    "deepspeed_blogs": "micro-batch and lengths not stated",
    "training_hub": "micro-batch and checkpointing not stated",
    "nemo_automodel": "checkpointing not stated, or expert parallelism",
    "misc_github": "no lengths",
    "flash_attention": "micro-batch not stated",
}


def one(row: Row) -> dict[str, Any]:
    """A point of one row, with what was measured.

    Raises:
        Unusable: with the reason.
    """
    mapper = SOURCES.get(row["source_group"])
    if mapper is None:
        raise Unusable(WHY_NO_SOURCE.get(row["source_group"], "no mapping"))
    if row["status"] not in ("ok", "oom", "oom_inferred"):
        raise Unusable("failed")
    if row["status"] != "ok" and not row.get("micro_batch_size"):
        raise Unusable("out of memory, micro-batch not stated")
    if "GPTQ" in row["model_id"] or row["method"] == "gptq-lora":
        raise Unusable("GPTQ base")
    mapped = mapper(row)
    gpu = GPUS.get(row["gpu_name"]) or single.GPUS.get(row.get("gpu_key", ""))
    if gpu is None:
        raise Unusable("card not in the table")
    speed = mapped.tokens_per_s or row.get("tokens_per_s_per_gpu")
    memory = mapped.memory
    if memory is None and row.get("peak_mem_GiB") and row.get("mem_metric_class") in METRICS:
        memory = (METRICS[row["mem_metric_class"]], row["peak_mem_GiB"] * GIB)
    if mapped.no_memory:
        memory = None
    if mapped.no_speed or row["status"] != "ok":
        speed = None
    oom = row["status"] != "ok"
    if oom and mapped.no_memory:
        raise Unusable(f"out of memory; {mapped.no_memory}")
    if speed is None and memory is None and not oom:
        raise Unusable(mapped.no_memory or mapped.no_speed or "no comparable figure")
    mapped.setup["num_gpus"] = int(row["n_gpus"])
    speed_seq = mapped.setup.pop("speed_seq_len_tokens", None)
    setup_from_dict(mapped.setup)  # raises where the planner cannot say it
    return {
        "id": row["config_id"], "source": row["source_group"], "at": row["source"], "gpu": gpu,
        "model": MODELS.get(row["model_id"], row["model_id"]), "interconnect": mapped.interconnect,
        "num_nodes": mapped.num_nodes, "setup": mapped.setup, "speed_seq_len_tokens": speed_seq,
        "conditions": mapped.conditions, "assumed": mapped.assumed, "loose": mapped.loose,
        "loose_speed": mapped.loose_speed,
        "loose_memory": mapped.loose_memory,
        "variant": row.get("variant"), "tokens_per_s": speed, "memory": memory, "no_memory": mapped.no_memory,
        "oom": oom,
    }  # fmt: skip


def merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Repeats of one configuration (other versions mostly) as one point: medians, and every figure."""
    first = dict(rows[0])
    speeds = sorted(row["tokens_per_s"] for row in rows if row["tokens_per_s"] is not None)
    kinds = [row["memory"][0] for row in rows if row["memory"] is not None]
    kind = "allocated" if "allocated" in kinds else (kinds[0] if kinds else "")
    peaks = sorted(round(row["memory"][1]) for row in rows if row["memory"] is not None and row["memory"][0] == kind)
    first["tokens_per_s"] = round(median(speeds), 1) if speeds else None
    first["repeats"] = speeds
    first["memory"] = {"what": kind, "bytes": round(median(peaks)), "repeats": peaks} if peaks else None
    model = first["model"]
    if "Mixtral" in model:
        first["experts"] = "linear"  # transformers 4 built each expert of its own matrices
    if model.startswith("Qwen/Qwen1.5") and first["source"] == "ms_swift_benchmark":
        first["fused_qkv"] = True  # the Qwen 1 code has one c_attn
    if "MPT" in model:
        name = model.split()[-1]
        width, layers, heads = MPT[name]
        config = single.mpt_config("7b", first["setup"]["seq_len_tokens"])
        first["model"] = f"mosaicml/mpt-{name}"
        first["config"] = config | {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {key: value for key, value in first.items() if value not in (None, "", [], {}, False)}


def main() -> None:
    """Reads the rows, writes the points and what was left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    text = (parser.parse_args().shared / "data" / "measurements.jsonl").read_text(encoding="utf-8")
    left_out: Counter[tuple[str, str]] = Counter()
    points: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in map(json.loads, text.splitlines()):
        if row.get("n_gpus", 1) in (None, 1):
            continue
        try:
            point = one(row)
        except Unusable as reason:
            left_out[row["source_group"], str(reason)] += 1
            continue
        points[point["source"], point["id"], str(point["oom"]), json.dumps(point["setup"], sort_keys=True)].append(
            point
        )
    lines = []
    for number, rows in enumerate(points.values()):
        point = merged(rows)
        point["id"] = f"{point['source']}-{number:03d}"
        lines.append(json.dumps(point, separators=(",", ":")))
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows_out = [{"source": s, "reason": r, "rows": n} for (s, r), n in sorted(left_out.items())]
    LEFT_OUT.write_text(json.dumps(rows_out, indent=1) + "\n", encoding="utf-8")
    print(f"{len(lines)} configurations; left out {sum(left_out.values())} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
